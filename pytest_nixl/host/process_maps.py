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
_OURS = (
    r"lib(?:nixl|plugin_|uc[pstm]|fabric|ibverbs|mlx5|efa|rdmacm|nl-|etcd-cpp"
    r"|cuda|cudart|gdrapi|hwloc|grpc\+\+|nvidia-ml)"
)
#: The path of such a library at the end of a line. One search of the whole text: the doctor looks ten times a second.
_PATH = re.compile(rf" (/(?:.*/)?{_OURS}[^/\n]*\.so[^/\n]*)$", re.MULTILINE)


def libraries_of_nixl(maps: str) -> list[str]:
    """Return the paths of the loaded libraries that NIXL uses, each once, in the order of their addresses.

    :param maps: the content of the process's ``/proc/PID/maps``.
    """
    return list(dict.fromkeys(_PATH.findall(maps)))


def etcd_client(paths: Sequence[str]) -> EtcdLibrary | None:
    """Return etcd's client library among loaded libraries; None if it is not among them.

    :param paths: the paths of the loaded libraries.
    :raises NixlPluginError: the library cannot be read.
    """
    path = next((path for path in paths if os.path.basename(path).startswith(NAME)), None)
    return None if path is None else EtcdLibrary.read(path)
