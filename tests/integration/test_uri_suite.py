# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite uri_validation detects its fault, with real agents and real etcds."""

from __future__ import annotations

import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import run
from helpers.etcd import Certificates, Etcd, running_etcd, turn_authentication_on

from pytest_nixl.checks.endpoints import client_library, deployment
from pytest_nixl.checks.endpoints.client_library import judge_library, judge_patch
from pytest_nixl.checks.endpoints.deployment import (
    Deployment,
    judge_connection,
    judge_form,
    judge_health,
    judge_publication,
    judge_resolution,
    notes_about,
)
from pytest_nixl.checks.endpoints.trial import try_texts
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoint, parse_endpoints
from pytest_nixl.etcd_servers.embedded import etcd_binary
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary, loaded_etcd_client
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import ReadOutcome
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.settings import read_settings
from suites.uri_validation.corpus import load_corpus

pytestmark = pytest.mark.long

SUITE = "suites/uri_validation"
DEPLOYMENT = f"{SUITE}/test_deployment.py"
CORPUS = load_corpus()


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


Judge = Callable[..., dict[str, Judgement]]


@pytest.fixture
def judge(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judge a deployment with these variables, as the suite's tests do; return the judgements by check."""
    monkeypatch.setattr(deployment, "SILENCE", 60.0)  # what NIXL writes may come late on a busy machine

    def judge(**variables: str) -> dict[str, Judgement]:
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", variables["NIXL_ETCD_ENDPOINTS"])
        settings = replace(read_settings(pytestconfig, environ=variables), timeout=60.0)
        judged = Deployment.of(settings, "")
        return {
            "form": judge_form(judged),
            "resolve": judge_resolution(judged),
            "connect": judge_connection(judged),
            "healthy": judge_health(judged),
            "publish": judge_publication(judged, settings, supervisor()),
        }

    return judge


def _keys(etcd: Etcd) -> int:
    with connect([etcd.endpoint]) as client:
        return client.count_prefix("/")


def test_a_healthy_deployment_passes_and_leaves_no_keys(etcd: Etcd) -> None:
    before = _keys(etcd)
    # HTTPS-PLAINTEXT, SILENT-FAILURE, CREDENTIALS-DROPPED and MEMBER-DROPPED.
    limits = "4 known limits of NIXL ..., seen only under conditions that the checks made: "
    done = run(SUITE, env={"NIXL_ETCD_ENDPOINTS": etcd.url})
    done.expect(0, "NIXL verdict: PASS (16 PASS; 0 rows measured)", limits, never=["WARN"])
    assert _keys(etcd) == before


def test_agents_that_only_use_storage_have_nothing_to_publish(etcd: Etcd, judge: Judge) -> None:
    judgements = judge(NIXL_ETCD_ENDPOINTS=etcd.url, NIXL_BACKEND="POSIX")
    publication = judgements.pop("publish")
    assert {judgement.verdict for judgement in judgements.values()} == {Verdict.PASS}
    assert publication.verdict is Verdict.NOT_APPLICABLE
    assert publication.reason.startswith("--nixl-backend=POSIX moves bytes only to storage")


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.text[:60] or "empty")
def test_each_broken_form_is_reported_with_cause_and_rewrite(entry: object, etcd: Etcd) -> None:
    """Test the judgements without an agent for the whole corpus. The next test runs one value of each check."""
    from suites.uri_validation.corpus import Entry

    assert isinstance(entry, Entry)
    (dead,) = free_ports(1)
    filled = entry.at(etcd.endpoint.port, dead)
    deployment = Deployment("NIXL_ETCD_ENDPOINTS", filled.text, explain(filled.text))
    judgements = [judge_form(deployment), judge_resolution(deployment)]
    failed = [judgement for judgement in judgements if judgement.verdict is Verdict.FAIL]
    if entry.nixl in (ReadOutcome.INVALID, ReadOutcome.NO_AGENT):
        assert failed, "a form that NIXL does not read must fail"
    else:
        assert not failed
    for judgement in failed:
        assert judgement.reason.startswith(f"NIXL_ETCD_ENDPOINTS={deployment.explanation.text}: ")
        assert entry.says in judgement.reason
        # Even if a name does not resolve, the text may say what is meant.
        assert f"write {filled.rewrite or 'http://'}" in judgement.remedy
    if "https" in filled.text.lower():
        assert notes_about(deployment, "NIXL-ETCD-HTTPS-PLAINTEXT")
    if "@" in filled.text:
        assert notes_about(deployment, "NIXL-ETCD-CREDENTIALS-DROPPED")


@pytest.mark.parametrize(
    ("form", "verdicts"),
    [
        ("http://{}/", {"form": ("FAIL", "ends with a slash", "in the deployment, write http://{}"),
                        "publish": ("FAIL", "NIXL wrote 'the target uri is not valid'")}),
        ("http://user:secret@{}", {"form": ("FAIL", "has a user or password, which NIXL cannot send"),
                                   "publish": ("FAIL", "NIXL_ETCD_ENDPOINTS=http://***@{}")}),
        ("http://nowhere.invalid:2379", {"resolve": ("FAIL", "does not resolve to an IPv4 address", "getent ahostsv4"),
                                         "healthy": ("FAIL", "1 of 1: "),
                                         "publish": ("FAIL", "nothing is in etcd")}),
        ("http://127.0.0.1:1", {"connect": ("FAIL", "127.0.0.1:1: connection refused"), "healthy": ("FAIL", ""),
                                "publish": ("FAIL", "Connection refused")}),
        ("http://127.0.0.1:1,http://{}", {"connect": ("WARN", "1 of 2 do not answer: 127.0.0.1:1: connection"),
                                          "healthy": ("WARN", "1 of 2: ")}),
        ("tcp://{}", {"form": ("WARN", "NIXL reads it, but etcdctl does not", "write http://{}")}),
        ("", {"form": ("FAIL", "it is empty"), "publish": ("FAIL", "")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_deployment_with_a_broken_form_fails(
    form: str, verdicts: dict[str, tuple[str, ...]], etcd: Etcd, judge: Judge
) -> None:
    bare = str(etcd.endpoint).removeprefix("http://")
    judgements = judge(NIXL_ETCD_ENDPOINTS=form.replace("{}", bare))
    for check, judgement in judgements.items():
        verdict, *parts = verdicts.get(check, ("PASS",))
        text = f"{judgement.reason}; remedy: {judgement.remedy}"
        assert judgement.verdict.value == verdict or (verdict == "PASS" and judgement.verdict is Verdict.NOT_APPLICABLE)
        assert all(part.replace("{}", bare) in text for part in parts), text
        assert "secret" not in text


def test_the_suite_names_each_fault_of_a_deployment_and_its_findings(etcd: Etcd, tmp_path: Path) -> None:
    """Of the findings one is accepted, one no longer, and one not."""
    profile = tmp_path / "mine.toml"
    accepts = (("NIXL-ETCD-HTTPS-PLAINTEXT", 2999), ("NIXL-ETCD-MEMBER-DROPPED", 2020))
    accept = '[[accept]]\nid = "{}"\nreason = "on one rack"\nexpires = {}-12-31\n'
    profile.write_text('[profile]\nname = "mine"\n' + "".join(accept.format(*values) for values in accepts))
    bare = etcd.url.removeprefix("http://")
    endpoints = f"http://127.0.0.1:1,http://user:secret@{bare},https://{bare}"
    done = run(DEPLOYMENT, f"--nixl-profile={profile}", "--nixl-timeout=60s", env={"NIXL_ETCD_ENDPOINTS": endpoints})
    done.expect(
        1,
        "WARN endpoints-connect: NIXL_ETCD_ENDPOINTS=",
        "WARN endpoints-healthy: NIXL_ETCD_ENDPOINTS=",
        "WARN NIXL-ETCD-HTTPS-PLAINTEXT: ... 2999-12-31 (on one rack): ",
        "FAIL NIXL-ETCD-MEMBER-DROPPED: ... 2020-12-31 (on one rack): ... without a message",
        "FAIL NIXL-ETCD-CREDENTIALS-DROPPED: NIXL",
        never=["Traceback", "secret"],
    )


@pytest.fixture(scope="module")
def mutual(certificates: Certificates) -> Iterator[Etcd]:
    """An etcd that wants a certificate of its clients."""
    with running_etcd(*certificates.mutual(certificates.server), scheme="https") as started:
        yield started


def assert_secured(judgements: dict[str, Judgement], reason: str, remedy: str) -> None:
    assert judgements["healthy"].verdict is Verdict.PASS, "pytest-nixl's own client has access"
    assert judgements["publish"].verdict is Verdict.FAIL
    assert reason in judgements["publish"].reason
    assert remedy in judgements["publish"].remedy
    assert "pw" not in str(judgements)


def test_an_etcd_with_tls_is_reported_with_a_remedy(mutual: Etcd, certificates: Certificates, judge: Judge) -> None:
    client = {"ETCDCTL_CERT": certificates.client, "ETCDCTL_KEY": certificates.client}
    judgements = judge(NIXL_ETCD_ENDPOINTS=mutual.url, ETCDCTL_CACERT=certificates.ca, **client)
    assert_secured(judgements, "that etcd speaks TLS", "run `etcd grpc-proxy start --endpoints https://")


def test_an_etcd_with_a_password_is_reported_with_a_remedy(judge: Judge) -> None:
    with running_etcd() as etcd:
        turn_authentication_on(etcd.url)
        judgements = judge(NIXL_ETCD_ENDPOINTS=etcd.url, ETCDCTL_USER="root:pw")
    assert_secured(judgements, "that etcd asks for a user and password", "a grpc-proxy does not help here")


def test_an_etcd_with_mutual_tls_is_reachable_through_a_grpc_proxy(
    mutual: Etcd, certificates: Certificates, agents: Agents, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    # The proxy reads the first block of the file, which must not be the key.
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(_certificate_alone(certificates.client))
    proxy = supervisor().spawn(
        [etcd_binary(), "grpc-proxy", "start", f"--endpoints={mutual.url}", f"--cacert={certificates.ca}",
         f"--cert={certificate}", f"--key={certificates.client}", f"--listen-addr=127.0.0.1:{port}"],
        log=f"proxy-{port}.log",
    )  # fmt: skip
    try:
        environment = {"NIXL_ETCD_ENDPOINTS": f"http://127.0.0.1:{port}", "NIXL_ETCD_NAMESPACE": "/proxied"}
        _wait_for_port(port)
        first, second = (
            agents.start(name, environment=environment, listen_thread=True) for name in ("first", "second")
        )
        key = certificates.client
        with connect([mutual.endpoint], cacert=certificates.ca, cert=key, key=key) as client:
            _meet(first, second, client)
            _meet(second, first, client)
    finally:
        supervisor().stop(proxy)


def _certificate_alone(file: str) -> str:
    text = Path(file).read_text()
    return text[text.index("-----BEGIN CERTIFICATE-----") :]


def _wait_for_port(port: int) -> None:
    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_until(listens, "the grpc-proxy to listen", seconds=60)


def _meet(publisher: NixlAgent, finder: NixlAgent, client: EtcdClient) -> None:
    publisher.register(publisher.allocate(4096))
    publisher.send_local_metadata()
    key = f"/proxied/{publisher.name}/metadata"
    wait_until(lambda: client.get(key), f"{publisher.name} to publish through the proxy", seconds=60)
    finder.fetch_remote_metadata(publisher.name)
    wait_until(
        lambda: finder.check_remote_metadata(publisher.name), f"{finder.name} to find {publisher.name}", seconds=60
    )


#: There is no NIXL that reads a text differently, and no suggestion that is wrong: both are made.
WRONG = """
import pytest_nixl.checks.endpoints.trial as trial
import pytest_nixl.nixl.endpoint_reading as reading

read_port = reading.read_port
reading.read_port = lambda text: 0 if text == "99999" else read_port(text)
trial.SILENCE = 60.0  # NIXL writes a message about this text, which on a busy machine may come late
trial.judge_readings = lambda texts, *more, judge=trial.judge_readings: judge(
    [text for text in texts if text.endswith(":99999")], *more)
trial.suggestions = lambda texts, port: ["http://127.0.0.1:1"]
"""


def test_a_wrong_prediction_and_a_rewrite_that_does_not_work_fail_the_suite() -> None:
    done = run(f"{SUITE}/test_conformance.py", "--nixl-timeout=60s", "--nixl-etcd-server=embedded", fault=WRONG)
    done.expect(
        1,
        "FAIL endpoints-conform: 2 of ... texts are not read as predicted: 'http://127.0.0.1:99999': predicted: "
        "reads an address where nothing answers; NIXL ...: reads no address (...the target uri is not valid",
        "remedy: report this output with the version of NIXL",
        "FAIL endpoint-rewrites-work: suggested values that do not work: http://127.0.0.1:1: ",
    )


#: A plugin that presents NIXL's plaintext as a TLS handshake, because there is no NIXL that speaks TLS.
ENCRYPTS = """
import suites.uri_validation.test_security as suite
heard = suite._Listener.heard
suite._Listener.heard = lambda self: b"\\x16\\x03\\x01" if heard(self) else b""
"""


def test_an_accepted_finding_that_no_longer_occurs_fails(tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(
        '[profile]\nname = "mine"\n[[accept]]\nid = "NIXL-ETCD-HTTPS-PLAINTEXT"\nreason = "r"\nexpires = 2999-12-31\n'
    )
    run(f"{SUITE}/test_security.py", "-k", "https", f"--nixl-profile={profile}", fault=ENCRYPTS).expect(
        1,
        "FAIL NIXL-ETCD-HTTPS-PLAINTEXT: the profile accepts this finding, but it no longer occurs",
        "remedy: remove the [[accept]] of NIXL-ETCD-HTTPS-PLAINTEXT from the profile",
    )


@pytest.fixture(scope="module")
def library(make_settings: Callable[..., Settings]) -> EtcdLibrary:
    """The etcd client library that the real NIXL loads."""
    with Agents(LocalHost(supervisor()), make_settings()) as agents:
        results = loaded_etcd_client(agents.start(backends=[]).worker.pid)
    assert results is not None
    return results


def _patched(library: EtcdLibrary, folder: Path) -> Path:
    """Return a copy with the patch's string appended, which has no effect. The real patch is not available."""
    copy = folder / Path(library.path).name
    copy.write_bytes(Path(library.path).read_bytes() + URI_PATCH.encode() + b"\0")
    return copy


def test_a_variable_without_the_patch_warns(library: EtcdLibrary) -> None:
    done = run(f"{SUITE}/test_library.py", "-k", "patch", "--nixl-etcd-server=embedded", env={URI_PATCH: "1"})
    done.expect(
        0,
        f"WARN uri-validation-patch: {URI_PATCH} is not in {library.path}; {URI_PATCH} is set to '1'; tried"
        "... it has no effect",
        f"remedy: unset {URI_PATCH}: ",
    )


def test_a_library_with_the_patch_is_found_by_its_path(library: EtcdLibrary, agents: Agents, tmp_path: Path) -> None:
    copy = _patched(library, tmp_path)
    variables = {"LD_PRELOAD": str(copy), "LD_LIBRARY_PATH": str(Path(library.path).parent)}
    loaded = loaded_etcd_client(agents.start("patched", backends=[], environment=variables).worker.pid)
    assert loaded is not None
    assert (loaded.path, loaded.patched, library.patched) == (str(copy), True, False)


def test_an_effect_of_the_variable_is_reported(
    nixl_private_etcd: PrivateEtcd, library: EtcdLibrary, make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The outcome is faked, because no library with the real patch is available."""
    monkeypatch.setenv(URI_PATCH, "1")
    monkeypatch.setattr(
        client_library, "outcome_with",
        lambda text, setting, *_: ReadOutcome.PUBLISHES if setting else ReadOutcome.INVALID,
    )  # fmt: skip
    (endpoint,) = parse_endpoints(nixl_private_etcd.endpoint)
    judgement = judge_patch(
        replace(library, patched=True), endpoint, nixl_private_etcd.client, make_settings(), supervisor()
    )
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason.startswith(f"{URI_PATCH} is in {library.path}; {URI_PATCH} is set to '1'; tried with")
    assert judgement.reason.endswith("with it an agent publishes, without it reads no address")


def test_a_nixlbench_with_another_library_is_reported(
    library: EtcdLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of NIXL that links the same etcd client stands in for nixlbench."""
    program = tmp_path / "bin" / "nixlbench"
    program.parent.mkdir()
    shutil.copy(_linked_to(library), program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    other, loaded = _patched(library, tmp_path), Path(library.path)
    # Only ldd uses these paths. NIXL's own files contain the path of their library.
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{loaded.parent}")
    same = judge_library(library)
    assert same == Judgement(Verdict.PASS, f"NIXL loads {loaded}, and {program} loads the same from {loaded}")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{other.parent}:{loaded.parent}")
    differs = judge_library(library)
    assert differs.verdict is Verdict.WARN
    assert differs.reason == (
        f"NIXL loads {loaded}, but {program} loads another one, {other} (only that of nixlbench has {URI_PATCH})"
    )


def _linked_to(library: EtcdLibrary) -> Path:
    """Return a file of the wheel that needs the etcd client library."""
    name = Path(library.path).name.encode()
    for path in sorted(Path(library.path).parents[1].rglob("*.so*")):
        if path.is_file() and path != Path(library.path) and name in path.read_bytes():
            return path
    raise AssertionError("no file of the wheel links the etcd client library")


def test_outcomes_are_distinguished_for_each_version_of_nixl(
    etcd: Etcd, make_settings: Callable[..., Settings]
) -> None:
    """A trial distinguishes agents that publish, cannot read their endpoint, or cannot reach it."""
    texts = {
        etcd.url: ReadOutcome.PUBLISHES,
        f"{etcd.url}/": ReadOutcome.INVALID,
        "http://127.0.0.1:1": ReadOutcome.UNREACHED,
        "": ReadOutcome.NO_AGENT,
    }
    with connect([parse_endpoint(etcd.url)]) as client:
        trials = list(try_texts(texts, client, make_settings(timeout=120.0), supervisor(), namespace="/trials"))
        client.delete_prefix("/trials/")
    assert [trial.text for trial in trials] == list(texts)
    assert all(trial.agrees(texts[trial.text]) for trial in trials)
    assert not any(trial.agrees(ReadOutcome.PUBLISHES) for trial in trials[1:])
