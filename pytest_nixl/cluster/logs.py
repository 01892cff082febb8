# SPDX-License-Identifier: Apache-2.0
"""What one rank leaves of a run: its verdict and its workers' logs, in a directory that no other rank writes to.

Secrets are hidden in all of it: it is read by others, and sent on.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import hider
from pytest_nixl.model.conclusion import RUN_VERDICTS, without_results
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import INTERRUPTED
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_process import telling

if TYPE_CHECKING:
    from pytest_nixl.cluster.rank_session import RankSession

#: Bytes of each log that are kept: the last ones.
LARGEST = 1 << 20
#: Lines of each log that are told to the other ranks: the last ones.
_LINES = 20


def last_words(supervisor: SupervisorClient, settings: Settings) -> dict[str, str]:
    """Return the last lines of the workers of this rank, by the names of their logs."""
    hide = _hider(settings)
    logs = {path.name: path.read_text(errors="replace") for path in sorted(supervisor.directory.glob("rank*.log"))}
    return {name: hide("\n".join(telling(text)[-_LINES:])) for name, text in logs.items()}


def _hider(settings: Settings) -> Callable[[str], str]:
    return hider({**os.environ, "NIXL_GROUP_TOKEN": settings.group_token, "ETCDCTL_USER": settings.etcd_user})


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    """Hide secrets in every text of JSON values."""
    if isinstance(value, dict):
        return {name: _hidden(each, hide) for name, each in value.items()}
    if isinstance(value, list):
        return [_hidden(each, hide) for each in value]
    return hide(value) if isinstance(value, str) else value


def as_told(ending: Ending) -> dict[str, Any]:
    """Return what rank 0 told of the run, or what follows from its end if rank 0 told nothing."""
    if ending.refusal:
        return without_results("REFUSED")
    if ending.told.get("verdict") in RUN_VERDICTS:
        known = without_results("")
        # It came from another rank: only what the format has.
        return {name: ending.told.get(name, value) for name, value in known.items()}
    first = (ending.verdict.splitlines() or [f"exit code {ending.code}"])[0]
    return without_results(INTERRUPTED, f"{INTERRUPTED}: {first}")


def keep(party: RankSession, ending: Ending, seen: list[str]) -> Path | None:
    """Write ``verdict.json``, the workers' logs and, where the group broke, what was seen of it.

    :returns: the directory; None where none was asked for.
    :raises NixlPluginError: where it cannot be written.
    """
    if not party.settings.logs:
        return None
    directory = Path(party.settings.logs) / f"rank-{party.rank}"
    hide = _hider(party.settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.log"):
            old.unlink()
        for log in party.supervisor.directory.glob("*.log"):
            (directory / log.name).write_text(hide(log.read_bytes()[-LARGEST:].decode(errors="replace")))
        verdict = {
            "rank": party.rank,
            "ranks": party.membership.size,
            "group": party.membership.group,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **as_told(ending),
            "exit_code": ending.code,
            "text": ending.verdict or ending.refusal,
            "fault": "\n".join(map(str, party.faults)),
        }
        if seen:
            (directory / "group.txt").write_text("\n".join(seen) + "\n")
        # Last, and whole: who counts these files counts ranks that came to their end.
        temporary = directory / "verdict.json.part"
        temporary.write_text(json.dumps(_hidden(verdict, hide), indent=2) + "\n")
        temporary.replace(directory / "verdict.json")
    except OSError as error:
        raise NixlPluginError(
            f"{directory} could not be written: {error.strerror}", "name a directory that every rank may write to"
        ) from None
    return directory
