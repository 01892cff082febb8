# SPDX-License-Identifier: Apache-2.0
"""The value of UCX_TLS as UCX reads it, and which of its transports can carry NIXL on a host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pytest_nixl.core.sentences import named
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.transports import UCX_NAMES, UCX_OF_EFA, UCX_OF_GPUS, UCX_OF_RDMA

#: UCX's message about transports that it cannot use.
_NOT_AVAILABLE = re.compile(r"transports? ('.*') \w+ not available, please use one or more of: (.*)")


@dataclass(frozen=True)
class UcxTransports:
    """The value of UCX_TLS as UCX reads it: case and white space count.

    :param without: whether the value begins with ``^`` and so lists transports to exclude.
    :param names: the listed names, without a leading backslash (which forbids aliases) and without ``:aux``.
    :param auxiliary: the listed names with ``:aux``, which may only set up connections.
    :param has_rdma: whether this host has RDMA devices.
    :param efa_only: whether this host has RDMA devices and all are EFA.
    :param refused: transports that UCX says it cannot use.
    :param offered: transports that UCX says it can use.
    :param unused: the RDMA devices of this host, if UCX offers none of them.
    :param of_devices: the transports that UCX offers for the RDMA devices of this host.
    """

    without: bool
    names: tuple[str, ...]
    auxiliary: frozenset[str]
    has_rdma: bool
    efa_only: bool
    has_gpu: bool
    refused: frozenset[str]
    offered: frozenset[str]
    unused: tuple[str, ...] = ()
    of_devices: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str, facts: Facts) -> UcxTransports:
        parts = [part.removeprefix("\\") for part in text.removeprefix("^").split(",")]
        names = [part.partition(":")[0] for part in parts]
        backend, uses = facts.software.backend("UCX"), facts.software.ucx_rdma
        refused: set[str] = set()
        offered: set[str] = set()
        for match in filter(None, map(_NOT_AVAILABLE.search, backend.said if backend is not None else ())):
            refused |= set(re.findall("'([^']*)'", match[1]))
            offered |= set(re.split(", *", match[2]))
        return cls(
            without=text.startswith("^"),
            names=tuple(name for name in names if name),
            auxiliary=frozenset(part.partition(":")[0] for part in parts if part.endswith(":aux")),
            has_rdma=bool(facts.rdma) or bool(offered & UCX_OF_RDMA),
            unused=tuple(device.name for device in facts.rdma) if uses is not None and not uses.offered else (),
            of_devices=frozenset().union(*uses.offered.values()) if uses is not None else frozenset(),
            efa_only=bool(facts.rdma) and all(device.kind == "efa" for device in facts.rdma),
            has_gpu=bool(facts.gpu.gpus),
            refused=frozenset(refused),
            offered=frozenset(offered),
        )

    def strange(self) -> list[str]:
        """Return the names that no release of UCX knows."""
        return [name for name in self.names if name not in UCX_NAMES and name not in self.offered]

    def absent(self) -> list[str]:
        """Return the known names for which this host has no device, or which this UCX says it cannot use."""
        return [name for name in self.names if name in UCX_NAMES and not self._is_present(name)]

    def without_device(self, absent: Sequence[str]) -> str:
        """Say that no device serves some transports."""
        if self.unused and UCX_OF_RDMA.issuperset(absent):
            return f"UCX uses none of this host's RDMA devices ({named(self.unused)}), and ucx-uses-rdma says why"
        return f"this host has no device for {named(absent)}"

    def _is_present(self, name: str) -> bool:
        if name in self.refused:
            return False
        if name in UCX_OF_RDMA:
            return self.has_rdma and (not self.efa_only or name in UCX_OF_EFA)
        return self.has_gpu if name in UCX_OF_GPUS else True

    def carriers(self) -> list[str]:
        """Return the allowed transports that can carry NIXL by themselves: tcp, and RDMA if this host has it."""
        able = {"tcp", *(UCX_OF_RDMA if self.has_rdma else ())}
        if self.without:
            return sorted(name for name in able - {"ib", "efa"} if not self._is_excluded(name))
        usable = [name for name in self.names if name not in self.auxiliary and self._is_present(name)]
        return [name for name in usable if name in able or name == "all"]

    def _is_excluded(self, name: str) -> bool:
        """Return whether a list of transports to exclude names one, its family (rc for rc_mlx5) or its group."""
        groups = {"all", name, name.partition("_")[0], *(("ib",) if name in UCX_OF_RDMA else ())}
        return bool(groups & set(self.names))

    def meant(self) -> str:
        """Return a hint with the known names that are similar to the unknown ones; empty if there are none."""
        names = sorted(self.offered | UCX_NAMES)
        suggestions = {}
        for name in self.strange():
            near = get_close_matches(re.sub(r"\s", "", name).lower(), names, n=1, cutoff=0.6)
            if near:
                suggestions[name] = near[0]
        return f" (did you mean {named(suggestions.values())}?)" if suggestions else ""

    def remedy(self) -> str:
        """Return the remedy, with the transports that can carry NIXL on this host."""
        offered = self.offered or {"tcp", *self.of_devices}
        carry = sorted(offered & (UCX_OF_RDMA | {"tcp"})) or ["tcp"]
        return f"correct or unset UCX_TLS; transports that can carry NIXL on this host: {named(carry, 12)}"
