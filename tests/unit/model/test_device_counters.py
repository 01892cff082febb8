# SPDX-License-Identifier: Apache-2.0
"""Counters of network devices: recorded ones, trees like /sys, and counters that are unusable."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.efa_counters import PAYLOAD, read_efa_counters, recorded_run

from pytest_nixl.core.units import MIB
from pytest_nixl.model.device_counters import CountedDevice, MovedBytes, difference, read_sysfs


def between(before: str, after: str) -> dict[str, MovedBytes]:
    """Return what devices counted, from texts such as ``eth0 tx_bytes=9 rx_bytes=1``."""
    return difference(counted(before), counted(after))


def counted(text: str) -> dict[str, CountedDevice]:
    name, *counters = text.split()
    values = {counter: int(value) for counter, value in (pair.split("=") for pair in counters)}
    return {name: CountedDevice(name, "net", values)}


def test_recorded_difference_is_exact() -> None:
    moved = difference(read_efa_counters("before"), read_efa_counters("after"))
    assert {name: (item.tx_bytes, item.rdma_write_bytes) for name, item in moved.items()} == {
        "rdmap79s0 of node-b": (2898743384, 2898165760),
        "rdmap80s0 of node-b": (2898165848, 2898165760),
        "rdmap81s0 of node-b": (2898165848, 2898165760),
        "rdmap82s0 of node-b": (2898165848, 2898165760),
        "rdmap96s0 of node-b": (0, 0),
        "rdmap97s0 of node-b": (0, 0),
        "rdmap79s0 of node-a": (15800, 0),
        "rdmap80s0 of node-a": (40, 0),
        "rdmap81s0 of node-a": (40, 0),
        "rdmap82s0 of node-a": (40, 0),
        "rdmap96s0 of node-a": (0, 0),
        "rdmap97s0 of node-a": (0, 0),
    }
    assert {(item.rx_bytes, item.rdma_read_bytes) for item in moved.values()} == {(None, 0)}


def test_four_devices_moved_the_recorded_payload_by_rdma() -> None:
    run = recorded_run()
    carriers = run.carriers(["efa"])
    assert [carrier.device for carrier in carriers] == [f"rdmap{number}s0 of node-b" for number in range(79, 83)]
    assert sum(carrier.carried for carrier in carriers) == PAYLOAD
    assert not run.emulated
    assert run.contradiction(["efa"]) == ""


@pytest.mark.parametrize(
    ("counter", "op"),
    [("tx_bytes", "WRITE"), ("rx_bytes", "READ"), ("rdma_write_bytes", "WRITE"), ("rdma_read_bytes", "READ")],
)
def test_each_counter_counts_the_bytes_of_one_operation(counter: str, op: str) -> None:
    moved = between(f"a {counter}=1", f"a {counter}=8")["a"]
    for other in ("WRITE", "READ"):
        assert (moved.counts(other), moved.carried(other)) == ((True, 7) if other == op else (False, 0))


def test_device_whose_rdma_counter_is_unchanged_carried_nothing() -> None:
    moved = between("rdmap1s0 tx_bytes=0 rdma_write_bytes=0", "rdmap1s0 tx_bytes=900 rdma_write_bytes=0")
    assert moved["rdmap1s0"].carried("WRITE") == 0
    assert between("eth0 tx_bytes=0", "eth0 tx_bytes=900")["eth0"].carried("WRITE") == 900


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("eth0 tx_bytes=9", "eth0 tx_bytes=8"),
        ("eth0 tx_bytes=9", "eth1 tx_bytes=9"),
        ("eth0 tx_bytes=9 rx_bytes=1", "eth0 rx_bytes=1"),
        ("eth0 rx_bytes=1", "eth0 tx_bytes=9 rx_bytes=1"),
        *((f"mlx4_0 port_{way}_data=9", f"mlx4_0 port_{way}_data=4294967295") for way in ("xmit", "rcv")),
    ],
)
def test_device_with_an_unusable_counter_is_left_out(before: str, after: str) -> None:
    assert between(before, after) == {}


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# Written by hand from the kernel's documentation of these files.
SYSFS = {
    "infiniband/rdmap79s0/ports/1/hw_counters/tx_bytes": "1000\n",
    "infiniband/rdmap79s0/ports/1/hw_counters/rx_bytes": "50\n",
    "infiniband/rdmap79s0/ports/1/hw_counters/rdma_write_bytes": "900\n",
    "infiniband/rdmap79s0/ports/1/hw_counters/rdma_read_bytes": "0\n",
    "infiniband/rdmap79s0/ports/1/hw_counters/lifespan": "12\n",
    "infiniband/mlx5_0/ports/1/counters/port_xmit_data": "100\n",
    "infiniband/mlx5_0/ports/1/counters/port_rcv_data": "10\n",
    "infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence": "0\n",
    "infiniband/mlx4_0/ports/1/counters/port_xmit_data": "1\n",
    "infiniband/mlx4_0/ports/2/counters/port_xmit_data": "N/A (no PMA)\n",
    "infiniband/irdma0/ports/1/hw_counters/tx_bytes": "5\n",
    "infiniband/irdma0/ports/1/hw_counters/rx_bytes": "5\n",
    "net/eth0/statistics/tx_bytes": "77\n",
    "net/eth0/statistics/rx_bytes": "7\n",
    "net/bond0/statistics/tx_bytes": "77\n",
    "net/bond0/bonding/mode": "802.3ad 4\n",
    "net/bonding_masters": "bond0\n",
    "net/br0/statistics/tx_bytes": "77\n",
    "net/br0/bridge/bridge_id": "8000.0\n",
}


def test_tree_like_sys_is_read(tmp_path: Path) -> None:
    devices = read_sysfs(tree(tmp_path, SYSFS))
    assert {name: device.kind for name, device in devices.items()} == {
        "mlx4_0:1": "rdma",
        "mlx4_0:2": "rdma",
        "mlx5_0": "rdma",
        "irdma0": "rdma",
        "rdmap79s0": "efa",
        "eth0": "net",
    }
    assert devices["rdmap79s0"].values["rdma_write_bytes"] == 900
    assert devices["mlx4_0:2"].values == {}


def test_infiniband_ports_count_words_of_four_bytes(tmp_path: Path) -> None:
    before = read_sysfs(tree(tmp_path / "before", SYSFS))
    changed = {
        "infiniband/rdmap79s0/ports/1/hw_counters/tx_bytes": "3100\n",
        "infiniband/rdmap79s0/ports/1/hw_counters/rdma_write_bytes": "2900\n",
        "infiniband/mlx5_0/ports/1/counters/port_xmit_data": "350\n",
        "infiniband/mlx5_0/ports/1/counters/port_rcv_data": "15\n",
    }
    moved = difference(before, read_sysfs(tree(tmp_path / "after", {**SYSFS, **changed})))
    assert (moved["mlx5_0"].tx_bytes, moved["mlx5_0"].rx_bytes) == (1000, 20)
    assert (moved["rdmap79s0"].tx_bytes, moved["rdmap79s0"].rdma_write_bytes) == (2100, 2000)
    assert moved["eth0"].tx_bytes == 0
    assert moved["mlx5_0"].rdma_write_bytes is None


def test_wide_counters_of_a_port_are_preferred() -> None:
    both = "mlx5_0 port_xmit_data_64={} port_rcv_data_64={} port_xmit_data=9 port_rcv_data=9"
    moved = between(both.format(1, 2), both.format(11, 102))["mlx5_0"]
    assert (moved.tx_bytes, moved.rx_bytes) == (40, 400)


def test_loopback_of_this_machine_counts_sent_bytes() -> None:
    payload = 32 * MIB
    before = read_sysfs()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            feeder = threading.Thread(target=sender.sendall, args=(bytes(payload),))
            feeder.start()
            received = 0
            while received < payload:
                received += len(receiver.recv(MIB))
            feeder.join()
    moved = difference(before, read_sysfs())["lo"]
    # Other processes may use the loopback at the same time, so there is no upper limit.
    assert moved.carried("WRITE") >= payload
    assert moved.carried("READ") >= payload
