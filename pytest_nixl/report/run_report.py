# SPDX-License-Identifier: Apache-2.0
"""What every report of a run is written from."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.judge.run_comparison import RunComparison
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class RunReport:
    """The contents of a report.

    :param run: the run.
    :param compared: its comparison with another run; None: there is none.
    :param history: earlier runs, the oldest first; the run itself may be among them.
    :param gate: whether ``--nixl-gate`` is given.
    """

    run: RecordedRun
    compared: RunComparison | None = None
    history: tuple[RecordedRun, ...] = ()
    gate: bool = False
