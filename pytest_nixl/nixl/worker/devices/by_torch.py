# SPDX-License-Identifier: Apache-2.0
"""GPUs accessed through torch, for images with torch but without bindings of the CUDA driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pytest_nixl.core.errors import GpuMemoryError
from pytest_nixl.nixl.worker.devices import Device, WorkerGpu, WrongBytes, shortest
from pytest_nixl.nixl.worker.memory import TILE, key, tile


class Torch:
    """The GPUs that torch sees."""

    def __init__(self) -> None:
        self.name = f"torch {torch.__version__}"
        self._devices: dict[int, TorchDevice] = {}

    def devices(self) -> list[WorkerGpu]:
        """Return the GPUs that torch sees."""
        devices = []
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            of = torch.cuda.get_device_properties(number)
            # Older releases of torch report neither UUID nor PCI address: use name and number.
            uuid = str(getattr(of, "uuid", "")).replace("-", "") or f"{of.name} {number}"
            pci = (
                f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
                if hasattr(of, "pci_bus_id")
                else ""
            )
            devices.append(WorkerGpu(number, of.name, uuid, pci))
        return devices

    def device(self, number: int) -> Device:
        """Return one GPU."""
        if number not in self._devices:
            self._devices[number] = TorchDevice(torch.device("cuda", number))
        return self._devices[number]

    def owner(self, address: int) -> int:
        """Refuse: torch cannot tell the GPU of an address, but its tensors report it by DLPack."""
        raise TypeError(
            "the GPU of this array is unknown: pass an array with __dlpack_device__, or install cuda-bindings"
        )


class TorchDevice:
    """One GPU. Allocated memory is kept as torch tensors, by address.

    :param device: torch's device; tests use its ``cpu``, which runs the same operations.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept: dict[int, Any] = {}

    def activate(self) -> None:
        """Make this GPU the current device of torch and the CUDA runtime, with its primary context in this thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def allocate(self, size: int) -> int:
        self.activate()
        try:
            tensor = torch.zeros(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"GPU {self._device.index} cannot allocate {size} bytes: {str(error).splitlines()[0]}",
                "run `nvidia-smi` to see which processes use its memory, or use smaller blocks, batch or depth",
            ) from None
        self._wait()
        address: int = tensor.data_ptr()
        self._kept[address] = tensor
        return address

    def free(self, address: int) -> None:
        """Free the memory on the device; torch alone would keep it for itself."""
        del self._kept[address]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def read(self, address: int, size: int) -> bytes:
        content: bytes = self._part(address, size).cpu().numpy().tobytes()
        return content

    def write(self, address: int, data: memoryview) -> None:
        source = np.frombuffer(data, dtype=np.uint8).copy()
        self._part(address, len(source)).copy_(torch.from_numpy(source))
        self._wait()

    def fill(self, address: int, size: int, seed: int, *, inverted: bool) -> None:
        """Write the pattern, one tile at a time."""
        for start, pattern in self._pattern(seed, size):
            self._part(address + start, len(pattern)).copy_(torch.bitwise_not(pattern) if inverted else pattern)
        self._wait()

    def compare(self, address: int, size: int, seed: int) -> WrongBytes | None:
        """Compare with the pattern, one tile at a time."""
        count, offset, actual = 0, -1, 0
        for start, pattern in self._pattern(seed, size):
            copied = self._part(address + start, len(pattern)).clone()
            differ = copied != pattern
            wrong = int(differ.sum())
            if wrong and not count:
                place = int(differ.to(torch.uint8).argmax())
                offset, actual = start + place, int(copied[place])
            count += wrong
        return WrongBytes(count, offset, actual) if count else None

    def kernel_seconds(self) -> float:
        """Return the seconds of the shortest of some operations on 8 bytes."""
        self.activate()
        flag = torch.zeros(1, dtype=torch.int64, device=self._device)

        def once() -> None:
            flag.add_(1)
            self._wait()

        return shortest(once)

    def _pattern(self, seed: int, size: int) -> Any:
        first = torch.from_numpy(tile(seed, -(-size // 8)).view(np.int64).copy()).to(self._device)
        for number, start in enumerate(range(0, size, 8 * TILE)):
            # torch XORs only signed words; the bits are the same.
            key_word = int(np.uint64(key(seed, number)).view(np.int64))
            part = first[: -(-min(size - start, 8 * TILE) // 8)]
            yield start, torch.bitwise_xor(part, key_word).view(torch.uint8)[: size - start]

    def _part(self, address: int, size: int) -> Any:
        self.activate()
        for start, tensor in self._kept.items():
            if start <= address and address + size <= start + len(tensor):
                return tensor[address - start : address - start + size]
        raise IndexError(f"{size} bytes at {address:#x} are not in a buffer of this device")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
