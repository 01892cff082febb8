# SPDX-License-Identifier: Apache-2.0
"""The packets that RDMA devices lost or sent again while a row was measured, by the devices' own counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nixl.model.device_counters import CARRIED_SHARE, read_sysfs
from pytest_nixl.model.transports import EFA, RDMA

#: Counters that grow if a packet did not arrive.
LOSS = frozenset({
    "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "rx_icrc_encapsulated",  # mlx5
    "out_of_seq_request", "rcvd_seq_err",  # rxe
    "oos_drop_count", "seq_err_naks_rcvd", "to_retransmits",  # bnxt_re
})  # fmt: skip
#: Counters that also grow without a loss: if a receiver or a timer of soft-RoCE is late, or if packets take several
#: paths (adaptive routing: ``out_of_sequence``; EFA: the last three). They are recorded and not judged.
RETRIED = frozenset({
    "out_of_sequence",
    "rnr_nak_retry_err", "rcvd_rnr_err", "rnr_naks_rcvd", "completer_retry_err", "duplicate_request", "dup_req",
    "retrans_pkts", "retrans_timeout_events", "rx_drops",
})  # fmt: skip
_PACKETS = frozenset({
    "port_xmit_packets", "port_rcv_packets", "sent_pkts", "rcvd_pkts", "tx_pkts", "rx_pkts",
})  # fmt: skip
#: The most payload of a packet in bytes.
_MTU = 4096
#: The least share of a device's packets, and the fewest, that count as a loss. Soft-RoCE without a loss counted none in
#: 72,000 packets on a busy host.
LOST_SHARE, FEWEST_LOST = 0.0001, 5


@dataclass(frozen=True)
class LossyDevice:
    """A device that carried a row and whose counters of lost or repeated packets grew meanwhile.

    :param packets: what it sent or received meanwhile, whichever is more.
    :param grown: how much each counter grew, by its name.
    """

    host: str
    device: str
    packets: int
    grown: Mapping[str, int]

    @property
    def lost(self) -> tuple[int, str]:
        """How much the counter of losses grew that grew most, and its name; ``(0, "")``: none grew."""
        return max(((count, name) for name, count in self.grown.items() if name in LOSS), default=(0, ""))

    @property
    def loses(self) -> bool:
        """Whether it lost more packets than a healthy device may."""
        return self.lost[0] >= max(FEWEST_LOST, self.packets * LOST_SHARE)

    def __str__(self) -> str:
        count, name = self.lost
        share = f"{100 * count / self.packets:.2g} %"
        return f"{self.device} of {self.host} counted {count:,} {name} in {self.packets:,} packets ({share})"


def read_loss_counters(root: Path = Path("/sys")) -> list[tuple[str, str, int]]:
    """Return the counters of RDMA devices that tell of packets: device, counter, value."""
    devices = read_sysfs(root, only=LOSS | RETRIED | _PACKETS)
    return [
        (name, counter, value)
        for name, device in devices.items() if device.kind != "net"
        for counter, value in device.values.items()
    ]  # fmt: skip


def lossy_devices(
    before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]], transports: Sequence[str], payload: int
) -> tuple[LossyDevice, ...]:
    """Return the devices that carried a row, and lost packets or sent some again.

    :param before: by host, what :func:`read_loss_counters` returned before the row; ``after``: after it.
    :param transports: the row's. If it went over no RDMA device, there are none.
    :param payload: the bytes of the row.
    """
    if not any(name.partition("/")[0] in RDMA | EFA for name in transports):
        return ()
    first = {(host, device, counter): value for host, rows in before.items() for device, counter, value in rows}
    grown: dict[tuple[str, str], dict[str, int]] = {}
    for host, rows in after.items():
        for device, counter, value in rows:
            # A counter that fell was reset.
            if (more := value - first.get((host, device, counter), value)) > 0:
                grown.setdefault((host, device), {})[counter] = more
    devices = []
    for place, counts in grown.items():
        packets = max((count for name, count in counts.items() if name in _PACKETS), default=0)
        errors = {name: count for name, count in counts.items() if name not in _PACKETS}
        if errors and packets >= max(1.0, payload / _MTU * CARRIED_SHARE):
            devices.append(LossyDevice(*place, packets, errors))
    return tuple(devices)


def add_launch(one: Iterable[LossyDevice], other: Iterable[LossyDevice]) -> tuple[LossyDevice, ...]:
    """Return the sums over two launches, of which a device may be in only one."""
    sums: dict[tuple[str, str], LossyDevice] = {}
    for each in (*one, *other):
        key = each.host, each.device
        if (so_far := sums.get(key)) is not None:
            grown = Counter(so_far.grown) + Counter(each.grown)
            each = LossyDevice(*key, so_far.packets + each.packets, dict(grown))
        sums[key] = each
    return tuple(sums.values())
