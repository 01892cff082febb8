# SPDX-License-Identifier: Apache-2.0
"""What to do if UCX has no transport left that notices a failed peer."""

from __future__ import annotations

import pytest

from pytest_nixl.core import rdma_fault
from pytest_nixl.core.rdma_fault import peer_failure_remedy

SELECT = (
    "[1795816696.859106] [node:31936:0]  select.c:722  UCX  ERROR  no active messages transport to <no debug data>: "
    "self/memory - no peer failure handler, cma/memory - no am bcopy\n"
)
OFFERED = "please use one or more of: 'eth0'(tcp), 'lo'(tcp), 'mlx5_0:1'(ib)\n"
FIRST = f"ucp_context.c:1508 UCX  WARN  network device 'mlx5_7:1' is not available, {OFFERED}"
TWO = f"ucp_context.c:1508 UCX  WARN  network devices 'mlx5_7:1','mlx5_8:1' are not available, {OFFERED}"


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_fault, "ask_addresses", lambda: {"lo": ["127.0.0.1/8"], "ens5": ["10.0.0.2/24"]})


@pytest.mark.parametrize(
    ("log", "devices", "value"),
    [
        (FIRST + SELECT, "mlx5_7:1", "eth0"),
        (TWO + SELECT, "mlx5_7:1,mlx5_0:1,mlx5_8:1", "mlx5_0:1,eth0"),
        (SELECT, "mlx5_0:1", "mlx5_0:1,ens5"),  # all devices are there, and none has a transport that UCX may use
    ],
)
def test_remedy_adds_a_tcp_device_and_keeps_the_devices_that_are_there(log: str, devices: str, value: str) -> None:
    remedy = peer_failure_remedy(log, {"UCX_NET_DEVICES": devices})
    assert f"`export UCX_NET_DEVICES={value}`" in remedy
    assert ("this host has no mlx5_7:1" in remedy) is ("mlx5_7:1" in devices)


def test_remedy_adds_tcp_to_a_list_of_transports_without_it() -> None:
    assert "add tcp to UCX_TLS" in peer_failure_remedy(SELECT, {"UCX_TLS": "cma,posix"})


def test_other_errors_have_no_remedy_of_this_kind() -> None:
    assert peer_failure_remedy(FIRST, {"UCX_NET_DEVICES": "mlx5_7:1"}) == ""
