# SPDX-License-Identifier: Apache-2.0
"""The double of nixlbench as a program."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.cli_run import ROOT


def standin(folder: Path) -> Path:
    """Write the double of nixlbench as a program."""
    program = folder / "nixlbench"
    text = (ROOT / "tests" / "helpers" / "nixlbench_standin.py").read_text()
    program.write_text(text.replace("#!/usr/bin/env python3", f"#!{sys.executable}", 1))
    program.chmod(0o755)
    return program
