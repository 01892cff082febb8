# SPDX-License-Identifier: Apache-2.0
"""The fixtures and steps of the suite ``metadata``, and its checks that need no agents in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.doubled_nixl import ETCD, DoubledAgent, DoubledNixl
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl.checks.deployment_etcd.agents import NamespaceName
from pytest_nixl.core import polling
from pytest_nixl.core.errors import LateError, NixlPluginError, NotApplicableError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.metadata import conftest, test_backends, test_hierarchy, test_namespaces
from suites.metadata.moving import registered, write_and_compare
from suites.metadata.namespace import Namespace, comes_true, complaint, knows, registration


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that returns a doubled NIXL, a namespace in its etcd, and two agents of it."""

    def start(*faults: str, name: str | None = "/n") -> Any:
        nixl = DoubledNixl(*faults)
        monkeypatch.setattr(polling, "time", nixl.clock)
        run: Any = nixl
        namespace = Namespace(run, run.client, ETCD, name, 30.0)
        return nixl, namespace, *namespace.start("first", "second")

    return start


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


def test_a_test_has_a_client_of_a_proxy_to_its_etcd(stack: ExitStack) -> None:
    proxy = MagicMock()
    etcd = SimpleNamespace(endpoint=PLAIN)
    client = value_of(conftest.proxy_client, stack, nixl_etcd=etcd, nixl_etcd_proxy=proxy)
    assert proxy.mock_calls == [call(PLAIN), call().client("agents")]
    assert client is proxy.return_value.client.return_value


# Memory, transfers and keys


def test_memory_is_of_the_type_of_its_side_and_registered(start: Callable[..., Any]) -> None:
    _, _, agent, _ = start()
    source: Any = registered(agent, source=True)
    target: Any = registered(agent)
    assert [(buffer.memory, buffer.size) for buffer in (source, target)] == [("VRAM", 65536), ("DRAM", 65536)]
    assert agent.memory == [source.number, target.number]


@pytest.mark.parametrize(("done_after", "delivered_after"), [(0.05, 0.02), (0.02, 0.05), (0, 0.05)])
def test_bytes_are_compared_when_the_transfer_is_done_and_its_notification_is_there(
    start: Callable[..., Any], done_after: float, delivered_after: float
) -> None:
    nixl, _, writer, owner = start()
    nixl.done_after, nixl.delivered_after = done_after, delivered_after
    target: Any = registered(owner)
    writer.add_remote_agent(owner.get_agent_metadata())
    for _ in range(2):
        write_and_compare(writer, owner, target, 5.0)
    assert (nixl.moved, nixl.released) == (2, 2)
    first, second = owner.notifications
    assert first != second
    assert first[0] == second[0] == "first"
    assert b"written %d" % int(target.content) == second[1]


def test_a_key_is_that_of_nixl_and_a_namespace_is_also_that_of_other_endpoints(start: Callable[..., Any]) -> None:
    nixl, namespace, agent, _ = start()
    unset: Any = Namespace(nixl, nixl.client, ETCD, None, 30.0)
    assert [space.key(agent) for space in (namespace, namespace.part("a"), unset)] == [
        "/n/first/metadata",
        "/n/a/first/metadata",
        "/nixl/agents//first/metadata",
    ]
    assert (namespace.key(agent, "part"), namespace.key(agent, "")) == ("/n/first/part", "/n/first/")
    other = namespace.reached_by("http://other:1")
    assert (other.client, other.endpoint, other.name, other.seconds) == (nixl.client, "http://other:1", "/n", 30.0)
    nixl.client.keys |= {"/n/first/": b"", "/n/first/b": b"1", "/n/first/a": b"2", "/n/firstly/c": b"3"}
    assert namespace.labels(agent) == ["a", "b"]


def test_memory_of_a_part_has_its_type_and_a_part_without_memory_is_of_host_memory() -> None:
    agent: Any = MagicMock()
    buffers: list[Any] = [SimpleNamespace(memory="VRAM", descriptor=lambda n=n: (n, 8, 0)) for n in (1, 2)]
    registration(agent, *buffers)
    registration(agent)
    assert agent.get_reg_descs.mock_calls == [call([(1, 8, 0, ""), (2, 8, 0, "")], "VRAM"), call([], "DRAM")]
    knows(agent, SimpleNamespace(name="owner"), *buffers)  # type: ignore[arg-type]
    knows(agent, SimpleNamespace(name="owner"))  # type: ignore[arg-type]
    agent.get_xfer_descs.assert_called_once_with([(1, 8, 0), (2, 8, 0)], "VRAM")
    descriptors = agent.get_xfer_descs.return_value
    assert agent.check_remote_metadata.mock_calls == [call("owner", descriptors), call("owner")]


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        ("E1129 12:00 nixl_agent.cpp: failed", True),
        ("W0101 a warning", True),
        ("e0101 in small letters", True),
        ("I1129 information", False),
        ("E112 too few digits", False),
        ("E11290 too many digits", False),
        ("at E1129 not at the start", False),
        ("[1.0] UCX  ERROR no transport", True),
        ("[1.0] UCX WARN unused", True),
        ("[1.0] UCX INFO versions", False),
        ("UCXERROR", False),
        ("Failed to connect to Etcd", True),
    ],
)
def test_a_complaint_is_the_last_line_with_a_fault_or_of_etcd(line: str, matches: bool) -> None:
    output = "\n".join(["W0000 before", line, "nothing"])
    agent: Any = SimpleNamespace(worker=SimpleNamespace(output=lambda: output))
    assert complaint(agent) == (line if matches else "W0000 before")
    agent = SimpleNamespace(worker=SimpleNamespace(output=lambda: "nothing"))
    assert complaint(agent) == ""


def test_a_condition_comes_true_in_time_or_not(start: Callable[..., Any]) -> None:
    clock = start()[0].clock
    begin = clock.now
    assert comes_true(lambda: clock.now >= begin + 1, seconds=2)
    assert not comes_true(lambda: clock.now >= begin + 9, seconds=2)
    assert clock.now == pytest.approx(begin + 3, abs=0.1)


@pytest.mark.parametrize("faults", [(), ("etcd-late",)])
def test_a_late_answer_of_etcd_is_awaited_and_another_error_is_not(start: Callable[..., Any], faults: Any) -> None:
    _, namespace, agent, _ = start(*faults)
    namespace.publish(agent)
    namespace.publish_anywhere(agent)
    agent.invalidate_local_metadata()
    namespace.await_gone(agent)
    _, broken, agent, _ = start("etcd-fails")
    for step in (broken.await_gone, broken.publish):
        with pytest.raises(NixlPluginError, match=r"^etcd fails$"):
            step(agent)


@pytest.mark.parametrize(
    ("label", "requests", "watched"),
    [
        ("", [("/n/first/", True)], True),
        ("part", [("/n/first/", True), ("/n/first/part", True)], True),
        ("", [("/n/first/", True), ("/n/first/part", False)], True),
        ("", [("/n/first/", False)], False),
        ("part", [("/n/first/", True)], False),
        ("", [], False),
    ],
)
def test_a_watch_is_awaited_until_etcd_has_confirmed_it(
    start: Callable[..., Any], label: str, requests: list[tuple[str, bool]], watched: bool
) -> None:
    nixl, namespace, owner, finder = start()
    nixl.proxy.requests = [SimpleNamespace(key=key, confirmed=confirmed) for key, confirmed in requests]
    if watched:
        namespace.await_watch(nixl.proxy, finder, owner, label)
        return
    with pytest.raises(LateError) as late:
        namespace.await_watch(nixl.proxy, finder, owner, label)
    key = f"/n/first/{label}"
    assert str(late.value) == f"waited 30 s for worker 2 to watch {key}, so as to hear when it is withdrawn"


def never(*_: Any, **__: Any) -> None:
    """Do nothing, so that what is awaited never comes."""


@pytest.mark.parametrize("complains", [False, True])
def test_what_is_awaited_in_vain_is_named_with_what_nixl_wrote(
    start: Callable[..., Any], complains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl, namespace, first, second = start("mute-first")
    nixl.clock.sleep(1)
    for agent in (first, second):
        if complains:
            agent.log(f"etcd has a fault for {agent.name}")
    monkeypatch.setattr(DoubledAgent, "_send_or_give", never)
    first_wrote, second_wrote = (
        (f"E0101 etcd has a fault for {name}" for name in ("first", "second")) if complains else ["nothing"] * 2
    )
    compare = "compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both agents, including slashes"
    silent = "NIXL reported no error to Python"
    steps: list[tuple[Callable[[], None], str, str]] = [
        (
            lambda: namespace.publish_part(first, "part", connections=True),
            f"worker 1 to publish its metadata under /n/first/part: {silent}",
            f"read what NIXL wrote: {first_wrote}",
        ),
        (
            lambda: namespace.publish_anywhere(first),
            f"worker 1 to publish its metadata under any key: {silent}",
            f"read what NIXL wrote: {first_wrote}",
        ),
        (
            lambda: namespace.await_gone(first),
            "etcd to have no key under /n/first/, which worker 1 removed",
            f"read what NIXL wrote: {first_wrote}",
        ),
        (
            lambda: namespace.await_loaded(second, first, label="part"),
            "worker 2 to load the metadata of first that is in etcd under /n/first/part",
            f"{compare}; what NIXL wrote last: {second_wrote}",
        ),
    ]
    for step, description, remedy in steps:
        with pytest.raises(LateError) as late:
            step()
        assert str(late.value) == f"waited 30 s for {description}\nremedy: {remedy}"
    second.add_remote_agent(first.get_agent_metadata())
    with pytest.raises(LateError) as late:
        namespace.await_forgotten(second, first)
    assert str(late.value) == (
        "waited 30 s for worker 2 to forget first, which removed its metadata from etcd\nremedy: check whether its "
        "watch reaches etcd (a proxy may end idle streams); as a workaround call remove_remote_agent; what NIXL wrote "
        f"last: {second_wrote}"
    )


# The namespace of the deployment

SLASH = "tools and roles that know NIXL's keys expect a slash"


def split(name: str) -> Judgement:
    return Judgement(
        Verdict.WARN,
        f"NIXL_ETCD_NAMESPACE={name}: agents publish under {name}/<agent>/, but agents without the variable under "
        "/nixl/agents//<agent>/, so they never find each other, although NIXL's documentation calls both the same",
        "set NIXL_ETCD_NAMESPACE for every agent of the deployment, or for none",
    )


@pytest.mark.parametrize(
    ("name", "judged"),
    [
        (None, Judgement(Verdict.PASS, "NIXL_ETCD_NAMESPACE is not set: agents publish under /nixl/agents//<agent>/")),
        ("/nixl/agents/", Judgement(Verdict.PASS, "agents publish under /nixl/agents//<agent>/")),
        ("/nixl/agents", split("/nixl/agents")),
        ("/nixl/agents//", split("/nixl/agents//")),
        ("/prod/", Judgement(Verdict.PASS, "agents publish under /prod//<agent>/")),
        (
            "prod/",
            Judgement(
                Verdict.WARN,
                "NIXL_ETCD_NAMESPACE='prod/' does not begin with a slash: keys are prod//<agent>/",
                f"set NIXL_ETCD_NAMESPACE=/prod/: {SLASH}",
            ),
        ),
        (
            "",
            Judgement(
                Verdict.WARN,
                "NIXL_ETCD_NAMESPACE='' does not begin with a slash: keys are /<agent>/",
                f"unset NIXL_ETCD_NAMESPACE: {SLASH}",
            ),
        ),
    ],
)
def test_the_namespace_of_a_deployment_is_judged(
    name: str | None, judged: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIXL_ETCD_NAMESPACE", raising=False)
    if name is not None:
        monkeypatch.setenv("NIXL_ETCD_NAMESPACE", name)
    assert test_namespaces.judge_namespace(name) == judged
    check = test_namespaces.test_the_namespace_of_this_deployment_cannot_split_it
    assert conclusion_of(check) == f"{judged.verdict.value}: {judged.reason}"


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
        ("external", PLAIN, "", "", NO_NAMESPACE.format("")),
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
    initiator, target = calls.initiator, calls.target
    agents = calls.Agents.return_value.__enter__.return_value
    agents.start_each.return_value = [initiator, target]
    agents.start.side_effect = [initiator, target]
    for module, names in (
        (test_backends, ("Agents", "add_storage", "use_each", "judge_uses")),
        (test_hierarchy, ("Agents", "add_storage", "move_through", "judge_legs")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(calls, name))
        monkeypatch.setattr(module.os, "environ", {"UCX_TLS": "tcp"})
        backends = {
            name: SimpleNamespace(environment=lambda environ, name=name: {name: f"set beside {environ['UCX_TLS']}"})
            for name in ("UCX", "LIBFABRIC", "POSIX")
        }
        monkeypatch.setattr(module, "BACKENDS", backends)
    judged = Judgement(Verdict.PASS, "judged")
    calls.judge_uses.return_value = calls.judge_legs.return_value = judged
    return calls


CLUSTER: Any = SimpleNamespace(hosts=["first", "second", "third"])


def test_transfers_by_each_backend_are_recorded_and_judged(
    started: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    settings, run = make_settings(backend=("POSIX", "UCX", "LIBFABRIC"), file_dir="/d", timeout=9.0), MagicMock()
    check = test_backends.test_each_transfer_goes_by_the_backend_that_was_chosen
    assert conclusion_of(check, nixl_settings=settings, nixl_cluster=CLUSTER, nixl_run=run) == "PASS: judged"
    pair = (started.initiator, started.target)
    environment = dict.fromkeys(("UCX", "LIBFABRIC", "POSIX"), "set beside tcp")
    agents = call.Agents().__enter__()
    calls = [
        call.Agents("first", settings),
        agents,
        agents.start_each(
            ["initiator", "target"],
            backends=("UCX", "LIBFABRIC"),
            environment=environment,
            hosts=["first", "second"],
            progress_thread=None,
        ),
        call.add_storage(started.initiator),
        call.use_each(*pair, ("UCX", "LIBFABRIC", "POSIX"), directory="/d", seconds=9.0),
        call.Agents().__exit__(None, None, None),
        call.judge_uses(started.use_each.return_value),
    ]
    assert started.mock_calls == calls
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
