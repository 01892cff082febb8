# SPDX-License-Identifier: Apache-2.0
"""The judgements of endpoints without agents: ``tests/integration/test_uri_suite.py`` has real ones."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.checks.endpoints import client_library, deployment, trial, worker
from pytest_nixl.checks.endpoints.client_library import judge_library, judge_patch, library_of
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
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import INVALID as INVALID_URI
from pytest_nixl.nixl.endpoint_reading import ReadOutcome, suppose
from pytest_nixl.processes.hosts import LocalHost
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
        (judge_form, "[::1]:1,127.1:1", Verdict.PASS, "X=[::1]:1,127.1:1", ""),
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
    """Doubles of an etcd and of agents that publish to it, which note what they are asked, on a clock of their own.

    :param stored: the seconds after which the metadata is in etcd; None: never.
    :param wrote: what NIXL writes about it.
    :param error: what happens when the agent starts.
    :param answers: whether the etcd answers.
    """

    def __init__(self, stored: int | None, wrote: str = "", error: str = "", *, answers: bool = True) -> None:
        self.stored, self.wrote, self.error, self.answers = stored, wrote, error, answers
        self.calls: list[str] = []
        self.now, self.published_at, self.hesitates = 100, 0, 5
        self.name = "publisher"

    def sleep(self, seconds: float) -> None:
        self.now += 1

    @contextmanager
    def connect(self, endpoints: tuple[Endpoint, ...], **credentials: str) -> Iterator[Any]:
        self.calls.append(f"connect {endpoints[0]} as {credentials['user']}")
        yield self

    def count_prefix(self, prefix: str) -> None:
        self.now, self.hesitates = self.now + self.hesitates, 0
        if not self.answers:
            raise EtcdError("it does not answer")

    def get(self, key: str) -> bytes | None:
        assert key == f"{self.namespace}/publisher/metadata"
        return b"metadata" if self.stored is not None and self.now >= self.published_at + self.stored else None

    def delete_prefix(self, prefix: str) -> None:
        self.calls.append("delete")
        assert prefix == f"{self.namespace}/"

    def watch_prefix(self, prefix: str, endpoints: tuple[Endpoint, ...], **credentials: str) -> None:
        self.calls.append(f"watch {endpoints[0]} as {credentials['user']}")
        self.prefix = prefix

    def unwatch_prefix(self, prefix: str, endpoints: tuple[Endpoint, ...]) -> None:
        self.calls.append(f"unwatch {endpoints[0]}")
        assert prefix == self.prefix == f"{self.namespace}/"

    @contextmanager
    def agents(self, host: LocalHost, settings: Settings) -> Iterator[Any]:
        yield self

    def start(self, name: str, *, environment: dict[str, str], listen_thread: bool) -> Any:
        self.endpoints, self.namespace = environment["NIXL_ETCD_ENDPOINTS"], environment["NIXL_ETCD_NAMESPACE"]
        assert (name, listen_thread) == ("publisher", True)
        if self.error:
            raise WorkerError(self.error)
        return self

    @property
    def worker(self) -> Any:
        wrote = f"Failed to store agent publisher prefix key in etcd: {self.wrote}" if self.wrote else ""
        return SimpleNamespace(output=lambda: wrote)

    def allocate(self, size: int) -> str:
        return f"{size} bytes"

    def register(self, memory: str) -> None:
        self.calls.append(f"register {memory}")

    def send_local_metadata(self) -> None:
        self.calls.append("publish")
        self.published_at = self.now = self.now + 60  # the wait begins after it


LOOK = "see the checks endpoints-connect and endpoints-healthy, and the output of `pytest-nixl endpoint`"


@pytest.mark.parametrize(
    ("text", "etcd", "verdict", "reason", "remedy", "waited"),
    [
        ("h:1", PublishingAgents(0), Verdict.PASS, "X=h:1: an agent's metadata is in etcd", "", 5),
        ("h:1", PublishingAgents(30), Verdict.PASS, "X=h:1: an agent's metadata is in etcd", "", 30),
        ("h:1", PublishingAgents(None), Verdict.FAIL, NOTHING_THERE.format("X=h:1", "nothing; it contacts 192.0.2.1:1"),
         LOOK, 31),
        ("h:1", PublishingAgents(None, "it is silent"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:1", "'it is silent'; it contacts 192.0.2.1:1"), LOOK, 5),
        ("h:1", PublishingAgents(None, answers=False), Verdict.FAIL,
         NOTHING_THERE.format("X=h:1", "nothing; it contacts 192.0.2.1:1"), LOOK, 5),
        ("h:1", PublishingAgents(None, "the user name is empty"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:1", "'the user name is empty'; that etcd asks for a user and password, which NIXL "
                              "cannot send"),
         "give NIXL an etcd without authentication on a separate network; a grpc-proxy does not help here", 5),
        ("h:9,h:8", PublishingAgents(None, "it is silent"), Verdict.FAIL,
         NOTHING_THERE.format("X=h:9,h:8", "'it is silent'; that etcd speaks TLS, but NIXL speaks plaintext with any "
                              "scheme"), deployment.PROXY_REMEDY, 5),
        ("h", PublishingAgents(None), Verdict.FAIL,
         NOTHING_THERE.format("X=h", "nothing; 'h' names no port, and NIXL has no default; NIXL reports only 'the "
                              "target uri is not valid'"),
         "write http://h:2379; no port is named: 2379 is etcd's default", 5),
        ("", PublishingAgents(0, error="NIXL cannot create an agent: Config x"), Verdict.FAIL,
         "X=: it is empty, and NIXL creates no agent if the variable is set but empty (before 1.5: it creates an agent "
         "without etcd): NIXL cannot create an agent: Config x",
         "write http://HOST:PORT; HOST must resolve to an IPv4 address on the hosts of the agents", None),
        ("h:1", PublishingAgents(0, error="NIXL cannot create an agent: Config x"), Verdict.FAIL,
         "X=h:1: it contacts 192.0.2.1:1: NIXL cannot create an agent: Config x", "write http://h:1", None),
    ],
)  # fmt: skip
def test_a_publication_is_looked_for_in_etcd_and_removed(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, text: str, etcd: PublishingAgents,
    verdict: Verdict, reason: str, remedy: str, waited: int | None,
) -> None:  # fmt: skip
    clock = SimpleNamespace(monotonic=lambda: etcd.now, sleep=etcd.sleep)
    for name, double in {"connect": etcd.connect, "Agents": etcd.agents, "time": clock}.items():
        monkeypatch.setattr(deployment, name, double)
    monkeypatch.setattr(deployment, "speaks_tls", lambda endpoint: endpoint == Endpoint("https", "192.0.2.1", 8))
    deployed_here = Deployment("X", text, explain(text, suppose), {"user": "u"})
    judged = judge_publication(deployed_here, make_settings(timeout=30.0), cast(Any, etcd))
    assert judged == Judgement(verdict, reason, remedy)
    assert etcd.endpoints == text
    published = ["register 4096 bytes", "publish"] if waited is not None else []
    if text:
        at = parse_endpoint(f"http://{text.partition(',')[0]}" if ":" in text else "http://h:2379")
        removed = ["delete"] if etcd.answers else []
        assert etcd.calls == [f"watch {at} as u", f"connect {at} as u", *published, *removed, f"unwatch {at}"]
    else:
        assert etcd.calls == published
    assert waited is None or etcd.now - etcd.published_at == waited


def test_other_errors_of_an_agent_and_storage_are_not_accused_of_the_endpoints(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = PublishingAgents(0, error="the worker died")
    monkeypatch.setattr(deployment, "Agents", etcd.agents)
    with pytest.raises(WorkerError, match="the worker died"):
        judge_publication(deployed(""), make_settings(), cast(Any, etcd))
    assert judge_publication(deployed("h:1"), make_settings(backend=("POSIX", "OBJ")), cast(Any, etcd)) == Judgement(
        Verdict.NOT_APPLICABLE,
        "--nixl-backend=POSIX,OBJ moves bytes only to storage, and such agents have no metadata to publish",
    )


LIBRARY = EtcdLibrary("/nixl/lib.so", "digest", True)


OTHERS = "NIXL loads /nixl/lib.so, but /bench loads another one, /x.so"
COMPARE = "compare LD_LIBRARY_PATH and the run paths of both: a fix in one library is not in the other"


@pytest.mark.parametrize(
    ("patched", "program", "other", "reason", "remedy"),
    [
        (True, None, ("digest", True), "NIXL loads /nixl/lib.so; nixlbench is not on PATH", ""),
        (True, "/bench", None, "NIXL loads /nixl/lib.so, but /bench loads none: it links one statically, or has no "
         "etcd", "compare the versions of etcd-cpp-apiv3 with which both were built"),
        (True, "/bench", ("digest", True), "NIXL loads /nixl/lib.so, and /bench loads the same from /x.so", ""),
        (True, "/bench", ("other", True), OTHERS, COMPARE),
        (True, "/bench", ("other", False), f"{OTHERS} (only that of NIXL has {URI_PATCH})", COMPARE),
        (False, "/bench", ("other", True), f"{OTHERS} (only that of nixlbench has {URI_PATCH})", COMPARE),
    ],
)  # fmt: skip
def test_nixlbench_should_load_the_library_of_nixl(
    monkeypatch: pytest.MonkeyPatch,
    patched: bool,
    program: str | None,
    other: tuple[str, bool] | None,
    reason: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: program if name == "nixlbench" else None)
    loaded = EtcdLibrary("/x.so", *other) if other else None
    monkeypatch.setattr(client_library, "linked_etcd_client", lambda path: loaded if path == program else None)
    judged = judge_library(replace(LIBRARY, patched=patched))
    assert judged == Judgement(Verdict.WARN if remedy else Verdict.PASS, reason, remedy)


def test_an_agent_without_an_etcd_client_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_library, "loaded_etcd_client", lambda pid: LIBRARY if pid == 7 else None)
    agents: list[Any] = [SimpleNamespace(worker=SimpleNamespace(pid=pid)) for pid in (7, 8)]
    assert library_of(agents[0]) == LIBRARY
    with pytest.raises(NotApplicableError, match=r"^this NIXL has loaded no libetcd-cpp-api: it was built "):
        library_of(agents[1])


@pytest.mark.parametrize(
    ("value", "outcomes", "patched", "remedy", "ending"),
    [
        (None, {None: INVALID, "1": INVALID}, "not in", "", "is not set; {}, it has no effect"),
        ("0", {None: INVALID, "1": INVALID}, "in", f"unset {URI_PATCH}: it has no effect here; write endpoints as "
         "`pytest-nixl endpoint` suggests", "is set to '0'; {}, it has no effect"),
        ("1", {None: INVALID, "1": PUBLISHES}, "in", "", "is set to '1'; {}, with it an agent publishes, without it "
         "reads no address"),
    ],
)  # fmt: skip
def test_a_variable_of_the_patch_that_changes_nothing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, value: str | None, outcomes: dict[str | None, ReadOutcome], patched: str,
    remedy: str, ending: str,
) -> None:  # fmt: skip
    client, settings, supervisor = cast(Any, "client"), cast(Any, "settings"), cast(Any, "supervisor")

    def tried(*arguments: Any, namespace: str, environment: dict[str, str | None]) -> Any:
        assert (arguments, namespace) == (({"ipv4:h:1": INVALID}, client, settings, supervisor), "/patch")
        yield EndpointTrial("ipv4:h:1", outcomes[environment[URI_PATCH]], "", "1.5")

    monkeypatch.setattr(client_library, "try_texts", tried)
    monkeypatch.delenv(URI_PATCH, raising=False)
    if value is not None:
        monkeypatch.setenv(URI_PATCH, value)
    library = replace(LIBRARY, patched=patched == "in")
    judged = judge_patch(library, parse_endpoint("http://h:1"), client, settings, supervisor)
    reason = f"{URI_PATCH} is {patched} /nixl/lib.so; {URI_PATCH} {ending.format('tried with ipv4:HOST:PORT')}"
    assert judged == Judgement(Verdict.WARN if remedy else Verdict.PASS, reason, remedy)


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


class TrialWorkers:
    """Doubles of workers, their agents and an etcd, on a clock on which each look at all of them takes a second.

    An agent publishes with port 1, fails with port 2, writes nothing with port 3, and reads no address without a port.

    :ivar as_read: what agents take instead of a text.
    """

    def __init__(self) -> None:
        self.now = self.killed = 0
        self.started: list[tuple[Any, ...]] = []
        self.agents: dict[str, str] = {}
        self.as_read: dict[str, str] = {}
        self.error = ""

    def sleep(self, seconds: float) -> None:
        self.now += 1

    def kill(self) -> None:
        self.killed += 1

    def start(self, *arguments: Any) -> Any:
        self.started.append(arguments)
        return SimpleNamespace(output=self.output, kill=self.kill, versions={"nixl": "1.5.1"})

    def within(self, worker: Any, *, backends: list[str], progress_thread: bool) -> Any:
        assert (backends, progress_thread) == ([], False)
        return SimpleNamespace(worker=worker, run=self.run)

    def run(self, function: str, *, name: str, endpoints: str) -> str:
        assert function == "pytest_nixl.checks.endpoints.worker:make"
        if self.error:
            raise WorkerError(self.error)
        self.agents[name] = self.as_read.get(endpoints, endpoints)
        return "" if endpoints else "no agent for http://u:secret@h"

    def output(self) -> str:
        faults = {"2": "it is silent", "h": INVALID_URI}
        return "".join(
            f"Failed to store agent {name} prefix key in etcd: {faults[text[-1]]}\n"
            for name, text in self.agents.items()
            if text[-1:] in faults
        )

    def get(self, key: str) -> bytes | None:
        return b"" if key in {f"/conformance/{name}/" for name, text in self.agents.items() if ":1" in text} else None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, network: None) -> TrialWorkers:
    double = TrialWorkers()
    monkeypatch.setattr(trial, "LocalHost", lambda supervisor: double if supervisor == "supervisor" else None)
    monkeypatch.setattr(trial, "NixlAgent", double)
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: float(double.now), sleep=double.sleep))
    return double


@pytest.fixture
def arguments(workers: TrialWorkers, make_settings: Callable[..., Settings]) -> tuple[Any, ...]:
    return workers, make_settings(timeout=30.0, start_timeout=90.0), "supervisor"


TEXTS = ["10.0.0.1:1", "10.0.0.1:2", "h", ""]


@pytest.mark.parametrize(("texts", "count"), [(1, 1), (15, 1), (16, 2), (24, 3), (64, 4)])
def test_each_text_is_tried_by_an_agent(
    workers: TrialWorkers, arguments: tuple[Any, ...], texts: int, count: int
) -> None:
    tried = [f"10.0.{number}.1:{1 + number % 2}" for number in range(texts)]
    trials = list(try_texts(dict.fromkeys(tried, INVALID), *arguments, namespace="/conformance"))
    assert trials == [
        EndpointTrial(text, UNREACHED if text[-1] == "2" else PUBLISHES, "it is silent" * (text[-1] == "2"), "1.5.1")
        for text in tried
    ]
    proxies = [f"{scheme}_proxy" for scheme in ("http", "https", "grpc")]
    variables = {"NIXL_ETCD_ENDPOINTS": "none", "NIXL_ETCD_NAMESPACE": "/conformance"}
    variables |= dict.fromkeys([*proxies, *map(str.upper, proxies)])  # type: ignore[arg-type]
    assert workers.started == [("trial", variables, 30.0, 90.0)] * count
    assert workers.killed == count


@pytest.mark.parametrize(("expected", "seconds"), [(PUBLISHES, 31), (UNREACHED, 3), (INVALID, 3)])
def test_an_agent_that_should_publish_is_waited_for(
    workers: TrialWorkers, arguments: tuple[Any, ...], expected: ReadOutcome, seconds: int
) -> None:
    [tried] = try_texts({"h:3": expected}, *arguments, namespace="/conformance", environment={"X": "1"})
    assert (tried, workers.now) == (EndpointTrial("h:3", UNREACHED, "", "1.5.1"), seconds)
    assert workers.started[0][1]["X"] == "1"


def test_workers_end_with_a_trial_that_fails(workers: TrialWorkers, arguments: tuple[Any, ...]) -> None:
    workers.error = "it died"
    with pytest.raises(WorkerError, match="it died"):
        list(try_texts({"h:1": INVALID}, *arguments, namespace="/conformance"))
    assert workers.killed == 1


def test_trials_are_compared_with_what_is_predicted(workers: TrialWorkers, arguments: tuple[Any, ...]) -> None:
    trials = list(try_texts(dict.fromkeys(TEXTS, INVALID), *arguments, namespace="/conformance"))
    assert trials == [
        EndpointTrial(text, outcome, message, "1.5.1")
        for text, outcome, message in zip(
            TEXTS,
            ReadOutcome,
            ("", "it is silent", INVALID_URI, "no agent for http://***@h"),
            strict=True,
        )
    ]
    assert judge_readings(TEXTS, *arguments) == Judgement(Verdict.PASS, "NIXL 1.5.1 reads 4 texts as predicted")
    rewrites = suggestions(["10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:1,10.0.0.2:1", "10.0.0.1:1"], 1)
    assert rewrites == ["http://10.0.0.1:1", "http://10.0.0.1:1,http://10.0.0.2:1"]
    assert judge_suggestions(rewrites, *arguments) == Judgement(Verdict.PASS, "2 rewrites work")
    workers.as_read = {"10.0.0.1:1": "h", "10.0.0.1:2": "10.0.0.1:1", **dict.fromkeys(rewrites, "http://10.0.0.1:2")}
    assert judge_readings(TEXTS, *arguments) == Judgement(
        Verdict.FAIL,
        "2 of 4 texts are not read as predicted: '10.0.0.1:1': predicted: publishes; NIXL 1.5.1: reads no address (the "
        "target uri is not valid); '10.0.0.1:2': predicted: reads an address where nothing answers; NIXL 1.5.1: "
        "publishes",
        trial.REMEDY,
    )
    broken = "; ".join(f"{text}: reads an address where nothing answers (it is silent)" for text in rewrites)
    assert judge_suggestions(rewrites, *arguments) == Judgement(
        Verdict.FAIL, f"suggested values that do not work: {broken}", trial.REMEDY
    )


@pytest.mark.parametrize(
    ("error", "answer"), [(None, ""), (RuntimeError("bad"), "bad"), (RuntimeError(), "RuntimeError")]
)
def test_a_worker_creates_an_agent_with_other_endpoints(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, answer: str
) -> None:
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", "none")
    created: list[tuple[str, str | None, bool]] = []

    def make_agent(name: str, *, listen_thread: bool) -> object:
        created.append((name, os.environ.get("NIXL_ETCD_ENDPOINTS"), listen_thread))
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr("pytest_nixl.nixl.worker.nixl_api.make_agent", make_agent)
    assert worker.make(None, "a", "h:1") == answer
    assert created == [("a", "h:1", True)]
