# SPDX-License-Identifier: Apache-2.0
"""Compare the counters of network devices before and after a run with the bytes that the run moved.

A reading is a folder with the layout of ``/sys``, or a text with one line per device::

    ---- node=node-b ----
    rdmap79s0 tx_bytes=2675672149275 rdma_write_bytes=2674948749720 rdma_read_bytes=2255668
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.untrusted_file import read_regular

#: The most bytes of a file with counters, and of one counter.
_LARGEST, _LONGEST = 64 << 20, 4096
COUNTERS_FORM = (
    "a folder with the layout of /sys (class/infiniband, class/net), or a text with lines such as "
    "'rdmap79s0 tx_bytes=1 rdma_write_bytes=2' and '---- node=NAME ----'"
)

#: A device that moved less than this share of the payload carried only acknowledgements or other traffic.
CARRIED_SHARE = 0.01
#: Counters of whole packets include headers. They may exceed the payload by this share.
HEADERS_SHARE = 0.10

_NODE = re.compile(r"-+ *node=(\S+) *-+")
_DEVICE = re.compile(r"([A-Za-z0-9_.:@-]{1,128})((?: +[a-z][a-z0-9_]{0,63}=[0-9]{1,20})+)")
_VALUE = re.compile(r"[0-9]{1,20}")
_SATURATED_32 = (1 << 32) - 1

# InfiniBand ports count words of four bytes.
_SOURCES = {
    "tx_bytes": (("tx_bytes", 1), ("port_xmit_data_64", 4), ("port_xmit_data", 4)),
    "rx_bytes": (("rx_bytes", 1), ("port_rcv_data_64", 4), ("port_rcv_data", 4)),
    "rdma_write_bytes": (("rdma_write_bytes", 1),),
    "rdma_read_bytes": (("rdma_read_bytes", 1),),
}
#: The names of the counters that are used.
SOURCES = frozenset(name for sources in _SOURCES.values() for name, _ in sources)


@dataclass(frozen=True)
class CountedDevice:
    """The counters of one device, or of one port of an adapter, at one moment.

    :param kind: ``efa``, ``rdma`` (any other adapter with RDMA) or ``net`` (a network interface).
    :param values: the counters by name, in the units of the kernel.
    :param host: the node to which the device belongs; empty if unknown.
    """

    name: str
    kind: str
    values: Mapping[str, int]
    host: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.host}" if self.host else self.name


@dataclass(frozen=True)
class CounterReading:
    """The counters of all devices at one moment.

    :param devices: the devices by printed name.
    :param faults: sentences about what could not be read.
    """

    devices: Mapping[str, CountedDevice]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Moved:
    """The bytes that one device counted between two readings; None if it has no such counter or it is unusable.

    ``rdma_write_bytes`` and ``rdma_read_bytes`` are payload; ``tx_bytes`` and ``rx_bytes`` may include headers.

    :param faults: sentences about counters that are missing or went backwards.
    """

    device: CountedDevice
    tx_bytes: int | None = None
    rx_bytes: int | None = None
    rdma_write_bytes: int | None = None
    rdma_read_bytes: int | None = None
    faults: tuple[str, ...] = ()

    def carried(self, op: str) -> int:
        """Return the bytes that an initiator's device carried for ``WRITE`` or ``READ``.

        These are the bytes that RDMA moved, even if 0, if the device counts RDMA separately; otherwise whole packets.
        """
        exact = self.exact(op)
        return self.packets(op) if exact is None else exact

    def packets(self, op: str) -> int:
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


@dataclass(frozen=True)
class CounterComparison:
    """The result of comparing counters with the payload of a run.

    :param devices: the devices that carried the payload.
    :param op: ``WRITE`` or ``READ``.
    :param carried: the bytes that these devices carried.
    :param payload: the bytes that the run moved.
    :param agrees: whether both agree.
    :param words: the result in one sentence, without a full stop.
    :param emulated: whether EFA devices moved the payload without RDMA; ``carried`` then counts whole packets.
    """

    devices: tuple[Moved, ...]
    op: str
    carried: int
    payload: int
    agrees: bool
    words: str
    emulated: bool = False


def read_counters(path: Path) -> CounterReading:
    """Read counters from a folder with the layout of ``/sys`` or from a text file.

    :raises ValueError: the path is neither, or contains no counters.
    :raises OSError: the path cannot be read.
    """
    if path.is_dir():
        reading = read_sysfs(path)
    else:
        reading = parse_counters(read_regular(path, _LARGEST, COUNTERS_FORM).decode(errors="replace"), str(path))
    if not reading.devices:
        raise ValueError(f"{path} contains no counters: expected {COUNTERS_FORM}")
    return reading


def parse_counters(text: str, origin: str) -> CounterReading:
    """Read counters from a text.

    :param origin: the name of the file, for messages.
    :raises ValueError: a line is not of this form.
    """
    *lines, unfinished = text.split("\n")
    if unfinished.strip():
        raise ValueError(
            f"{origin}, line {len(lines) + 1}: the line has no newline, so its last number may be cut off: "
            "expected a complete file"
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
                f"{origin}, line {number}: {line[:60]!r} is not a device with counters: expected {COUNTERS_FORM}"
            )
        pairs = [item.split("=") for item in match[2].split()]
        values = {name: int(value) for name, value in pairs}
        device = CountedDevice(match[1], _kind(values), values, host)
        if str(device) in devices or len(values) != len(pairs):
            raise ValueError(f"{origin}, line {number}: {device} or one of its counters occurs twice: expected it once")
        devices[str(device)] = device
    return CounterReading(devices)


def _kind(values: Mapping[str, int]) -> str:
    """Return the kind of a device from the names of its counters: only EFA has these in addition to ``tx_bytes``."""
    if "tx_bytes" in values and ("rdma_read_bytes" in values or "recv_wrs" in values):
        return "efa"
    return "rdma" if any(name.startswith(("port_", "rdma_")) for name in values) else "net"


def read_sysfs(root: Path = Path("/sys"), *, only: Collection[str] | None = None) -> CounterReading:
    """Read the counters of every RDMA port and every network interface.

    Bonds and bridges are left out, because their members count the same bytes.

    :param root: a folder with the layout of ``/sys``.
    :param only: the names of the counters to read; None for all.
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
            with file.open("rb") as counter:
                text = counter.read(_LONGEST).decode(errors="replace").strip()
        except OSError as error:
            faults.append(f"{file} cannot be read ({error.strerror})")
            continue
        if _VALUE.fullmatch(text):
            values[file.name] = int(text)
        elif file.name in SOURCES:
            faults.append(f"{file} contains {text[:20]!r}, not a number of bytes")
    return values


def difference(before: CounterReading, after: CounterReading) -> dict[str, Moved]:
    """Return what each device counted between two readings, by its printed name."""
    moved = {}
    for name in [*before.devices, *(name for name in after.devices if name not in before.devices)]:
        first, last = before.devices.get(name), after.devices.get(name)
        if first is None or last is None:
            there = first or last
            assert there is not None
            words = f"{name} is only in the reading {'before' if first else 'after'} the run, so its bytes are unknown"
            moved[name] = Moved(there, faults=(words,))
            continue
        faults: list[str] = []
        counts = {field: _count(first, last, sources, faults) for field, sources in _SOURCES.items()}
        moved[name] = Moved(last, **counts, faults=tuple(faults))
    return moved


def _count(
    first: CountedDevice, last: CountedDevice, sources: Iterable[tuple[str, int]], faults: list[str]
) -> int | None:
    """Return the bytes of the first usable counter that is in both readings."""
    for name, factor in sources:
        start, end = first.values.get(name), last.values.get(name)
        if start is None and end is None:
            continue
        if start is None or end is None:
            faults.append(f"{last}: {name} is only in the reading {'after' if start is None else 'before'} the run")
        elif end < start:
            faults.append(
                f"{last}: {name} fell from {start} to {end}: it wrapped or was reset, so its bytes are unknown"
            )
        elif name in ("port_xmit_data", "port_rcv_data") and end == _SATURATED_32:
            faults.append(f"{last}: {name} is {end}, where 32-bit counters stop, so its bytes are unknown")
        else:
            return (end - start) * factor
    return None


def devices_that_moved(moved: Mapping[str, Moved], op: str, payload: int | None = None) -> tuple[Moved, ...]:
    """Return the initiator's devices that carried ``WRITE`` or ``READ``, in the order of the readings.

    A device counts if it carried :data:`CARRIED_SHARE` of the payload, or of the busiest device's bytes if the payload
    is unknown. Network interfaces count only if no RDMA device does, because an adapter may be both. If EFA devices
    moved the payload without RDMA, the result is those (:func:`emulating`).

    :param moved: the bytes of each device, from :func:`difference`.
    :param payload: in bytes; None if unknown.
    """
    if stood_in := emulating(moved.values(), op, payload):
        return stood_in
    whole = payload if payload is not None else max((item.carried(op) for item in moved.values()), default=0)
    least = max(1.0, whole * CARRIED_SHARE)
    busy = [item for item in moved.values() if item.carried(op) >= least]
    return tuple(item for item in busy if item.device.kind != "net") or tuple(busy)


def is_emulated(op_bytes: Iterable[tuple[int, int]], payload: int | None) -> bool:
    """Return whether devices moved a payload by send and receive instead of RDMA.

    :param op_bytes: the bytes that RDMA moved and the bytes of whole packets, for each device that counts both.
    :param payload: in bytes; None if unknown: RDMA must then have moved less than :data:`CARRIED_SHARE` of the packets.
    """
    pairs = list(op_bytes)
    exact, packets = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if payload is None:
        return packets > 0 and exact < packets * CARRIED_SHARE
    least = max(1.0, payload * (1 - CARRIED_SHARE))
    return exact < least <= packets


def emulating(moved: Iterable[Moved], op: str, payload: int | None = None) -> tuple[Moved, ...]:
    """Return the EFA devices that moved the payload of ``op`` without RDMA; empty if RDMA moved it.

    :param payload: in bytes; None if unknown.
    """
    efa = [(item, exact) for item in moved if item.device.kind == "efa" and (exact := item.exact(op)) is not None]
    if not is_emulated(((exact, item.packets(op)) for item, exact in efa), payload):
        return ()
    whole = payload if payload is not None else max(item.packets(op) for item, _ in efa)
    least = max(1.0, whole * CARRIED_SHARE)
    return tuple(item for item, exact in efa if item.packets(op) - exact >= least)


def compare(moved: Mapping[str, Moved], op: str, payload: int) -> CounterComparison:
    """Compare what the devices carried with the bytes that the run moved.

    Devices that count only payload must have counted exactly that. Other devices may have counted up to
    :data:`HEADERS_SHARE` more, for headers.

    :param op: ``WRITE`` or ``READ``.
    :param payload: in bytes.
    """
    if stood_in := emulating(moved.values(), op, payload):
        return _compare_emulated(stood_in, op, payload)
    devices = devices_that_moved(moved, op, payload)
    carried = sum(item.carried(op) for item in devices)
    exact = bool(devices) and all(item.exact(op) for item in devices)
    agrees, relation = True, "exactly the payload"
    if not devices:
        agrees, relation = (
            False,
            f"and the payload is {payload:,}: other transports, or devices that were not read, carried it",
        )
    elif carried < payload:
        rest = f"other transports, or devices that were not read, carried {payload - carried:,} bytes"
        agrees, relation = False, f"less than the payload of {payload:,}: {rest}"
    elif carried > payload and (exact or carried > payload * (1 + HEADERS_SHARE)):
        agrees, relation = (
            False,
            f"more than the payload of {payload:,}: other programs used these devices during the run",
        )
    elif carried > payload:
        relation = f"the payload of {payload:,} and {100 * (carried - payload) / payload:.1f} % of headers"
    number = "no device" if not devices else f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    words = f"{number} carried {carried:,} bytes, {relation}" if devices else f"no device carried it, {relation}"
    return CounterComparison(devices, op, carried, payload, agrees, words)


def emulation(op: str, devices: int, exact: int, packets: int, payload: int) -> str:
    """Return a sentence about EFA devices that moved a payload without RDMA.

    :param op: ``WRITE`` or ``READ``.
    :param devices: the number of devices.
    :param exact: the bytes that RDMA moved.
    :param packets: the bytes of whole packets.
    :param payload: in bytes.
    """
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
        words += "; other programs used these devices during the run"
    return CounterComparison(devices, op, packets, payload, agrees, words, emulated=True)
