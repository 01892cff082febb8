# SPDX-License-Identifier: Apache-2.0
"""The GPUs that workers see. CUDA is loaded only in workers, never in this process."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.processes.worker_process import Worker


@dataclass(frozen=True)
class LinkGpu:
    """A GPU that a worker sees.

    :param number: its number in CUDA in this worker, which is also its device number in NIXL.
    :param name: its model.
    :param uuid: the same text in every process that sees this GPU.
    :param pci: its PCI address in the form of sysfs, such as ``0000:53:00.0``.
    """

    number: int
    name: str
    uuid: str
    pci: str

    def __str__(self) -> str:
        return f"GPU {self.number}, {self.name} ({self.pci})"


def gpus(worker: Worker, test: object = "this test") -> list[LinkGpu]:
    """Return the GPUs that a worker sees.

    :param test: what needs a GPU, for the message.
    :raises NotApplicableError: the worker sees no GPU or cannot use it.
    """
    answer = worker.call("devices")
    if not answer["devices"]:
        reason = answer["why"] or "CUDA sees no GPU"
        raise NotApplicableError(f"{test} needs a GPU, and {reason}{_where(worker)}", answer["remedy"])
    return [LinkGpu(**device) for device in answer["devices"]]


def require_gpu(worker: Worker, number: int, test: object = "this test") -> LinkGpu:
    """Return one GPU of a worker.

    :param number: its number in CUDA in this worker.
    :param test: what needs the GPU, for the message.
    :raises NotApplicableError: the worker does not see this GPU.
    """
    devices = gpus(worker, test)
    if not 0 <= number < len(devices):
        visible = "only GPU 0" if len(devices) == 1 else f"only GPUs 0 to {len(devices) - 1}"
        raise NotApplicableError(
            f"{test} needs GPU {number}, but the worker sees {visible}{_where(worker)}",
            "choose one of these GPUs, or make more visible (CUDA_VISIBLE_DEVICES, the container's GPUs)",
        )
    return devices[number]


def _where(worker: Worker) -> str:
    host = worker.versions["host"]
    return f" (rank {worker.rank}, {host})" if host != platform.node() else ""
