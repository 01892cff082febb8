# SPDX-License-Identifier: Apache-2.0
"""The GPUs that workers see, as they tell of them: CUDA is never loaded here."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.processes.worker_process import Worker


@dataclass(frozen=True)
class LinkGpu:
    """A GPU of a worker: ``number`` is CUDA's among those that this worker sees, and its device for NIXL.

    :param uuid: the same in every process that sees this GPU.
    :param pci: its address on the bus, such as ``0000:53:00.0``, as facts and sysfs have it.
    """

    number: int
    name: str
    uuid: str
    pci: str

    def __str__(self) -> str:
        return f"GPU {self.number}, {self.name} ({self.pci})"


def gpus(worker: Worker, what: object = "this test") -> list[LinkGpu]:
    """Return the GPUs that a worker sees.

    :param what: what needs one, for the sentence.
    :raises NotApplicableError: where it sees none, or cannot use them: with the reason.
    """
    told = worker.call("devices")
    if not told["devices"]:
        why = told["why"] or "CUDA sees none"
        raise NotApplicableError(f"{what} needs a GPU, and {why}{_where(worker)}", told["remedy"])
    return [LinkGpu(**each) for each in told["devices"]]


def require_gpu(worker: Worker, number: int, what: object = "this test") -> LinkGpu:
    """Return one GPU of a worker. :raises NotApplicableError: where it does not see that one."""
    found = gpus(worker, what)
    if not 0 <= number < len(found):
        seen = "one, number 0" if len(found) == 1 else f"{len(found)}, numbers 0 to {len(found) - 1}"
        raise NotApplicableError(
            f"{what} needs GPU {number}, and the worker sees {seen}{_where(worker)}",
            "name one of those, or let the process see more (CUDA_VISIBLE_DEVICES, the container's GPUs)",
        )
    return found[number]


def choose(one: Worker, other: Worker, memory: MemoryPair, wanted: DevicePair | None) -> DevicePair:
    """Return the devices of a link's two ends; an end in host memory has device 0.

    :param wanted: what was asked for; None: the first GPU of the initiator, and the first one of the target that is
        another; where it has no other, the same.
    :raises NotApplicableError: where an end that is to be a GPU's has none, or not that one.
    """
    ends = (("VRAM" in memory.initiator, one), ("VRAM" in memory.target, other))
    seen = [gpus(worker, memory) if needs else [] for needs, worker in ends]
    if wanted is not None:
        numbers = (wanted.initiator, wanted.target)
        for number, (needs, worker) in zip(numbers, ends, strict=True):
            if needs:
                require_gpu(worker, number, memory)
        return DevicePair(*(number if needs else 0 for number, (needs, _) in zip(numbers, ends, strict=True)))
    first = seen[0][0].uuid if seen[0] else ""
    target = next((gpu.number for gpu in seen[1] if gpu.uuid != first), 0)
    return DevicePair(0, target)


def _where(worker: Worker) -> str:
    host = worker.versions["host"]
    return f" (rank {worker.rank}, {host})" if host != platform.node() else ""
