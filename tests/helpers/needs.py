# SPDX-License-Identifier: Apache-2.0
"""What some tests need of the machine: they are skipped where it is missing, and fail in CI, which installs it."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lack(requirement: str) -> NoReturn:
    """Skip the test, or fail it in CI.

    :param requirement: what it needs, such as ``gcc``.
    """
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and this test needs {requirement}")
    pytest.skip(f"needs {requirement}")


def need_programs(*names: str, packages: str = "", root: bool = False) -> None:
    """Skip the test if one of some programs is not on PATH, or if it needs root and is run by another user.

    :param packages: the Debian packages that have the programs, if their names differ.
    """
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        lack(f"{', '.join(missing)}{packages and f' (Debian: {packages})'}")
    if root and os.geteuid():
        lack("root")


def program(*names: str, package: str = "") -> str:
    """Return the path of the first of some programs that is on PATH; skip the test if none is.

    :param package: the Debian package that has it, if its name differs.
    """
    result = next(filter(None, map(shutil.which, names)), None)
    return result or lack(f"{names[0]}{package and f' (Debian: {package})'}")
