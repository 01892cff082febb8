# SPDX-License-Identifier: Apache-2.0
"""The processes of a running engine that have loaded NIXL: their backends, open RDMA devices and variables.

NIXL loads a plugin when a backend is created, and UCX and libfabric open a device of RDMA through ``/dev/infiniband``.
So what a process has mapped and opened says what its transfers can use. Only the same user, or root, can read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.redaction import shown
from pytest_nixl.core.strict import printable
from pytest_nixl.host.listeners import command_of, parent_of, port_holder

_PLUGIN = re.compile(r"/libplugin_(\w+)\.so$")
_DEVICE = re.compile(r"/dev/infiniband/(uverbs\d+)$")
_VARIABLE = re.compile(r"UCX_TLS|UCX_NET_DEVICES|FI_PROVIDER|NIXL_BACKEND|\w+_NIXL_(?:KVCACHE_)?BACKEND")
_MOST_VALUE = 200


@dataclass(frozen=True)
class LiveNixl:
    """A process that has loaded NIXL.

    :param backends: the backends that it has created.
    :param devices: the RDMA devices that it has opened, such as ``mlx5_0``.
    :param variables: the variables that choose backends, transports and devices.
    """

    pid: int
    command: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    variables: dict[str, str]

    def __str__(self) -> str:
        uses = ", ".join(self.backends) or "no backend"
        by = f"it has opened {', '.join(self.devices)}" if self.devices else "it has opened no RDMA device"
        if not self.devices and {"UCX", "LIBFABRIC"} & set(self.backends):
            by += ", so its transfers between hosts use TCP"
        told = "".join(f", {name}={value}" for name, value in self.variables.items())
        return f"NIXL of pid {self.pid} ({self.command}) uses {uses}; {by}{told}"


def live_nixl(port: int, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[list[LiveNixl], str]:
    """Return the processes with NIXL of the program that listens on a port of this host, or why there are none.

    :param proc: the folder of the processes.
    :param sys: the folder of the devices.
    """
    holder = port_holder(port, proc)
    if holder is None:
        return [], "no process that this user may read listens on this port here: run the command beside the engine"
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        children.setdefault(parent_of(folder), []).append(int(folder.name))
    # The processes of an engine are children of its server, or of the server's parent.
    for top in filter(lambda pid: pid > 1, (holder.pid, holder.parent)):
        found = [live for pid in _below(top, children) if (live := _read(proc / str(pid), sys)) is not None]
        if found:
            return found, ""
    return [], f"no process of {holder} has loaded NIXL"


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    waiting, seen = [pid], set[int]()
    while waiting:
        each = waiting.pop(0)
        if each not in seen:
            seen.add(each)
            yield each
            waiting += sorted(children.get(each, ()))


def _read(folder: Path, sys: Path) -> LiveNixl | None:
    """Return what a process has loaded and opened; None if it has no NIXL, has ended or is another user's."""
    try:
        maps = (folder / "maps").read_text(errors="replace").splitlines()
        environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        with os.scandir(folder / "fd") as descriptors:
            links = [os.readlink(each.path) for each in descriptors]
    except OSError:
        return None
    paths = sorted({line.split(maxsplit=5)[-1] for line in maps if ".so" in line})
    if not any(os.path.basename(path).startswith("libnixl") for path in paths):
        return None
    opened = sorted({match[1] for link in links if (match := _DEVICE.match(link))})
    given = (each.partition("=") for each in environ)
    variables = {
        name: printable(shown(name, value)[:_MOST_VALUE]) for name, sign, value in given
        if sign and _VARIABLE.fullmatch(name)
    }  # fmt: skip
    return LiveNixl(
        int(folder.name),
        command_of(folder),
        tuple(match[1] for path in paths if (match := _PLUGIN.search(path))),
        tuple(_device(name, sys) for name in opened),
        dict(sorted(variables.items())),
    )


def _device(verbs: str, sys: Path) -> str:
    try:
        return (sys / "class" / "infiniband_verbs" / verbs / "ibdev").read_text().strip() or verbs
    except OSError:
        return verbs
