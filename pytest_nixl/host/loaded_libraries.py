# SPDX-License-Identifier: Apache-2.0
"""Which libraries of NIXL and of etcd's client a process has loaded or a program would load, and what an engine opened.

It imports no NumPy, which takes a third of a second: a process that looks at another one from outside does without.

NIXL loads a plugin when a backend is created, and UCX and libfabric open a device of RDMA through ``/dev/infiniband``.
So what a process has mapped and opened says what its transfers can use. Only the same user, or root, can read it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import redact_value
from pytest_nixl.core.strict import printable
from pytest_nixl.host.network import command_of, parent_of, port_holder

#: The variable of a patch of etcd-cpp-apiv3 in some images: if it is 1, gRPC gets addresses that did not resolve.
URI_PATCH = "ETCD_CPP_API_DISABLE_URI_VALIDATION"

#: How the name of its file begins.
ETCD_LIBRARY = "libetcd-cpp-api"

#: NIXL's libraries and those that it uses for transfers.
_OF_NIXL = (
    r"lib(?:nixl|plugin_|uc[pstm]|fabric|ibverbs|mlx5|efa|rdmacm|nl-|etcd-cpp"
    r"|cuda|cudart|gdrapi|hwloc|grpc\+\+|nvidia-ml)"
)
#: The path of such a library at the end of a line. One search of the whole text: the doctor looks ten times a second.
_PATH = re.compile(rf" (/(?:.*/)?{_OF_NIXL}[^/\n]*\.so[^/\n]*)$", re.MULTILINE)
_PLUGIN = re.compile(r"/libplugin_(\w+)\.so$")
_DEVICE = re.compile(r"/dev/infiniband/(uverbs\d+)$")
_VARIABLE = re.compile(r"UCX_TLS|UCX_NET_DEVICES|FI_PROVIDER|NIXL_BACKEND|\w+_NIXL_(?:KVCACHE_)?BACKEND")
_MOST_VALUE = 200
#: A process that has this share of the files open that it may have is told so.
_NEARLY_ALL = 0.8


@dataclass(frozen=True)
class EtcdLibrary:
    """An etcd client library.

    :param digest: the SHA-256 of the file, in hexadecimal.
    :param patched: whether the file contains the name of the patch's variable.
    """

    path: str
    digest: str
    patched: bool

    @classmethod
    def read(cls, path: str, root: Path = Path("/")) -> EtcdLibrary:
        """Read a library.

        :param path: its path in its own file system.
        :param root: the folder where that file system is mounted for this process.
        :raises NixlPluginError: the file cannot be read.
        """
        try:
            data = (root / path.lstrip("/")).read_bytes()
        except OSError as error:
            raise NixlPluginError(
                f"{path} cannot be read ({error.strerror})", "run pytest as the user that runs NIXL"
            ) from None
        return cls(path, hashlib.sha256(data).hexdigest(), URI_PATCH.encode() in data)


def loaded_etcd_client(pid: int) -> EtcdLibrary | None:
    """Return the etcd client library that a process has loaded; None if it has none.

    :raises OSError: the process does not exist or belongs to another user.
    :raises NixlPluginError: the library cannot be read.
    """
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1].removesuffix(" (deleted)")
        if Path(path).name.startswith(ETCD_LIBRARY):
            return EtcdLibrary.read(path, Path(f"/proc/{pid}/root"))
    return None


def linked_etcd_client(program: str) -> EtcdLibrary | None:
    """Return the etcd client library that ``ldd`` finds for a program; None if the program needs none.

    :raises NixlPluginError: ldd fails or does not find the library.
    """
    try:
        done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NixlPluginError(
            f"ldd {program} failed: {error}", "install ldd (package libc-bin) and put it on PATH"
        ) from None
    match = re.search(rf"^\s*({ETCD_LIBRARY}\S*) => (.+?)(?: \(0x[0-9a-f]+\))?$", done.stdout, re.MULTILINE)
    if match is None:
        return None
    if not match[2].startswith("/"):
        raise NixlPluginError(
            f"{program} needs {match[1]}, which was not found", "set LD_LIBRARY_PATH as for runs of nixlbench"
        )
    return EtcdLibrary.read(match[2])


def libraries_of_nixl(maps: str) -> list[str]:
    """Return the paths of the loaded libraries that NIXL uses, each once, in the order of their addresses.

    :param maps: the content of the process's ``/proc/PID/maps``.
    """
    return list(dict.fromkeys(_PATH.findall(maps)))


def etcd_client_among(paths: Sequence[str]) -> EtcdLibrary | None:
    """Return etcd's client library among loaded libraries; None if it is not among them.

    :param paths: the paths of the loaded libraries.
    :raises NixlPluginError: the library cannot be read.
    """
    path = next((path for path in paths if os.path.basename(path).startswith(ETCD_LIBRARY)), None)
    return None if path is None else EtcdLibrary.read(path)


@dataclass(frozen=True)
class LiveNixl:
    """A process that has loaded NIXL.

    :param backends: the backends that it has created.
    :param devices: the RDMA devices that it has opened, such as ``mlx5_0``.
    :param variables: the variables that choose backends, transports and devices.
    :param open_files: the number of files that it has open.
    :param most_files: the number that it may have open; 0: there is no limit, or it is not known.
    :param in_folder: the folder in which it has most files open, with their number.
    """

    pid: int
    command: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    variables: dict[str, str]
    open_files: int = 0
    most_files: int = 0
    in_folder: str = ""

    def __str__(self) -> str:
        uses = ", ".join(self.backends) or "no backend"
        by = f"it has opened {', '.join(self.devices)}" if self.devices else "it has opened no RDMA device"
        if not self.devices and {"UCX", "LIBFABRIC"} & set(self.backends):
            by += ", so its transfers between hosts use TCP"
        if self.most_files and self.open_files > _NEARLY_ALL * self.most_files:
            by += (
                f", and {self.open_files} of at most {self.most_files} files open ({self.in_folder}): soon it cannot "
                "open the next one, as if it leaks them"
            )
        settings = "".join(f", {name}={value}" for name, value in self.variables.items())
        return f"NIXL of pid {self.pid} ({self.command}) uses {uses}; {by}{settings}"


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
        processes = [live for pid in _below(top, children) if (live := _read_live(proc / str(pid), sys)) is not None]
        if processes:
            return processes, ""
    return [], f"no process of {holder} has loaded NIXL"


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    waiting, visited = [pid], set[int]()
    while waiting:
        process = waiting.pop(0)
        if process not in visited:
            visited.add(process)
            yield process
            waiting += sorted(children.get(process, ()))


def _read_live(folder: Path, sys: Path) -> LiveNixl | None:
    """Return what a process has loaded and opened; None if it has no NIXL, has ended or is another user's."""
    try:
        maps = (folder / "maps").read_text(errors="replace").splitlines()
        environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        with os.scandir(folder / "fd") as descriptors:
            links = [os.readlink(assignment.path) for assignment in descriptors]
    except OSError:
        return None
    paths = sorted({line.split(maxsplit=5)[-1] for line in maps if ".so" in line})
    if not any(os.path.basename(path).startswith("libnixl") for path in paths):
        return None
    opened = sorted({match[1] for link in links if (match := _DEVICE.match(link))})
    assignments = (assignment.partition("=") for assignment in environ)
    variables = {
        name: printable(redact_value(name, value)[:_MOST_VALUE])
        for name, sign, value in assignments
        if sign and _VARIABLE.fullmatch(name)
    }
    return LiveNixl(
        int(folder.name),
        command_of(folder),
        tuple(match[1] for path in paths if (match := _PLUGIN.search(path))),
        tuple(_rdma_device(name, sys) for name in opened),
        dict(sorted(variables.items())),
        len(links),
        _most_files(folder),
        _fullest(links),
    )


def _most_files(folder: Path) -> int:
    try:
        match = re.search(r"^Max open files +([0-9]+) ", (folder / "limits").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _fullest(links: Sequence[str]) -> str:
    """Return where most open files are, with their number: ``1010 in /var/cache``, or ``900 of socket``."""
    places = Counter(
        f"in {os.path.dirname(link)}" if link.startswith("/") else f"of {link.partition(':')[0]}" for link in links
    )
    place, count = max(places.items(), key=lambda item: item[1], default=("", 0))
    return f"{count} {printable(place[:_MOST_VALUE])}"


def _rdma_device(verbs: str, sys: Path) -> str:
    try:
        return (sys / "class" / "infiniband_verbs" / verbs / "ibdev").read_text().strip() or verbs
    except OSError:
        return verbs
