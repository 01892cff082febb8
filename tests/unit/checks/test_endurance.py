# SPDX-License-Identifier: Apache-2.0
"""Planted leaks are found by the figure of what leaks, and the real NIXL is healthy, except for its findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

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
from pytest_nixl.judge.growth import Slope
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
    ],
)
def test_an_agent_of_libfabric_may_leave_what_its_finding_says_and_no_kibibyte_more(
    backend: str, figure: str, grown: float, verdict: Verdict
) -> None:
    figures = [Figure.of(figure, grown, {"backend": backend, "cycle": "agent"})]
    assert judge_figures(figures, CYCLES["agent"].limits).verdict is verdict


#: Of each cycle its repeats between two samples, and its limits of heap, memory and slowdown.
LIMITS = {
    "transfer": (150, "a transfer with a notification", 512, 512, 3),
    "connection": (12, "adding an agent, a transfer and its removal", 4096, 8192, 3),
    "registration": (150, "a registration and a deregistration", 512, 512, 3),
    "publication": (12, "a publication to etcd and its removal", 512, 4096, 10),
    "agent": (3, "the creation, a transfer and the deletion of an agent", 768, 16384, 10),
}


@pytest.mark.parametrize("cycle", sorted({*CYCLES, *LIMITS}))
def test_each_cycle_has_a_limit_for_each_resource(cycle: str) -> None:
    kind = CYCLES[cycle]
    count, label, heap, memory, slowdown = LIMITS[cycle]
    sockets = {"growth-sockets": 0.1} if cycle != "connection" else {}  # its finding says that they are kept
    usual = {f"growth-{name}": 0.1 for name in ("descriptors", "threads", "shared-memory")} | sockets
    usual |= {"growth-heap": heap, "growth-memory": memory, "growth-metadata": 1, "growth-etcd-keys": 0.02}
    libfabric = {"growth-heap": heap + (2304 if cycle == "agent" else 0), "growth-memory": memory + 16384}
    limits: dict[str, dict[str, float | None]] = {"": {}, "LIBFABRIC": {}}
    for bound in kind.limits:
        assert (bound.labels["cycle"], bound.default) == ((cycle,), True)
        limits["".join(bound.labels.get("backend", ()))][bound.figure] = bound.at_most
    assert limits == {"": {**usual, "slowdown": slowdown}, "LIBFABRIC": libfabric}
    assert (kind.count, kind.label) == (count, label)
    assert {*limits[""]} <= {*FIGURE_KINDS}


class CyclingAgent:
    """An agent whose cycles take an eighth of a second each, on a clock of its own.

    :param resource: what grows by 600 with each cycle; empty: nothing.
    :param until: the number of cycles after which nothing grows any more.
    :param lacking: a resource of which the worker does not tell, in these samples or in all.
    """

    def __init__(
        self, resource: str = "", until: int = 1 << 20, lacking: str = "", samples: Sequence[int] = range(99)
    ) -> None:
        self.now, self.counts, self.requests = 100.0, list[int](), list[dict[str, object]]()
        self.worker = SimpleNamespace(timeout=1000.0)
        self._resource, self._until, self._lacking, self._samples = resource, until, lacking, samples

    def monotonic(self) -> float:
        return self.now

    def run(self, function: str, *, count: int, **arguments: object) -> dict[str, float]:
        self.counts.append(count)
        self.requests.append({"function": function, **arguments})
        self.now += count / 8
        sample = {**dict.fromkeys((*RESOURCES, "reference"), 1.0), "seconds": 0.125}
        if self._resource:
            sample[self._resource] = 600.0 * min(sum(self.counts), self._until)
        if len(self.counts) - 1 in self._samples:
            sample.pop(self._lacking, None)
        return sample

    def endurance(
        self, monkeypatch: pytest.MonkeyPatch, cycle: str = "registration", duration: float = 0.0, **options: Any
    ) -> Endurance:
        monkeypatch.setattr("pytest_nixl.checks.endurance.check.time", self)
        return Endurance(cast(NixlAgent, self), CYCLES[cycle], "UCX", duration, **options)


NAMES = ("heap", "memory", "descriptors", "sockets", "threads", "shared-memory", "metadata")


@pytest.mark.parametrize("resource", NAMES)
def test_each_resource_that_grows_is_named_alone(resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CyclingAgent(resource)
    endurance = agent.endurance(monkeypatch)
    figures = endure(endurance, ())
    grown = {figure.name: figure.value for figure in figures[1:-1]}
    assert list(grown) == [f"growth-{name}" for name in NAMES]
    assert grown == {f"growth-{name}": pytest.approx(600.0 * (name == resource)) for name in NAMES}
    assert [figure.name for figure in (figures[0], figures[-1])] == ["cycle-time", "slowdown"]
    assert all(figure.labels == {"backend": "UCX", "cycle": "registration"} for figure in figures)
    amount = "+600 B" if resource in ("heap", "memory", "metadata") else "+600"
    sentence = (
        f"{sum(agent.counts)} times a registration and a deregistration; growth with each (99 % interval): {resource} "
        f"{amount} ({amount} to {amount})"
    )
    assert endurance.describe() == sentence
    judgement = judge_endurance(judge_figures(figures, endurance.kind.limits), endurance)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith(f"growth-{resource} (UCX registration): ")
    assert judgement.reason.endswith(f"; {sentence}")
    assert judgement.remedy
    passed = Judgement(Verdict.PASS, "the figures keep their bounds")
    assert judge_endurance(passed, endurance) == Judgement(Verdict.PASS, sentence)
    assert {tuple(request.items()) for request in agent.requests} == {
        (("function", "pytest_nixl.checks.endurance.worker:repeat"), ("cycle", "registration"), ("backend", "UCX"),
         ("seconds", 250.0), ("label", "")),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("slope", "value", "text"),
    [
        (Slope(2.0, 1.0, 3.0), 1.0, "heap +2 B (+1 B to +3 B)"),
        (Slope(2.0, 0.0, 3.0), 0.0, "heap +2 B (+0 B to +3 B)"),
        (Slope(-2.0, -3.0, 0.0), 0.0, "heap -2 B (-3 B to +0 B)"),
        (Slope(1.0, 0.0, 0.0), 0.0, "nothing grows"),
    ],
)
def test_the_least_growth_of_its_interval_counts(
    slope: Slope, value: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = Slope(0.0, 0.0, 0.0)
    expected = SimpleNamespace(of=lambda values, places: slope if values[0] != values[-1] else flat)
    monkeypatch.setattr("pytest_nixl.checks.endurance.check.Slope", expected)
    endurance = CyclingAgent("heap").endurance(monkeypatch)
    assert {figure.name: figure.value for figure in endurance.figures()}["growth-heap"] == value
    assert endurance.describe().partition(": ")[2] == text


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
    for bounds, rounds in (((Bound("growth-heap", "a profile", {}, at_most=100),), 2), ((), 1)):
        agent = CyclingAgent("heap")
        endure(agent.endurance(monkeypatch, "connection"), bounds)
        assert len(agent.counts) == 4 + 24 * rounds


def test_cycles_that_become_slower_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    endurance = CyclingAgent("seconds").endurance(monkeypatch)
    figures = {figure.name: figure for figure in endurance.figures()}
    assert len(figures["cycle-time"].rounds) == 24, "without the warm-up"
    assert figures["slowdown"].value > 3
    judgement = judged(CyclingAgent("seconds").endurance(monkeypatch), CYCLES["registration"])
    assert judgement.reason.startswith("slowdown (UCX registration): ")


@pytest.mark.parametrize("samples", [range(99), [4], [27]])
def test_only_the_heap_may_be_unknown(samples: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = CyclingAgent(lacking="heap", samples=samples).endurance(monkeypatch).figures()
    assert [figure.name for figure in figures[1:-1]] == [f"growth-{name}" for name in NAMES[1:]]
    with pytest.raises(StrictError, match="threads"):
        CyclingAgent(lacking="threads").endurance(monkeypatch).figures()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("sockets", "heap", "expected"),
    [(0.2, 769.0, (True, True)), (0.1, 769.0, (False, True)), (0.2, 768.0, (True, False))],
)
def test_a_finding_is_seen_wherever_its_figure_stands(
    place: int, sockets: float, heap: float, expected: tuple[bool, bool]
) -> None:
    labels = {"backend": "UCX", "cycle": "agent"}
    figures = [Figure.of("growth-sockets", sockets, labels), Figure.of("growth-heap", heap, labels)]
    figures = [Figure.of("growth-memory", 20_000, labels), *figures[:: 1 - 2 * place]]
    assert (kept_sockets(figures), kept_memory(figures)) == expected


@pytest.mark.parametrize(
    ("duration", "timeout", "counts"),
    [(0.0, 1000.0, [4] * 24), (400.0, 1000.0, [4, 8, *[16] * 200]), (400.0, 4.0, [4, 8, *[8] * 400])],
)
def test_samples_take_their_share_after_a_warm_up(
    duration: float, timeout: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of publications ends when etcd has the last one, here after two seconds."""
    agent, labels = CyclingAgent(), list[str]()
    agent.worker.timeout = timeout

    def published(label: str) -> int:
        labels.append(label)
        return 7

    endurance = agent.endurance(monkeypatch, "publication", duration, published=published)
    figures = {figure.name: figure for figure in endurance.figures()}
    assert agent.counts[:28] == [3, 4, 4, 4, *counts][:28]
    assert sum(agent.counts[4:]) / 8 >= duration
    assert labels == [f"sampled-{sum(agent.counts[:number])}" for number in range(len(agent.counts))]
    assert labels == [request["label"] for request in agent.requests]
    samples = figures["growth-etcd-keys"].samples
    assert {keys for _, keys in samples} == {7}
    assert samples[0][0] == sum(agent.counts[:5])
    assert set(figures["cycle-time"].rounds) == {0.125}
    before = len(agent.counts)
    endurance.figures()
    assert agent.counts[before : before + 4] != [3, 4, 4, 4], "a second call needs no warm-up"


def test_the_time_of_a_publication_counts_until_etcd_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CyclingAgent()

    def published(label: str) -> int:
        agent.now += 1.5
        return 7

    endurance = agent.endurance(monkeypatch, "publication", published=published)
    (usual, *_) = endurance.figures()
    assert {*agent.counts} == {3}, "more would take more than half a second"
    assert (usual.name, usual.value, {*usual.rounds}) == ("cycle-time", 0.625, {0.625})


@pytest.mark.soak
@pytest.mark.whole  # CI has each once, above
@pytest.mark.parametrize("number", repeats())
@pytest.mark.parametrize("leak", ["kibibyte", "descriptor", "nothing"])
def test_leaks_are_found_and_healthy_cycles_pass_every_time(run: Run, leak: str, number: int) -> None:
    cycle = ("transfer", "registration")[number % 2]
    judgement = run(cycle, leak, method=ONCE[cycle])
    assert judgement.verdict is (Verdict.PASS if leak == "nothing" else Verdict.FAIL), judgement.reason
