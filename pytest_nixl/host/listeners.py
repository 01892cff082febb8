# SPDX-License-Identifier: Apache-2.0
"""The process of this host that listens on a TCP port."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.redaction import hide_command
from pytest_nixl.core.strict import printable

_PROC = Path("/proc")
#: The state of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"
_MOST = 200


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port.

    :param command: its command line without secrets, or its name if it has none.
    :param parent: the pid of its parent; 0 if that is unknown.
    """

    pid: int
    command: str
    parent: int = 0

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


def port_holder(port: int, proc: Path = _PROC) -> PortHolder | None:
    """Return the process that listens on a port on any address.

    :param proc: the folder of the processes.
    :returns: None if nobody does in this network namespace, or the process belongs to a user whose descriptors this
        process may not see.
    """
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(proc / "net" / table, port)}
    if not sockets:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if any(link in sockets for link in _descriptors(folder / "fd")):
            return PortHolder(int(folder.name), command_of(folder), parent_of(folder))
    return None


def _inodes(table: Path, port: int) -> list[str]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    fields = (line.split() for line in lines)
    return [
        field[9] for field in fields if len(field) > 9 and field[3] == _LISTENS and field[1].endswith(f":{port:04X}")
    ]


def _descriptors(folder: Path) -> list[str]:
    descriptors = []
    try:
        for entry in os.scandir(folder):
            try:
                descriptors.append(os.readlink(entry.path))
            except OSError:
                continue
    except OSError:  # the process has ended, or belongs to another user
        pass
    return descriptors


def parent_of(folder: Path) -> int:
    """Return the pid of a process's parent; 0 if that is unknown."""
    try:
        match = re.search(r"^PPid:\s*([0-9]+)", (folder / "status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def command_of(folder: Path) -> str:
    """Return the command line of a process without secrets, or its name; ``folder`` is its folder in /proc."""
    try:
        arguments = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
        name = (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process that has ended"
    command = hide_command(" ".join(arguments)) if arguments != [""] else name
    return printable(command if len(command) <= _MOST else f"{command[:_MOST]}…").replace("\n", " ")
