# SPDX-License-Identifier: Apache-2.0
"""Counters of network devices, read before and after a run: which moved bytes, and whether they are the run's own.

A reading is a folder with the layout of ``/sys``, or a text with a line for each device::

    ---- node=node-b ----
    rdmap79s0 tx_bytes=2675672149275 rdma_write_bytes=2674948749720 rdma_read_bytes=2255668
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

COUNTERS_FORM = (
    "a folder with the layout of /sys (class/infiniband, class/net), or a text with lines such as "
    "'rdmap79s0 tx_bytes=1 rdma_write_bytes=2' and '---- node=NAME ----'"
)

#: A device that moved less than this share of the payload did not carry it: acknowledgements, other traffic.
CARRIED_SHARE = 0.01
#: Counters of whole packets count headers too: by this share at most they may exceed the payload.
HEADERS_SHARE = 0.10

_NODE = re.compile(r"-+ *node=(\S+) *-+")
_DEVICE = re.compile(r"([A-Za-z0-9_.:@-]{1,128})((?: +[a-z][a-z0-9_]{0,63}=[0-9]{1,20})+)")
_VALUE = re.compile(r"[0-9]{1,20}")
_SATURATED_32 = (1 << 32) - 1

# The ports of InfiniBand count words of four bytes.
_SOURCES = {
    "tx_bytes": (("tx_bytes", 1), ("port_xmit_data_64", 4), ("port_xmit_data", 4)),
    "rx_bytes": (("rx_bytes", 1), ("port_rcv_data_64", 4), ("port_rcv_data", 4)),
    "rdma_write_bytes": (("rdma_write_bytes", 1),),
    "rdma_read_bytes": (("rdma_read_bytes", 1),),
}
#: The counters that tell what moved.
SOURCES = frozenset(name for sources in _SOURCES.values() for name, _ in sources)


@dataclass(frozen=True)
class CountedDevice:
    """One device, or one of the ports of an adapter, at one moment.

    :param kind: ``efa``, ``rdma`` (any other adapter that does RDMA) or ``net`` (an interface of the kernel).
    :param host: the node whose it is; empty: not told.
    """

    name: str
    kind: str
    values: Mapping[str, int]
    host: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.host}" if self.host else self.name


@dataclass(frozen=True)
class CounterReading:
    """All devices at one moment, by their printed names, and in words what could not be read."""

    devices: Mapping[str, CountedDevice]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Moved:
    """What one device counted between two readings; None: it has no such counter, or what it says is worth nothing.

    ``rdma_write_bytes`` and ``rdma_read_bytes`` are payload; ``tx_bytes`` and ``rx_bytes`` may count headers too.

    :param faults: in words, what is missing or went backwards.
    """

    device: CountedDevice
    tx_bytes: int | None = None
    rx_bytes: int | None = None
    rdma_write_bytes: int | None = None
    rdma_read_bytes: int | None = None
    faults: tuple[str, ...] = ()

    def carried(self, op: str) -> int:
        """Return what an initiator's device carried for ``WRITE`` or ``READ``.

        It is the payload that RDMA moved, 0 too, where it counts that apart; else it is whole packets.
        """
        exact = self.exact(op)
        return self.packets(op) if exact is None else exact

    def packets(self, op: str) -> int:
        """Return the bytes of whole packets that it counted in the direction of ``op``; 0 where it counts none."""
        return (self.rx_bytes if op == "READ" else self.tx_bytes) or 0

    def counts(self, op: str) -> bool:
        """Whether it has a counter for ``WRITE`` or ``READ`` that is worth something."""
        read = (self.rdma_read_bytes, self.rx_bytes)
        written = (self.rdma_write_bytes, self.tx_bytes)
        return any(count is not None for count in (read if op == "READ" else written))

    def exact(self, op: str) -> int | None:
        """Return the bytes of payload that RDMA moved for ``op``; None where it has no such counter."""
        return self.rdma_read_bytes if op == "READ" else self.rdma_write_bytes


@dataclass(frozen=True)
class CounterComparison:
    """What the devices that moved bytes carried, beside the payload of the run.

    :param devices: those that carried it, each with its share of the bytes.
    :param words: one sentence without its full stop.
    :param emulated: whether EFA devices sent the payload in messages, without RDMA: ``carried`` is then in packets.
    """

    devices: tuple[Moved, ...]
    op: str
    carried: int
    payload: int
    agrees: bool
    words: str
    emulated: bool = False


def read_counters(path: Path) -> CounterReading:
    """Read a folder or a text. :raises ValueError: if it is neither, in one sentence. :raises OSError: unreadable."""
    if path.is_dir():
        reading = read_sysfs(path)
    else:
        reading = parse_counters(path.read_bytes().decode(errors="replace"), str(path))
    if not reading.devices:
        raise ValueError(f"{path} holds no counters of any device: expected {COUNTERS_FORM}")
    return reading


def parse_counters(text: str, origin: str) -> CounterReading:
    """Read the text form. :raises ValueError: for a line that is none of it, in one sentence."""
    *lines, unfinished = text.split("\n")
    if unfinished.strip():
        raise ValueError(
            f"{origin}, line {len(lines) + 1}: has no end, so that its last number may be cut off: "
            "expected a text whose last line ends"
        )
    devices: dict[str, CountedDevice] = {}
    host = ""
    for number, line in enumerate((line.strip() for line in lines), 1):
        if not line or line.startswith("#"):
            continue
        if node := _NODE.fullmatch(line):
            host = node[1]
            continue
        match = _DEVICE.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{origin}, line {number}: {line[:60]!r} is no device with counters: expected {COUNTERS_FORM}"
            )
        pairs = [item.split("=") for item in match[2].split()]
        values = {name: int(value) for name, value in pairs}
        device = CountedDevice(match[1], _kind(values), values, host)
        if str(device) in devices or len(values) != len(pairs):
            raise ValueError(
                f"{origin}, line {number}: {device} or one of its counters is there twice: expected it once"
            )
        devices[str(device)] = device
    return CounterReading(devices)


def _kind(values: Mapping[str, int]) -> str:
    """Tell the kind of a device from what it counts: only EFA has these beside ``tx_bytes``."""
    if "tx_bytes" in values and ("rdma_read_bytes" in values or "recv_wrs" in values):
        return "efa"
    return "rdma" if any(name.startswith(("port_", "rdma_")) for name in values) else "net"


def read_sysfs(root: Path = Path("/sys"), *, only: Collection[str] | None = None) -> CounterReading:
    """Read every RDMA port and every network interface under ``root``.

    Bonds and bridges are left out, as they count again what their members count.

    :param only: the counters to read; None: all.
    """
    devices: dict[str, CountedDevice] = {}
    faults: list[str] = []
    for adapter in _children(root / "class" / "infiniband"):
        ports = _children(adapter / "ports")
        for port in ports:
            values: dict[str, int] = {}
            for folder in ("counters", "hw_counters"):
                values.update(_values(port / folder, faults, only))
            name = adapter.name if len(ports) == 1 else f"{adapter.name}:{port.name}"
            kind = _kind(values) if values else "rdma"
            devices[name] = CountedDevice(name, "efa" if kind == "efa" else "rdma", values)
    for interface in _children(root / "class" / "net"):
        if any((interface / folder).is_dir() for folder in ("bonding", "bridge")):
            continue
        if values := _values(interface / "statistics", faults, only):
            devices[interface.name] = CountedDevice(interface.name, "net", values)
    return CounterReading(devices, tuple(faults))


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _values(folder: Path, faults: list[str], only: Collection[str] | None) -> dict[str, int]:
    values = {}
    try:
        files = sorted(path for path in folder.iterdir() if (only is None or path.name in only) and path.is_file())
    except OSError:
        return {}
    for file in files:
        try:
            text = file.read_text(errors="replace").strip()
        except OSError as error:
            faults.append(f"{file} cannot be read ({error.strerror})")
            continue
        if _VALUE.fullmatch(text):
            values[file.name] = int(text)
        elif file.name in SOURCES:
            faults.append(f"{file} holds {text[:20]!r}, not a number of bytes")
    return values


def difference(before: CounterReading, after: CounterReading) -> dict[str, Moved]:
    """Return what each device counted from one reading to the other, by its printed name."""
    moved = {}
    for name in [*before.devices, *(name for name in after.devices if name not in before.devices)]:
        first, last = before.devices.get(name), after.devices.get(name)
        if first is None or last is None:
            there = first or last
            assert there is not None
            words = f"{name} is in the reading {'before' if first else 'after'} only, so that nothing is known of it"
            moved[name] = Moved(there, faults=(words,))
            continue
        faults: list[str] = []
        counts = {field: _count(first, last, sources, faults) for field, sources in _SOURCES.items()}
        moved[name] = Moved(last, **counts, faults=tuple(faults))
    return moved


def _count(
    first: CountedDevice, last: CountedDevice, sources: Iterable[tuple[str, int]], faults: list[str]
) -> int | None:
    """Return the bytes of the first counter that is in both readings and is worth something."""
    for name, factor in sources:
        start, end = first.values.get(name), last.values.get(name)
        if start is None and end is None:
            continue
        if start is None or end is None:
            faults.append(f"{last}: {name} is in the reading {'after' if start is None else 'before'} only")
        elif end < start:
            faults.append(
                f"{last}: {name} fell from {start} to {end}: it wrapped or was reset, and cannot tell what moved"
            )
        elif name in ("port_xmit_data", "port_rcv_data") and end == _SATURATED_32:
            faults.append(f"{last}: {name} stands at {end}, where counters of 32 bits stop, and cannot tell what moved")
        else:
            return (end - start) * factor
    return None


def devices_that_moved(moved: Mapping[str, Moved], op: str, payload: int | None = None) -> tuple[Moved, ...]:
    """Return the devices that carried ``WRITE`` or ``READ``, from an initiator's side, in the order of the readings.

    Those count that carried :data:`CARRIED_SHARE` of the payload, or, where that is not known, of what the busiest did.
    Interfaces of the kernel count only where no RDMA device does: an adapter may be both. Where EFA devices sent the
    payload without RDMA it is those (:func:`emulating`).
    """
    if stood_in := emulating(moved.values(), op, payload):
        return stood_in
    whole = payload if payload is not None else max((item.carried(op) for item in moved.values()), default=0)
    least = max(1.0, whole * CARRIED_SHARE)
    busy = [item for item in moved.values() if item.carried(op) >= least]
    return tuple(item for item in busy if item.device.kind != "net") or tuple(busy)


def is_emulated(op_bytes: Iterable[tuple[int, int]], payload: int | None) -> bool:
    """Whether devices moved a payload without RDMA, in messages that the library sends and receives.

    :param op_bytes: for each device that counts both, the bytes that RDMA moved and those of whole packets.
    :param payload: in bytes; None: not known. Then RDMA must have moved next to nothing.
    """
    pairs = list(op_bytes)
    exact, packets = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if payload is None:
        return packets > 0 and exact < packets * CARRIED_SHARE
    least = max(1.0, payload * (1 - CARRIED_SHARE))
    return exact < least <= packets


def emulating(moved: Iterable[Moved], op: str, payload: int | None = None) -> tuple[Moved, ...]:
    """Return the EFA devices that moved the payload of ``op`` without RDMA; none where RDMA moved it."""
    efa = [(item, exact) for item in moved if item.device.kind == "efa" and (exact := item.exact(op)) is not None]
    if not is_emulated(((exact, item.packets(op)) for item, exact in efa), payload):
        return ()
    whole = payload if payload is not None else max(item.packets(op) for item, _ in efa)
    least = max(1.0, whole * CARRIED_SHARE)
    return tuple(item for item, exact in efa if item.packets(op) - exact >= least)


def compare(moved: Mapping[str, Moved], op: str, payload: int) -> CounterComparison:
    """Compare what the devices carried with the bytes that the run was to move.

    They agree where devices that count payload alone counted exactly that, or the others that and up to
    :data:`HEADERS_SHARE` more for headers.
    """
    if stood_in := emulating(moved.values(), op, payload):
        return _compare_emulated(stood_in, op, payload)
    devices = devices_that_moved(moved, op, payload)
    carried = sum(item.carried(op) for item in devices)
    exact = bool(devices) and all(item.exact(op) for item in devices)
    agrees, relation = True, "exactly the payload"
    if not devices:
        agrees, relation = False, f"and the payload is {payload:,}: it went another way, or over devices not read"
    elif carried < payload:
        rest = f"{payload - carried:,} bytes went another way, or over devices that were not read"
        agrees, relation = False, f"less than the payload of {payload:,}: {rest}"
    elif carried > payload and (exact or carried > payload * (1 + HEADERS_SHARE)):
        agrees, relation = False, f"more than the payload of {payload:,}: others used these devices meanwhile"
    elif carried > payload:
        relation = f"the payload of {payload:,} and {100 * (carried - payload) / payload:.1f} % of headers"
    number = "no device" if not devices else f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    words = f"{number} carried {carried:,} bytes, {relation}" if devices else f"no device carried it, {relation}"
    return CounterComparison(devices, op, carried, payload, agrees, words)


def emulation(op: str, devices: int, exact: int, packets: int, payload: int) -> str:
    """Say that EFA devices moved a payload without RDMA, and what they counted."""
    whole, rdma = ("rx_bytes", "rdma_read_bytes") if op == "READ" else ("tx_bytes", "rdma_write_bytes")
    return (
        f"{op} was emulated by send and receive: {devices} EFA device{'s' if devices > 1 else ''} counted {packets:,} "
        f"bytes of packets ({whole}) and {exact:,} bytes of RDMA ({rdma}) for a payload of {payload:,}"
    )


def _compare_emulated(devices: tuple[Moved, ...], op: str, payload: int) -> CounterComparison:
    packets = sum(item.packets(op) for item in devices)
    exact = sum(item.exact(op) or 0 for item in devices)
    words = emulation(op, len(devices), exact, packets, payload)
    agrees = packets <= payload * (1 + HEADERS_SHARE)
    if not agrees:
        words += "; others used these devices meanwhile"
    return CounterComparison(devices, op, packets, payload, agrees, words, emulated=True)
