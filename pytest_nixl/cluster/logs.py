# SPDX-License-Identifier: Apache-2.0
"""Write the verdict and the worker logs of one rank to a directory that no other rank writes to.

Secrets are hidden in all files, because they are read by other people and sent on.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.core.untrusted_file import write_regular
from pytest_nixl.model.conclusion import RUN_VERDICTS, VERDICT_FORMAT, next_step, without_results
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import INTERRUPTED
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_process import telling


class FinishedRank(Protocol):
    """A rank at the end of its run, as its files describe it."""

    settings: Settings
    supervisor: SupervisorClient
    membership: Membership

    @property
    def rank(self) -> int: ...

    @property
    def faults(self) -> list[NixlPluginError]: ...


#: The number of bytes that are kept from the end of each log.
LARGEST = 1 << 20
#: The number of lines from the end of each log that are sent to the other ranks.
_LINES = 20


def last_words(supervisor: SupervisorClient, settings: Settings) -> dict[str, str]:
    """Return the last 20 lines of each worker log of this rank that say something unusual, by the name of the log."""
    hide = _hider(settings)
    logs = {path.name: path.read_text(errors="replace") for path in sorted(supervisor.directory.glob("rank*.log"))}
    return {name: hide("\n".join(telling(text)[-_LINES:])) for name, text in logs.items()}


def _hider(settings: Settings) -> Callable[[str], str]:
    return hider({**os.environ, "NIXL_GROUP_TOKEN": settings.group_token, "ETCDCTL_USER": settings.etcd_user})


def verdict_of_ending(ending: Ending) -> dict[str, Any]:
    """Return the verdict that rank 0 sent; if it sent none, return the one that follows from how the run ended."""
    if ending.refusal:
        return without_results("REFUSED")
    if ending.verdict_fields.get("verdict") in RUN_VERDICTS:
        values = without_results("")
        # The value came from another rank: keep only the fields of the format.
        return {name: ending.verdict_fields.get(name, value) for name, value in values.items()}
    first = (ending.verdict.splitlines() or [f"exit code {ending.code}"])[0]
    return without_results(INTERRUPTED, f"{INTERRUPTED}: {first}")


def keep(rank_session: FinishedRank, ending: Ending, processes: list[str]) -> Path | None:
    """Write ``verdict.json``, the worker logs and, if the group lost a rank, ``group.txt``.

    :param rank_session: the session of this rank.
    :param ending: how the run ended.
    :param processes: the lines of ``group.txt``; empty if the group is complete.
    :returns: the directory; None if the options name none.
    :raises NixlPluginError: if a file cannot be written.
    """
    if not rank_session.settings.log_dir:
        return None
    directory = Path(rank_session.settings.log_dir) / f"rank-{rank_session.rank}"
    hide = _hider(rank_session.settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.log"):
            old.unlink()
        for log in rank_session.supervisor.directory.glob("*.log"):
            write_regular(directory / log.name, hide(log.read_bytes()[-LARGEST:].decode(errors="replace")))
        values = verdict_of_ending(ending)
        verdict = {
            "format": VERDICT_FORMAT,
            "rank": rank_session.rank,
            "ranks": rank_session.membership.size,
            "group": rank_session.membership.group,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **values,
            "next": next_step(values),
            "exit_code": ending.code,
            "text": ending.verdict or ending.refusal,
            "fault": "\n".join(map(str, rank_session.faults)),
        }
        if processes:
            write_regular(directory / "group.txt", "\n".join(processes) + "\n")
        # Written last, and renamed when complete: the number of these files is the number of ranks that finished.
        temporary = directory / "verdict.json.part"
        write_regular(temporary, json.dumps(hide_all(verdict, hide), indent=2) + "\n")
        temporary.replace(directory / "verdict.json")
    except (OSError, ValueError) as error:
        raise NixlPluginError(
            f"{directory} could not be written: {getattr(error, 'strerror', None) or error}",
            "name a directory that every rank can write to",
        ) from None
    return directory
