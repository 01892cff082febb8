# SPDX-License-Identifier: Apache-2.0
"""Tests that pytest-rerunfailures runs again: a rerun that passes does not cancel the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Outcome, Verdict, outcome
from pytest_nixl.session.outcome import check_of

#: The outcome that pytest-rerunfailures gives to an attempt that it repeats.
RERUN = "rerun"

_REMEDY = (
    "run it again without reruns (leave out --reruns and @pytest.mark.flaky), and find out what differs between the "
    "attempts"
)


class Reruns:
    """Remembers the verdict of each check's first attempt."""

    def __init__(self) -> None:
        self._first: dict[str, Result] = {}
        self._attempts: dict[str, int] = {}

    def judge(self, result: Result, report: pytest.TestReport) -> Result:
        """Return a result, or INCONCLUSIVE if it does not fail but the check's first attempt was repeated.

        :param report: pytest's report of the attempt.
        """
        nodeid = result.nodeid
        if str(report.outcome) == RERUN:
            self._first.setdefault(nodeid, result)
            self._attempts[nodeid] = self._attempts.get(nodeid, 0) + 1
            return result
        first = self._first.get(nodeid)
        if first is None or outcome(result.verdict, gate=False) is Outcome.FAIL:
            return result
        number = self._attempts[nodeid] + 1
        reason = f"the first attempt was {first.verdict} ({first.reason}), and attempt {number} was {result.verdict}"
        return replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=_REMEDY)


def accidents(config: pytest.Config) -> Iterator[str]:
    """Yield the options of pytest-rerunfailures by which a failed check would be run until it passes."""
    for name, flag in (("reruns", "--reruns"), ("force_reruns", "--force-reruns")):
        if config.getoption(name, None):
            yield f"{flag}: a failed check would be repeated until it passes; leave one of the two options out"
    try:
        ini = str(config.getini("reruns") or "")
    except (KeyError, ValueError):  # the plugin is not installed
        return
    if ini and ini != "0":
        yield f"reruns = {ini} in the ini file: a failed check would be repeated until it passes; remove that line"


def refuse_marked(items: Iterable[pytest.Item], option: str) -> None:
    """Refuse checks that are marked to be repeated. :raises pytest.UsageError: with the first such check."""
    for item in items:
        if check_of(item) is not None and item.get_closest_marker("flaky") is not None:
            raise pytest.UsageError(
                f"{option} is refused with {item.nodeid}, which is marked flaky: it would be repeated until it passes; "
                "remove the marker, or start pytest with -p no:rerunfailures"
            )
