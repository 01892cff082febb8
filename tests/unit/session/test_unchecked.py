# SPDX-License-Identifier: Apache-2.0
"""A user's own tests that were all skipped: no PASS, and pytest's exit code."""

from __future__ import annotations

import json

import pytest
from helpers.pytester_run import run_pytest


def test_own_checks_that_were_all_skipped_are_no_pass_and_no_failure(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.nixl_check("mine")
        def test_mine():
            pytest.skip("no such device here")
        """
    )
    result = run_pytest(pytester, "--nixl-report=verdict.json", in_process=True)
    result.stdout.fnmatch_lines(
        [
            "NOT-APPLICABLE mine: no such device here",
            "NIXL verdict: NOTHING CHECKED (1 NOT-APPLICABLE; 0 rows measured)",
            "wrote verdict.json",
            "next: correct: *",
        ]
    )
    assert result.ret == 0
    assert json.loads((pytester.path / "verdict.json").read_text())["verdict"] == "NOTHING CHECKED"
