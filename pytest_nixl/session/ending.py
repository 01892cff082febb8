# SPDX-License-Identifier: Apache-2.0
"""The file by which ``pytest-nixl run`` knows that its pytest was judged to the end, and with which exit code."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

#: The variable with the path of the file.
ENDING = "PYTEST_NIXL_ENDING"
_PATH = pytest.StashKey[Path]()


def take_path(config: pytest.Config) -> None:
    """Keep the path of the file, and remove the variable, so that no other pytest below this one writes the file."""
    if path := os.environ.pop(ENDING, ""):
        config.stash[_PATH] = Path(path)


def write_ending(session: pytest.Session) -> None:
    """Write the exit code of a run that was judged, if ``pytest-nixl run`` started it."""
    if (path := session.config.stash.get(_PATH, None)) is not None:
        with suppress(OSError):  # the directory is gone if pytest-nixl run was killed
            path.write_text(json.dumps({"exit_code": int(session.exitstatus)}))


def read_ending(path: Path) -> int | None:
    """Return the exit code with which the run was judged; None: it was not judged."""
    try:
        return int(json.loads(path.read_text())["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
