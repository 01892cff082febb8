# SPDX-License-Identifier: Apache-2.0
"""Check of UCX_TLS: which transports the value allows, and whether one of them can carry NIXL."""

from __future__ import annotations

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    has_rdma,
    not_applicable,
    passed,
    warned,
)
from pytest_nixl.core.rdma_fault import TCP_ALONE, allows_cuda, cuda_remedy
from pytest_nixl.core.words import named
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.ucx_transports import UcxTransports
from pytest_nixl.model.nixl_releases import refuses_no_cuda
from pytest_nixl.model.transports import UCX_OF_RDMA, ucx_tls_allows
from pytest_nixl.model.verdicts import Judgement
from pytest_nixl.session.default_profile import ONE_HOST, OVER_TCP


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
    # NIXL looks at the PCI bus: the host of a pod without a GPU, or without a driver, counts.
    refused = (
        not works and not allows_cuda(text) and any(device.kind == "gpu" for device in facts.pci)
        and refuses_no_cuda(facts.software.nixl.value or "")
    )  # fmt: skip
    no_cuda = "allows no CUDA memory, but this host has an NVIDIA GPU, so NIXL refuses UCX (NIXL_ERR_BACKEND)"
    if has_rdma(facts, wanted):
        rdma = [name for name in tls.names if name in UCX_OF_RDMA or name == "all"]
        shut = tls.without and (
            {"ib", "all"} & set(rdma) or {"rc", "dc", "ud"} <= {name.partition("_")[0] for name in rdma}
        )
        if shut or (not tls.without and not rdma):
            return failed(
                f"UCX_TLS={text} excludes every RDMA transport, but this host has RDMA{tls.meant()}"
                f"{f'; and it {no_cuda}' if refused else ''}",
                "unset UCX_TLS, or add rc, dc or ud (for EFA: srd), and cuda_copy and cuda_ipc for GPUs",
            )
    if not tls.carriers() and not works:
        strange, absent = tls.strange(), tls.absent()
        if strange or absent:
            listing = " and ".join(filter(None, [
                f"UCX does not know {named(map(ascii, strange))}{tls.meant()}" if strange else "",
                tls.without_device(absent) if absent else "",
            ]))  # fmt: skip
            return failed(
                f"UCX_TLS={text} names no transport that can carry NIXL on this host: {listing}", tls.remedy()
            )
        return failed(
            f"UCX_TLS={text} {'leaves' if tls.without else 'names'} no transport that reports a failed peer, "
            "so NIXL refuses UCX (NIXL_ERR_BACKEND)",
            "unset UCX_TLS, or do not exclude tcp" if tls.without else "add tcp to UCX_TLS, or unset UCX_TLS",
        )
    if refused:
        return failed(f"UCX_TLS={text} {no_cuda}", cuda_remedy(text))
    if tls.strange():
        return warned(
            f"UCX_TLS={text} contains names that UCX does not know: {named(map(ascii, tls.strange()))}{tls.meant()}",
            tls.remedy(),
        )
    gpu = bool(facts.gpu.gpus) and not tls.without and "all" not in tls.names
    if gpu and not any(name.startswith("cuda") for name in tls.names):
        return warned(f"UCX_TLS={text} excludes cuda_copy and cuda_ipc, but this host has GPUs", "add cuda to UCX_TLS")
    profile = wanted.profile.name
    for name in wanted.profile.transports("UCX"):
        if not ucx_tls_allows(text, name):
            only = f" ({profile} is for two processes of one host, and judges no transfer to another host)"
            return warned(
                f"UCX_TLS={text} allows none of the transports that the profile {profile} accepts for rows "
                f"of UCX ({', '.join(name)}): these rows would be WRONG-TRANSPORT"
                f"{only if profile in (ONE_HOST, OVER_TCP) else ''}",
                "unset UCX_TLS, or give the profile of this machine with --nixl-profile "
                "(pytest-nixl doctor: --profile)" + (": tcp-loopback" if text in TCP_ALONE else ""),
            )
    return passed(f"UCX_TLS={text}")
