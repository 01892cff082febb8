# SPDX-License-Identifier: Apache-2.0
"""Planted leaks are found by the figure of what leaks, and the real NIXL is healthy, except for its findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from helpers.cli_run import repeats

from pytest_nixl.checks.endurance.check import (
    CYCLES,
    RESOURCES,
    CycleKind,
    Endurance,
    endure,
    judge_endurance,
    kept_memory,
    kept_sockets,
)
from pytest_nixl.core.strict import StrictError
from pytest_nixl.judge.figure_bounds import judge_figures
from pytest_nixl.model.figure import FIGURE_KINDS, Bound, Figure
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

Run = Callable[..., Judgement]
#: The method of the agent that each cycle calls once.
ONCE = {
    "transfer": "release_xfer_handle",
    "connection": "remove_remote_agent",
    "registration": "deregister_memory",
    "agent": "create_backend",
}


def judged(endurance: Endurance, kind: CycleKind) -> Judgement:
    """Repeat the cycles, and judge them by the default limits."""
    return judge_endurance(judge_figures(endure(endurance, ()), kind.limits), endurance)


@pytest.fixture
def run(nixl_settings: Settings) -> Run:
    """Repeat a cycle with UCX, with a leak planted in the worker, and judge it by the default limits."""

    def repeated(cycle: str, leak: str = "", **arguments: str) -> Judgement:
        with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=("UCX",), timeout=120)) as agents:
            agent = agents.start(progress_thread=None)
            if leak:
                agent.run(f"helpers.leak_functions:{leak}", **arguments)
            return judged(Endurance(agent, CYCLES[cycle], "UCX", 0.0), CYCLES[cycle])

    return repeated


LEAKS = [
    ("kibibyte", "growth-heap (UCX {cycle}): "),
    ("descriptor", "growth-descriptors (UCX {cycle}): 1, above its bound of 0.1 (default of the check, from: docs/"),
]


@pytest.mark.long
@pytest.mark.parametrize(("cycle", "leak", "reason"), [("transfer", *LEAKS[0]), ("registration", *LEAKS[1])])
def test_a_leak_of_a_kibibyte_or_a_descriptor_is_found(run: Run, cycle: str, leak: str, reason: str) -> None:
    judgement = run(cycle, leak, method=ONCE[cycle])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith(reason.format(cycle=cycle))
    assert f" times {CYCLES[cycle].label}; growth with each (99 % interval): " in judgement.reason
    assert judgement.remedy.startswith("Run the suite endurance again with a longer --nixl-duration")


@pytest.mark.long
@pytest.mark.whole  # tests/integration/test_endurance_suite.py runs each cycle
@pytest.mark.parametrize("cycle", ["transfer", "registration"])
def test_a_healthy_cycle_passes(run: Run, cycle: str) -> None:
    judgement = run(cycle, "nothing", method=ONCE[cycle])
    assert judgement.verdict is Verdict.PASS, judgement.reason
    assert f"times {CYCLES[cycle].label}" in judgement.reason


@pytest.mark.long
@pytest.mark.parametrize(
    ("cycle", "leak", "arguments", "figure"),
    [
        ("transfer", "connected", {"method": "release_xfer_handle"}, "growth-sockets"),
        ("registration", "region", {}, "growth-metadata"),
        ("registration", "slower", {"method": "register_memory"}, "slowdown"),
        pytest.param(
            *("connection", "descriptor", {"method": "remove_remote_agent"}, "growth-descriptors"),
            marks=pytest.mark.whole,
        ),
        ("connection", "thread", {"method": "remove_remote_agent"}, "growth-threads"),
        # A run of the suite finds this leak, too: test_endurance_suite.py.
        pytest.param(*("agent", "kibibyte", {"method": "create_backend"}, "growth-heap"), marks=pytest.mark.whole),
        pytest.param(
            *("agent", "descriptor", {"method": "create_backend"}, "growth-descriptors"), marks=pytest.mark.whole
        ),
    ],
)
def test_what_grows_is_named(run: Run, cycle: str, leak: str, arguments: dict[str, str], figure: str) -> None:
    judgement = run(cycle, leak, **arguments)
    assert judgement.verdict is Verdict.FAIL
    assert f"{figure} (UCX {cycle}): " in judgement.reason


@pytest.mark.long
@pytest.mark.parametrize(("function", "sockets_stay"), [("nothing", True), ("close_connections", False)])
def test_sockets_of_removed_agents_are_a_finding_only_if_they_stay(
    nixl_settings: Settings, function: str, sockets_stay: bool
) -> None:
    with Agents(LocalHost(supervisor()), replace(nixl_settings, backend=("UCX",), timeout=120)) as agents:
        agent = agents.start(progress_thread=None)
        arguments = {"method": "remove_remote_agent"} if function == "nothing" else {}
        agent.run(f"helpers.leak_functions:{function}", **arguments)
        figures = Endurance(agent, CYCLES["connection"], "UCX", 0.0).figures()
    assert kept_sockets(figures) is sockets_stay
    assert judge_figures(figures, CYCLES["connection"].limits).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("backend", "figure", "grown", "verdict"),
    [
        ("LIBFABRIC", "growth-heap", 2300, Verdict.PASS),
        ("LIBFABRIC", "growth-heap", 2300 + 1024, Verdict.FAIL),
        ("UCX", "growth-heap", 1024, Verdict.FAIL),
        ("LIBFABRIC", "growth-memory", 21_300, Verdict.PASS),
        ("UCX", "growth-memory", 21_300, Verdict.FAIL),
    ],
)
def test_an_agent_of_libfabric_may_leave_what_its_finding_says_and_no_kibibyte_more(
    backend: str, figure: str, grown: float, verdict: Verdict
) -> None:
    figures = [Figure.of(figure, grown, {"backend": backend, "cycle": "agent"})]
    assert judge_figures(figures, CYCLES["agent"].limits).verdict is verdict


@pytest.mark.parametrize(("grown", "is_finding"), [(300, False), (1700, True)])
def test_memory_of_deleted_agents_is_a_finding_only_if_it_is_more_than_a_healthy_backend_leaves(
    grown: float, is_finding: bool
) -> None:
    labels = {"backend": "LIBFABRIC", "cycle": "agent"}
    figures = (Figure.of("growth-memory", 20_000, labels), Figure.of("growth-heap", grown, labels))
    assert kept_memory(figures) is is_finding


def test_each_resource_has_a_figure_and_each_cycle_a_limit_for_it() -> None:
    assert {f"growth-{name}" for name in RESOURCES} < set(FIGURE_KINDS)
    for kind in CYCLES.values():
        named = {bound.figure for bound in kind.limits}
        missing = {f"growth-{name}" for name in (*RESOURCES, "etcd-keys")} | {"slowdown"}
        assert missing - named == ({"growth-sockets"} if kind.kept_sockets else set())
        assert all(bound.default and bound.at_most for bound in kind.limits)


class CyclingAgent:
    """An agent whose cycles take an eighth of a second each, on a clock of its own.

    :param resource: what grows by 600 with each cycle; empty: nothing.
    :param until: the number of cycles after which nothing grows any more.
    :param lacking: a resource of which the worker does not tell.
    """

    def __init__(self, resource: str = "", until: int = 1 << 20, lacking: str = "") -> None:
        self.now, self.counts = 100.0, list[int]()
        self.worker = SimpleNamespace(timeout=1000.0)
        self._resource, self._until, self._lacking = resource, until, lacking

    def monotonic(self) -> float:
        return self.now

    def run(self, function: str, *, count: int, **_: object) -> dict[str, float]:
        self.counts.append(count)
        self.now += count / 8
        sample = {**dict.fromkeys((*RESOURCES, "reference"), 1.0), "seconds": 0.125}
        if self._resource:
            sample[self._resource] = 600.0 * min(sum(self.counts), self._until)
        sample.pop(self._lacking, None)
        return sample

    def endurance(self, monkeypatch: pytest.MonkeyPatch, cycle: str = "registration") -> Endurance:
        monkeypatch.setattr("pytest_nixl.checks.endurance.check.time", self)
        return Endurance(cast(NixlAgent, self), CYCLES[cycle], "UCX", 0.0)


_GROWING = "heap memory descriptors sockets threads shared-memory metadata"


@pytest.mark.parametrize("resource", _GROWING.split())
def test_each_resource_that_grows_is_named_alone(resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CyclingAgent(resource)
    endurance = agent.endurance(monkeypatch)
    grown = {figure.name: figure.value for figure in endure(endurance, ()) if figure.name.startswith("growth-")}
    assert grown == {f"growth-{name}": pytest.approx(600.0 * (name == resource)) for name in _GROWING.split()}
    assert endurance.describe().startswith(f"{sum(agent.counts)} times a registration and a deregistration; growth ")
    assert endurance.describe().partition("interval): ")[2].startswith(f"{resource} +")
    judgement = judged(CyclingAgent(resource).endurance(monkeypatch), CYCLES["registration"])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith(f"growth-{resource} (UCX registration): ")


@pytest.mark.parametrize(("until", "rounds"), [(0, 1), (100, 2), (1 << 20, 2)])
def test_what_grows_is_measured_again_and_the_lesser_counts(
    until: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = CyclingAgent("memory", until)
    endurance = agent.endurance(monkeypatch)
    judgement = judged(endurance, endurance.kind)
    assert judgement.verdict is (Verdict.FAIL if until > 100 else Verdict.PASS)
    assert len(agent.counts) == 4 + 24 * rounds
    assert ("nothing grows" in judgement.reason) is (until <= 100)


def test_a_bound_of_the_profile_is_a_reason_to_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CyclingAgent("heap")
    bound = Bound("growth-heap", "a profile", {}, at_most=100)
    endure(agent.endurance(monkeypatch, "connection"), (bound,))
    assert len(agent.counts) == 4 + 24 * 2
    agent.counts.clear()
    endure(agent.endurance(monkeypatch, "connection"), ())
    assert len(agent.counts) == 4 + 24


def test_cycles_that_become_slower_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    endurance = CyclingAgent("seconds").endurance(monkeypatch)
    figures = {figure.name: figure for figure in endurance.figures()}
    assert len(figures["cycle-time"].rounds) == 24, "without the warm-up"
    assert figures["slowdown"].value > 3
    judgement = judged(CyclingAgent("seconds").endurance(monkeypatch), CYCLES["registration"])
    assert judgement.reason.startswith("slowdown (UCX registration): ")


def test_only_the_heap_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = CyclingAgent(lacking="heap").endurance(monkeypatch).figures()
    assert "growth-heap" not in {figure.name for figure in figures}
    with pytest.raises(StrictError, match="threads"):
        CyclingAgent(lacking="threads").endurance(monkeypatch).figures()


@pytest.mark.parametrize("place", [0, 1])
def test_a_finding_is_seen_wherever_its_figure_stands(place: int) -> None:
    labels = {"backend": "UCX", "cycle": "agent"}
    sockets, heap = Figure.of("growth-sockets", 1.0, labels), Figure.of("growth-heap", 1700.0, labels)
    figures = [sockets, heap] if place == 0 else [heap, sockets]
    assert kept_sockets(figures)
    assert kept_memory(figures)
    assert not kept_sockets([heap])
    assert not kept_memory([sockets])


@pytest.mark.parametrize(("duration", "counts"), [(0.0, [4] * 24), (400.0, [4, 8, *[16] * 200])])
def test_samples_take_their_share_after_a_warm_up(
    duration: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = CyclingAgent()
    monkeypatch.setattr("pytest_nixl.checks.endurance.check.time", agent)
    endurance = Endurance(cast(NixlAgent, agent), CYCLES["publication"], "UCX", duration, lambda _: 7)
    figures = {figure.name: figure for figure in endurance.figures()}
    assert agent.counts == [3, 4, 4, 4, *counts]
    assert [keys for _, keys in figures["growth-etcd-keys"].samples] == [7] * len(counts)
    agent.counts.clear()
    endurance.figures()
    assert agent.counts[:4] != [3, 4, 4, 4], "a second call needs no warm-up"


#: The limits of heap and memory of each cycle, and of its slowdown.
LIMITS = {
    "transfer": (512, 512, 3),
    "connection": (4096, 8192, 3),
    "registration": (512, 512, 3),
    "publication": (512, 4096, 10),
    "agent": (768, 16384, 10),
}


@pytest.mark.parametrize("cycle", sorted({*CYCLES, *LIMITS}))
def test_each_cycle_has_its_limits(cycle: str) -> None:
    limits = {bound.figure: bound.at_most for bound in CYCLES[cycle].limits if "backend" not in bound.labels}
    assert (limits["growth-heap"], limits["growth-memory"], limits["slowdown"]) == LIMITS[cycle]
    assert ("growth-sockets" in limits) is (cycle != "connection"), "its finding says that sockets are kept"


@pytest.mark.soak
@pytest.mark.whole  # CI has each once, above
@pytest.mark.parametrize("number", repeats())
@pytest.mark.parametrize("leak", ["kibibyte", "descriptor", "nothing"])
def test_leaks_are_found_and_healthy_cycles_pass_every_time(run: Run, leak: str, number: int) -> None:
    cycle = ("transfer", "registration")[number % 2]
    judgement = run(cycle, leak, method=ONCE[cycle])
    assert judgement.verdict is (Verdict.PASS if leak == "nothing" else Verdict.FAIL), judgement.reason
