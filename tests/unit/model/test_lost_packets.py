# SPDX-License-Identifier: Apache-2.0
"""What counters of RDMA devices say of the packets of a row, and what a row says of packets that were lost.

The counters are doubles with the names of drivers in the kernel: soft-RoCE's are read in tests/machines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nixl.judge.row import judge
from pytest_nixl.model.device_counters import LossyDevice, lossy_devices, read_loss_counters
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict

Counts = list[tuple[str, str, int]]
RC = ("rc_mlx5/mlx5_0:1",)
#: 1000 packets of 4 KiB.
PAYLOAD = 4096 * 1000
#: mlx5_0 before a row.
BEFORE: Counts = [
    ("mlx5_0", "port_xmit_packets", 7000), ("mlx5_0", "port_rcv_packets", 700),
    ("mlx5_0", "packet_seq_err", 40), ("mlx5_0", "rnr_nak_retry_err", 3),
]  # fmt: skip


def grown(**more: int) -> Counts:
    """Return the counters after a row that sent 2000 packets, with the growth of others."""
    more = {"port_xmit_packets": 2000, "port_rcv_packets": 1000, **more}
    return [(device, counter, value + more.get(counter, 0)) for device, counter, value in BEFORE]


def lossy_devices_after(
    after: Counts, transports: tuple[str, ...] = RC, payload: int = PAYLOAD
) -> tuple[LossyDevice, ...]:
    return lossy_devices({"node-a": BEFORE}, {"node-a": after}, transports, payload)


def test_counters_of_rdma_devices_are_read_by_port(tmp_path: Path) -> None:
    port = tmp_path / "class" / "infiniband" / "rxe0" / "ports" / "1"
    counts = {"counters/port_xmit_packets": 9, "hw_counters/rcvd_seq_err": 2, "hw_counters/rdma_sends": 5}
    for name, value in counts.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")
    other = tmp_path / "class" / "net" / "eth0" / "statistics"
    other.mkdir(parents=True)
    (other / "rx_drops").write_text("3\n")
    assert sorted(read_loss_counters(tmp_path)) == [("rxe0", "port_xmit_packets", 9), ("rxe0", "rcvd_seq_err", 2)]
    assert read_loss_counters(tmp_path / "none") == []


def test_growth_of_a_device_that_carried_the_row_is_found_on_each_host() -> None:
    lossy = LossyDevice("node-a", "mlx5_0", 2000, {"packet_seq_err": 20, "rnr_nak_retry_err": 4})
    after = grown(packet_seq_err=20, rnr_nak_retry_err=4)
    for transports in (RC, ("cma/memory", *RC), ("efa",), ("rc", "tcp/eth0")):
        assert lossy_devices_after(after, transports, PAYLOAD * 200) == (lossy,)
    both = {"node-a": BEFORE, "node-b": BEFORE}
    assert lossy_devices(both, dict.fromkeys(both, after), RC, PAYLOAD) == (lossy, replace(lossy, host="node-b"))


@pytest.mark.parametrize(
    ("after", "transports", "payload"),
    [
        (grown(), RC, PAYLOAD),
        # It was reset, or is new.
        (grown(packet_seq_err=-20), RC, PAYLOAD),
        ([*grown(), ("mlx5_0", "out_of_sequence", 900)], RC, PAYLOAD),
        # It carried less than 1 % of the row, or none.
        (grown(packet_seq_err=20), RC, PAYLOAD * 201),
        (grown(packet_seq_err=20, port_xmit_packets=0, port_rcv_packets=0), RC, 0),
        (grown(packet_seq_err=20), ("tcp/eth0",), PAYLOAD),
    ],
)
def test_nothing_is_found_without_growth_or_without_bytes_of_the_row(
    after: Counts, transports: tuple[str, ...], payload: int
) -> None:
    assert lossy_devices_after(after, transports, payload) == ()


@pytest.mark.parametrize(
    ("packets", "counts", "loses"),
    [
        (50_000, {"packet_seq_err": 5}, True),
        (50_001, {"packet_seq_err": 5}, False),
        (100, {"packet_seq_err": 4}, False),
        (100, {"packet_seq_err": 5, "local_ack_timeout_err": 4}, True),
        # Both counters may have counted the same loss.
        (100, {"packet_seq_err": 4, "local_ack_timeout_err": 4}, False),
        (100, {"rnr_nak_retry_err": 90, "completer_retry_err": 90, "out_of_sequence": 90, "retrans_pkts": 90}, False),
    ],
)
def test_few_losses_and_repetitions_for_other_reasons_are_no_loss(
    packets: int, counts: dict[str, int], loses: bool
) -> None:
    assert LossyDevice("node-a", "mlx5_0", packets, counts).loses is loses


LOSING = LossyDevice("node-a", "rxe0", 1000, {"rcvd_seq_err": 9, "completer_retry_err": 70})
WELL = LossyDevice("node-b", "rxe0", 1000, {"duplicate_request": 70})
LOSS = "rxe0 of node-a counted 9 rcvd_seq_err in 1,000 packets (0.9 %)"


def samples(value: float, *lossy: LossyDevice) -> Samples:
    """Return a row of this many GB/s."""
    key = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1_000_000)
    return Samples(key, (1.0,) * 4, (round(value * 1000),) * 4, (1e-4,), ("rc_verbs/rxe0:1",), lossy=lossy)


FLOOR = Expectation(source="a test", floor=1e9)


UNDECIDED = replace(samples(2), transfers=(900, 900, 1100, 1100))
PROBABLY = f"; probably because packets were lost: {LOSS}"


@pytest.mark.parametrize(
    ("row", "expectation", "verdict", "message"),
    [
        (samples(2), FLOOR, Verdict.WARN, f"200 % of the floor of 1 GB/s (8 Gb/s), but packets were lost: {LOSS}"),
        (samples(0.1), FLOOR, Verdict.FAIL, PROBABLY),
        (samples(2), replace(FLOOR, p50=1e-5), Verdict.FAIL, PROBABLY),
        (UNDECIDED, FLOOR, Verdict.INCONCLUSIVE, PROBABLY),
        (samples(2), None, Verdict.NO_EXPECTATION, f"expects nothing of this row; packets were lost: {LOSS}"),
    ],
)
def test_row_names_the_device_that_lost_packets(
    row: Samples, expectation: Expectation | None, verdict: Verdict, message: str
) -> None:
    judgement = judge(replace(row, lossy=(LOSING, WELL)), expectation)
    assert judgement.verdict is verdict
    assert judgement.reason.endswith(message), judgement.reason
    assert judgement.remedy.startswith("Check the cables")
    assert ("[[expect]]" in judgement.remedy) is (verdict is Verdict.NO_EXPECTATION)
    # Without a loss the same row has none of these words.
    healthy = judge(replace(row, lossy=(WELL,)), expectation)
    assert healthy == judge(row, expectation)
    assert healthy.verdict is (Verdict.PASS if verdict is Verdict.WARN else verdict)
    assert "lost" not in healthy.reason


def test_loss_does_not_change_other_verdicts() -> None:
    wrong = replace(FLOOR, transports=("tcp",))
    assert judge(samples(2, LOSING), wrong) == judge(samples(2), wrong)


def test_both_ends_are_named() -> None:
    other = replace(LOSING, host="node-b")
    assert judge(samples(2, LOSING, other), FLOOR).reason.endswith(f"{LOSS} and {LOSS.replace('node-a', 'node-b')}")


def test_launches_are_added_by_device() -> None:
    both = samples(2, LOSING, WELL).with_launch(samples(2, replace(LOSING, packets=500, grown={"rcvd_seq_err": 1})))
    assert both.lossy == (replace(LOSING, packets=1500, grown={"rcvd_seq_err": 10, "completer_retry_err": 70}), WELL)
