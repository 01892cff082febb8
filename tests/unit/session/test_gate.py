# SPDX-License-Identifier: Apache-2.0
"""A gate knows every suite and every check: those that a run did not select are named."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, run

from pytest_nixl.session.selection import ON_REQUEST, check_ids_by_suite, suite_checks

pytestmark = pytest.mark.long

GATE = "--nixl-gate"


def test_a_single_suite_passes_on_a_healthy_machine_and_names_the_other_suites() -> None:
    done = run("suites/infrastructure", GATE)
    assert "MISSING" not in done.output
    verdict = re.search(r"^NIXL gate: PASS.*suites not selected: (.*)\)$", done.output, re.MULTILINE)
    assert verdict is not None, done.output
    assert set(verdict[1].split(", ")) == set(check_ids_by_suite()) - {"infrastructure", *ON_REQUEST}
    assert done.code == 0


def test_the_listed_checks_are_those_that_pytest_collects() -> None:
    done = run("suites", "--nixl-pattern=incast", "--collect-only", "-q", "-p", "helpers.list_checks",
               env={"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(ROOT)))})  # fmt: skip
    collected = [line.split()[1:] for line in done.output.splitlines() if line.startswith("CHECK ")]
    listed = {check.id: check for check in suite_checks()}
    assert {check for _, check, *_ in collected} == set(listed)
    for suite, check, level, test in collected:
        assert (listed[check].suite, listed[check].level) == (suite, level)
        assert test.startswith(listed[check].test)
