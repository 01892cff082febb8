# SPDX-License-Identifier: Apache-2.0
"""GPUs in a worker, and the interface of a vendor's module. The pytest process never loads this package.

To add a vendor, add a module with a function ``find() -> Vendor`` and name it in ``_FILES``.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pytest_nixl.core.errors import NotApplicableError

#: The vendors' modules, in the order in which they are tried.
_FILES = ("nvidia",)


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU that this process sees.

    :param number: its number in this process.
    :param name: its model.
    :param uuid: identifies the GPU, even if two processes number the GPUs differently.
    :param pci: its PCI address in the form of sysfs.
    """

    number: int
    name: str
    uuid: str
    pci: str


class Device(Protocol):
    """The memory of one GPU. Every method waits until the operation has ended. Sizes are in bytes."""

    def activate(self) -> None:
        """Make this GPU the current one of this thread, which libraries need to use its addresses."""

    def allocate(self, size: int) -> int:
        """Allocate ``size`` zero bytes, and return their address."""

    def free(self, address: int) -> None:
        """Free the memory that was allocated at an address."""

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes."""

    def write(self, address: int, data: memoryview) -> None:
        """Write ``data``."""

    def fill(self, address: int, size: int, seed: int, *, inverted: bool) -> None:
        """Write the pattern of ``seed`` (see :mod:`pytest_nixl.nixl.worker.memory`) or its complement, on the GPU."""

    def compare(self, address: int, size: int, seed: int) -> WrongBytes | None:
        """Compare with the pattern of ``seed`` on the GPU; return None if every byte is right."""

    def kernel_seconds(self) -> float:
        """Return the seconds of a kernel over 8 bytes: long if other processes use the GPU, because they take turns."""


@dataclass(frozen=True)
class WrongBytes:
    """Bytes that differ from the pattern.

    :param count: how many bytes differ.
    :param offset: the offset of the first one, in bytes.
    :param found: the value of the first one.
    """

    count: int
    offset: int
    found: int


class Vendor(Protocol):
    """The GPUs of one vendor, accessed through one library."""

    @property
    def name(self) -> str:
        """The library and its version, such as ``cuda-bindings 13.5.0``."""

    def devices(self) -> list[WorkerGpu]:
        """Return the GPUs that this process sees, by number."""

    def device(self, number: int) -> Device:
        """Return one GPU, always the same object for the same number."""

    def owner(self, address: int) -> int:
        """Return the number of the GPU to which an address belongs."""


#: How often :func:`shortest` calls what it times.
_TRIES = 5


def shortest(call: Callable[[], object]) -> float:
    """Return the seconds of the shortest of some calls: a busy processor delays a call, but not all of them."""
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@functools.cache
def vendor() -> Vendor:
    """Return the first vendor whose GPUs this process can use.

    :raises NotApplicableError: this process can use no GPU.
    """
    refusals = []
    for name in _FILES:
        try:
            found: Vendor = importlib.import_module(f"{__name__}.{name}").find()
            return found
        except NotApplicableError as error:
            refusals.append(error)
    raise refusals[0]


def device(number: int) -> Device:
    """Return a GPU by its number.

    :raises NotApplicableError: this process does not see this GPU.
    """
    devices = vendor().devices()
    if not 0 <= number < len(devices):
        visible = "only GPU 0" if len(devices) == 1 else f"only GPUs 0 to {len(devices) - 1}"
        raise NotApplicableError(
            f"there is no GPU {number}: this process sees {visible}",
            "choose one of these GPUs, or make more visible (CUDA_VISIBLE_DEVICES, the container's GPUs)",
        )
    return vendor().device(number)
