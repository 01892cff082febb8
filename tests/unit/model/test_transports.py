# SPDX-License-Identifier: Apache-2.0
"""The transports of UCX and libfabric: which use a network card, which card, and what UCX_TLS allows."""

from __future__ import annotations

import pytest

from pytest_nixl.model.transports import cards, is_network, ucx_tls_allows

NETWORK = (
    *("efa/rdmap79s0", "srd/rdmap79s0:1", "rc_mlx5/mlx5_0:1", "verbs;ofi_rxm/mlx5_0", "tcp/eth0", "tcp", "ud", "ud_v"),
    *("ud_x", "ud_verbs", "ud_mlx5", "rc", "rc_v", "rc_x", "rc_verbs", "rc_gda", "dc", "dc_x", "dc_mlx5", "cxi", "opx"),
    *("psm2", "psm3", "verbs", "efa", "srd", "efa-emulated", "srd-emulated", "sockets", "tcp;ofi_rxm", "rc:aux/mlx5_0"),
)
OTHER = (
    *("tcp/lo", "cma/memory", "posix/memory", "sysv/memory", "cuda_ipc/cuda", "cuda_copy/cuda", "self/memory", ""),
    *("FILE/ext4", "knem", "xpmem", "shm", "gdr_copy", "rocm_ipc", "ze_ipc", "gaudi_gdr", "rc_y"),
)


@pytest.mark.parametrize("transport", [*NETWORK, *OTHER])
def test_transports_that_use_a_network_card_are_known(transport: str) -> None:
    assert is_network(transport) is (transport in NETWORK)


@pytest.mark.parametrize(
    ("transports", "counted"),
    [
        ((), None),
        (("efa",), None),
        (("efa/rdmap79s0", "srd"), None),
        (
            ("efa/rdmap79s0", "efa/rdmap80s0", "efa/rdmap81s0", "efa/rdmap82s0"),
            ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"),
        ),
        (("rc_mlx5/mlx5_0:1", "ud_mlx5/mlx5_0:1"), ("mlx5_0",)),
        (("efa/rdmap79s0-rdm", "srd/rdmap79s0:1"), ("rdmap79s0",)),
        (("rc/mlx4_0:1", "rc/mlx4_0:2"), ("mlx4_0", "mlx4_0:2")),
        (("udp/eth0-dgrm", "tcp/eth0", "rc/mlx4_0:12", "efa/a-rdm0"), ("eth0", "mlx4_0:12", "a-rdm0")),
    ],
)
def test_each_card_is_counted_once(transports: tuple[str, ...], counted: tuple[str, ...] | None) -> None:
    assert cards(transports) == counted


def test_groups_of_ucx_tls_contain_their_transports() -> None:
    assert ucx_tls_allows("tcp,cma", ["posix", "cma"])
    assert ucx_tls_allows("rc", ["rc_mlx5"])
    assert ucx_tls_allows("ib", ["srd"])
    for group, names in {
        "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
        "shm": ("cma", "knem", "posix", "shm", "sysv", "xpmem"),
        "sm": ("cma", "knem", "posix", "shm", "sysv", "xpmem"),
        "mm": ("posix", "shm", "sysv", "xpmem"),
        "ib": ("rc", "rc_mlx5", "dc_x", "ud_verbs", "efa", "srd", "srd-emulated"),
        "all": ("tcp", "self", "rocm_ipc"),
    }.items():
        for name in names:
            assert ucx_tls_allows(group, [name])
            assert not ucx_tls_allows(f"^{group}", [name])
            assert ucx_tls_allows(f"tcp,\\{group}:aux", ["self", name])
    assert not any(ucx_tls_allows("mm", [name]) for name in ("cma", "knem", "tcp"))
    assert not any(ucx_tls_allows("ib", [name]) for name in ("tcp", "cma", "cuda_ipc"))
    assert not ucx_tls_allows("rc", ["dc_mlx5", "cma"])
