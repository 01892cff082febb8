# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``uri_validation`` judge the right endpoints with the right servers, and name each defect."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers.doubled_nixl import DoubledClock, nixl_error
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl import ReadOutcome
from pytest_nixl.core import polling
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.uri_validation import conftest, test_conformance, test_deployment, test_security
from suites.uri_validation.corpus import Entry, load_corpus

ENDPOINT = "http://10.0.0.1:2379"
SERVER: Any = SimpleNamespace(endpoint=ENDPOINT, client="the client")


def test_a_placeholder_is_filled_in_text_and_rewrite() -> None:
    entry = Entry("{host}:{port},{dead} {long}{host}", ReadOutcome.INVALID, True, "{port}", "{port} {host} {dead}")
    assert astuple(entry.at(1, 2)) == (
        f"127.0.0.1:1,2 {'a' * 4000}127.0.0.1",
        ReadOutcome.INVALID,
        True,
        "{port}",
        "1 127.0.0.1 2",
    )
    assert entry.at(3, 4, "h").text == f"h:3,4 {'a' * 4000}h"


@pytest.mark.parametrize(
    ("etcd", "empty", "endpoint"),
    [("http://a:1", False, ""), ("", True, ""), ("", False, ENDPOINT)],
    ids=["an etcd is set", "the variable is set and empty", "the run's own etcd"],
)
def test_a_deployment_has_its_own_endpoints_or_those_of_the_run(
    etcd: str, empty: bool, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = SimpleNamespace(etcd=etcd)
    deployment = MagicMock()
    monkeypatch.setattr(conftest, "Deployment", deployment)
    monkeypatch.setattr(conftest, "is_set_and_empty", lambda of: of is settings and empty)
    request = SimpleNamespace(getfixturevalue={"nixl_etcd": SERVER}.__getitem__)
    value = value_of(conftest.deployment, ExitStack(), request=request, nixl_settings=settings)
    assert value is deployment.of.return_value
    deployment.of.assert_called_once_with(settings, endpoint)


def test_texts_name_the_tests_etcd_and_a_port_at_which_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_conformance, "free_ports", lambda count: [7777][:count])
    texts = value_of(test_conformance.texts, ExitStack(), nixl_private_etcd=SERVER)
    assert texts == [entry.at(2379, 7777, "10.0.0.1").text for entry in load_corpus()]


@pytest.mark.parametrize(
    ("check", "judge"),
    [
        (test_deployment.test_endpoints_are_well_formed, "judge_form"),
        (test_deployment.test_endpoints_resolve, "judge_resolution"),
        (test_deployment.test_endpoints_answer_tcp, "judge_connection"),
        (test_deployment.test_endpoints_are_those_of_an_etcd, "judge_health"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_check_of_a_deployment_ends_with_its_judgement(
    check: Callable[..., None], judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = MagicMock(return_value=Judgement(Verdict.PASS, "judged"))
    monkeypatch.setattr(test_deployment, judge, judgement)
    assert conclusion_of(check, deployment="deployment") == "PASS: judged"
    judgement.assert_called_once_with("deployment")


@pytest.mark.parametrize(
    ("notes", "conclusion"),
    [
        ([], "PASS: NIXL_ETCD_ENDPOINTS=x is not affected by AN-ID"),
        (["one", "two"], "AN-ID occurs and affects: NIXL_ETCD_ENDPOINTS=x: one; two; a remedy"),
    ],
)
def test_a_deployment_that_meets_a_defect_is_affected(
    notes: list[str], conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = MagicMock(explanation=SimpleNamespace(remedy="a remedy"))
    deployment.__str__.return_value = "NIXL_ETCD_ENDPOINTS=x"  # type: ignore[attr-defined]
    notes_about = MagicMock(return_value=notes)
    monkeypatch.setattr(test_deployment, "notes_about", notes_about)
    check = test_deployment.test_endpoints_meet_no_known_defect
    assert conclusion_of(check, id="AN-ID", deployment=deployment) == conclusion
    notes_about.assert_called_once_with(deployment, "AN-ID")


# Known defects, on private servers

HTTPS = "NIXL-ETCD-HTTPS-PLAINTEXT {}: a connection to https:// begins with {!r}"
PREFACE, HANDSHAKE = b"PRI * HTTP/2.0", b"\x16\x03\x01"


@pytest.mark.parametrize(
    ("first_bytes", "conclusion"),
    [
        (PREFACE + b"\r\n\r\nSM", HTTPS.format("occurs", PREFACE)),
        (HANDSHAKE, HTTPS.format("does not occur", HANDSHAKE)),
        (
            b"GET / HTTP/1.1",
            "AssertionError: the agent's first bytes are b'GET / HTTP/1.1', which is neither HTTP/2 nor TLS",
        ),
    ],
)
def test_the_first_bytes_of_an_agent_tell_whether_it_encrypts(first_bytes: bytes, conclusion: str) -> None:
    starts: list[Any] = []

    def another(name: str, *, environment: dict[str, str], **options: Any) -> None:
        starts.append((name, options, environment["NIXL_ETCD_NAMESPACE"]))
        scheme, _, port = environment["NIXL_ETCD_ENDPOINTS"].rpartition(":")
        assert scheme == "https://127.0.0.1"
        socket.create_connection(("127.0.0.1", int(port))).close()  # a connection without a byte does not count
        with socket.create_connection(("127.0.0.1", int(port))) as connection:  # nor does one that is reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            connection.sendall(first_bytes)

    agent, settings = SimpleNamespace(another=another), SimpleNamespace(timeout=60.0)
    assert ending_of(test_security.test_https_is_encrypted, nixl_agent=agent, nixl_settings=settings) == conclusion
    assert starts == [("speaker", {"backends": [], "listen_thread": True}, "/https")]


def test_an_agent_that_never_connects_is_awaited_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    agent, settings = MagicMock(), SimpleNamespace(timeout=0.02)
    ending = ending_of(test_security.test_https_is_encrypted, nixl_agent=agent, nixl_settings=settings)
    assert (ending, errors) == ("LateError: waited 0.02 s for an agent to speak to its etcd", [])


@pytest.mark.parametrize(
    ("outcome", "occurs"), [(ReadOutcome.PUBLISHES, "does not occur"), (ReadOutcome.INVALID, "occurs")]
)
def test_an_agent_that_reaches_an_etcd_without_a_password_uses_its_credentials(
    outcome: ReadOutcome, occurs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = MagicMock(return_value=[SimpleNamespace(outcome=outcome, message="a message")])
    monkeypatch.setattr(test_security, "try_texts", trial)
    monkeypatch.setattr(test_security, "supervisor", lambda: "the supervisor")
    conclusion = conclusion_of(
        test_security.test_credentials_are_used, nixl_private_etcd=SERVER, nixl_settings="settings"
    )
    assert conclusion == (
        f"NIXL-ETCD-CREDENTIALS-DROPPED {occurs}: with http://user:password@… of a healthy etcd an agent {outcome} and "
        "wrote 'a message'"
    )
    texts = {"http://user:password@10.0.0.1:2379": ReadOutcome.INVALID}
    trial.assert_called_once_with(texts, "the client", "settings", "the supervisor", namespace="/trial")


FAILED = "Failed to store agent member prefix key in etcd: the target uri is not valid"
FIRST_OF_TWO = "of two members, the first with a slash after its port, NIXL used the second and wrote"
MEMBERS = f"NIXL-ETCD-MEMBER-DROPPED {{}}: {FIRST_OF_TWO} "


@pytest.mark.parametrize(
    ("published", "output", "conclusion"),
    [
        (True, "a line\nbad http://10.0.0.1:2379/", f"{MEMBERS.format('does not occur')}['bad http://10.0.0.1:2379/']"),
        (True, "a line", f"{MEMBERS.format('occurs')}nothing"),
        (
            False,
            FAILED,
            "LateError: waited 5 s for an agent to use the good one of two members\n"
            "remedy: the target uri is not valid",
        ),
    ],
)
def test_a_member_that_nixl_cannot_read_is_to_be_named(
    published: bool, output: str, conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, keys = DoubledClock(), dict[str, bytes]()
    monkeypatch.setattr(polling, "time", clock)
    if published:
        clock.after(1, lambda: keys.update({"/members/member/": b""}))
    member = SimpleNamespace(name="member", worker=SimpleNamespace(output=lambda: output))
    agent = MagicMock()
    agent.another.return_value = member
    server = SimpleNamespace(endpoint=ENDPOINT, client=keys)
    check = test_security.test_a_member_that_cannot_be_read_is_reported
    settings = SimpleNamespace(timeout=5.0)
    assert ending_of(check, nixl_private_etcd=server, nixl_agent=agent, nixl_settings=settings) == conclusion
    environment = {"NIXL_ETCD_ENDPOINTS": f"{ENDPOINT}/,{ENDPOINT}", "NIXL_ETCD_NAMESPACE": "/members"}
    agent.another.assert_called_once_with("member", backends=[], listen_thread=True, environment=environment)


SILENT = "NIXL-ETCD-SILENT-FAILURE {}: with an endpoint that NIXL cannot read, send_local_metadata() {}"


@pytest.mark.parametrize(
    ("error", "stored", "conclusion"),
    [
        (None, 0, SILENT.format("occurs", "returned, but nothing is in etcd")),
        (nixl_error("no", "nixlBackendError"), 0, SILENT.format("does not occur", "raised nixlBackendError")),
        (
            None,
            1,
            "AssertionError: NIXL published through an endpoint with a slash after its port: see endpoints-conform",
        ),
    ],
)
def test_a_failure_to_publish_is_to_be_raised(error: Exception | None, stored: int, conclusion: str) -> None:
    agent, client = MagicMock(), MagicMock()
    publisher = agent.another.return_value
    publisher.send_local_metadata.side_effect = error
    client.count_prefix.return_value = stored
    ending = ending_of(
        test_security.test_a_failure_to_publish_is_raised,
        nixl_private_etcd=SimpleNamespace(endpoint=ENDPOINT, client=client),
        nixl_agent=agent,
        nixl_settings=SimpleNamespace(),
    )
    assert ending == conclusion
    environment = {"NIXL_ETCD_ENDPOINTS": f"{ENDPOINT}/", "NIXL_ETCD_NAMESPACE": "/silent"}
    agent.another.assert_called_once_with("silent", listen_thread=True, environment=environment)
    publisher.register.assert_called_once_with(publisher.allocate.return_value)
    client.count_prefix.assert_called_once_with("/silent/")
