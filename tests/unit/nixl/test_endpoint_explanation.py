# SPDX-License-Identifier: Apache-2.0
"""The explanation of endpoints: compared with recordings of the real programs, and for arbitrary texts."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.endpoints import LEAKY
from helpers.etcd import environment, running_etcd
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nixl.checks.endpoints.deployment import Deployment, judge_form
from pytest_nixl.cli import main
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd_servers.embedded import etcd_binary
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.endpoint_explanation import Explanation, explain
from pytest_nixl.nixl.endpoint_reading import INVALID, Address, ReadOutcome, Resolver, resolve_numeric, suppose
from suites.uri_validation.corpus import Entry, load_corpus

CORPUS = load_corpus()
PORT, DEAD = 23790, 1
#: Names and addresses of the recorded etcd.
HOSTS = ("127.0.0.1", "0.0.0.0", "localhost", "LOCALHOST", "::ffff:127.0.0.1")


def _recorded_resolver(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve numeric addresses and localhost, as on the machine where the corpus was recorded."""
    if host.lower() == "localhost" and family is socket.AF_INET:
        return resolve_numeric("127.0.0.1", service, family)
    return resolve_numeric(host, service, family)


def _answered(address: Address) -> bool:
    """Whether the recorded etcd answered: it listened on IPv4 only."""
    return address.port == PORT and address.host in HOSTS


def test_the_corpus_is_large_and_has_every_outcome() -> None:
    assert len(CORPUS) >= 40
    assert len({entry.text for entry in CORPUS}) == len(CORPUS)
    assert {entry.nixl for entry in CORPUS} == set(ReadOutcome)
    wheel = Path(__file__).parents[3] / "suites/uri_validation/endpoints.toml"
    assert wheel.resolve() == Path(__file__).parents[3] / "fixtures/endpoints.toml"


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.text[:60] or "empty")
def test_the_model_agrees_with_the_recordings(entry: Entry) -> None:
    filled = entry.at(PORT, DEAD)
    explanation = explain(filled.text, _recorded_resolver)
    assert explanation.predict(_answered) is entry.nixl
    assert entry.says in explanation.nixl.reason
    assert explanation.rewrite == filled.rewrite


#: The texts of the corpus that NIXL reads and that have a form which etcdctl does not read.
NOT_OF_ETCDCTL = {
    "tcp://{host}:{port}", "etcd://{host}:{port}", "http://127.1:{port}", "http://2130706433:{port}",
    "http://{host}:0", "http://{host}:+{port}", "http://{host}:{port};http://{host}:{port}", "::ffff:{host}:{port}",
    "::1:{port}", "http://{host}: {port}", "fe80::1%lo:{dead}",
}  # fmt: skip


def test_a_form_that_etcdctl_does_not_read_is_warned_of() -> None:
    verdicts = {}
    for entry in CORPUS:
        text = entry.at(PORT, DEAD).text
        verdicts[entry.text] = judge_form(Deployment("--nixl-etcd", text, explain(text, suppose))).verdict
    assert {text for text, verdict in verdicts.items() if verdict is Verdict.WARN} == NOT_OF_ETCDCTL
    assert not any(entry.etcdctl for entry in CORPUS if entry.text in NOT_OF_ETCDCTL)
    for entry in CORPUS:
        works = explain(entry.at(PORT, DEAD).text, suppose).nixl.works
        assert (verdicts[entry.text] is Verdict.FAIL) is not works


@pytest.mark.parametrize(
    ("source", "name"),
    [("option", "--nixl-etcd"), ("ini", "the ini value nixl_etcd"), ("environment ETCD_ENDPOINTS", "ETCD_ENDPOINTS")],
)
def test_endpoints_are_named_by_where_they_come_from(
    source: str, name: str, make_settings: Callable[..., Settings]
) -> None:
    deployment = Deployment.of(make_settings(etcd="http://etcd:2379", sources={"etcd": source}), "http://ours:2379")
    assert (deployment.source, deployment.text) == (name, "http://etcd:2379")


@pytest.mark.parametrize("rewrite", sorted({entry.rewrite for entry in CORPUS if entry.rewrite}))
def test_a_rewrite_is_readable_and_stable(rewrite: str) -> None:
    text = CORPUS[0].__class__(rewrite, ReadOutcome.PUBLISHES, True, "", rewrite).at(PORT, DEAD).text
    explanation = explain(text, _recorded_resolver)
    assert explanation.nixl.works
    assert parse_endpoints(text)
    assert bool(re.search(r"[,\[]", text)) is ("the KV benchmark cannot read" in explanation.remedy)
    assert explanation.rewrite == text
    assert explanation.findings == (("NIXL-ETCD-MEMBER-DROPPED",) if "," in text and "[" in text else ())


@pytest.mark.long
def test_the_real_etcdctl_agrees_with_the_recordings() -> None:
    program = shutil.which("etcdctl") or str(Path(etcd_binary()).with_name("etcdctl"))
    with running_etcd() as etcd:
        (dead,) = free_ports(1)
        entries = [entry.at(etcd.endpoint.port, dead) for entry in CORPUS]

        def reaches(entry: Entry) -> bool:
            # Only what cannot be reached takes the whole time.
            limit = "60s" if entry.etcdctl else "1500ms"
            limits = (f"--dial-timeout={limit}", f"--command-timeout={limit}")
            argv = [program, *limits, f"--endpoints={entry.text}", "put", "/corpus", "1"]
            return subprocess.run(argv, capture_output=True, env=environment(GOMAXPROCS="1")).returncode == 0

        with ThreadPoolExecutor(8) as pool:
            real = dict(zip((entry.text for entry in entries), pool.map(reaches, entries), strict=True))
    wrong = {entry.text: real[entry.text] for entry in entries if real[entry.text] is not entry.etcdctl}
    assert not wrong, "etcdctl differs from the recording"


# Fragments that hypothesis combines in unusual ways.
PIECES = st.sampled_from(
    ["http://", "https://", "://", ":", ",", ";", "@", "/", "[", "]", "::1", "127.0.0.1", "2379", "%", "#", " ", "\n",
     '"', "'", '["', '"]', "<", ">", "+", "++", "0" * 40, "h", "localhost",
     "fe80::1%lo", "unix:", "dns:///", "ipv4:", "etcd", "user", "\x00", "\udc80", "é", "١", "0x7f", "-1", "9" * 40]
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join))


@pytest.mark.long
@settings(max_examples=600, deadline=None)
@given(TEXTS)
def test_no_text_raises_or_hangs(text: str) -> None:
    for resolver in (resolve_numeric, suppose):
        explanation = explain(text, resolver)
        assert explanation.nixl.reason
        assert explanation.nixl.works == bool(explanation.nixl.contacts)
        assert set(explanation.findings) <= set(FINDINGS)
        assert explanation.text.isprintable()
        if explanation.rewrite:
            keeps(text, explanation, resolver)


def plain(host: str) -> str:
    """Return an IPv4-mapped IPv6 address as IPv4."""
    return host.removeprefix("::ffff:") if host.count(".") == 3 else host


def keeps(text: str, explanation: Explanation, resolver: Resolver) -> None:
    """Assert that a rewrite names the hosts and ports of the text and no others."""
    again = explain(explanation.rewrite, resolver)
    assert again.nixl.works
    assert again.rewrite == explanation.rewrite
    contacts = {(plain(address.host), address.port) for address in again.nixl.contacts}
    assert {(plain(address.host), address.port) for address in explanation.nixl.contacts} <= contacts
    ports = {run.lstrip("0") for run in re.findall("[0-9]+", text)}
    for endpoint in parse_endpoints(explanation.rewrite):
        by_default = endpoint.port == 2379 and "no port is named" in explanation.remedy
        assert str(endpoint.port) in ports or by_default
        numeric = {contacts for form in (r"[0-9A-Fa-fx.]+", r"[0-9A-Fa-fx.:]+") for run in re.findall(form, text)
                   for contacts in resolve_numeric(run, "1", socket.AF_INET)}  # fmt: skip
        assert endpoint.host in text or endpoint.host in numeric or f"::ffff:{endpoint.host}" in text.lower()


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.text("SECRT/@:,;?# ", min_size=1, max_size=12), st.sampled_from(["http://", "", "https://"]))
def test_no_password_is_shown_with_any_character(password: str, scheme: str) -> None:
    text = f"{scheme}USER:{password}SECRET@127.0.0.1:2379"
    explanation = explain(text, suppose)
    message = repr((explanation.nixl.reason, explanation.nixl.notes))
    assert "USER" not in message + explanation.text + explanation.remedy
    assert "SECRET" not in message + explanation.text + explanation.remedy


@pytest.mark.parametrize("text", LEAKY)
def test_the_command_shows_neither_user_nor_password(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", text]) == 1
    output = "".join(capsys.readouterr())
    assert "USER" not in output
    assert "SECRET" not in output


def test_the_command_explains_each_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "http://127.0.0.1:2379", "127.0.0.1:2379/"]) == 1
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines() == ["http://127.0.0.1:2379", "  NIXL reads it: it contacts 127.0.0.1:2379"]
    assert second.splitlines()[0] == "127.0.0.1:2379/"
    assert second.splitlines()[1] == (
        "  NIXL does not read it: '127.0.0.1:2379/' ends with a slash, which NIXL reads as part of the port; "
        "NIXL reports only 'the target uri is not valid'"
    )
    assert second.splitlines()[-1] == "  write http://127.0.0.1:2379"


@pytest.mark.parametrize(
    ("text", "rewrite"),
    [
        ('["http://h:23790"]', "http://h:23790"),
        ("{http://h:1,http://i:2}", "http://h:1,http://i:2"),
        ("http://h:++2379", ""),
        ("+ 2379", ""),
        ("http://h: 2379", ""),
        ("a 1,i:2", "http://i:2"),
        ("2379", ""),
        ("http://h:99999", ""),
        ("http://h:237900", ""),
        ("http://h:23790x", ""),
        ("fe80::1%lo:2379", ""),
        ("[fe80::1%25lo]:2379", ""),
        ("[localhost]:23790", "http://localhost:23790"),
        ("h:000000000000000000000000000000000023790", "http://h:23790"),
        *[(text, "http://h:2379") for text in ("http:/h", "HTTPS:/h/", "https//h", "http: //h", "h:", "h:/")],
        *[
            (text, "http://h:1")
            for text in ("http//h:1", "//h:1", "http:h:1", "a+b-c.d:///h:1", "u:p@h:1", "'({[<h:1>]})'")
        ],
        *[(text, "") for text in ("http:", "HTTPS:/", "/h:1", "h:+", "h:1//", "h:1//a", "a:b:c", "h:1\\", "?h:1")],
        ("http://::1:5", "http://[::1]:5"),
        ("u@[::1]:5", "http://[::1]:5"),
        ("[::1:5", "http://[::1]:5"),
        ("u:p@q:2,u:x,y@h:1", "http://h:1"),
        ("h:1 :", ""),
        (f"h:1,{'a' * 64}:2", ""),  # a name that resolves here only, and is lost
        ("::1:x", ""),
    ],
)
def test_a_rewrite_names_the_same_host_and_port_or_is_empty(text: str, rewrite: str) -> None:
    explanation = explain(text, suppose)
    assert explanation.rewrite == rewrite
    assert rewrite or "http://HOST:PORT" in explanation.remedy


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        ("dns:h:1 ipv4:h:1 ipv6:[::1]:1 xds:h:1 dns:///h:1 xds:///h:1", "is an address in gRPC's own form"),
        ("unix:s unixs:s unix:///s", "names a socket file"),
        ("'h:1' h:1\"", "has quotes"),
        ("http://http://h:1 a://b://h:1", "has two schemes"),
        ("[::1:1", "has a bracket that is not closed"),
        ("http:/h:1 HTTPS//h:1", "has a scheme that is not followed by ://"),
        ("h:1/", "ends with a slash"),
        ("h:1/a h:1//", "has the path '/"),
        ("h:1?a", "has the path '?a'"),
        ("h:1#a", "has the path '#a'"),
        (":1 http://:1", "names no host before its port"),
        ("h http://h", "names no port"),
        ("xdns:h h:x h:1x2", "has the port '"),
    ],
)
def test_what_is_wrong_with_the_form_of_a_member_is_named(texts: str, fault: str) -> None:
    for text in texts.split(" "):
        assert explain(text, suppose).nixl.reason.startswith(f"{text!r} {fault}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *[("http://é😀:1", None), ("a\\b:1", None), ("a\x1b\u2028:1", "a\\x1b\\u2028:1")],
        *[("http://u:p@h:1", "http://***@h:1"), ("h:1?token=hunter22", "h:1?token=***")],
        ("http://u:p,x@h:1;http://v@i:2", "***@i:2"),
    ],
)
def test_a_shown_text_has_no_secret_and_nothing_that_is_not_printable(text: str, shown: str | None) -> None:
    assert explain(text, suppose).text == (shown or text)


ONLY = f"; NIXL reports only {INVALID!r}"
TLS = "if that etcd needs TLS, run `etcd grpc-proxy start` on the agent's host and give NIXL the proxy's address"
LIST, NO_LOGIN = "the KV benchmark cannot read a list: give it only", "NIXL accepts no user or password"
NO_IPV6 = "the KV benchmark cannot read an IPv6 address: give it a host name"
NO_PORT = "no port is named: 2379 is etcd's default"
RESOLVES = "HOST must resolve to an IPv4 address on the hosts of the agents"
#: The notes about a value, by NIXL's finding.
PLAINTEXT, DROPPED, SKIPPED = ("NIXL-ETCD-HTTPS-PLAINTEXT", "NIXL-ETCD-CREDENTIALS-DROPPED", "NIXL-ETCD-MEMBER-DROPPED")
TEXTS_OF = {
    PLAINTEXT: "NIXL sends plaintext to https addresses: others on the network can read addresses and memory keys, and "
    "an etcd with TLS closes the connection",
    DROPPED: "NIXL never sends the user and password to the etcd",
}


@pytest.mark.parametrize(
    ("text", "reason", "notes", "remedy"),
    [
        ("http://h:1", "it contacts 192.0.2.1:1", [], ["write http://h:1"]),
        # No resolver takes a part of 64 letters, so no such name is proposed.
        (f"http://{'a' * 63}.{'b' * 64}:1", "it contacts 192.0.2.1:1", [], ["write http://HOST:PORT", RESOLVES]),
        ("HTTPS://h:1,http://i:2", "it contacts 192.0.2.1:1 and 192.0.2.1:2", [PLAINTEXT],
         ["write http://h:1,http://i:2", TLS, f"{LIST} http://h:1"]),
        ("http://u:p@h:1", "'http://***@h:1' has a user or password, which NIXL cannot send: it reads them as part of "
         f"the host name{ONLY}", [DROPPED], ["write http://h:1", NO_LOGIN]),
        ("http://u:p,x@h:1;http://i:2",
         "it finds addresses, which are not shown because they may contain credentials",
         [DROPPED, "member 1 of 3 without a message: it has the port, which is not a number",
          "member 2 of 3 without a message: it has a user or password, which NIXL cannot send: it reads them as part "
          "of the host name"],
         ["write http://h:1,http://i:2", NO_LOGIN, f"{LIST} http://h:1"]),
        ("http://u:p,x@h", f"member 1 of 2 has the port, which is not a number{ONLY}", [DROPPED],
         ["write http://h:2379", NO_PORT, NO_LOGIN]),
        ("u:x/@h", f"it has a user or password, which NIXL cannot send: it reads them as part of the host name{ONLY}",
         [DROPPED], ["write http://h:2379", NO_PORT, NO_LOGIN]),
        ("h,i:5", "it contacts 192.0.2.1:5", ["'h' without a message: it names no port, and NIXL has no default"],
         ["write http://h:2379,http://i:5", NO_PORT, f"{LIST} http://h:2379"]),
        ("[::1]:5,h:1", "it contacts 192.0.2.1:1", ["'[::1]:5' without a message: it is an IPv6 address, which NIXL "
         "skips if another member has an IPv4 address"],
         ["write http://[::1]:5,http://h:1", f"{LIST} http://[::1]:5", NO_IPV6]),
        ("h:1,,h:2,", "it contacts 192.0.2.1:1 and 192.0.2.1:2", [], ["write http://h:1,http://h:2",
         f"{LIST} http://h:1"]),
        ("h:99999,i:1", "'h:99999' has the port '99999', which is not a number from 0 to 65535, and one such member "
         f"makes NIXL ignore the others too{ONLY}", [],
         ["write http://i:1", "the port '99999' is invalid: give a number from 1 to 65535"]),
        ("h:", f"'h:' has the port '', which is not a number from 0 to 65535{ONLY}", [],
         ["write http://h:2379", NO_PORT]),
        ("?:", f"'?:' has the path '?:', which NIXL reads as part of the address{ONLY}", [],
         ["write http://HOST:PORT", RESOLVES]),
        ("http://h:99999", f"'http://h:99999' has the port '99999', which is not a number from 0 to 65535{ONLY}", [],
         ["write http://HOST:PORT", "the port '99999' is invalid: give a number from 1 to 65535", RESOLVES]),
        ("h: 1", "it contacts 192.0.2.1:1", [], ["write http://HOST:PORT", RESOLVES]),
        (" http://h", f"' http://h' names no port, and NIXL has no default{ONLY}", [],
         ["write http://h:2379", NO_PORT]),
        *[(text, f"{text!r} has a space in it, which NIXL reads as part of the address (separate members by a comma)"
           f"{ONLY}", [], remedy) for text, remedy in (("a b:1", ["write http://a:2379,http://b:1", NO_PORT,
           f"{LIST} http://a:2379"]), ("h:1 ", ["write http://h:1"]), ("h :1", ["write http://HOST:PORT", RESOLVES]))],
        ("http://u:p@h:1;http://i:2", "it contacts 192.0.2.1:2", [DROPPED, "'http://***@h:1' without a message: it has "
         "a user or password, which NIXL cannot send: it reads them as part of the host name"],
         ["write http://h:1,http://i:2", NO_LOGIN, f"{LIST} http://h:1"]),
        ("[::ffff:127.0.0.1]:5", "it contacts [::ffff:127.0.0.1]:5", [], ["write http://127.0.0.1:5"]),
        ("unix:/s", f"'unix:/s' names a socket file, but NIXL's client connects to TCP addresses only{ONLY}", [],
         ["write http://HOST:PORT", RESOLVES]),
        ("http://h:1?token=hunter22", "'http://h:1?token=***' has the path '?token=***', which NIXL reads as part of "
         f"the address{ONLY}", [], ["write http://h:1"]),
        (",", f"'' is empty{ONLY}", [], ["write http://HOST:PORT", RESOLVES]),
        ("-h:1", f"'-h:1' has the host '-h', which does not resolve to an IPv4 address{ONLY}", [],
         ["write http://HOST:PORT", RESOLVES]),
        ("", "it is empty, and NIXL creates no agent if the variable is set but empty (before 1.5: it creates an agent "
         "without etcd)", [], ["write http://HOST:PORT", RESOLVES]),
    ],
)  # fmt: skip
def test_an_explanation_is_what_nixl_reads_and_what_to_write(
    text: str, reason: str, notes: list[str], remedy: list[str]
) -> None:
    explanation = explain(text, suppose)
    assert (explanation.nixl.reason, explanation.remedy) == (reason, "; ".join(remedy))
    assert [(note.finding, note.text) for note in explanation.nixl.notes] == [
        (note, TEXTS_OF[note]) if note in TEXTS_OF else (SKIPPED, f"NIXL skips {note}") for note in notes
    ]
    findings = [note if note in TEXTS_OF else SKIPPED for note in notes]
    assert explanation.findings == tuple(dict.fromkeys(findings))
    assert explanation.private is ("x@h" in text or "/@h" in text)


@pytest.mark.parametrize(
    ("text", "version", "answering", "outcome"),
    [
        ("h:1,h:2", "", 2, ReadOutcome.PUBLISHES),
        ("h:1,h:2", "", 3, ReadOutcome.UNREACHED),
        ("h", "", 1, ReadOutcome.INVALID),
        ("", "", 1, ReadOutcome.NO_AGENT),
        ("", "1.4.1", 1, ReadOutcome.INVALID),
    ],
)
def test_what_an_agent_will_do_follows_from_the_etcd_that_answers(
    text: str, version: str, answering: int, outcome: ReadOutcome
) -> None:
    assert explain(text, suppose).predict(lambda address: address.port == answering, version) is outcome


@pytest.mark.parametrize("length", [196, 197])
def test_a_long_value_is_shortened(length: int) -> None:
    text = f"{'a' * length}:123"
    assert explain(text, suppose).text == (text if length == 196 else f"{text[:200]}… (201 characters)")


def test_a_hundred_members_are_summarized() -> None:
    same, different = (",".join(f"http://127.0.0.1:{2379 + step * number}" for number in range(100)) for step in (0, 1))
    assert explain(same).nixl.reason == "it contacts 127.0.0.1:2379"
    assert explain(same).nixl.contacts == (Address("127.0.0.1", 2379),)
    reading = explain(different).nixl
    assert len(reading.contacts) == 100
    assert reading.reason.endswith("127.0.0.1:2386 and 92 more")
    dropped = ",".join(["http://127.0.0.1:1", *(f"http://127.0.0.1:{number}/" for number in range(100))])
    notes = explain(dropped).nixl.notes
    assert len(notes) < 12
    assert "92 more members" in notes[-1].text


def test_control_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "http://127.0.0.1:2379\x1b[31m\x07", "\x1b]0;title\x07http://127.0.0.1:1"]) == 1
    output = capsys.readouterr().out
    assert output.replace("\n", "").isprintable()
    assert "\\x1b[31m\\x07" in output


def test_the_command_without_an_endpoint_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["endpoint"])
    assert caught.value.code == 2
    assert "the following arguments are required: URL" in capsys.readouterr().err
