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


NOTICES = "NIXL needs a transport that notices a failed peer"
DEVICES = (
    "{}unset UCX_NET_DEVICES, or set it to devices that are here, with a TCP device among them "
    f"(`export UCX_NET_DEVICES={{}}`): {NOTICES}"
)
TLS = f"add tcp to UCX_TLS, or unset UCX_TLS: {NOTICES}"
INTERFACE = f"bring up a network interface with an address: {NOTICES}, such as TCP"


@pytest.mark.parametrize(
    ("log", "environ", "remedy"),
    [
        (
            TWO + SELECT,
            {"UCX_NET_DEVICES": "mlx5_7:1,mlx5_0:1,mlx5_8:1", "UCX_TLS": "rc"},
            DEVICES.format("this host has no mlx5_7:1, mlx5_8:1: ", "mlx5_0:1,eth0"),
        ),
        # All devices are there, and none has a transport that UCX may use.
        (SELECT, {"UCX_NET_DEVICES": "mlx5_0:1"}, DEVICES.format("", "mlx5_0:1,ens5")),
        (SELECT, {"UCX_NET_DEVICES": "ens5"}, DEVICES.format("", "ens5,lo")),
        (FIRST.replace("'mlx5_7:1' ", " ") + SELECT, {"UCX_NET_DEVICES": "eth0"}, DEVICES.format("", "eth0,ens5")),
        (
            FIRST.replace("'eth0'(tcp)", "''(tcp), 'x'(tcp") + SELECT,
            {"UCX_NET_DEVICES": "mlx5_7:1,$x"},
            DEVICES.format("this host has no mlx5_7:1: ", "'$x,ens5'"),
        ),
        (SELECT, {"UCX_TLS": "cma,posix", "UCX_NET_DEVICES": "all"}, TLS),
        (SELECT, {"UCX_TLS": "cma", "UCX_NET_DEVICES": ""}, TLS),
        (SELECT, {"UCX_TLS": ""}, INTERFACE),
        (SELECT, {}, INTERFACE),
        (FIRST, {"UCX_NET_DEVICES": "mlx5_7:1"}, ""),
    ],
)
def test_without_a_transport_that_notices_a_failed_peer_the_settings_are_corrected(
    log: str, environ: dict[str, str], remedy: str
) -> None:
    assert peer_failure_remedy(log, environ) == remedy
