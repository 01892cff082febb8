# SPDX-License-Identifier: Apache-2.0
"""The transports of UCX and libfabric, by what moves the bytes. Each name stands here once, and nowhere else in a list.

A backend reports a transport with its device, if it knows it: ``rc_mlx5/mlx5_0:1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SHARED_MEMORY = frozenset({"cma", "knem", "posix", "shm", "sysv", "xpmem"})
CUDA = frozenset({"cuda_copy", "cuda_ipc", "gdr_copy"})
_OTHER_GPUS = frozenset({"gaudi_gdr", "rocm_copy", "rocm_gdr", "rocm_ipc", "ze_copy", "ze_gdr", "ze_ipc"})
TCP = frozenset({"sockets", "tcp"})
#: UCX's transports that EFA's devices have as well, and its other RDMA transports.
_UD = frozenset({"ud", "ud_v", "ud_verbs"})
_UCX_RDMA = _UD | {"rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "dc", "dc_x", "dc_mlx5", "ud_x", "ud_mlx5"}
RDMA = _UCX_RDMA | {"cxi", "opx", "psm2", "psm3", "verbs"}
_EFA = frozenset({"efa", "srd"})
#: The suffix of an EFA transport that moved its bytes by send and receive messages instead of RDMA.
EMULATED = "-emulated"
EFA = _EFA | {f"{name}{EMULATED}" for name in _EFA}
#: Transports that use a network card.
NETWORK = RDMA | EFA | TCP
#: Transports without a network card. The line rate of the cards does not limit a row that may use one of them.
WITHIN_A_HOST = SHARED_MEMORY | {"cuda_copy", "cuda_ipc", "rocm_ipc", "self"}

#: UCX's names for groups of its transports, with what they contain.
_GROUPS = {
    "shm": SHARED_MEMORY,
    "sm": SHARED_MEMORY,
    "mm": SHARED_MEMORY - {"cma", "knem"},
    "ib": RDMA | EFA,
    "cuda": CUDA,
}
#: The names that UCX_TLS may have: transports and groups of them. Those of EFA are some of RDMA's.
UCX_OF_EFA = _UD | _EFA | {"ib"}
UCX_OF_RDMA = UCX_OF_EFA | _UCX_RDMA | {"gga", "gga_mlx5"}
UCX_OF_GPUS = CUDA | _OTHER_GPUS | {"cuda", "gaudi", "rocm", "ze"}
UCX_NAMES = UCX_OF_RDMA | UCX_OF_GPUS | SHARED_MEMORY | {"all", "mm", "self", "sm", "tcp"}


def is_network(transport: str) -> bool:
    """Whether a transport, given as ``name`` or ``name/device``, uses a network card."""
    name, _, device = transport.partition("/")
    return re.split(r"[;:]", name)[0] in NETWORK and device != "lo"


def card(transport: str) -> str:
    """Return the network card of a ``name/device`` transport, without the suffixes of UCX (``:1``) and libfabric
    (``-rdm``, ``-dgrm``).
    """
    return re.sub(r"(:1|-rdm|-dgrm)$", "", transport.partition("/")[2])


def cards(transports: Sequence[str]) -> tuple[str, ...] | None:
    """Return the network cards of ``name/device`` transports, each once; None: a transport names no device."""
    names = [card(transport) for transport in transports]
    return tuple(dict.fromkeys(names)) if names and all(names) else None


def ucx_tls_allows(value: str, transports: Iterable[str]) -> bool:
    """Whether a value of UCX_TLS allows one of these transports.

    :param value: as UCX reads it: names and groups of transports, or after ``^`` those that are excluded.
    :param transports: transports without devices, such as ``cma`` or ``rc_mlx5``.
    """
    names = {name.removeprefix("\\").partition(":")[0] for name in value.removeprefix("^").split(",")}
    excluded = value.startswith("^")
    return any(any(_is_named(transport, name) for name in names) is not excluded for transport in transports)


def _is_named(transport: str, name: str) -> bool:
    """Whether a name in UCX_TLS is that of a transport, or of a group that contains it."""
    return name in ("all", transport) or transport in _GROUPS.get(name, ()) or transport.startswith(f"{name}_")
