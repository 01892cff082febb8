# SPDX-License-Identifier: Apache-2.0
"""Find the etcd client library of a process or a program, and whether it contains a known patch."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError

#: The variable of a patch of etcd-cpp-apiv3 in some images: if it is 1, gRPC gets addresses that did not resolve.
PATCH = "ETCD_CPP_API_DISABLE_URI_VALIDATION"

#: How the name of its file begins.
NAME = "libetcd-cpp-api"


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
        return cls(path, hashlib.sha256(data).hexdigest(), PATCH.encode() in data)


def loaded_library(pid: int) -> EtcdLibrary | None:
    """Return the etcd client library that a process has loaded; None if it has none.

    :raises OSError: the process does not exist or belongs to another user.
    :raises NixlPluginError: the library cannot be read.
    """
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1].removesuffix(" (deleted)")
        if Path(path).name.startswith(NAME):
            return EtcdLibrary.read(path, Path(f"/proc/{pid}/root"))
    return None


def linked_library(program: str) -> EtcdLibrary | None:
    """Return the etcd client library that ``ldd`` finds for a program; None if the program needs none.

    :raises NixlPluginError: ldd fails or does not find the library.
    """
    try:
        done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NixlPluginError(
            f"ldd {program} failed: {error}", "install ldd (package libc-bin) and put it on PATH"
        ) from None
    match = re.search(rf"^\s*({NAME}\S*) => (\S+)", done.stdout, re.MULTILINE)
    if match is None:
        return None
    if not match[2].startswith("/"):
        raise NixlPluginError(
            f"{program} needs {match[1]}, which was not found", "set LD_LIBRARY_PATH as for runs of nixlbench"
        )
    return EtcdLibrary.read(match[2])
