# SPDX-License-Identifier: Apache-2.0
"""The flows of a traffic pattern with the real NIXL: alone and together, every byte compared, and a rank that ends."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.contention import spinning

from pytest_nixl.judge.pattern_culprit import judge_pattern_culprit, paired_again
from pytest_nixl.judge.pattern_fairness import judge_fairness
from pytest_nixl.measure.rank_flows import REPEATS, RankFlows
from pytest_nixl.model.flow_samples import ALONE, LOADS, TOGETHER, PatternKind
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import PatternChoice
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import Pending, Worker

HOST = MemoryPair("DRAM", "DRAM")
KIB = 1 << 10

Connect = Callable[..., RankFlows]


@pytest.fixture
def connect(make_settings: Callable[..., Settings]) -> Iterator[Connect]:
    """Start the workers of a pattern."""
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
@pytest.mark.parametrize(("text", "op", "depth"), [("incast:3", "WRITE", 2), ("outcast:3", "READ", 1),
                                                   ("alltoall:3", "WRITE", 1), ("alltoall:3", "READ", 2)])  # fmt: skip
def test_each_flow_is_measured_alone_and_together(connect: Connect, text: str, op: str, depth: int) -> None:
    found = connect(text, op, depth=depth).measure(repeats=2)
    pattern = PatternChoice.parse(text).of(1, 64 * KIB)
    assert [each.flow for each in found.flows] == list(pattern.flows)
    for each in found.flows:
        assert each.corruption is None
        assert each.transports
        for load in LOADS:
            assert len(each.windows(load)) == 2
            assert all(count >= depth and seconds > 0 for count, seconds in each.windows(load))
            samples = each.samples(found.kind.key(each.flow, load), load)
            assert samples.bandwidth == pytest.approx(each.rate(load))
            assert len(samples.others) == 1
    assert found.total == pytest.approx(sum(each.rate(TOGETHER) for each in found.flows))


@pytest.mark.long
def test_a_matrix_has_flows_of_its_own_sizes(connect: Connect, tmp_path: str) -> None:
    file = os.path.join(tmp_path, "matrix.txt")
    with open(file, "w", encoding="utf-8") as stream:
        stream.write("0 1M 0\n0 0 5000\n64K 0 0\n")
    found = connect(file).measure(repeats=1)
    assert [each.flow.size for each in found.flows] == [1 << 20, 5000, 64 * KIB]
    assert all(each.corruption is None for each in found.flows)


@pytest.mark.long
def test_a_corrupted_flow_is_named_and_no_other(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = connect("incast:3")
    compare = RankFlows._compare

    def spoil(self: RankFlows, phase: str, *more: object) -> None:
        if phase == "after the timed transfers":
            # The first byte of the second flow, which lies behind the first flow at rank 0.
            buffer = self.buffers[0]
            (byte,) = buffer.read(64 * KIB, 1)
            buffer.write(bytes([byte ^ 0xFF]), 64 * KIB)
        compare(self, phase, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(RankFlows, "_compare", spoil)
    one, other = flows.measure(repeats=1).flows
    assert one.corruption is None
    assert other.corruption is not None
    assert str(other.corruption).startswith(
        "1 of 65536 bytes are wrong after the timed transfers, the first at offset 0"
    )


@pytest.mark.long
def test_commands_about_bytes_do_not_grow_with_the_flows_of_a_rank(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, counts = Worker.request, Counter[tuple[int, str]]()

    def count(self: Worker, command: str, **given: Any) -> Pending:
        counts[self.rank, command] += 1
        return request(self, command, **given)

    monkeypatch.setattr(Worker, "request", count)
    found = []
    for text in ("incast:3", "incast:5"):
        counts.clear()
        assert all(each.corruption is None for each in connect(text).measure(repeats=1).flows)
        found.append({command: counts[0, command] for command in ("fill", "compare")})
    assert found == [{"fill": 2, "compare": 3}] * 2


@pytest.mark.long
def test_a_rank_that_does_not_compare_all_its_flows_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Buffer.compare_parts
    monkeypatch.setattr(Buffer, "compare_parts", lambda self, parts: compare(self, parts[1:]))
    with pytest.raises(WorkerError) as error:
        connect("incast:3").measure(repeats=1)
    assert error.value.reason == "rank 0 compared 1 of 2 parts of a buffer"


@pytest.mark.long
def test_a_rank_that_ends_is_named_and_the_others_are_ended(connect: Connect) -> None:
    flows = connect("incast:4")
    pid = flows.agents[2].worker.pid
    flows.measure(repeats=1)
    started = threading.Event()
    run = RankFlows._timed

    def end(self: RankFlows, *more: object) -> None:
        if not started.is_set():
            started.set()
            os.kill(pid, signal.SIGKILL)
        run(self, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankFlows, "_timed", end)
        with pytest.raises(WorkerError, match="rank 2") as caught:
            flows.measure(repeats=1)
    assert "SIGKILL" in str(caught.value)
    assert not any(agent.worker.alive for agent in flows.agents)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_and_the_others_are_ended(connect: Connect) -> None:
    flows = connect("incast:4", timeout=5.0)
    pid = flows.agents[2].worker.pid
    run = RankFlows._timed

    def stop(self: RankFlows, *more: object) -> None:
        os.kill(pid, signal.SIGSTOP)
        run(self, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankFlows, "_timed", stop)
        with pytest.raises(WorkerError, match="rank 2") as caught:
            flows.measure(repeats=1)
    assert "was stopped by a signal" in str(caught.value)
    assert not any(agent.worker.alive for agent in flows.agents)


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["incast:3", "alltoall:4"])
def test_all_rounds_together_are_one_command_for_each_rank(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    flows, sent = connect(pattern), Counter[str]()
    request = Worker.request

    def counted(self: Worker, command: str, **arguments: Any) -> Pending:
        sent.update([command])
        return request(self, command, **arguments)

    monkeypatch.setattr(Worker, "request", counted)
    flows.measure(repeats=2)
    # Two verifications, the durations of the windows, and two repeats.
    assert sent["flows_run"] == sent["flows_report"] == 5 * len(flows.agents)


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
        for _ in range(4):
            stack.enter_context(spinning())
        flows = RankFlows(hosts, names, kind, settings, settings.agents[0])
        stack.callback(flows.close)
        found = flows.measure()
    assert {len(each.windows(load)) for each in found.flows for load in LOADS} == {REPEATS}
    for judged in (judge_pattern_culprit(found), judge_fairness(found)):
        assert judged.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), (judged, found.disturbed)
        assert "culprit" not in judged.reason
