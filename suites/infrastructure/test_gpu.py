# SPDX-License-Identifier: Apache-2.0
"""Does NIXL take GPU memory for GPU memory?"""

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
        gpus = ask("gpus")
        if gpus.verdict is not Verdict.NOT_APPLICABLE:
            raise  # the host has GPUs that cannot be used
        verdict(gpus)
        return
    taken, recognized = [], []
    for host in nixl_cluster.hosts[: nixl_cluster.ranks]:
        for backend in between_agents(nixl_settings.backend):
            agent = nixl_agent.another(backends=[backend], host=host)
            if "VRAM_SEG" not in agent.get_backend_mem_types(backend):
                continue
            try:
                nixl_buffer(agent, 1 << 16, "VRAM")
                recognized.append(f"{backend} of rank {host.rank}")
            except FindingError as error:
                taken.append(error.seen)
    if not taken and not recognized:
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} supports no GPU memory")
    reason = "; ".join(taken) or f"GPU memory is registered as GPU memory by {', '.join(recognized)}"
    finding("VRAM-AS-HOST-MEMORY", bool(taken), reason, affects=True)
