# SPDX-License-Identifier: Apache-2.0
"""Programs of other projects that a worker may start, and the variables that only a worker's own rank sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from pytest_nixl.model.memory import HOST, MemoryPair

#: The programs that a worker starts, each with a remedy if it is missing.
TOOLS = {
    "nixlbench": "use one of NIXL's images, which contain it, or set --nixl-nixlbench to its path",
    "ucx_perftest": "give its directory with --nixl-raw-tools-dir=DIR; docs/how-to/raw-tools.md says how to unpack one",
    "fi_rma_bw": "build libfabric's fabtests, and set --nixl-raw-tools-dir to the directory of the program",
    "fi_rma_pingpong": "build libfabric's fabtests, and set --nixl-raw-tools-dir to the directory of the program",
}

#: libfabric's words, in any case, for a switch that is on or off. It ignores a switch with another word.
LIBFABRIC_ON, LIBFABRIC_OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: The variable by which a worker knows the private directory of the run, which the supervisor removes.
RUN_DIRECTORY = "PYTEST_NIXL_RUN_DIRECTORY"
#: The variable that forbids a stand-in for the CUDA driver: ``never``.
DRIVER_STANDIN = "PYTEST_NIXL_DRIVER_STANDIN"


#: The variables of NIXL and its libraries that another rank may set for a worker or program of this rank. It is a
#: closed list of names: NIXL and UCX have others that load code (UCX_MODULES, NIXL_TELEMETRY_EXPORTER), run a program
#: (UCX_GDB_COMMAND with UCX_HANDLE_ERRORS, UCX_ERROR_MAIL_TO) or write a file (UCX_LOG_FILE, UCX_MEMTRACK_DEST).
_TABLE = """
CUDA_VISIBLE_DEVICES ETCD_CPP_API_DISABLE_URI_VALIDATION NIXL_ETCD_ENDPOINTS NIXL_ETCD_NAMESPACE NIXL_LOG_LEVEL
NIXL_TELEMETRY_ENABLE
UCX_IB_GID_INDEX UCX_IB_GPU_DIRECT_RDMA UCX_IB_SL UCX_IB_TRAFFIC_CLASS UCX_KEEPALIVE_INTERVAL
UCX_KEEPALIVE_NUM_EPS UCX_LOG_LEVEL UCX_MAX_EAGER_RAILS UCX_MAX_RMA_RAILS UCX_MAX_RNDV_RAILS
UCX_MEM_BISTRO_GRACE_DURATION UCX_MEMTYPE_CACHE UCX_NET_DEVICES UCX_PROTO_INFO UCX_RNDV_SCHEME UCX_RNDV_THRESH
UCX_SOCKADDR_TLS_PRIORITY UCX_TLS UCX_WARN_UNUSED_ENV_VARS UCX_ZCOPY_THRESH
FI_EFA_ENABLE_SHM_TRANSFER FI_EFA_USE_DEVICE_RDMA FI_HMEM FI_HMEM_DISABLE_P2P FI_LOG_LEVEL FI_MR_CACHE_MONITOR
FI_PROVIDER FI_SOCKETS_IFACE FI_TCP_IFACE FI_UNIVERSE_SIZE FI_VERBS_IFACE
"""
FROM_OTHER_RANKS = frozenset(_TABLE.split())
_OF_LIBRARIES = re.compile(r"(?:UCX|FI|NIXL|ETCD|CUDA)_[A-Z0-9_]+")


def not_from_other_ranks(variables: Mapping[str, str | None]) -> list[str]:
    """Return the names that another rank may not set here. It may unset any variable of NIXL and its libraries."""
    kept_variables = {name: value for name, value in variables.items() if name not in FROM_OTHER_RANKS}
    return [name for name, value in kept_variables.items() if value is not None or not _OF_LIBRARIES.fullmatch(name)]


def variable(tool: str) -> str:
    """Return the name of the variable with a program's path."""
    return f"PYTEST_NIXL_TOOL_{tool.upper()}"


def own_variables(
    paths: Mapping[str, str], environ: Mapping[str, str] = os.environ, memory: Sequence[MemoryPair] = (HOST,)
) -> dict[str, str | None]:
    """Return the variables that only a worker's own rank may set; None unsets one.

    They are ``PATH``, the paths of programs, and with GPU memory the one that forbids the stand-in for CUDA's driver.

    :param paths: the paths that options name, by program.
    :param environ: this rank's environment variables.
    :param memory: the memory types that the run asks for.
    """
    variables = {"PATH": environ.get("PATH"), **{variable(tool): paths.get(tool) or None for tool in TOOLS}}
    if any(pair.on_gpu for pair in memory):
        variables[DRIVER_STANDIN] = "never"
    return variables
