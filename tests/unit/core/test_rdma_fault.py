# SPDX-License-Identifier: Apache-2.0
"""Why UCX cannot use what it is told to: its transports, or RDMA devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nixl.core.rdma_fault import passthrough_fault, rdma_fault, transport_fault

RC = {"UCX_TLS": "rc,self", "UCX_NET_DEVICES": "rxe0:1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with the healthy device rxe0, and all capabilities."""
    for name, text in {
        "sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/rxe0/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a63:0001\n",
        "sys/class/infiniband_verbs/uverbs0/ibdev": "rxe0\n",
        "dev/infiniband/uverbs0": "",
        "proc/self/status": "CapEff:\t000001ffffffffff\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("text", ["posix,self", "sm", "cuda_copy", "tcp:aux,posix", "", "banana", "^tcp", "^all"])
def test_transports_that_cannot_carry_nixl_are_named(text: str, tmp_path: Path) -> None:
    expected = f"UCX_TLS={text} is set here, and allows no transport that NIXL can use between processes"
    assert transport_fault({"UCX_TLS": text}, str(tmp_path)) == expected


@pytest.mark.parametrize(
    "environ",
    [{}, *({"UCX_TLS": text} for text in ("tcp,posix", "all", "\\rc_x", "srd", "rc:aux,ud", "^posix", "^tcp"))],
)
def test_transports_that_can_carry_nixl_are_no_fault(environ: dict[str, str], root: Path) -> None:
    assert transport_fault(environ, str(root)) == ""


def test_healthy_device_has_no_fault(root: Path) -> None:
    assert rdma_fault(RC, str(root)) == ("", "")


def test_fault_is_named(root: Path) -> None:
    port = root / "sys/class/infiniband/rxe0/ports/1"
    assert "UCX_IB_GID_INDEX=7 names no GID of rxe0's port 1, which has 1" in rdma_fault(
        RC | {"UCX_IB_GID_INDEX": "7"}, str(root)
    )
    fault, _ = rdma_fault(RC | {"UCX_NET_DEVICES": "mlx5_0:1"}, str(root))
    assert fault == "UCX_NET_DEVICES=mlx5_0:1 names no RDMA device of this host, which has rxe0"
    fault, remedy = rdma_fault(RC | {"UCX_NET_DEVICES": "rxe0:2"}, str(root))
    assert fault == "UCX_NET_DEVICES=rxe0:2 names no port of this host's RDMA devices, which have rxe0:1"
    assert remedy == "unset UCX_NET_DEVICES, or set it to rxe0:1"
    assert rdma_fault(RC | {"UCX_NET_DEVICES": "rxe0:2,rxe0:1"}, str(root)) == ("", "")
    assert rdma_fault(RC | {"UCX_NET_DEVICES": "^rxe0:2"}, str(root)) == ("", "")
    (port / "gids/1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    assert rdma_fault(RC, str(root))[0] == "rxe0's port 1 has no GID"
    (port / "state").write_text("1: DOWN\n")
    assert rdma_fault(RC, str(root))[0] == "rxe0's port 1 is DOWN"
    # A run over TCP does not care.
    assert rdma_fault({"UCX_TLS": "tcp"}, str(root)) == ("", "")
    (root / "dev/infiniband/uverbs0").unlink()
    assert "/dev/infiniband/uverbs0 of rxe0 cannot be opened: No such file" in rdma_fault(RC, str(root))[0]


def test_device_whose_ports_cannot_be_read_hides_no_error_of_nixl(tmp_path: Path) -> None:
    """What NIXL reported is being told when this is asked: it must not raise."""
    (tmp_path / "sys/class/infiniband/rxe0").mkdir(parents=True)
    for path, text in (("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0\n"), ("dev/infiniband/uverbs0", "")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("CapEff:\t000001ffffffffff\n")
    assert rdma_fault(RC, str(tmp_path)) == ("", "")


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    """A guest of QEMU with two GPUs and two cards, one of each under the switch 0000:01:00.0."""
    devices = {
        "0000:02:00.0": ("pci0000:00/0000:00:01.0/0000:01:00.0", "0x10de", "0x030200"),
        "0000:03:00.0": ("pci0000:00/0000:00:01.0/0000:01:00.0", "0x15b3", "0x020700"),
        "0000:80:00.0": ("pci0000:80", "0x10de", "0x030200"),
        "0000:81:00.0": ("pci0000:80", "0x15b3", "0x020700"),
    }
    for address, (above, vendor, kind) in devices.items():
        place = tmp_path / "sys/devices" / above / address
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{kind}\n")
        for link in [tmp_path / "sys/bus/pci/devices" / address] + (
            [tmp_path / "sys/class/infiniband" / f"mlx5_{address[5]}" / "device"] if vendor == "0x15b3" else []
        ):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(place)
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/sys_vendor").write_text("QEMU\n")
    return tmp_path


def test_gpu_and_card_passed_through_under_one_switch_are_named(guest: Path) -> None:
    fault, remedy = passthrough_fault({}, str(guest))
    assert fault.startswith(
        "this host is a guest of QEMU, and mlx5_0 and GPU 0000:02:00.0 are under one PCI switch: if they were passed "
        "through without address translation (ATS)"
    )
    assert remedy.startswith("try `export UCX_NET_DEVICES=mlx5_8:1`; if the row then passes")
    assert passthrough_fault({"UCX_NET_DEVICES": "mlx5_0:1"}, str(guest)) == (fault, remedy)


def test_the_last_card_may_be_under_a_switch_with_a_gpu(guest: Path) -> None:
    cards = guest / "sys/class/infiniband"
    (cards / "mlx5_0").rename(cards / "mlx5_9")
    fault, remedy = passthrough_fault({}, str(guest))
    assert "and mlx5_9 and GPU 0000:02:00.0 are under one PCI switch" in fault
    assert remedy.startswith("try `export UCX_NET_DEVICES=mlx5_8:1`")


def test_other_machines_and_cards_are_not_accused(guest: Path) -> None:
    assert passthrough_fault({"UCX_NET_DEVICES": "mlx5_8:1"}, str(guest)) == ("", "")
    (guest / "sys/class/dmi/id/sys_vendor").write_text("Amazon EC2\n")
    assert passthrough_fault({}, str(guest)) == ("", "")
    assert passthrough_fault({}, str(guest / "empty")) == ("", "")
