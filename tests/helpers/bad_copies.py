# SPDX-License-Identifier: Apache-2.0
"""Build a library that spoils one of so many copies between two processes' host memories; all others are real."""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers.needs import need_programs

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: Path) -> dict[str, str]:
    """Compile the library, and return the variables with which a worker loads it. ``bad_copies.c`` has its faults."""
    need_programs("gcc")
    library = folder / "bad_copies.so"
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    subprocess.run(["gcc", *options, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
