# SPDX-License-Identifier: Apache-2.0
"""The fixtures and steps of the suite ``metadata``, and its checks that need no agents in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.doubled_nixl import ETCD, DoubledNixl
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.core import polling
from pytest_nixl.core.errors import LateError, NixlPluginError, NotApplicableError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.metadata import conftest, test_backends, test_hierarchy, test_namespaces
from suites.metadata.moving import registered
from suites.metadata.namespace import Namespace, comes_true, complaint, knows


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_storage_alone_has_no_metadata_to_exchange(make_settings: Callable[..., Settings], stack: ExitStack) -> None:
    value_of(conftest.agents_meet, stack, nixl_settings=make_settings(backend=("POSIX", "UCX")))
    with pytest.raises(NotApplicableError) as refusal:
        value_of(conftest.agents_meet, stack, nixl_settings=make_settings(backend=("POSIX", "OBJ")))
    assert str(refusal.value) == (
        "--nixl-backend=POSIX,OBJ moves bytes only to storage, for which agents need no metadata of each other"
    )


@pytest.mark.parametrize(("backend", "seconds"), [("UCX", 30.0), ("LIBFABRIC", 90.0)])
def test_agents_of_one_backend_end_with_the_test_and_wait_for_handshakes(
    backend: str, seconds: float, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = MagicMock()
    monkeypatch.setattr(conftest, "Agents", agents)
    monkeypatch.setattr(conftest, "supervisor", lambda: "the supervisor")
    monkeypatch.setattr(conftest, "LocalHost", lambda supervisor: ("host", supervisor))
    settings = make_settings(backend=("UCX", "LIBFABRIC"), progress_thread=("on", "off"), timeout=30.0)
    with ExitStack() as stack:
        started = value_of(
            conftest.agents,
            stack,
            nixl_settings=settings,
            agent_backend=backend,
            agent_progress="off",
            nixl_etcd_proxy=None,
        )
        ((host, changed),) = (start.args for start in agents.call_args_list)
        assert host == ("host", "the supervisor")
        assert (changed.backend, changed.progress_thread, changed.timeout) == ((backend,), ("off",), seconds)
        assert started is agents.return_value.__enter__.return_value
        agents.return_value.__exit__.assert_not_called()
    agents.return_value.__exit__.assert_called_once()


PLAIN, TLS = "http://etcd:2379", "https://etcd:2379"


@pytest.mark.parametrize(
    ("endpoints", "endpoint", "user", "shared_etcd", "hosts"),
    [
        ((PLAIN,), PLAIN, "", True, ["a", "b"]),
        ((PLAIN,), PLAIN, "", False, ()),
        ((PLAIN, TLS), PLAIN, "", True, None),
        ((PLAIN,), PLAIN, "root", True, None),
        ((PLAIN,), "http://root:secret@etcd:2379", "", True, None),
    ],
)
def test_a_namespace_is_of_this_test_on_all_ranks_or_nixl_cannot_use_its_etcd(
    endpoints: tuple[str, ...], endpoint: str, user: str, shared_etcd: bool, hosts: Any, stack: ExitStack
) -> None:
    agents = MagicMock(settings=SimpleNamespace(etcd_user=user, timeout=12.0))
    arguments: dict[str, Any] = {
        "nixl_etcd": SimpleNamespace(client=SimpleNamespace(endpoints=endpoints), endpoint=endpoint, prefix="/t/x/"),
        "agents": agents,
        "nixl_cluster": SimpleNamespace(
            hosts=["a", "b", "c"], ranks=2, etcd=lambda: "an etcd" if shared_etcd else None
        ),
    }
    if hosts is None:
        with pytest.raises(NixlPluginError) as refusal:
            value_of(conftest.namespace, stack, **arguments)
        assert str(refusal.value) == (
            f"NIXL cannot use the etcd at {endpoint.replace('root:secret', '***')}: NIXL speaks plaintext and sends no "
            "password\nremedy: run `etcd grpc-proxy start` with the certificates on the agents' hosts, and set "
            "--nixl-etcd to its http:// address; for an etcd with a password there is no remedy"
        )
        return
    namespace = value_of(conftest.namespace, stack, **arguments)
    client = arguments["nixl_etcd"].client
    assert (namespace.client, namespace.endpoint, namespace.name, namespace.seconds) == (client, PLAIN, "/t/x", 12.0)
    namespace.start("one", "two")
    agents.start_each.assert_called_once_with(
        ("one", "two"),
        environment={"NIXL_ETCD_ENDPOINTS": PLAIN, "NIXL_ETCD_NAMESPACE": "/t/x"},
        hosts=hosts,
        listen_thread=True,
        progress_thread=None,
    )


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that returns a doubled NIXL, a namespace in its etcd, and two agents of it."""

    def start(*faults: str) -> Any:
        nixl = DoubledNixl(*faults)
        monkeypatch.setattr(polling, "time", nixl.clock)
        run: Any = nixl
        namespace = Namespace(run, run.client, ETCD, "/n", 30.0)
        return nixl, namespace, *namespace.start("first", "second")

    return start


def test_memory_is_of_the_type_of_its_side_and_registered(start: Callable[..., Any]) -> None:
    _, _, agent, _ = start()
    source: Any = registered(agent, source=True)
    target: Any = registered(agent)
    assert [(buffer.memory, buffer.size) for buffer in (source, target)] == [("VRAM", 65536), ("DRAM", 65536)]


def test_an_agent_knows_another_if_it_has_loaded_all_the_memory() -> None:
    agent: Any = MagicMock()
    buffers: list[Any] = [SimpleNamespace(memory="VRAM", descriptor=lambda n=n: (n, 8, 0)) for n in (1, 2)]
    knows(agent, SimpleNamespace(name="owner"), *buffers)  # type: ignore[arg-type]
    agent.get_xfer_descs.assert_called_once_with([(1, 8, 0), (2, 8, 0)], "VRAM")


def test_a_condition_comes_true_in_time_or_not(start: Callable[..., Any]) -> None:
    clock = start()[0].clock
    begin = clock.now
    assert comes_true(lambda: clock.now >= begin + 1, seconds=2)
    assert not comes_true(lambda: clock.now >= begin + 9, seconds=2)


def test_a_late_answer_of_etcd_is_awaited(start: Callable[..., Any]) -> None:
    _, namespace, agent, _ = start("etcd-late")
    namespace.publish_anywhere(agent)
    agent.invalidate_local_metadata()
    namespace.await_gone(agent)


def test_a_watch_is_that_of_the_key_and_a_finder_that_still_knows_an_agent_has_its_words(
    start: Callable[..., Any],
) -> None:
    nixl, namespace, owner, finder = start()
    nixl.proxy.requests = [SimpleNamespace(key="/n/first/", confirmed=True)]
    namespace.await_watch(nixl.proxy, finder, owner)
    with pytest.raises(LateError, match=r"^waited 30 s for worker 2 to watch /n/first/part, "):
        namespace.await_watch(nixl.proxy, finder, owner, "part")
    finder.add_remote_agent(owner.get_agent_metadata())
    finder.log("etcd has a fault")
    with pytest.raises(LateError, match=r"NIXL wrote last: E0101 etcd has a fault$"):
        namespace.await_forgotten(finder, owner)


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("E1129 12:00 nixl_agent.cpp: failed", True),
        ("I1129 information", False),
        ("E112 too few digits", False),
        ("E11290 too many digits", False),
        ("at E1129 not at the start", False),
        ("[1.0] UCX  ERROR no transport", True),
        ("[1.0] UCX WARN unused", True),
        ("[1.0] UCX INFO versions", False),
        ("Failed to connect to Etcd", True),
    ],
)
def test_a_complaint_is_the_last_line_with_a_fault_or_of_etcd(line: str, matches: bool) -> None:
    output = "\n".join(["W0000 before", line, "nothing"])
    agent: Any = SimpleNamespace(worker=SimpleNamespace(output=lambda: output))
    assert complaint(agent) == (line if matches else "W0000 before")


# The namespace of the deployment

SLASH = "tools and roles that know NIXL's keys expect a slash"
SPLIT = (
    "NIXL_ETCD_NAMESPACE={0}: agents publish under {0}/<agent>/, but agents without the variable under "
    "/nixl/agents//<agent>/, so they never find each other, although NIXL's documentation calls both the same"
)
EVERYWHERE = "set NIXL_ETCD_NAMESPACE for every agent of the deployment, or for none"


@pytest.mark.parametrize(
    ("name", "verdict", "reason", "remedy"),
    [
        (None, Verdict.PASS, "NIXL_ETCD_NAMESPACE is not set: agents publish under /nixl/agents//<agent>/", ""),
        ("/nixl/agents/", Verdict.PASS, "agents publish under /nixl/agents//<agent>/", ""),
        ("/nixl/agents", Verdict.WARN, SPLIT.format("/nixl/agents"), EVERYWHERE),
        ("/nixl/agents//", Verdict.WARN, SPLIT.format("/nixl/agents//"), EVERYWHERE),
        (
            "prod/",
            Verdict.WARN,
            "NIXL_ETCD_NAMESPACE='prod/' does not begin with a slash: keys are prod//<agent>/",
            f"set NIXL_ETCD_NAMESPACE=/prod/: {SLASH}",
        ),
        (
            "",
            Verdict.WARN,
            "NIXL_ETCD_NAMESPACE='' does not begin with a slash: keys are /<agent>/",
            f"unset NIXL_ETCD_NAMESPACE: {SLASH}",
        ),
    ],
)
def test_the_namespace_of_a_deployment_is_judged(
    name: str | None, verdict: Verdict, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIXL_ETCD_NAMESPACE", raising=False)
    if name is not None:
        monkeypatch.setenv("NIXL_ETCD_NAMESPACE", name)
    assert test_namespaces.judge_namespace(name) == Judgement(verdict, reason, remedy)
    check = test_namespaces.test_the_namespace_of_this_deployment_cannot_split_it
    assert conclusion_of(check) == f"{verdict.value}: {reason}"


NO_DEPLOYMENT = "NotApplicableError: this run has an etcd of its own: --nixl-etcd names no etcd of a deployment"
NO_NAMESPACE = (
    "NotApplicableError: NIXL_ETCD_NAMESPACE={!r} names no namespace, so the keys of agents cannot be told from "
    "others\nremedy: set NIXL_ETCD_NAMESPACE to a name that begins with a slash, or unset it"
)


@pytest.mark.parametrize(
    ("kind", "etcd", "listen", "name", "ending"),
    [
        ("external", PLAIN, "", None, "/nixl/agents/"),
        ("external", PLAIN, "", "/prod", "/prod"),
        ("external", PLAIN, "", "//", NO_NAMESPACE.format("//")),
        ("external", "", "", None, NO_DEPLOYMENT),
        ("embedded", PLAIN, "", None, NO_DEPLOYMENT),
        ("external", PLAIN, "0.0.0.0:2379", None, NO_DEPLOYMENT),
    ],
)
def test_the_keys_of_a_deployment_are_judged_if_the_run_uses_its_etcd(
    kind: str, etcd: str, listen: str, name: str | None, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = MagicMock(return_value=Judgement(Verdict.PASS, "keys"))
    monkeypatch.setattr(test_namespaces, "judge_published", judge)
    monkeypatch.delenv("NIXL_ETCD_NAMESPACE", raising=False)
    if name is not None:
        monkeypatch.setenv("NIXL_ETCD_NAMESPACE", name)
    conclusion = ending_of(
        test_namespaces.test_the_keys_in_the_etcd_of_this_deployment_are_sound,
        nixl_settings=SimpleNamespace(etcd=etcd, etcd_listen=listen),
        nixl_etcd=SimpleNamespace(server=SimpleNamespace(kind=kind), client="client", endpoint="endpoint"),
    )
    if ending.startswith("/"):
        assert conclusion == "PASS: keys"
        judge.assert_called_once_with("client", NamespaceName(ending), "endpoint")
    else:
        assert conclusion == ending


# Several backends and the way from an object to a file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What starts agents, adds storage, moves bytes and judges that, in the order of the calls."""
    calls = MagicMock()
    agents = calls.Agents.return_value.__enter__.return_value
    agents.start_each.return_value = agents.start.side_effect = [calls.initiator, calls.target]
    calls.judge_uses.return_value = calls.judge_legs.return_value = Judgement(Verdict.PASS, "judged")
    backends = {
        name: SimpleNamespace(environment=lambda environ, name=name: {name: f"set beside {environ['UCX_TLS']}"})
        for name in ("UCX", "POSIX")
    }
    for module, names in (
        (test_backends, ("use_each", "judge_uses")),
        (test_hierarchy, ("move_through", "judge_legs")),
    ):
        for name in ("Agents", "add_storage", *names):
            monkeypatch.setattr(module, name, getattr(calls, name))
        monkeypatch.setattr(module.os, "environ", {"UCX_TLS": "tcp"})
        monkeypatch.setattr(module, "BACKENDS", backends)
    return calls


CLUSTER: Any = SimpleNamespace(hosts=["first", "second", "third"])


def test_transfers_by_each_backend_are_recorded_and_judged(
    started: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    settings, run = make_settings(backend=("POSIX", "UCX"), file_dir="/d", timeout=9.0), MagicMock()
    check = test_backends.test_each_transfer_goes_by_the_backend_that_was_chosen
    assert conclusion_of(check, nixl_settings=settings, nixl_cluster=CLUSTER, nixl_run=run) == "PASS: judged"
    options = {"backends": ("UCX",), "environment": dict.fromkeys(("UCX", "POSIX"), "set beside tcp")}
    hosts = {"hosts": ["first", "second"], "progress_thread": None}
    pair = (started.initiator, started.target)
    assert started.mock_calls[2:5] == [
        call.Agents().__enter__().start_each(["initiator", "target"], **options, **hosts),
        call.add_storage(started.initiator),
        call.use_each(*pair, ("UCX", "POSIX"), directory="/d", seconds=9.0),
    ]
    run.record.note.assert_called_once_with("judged")


@pytest.mark.parametrize("count", [1, 2])
def test_bytes_go_through_one_agent_or_two(
    started: MagicMock, count: int, make_settings: Callable[..., Settings]
) -> None:
    settings, run, request = make_settings(file_dir="/d", timeout=9.0), MagicMock(), MagicMock()
    bucket = request.getfixturevalue.return_value
    bucket.environment = {"AWS": "secret"}
    arguments: dict[str, Any] = {"nixl_settings": settings, "nixl_cluster": CLUSTER, "nixl_run": run}
    check = test_hierarchy.test_bytes_go_from_an_object_to_a_file
    assert conclusion_of(check, count=count, agent_backend="UCX", request=request, **arguments) == "PASS: judged"
    request.getfixturevalue.assert_called_once_with("nixl_s3")
    environment = {"UCX": "set beside tcp"}
    agents = call.Agents().__enter__()
    reader = started.initiator
    writer = reader if count == 1 else started.target
    options = {"backends": ["UCX"], "progress_thread": None}
    calls = [
        call.Agents("first", settings),
        agents,
        agents.start("initiator", environment={**environment, "AWS": "secret"}, **options),
        *[agents.start("target", environment=environment, host="second", **options)] * (count - 1),
        call.add_storage(reader, writer, bucket),
        call.move_through(reader, writer, "UCX", bucket, directory="/d", seconds=9.0),
        call.Agents().__exit__(None, None, None),
        call.judge_legs(started.move_through.return_value),
    ]
    assert started.mock_calls == calls
    run.record.note.assert_called_once_with("1 agent: judged" if count == 1 else "2 agents: judged")
