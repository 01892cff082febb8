# SPDX-License-Identifier: Apache-2.0
"""A run is green only if each check ran and passed, however it is ended or falsified."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_endings import Ending, endings, run_ending, violations

#: A soak makes those of hooks and pytest-xdist; ``test_hostile.py`` makes some of them each time.
ENDINGS = [
    pytest.param(ending, id=str(ending), marks=pytest.mark.long if often else pytest.mark.whole)
    for ending in endings()
    for often in [ending.where in ("", "option") and not ending.parallel]
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_end(tmp_path: Path, ending: Ending) -> None:
    ended = run_ending(ending, tmp_path)
    assert list(violations(ending, ended)) == [], ended.output
