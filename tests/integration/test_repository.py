# SPDX-License-Identifier: Apache-2.0
"""What the repository itself holds."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from helpers.cli_run import ROOT


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no clone, or git is not installed"
)
def test_nothing_that_a_command_writes_is_tracked() -> None:
    """A tracked file that .gitignore names is changed by our own commands: .venv once was."""
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--ignored", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
