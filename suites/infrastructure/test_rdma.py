# SPDX-License-Identifier: Apache-2.0
"""Are all RDMA devices present, active, fast and accessible?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("rdma-devices", level="quick")
def test_every_rdma_device_is_there(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The host has as many RDMA devices as the profile says, each with a driver."""
    verdict(ask("rdma-devices"))


@pytest.mark.nixl_check("rdma-ports", level="quick")
def test_a_port_of_every_rdma_device_is_active(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """Every RDMA device has an active port, and no link has errors that most others do not have."""
    verdict(ask("rdma-ports"))


@pytest.mark.nixl_check("rdma-rate", level="quick")
def test_every_rdma_device_has_the_rate_of_the_profile(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """No RDMA device is slower than the profile says, or slower than the others."""
    verdict(ask("rdma-rate"))


@pytest.mark.nixl_check("uverbs-open", level="quick")
def test_every_uverbs_node_can_be_opened(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A process can open the device node of every RDMA device."""
    verdict(ask("uverbs-open"))


@pytest.mark.nixl_check("ucx-uses-rdma", level="quick")
def test_ucx_can_use_every_rdma_device(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The UCX that NIXL loads finds, opens and offers every RDMA device of the host."""
    verdict(ask("ucx-uses-rdma"))
