# SPDX-License-Identifier: Apache-2.0
"""GPUs as a worker sees them, and what a vendor's file must offer: nothing here is loaded in the pytest process.

Another vendor is one more file with a function ``find() -> Vendor``, named in ``_FILES``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from pytest_nixl.core.errors import NotApplicableError

#: The vendors' files, in the order in which they are tried.
_FILES = ("nvidia",)


@dataclass(frozen=True)
class FoundDevices:
    """A GPU that this process sees.

    :param uuid: what tells it from every other one, also where two processes number them differently.
    :param pci: its address on the bus, as sysfs has it.
    """

    number: int
    name: str
    uuid: str
    pci: str


class Device(Protocol):
    """One GPU's memory. Addresses are of that memory and of this process; every call waits until it is done."""

    def activate(self) -> None:
        """Make the device that of this thread, as libraries want that are given its addresses."""
        ...

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes, which are zero."""
        ...

    def free(self, address: int) -> None:
        """Give back what was allocated at an address."""
        ...

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes."""
        ...

    def write(self, address: int, data: memoryview) -> None:
        """Write ``data``."""
        ...

    def fill(self, address: int, size: int, seed: int, *, inverted: bool) -> None:
        """Write the pattern of ``seed`` (see :mod:`pytest_nixl.nixl.worker.pattern`) or its complement, on the GPU."""
        ...

    def compare(self, address: int, size: int, seed: int) -> WrongBytes | None:
        """Compare with the pattern of ``seed``, on the GPU; None: every byte is right."""
        ...


@dataclass(frozen=True)
class WrongBytes:
    """Bytes that differ from the pattern: how many, where the first one is, and what is there."""

    count: int
    offset: int
    found: int


class Vendor(Protocol):
    """The GPUs of one vendor, through one library."""

    @property
    def name(self) -> str:
        """What it is told by: ``cuda-bindings 13.5.0``."""
        ...

    def devices(self) -> list[FoundDevices]:
        """Return the GPUs that this process sees, by number."""
        ...

    def device(self, number: int) -> Device:
        """Return one of them, always the same object for a number."""
        ...

    def owner(self, address: int) -> int:
        """Return the number of the GPU that memory at an address is of."""
        ...


_found: list[Vendor] = []


def vendor() -> Vendor:
    """Return the first vendor's whose GPUs this process can use.

    :raises NotApplicableError: where there is none, with the reason of the first vendor of the list.
    """
    if _found:
        return _found[0]
    refusals = []
    for name in _FILES:
        try:
            _found.append(importlib.import_module(f"{__name__}.{name}").find())
            return _found[0]
        except NotApplicableError as error:
            refusals.append(error)
    raise refusals[0]


def device(number: int) -> Device:
    """Return a GPU by its number. :raises NotApplicableError: where this process sees no such GPU."""
    found = vendor().devices()
    if not 0 <= number < len(found):
        seen = "one GPU: number 0" if len(found) == 1 else f"{len(found)} GPUs: numbers 0 to {len(found) - 1}"
        raise NotApplicableError(
            f"there is no GPU {number} here: this process sees {seen}",
            "ask for one of those, or let the process see more (CUDA_VISIBLE_DEVICES, the container's GPUs)",
        )
    return vendor().device(number)
