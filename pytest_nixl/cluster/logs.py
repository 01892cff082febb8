# SPDX-License-Identifier: Apache-2.0
"""What one rank leaves of a run: its verdict and its workers' logs, in a directory that no other rank writes to."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.cluster.serving import Ending
from pytest_nixl.errors import NixlPluginError

if TYPE_CHECKING:
    from pytest_nixl.cluster.party import Party

#: Bytes of each log that are kept: the last ones.
LARGEST = 1 << 20


def keep(party: Party, ending: Ending, seen: list[str]) -> Path | None:
    """Write ``verdict.json``, the workers' logs and, where the group broke, what was seen of it.

    :returns: the directory; None where none was asked for.
    :raises NixlPluginError: where it cannot be written.
    """
    if not party.settings.logs:
        return None
    directory = Path(party.settings.logs) / f"rank-{party.rank}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.log"):
            old.unlink()
        for log in party.keeper.directory.glob("*.log"):
            (directory / log.name).write_bytes(log.read_bytes()[-LARGEST:])
        verdict = {
            "rank": party.rank,
            "ranks": party.membership.size,
            "group": party.membership.group,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "exit_code": ending.code,
            "verdict": ending.verdict or ending.refusal,
            "fault": str(party.fault) if party.fault is not None else "",
        }
        if seen:
            (directory / "group.txt").write_text("\n".join(seen) + "\n")
        # Last, and whole: who counts these files counts ranks that came to their end.
        temporary = directory / "verdict.json.part"
        temporary.write_text(json.dumps(verdict, indent=2) + "\n")
        temporary.replace(directory / "verdict.json")
    except OSError as error:
        raise NixlPluginError(
            f"{directory} could not be written: {error.strerror}", "name a directory that every rank may write to"
        ) from None
    return directory
