# SPDX-License-Identifier: Apache-2.0
"""What every report of a run is written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytest_nixl.judge.run_comparison import RunComparison
from pytest_nixl.model.conclusion import Conclusion, failed_beside, next_step, verdict_fields
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import GOOD, Outcome, Verdict, outcome
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class RunReport:
    """The contents of a report.

    :param run: the run.
    :param compared: its comparison with another run; None: there is none.
    :param history: earlier runs, the oldest first; the run itself may be among them.
    :param gate: whether ``--nixl-gate`` is given.
    :param refused: why the run did not start; empty: it started.
    :param exit_code: pytest's exit code so far; None: the run was recorded earlier, and the code is not known.
    :param seconds: how long the run took; 0: not known. ``durations`` has the seconds of each test, by node id.
    :param failed_tests: the node ids of failed tests that are not NIXL checks.
    :param chosen: what was asked for, such as the level and the profile, each by its name.
    """

    run: RecordedRun
    compared: RunComparison | None = None
    history: tuple[RecordedRun, ...] = ()
    gate: bool = False
    refused: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    durations: Mapping[str, float] = field(default_factory=dict)
    failed_tests: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def conclusion(self) -> Conclusion:
        """The verdict by results and exit code, as if the run was not refused."""
        code = None if self.refused else self.exit_code
        return Conclusion.of(self.run.results, gate=self.gate, interrupted=self.run.interrupted, code=code)

    @property
    def passed(self) -> bool:
        """Whether the run passed."""
        return self.conclusion.verdict == "PASS" and not self.refused

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of the run."""
        return Outcome.FAIL if self.refused else self.conclusion.outcome

    @property
    def recorded(self) -> bool:
        """Whether the verdict is known: a result is recorded, or the run failed without one."""
        return bool(self.run.results) or self.outcome is Outcome.FAIL

    @property
    def verdict_text(self) -> str:
        """The verdict of the run in words."""
        if self.refused:
            return f"REFUSED: {self.refused}"
        return str(self.conclusion) if self.recorded else "NO CHECK IS RECORDED"

    @cached_property
    def verdict_values(self) -> dict[str, Any]:
        """The values of ``verdict.json`` that are the same for every rank."""
        values = verdict_fields(self.run.results, gate=self.gate, interrupted=self.run.interrupted)
        if self.refused:
            return {**values, "verdict": "REFUSED"}
        return failed_beside(values, self.exit_code) if self.exit_code else values

    @property
    def next_step(self) -> str:
        """What a pipeline does next: a key of ``NEXT_STEPS``."""
        return next_step(self.verdict_values)

    @property
    def problems(self) -> list[list[Result]]:
        """The results that are not good, the worst first: those with the same verdict and remedy are together."""
        alike: dict[tuple[Verdict, str], list[Result]] = {}
        for result in self.run.results:
            if result.verdict not in GOOD:
                alike.setdefault((result.verdict, result.remedy), []).append(result)
        order = [Outcome.FAIL, Outcome.WARN, Outcome.SKIP, Outcome.PASS]
        return sorted(alike.values(), key=lambda group: order.index(outcome(group[0].verdict, gate=self.gate)))
