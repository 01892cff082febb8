# SPDX-License-Identifier: Apache-2.0
"""The steps of a traffic pattern: which flows are measured at the same time, and what the ranks report of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.checks.pattern.samples import Window
from pytest_nixl.model.traffic_pattern import Flow
from pytest_nixl.processes.worker_errors import SAME_VERSION, WorkerError


@dataclass(frozen=True)
class MeasuredFlows:
    """What was measured in a step.

    :param windows: the windows of each flow.
    :param contention: the cores that other processes took, by rank.
    """

    windows: dict[Flow, list[Window]]
    contention: dict[int, float]


@dataclass(frozen=True)
class FlowStep:
    """Flows that are measured at the same time.

    :param load: ``alone`` or ``together``.
    :param groups: the flows of each group. No rank is in two groups, and the flows of a group start together.
    :param durations: the seconds of each window; 0: each prepared transfer is posted once.
    """

    load: str
    groups: Sequence[Sequence[Flow]]
    durations: tuple[float, ...] = (0.0,)

    @property
    def flows(self) -> list[Flow]:
        """The flows of all groups."""
        return list(itertools.chain(*self.groups))

    @property
    def ranks(self) -> set[int]:
        """The ranks that take part."""
        return {rank for flow in self.flows for rank in flow.ranks}

    def measured(self, reports: Mapping[int, Any], posts: Mapping[Flow, tuple[int, int]]) -> MeasuredFlows:
        """Return what the ranks measured.

        :param reports: the report of each rank about this step; None of one that rested.
        :param posts: the rank that posts each flow, and the number of the flow.
        :raises WorkerError: a report lacks a flow or a window of one.
        """
        windows = {
            (rank, number): list(zip(transfers, seconds, strict=False))
            for rank, report in reports.items()
            if report is not None
            for number, transfers, seconds in report["windows"]
        }
        found = {flow: windows.get(posts[flow], []) for flow in self.flows}
        for flow, of_flow in found.items():
            if len(of_flow) != len(self.durations) or not all(reports.get(rank) for rank in flow.ranks):
                raise WorkerError(
                    f"rank {posts[flow][0]} did not report {len(self.durations)} windows of the flow {flow}",
                    SAME_VERSION,
                )
        return MeasuredFlows(found, {rank: reports[rank]["others"] for rank in self.ranks})
