# SPDX-License-Identifier: Apache-2.0
"""The suite ``control_path`` times the right calls of the right agents, records their figures, and ends as judged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.control_path.check import ControlPath
from pytest_nixl.core.errors import LateError, NixlPluginError
from pytest_nixl.core.units import MIB
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.control_path import conftest, test_control_path, test_published

JUDGED = Judgement(Verdict.WARN, "reason")


@pytest.fixture
def record() -> MagicMock:
    """What writes figures to the report, and judges them."""
    return MagicMock(return_value=JUDGED)


def test_two_agents_of_a_backend_start_in_their_own_workers_and_end_with_the_module(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = MagicMock()
    for name, double in {
        "Agents": agents,
        "LocalHost": lambda own: ("host", own),
        "supervisor": lambda: "supervisor",
    }.items():
        monkeypatch.setattr(conftest, name, double)
    started = agents.return_value.__enter__.return_value
    started.start_each.return_value = ["an initiator", "a target"]
    with ExitStack() as stack:
        settings = make_settings(backend=("UCX", "LIBFABRIC"), timeout=7.0)
        start = value_of(conftest.start_path, stack, nixl_settings=settings)
        assert start("LIBFABRIC") == ControlPath("LIBFABRIC", "an initiator", "a target", 7.0)  # type: ignore[arg-type]
        host, own_settings = agents.call_args.args
        assert (host, own_settings.backend) == (("host", "supervisor"), ("LIBFABRIC",))
        started.start_each.assert_called_once_with(["initiator", "target"], progress_thread=None)
        agents.return_value.__exit__.assert_not_called()
    agents.return_value.__exit__.assert_called_once()


def test_tests_share_healthy_agents_of_a_backend() -> None:
    paths = value_of(conftest.shared_paths, ExitStack())
    assert paths == {}
    start = MagicMock(side_effect=lambda backend: SimpleNamespace(backend=backend, healthy=True))

    def path(backend: str) -> Any:
        return value_of(conftest.control_path, ExitStack(), agent_backend=backend, start_path=start, shared_paths=paths)

    first, other = path("UCX"), path("LIBFABRIC")
    assert (first.backend, other.backend) == ("UCX", "LIBFABRIC")
    assert (path("UCX"), path("LIBFABRIC")) == (first, other)
    first.healthy = False
    again = path("UCX")
    assert again is not first
    assert path("UCX") is again
    assert start.mock_calls == [call("UCX"), call("LIBFABRIC"), call("UCX")]


PAGES, SHARED = [(1, 4096), (16, 4096), (256, 4096)], [(1, MIB), (1, 64 * MIB)]


@pytest.mark.parametrize(
    ("check", "method", "level", "calls"),
    [
        (test_control_path.test_an_agent_is_created, "creation", "standard", [()]),
        (test_control_path.test_memory_is_registered_and_deregistered, "registration", "standard", [*PAGES, *SHARED]),
        (
            test_control_path.test_memory_is_registered_and_deregistered,
            "registration",
            "extended",
            [*PAGES, *SHARED, (1, 256 * MIB)],
        ),
        (test_control_path.test_metadata_is_exported_and_loaded, "metadata", "standard", [(1,), (16,), (256,)]),
        (test_control_path.test_the_first_transfer_and_later_ones, "connection", "standard", [()]),
        (test_control_path.test_notifications_arrive, "notifications", "standard", [()]),
    ],
)
def test_the_figures_of_each_call_are_recorded_and_judged(
    check: Callable[..., None],
    method: str,
    level: str,
    calls: list[tuple[int, ...]],
    record: MagicMock,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first transfer needs new agents. The largest region does not fit into the memory of this host."""
    path, start = MagicMock(), MagicMock()
    getattr(path, method).side_effect = lambda *arguments: [(*arguments, "first"), (*arguments, "second")]
    fitting = MagicMock(side_effect=lambda sizes: [size for size in sizes if size < 1024 * MIB])
    monkeypatch.setattr(test_control_path, "sizes_that_fit", fitting)
    arguments: dict[str, Any] = {"record_figures": record}
    if method == "connection":
        start.return_value = path
        arguments |= {"agent_backend": "UCX", "start_path": start}
    else:
        arguments["control_path"] = path
    if method == "registration":
        arguments["nixl_settings"] = make_settings(level=level)
    assert conclusion_of(check, **arguments) == "WARN: reason"
    assert path.mock_calls == [getattr(call, method)(*call_arguments) for call_arguments in calls]
    record.assert_called_once_with([(*sizes, place) for sizes in calls for place in ("first", "second")])
    assert start.call_args_list == [call("UCX")] * (method == "connection")
    more = (256 * MIB, 1024 * MIB) if level == "extended" else ()
    assert fitting.mock_calls == [call((MIB, 64 * MIB, *more))] * (method == "registration")


def test_the_growth_of_registrations_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = MagicMock(return_value=JUDGED)
    monkeypatch.setattr(test_control_path, "judge_path_growth", judge)
    check = test_control_path.test_registration_does_not_become_slower
    assert conclusion_of(check, control_path="a path") == "WARN: reason"
    judge.assert_called_once_with("a path")


class Publishing:
    """A namespace whose agents only advance a clock: a publication takes a second, a start 1000 seconds.

    :param searches: the seconds of each search for all metadata.
    :param missing: the names of the agents that the last search does not find.
    """

    seconds = 60.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, searches: list[float], missing: list[str]) -> None:
        self.now = 0.0
        self.log: list[object] = []
        self._searches, self._missing = searches, missing
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for name, double in {
            "time": clock,
            "find_all": self.find,
            "complaint": lambda agent: f"{agent.stderr}",
        }.items():
            monkeypatch.setattr(test_published, name, double)
        self.stderr = ""

    def start(self, *names: str) -> list[Any]:
        self.log.append(names)
        return [
            SimpleNamespace(worker=SimpleNamespace(name=name), stderr=self.stderr, beside=self.agent) for name in names
        ]

    def agent(self, name: str) -> Any:
        self.now += 1000
        return SimpleNamespace(name=name, send_local_metadata=lambda: self.publish(name))

    def publish(self, name: str) -> None:
        self.now += 1
        self.log.append(f"{name} publishes")

    def find(self, finder: Any, publishers: list[Any], seconds: float) -> list[str]:
        self.now += self._searches.pop(0)
        self.log.append((finder.worker.name, [publisher.name for publisher in publishers], seconds))
        return [] if self._searches else self._missing


def rounds(count: int) -> list[object]:
    """Return what happens in three rounds of so many agents."""
    names = [[f"of-{count}-{number}-{place}" for place in range(count - 1)] for number in range(3)]
    return [
        (f"of-{count}-0", f"of-{count}-1"),
        *(
            step
            for publishers in names
            for step in (*(f"{name} publishes" for name in publishers), (f"of-{count}-0", publishers, 60.0))
        ),
    ]


@pytest.mark.parametrize(
    ("check", "counts"),
    [
        (test_published.test_an_agent_is_found_soon_after_it_published, [2]),
        (test_published.test_many_agents_are_found_soon_after_they_published, [4, 16]),
    ],
)
def test_the_median_time_until_all_agents_are_found_is_a_figure(
    check: Callable[..., None], counts: list[int], record: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time begins before the first publication, and the start of the agents is no part of it."""
    namespace = Publishing(monkeypatch, [30.0, 10.0, 20.0] * len(counts), [])
    assert conclusion_of(check, namespace=namespace, agent_backend="UCX", record_figures=record) == "WARN: reason"
    assert namespace.log == [step for count in counts for step in rounds(count)]
    record.assert_called_once_with(
        [
            Figure.of(
                "publish-to-found",
                20.0 + count - 1,
                {"backend": "UCX", "agents": count},
                tuple(search + count - 1 for search in (30.0, 10.0, 20.0)),
            )
            for count in counts
        ]
    )


@pytest.mark.parametrize(("stderr", "wrote"), [("", "nothing"), ("E0101 etcd is gone", "E0101 etcd is gone")])
def test_agents_that_are_not_found_in_time_are_an_error_with_an_example(
    stderr: str, wrote: str, record: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = Publishing(monkeypatch, [5.0], ["of-4-0-1", "of-4-0-2"])
    namespace.stderr = stderr
    check = test_published.test_many_agents_are_found_soon_after_they_published
    with pytest.raises(NixlPluginError) as error:
        conclusion_of(check, namespace=namespace, agent_backend="UCX", record_figures=record)
    assert (error.value.reason, error.value.remedy) == (
        "of-4-0 did not load the metadata of 2 of 3 agents within 60 s, for example of of-4-0-1; NIXL wrote: " + wrote,
        "check NIXL_ETCD_ENDPOINTS with `pytest-nixl endpoint URL`, and run suites/metadata",
    )
    record.assert_not_called()


REFUSED = "E0101 etcdserver: request is too large"


@pytest.mark.parametrize(
    ("held", "output", "conclusion"),
    [
        ([b"old", b"metadata"], "", "does not occur and affects: [160, 8, b'metadata', '']"),
        ([b"old"], f"I0101\n{REFUSED}\n", f"occurs and affects: [160, 8, b'old', '{REFUSED}']"),
        ([None], f"{REFUSED}\n", f"occurs and affects: [160, 8, None, '{REFUSED}']"),
        ([b"old"], "E0101 etcd is gone\n", "E0101 etcd is gone"),
        ([None], "", "nothing"),
    ],
)
def test_metadata_of_a_kv_cache_that_etcd_does_not_get_is_a_finding(
    held: list[bytes | None],
    output: str,
    conclusion: str,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked up until etcd has it or NIXL reports a refusal; what happens later is an error."""
    log: list[object] = []
    settings, values = make_settings(), [*held]
    agent = MagicMock(**{"worker.output": lambda: output})
    agent.send_local_metadata.side_effect = lambda: log.append("publish again")

    def register(agent: object, count: int) -> bytes:
        log.append(f"register {count}")
        return b"metadata"

    def lookup(key: str) -> bytes | None:
        log.append(key)
        return values.pop(0) if len(values) > 1 else values[0]

    namespace = MagicMock(
        **{
            "start.return_value": [agent],
            "publish.side_effect": lambda agent: log.append("publish"),
            "key.return_value": "/a/key",
            "client.get": lookup,
        }
    )
    namespace.seconds = 0.03
    monkeypatch.setattr(test_published, "register_regions", register)
    monkeypatch.setattr(test_published, "describe_oversize", lambda *arguments: f"{[*arguments]}")
    monkeypatch.setattr(test_published, "regions_of", lambda plan: {settings.kv_plan: 160}[plan])
    check = test_published.test_the_metadata_of_a_kv_cache_fits_into_etcd
    if "affects" in conclusion:
        done = conclusion_of(check, namespace=namespace, nixl_settings=settings)
        assert done == f"NIXL-ETCD-OVERSIZE {conclusion}"
    else:
        with pytest.raises(LateError) as error:
            conclusion_of(check, namespace=namespace, nixl_settings=settings)
        assert (error.value.reason, error.value.remedy) == (
            "waited 0.03 s for etcd to have the metadata of 160 regions under /a/key, or to refuse it",
            f"read what NIXL wrote: {conclusion}",
        )
    assert log[:4] == ["publish", "register 160", "publish again", "/a/key"]
    assert {*log[4:]} <= {"/a/key"}
    assert namespace.start.mock_calls == [call("publisher")]
    assert namespace.publish.mock_calls == [call(agent)]
    assert {tuple(mock_call.args) for mock_call in namespace.key.mock_calls} == {(agent,)}
