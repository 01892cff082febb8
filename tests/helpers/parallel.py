# SPDX-License-Identifier: Apache-2.0
"""``python apart.py``: run the tests that measure nothing, two at a time, as the first half of ``tox -e test``.

With arguments, which name the tests that somebody wants, it runs nothing: the second half runs those.
"""

from __future__ import annotations

import subprocess
import sys

COMMAND = [
    "-m",
    "pytest",
    "-W",
    "error",
    "-p",
    "no:cacheprovider",
    "-n",
    "2",
    "--dist",
    "loadfile",
    "-m",
    "apart and not whole",
]
TESTS = ["tests", *(f"--ignore=tests/{name}" for name in ("libfabric", "cluster", "mixed"))]

if __name__ == "__main__":
    sys.exit(0 if sys.argv[1:] else subprocess.run([sys.executable, *COMMAND, *TESTS]).returncode)
