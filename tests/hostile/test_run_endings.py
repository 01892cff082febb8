# SPDX-License-Identifier: Apache-2.0
"""A run is green only if each check ran and passed, however it is ended or falsified."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_endings import Ending, endings, run_ending, violations


@pytest.mark.parametrize("ending", endings(), ids=str)
def test_end(tmp_path: Path, ending: Ending) -> None:
    ended = run_ending(ending, tmp_path)
    assert list(violations(ending, ended)) == [], ended.output
