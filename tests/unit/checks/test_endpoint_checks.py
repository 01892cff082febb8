# SPDX-License-Identifier: Apache-2.0
"""The judgements of endpoints without agents: ``tests/integration/test_uri_suite.py`` has real ones."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.endpoints import client_library, deployment, trial
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
from pytest_nixl.checks.endpoints.trial import (
    EndpointTrial,
    complaint,
    judge_readings,
    judge_suggestions,
    suggestions,
    try_texts,
)
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import INVALID as INVALID_URI
from pytest_nixl.nixl.endpoint_reading import ReadOutcome, suppose
from pytest_nixl.processes.worker_errors import WorkerError

PUBLISHES, UNREACHED, INVALID, NO_AGENT = ReadOutcome


def deployed(text: str, source: str = "X", resolver: Any = suppose) -> Deployment:
    return Deployment(source, text, explain(text, resolver))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the network, in which port 1 answers, port 2 refuses, and port 3 is silent."""

    def create_connection(address: tuple[str, int], timeout: float) -> Any:
        if address[1] > 1:
            raise [ConnectionRefusedError(111, "Connection refused"), TimeoutError()][address[1] - 2]
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", create_connection)


@pytest.mark.parametrize(
    ("etcd", "source", "variable", "shown"),
    [
        ("http://h:1", "option", None, "--nixl-etcd=http://h:1"),
        ("http://h:1", "ini", "", "http://h:1"),  # the source is several words
        ("http://h:1", "environment ETCD_ENDPOINTS", None, "ETCD_ENDPOINTS=http://h:1"),
        ("", "", "", "NIXL_ETCD_ENDPOINTS="),
        ("", "", None, "http://127.0.0.1:9"),
    ],
)
def test_a_deployment_is_named_by_where_its_value_comes_from(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, etcd: str, source: str,
    variable: str | None, shown: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("NIXL_ETCD_ENDPOINTS", raising=False)
    if variable is not None:
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", variable)
    settings = make_settings(etcd=etcd, sources={"etcd": source}, etcd_user="u:p")
    named = Deployment.of(settings, "http://127.0.0.1:9")
    assert str(named) == shown
    assert named.credentials.get("user") == ("u" if etcd else None)


@pytest.mark.parametrize(
    ("text", "secret", "served"),
    [
        ("https://h:1", False, "http"), ("https://h:1", True, "https"), ("https://h:2", False, "https"),
        ("h:1", False, "http"),
    ],
)  # fmt: skip
def test_plaintext_is_used_as_such_unless_a_password_would_be_sent(
    monkeypatch: pytest.MonkeyPatch, text: str, secret: bool, served: str
) -> None:
    monkeypatch.setattr(deployment, "speaks_http", lambda endpoint: endpoint.port == 1)
    credentials: Any = {"user": "u"} if secret else {}
    endpoints = Deployment("X", text, explain(text, suppose), credentials).endpoints()
    assert endpoints == (Endpoint(served, "h", int(text[-1])),)
    assert deployed("").endpoints() == ()


FORM = "in the deployment, write http://"


@pytest.mark.parametrize(
    ("judge", "text", "verdict", "reason", "remedy"),
    [
        (judge_form, "http://h:1", Verdict.PASS, "X=http://h:1", ""),
        (judge_form, "h:1,127.1:1", Verdict.PASS, "X=h:1,127.1:1", ""),
        (judge_form, "127.1:1", Verdict.WARN, "X=127.1:1: NIXL reads it, but etcdctl does not: it needs "
         "[http://]HOST:PORT, and commas in a list", f"{FORM}127.0.0.1:1"),
        (judge_form, "h", Verdict.FAIL, "X=h: 'h' names no port, and NIXL has no default; NIXL reports only 'the "
         "target uri is not valid'", f"{FORM}h:2379; no port is named: 2379 is etcd's default"),
        (judge_resolution, "h", Verdict.NOT_APPLICABLE, f"X=h: {deployment.UNREADABLE}", ""),
        (judge_resolution, "h:1", Verdict.PASS, "X=h:1: it contacts 192.0.2.1:1", ""),
        (judge_connection, "h", Verdict.NOT_APPLICABLE, "X=h: NIXL reads no address from it", ""),
        (judge_connection, "h:1,[::1]:1", Verdict.PASS, "X=h:1,[::1]:1: 1 of 1 answer", ""),
        (judge_connection, "h:1,h:2", Verdict.WARN, "X=h:1,h:2: 1 of 2 do not answer: 192.0.2.1:2: connection refused",
         "start that etcd, or correct host and port; if nothing answers, check firewalls and network policies"),
        (judge_connection, "h:3,h:2", Verdict.FAIL, "X=h:3,h:2: 192.0.2.1:3: no connection within 3 s; 192.0.2.1:2: "
         "connection refused",
         "start that etcd, or correct host and port; if nothing answers, check firewalls and network policies"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("network")
def test_form_resolution_and_connection_are_judged_apart(
    judge: Callable[[Deployment], Judgement], text: str, verdict: Verdict, reason: str, remedy: str
) -> None:
    assert judge(deployed(text)) == Judgement(verdict, reason, remedy)


def test_a_name_that_does_not_resolve_here_fails() -> None:
    judged = judge_resolution(deployed("h:1", resolver=lambda *_: ()))
    assert judged.verdict is Verdict.FAIL
    assert judged.reason.startswith("X=h:1: ")
    assert judged.remedy.endswith("; check how this host resolves the name: getent ahostsv4 HOST")
    dropped = deployed("http://[::1]:1,10.0.0.1:9")
    assert len(notes_about(dropped, "NIXL-ETCD-MEMBER-DROPPED")) == 1
    assert notes_about(dropped, "NIXL-ETCD-CREDENTIALS-DROPPED") == []


@pytest.mark.parametrize(
    ("text", "verdict", "reason", "remedy"),
    [
        ("h:1,h:1,h:2", Verdict.PASS, "X=h:1,h:1,h:2: etcd 3.1 and 3.2", ""),
        ("h:7,h:1,h:8", Verdict.WARN, "X=h:7,h:1,h:8: 2 of 3: 7 failed; 8 failed", "mend 7"),
        ("h:8,h:8", Verdict.FAIL, "X=h:8,h:8: 2 of 2: 8 failed", "mend 8"),
        ("", Verdict.NOT_APPLICABLE, "X=: no address can be read from it: see endpoints-well-formed", ""),
    ],
)
def test_health_is_that_of_each_member(
    monkeypatch: pytest.MonkeyPatch, text: str, verdict: Verdict, reason: str, remedy: str
) -> None:
    @contextmanager
    def connect(endpoints: list[Endpoint], **credentials: str) -> Iterator[Any]:
        [endpoint] = endpoints
        if endpoint.port > 2:
            raise EtcdError(f"{endpoint.port} failed", f"mend {endpoint.port}")
        yield SimpleNamespace(version=lambda: f"3.{endpoint.port}")

    monkeypatch.setattr(deployment, "connect", connect)
    assert judge_health(deployed(text)) == Judgement(verdict, reason, remedy)


NOTHING_THERE = "{}: an agent published, but nothing is in etcd, and Python got no error: NIXL wrote {}"


class PublishingAgents:
    """Doubles of an etcd and of agents that publish to it, which keep what they are asked for.

    :param stored: whether the metadata comes to etcd; None: the etcd does not answer.
    :param wrote: what NIXL writes about it.
    :param error: what happens when the agent starts.
    """

    def __init__(self, stored: bool | None, wrote: str = "", error: str = "") -> None:
        self.stored, self.wrote, self.error = stored, wrote, error
        self.calls: list[str] = []

    @contextmanager
    def connect(self, endpoints: tuple[Endpoint, ...], **credentials: str) -> Iterator[Any]:
        yield self

    def count_prefix(self, prefix: str) -> None:
        if self.stored is None:
            raise EtcdError("it does not answer")

    def get(self, key: str) -> bytes | None:
        assert key == f"{self.namespace}/publisher/metadata"
        return b"metadata" if self.stored else None

    def delete_prefix(self, prefix: str) -> None:
        self.calls.append("deleted" if prefix == f"{self.namespace}/" else prefix)

    def watch_prefix(self, prefix: str, endpoints: Any, **credentials: str) -> None:
        self.calls.append("watched")

    def unwatch_prefix(self, prefix: str, endpoints: Any) -> None:
        self.calls.append("unwatched")

    @contextmanager
    def agents(self, host: Any, settings: Settings) -> Iterator[Any]:
        yield self

    def start(self, name: str, *, environment: dict[str, str], listen_thread: bool) -> Any:
        self.endpoints, self.namespace = environment["NIXL_ETCD_ENDPOINTS"], environment["NIXL_ETCD_NAMESPACE"]
        if self.error:
            raise WorkerError(self.error)
        wrote = f"Failed to store agent {name} prefix key in etcd: {self.wrote}" if self.wrote else ""
        agent = MagicMock(**{"worker.output.return_value": wrote})
        agent.name, agent.send_local_metadata = name, lambda: self.calls.append("published")
        return agent


LOOK = "see the checks endpoints-connect and endpoints-healthy, and the output of `pytest-nixl endpoint`"


@pytest.mark.parametrize(
    ("text", "etcd", "verdict", "reason", "remedy", "calls"),
    [
        ("h:1", PublishingAgents(True), Verdict.PASS, "X=h:1: an agent's metadata is in etcd", "", "published deleted"),
        ("h:1", PublishingAgents(False, "it is silent"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:1", "'it is silent'; it contacts 192.0.2.1:1"), LOOK, "published deleted"),
        ("h:1", PublishingAgents(None), Verdict.FAIL, NOTHING_THERE.format("X=h:1", "nothing; it contacts 192.0.2.1:1"),
         LOOK, "published"),
        ("h:1", PublishingAgents(False, "the user name is empty"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:1", "'the user name is empty'; that etcd asks for a user and password, which NIXL "
                              "cannot send"),
         "give NIXL an etcd without authentication on a separate network; a grpc-proxy does not help here",
         "published deleted"),
        ("h:9,h:8", PublishingAgents(False, "it is silent"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:9,h:8", "'it is silent'; that etcd speaks TLS, but NIXL speaks plaintext with any "
                              "scheme"), deployment.PROXY_REMEDY, "published deleted"),
        ("h", PublishingAgents(False), Verdict.FAIL,
         NOTHING_THERE.format("X=h", "nothing; 'h' names no port, and NIXL has no default; NIXL reports only 'the "
                              "target uri is not valid'"),
         "write http://h:2379; no port is named: 2379 is etcd's default", "published deleted"),
        ("h:1", PublishingAgents(True, error="NIXL cannot create an agent: Config x"), Verdict.FAIL,
         "X=h:1: it contacts 192.0.2.1:1: NIXL cannot create an agent: Config x", "write http://h:1", "deleted"),
    ],
)  # fmt: skip
def test_a_publication_is_looked_for_in_etcd_and_removed(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, text: str, etcd: PublishingAgents,
    verdict: Verdict, reason: str, remedy: str, calls: str,
) -> None:  # fmt: skip
    doubles = {"connect": etcd.connect, "Agents": etcd.agents, "SILENCE": 0.05}
    for name, double in doubles.items():
        monkeypatch.setattr(deployment, name, double)
    monkeypatch.setattr(deployment, "speaks_tls", lambda endpoint: endpoint == Endpoint("https", "192.0.2.1", 8))
    judged = judge_publication(deployed(text), make_settings(), cast(Any, etcd))
    assert judged == Judgement(verdict, reason, remedy)
    assert etcd.endpoints == text
    assert etcd.calls == ["watched", *calls.split(), "unwatched"]


def test_other_errors_of_an_agent_and_storage_are_not_accused_of_the_endpoints(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = PublishingAgents(True, error="the worker died")
    monkeypatch.setattr(deployment, "connect", etcd.connect)
    monkeypatch.setattr(deployment, "Agents", etcd.agents)
    with pytest.raises(WorkerError, match="the worker died"):
        judge_publication(deployed("h:1"), make_settings(), cast(Any, etcd))
    judged = judge_publication(deployed("h:1"), make_settings(backend=("POSIX",)), cast(Any, etcd))
    assert judged.verdict is Verdict.NOT_APPLICABLE


LIBRARY = EtcdLibrary("/nixl/lib.so", "digest", True)


OTHERS = "NIXL loads /nixl/lib.so, but /bench loads another one, /x.so"


@pytest.mark.parametrize(
    ("program", "other", "verdict", "reason"),
    [
        (None, ("digest", True), Verdict.PASS, "NIXL loads /nixl/lib.so; nixlbench is not on PATH"),
        ("/bench", None, Verdict.WARN, "NIXL loads /nixl/lib.so, but /bench loads none: it links one statically, or "
         "has no etcd"),
        ("/bench", ("digest", True), Verdict.PASS, "NIXL loads /nixl/lib.so, and /bench loads the same from /x.so"),
        ("/bench", ("other", True), Verdict.WARN, OTHERS),
        ("/bench", ("other", False), Verdict.WARN, f"{OTHERS} (only that of NIXL has {URI_PATCH})"),
    ],
)  # fmt: skip
def test_nixlbench_should_load_the_library_of_nixl(
    monkeypatch: pytest.MonkeyPatch, program: str | None, other: tuple[str, bool] | None, verdict: Verdict, reason: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: program if name == "nixlbench" else None)
    loaded = EtcdLibrary("/x.so", *other) if other else None
    monkeypatch.setattr(client_library, "linked_etcd_client", lambda path: loaded if path == program else None)
    judged = judge_library(LIBRARY)
    assert (judged.verdict, judged.reason, bool(judged.remedy)) == (verdict, reason, verdict is Verdict.WARN)


@pytest.mark.parametrize(
    ("value", "outcomes", "verdict", "ending"),
    [
        (None, {None: INVALID, "1": INVALID}, Verdict.PASS, "is not set; {}, it has no effect"),
        ("0", {None: INVALID, "1": INVALID}, Verdict.WARN, "is set to '0'; {}, it has no effect"),
        ("1", {None: INVALID, "1": PUBLISHES}, Verdict.PASS, "is set to '1'; {}, with it an agent publishes, without "
         "it reads no address"),
    ],
)  # fmt: skip
def test_a_variable_of_the_patch_that_changes_nothing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, value: str | None, outcomes: dict[str | None, ReadOutcome], verdict: Verdict,
    ending: str,
) -> None:  # fmt: skip
    def tried(texts: Mapping[str, ReadOutcome], *_: Any, namespace: str, environment: dict[str, str | None]) -> Any:
        assert texts == {"ipv4:h:1": INVALID}
        yield EndpointTrial("ipv4:h:1", outcomes[environment[URI_PATCH]], "", "1.5")

    monkeypatch.setattr(client_library, "try_texts", tried)
    monkeypatch.delenv(URI_PATCH, raising=False)
    if value is not None:
        monkeypatch.setenv(URI_PATCH, value)
    nothing: Any = None
    judged = judge_patch(LIBRARY, parse_endpoint("http://h:1"), nothing, nothing, nothing)
    ending = ending.format("tried with ipv4:HOST:PORT")
    assert (judged.verdict, judged.reason) == (verdict, f"{URI_PATCH} is in /nixl/lib.so; {URI_PATCH} {ending}")


@pytest.mark.parametrize(
    ("outcome", "message", "agreeing"),
    [
        (INVALID, "it failed", [INVALID]), (INVALID, "", [UNREACHED, INVALID]), (NO_AGENT, "refused", [NO_AGENT]),
        (PUBLISHES, "", [PUBLISHES]), (UNREACHED, "", [UNREACHED, INVALID]),
    ],
)  # fmt: skip
def test_a_release_that_writes_no_message_does_not_tell_failures_apart(
    outcome: ReadOutcome, message: str, agreeing: list[ReadOutcome]
) -> None:
    tried = EndpointTrial("h:1", outcome, message, "1.4")
    assert [prediction for prediction in ReadOutcome if tried.agrees(prediction)] == agreeing


def test_the_last_message_about_an_agent_counts() -> None:
    text = "Failed to store agent {} prefix key in etcd: {}\n"
    output = text.format("a", "first") + text.format("b", "x") + text.format("a", "http://u:secret@h") + "end"
    assert complaint(output, "a") == "http://***@h"
    assert complaint(output, "c") == ""


@pytest.mark.usefixtures("network")
def test_each_text_is_tried_by_an_agent_and_judged(
    monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    """The agents are doubles: each publishes or fails as its text says."""
    runs: list[tuple[str, str]] = []
    workers: list[Any] = []
    wrong: dict[str, str] = {}

    class Host:
        def __init__(self, supervisor: Any) -> None:
            pass

        def start(self, name: str, variables: Mapping[str, Any], *limits: float) -> Any:
            assert (variables["NIXL_ETCD_NAMESPACE"], variables["http_proxy"]) == ("/conformance", None)
            workers.append([])
            return SimpleNamespace(output=output, kill=lambda: workers[-1].append("killed"), versions={"nixl": "1.5.1"})

    def output() -> str:
        faults = [(agent, "it is silent" if ":2" in text else INVALID_URI) for agent, text in runs if ":1" not in text]
        return "\n".join(f"Failed to store agent {agent} prefix key in etcd: {fault}" for agent, fault in faults)

    def run(function: str, *, name: str, endpoints: str) -> str:
        runs.append((name, wrong.get(endpoints, endpoints)))
        return "" if endpoints else "no agent for http://u:secret@h"

    def get(key: str) -> bytes | None:
        return b"" if key in {f"/conformance/{name}/" for name, text in runs if ":1" in text} else None

    def within(worker: Any, **_: Any) -> Any:
        return SimpleNamespace(worker=worker, run=run)

    monkeypatch.setattr(trial, "LocalHost", Host)
    monkeypatch.setattr(trial, "NixlAgent", SimpleNamespace(within=within))
    arguments: Any = (SimpleNamespace(get=get), make_settings(), None)
    texts = ["10.0.0.1:1", "10.0.0.1:2", "h", ""]
    trials = list(try_texts(dict.fromkeys(texts, INVALID), *arguments, namespace="/conformance"))
    assert [(tried.text, tried.outcome, tried.message) for tried in trials] == [
        (texts[0], PUBLISHES, ""), (texts[1], UNREACHED, "it is silent"), (texts[2], INVALID, INVALID_URI),
        (texts[3], NO_AGENT, "no agent for http://***@h"),
    ]  # fmt: skip
    assert workers == [["killed"]]
    assert judge_readings(texts, *arguments) == Judgement(Verdict.PASS, "NIXL 1.5.1 reads 4 texts as predicted")
    rewrites = suggestions(["10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:1,10.0.0.2:1"], 1)
    assert rewrites == ["http://10.0.0.1:1", "http://10.0.0.1:1,http://10.0.0.2:1"]
    assert judge_suggestions(rewrites, *arguments) == Judgement(Verdict.PASS, "2 rewrites work")
    wrong.update({"10.0.0.1:1": "h", rewrites[0]: "http://10.0.0.1:2"})
    assert judge_readings(texts, *arguments) == Judgement(
        Verdict.FAIL,
        "1 of 4 texts are not read as predicted: '10.0.0.1:1': predicted: publishes; NIXL 1.5.1: reads no address (the "
        "target uri is not valid)",
        trial.REMEDY,
    )
    assert judge_suggestions(rewrites, *arguments).reason == (
        "suggested values that do not work: http://10.0.0.1:1: reads an address where nothing answers (it is silent)"
    )
