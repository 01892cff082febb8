# SPDX-License-Identifier: Apache-2.0
"""The flows of a traffic pattern with the real NIXL: alone and together, every byte compared, and a rank that ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from helpers.contention import spinning
from helpers.forked_runs import save_time

from pytest_nixl.checks.pattern.check import judge_pattern_culprit, paired_again
from pytest_nixl.checks.pattern.fairness import ALONE, LOADS, TOGETHER, PatternKind, judge_fairness
from pytest_nixl.checks.pattern.rank_flows import REPEATS, RankFlows
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import Corruption
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import Flow, PatternChoice
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError

HOST = MemoryPair("DRAM", "DRAM")
KIB = 1 << 10

Connect = Callable[..., RankFlows]


@pytest.fixture
def connect(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Start the workers of a pattern. They are forked: the tests with this fixture judge no rate."""
    save_time(monkeypatch.setattr)
    with ExitStack() as ended:

        def make(
            text: str, op: str = "WRITE", *, size: int = 64 * KIB, depth: int = 1, timeout: float = 60.0
        ) -> RankFlows:
            pattern = PatternChoice.parse(text).of(1, size)
            kind = PatternKind(pattern, "UCX", op, HOST, depth)
            settings = make_settings(duration=0.02, timeout=timeout)
            hosts = [LocalHost(supervisor(), rank) for rank in range(pattern.ranks)]
            names = [f"rank {rank}" for rank in range(pattern.ranks)]
            flows = RankFlows(hosts, names, kind, settings, settings.agents[0])
            ended.callback(flows.close)
            return flows

        yield make


@pytest.mark.long
@pytest.mark.parametrize(("text", "op", "depth"), [("outcast:3", "READ", 1), ("alltoall:3", "WRITE", 2)])
def test_each_flow_is_measured_alone_and_together(connect: Connect, text: str, op: str, depth: int) -> None:
    measured = connect(text, op, depth=depth).measure(repeats=2)
    pattern = PatternChoice.parse(text).of(1, 64 * KIB)
    assert [flow.flow for flow in measured.flows] == list(pattern.flows)
    for flow in measured.flows:
        assert flow.corruption is None
        assert flow.transports
        for load in LOADS:
            assert len(flow.windows(load)) == 2
            assert all(count >= depth and seconds > 0 for count, seconds in flow.windows(load))
            samples = flow.samples(measured.kind.key(flow.flow, load), load)
            assert samples.bandwidth == pytest.approx(flow.rate(load))
            assert len(samples.contention) == 1
    assert measured.total == pytest.approx(sum(flow.rate(TOGETHER) for flow in measured.flows))


@pytest.mark.long
def test_a_flow_whose_bytes_never_arrive_is_corrupt_in_every_byte(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets hold the complements of what is sent, so that nothing there can be right by chance."""
    flows = connect("incast:3", depth=2)
    [step] = flows._run([flows._all_flows])
    assert {transfers for windows in step.windows.values() for transfers, _ in windows} == {2}, "each slot once"
    monkeypatch.setattr(RankFlows, "_run", lambda *_: [])
    corruptions: dict[Flow, Corruption] = {}
    flows._verify("before the timed transfers", corruptions)
    assert {flow: corruption.wrong_bytes for flow, corruption in corruptions.items()} == dict.fromkeys(
        flows._flows, 2 * 64 * KIB
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "timeout", "text"),
    [(signal.SIGKILL, 60.0, "SIGKILL"), (signal.SIGSTOP, 5.0, "was stopped by a signal")],
)
def test_a_rank_that_ends_or_stops_is_named_and_the_others_are_ended(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, number: int, timeout: float, text: str
) -> None:
    flows = connect("incast:3", timeout=timeout)
    pid = flows.agents[2].worker.pid
    run = RankFlows._timed

    def disturb(self: RankFlows, *more: object) -> None:
        os.kill(pid, number)
        run(self, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(RankFlows, "_timed", disturb)
    with pytest.raises(WorkerError, match="rank 2") as caught:
        flows.measure(repeats=1)
    assert text in str(caught.value)
    assert not any(agent.worker.alive for agent in flows.agents)


def test_the_keys_of_rows_name_pattern_and_load() -> None:
    kind = PatternKind(PatternChoice.parse("incast:3").of(1, 64 * KIB), "UCX", "READ", HOST)
    key = kind.key(kind.pattern.flows[0], ALONE)
    assert str(key) == "UCX/READ/DRAM:DRAM/64KiB/batch1/depth1/0-1/load=alone,pattern=incast:3"


@pytest.mark.long
def test_four_busy_loops_on_a_healthy_host_accuse_no_rank_and_no_flow(make_settings: Callable[..., Settings]) -> None:
    """The workers see that others take processor time, and the verdict is PASS or INCONCLUSIVE."""
    names = [f"rank {rank}" for rank in range(3)]
    kind = PatternKind(paired_again(names, 64 * KIB), "UCX", "WRITE", HOST, 2)
    settings = make_settings(duration=0.1, timeout=120.0)
    hosts = [LocalHost(supervisor(), rank) for rank in range(3)]
    with ExitStack() as stack:
        flows = RankFlows(hosts, names, kind, settings, settings.agents[0])
        stack.callback(flows.close)
        with ExitStack() as busy:
            for _ in range(4):
                busy.enter_context(spinning())
            measured = flows.measure()
    assert {len(flow.windows(load)) for flow in measured.flows for load in LOADS} == {REPEATS}
    for judged in (judge_pattern_culprit(measured), judge_fairness(measured)):
        assert judged.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), (judged, measured.disturbed)
        assert "culprit" not in judged.reason
