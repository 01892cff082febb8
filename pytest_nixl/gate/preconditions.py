# SPDX-License-Identifier: Apache-2.0
"""The infrastructure suite runs first, and a check of it that the profile requires ends the run where it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_nixl.gate.profiles import Profile
    from pytest_nixl.run import Run


class Preconditions:
    """Orders the tests of one run, and ends it where nothing that follows could mean anything.

    A precondition is a check of the infrastructure suite, or of the form and health of the etcd endpoints, that the
    profile requires.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._session: pytest.Session | None = None
        #: Node ids of the preconditions.
        self._required: frozenset[str] = frozenset()
        self._left = 0

    @pytest.hookimpl(trylast=True)  # after every plugin that shuffles or deselects
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        run = self._run
        if not run.used or run.parallel or not run.usable:
            return
        from pytest_nixl.gate.profiles import load_profile
        from pytest_nixl.gate.suites import INFRASTRUCTURE, suite_of

        profile = load_profile(run.settings.profile)
        required = {item.nodeid for item in items if _is_precondition(item, profile)}

        def place(item: pytest.Item) -> int:
            return 0 if item.nodeid in required else 1 if suite_of(item.path) == INFRASTRUCTURE else 2

        items.sort(key=place)  # stable: all else stays as it is
        if not run.settings.keep_going:
            self._session, self._required = session, frozenset(required)
        self._left = len(items)

    def pytest_runtest_logfinish(self) -> None:
        self._left -= 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._session is None or not report.failed or report.nodeid not in self._required:
            return
        left = self._left - 1
        if left < 1 or self._run.ended:
            return
        result = getattr(report, "nixl_result", None) or {}
        check = result.get("check", report.nodeid)
        why = result.get("reason") or "see above"
        tests = "1 test did not run" if left == 1 else f"{left} tests did not run"
        self._run.ended = (
            f"the run ended at the check {check!r}, which the profile {self._run.settings.profile!r} requires: {tests}"
        )
        self._session.shouldfail = f"{self._run.ended}; {why}"


def _is_precondition(item: pytest.Item, profile: Profile) -> bool:
    from pytest_nixl.gate.conclude import check_of
    from pytest_nixl.gate.suites import ENDPOINTS, INFRASTRUCTURE, suite_of

    check, suite = check_of(item), suite_of(item.path)
    of_endpoints = suite == ENDPOINTS and check is not None and check.startswith("endpoints-")
    return check in profile.required and (suite == INFRASTRUCTURE or of_endpoints)
