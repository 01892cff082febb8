# SPDX-License-Identifier: Apache-2.0
"""The libraries of NIXL, and of those that it uses, that a process has loaded.

Short, because the process that has loaded them and the one that looks at it from outside both import it: the latter
without NumPy, which takes a third of a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from pytest_nixl.host.etcd_library import NAME, EtcdLibrary

#: NIXL's libraries and those that it uses for transfers.
_OURS = re.compile(
    r"lib(?:nixl|plugin_|uc[pstm]|fabric|ibverbs|mlx5|efa|rdmacm|nl-|etcd-cpp|cuda|cudart|gdrapi|hwloc|grpc\+\+|nvidia-ml)"
)


def libraries_of_nixl(maps: str) -> list[str]:
    """Return the paths of the loaded libraries that NIXL uses, each once, in the order of their addresses.

    :param maps: the content of the process's ``/proc/PID/maps``.
    """
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps.splitlines() if ".so" in line)
    return [path for path in paths if path.startswith("/") and _OURS.match(os.path.basename(path))]


def etcd_client(paths: Sequence[str]) -> EtcdLibrary | None:
    """Return etcd's client library among loaded libraries; None if it is not among them.

    :param paths: the paths of the loaded libraries.
    :raises NixlPluginError: the library cannot be read.
    """
    path = next((path for path in paths if os.path.basename(path).startswith(NAME)), None)
    return None if path is None else EtcdLibrary.read(path)
