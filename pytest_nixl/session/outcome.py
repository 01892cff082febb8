# SPDX-License-Identifier: Apache-2.0
"""End a test as its verdict demands: pass, warn, skip or fail. A rerun that passes cancels no first failure."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Judgement, Outcome, Verdict, outcome

if TYPE_CHECKING:
    from pytest_nixl.judge.profiles import Profile


#: The judgement of a test, on its item, for the report and the gate.
JUDGEMENT = pytest.StashKey[Judgement]()


class NixlWarning(UserWarning):
    """A verdict that does not fail a test without ``--nixl-gate``, but that a person should read."""


def check_of(item: pytest.Item) -> str | None:
    """Return the id of the check that a test makes, from its marker ``nixl_check``; None: it makes none."""
    marker = item.get_closest_marker("nixl_check")
    return str(marker.args[0]) if marker is not None and marker.args else None


def is_own(item: pytest.Item) -> bool:
    """Whether a test checks pytest-nixl itself (``own=True`` in its marker). A missed deadline does not fail it."""
    marker = item.get_closest_marker("nixl_check")
    return marker is not None and bool(marker.kwargs.get("own"))


def conclude(item: pytest.Item, judgement: Judgement, profile: Profile, *, gate: bool) -> None:
    """Pass, warn, skip or fail the running test by its verdict; return only if the test passes.

    :param gate: whether ``--nixl-gate`` is given.
    """
    item.stash[JUDGEMENT] = judgement
    required = check_of(item) in profile.required
    result = outcome(judgement.verdict, gate=gate, required=required)
    if result is Outcome.FAIL:
        pytest.fail(str(judgement), pytrace=False)
    if result is Outcome.SKIP:
        pytest.skip(judgement.reason)
    if result is Outcome.WARN:
        warnings.warn(NixlWarning(str(judgement)), stacklevel=2)


#: The outcome that pytest-rerunfailures gives to an attempt that it repeats.
RERUN = "rerun"

_REMEDY = (
    "run it again without reruns (leave out --reruns and @pytest.mark.flaky), and find out what differs between the "
    "attempts"
)


class Reruns:
    """The verdict of each check's first attempt, if pytest-rerunfailures runs tests again."""

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
