# SPDX-License-Identifier: Apache-2.0
"""The devices of a host that checks of single devices need: a small part of its facts, which is read at once."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.plain import from_plain, to_plain
from pytest_nixl.host.gpu import GpuFacts, read_gpus
from pytest_nixl.host.rdma import RdmaDevice, read_rdma
from pytest_nixl.host.recorded_tree import FactsRoot

#: The variable that names the network cards that UCX may use, each as ``name:port``.
UCX_CARDS = "UCX_NET_DEVICES"


@dataclass(frozen=True)
class HostDevices:
    """The RDMA devices and GPUs of a host.

    :param name: the host's name; empty: not known.
    :param chosen: UCX_NET_DEVICES there; empty if it is not set.
    """

    name: str
    rdma: tuple[RdmaDevice, ...]
    gpus: tuple[GpuFacts, ...]
    chosen: str

    @classmethod
    def here(cls) -> HostDevices:
        """Return those of this host."""
        root = FactsRoot()
        return cls(socket.gethostname(), read_rdma(root), read_gpus(root).gpus, os.environ.get(UCX_CARDS, ""))

    def plain(self) -> dict[str, Any]:
        """Return them as JSON values."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> HostDevices:
        """Restore them from the values of :meth:`plain`. :raises ValueError: the values are none."""
        return from_plain(cls, plain, exact=True)
