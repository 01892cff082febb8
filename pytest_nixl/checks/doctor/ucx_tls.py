# SPDX-License-Identifier: Apache-2.0
"""Check of UCX_TLS: which transports the value allows, and whether one of them can carry NIXL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    has_rdma,
    named,
    not_applicable,
    passed,
    warned,
)
from pytest_nixl.host.facts import Facts
from pytest_nixl.judge.row import ucx_tls_allows
from pytest_nixl.model.verdicts import Judgement

#: UCX's RDMA transports, and its names for groups of them.
_RDMA_TLS = frozenset(
    {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc",
     "dc_x", "dc_mlx5", "srd", "gga", "gga_mlx5", "efa"}
)  # fmt: skip
#: The RDMA transports that EFA supports.
_EFA_TLS = frozenset({"ib", "ud", "ud_v", "ud_verbs", "srd", "efa"})
_GPU_TLS = frozenset(
    {"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc", "rocm_gdr", "ze", "ze_copy",
     "ze_ipc", "ze_gdr", "gaudi", "gaudi_gdr"}
)  # fmt: skip
#: Transports within a host. They cannot carry NIXL alone, because they do not report a failed peer.
_LOCAL_TLS = frozenset({"sm", "shm", "posix", "sysv", "cma", "knem", "xpmem", "self", "mm"})
_KNOWN_TLS = _RDMA_TLS | _GPU_TLS | _LOCAL_TLS | {"all", "tcp"}
#: UCX's message about transports that it cannot use.
_NOT_AVAILABLE = re.compile(r"transports? ('.*') (?:is|are) not available, please use one or more of: (.*)")


@check("transports-allowed", "Does UCX_TLS allow the transports that this host supports?")
def transports_allowed(facts: Facts, wanted: Requirements) -> Judgement:
    """UCX_TLS allows the transports that this host supports.

    Judge UCX_TLS: a list without RDMA on an RDMA host, one that cannot carry NIXL, or a name unknown to UCX.
    """
    if "UCX" not in wanted.backends:
        return not_applicable("UCX is not requested")
    if "UCX_TLS" not in facts.environment.steering:
        return passed("UCX_TLS is not set: UCX chooses its transports")
    text = facts.environment.get("UCX_TLS")
    tls = UcxTransports.of(text, facts)
    if not "".join(tls.names):
        return failed(f"UCX_TLS={text} names no transport, and UCX refuses an empty list", "unset UCX_TLS")
    made = facts.software.backend("UCX")
    works = made is not None and not made.error and bool(made.memories)
    if has_rdma(facts, wanted):
        rdma = [name for name in tls.names if name in _RDMA_TLS or name == "all"]
        shut = tls.without and (
            {"ib", "all"} & set(rdma) or {"rc", "dc", "ud"} <= {name.partition("_")[0] for name in rdma}
        )
        if shut or (not tls.without and not rdma):
            return failed(
                f"UCX_TLS={text} excludes every RDMA transport, but this host has RDMA{tls.meant()}",
                "unset UCX_TLS, or add rc, dc or ud (for EFA: srd), and cuda_copy and cuda_ipc for GPUs",
            )
    if not tls.carriers() and not works:
        strange, absent = tls.strange(), tls.absent()
        if strange or absent:
            told = " and ".join(filter(None, [
                f"UCX does not know {named(map(ascii, strange))}{tls.meant()}" if strange else "",
                tls.without_device(absent) if absent else "",
            ]))  # fmt: skip
            return failed(f"UCX_TLS={text} names no transport that can carry NIXL on this host: {told}", tls.remedy())
        return failed(
            f"UCX_TLS={text} {'leaves' if tls.without else 'names'} no transport that reports a failed peer, "
            "so NIXL refuses UCX (NIXL_ERR_BACKEND)",
            "unset UCX_TLS, or do not exclude tcp" if tls.without else "add tcp to UCX_TLS, or unset UCX_TLS",
        )
    if tls.strange():
        return warned(
            f"UCX_TLS={text} contains names that UCX does not know: {named(map(ascii, tls.strange()))}{tls.meant()}",
            tls.remedy(),
        )
    gpu = bool(facts.gpu.gpus) and not tls.without and "all" not in tls.names
    if gpu and not any(name.startswith("cuda") for name in tls.names):
        return warned(f"UCX_TLS={text} excludes cuda_copy and cuda_ipc, but this host has GPUs", "add cuda to UCX_TLS")
    for name in wanted.profile.transports("UCX"):
        if not ucx_tls_allows(text, name):
            return warned(
                f"UCX_TLS={text} allows none of the transports that the profile {wanted.profile.name} accepts for rows "
                f"of UCX ({', '.join(name)}): these rows would be WRONG-TRANSPORT",
                "unset UCX_TLS, or give the profile of this machine with --nixl-profile "
                "(pytest-nixl doctor: --profile)" + (": tcp-loopback" if text == "tcp" else ""),
            )
    return passed(f"UCX_TLS={text}")


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

    @classmethod
    def of(cls, text: str, facts: Facts) -> UcxTransports:
        parts = [part.removeprefix("\\") for part in text.removeprefix("^").split(",")]
        names = [part.partition(":")[0] for part in parts]
        made, uses = facts.software.backend("UCX"), facts.software.ucx_rdma
        refused: set[str] = set()
        offered: set[str] = set()
        for match in filter(None, map(_NOT_AVAILABLE.search, made.said if made is not None else ())):
            refused |= set(re.findall("'([^']*)'", match[1]))
            offered |= set(re.split(", *", match[2]))
        return cls(
            without=text.startswith("^"),
            names=tuple(name for name in names if name),
            auxiliary=frozenset(part.partition(":")[0] for part in parts if part.endswith(":aux")),
            has_rdma=bool(facts.rdma) or bool(offered & _RDMA_TLS),
            unused=tuple(device.name for device in facts.rdma) if uses is not None and not uses.offered else (),
            efa_only=bool(facts.rdma) and all(device.kind == "efa" for device in facts.rdma),
            has_gpu=bool(facts.gpu.gpus),
            refused=frozenset(refused),
            offered=frozenset(offered),
        )

    def strange(self) -> list[str]:
        """Return the names that no release of UCX knows."""
        return [name for name in self.names if name not in _KNOWN_TLS and name not in self.offered]

    def absent(self) -> list[str]:
        """Return the known names for which this host has no device, or which this UCX says it cannot use."""
        return [name for name in self.names if name in _KNOWN_TLS and not self._here(name)]

    def without_device(self, absent: Sequence[str]) -> str:
        """Say that no device serves some transports."""
        if self.unused and _RDMA_TLS.issuperset(absent):
            return f"UCX uses none of this host's RDMA devices ({named(self.unused)}), and ucx-uses-rdma says why"
        return f"this host has no device for {named(absent)}"

    def _here(self, name: str) -> bool:
        if name in self.refused:
            return False
        if name in _RDMA_TLS:
            return self.has_rdma and (not self.efa_only or name in _EFA_TLS)
        return self.has_gpu if name in _GPU_TLS else True

    def carriers(self) -> list[str]:
        """Return the allowed transports that can carry NIXL by themselves: tcp, and RDMA if this host has it."""
        able = {"tcp", *(_RDMA_TLS if self.has_rdma else ())}
        if self.without:
            return sorted(able - set(self.names)) if "all" not in self.names else []
        usable = [name for name in self.names if name not in self.auxiliary and self._here(name)]
        return [name for name in usable if name in able or name == "all"]

    def meant(self) -> str:
        """Return a hint with the known names that are similar to the unknown ones; empty if there are none."""
        known = sorted(self.offered | _KNOWN_TLS)
        found = {}
        for name in self.strange():
            near = get_close_matches(re.sub(r"\s", "", name).lower(), known, n=1, cutoff=0.6)
            if near:
                found[name] = near[0]
        return f" (did you mean {named(found.values())}?)" if found else ""

    def remedy(self) -> str:
        """Return the remedy, with the transports that can carry NIXL on this host."""
        carry = sorted(self.offered & (_RDMA_TLS | {"tcp"})) or ["tcp"]
        return f"correct or unset UCX_TLS; transports that can carry NIXL on this host: {named(carry, 12)}"
