# SPDX-License-Identifier: Apache-2.0
"""The bytes that the initiator's devices counted while a row was timed, to confirm the reported transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pytest_nixl.model.device_counters import CARRIED_SHARE, SOURCES, difference, read_sysfs
from pytest_nixl.model.transports import EFA, EMULATED, TCP, card, is_network

_LOOPBACK = "lo"


@dataclass(frozen=True)
class Carrier:
    """A device of the initiator's host, and the bytes that it carried.

    :param kind: ``efa``, ``rdma`` or ``net``, as in :mod:`~pytest_nixl.model.device_counters`.
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
        before = read_sysfs(only=SOURCES)
        yield counted
        counted += [
            [name, item.device.kind, item.carried(op), None if item.exact(op) is None else item.packets(op)]
            for name, item in difference(before, read_sysfs(only=SOURCES)).items()
            if item.counts(op)
        ]

    def __add__(self, other: CarrierBytes) -> CarrierBytes:
        """Return the sums over two launches; a device in only one of them is left out."""
        other_devices = {item.device: item for item in other.devices}
        both = (_sum(item, other_devices[item.device]) for item in self.devices if item.device in other_devices)
        return CarrierBytes(tuple(both), self.payload + other.payload)

    def carriers(self, transports: Sequence[str]) -> tuple[Carrier, ...]:
        """Return the devices that these transports may have used and that carried a part of the payload."""
        least = max(1.0, self.payload * CARRIED_SHARE)
        count = {_kind(name): _bytes_of(name) for name in transports}
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
            return [item for item in self.devices if item.kind == _kind(transport)]
        return [item for item in self.devices if item.device == name or item.device.startswith(f"{name}:")]


def _kind(transport: str) -> str:
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


def _sum(first: Carrier, second: Carrier) -> Carrier:
    packets = None if first.packets is None or second.packets is None else first.packets + second.packets
    return replace(first, carried=first.carried + second.carried, packets=packets)
