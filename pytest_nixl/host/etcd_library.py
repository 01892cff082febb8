# SPDX-License-Identifier: Apache-2.0
"""The etcd client library that a process has loaded or a program would load, and whether a known patch is in it."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError

#: The variable of a patch of etcd-cpp-apiv3 that some images carry: with 1, gRPC gets what could not be resolved.
PATCH = "ETCD_CPP_API_DISABLE_URI_VALIDATION"

_NAME = "libetcd-cpp-api"


@dataclass(frozen=True)
class EtcdLibrary:
    """A library file. ``digest`` is the SHA-256 of its bytes."""

    path: str
    digest: str
    patched: bool

    @classmethod
    def read(cls, path: str, root: Path = Path("/")) -> EtcdLibrary:
        """Read a library.

        :param root: where its file system is seen from here.
        :raises NixlPluginError: if it cannot be read.
        """
        try:
            data = (root / path.lstrip("/")).read_bytes()
        except OSError as error:
            raise NixlPluginError(
                f"{path} cannot be read ({error.strerror})", "read it as the user that runs NIXL"
            ) from None
        return cls(path, hashlib.sha256(data).hexdigest(), PATCH.encode() in data)


def loaded_library(pid: int) -> EtcdLibrary | None:
    """Return the etcd client library that a process has mapped; None where it has none."""
    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1].removesuffix(" (deleted)")
        if Path(path).name.startswith(_NAME):
            return EtcdLibrary.read(path, Path(f"/proc/{pid}/root"))
    return None


def linked_library(program: str) -> EtcdLibrary | None:
    """Return the etcd client library that a program would load here, by ``ldd``; None where it links none.

    :raises NixlPluginError: where ldd cannot tell, or does not find the library.
    """
    try:
        done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NixlPluginError(f"ldd {program} failed: {error}", "put ldd (of the C library's tools) on PATH") from None
    found = re.search(rf"^\s*({_NAME}\S*) => (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        return None
    if not found[2].startswith("/"):
        raise NixlPluginError(
            f"{program} needs {found[1]}, which is not found", "set LD_LIBRARY_PATH as nixlbench runs"
        )
    return EtcdLibrary.read(found[2])
