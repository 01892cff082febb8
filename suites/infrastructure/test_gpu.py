# SPDX-License-Identifier: Apache-2.0
"""Are the GPUs there, healthy, and within reach of each other and of the network cards?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl.gate.verdicts import Judgement


@pytest.mark.nixl_check("gpus")
def test_every_gpu_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """There are as many GPUs, and of the model, as the profile says."""
    verdict(ask("gpus"))


@pytest.mark.nixl_check("gpu-driver")
def test_the_driver_suits_nixl(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The driver is of one version with its libraries, and new enough for NIXL's CUDA."""
    verdict(ask("gpu-driver"))


@pytest.mark.nixl_check("gpu-p2p")
def test_every_gpu_reaches_every_other(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU can read every other's memory."""
    verdict(ask("gpu-p2p"))


@pytest.mark.nixl_check("gpu-nvlink")
def test_every_gpu_has_its_nvlinks(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU has as many NVLinks up as the others."""
    verdict(ask("gpu-nvlink"))


@pytest.mark.nixl_check("gpu-direct")
def test_network_cards_reach_gpu_memory(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Network cards reach GPU memory, by DMA-BUF, nvidia_peermem or EFA's own way."""
    verdict(ask("gpu-direct"))


@pytest.mark.nixl_check("gdrcopy")
def test_gdrcopy_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """GDRCopy is there for small messages."""
    verdict(ask("gdrcopy"))


@pytest.mark.nixl_check("gpu-xid")
def test_no_gpu_reported_an_error(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The kernel's log has no Xid error."""
    verdict(ask("gpu-xid"))


@pytest.mark.nixl_check("gpu-ecc")
def test_no_gpu_has_an_uncorrected_error(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """No GPU's memory has an error that could not be corrected."""
    verdict(ask("gpu-ecc"))


@pytest.mark.nixl_check("gpu-bar1")
def test_the_bus_reaches_all_gpu_memory(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The bus reaches all of every GPU's memory."""
    verdict(ask("gpu-bar1"))


@pytest.mark.nixl_check("gpu-persistence")
def test_the_driver_stays_loaded(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The driver stays loaded while nobody uses a GPU."""
    verdict(ask("gpu-persistence"))


@pytest.mark.nixl_check("gpu-nics")
def test_every_gpu_has_its_network_cards(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every GPU has the network cards under its PCI switch that the profile says."""
    verdict(ask("gpu-nics"))
