# SPDX-License-Identifier: Apache-2.0
"""A run is green only if each check ran and passed, however it is ended or falsified."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_endings import Ending, endings, run_ending, violations

FALSIFIED = [ending for ending in endings() if ending.where in ("", "option") and not ending.parallel]


@pytest.mark.parametrize("ending", FALSIFIED, ids=str)
def test_a_plugin_or_an_option_makes_no_failed_run_green(pytester: pytest.Pytester, ending: Ending) -> None:
    ended = run_ending(ending, pytester.path, pytester)
    assert list(violations(ending, ended)) == [], ended.output


@pytest.mark.whole  # test_hostile.py makes some of them each time
@pytest.mark.parametrize("ending", [ending for ending in endings() if ending not in FALSIFIED], ids=str)
def test_end(tmp_path: Path, ending: Ending) -> None:
    ended = run_ending(ending, tmp_path)
    assert list(violations(ending, ended)) == [], ended.output
