# SPDX-License-Identifier: Apache-2.0
"""The command of a worker about faults. Rank 0 may send it to a worker of another rank, which refuses ``run``."""

from __future__ import annotations

from pytest_nixl.checks.faults.worker import traffic
from pytest_nixl.model.worker_commands import BufferRef, WorkerObjects


def unmap(objects: WorkerObjects, buffer: BufferRef) -> None:
    """Give the registered memory of a buffer back to the kernel; the arguments are those of :func:`traffic.unmap`."""
    memory = objects.get(buffer)
    traffic.unmap(memory.address, memory.size)
