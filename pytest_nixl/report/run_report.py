# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.judge.run_comparison import RunComparison
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class RunReport:
    """What a report tells of.

    :param compared: what came of judging the run by another one; None: it was not.
    :param history: earlier runs, the oldest first; the run itself may be among them.
    :param gate: whether what is undecided fails.
    """

    run: RecordedRun
    compared: RunComparison | None = None
    history: tuple[RecordedRun, ...] = ()
    gate: bool = False
