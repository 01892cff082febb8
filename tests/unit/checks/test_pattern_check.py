# SPDX-License-Identifier: Apache-2.0
"""What is measured of a pattern, once and with room for its buffers. The workers and the ranks are doubles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.checks.pattern import check
from pytest_nixl.checks.pattern.check import PatternLaunches, flow_rows, judge_culprit_of_pattern, pattern_kinds
from pytest_nixl.checks.pattern.fairness import FlowRow, PatternKind
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.host.system import AvailableMemory
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import Flow, PatternChoice, TrafficPattern
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.cluster import Cluster

HOST = MemoryPair("DRAM", "DRAM")
#: Two flows of 64 bytes.
KIND = PatternKind(PatternChoice.parse("incast:3").of(1, 64), "UCX", "WRITE", HOST, 2)
MakeSettings = Callable[..., Settings]


@pytest.mark.parametrize(
    ("sources", "size"), [({"blocks": "option"}, 4096), ({"blocks": "default for UCX"}, check.DEFAULT_SIZE)]
)
def test_a_pattern_is_measured_with_each_backend_memory_and_operation(
    make_settings: MakeSettings, sources: dict[str, str], size: int
) -> None:
    settings = make_settings(
        pattern=PatternChoice.parse("incast:3"), backend=("UCX", "POSIX"), op=("WRITE", "READ"), depth=(1, 4),
        memory=(HOST, MemoryPair("DRAM", "FILE"), HOST), blocks=(64, 4096), sources=sources,
    )  # fmt: skip
    run: Any = SimpleNamespace(settings=settings, placement=SimpleNamespace(ranks=1))
    pattern = PatternChoice.parse("incast:3").of(1, size)
    kinds = [PatternKind(pattern, "UCX", op, HOST, 4) for op in ("WRITE", "READ")]
    assert pattern_kinds(run) == kinds
    assert flow_rows(run) == [
        FlowRow(kind, flow, load) for kind in kinds for flow in pattern.flows for load in ("alone", "together")
    ]
    assert str(flow_rows(run)[1]) == "UCX-WRITE-DRAM:DRAM-incast-1to0-together"
    run.settings = replace(settings, pattern=None)
    assert pattern_kinds(run) == []


class MeasuredOnce:
    """The flows of a pattern, which are measured or fail."""

    def __init__(self, given: list[Any], error: NixlPluginError | None) -> None:
        self.given, self._error, self.closed = given, error, False
        self.agents = [SimpleNamespace(worker=SimpleNamespace(versions={"nixl": "1.5.1"}))]
        self.clear: Any = None

    def measure(self, clear: Any = None) -> str:
        self.clear = clear
        if self._error is not None:
            raise self._error
        return "measured"

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[NixlPluginError | None, int | None], list[MeasuredOnce]]:
    """Let flows be measured or fail on a host with so much memory, and return those that are made."""

    def make(error: NixlPluginError | None, free: int | None) -> list[MeasuredOnce]:
        found: list[MeasuredOnce] = []

        def flows(*given: Any) -> MeasuredOnce:
            found.append(MeasuredOnce(list(given), error))
            return found[-1]

        monkeypatch.setattr(check, "RankFlows", flows)
        memory = None if free is None else AvailableMemory(free, "the test")
        monkeypatch.setattr(check, "available_memory", lambda _: memory)
        return found

    return make


@pytest.mark.parametrize("error", [None, WorkerError("rank 2 has ended")])
@pytest.mark.parametrize("several", [False, True])
def test_a_kind_is_measured_once_with_its_own_agents_and_its_workers_end(
    made: Any, make_settings: MakeSettings, error: NixlPluginError | None, several: bool
) -> None:
    found = made(error, 0 if several else None)
    settings = make_settings(progress_thread=("off", "on"))
    cluster: Any = SimpleNamespace(several=several, hosts=list("abcd"), names=["rank 0 on a", "b", "c", "d"])
    launches = PatternLaunches(cluster, settings)
    kind = replace(KIND, agent=settings.agents[1].variant("UCX", "UCX"))
    for _ in range(2):
        if error is None:
            assert launches.samples(kind) == "measured"  # type: ignore[comparison-overlap]
        else:
            with pytest.raises(WorkerError, match="rank 2 has ended"):
                launches.samples(kind)
    [flows] = found
    hosts, names, *_, agent = flows.given
    assert flows.closed
    assert agent.progress_thread is True
    assert names == (["rank 0 on a", "b", "c"] if several else ["rank 0", "rank 1", "rank 2"])
    assert (hosts if several else [host.rank for host in hosts]) == (list("abc") if several else [0, 1, 2])
    assert launches.versions(kind) == {"nixl": "1.5.1"}
    assert launches.versions(KIND) == {}


@pytest.mark.parametrize(("memory", "needed"), [(HOST, 2 * 2 * 2 * 64), (MemoryPair("DRAM", "VRAM"), 2 * 2 * 64)])
@pytest.mark.parametrize("missing", [0, 1])
def test_the_buffers_of_all_ranks_of_one_host_must_fit_into_its_memory(
    made: Any, make_settings: MakeSettings, memory: MemoryPair, needed: int, missing: int
) -> None:
    found = made(None, needed - missing)
    cluster: Any = SimpleNamespace(several=False)
    launches = PatternLaunches(cluster, make_settings())
    if missing:
        with pytest.raises(NixlPluginError, match="the buffers of incast of 3 ranks need"):
            launches.samples(replace(KIND, memory=memory))
    else:
        launches.samples(replace(KIND, memory=memory))
    assert len(found) == 1 - missing


@pytest.mark.parametrize(
    ("changes", "figures", "ends_early"),
    [
        ({}, ["latency"], True),
        ({}, ["latency", "pattern-share"], False),
        ({"min_launches": 2}, ["latency"], False),
        ({"duration": 0.2}, ["latency"], False),
    ],
    ids=["nothing else", "a bound", "launches to compare", "a long duration"],
)
def test_a_pattern_may_end_early_unless_something_else_says_how_long_it_takes(
    made: Any, make_settings: MakeSettings, changes: dict[str, Any], figures: list[str], ends_early: bool
) -> None:
    found, cluster = made(None, None), cast(Cluster, SimpleNamespace(several=False))
    bounds = [Bound(figure, "the test") for figure in figures]
    PatternLaunches(cluster, make_settings(**changes), bounds).samples(KIND)
    assert found[0].clear is (check.is_clear if ends_early else None)


@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize(
    ("hosts", "words"), [("", "only one rank"), ("aaa", "on 1 host,"), ("aba", "on 2 hosts,"), ("abca", "")]
)
def test_a_culprit_is_looked_for_among_three_hosts_with_the_largest_size(
    monkeypatch: pytest.MonkeyPatch, hosts: str, words: str, has_all: bool
) -> None:
    flows = Flow(0, 1, 64), Flow(1, 2, 128), Flow(2, 0, 32)
    kind = replace(KIND, pattern=TrafficPattern("matrix", 3, flows))
    asked: list[PatternKind] = []
    wanted: list[TrafficPattern] = []

    def only(pattern: TrafficPattern) -> str | None:
        wanted.append(pattern)
        return "measured before" if has_all else None

    def samples(each: PatternKind) -> Any:
        asked.append(each)
        return SimpleNamespace(hosts=hosts, only=only)

    monkeypatch.setattr(check, "judge_pattern_culprit", lambda samples: ("judged", samples))
    given: Any = SimpleNamespace(samples=samples), SimpleNamespace(several=bool(hosts))
    if words:
        with pytest.raises(NotApplicableError, match=words):
            judge_culprit_of_pattern(kind, *given)
        return
    judged: Any = judge_culprit_of_pattern(kind, *given)
    assert {flow.size for flow in wanted[0].flows} == {128}
    if has_all:
        assert (judged, len(asked)) == (("judged", "measured before"), 1)
    else:
        assert judged[0] == "judged"
        assert [each.pattern for each in asked] == [kind.pattern, *wanted]
