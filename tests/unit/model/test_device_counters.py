# SPDX-License-Identifier: Apache-2.0
"""Counters of network devices: recorded ones, trees like /sys, and counters that are unusable."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_nixl.core.units import MIB
from pytest_nixl.model.device_counters import (
    COUNTERS_FORM,
    Moved,
    compare,
    devices_that_moved,
    difference,
    parse_counters,
    read_counters,
    read_sysfs,
)

RECORDED = Path(__file__).resolve().parents[3] / "fixtures" / "efa-p5"
PAYLOAD = 11_592_663_040
RAILS = ["rdmap79s0 of node-b", "rdmap80s0 of node-b", "rdmap81s0 of node-b", "rdmap82s0 of node-b"]


def recorded() -> dict[str, Moved]:
    before, after = (read_counters(RECORDED / f"efa-counters-{when}.txt") for when in ("before", "after"))
    return difference(before, after)


def between(before: str, after: str) -> dict[str, Moved]:
    return difference(parse_counters(before, "before"), parse_counters(after, "after"))


def test_recorded_text_is_parsed() -> None:
    reading = read_counters(RECORDED / "efa-counters-before.txt")
    assert len(reading.devices) == 12
    device = reading.devices["rdmap82s0 of node-a"]
    assert (device.name, device.host, device.kind) == ("rdmap82s0", "node-a", "efa")
    assert device.values == {
        "tx_bytes": 96131931765735,
        "tx_pkts": 14351606937,
        "rdma_write_bytes": 96094634541562,
        "rdma_read_bytes": 59748638,
        "recv_wrs": 681826419,
    }


def test_recorded_difference_is_exact() -> None:
    moved = recorded()
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
    assert [item.faults for item in moved.values()] == [()] * 12


@pytest.mark.parametrize("payload", [PAYLOAD, None])
def test_four_devices_moved_the_recorded_payload(payload: int | None) -> None:
    assert [str(item.device) for item in devices_that_moved(recorded(), "WRITE", payload)] == RAILS


def test_recorded_bytes_equal_the_payload() -> None:
    comparison = compare(recorded(), "WRITE", PAYLOAD)
    assert comparison.agrees
    assert comparison.carried == PAYLOAD
    assert [str(item.device) for item in comparison.devices] == RAILS
    assert comparison.words.startswith("4 devices carried 11,592,663,040 bytes")


@pytest.mark.parametrize(
    ("payload", "values"),
    [
        (PAYLOAD + 1, ("4 devices", "11,592,663,040 bytes", "less than", "11,592,663,041", " 1 bytes")),
        (PAYLOAD - 1, ("4 devices", "11,592,663,040 bytes", "more than", "11,592,663,039")),
    ],
)
def test_counters_of_payload_must_agree_to_the_byte(payload: int, values: tuple[str, ...]) -> None:
    comparison = compare(recorded(), "WRITE", payload)
    assert not comparison.agrees
    assert [value for value in values if value not in comparison.words] == [], comparison.words


def emulated(after: str, *, packets: float = 1.0, rdma: float = 0.0) -> str:
    """Return the counters after a run that moved these shares of the recorded bytes by RDMA and in whole packets."""
    before = read_counters(RECORDED / "efa-counters-before.txt").devices

    def changed(name: str, count: str, share: float) -> int:
        start = before[name].values[count]
        return start + round((read_counters(RECORDED / after).devices[name].values[count] - start) * share)

    lines = []
    for name, device in before.items():
        counts = {**device.values, "tx_bytes": changed(name, "tx_bytes", packets)}
        counts["rdma_write_bytes"] = changed(name, "rdma_write_bytes", rdma)
        lines += [f"---- node={device.host} ----"]
        lines += [" ".join([device.name, *(f"{key}={value}" for key, value in counts.items())])]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("rdma", [0.0, 0.5])
def test_bytes_that_rdma_did_not_move_are_emulated(rdma: float) -> None:
    text = (RECORDED / "efa-counters-before.txt").read_text()
    comparison = compare(between(text, emulated("efa-counters-after.txt", rdma=rdma)), "WRITE", PAYLOAD)
    assert comparison.emulated
    assert [str(item.device) for item in comparison.devices] == RAILS
    assert "WRITE was emulated" in comparison.words
    rest = f"{round(PAYLOAD * rdma):,} bytes of RDMA (rdma_write_bytes) for a payload of 11,592,663,040"
    assert f"4 EFA devices counted 11,593,240,928 bytes of packets (tx_bytes) and {rest}" in comparison.words


@pytest.mark.parametrize(("packets", "rdma"), [(1.0, 1.0), (1.0, 0.995), (0.5, 0.0), (0.0, 0.0)])
def test_bytes_that_rdma_or_another_transport_moved_are_not_emulated(packets: float, rdma: float) -> None:
    text = (RECORDED / "efa-counters-before.txt").read_text()
    moved = between(text, emulated("efa-counters-after.txt", packets=packets, rdma=rdma))
    assert not compare(moved, "WRITE", PAYLOAD).emulated
    assert compare(moved, "WRITE", PAYLOAD).agrees is (rdma == 1.0)


def test_device_whose_rdma_counter_is_unchanged_carried_nothing() -> None:
    counted = between(
        "rdmap1s0 tx_bytes=0 rdma_write_bytes=0 rdma_read_bytes=0\neth0 tx_bytes=0\n",
        "rdmap1s0 tx_bytes=900 rdma_write_bytes=0 rdma_read_bytes=0\neth0 tx_bytes=900\n",
    )
    assert [item.carried("WRITE") for item in counted.values()] == [0, 900]


def test_read_that_rdma_did_not_move_is_emulated() -> None:
    zero = "rdmap1s0 tx_bytes=0 rx_bytes=0 rdma_write_bytes=0 rdma_read_bytes=0\n"
    read = "rdmap1s0 tx_bytes=9 rx_bytes=1020000 rdma_write_bytes=0 rdma_read_bytes={}\n"
    assert compare(between(zero, read.format(0)), "READ", 1_000_000).emulated
    assert not compare(between(zero, read.format(1_000_000)), "READ", 1_000_000).emulated


def test_recorded_write_does_not_agree_with_a_read() -> None:
    comparison = compare(recorded(), "READ", PAYLOAD)
    assert not comparison.agrees
    assert comparison.devices == ()
    assert "no device carried it" in comparison.words
    assert "11,592,663,040" in comparison.words


@pytest.mark.parametrize(
    ("packets", "agrees", "words"),
    [
        (999_999, False, "less than the payload of 1,000,000: "),
        (1_000_000, True, "exactly the payload"),
        (1_045_000, True, "the payload of 1,000,000 and 4.5 % of headers"),
        (1_100_000, True, "the payload of 1,000,000 and 10.0 % of headers"),
        (1_100_001, False, "more than the payload of 1,000,000: "),
    ],
)
def test_counters_of_packets_may_include_headers(packets: int, agrees: bool, words: str) -> None:
    moved = between("eth0 tx_bytes=7 rx_bytes=0\n", f"eth0 tx_bytes={7 + packets} rx_bytes=20000\n")
    comparison = compare(moved, "WRITE", 1_000_000)
    assert comparison.agrees is agrees
    assert f"1 device carried {packets:,} bytes, {words}" in comparison.words


def test_read_counts_received_bytes() -> None:
    moved = between("eth0 tx_bytes=0 rx_bytes=0\n", "eth0 tx_bytes=20 rx_bytes=1000\n")
    assert [item.carried("READ") for item in moved.values()] == [1000]
    assert [item.carried("WRITE") for item in moved.values()] == [20]


def test_interfaces_count_only_if_no_rdma_device_does() -> None:
    before = "mlx5_0 port_xmit_data=0\neth0 tx_bytes=0\n"
    both = between(before, "mlx5_0 port_xmit_data=250\neth0 tx_bytes=1000\n")
    assert [item.device.name for item in devices_that_moved(both, "WRITE")] == ["mlx5_0"]
    one = between(before, "mlx5_0 port_xmit_data=0\neth0 tx_bytes=1000\n")
    assert [item.device.name for item in devices_that_moved(one, "WRITE")] == ["eth0"]


def test_idle_devices_moved_nothing() -> None:
    assert devices_that_moved({}, "WRITE") == ()
    assert devices_that_moved(between("eth0 tx_bytes=5\n", "eth0 tx_bytes=5\n"), "WRITE") == ()


@pytest.mark.parametrize(
    ("before", "after", "pattern"),
    [
        ("eth0 tx_bytes=9\n", "eth0 tx_bytes=8\n", r"eth0: tx_bytes .* 9 to 8"),
        ("eth0 tx_bytes=9\n", "eth1 tx_bytes=9\n", r"eth0 is only .* before"),
        ("eth0 tx_bytes=9 rx_bytes=1\n", "eth0 rx_bytes=1\n", r"eth0: tx_bytes is only .* before"),
        ("eth0 rx_bytes=1\n", "eth0 tx_bytes=9 rx_bytes=1\n", r"eth0: tx_bytes is only .* after"),
        ("mlx4_0 port_xmit_data=9\n", "mlx4_0 port_xmit_data=4294967295\n", r"mlx4_0: port_xmit_data .* 4294967295"),
    ],
)
def test_unusable_counter_is_named(before: str, after: str, pattern: str) -> None:
    moved = between(before, after)
    faults = [fault for item in moved.values() for fault in item.faults]
    assert any(re.match(pattern, fault) for fault in faults), faults
    assert {item.tx_bytes for item in moved.values()} == {None}


def test_new_device_is_named() -> None:
    moved = between("eth0 tx_bytes=9\n", "eth0 tx_bytes=9\neth1 tx_bytes=9\n")
    [fault] = moved["eth1"].faults
    assert re.match("eth1 is only .* after", fault)


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("eth0 tx_bytes=12", "in, line 1: ", ""),
        ("\neth0\n", "in, line 2: 'eth0' ", COUNTERS_FORM),
        ("eth0 tx_bytes=-1\n", "in, line 1: 'eth0 tx_bytes=-1' ", COUNTERS_FORM),
        (f"eth0 tx_bytes={'9' * 5000}\n", f"in, line 1: 'eth0 tx_bytes={'9' * 46}' ", COUNTERS_FORM),
        ("eth0 tx_bytes=1\neth0 tx_bytes=2\n", "in, line 2: eth0 ", ""),
        ("eth0 tx_bytes=1 tx_bytes=2\n", "in, line 1: eth0 ", ""),
    ],
)
def test_text_without_counters_is_refused(text: str, start: str, end: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_counters(text, "in")
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(end)
    assert "expected" in str(caught.value)


def test_reading_cut_off_within_a_line_is_refused() -> None:
    content = (RECORDED / "efa-counters-after.txt").read_text()
    whole = list(parse_counters(content, "whole").devices.values())
    ends = {0, *(at + 1 for at, character in enumerate(content) if character == "\n")}
    for end in range(len(content)):
        if end in ends:
            cut = list(parse_counters(content[:end], "cut").devices.values())
            assert cut == whole[: len(cut)]
        else:
            with pytest.raises(ValueError, match="cut off"):
                parse_counters(content[:end], "cut")


def test_file_without_devices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for path in (tmp_path / "empty", tmp_path):
        with pytest.raises(ValueError) as caught:
            read_counters(path)
        assert str(caught.value).startswith(f"{path} ")
        assert COUNTERS_FORM in str(caught.value)
    with pytest.raises(FileNotFoundError):
        read_counters(tmp_path / "missing")


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
    "net/eth0/statistics/tx_bytes": "77\n",
    "net/eth0/statistics/rx_bytes": "7\n",
    "net/bond0/statistics/tx_bytes": "77\n",
    "net/bond0/bonding/mode": "802.3ad 4\n",
    "net/bonding_masters": "bond0\n",
}


def test_tree_like_sys_is_read(tmp_path: Path) -> None:
    reading = read_sysfs(tree(tmp_path, SYSFS))
    assert {name: device.kind for name, device in reading.devices.items()} == {
        "mlx4_0:1": "rdma",
        "mlx4_0:2": "rdma",
        "mlx5_0": "rdma",
        "rdmap79s0": "efa",
        "eth0": "net",
    }
    assert reading.devices["rdmap79s0"].values["rdma_write_bytes"] == 900
    port = tmp_path / "class/infiniband/mlx4_0/ports/2/counters/port_xmit_data"
    [fault] = reading.faults
    assert str(port) in fault
    assert "'N/A (no PMA)'" in fault


def test_infiniband_ports_count_words_of_four_bytes(tmp_path: Path) -> None:
    before = read_counters(tree(tmp_path / "before", SYSFS))
    changed = {
        "infiniband/rdmap79s0/ports/1/hw_counters/tx_bytes": "3100\n",
        "infiniband/rdmap79s0/ports/1/hw_counters/rdma_write_bytes": "2900\n",
        "infiniband/mlx5_0/ports/1/counters/port_xmit_data": "350\n",
        "infiniband/mlx5_0/ports/1/counters/port_rcv_data": "15\n",
    }
    moved = difference(before, read_counters(tree(tmp_path / "after", {**SYSFS, **changed})))
    assert (moved["mlx5_0"].tx_bytes, moved["mlx5_0"].rx_bytes) == (1000, 20)
    assert (moved["rdmap79s0"].tx_bytes, moved["rdmap79s0"].rdma_write_bytes) == (2100, 2000)
    assert moved["eth0"].tx_bytes == 0
    assert moved["mlx5_0"].rdma_write_bytes is None
    assert [item.device.name for item in devices_that_moved(moved, "WRITE")] == ["mlx5_0", "rdmap79s0"]


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
    assert moved.faults == ()
