# SPDX-License-Identifier: Apache-2.0
"""What the counters of a host's network devices say of a row: the bytes that each carried, the packets that it lost.

The bytes that the initiator's devices counted while a row was timed confirm the transports that NIXL reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_nixl.model.transports import EFA, EMULATED, RDMA, TCP, card, is_network

#: The most bytes of a counter's file.
_LONGEST = 4096

#: A device that moved less than this share of the payload carried only acknowledgements or other traffic.
CARRIED_SHARE = 0.01

_VALUE = re.compile(r"[0-9]{1,20}")
_SATURATED_32 = (1 << 32) - 1

# InfiniBand ports count words of four bytes.
_BYTE_COUNTERS = {
    "tx_bytes": (("tx_bytes", 1), ("port_xmit_data_64", 4), ("port_xmit_data", 4)),
    "rx_bytes": (("rx_bytes", 1), ("port_rcv_data_64", 4), ("port_rcv_data", 4)),
    "rdma_write_bytes": (("rdma_write_bytes", 1),),
    "rdma_read_bytes": (("rdma_read_bytes", 1),),
}
#: The names of the counters that are used.
BYTE_COUNTERS = frozenset(name for sources in _BYTE_COUNTERS.values() for name, _ in sources)

#: Counters that grow if a packet did not arrive.
LOSS_COUNTERS = frozenset(
    {
        "packet_seq_err",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "rx_icrc_encapsulated",  # mlx5
        "out_of_seq_request",
        "rcvd_seq_err",  # rxe
        "oos_drop_count",
        "seq_err_naks_rcvd",
        "to_retransmits",  # bnxt_re
    }
)
#: Counters that also grow without a loss: if a receiver or a timer of soft-RoCE is late, or if packets take several
#: paths (adaptive routing: ``out_of_sequence``; EFA: the last three). They are recorded and not judged.
RETRY_COUNTERS = frozenset(
    {
        "out_of_sequence",
        "rnr_nak_retry_err",
        "rcvd_rnr_err",
        "rnr_naks_rcvd",
        "completer_retry_err",
        "duplicate_request",
        "dup_req",
        "retrans_pkts",
        "retrans_timeout_events",
        "rx_drops",
    }
)
_PACKETS = frozenset(
    {
        "port_xmit_packets",
        "port_rcv_packets",
        "sent_pkts",
        "rcvd_pkts",
        "tx_pkts",
        "rx_pkts",
    }
)
#: The most payload of a packet in bytes.
_MTU = 4096
#: The least share of a device's packets, and the fewest, that count as a loss. Soft-RoCE without a loss counted none in
#: 72,000 packets on a busy host.
LOST_SHARE, FEWEST_LOST = 0.0001, 5
_LOOPBACK = "lo"


@dataclass(frozen=True)
class CountedDevice:
    """The counters of one device, or of one port of an adapter, at one moment.

    :param kind: ``efa``, ``rdma`` (any other adapter with RDMA) or ``net`` (a network interface).
    :param values: the counters by name, in the units of the kernel.
    """

    name: str
    kind: str
    values: Mapping[str, int]


@dataclass(frozen=True)
class MovedBytes:
    """The bytes that one device counted between two readings; None if it has no such counter.

    ``rdma_write_bytes`` and ``rdma_read_bytes`` are payload; ``tx_bytes`` and ``rx_bytes`` may include headers.
    """

    device: CountedDevice
    tx_bytes: int | None = None
    rx_bytes: int | None = None
    rdma_write_bytes: int | None = None
    rdma_read_bytes: int | None = None

    def carried(self, op: str) -> int:
        """Return the bytes that an initiator's device carried for ``WRITE`` or ``READ``.

        These are the bytes that RDMA moved, even if 0, if the device counts RDMA separately; otherwise whole packets.
        """
        exact = self.exact(op)
        return self.packet_bytes(op) if exact is None else exact

    def packet_bytes(self, op: str) -> int:
        """Return the bytes of whole packets in the direction of ``op``; 0 if the device does not count them."""
        return (self.rx_bytes if op == "READ" else self.tx_bytes) or 0

    def counts(self, op: str) -> bool:
        """Return whether the device has a usable counter for ``WRITE`` or ``READ``."""
        read = (self.rdma_read_bytes, self.rx_bytes)
        written = (self.rdma_write_bytes, self.tx_bytes)
        return any(count is not None for count in (read if op == "READ" else written))

    def exact(self, op: str) -> int | None:
        """Return the bytes that RDMA moved for ``op``; None if the device has no such counter."""
        return self.rdma_read_bytes if op == "READ" else self.rdma_write_bytes


def _is_efa(values: Mapping[str, int]) -> bool:
    """Whether a device has the counters that only EFA has in addition to ``tx_bytes``."""
    return "tx_bytes" in values and ("rdma_read_bytes" in values or "recv_wrs" in values)


def read_sysfs(root: Path = Path("/sys"), *, only: Collection[str] | None = None) -> dict[str, CountedDevice]:
    """Read the counters of every RDMA port and every network interface, by the name of the device.

    Bonds and bridges are left out, because their members count the same bytes.

    :param root: a folder with the layout of ``/sys``.
    :param only: the names of the counters to read; None for all.
    """
    devices: dict[str, CountedDevice] = {}
    for adapter in _children(root / "class" / "infiniband"):
        ports = _children(adapter / "ports")
        for port in ports:
            values: dict[str, int] = {}
            for folder in ("counters", "hw_counters"):
                values.update(_values(port / folder, only))
            name = adapter.name if len(ports) == 1 else f"{adapter.name}:{port.name}"
            devices[name] = CountedDevice(name, "efa" if _is_efa(values) else "rdma", values)
    for interface in _children(root / "class" / "net"):
        if any((interface / folder).is_dir() for folder in ("bonding", "bridge")):
            continue
        if values := _values(interface / "statistics", only):
            devices[interface.name] = CountedDevice(interface.name, "net", values)
    return devices


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _values(folder: Path, only: Collection[str] | None) -> dict[str, int]:
    values = {}
    try:
        files = sorted(path for path in folder.iterdir() if (only is None or path.name in only) and path.is_file())
    except OSError:
        return {}
    for file in files:
        try:
            with file.open("rb") as counter:
                text = counter.read(_LONGEST).decode(errors="replace").strip()
        except OSError:
            continue
        if _VALUE.fullmatch(text):
            values[file.name] = int(text)
    return values


def difference(before: Mapping[str, CountedDevice], after: Mapping[str, CountedDevice]) -> dict[str, MovedBytes]:
    """Return what each device counted between two readings, by its name.

    A device is left out if only one reading has it, or if one of its counters is unusable: only one reading has it, or
    it fell (it wrapped or was reset), or it is at the value where 32-bit counters stop.
    """
    moved = {}
    for name, last in after.items():
        if name in before:
            with suppress(ValueError):
                counts = {field: _count(before[name], last, sources) for field, sources in _BYTE_COUNTERS.items()}
                moved[name] = MovedBytes(last, **counts)
    return moved


def _count(first: CountedDevice, last: CountedDevice, sources: Iterable[tuple[str, int]]) -> int | None:
    """Return the bytes of the first counter that the readings have; None if they have none.

    :raises ValueError: the counter is unusable.
    """
    for name, factor in sources:
        start, end = first.values.get(name), last.values.get(name)
        if start is None and end is None:
            continue
        stopped = name in ("port_xmit_data", "port_rcv_data") and end == _SATURATED_32
        if start is None or end is None or end < start or stopped:
            raise ValueError(name)
        return (end - start) * factor
    return None


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
    def worst_loss(self) -> tuple[int, str]:
        """How much the counter of losses grew that grew most, and its name; ``(0, "")``: none grew."""
        return max(((count, name) for name, count in self.grown.items() if name in LOSS_COUNTERS), default=(0, ""))

    @property
    def loses(self) -> bool:
        """Whether it lost more packets than a healthy device may."""
        return self.worst_loss[0] >= max(FEWEST_LOST, self.packets * LOST_SHARE)

    def __str__(self) -> str:
        count, name = self.worst_loss
        share = f"{100 * count / self.packets:.2g} %"
        return f"{self.device} of {self.host} counted {count:,} {name} in {self.packets:,} packets ({share})"


def read_loss_counters(root: Path = Path("/sys")) -> list[tuple[str, str, int]]:
    """Return the counters of RDMA devices that tell of packets: device, counter, value."""
    devices = read_sysfs(root, only=LOSS_COUNTERS | RETRY_COUNTERS | _PACKETS)
    return [
        (name, counter, value)
        for name, device in devices.items()
        if device.kind != "net"
        for counter, value in device.values.items()
    ]


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


def sum_losses(first: Iterable[LossyDevice], second: Iterable[LossyDevice]) -> tuple[LossyDevice, ...]:
    """Return the sums over two launches, of which a device may be in only one."""
    sums: dict[tuple[str, str], LossyDevice] = {}
    for lossy in (*first, *second):
        key = lossy.host, lossy.device
        if (so_far := sums.get(key)) is not None:
            grown = Counter(so_far.grown) + Counter(lossy.grown)
            lossy = LossyDevice(*key, so_far.packets + lossy.packets, dict(grown))
        sums[key] = lossy
    return tuple(sums.values())


@dataclass(frozen=True)
class Carrier:
    """A device of the initiator's host, and the bytes that it carried.

    :param kind: ``efa``, ``rdma`` or ``net``, as in :class:`CountedDevice`.
    :param carried: the bytes that RDMA moved, or those of whole packets if the device does not count RDMA separately.
    :param packets: the bytes of whole packets; None if the device does not count RDMA separately.
    """

    device: str
    kind: str
    carried: int
    packets: int | None = None

    @property
    def whole(self) -> int:
        """The bytes of whole packets, whatever moved them."""
        return self.carried if self.packets is None else self.packets


@dataclass(frozen=True)
class CarrierBytes:
    """The bytes that the initiator's devices carried during the timed transfers.

    :param devices: the devices whose counters were read both before and after the transfers.
    :param payload: the bytes of the timed transfers.
    """

    devices: tuple[Carrier, ...]
    payload: int

    @classmethod
    def from_plain(cls, plain: Sequence[Any], payload: int) -> CarrierBytes:
        """Restore the values of :meth:`counting`.

        :param payload: the bytes of the timed transfers.
        """
        return cls(tuple(Carrier(*item) for item in plain), payload)

    @staticmethod
    @contextmanager
    def counting(op: str) -> Iterator[list[Any]]:
        """Read the counters of this host before and after a block, for a worker.

        :param op: ``WRITE`` or ``READ``.
        :returns: a list that is filled when the block ends: what the devices counted, as JSON values for
            :meth:`from_plain`.
        """
        counted: list[Any] = []
        before = read_sysfs(only=BYTE_COUNTERS)
        yield counted
        counted += [
            [name, item.device.kind, item.carried(op), None if item.exact(op) is None else item.packet_bytes(op)]
            for name, item in difference(before, read_sysfs(only=BYTE_COUNTERS)).items()
            if item.counts(op)
        ]

    def __add__(self, other: CarrierBytes) -> CarrierBytes:
        """Return the sums over two launches; a device in only one of them is left out."""
        other_devices = {item.device: item for item in other.devices}
        both = (
            _sum_of_carriers(item, other_devices[item.device]) for item in self.devices if item.device in other_devices
        )
        return CarrierBytes(tuple(both), self.payload + other.payload)

    def carriers(self, transports: Sequence[str]) -> tuple[Carrier, ...]:
        """Return the devices that these transports may have used and that carried a part of the payload."""
        least = max(1.0, self.payload * CARRIED_SHARE)
        count = {_kind_of_transport(name): _bytes_of(name) for name in transports}
        return tuple(item for item in self.devices if item.kind in count and count[item.kind](item) >= least)

    def named(self, transports: Sequence[str]) -> tuple[str, ...]:
        """Return the transports, and add the devices that carried the bytes if the backend named none.

        An EFA transport whose devices moved the payload without RDMA becomes ``efa-emulated`` or ``srd-emulated``.
        """
        names: dict[str, None] = {}
        for transport in transports:
            provider, slash, device = transport.partition("/")
            name = f"{provider}{EMULATED}{slash}{device}" if _moves_by_rdma(provider) and self.emulated else transport
            carriers = () if "/" in name else self.carriers([name])
            names.update(dict.fromkeys(f"{name}/{item.device}" for item in carriers) or {name: None})
        return tuple(names)

    def contradiction(self, transports: Sequence[str]) -> str:
        """Return a sentence if the counters contradict the reported transports; empty if not or if unknown.

        It is known only if every named device has counters (or, if none is named, a device of that kind). The loopback
        interface counts what the kernel sends to an address of its own host.
        """
        if not transports or not all(is_network(name) or name == f"tcp/{_LOOPBACK}" for name in transports):
            return ""
        carried = {item: _bytes_of(name)(item) for name in transports for item in self._asked(name)}
        if not all(self._asked(name) for name in transports):
            return ""
        if any(item.kind == "net" for item in carried):
            carried |= {item: item.carried for item in self.devices if item.device == _LOOPBACK}
        total = sum(carried.values())
        if total >= self.payload * (1 - CARRIED_SHARE):
            return ""
        shown = " and ".join(item.device for item in carried)
        return (
            f"reported {' and '.join(transports)}, but {shown} counted only {total:,} bytes of a payload of "
            f"{self.payload:,}: other devices carried the rest"
        )

    @property
    def emulated(self) -> bool:
        """Whether EFA devices moved the payload by send and receive instead of RDMA."""
        devices = self._counting_rdma()
        least = max(1.0, self.payload * (1 - CARRIED_SHARE))
        return sum(device.carried for device in devices) < least <= sum(device.whole for device in devices)

    def emulation(self, op: str) -> str:
        """Return a sentence about what the EFA devices counted for a payload that they moved without RDMA."""
        devices = self._counting_rdma()
        exact, packets = sum(device.carried for device in devices), sum(device.whole for device in devices)
        whole, rdma = ("rx_bytes", "rdma_read_bytes") if op == "READ" else ("tx_bytes", "rdma_write_bytes")
        return (
            f"{op} was emulated by send and receive: {len(devices)} EFA device{'s' if len(devices) > 1 else ''} "
            f"counted {packets:,} bytes of packets ({whole}) and {exact:,} bytes of RDMA ({rdma}) for a payload of "
            f"{self.payload:,}"
        )

    def _counting_rdma(self) -> list[Carrier]:
        """Return the EFA devices that count RDMA separately."""
        return [device for device in self.devices if device.kind == "efa" and device.packets is not None]

    def _asked(self, transport: str) -> list[Carrier]:
        """Return the device that a transport names, or all devices of its kind if it names none."""
        name = card(transport)
        if not name:
            return [item for item in self.devices if item.kind == _kind_of_transport(transport)]
        return [item for item in self.devices if item.device == name or item.device.startswith(f"{name}:")]


def _kind_of_transport(transport: str) -> str:
    name = transport.partition("/")[0]
    if name in EFA:
        return "efa"
    return "net" if name in TCP else "rdma"


def _moves_by_rdma(provider: str) -> bool:
    """Return whether a provider is one of EFA that uses RDMA if it can."""
    return provider in EFA and not provider.endswith(EMULATED)


def _bytes_of(transport: str) -> Callable[[Carrier], int]:
    """Return a function that gives a device's bytes for this transport: whole packets if RDMA is emulated."""
    emulated = transport.partition("/")[0].endswith(EMULATED)
    return (lambda item: item.whole) if emulated else (lambda item: item.carried)


def _sum_of_carriers(first: Carrier, second: Carrier) -> Carrier:
    packets = None if first.packets is None or second.packets is None else first.packets + second.packets
    return replace(first, carried=first.carried + second.carried, packets=packets)
