# SPDX-License-Identifier: Apache-2.0
"""Are all GPUs present and healthy, and can other GPUs and the network cards access their memory?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import (
    Cluster,
    FindingError,
    Judgement,
    MakeBuffer,
    NixlAgent,
    NotApplicableError,
    Settings,
    Verdict,
    between_agents,
)

if TYPE_CHECKING:
    from suites.conftest import FindingFixture


@pytest.mark.nixl_check("gpus", level="quick")
def test_every_gpu_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The host has the number and model of GPUs that the profile says."""
    verdict(ask("gpus"))


@pytest.mark.nixl_check("gpu-driver", level="quick")
def test_the_driver_suits_nixl(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The driver has the same version as its libraries, and is new enough for NIXL's CUDA version."""
    verdict(ask("gpu-driver"))


@pytest.mark.nixl_check("ucx-cuda", level="quick")
def test_ucx_finds_its_cuda_libraries(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """UCX finds every library that its CUDA modules need."""
    verdict(ask("ucx-cuda"))


@pytest.mark.nixl_check("gpu-p2p", level="quick")
def test_every_gpu_reaches_every_other(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU can read every other's memory."""
    verdict(ask("gpu-p2p"))


@pytest.mark.nixl_check("gpu-nvlink", level="quick")
def test_every_gpu_has_its_nvlinks(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU has the same number of active NVLinks."""
    verdict(ask("gpu-nvlink"))


@pytest.mark.nixl_check("gpu-direct", level="quick")
def test_network_cards_reach_gpu_memory(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Network cards access GPU memory by DMA-BUF, nvidia_peermem or EFA's own driver."""
    verdict(ask("gpu-direct"))


@pytest.mark.nixl_check("gdrcopy", level="quick")
def test_gdrcopy_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """GDRCopy is usable for small messages."""
    verdict(ask("gdrcopy"))


@pytest.mark.nixl_check("gpu-xid", level="quick")
def test_no_gpu_reported_an_error(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The kernel's log has no Xid error."""
    verdict(ask("gpu-xid"))


@pytest.mark.nixl_check("gpu-ecc", level="quick")
def test_no_gpu_has_an_uncorrected_error(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """No GPU has an uncorrectable memory error."""
    verdict(ask("gpu-ecc"))


@pytest.mark.nixl_check("gpu-bar1", level="quick")
def test_the_bus_reaches_all_gpu_memory(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """BAR1 of every GPU covers its memory."""
    verdict(ask("gpu-bar1"))


@pytest.mark.nixl_check("gpu-persistence", level="quick")
def test_the_driver_stays_loaded(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The driver stays loaded while no process uses a GPU."""
    verdict(ask("gpu-persistence"))


@pytest.mark.nixl_check("gpu-nics", level="quick")
def test_every_gpu_has_its_network_cards(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU has as many network cards near it as the profile says."""
    verdict(ask("gpu-nics"))


@pytest.mark.nixl_check("vram-known", level="quick")
def test_gpu_memory_is_taken_for_gpu_memory(
    ask: Callable[[str], Judgement],
    nixl_agent: NixlAgent,
    nixl_cluster: Cluster,
    nixl_settings: Settings,
    nixl_buffer: MakeBuffer,
    finding: FindingFixture,
    verdict: Callable[[Judgement], None],
) -> None:
    """On every rank, every backend with GPU memory registers it as GPU memory, not as host memory."""
    try:
        nixl_agent.gpus()
    except NotApplicableError:
        there = ask("gpus")
        if there.verdict is not Verdict.NOT_APPLICABLE:
            raise  # the host has GPUs that cannot be used
        verdict(there)
        return
    taken, known = [], []
    for host in nixl_cluster.hosts[: nixl_cluster.ranks]:
        for backend in between_agents(nixl_settings.backend):
            agent = nixl_agent.another(backends=[backend], host=host)
            if "VRAM_SEG" not in agent.get_backend_mem_types(backend):
                continue
            try:
                nixl_buffer(agent, 1 << 16, "VRAM")
                known.append(f"{backend} of rank {host.rank}")
            except FindingError as error:
                taken.append(error.seen)
    if not taken and not known:
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} supports no GPU memory")
    reason = "; ".join(taken) or f"GPU memory is registered as GPU memory by {', '.join(known)}"
    finding("VRAM-AS-HOST-MEMORY", bool(taken), reason, affects=True)
