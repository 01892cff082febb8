# SPDX-License-Identifier: Apache-2.0
"""Why UCX cannot use what it is told to: its transports, or RDMA devices."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.fake_sysfs import root_of

from pytest_nixl.core.rdma_fault import (
    GID_INDEX_REMEDY,
    MEMLOCK_REMEDY,
    NODES_REMEDY,
    PORT_REMEDY,
    cuda_fault,
    failed_device,
    over_tcp,
    passthrough_fault,
    rdma_fault,
    refused_locks,
    transport_fault,
)

RC = {"UCX_TLS": "rc,self", "UCX_NET_DEVICES": "rxe0:1"}
PORT, GID = "sys/class/infiniband/rxe0/ports/1", "0000:0000:0000:0000:0000:ffff:0a63:0001"
#: The files of a host with the healthy device rxe0, whose processes have all capabilities.
HEALTHY = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/gids/1": GID,
    "sys/class/infiniband_verbs/uverbs0/ibdev": "rxe0",
    "dev/infiniband/uverbs0": "",
    "proc/self/status": "Name: x\nCapEff:\t000001ffffffffff",
}
#: A second device, whose port is down.
DOWN = {
    "sys/class/infiniband/rxe1/ports/1/state": "1: DOWN",
    "sys/class/infiniband/rxe1/ports/2/state": "2: INIT",
    "sys/class/infiniband_verbs/uverbs1/ibdev": "rxe1",
    "dev/infiniband/uverbs1": "",
}
RXE1 = ("rxe1's port 1 is DOWN and port 2 is INIT", PORT_REMEDY)
NONE = ("this host has no RDMA device", "check the driver (`rdma link`), or allow TCP: UCX_TLS=tcp,cuda_copy")
NO_ADDRESS = "give {} an address (`ip address add …`), and read `rdma link`"
NOTHING = ("", "")


def host(folder: Path, changes: Mapping[str, str | None] | None = None) -> str:
    """Make the files of a healthy host with changes; None: there is no such file."""
    files = {**HEALTHY, **(changes or {})}
    return str(root_of(folder, {name: text for name, text in files.items() if text is not None}).folder)


@pytest.mark.parametrize("text", ["posix,self", "tcp:aux,posix", "", "^tcp", "^all"])
def test_transports_that_cannot_carry_nixl_are_named(text: str, tmp_path: Path) -> None:
    expected = f"UCX_TLS={text} is set here, and allows no transport that NIXL can use between processes"
    assert transport_fault({"UCX_TLS": text}, str(tmp_path)) == expected


@pytest.mark.parametrize(
    "environ",
    [{}, *({"UCX_TLS": text} for text in ("tcp,posix", "all", "\\rc_x", "srd", "gga", "rc:aux,ud", "^posix", "^tcp"))],
)
def test_transports_that_can_carry_nixl_are_no_fault(environ: dict[str, str], tmp_path: Path) -> None:
    assert transport_fault(environ, host(tmp_path)) == ""


@pytest.mark.parametrize(
    ("changes", "environ", "fault"),
    [
        ({}, {}, NOTHING),
        ({}, {"UCX_NET_DEVICES": "rxe0:2,rxe0:1"}, NOTHING),
        ({}, {"UCX_NET_DEVICES": "^rxe0:2"}, NOTHING),
        ({}, {"UCX_NET_DEVICES": "rxe0"}, NOTHING),
        (dict.fromkeys(HEALTHY), {}, NONE),
        (dict.fromkeys(HEALTHY), {"UCX_TLS": "tcp"}, NOTHING),  # a run over TCP does not care
        ({}, {"UCX_NET_DEVICES": "mlx5_0:1"},
         ("UCX_NET_DEVICES=mlx5_0:1 names no RDMA device of this host, which has rxe0",
          "unset UCX_NET_DEVICES, or set it to rxe0:1")),
        ({}, {"UCX_NET_DEVICES": "rxe0:2"},
         ("UCX_NET_DEVICES=rxe0:2 names no port of this host's RDMA devices, which have rxe0:1",
          "unset UCX_NET_DEVICES, or set it to rxe0:1")),
        ({f"{PORT}/gids/10": GID, f"{PORT}/gids/9": GID}, {"UCX_IB_GID_INDEX": "0"},
         ("UCX_IB_GID_INDEX=0 names no GID of rxe0's port 1, which has 1, 9, 10", GID_INDEX_REMEDY)),
        ({}, {"UCX_IB_GID_INDEX": "1"}, NOTHING),
        ({f"{PORT}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000"}, {},
         ("rxe0's port 1 has no GID", NO_ADDRESS.format("its interface"))),
        ({f"{PORT}/gids/1": "fe80:0000:0000:0000:0000:0000:0000:0001", f"{PORT}/gid_attrs/ndevs/1": "eth99"}, {},
         NOTHING),  # there is no such interface to ask
        ({f"{PORT}/state": "1: DOWN", f"{PORT.replace('/1', '/2')}/state": "4: ACTIVE"}, {},
         ("rxe0's port 2 has no GID", NO_ADDRESS.format("its interface"))),
        ({"dev/infiniband/uverbs0": None}, {},
         ("/dev/infiniband/uverbs0 of rxe0 cannot be opened: No such file or directory", NODES_REMEDY)),
        ({"sys/class/infiniband_verbs/uverbs0/ibdev": "other"}, {},
         ("the kernel has no uverbs node for rxe0", "load its module on the host: `modprobe ib_uverbs`")),
        # UCX goes on with the devices that it can use, if it may choose.
        (DOWN, {"UCX_NET_DEVICES": "all"}, NOTHING),
        (DOWN, {"UCX_NET_DEVICES": "rxe0:1,rxe1:1"}, RXE1),
        ({**DOWN, f"{PORT}/state": "1: DOWN"}, {"UCX_NET_DEVICES": "all"}, ("rxe0's port 1 is DOWN", PORT_REMEDY)),
    ],
)  # fmt: skip
def test_the_fault_of_an_rdma_device_has_its_remedy(
    tmp_path: Path, changes: dict[str, str | None], environ: dict[str, str], fault: tuple[str, str]
) -> None:
    assert rdma_fault({**RC, **environ}, host(tmp_path, changes)) == fault


LOCAL = "fe80:0000:0000:0000:0000:0000:0000:0001"
ONLY_LOCAL = (f"rxe0's port 1 has only a link-local GID ({LOCAL}): lo has no address", NO_ADDRESS.format("lo"))


@pytest.mark.parametrize(
    ("gid", "addresses", "fault"), [(LOCAL, [], ONLY_LOCAL), (LOCAL, ["127.0.0.1/8"], NOTHING), (GID, [], NOTHING)]
)
def test_a_port_with_only_link_local_addresses_needs_one_for_its_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gid: str, addresses: list[str], fault: tuple[str, str]
) -> None:
    monkeypatch.setattr("pytest_nixl.core.rdma_fault.ask_addresses", lambda: {"eth0": ["10.0.0.1/8"], "lo": addresses})
    files = {f"{PORT}/gids/1": LOCAL, f"{PORT}/gids/2": gid, f"{PORT}/gid_attrs/ndevs/1": "lo"}
    assert rdma_fault(RC, host(tmp_path, files)) == fault


@pytest.mark.parametrize(
    ("limit", "capabilities", "fault"),
    [
        ((16 << 20) - 1, f"{1 << 13:x}",
         ("this process may lock only 16383 KiB of memory, and RDMA locks what it registers", MEMLOCK_REMEDY)),
        (8 << 20, f"{1 << 14:x}", NOTHING),
        (16 << 20, "0", NOTHING),
        (resource.RLIM_INFINITY, "0", NOTHING),
    ],
)  # fmt: skip
def test_a_process_that_may_lock_too_little_memory_needs_a_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capabilities: str, fault: tuple[str, str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    root = host(tmp_path, {"proc/self/status": f"NoCapEff:\tffff\nCapEff:\t{capabilities}"})
    assert rdma_fault(RC, root) == fault


def test_device_whose_ports_cannot_be_read_hides_no_error_of_nixl(tmp_path: Path) -> None:
    """What NIXL reported is being told when this is asked: it must not raise."""
    (tmp_path / "sys/class/infiniband/rxe0").mkdir(parents=True)
    assert rdma_fault(RC, host(tmp_path, {f"{PORT}/state": None, f"{PORT}/gids/1": None})) == NOTHING


def test_what_a_process_wrote_names_refused_locks_and_a_failed_device() -> None:
    line = (
        "ibv_reg_mr(address=0x7) failed. Please set max locked memory (ulimit -l) to 'unlimited' (current: {} kbytes)\n"
    )
    expected = "UCX has tried 100 times to lock memory for an RDMA device, and a process may lock 64 kbytes"
    assert refused_locks(99 * line.format(8) + line.format(64)) == expected
    assert refused_locks(99 * line.format(64)) == ""
    fatal = "[a:1] rc_mlx5.c:9 Fatal: send completion with error on mlx5_0/1: Work Request Flushed Error"
    unnamed = fatal.replace("mlx5_0", "")
    assert [failed_device(text) for text in (fatal, "Fatal: no", unnamed)] == ["mlx5_0", "", ""]


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    """A guest of QEMU with two GPUs of NVIDIA and two cards, one of each under the switch 0000:01:00.0."""
    devices = {
        "0000:00:02.0": ("pci0000:00", "0x1002", "0x030200"),
        "0000:00:03.0": ("pci0000:00", "0x10de", "0x068000"),
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


SWITCH = (
    "this host is a guest of QEMU, and {} and GPU 0000:02:00.0 are under one PCI switch: if they were passed through "
    "without address translation (ATS), the card cannot access that GPU's memory",
    "try `export UCX_NET_DEVICES=mlx5_8:1`; if the row then passes, turn on ATS of the card (mlxconfig ATS_ENABLED=1) "
    "and ACS of the switch on the host",
)


def test_gpu_and_card_passed_through_under_one_switch_are_named(guest: Path) -> None:
    expected = SWITCH[0].format("mlx5_0"), SWITCH[1]
    for environ in ({}, {"UCX_NET_DEVICES": "mlx5_0:1"}, {"UCX_NET_DEVICES": "mlx5_8:1,mlx5_0:1"}):
        assert passthrough_fault(environ, str(guest)) == expected
    assert passthrough_fault({"UCX_NET_DEVICES": "mlx5_8:1"}, str(guest)) == NOTHING
    cards = guest / "sys/class/infiniband"
    (cards / "mlx5_0").rename(cards / "mlx5_9")
    assert passthrough_fault({}, str(guest)) == (SWITCH[0].format("mlx5_9"), SWITCH[1]), "the last card"
    shutil.rmtree(cards / "mlx5_8")
    assert passthrough_fault({}, str(guest))[1].startswith("try another host; if")
    (guest / "sys/class/dmi/id/sys_vendor").write_text("Amazon EC2\n")
    assert passthrough_fault({}, str(guest)) == passthrough_fault({}, str(guest / "empty")) == NOTHING


def test_a_host_with_a_gpu_needs_a_transport_for_its_memory(guest: Path) -> None:
    reason = "UCX_TLS={} is set here, and allows no CUDA memory, but this host has an NVIDIA GPU (0000:02:00.0)"
    add = "add cuda_copy to UCX_TLS (`export UCX_TLS=rc,cuda_copy`), or unset UCX_TLS"
    assert cuda_fault({"UCX_TLS": "rc"}, str(guest)) == (reason.format("rc"), add)
    unset = "unset UCX_TLS, or do not exclude cuda or cuda_copy"
    assert cuda_fault({"UCX_TLS": "^cuda"}, str(guest)) == (reason.format("^cuda"), unset)
    for environ in ({}, {"UCX_TLS": "tcp,cuda_copy"}):
        assert cuda_fault(environ, str(guest)) == NOTHING
    assert cuda_fault({"UCX_TLS": "rc"}, str(guest / "empty")) == NOTHING
    assert (over_tcp(str(guest)), over_tcp(str(guest / "empty"))) == ("tcp,cuda_copy", "tcp")
