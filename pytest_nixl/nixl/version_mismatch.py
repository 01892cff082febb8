# SPDX-License-Identifier: Apache-2.0
"""Name the NIXL releases of two workers in an error if they differ, because NIXL itself does not name this cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.processes.worker_process import Worker


def differing(workers: Sequence[Worker]) -> str:
    """Return a sentence with the NIXL and UCX release of each rank; empty if all are the same."""
    told = [(worker.rank, f"{worker.versions['nixl_package']} {worker.versions['nixl']}{_ucx(worker)}")
            for worker in workers]  # fmt: skip
    if len({words for _, words in told}) < 2:
        return ""
    return " and ".join(f"rank {rank} has {words}" for rank, words in told)


def _ucx(worker: Worker) -> str:
    return f" (UCX {worker.versions['ucx']})" if worker.versions.get("ucx") else ""


@contextmanager
def versions_named(workers: Sequence[Worker]) -> Iterator[None]:
    """Add the releases to a :class:`WorkerError` that is raised in this context, if the workers have different ones.

    :raises WorkerError: the error that was raised in the context.
    """
    try:
        yield
    except WorkerError as error:
        words = differing(workers)
        if words and words not in error.reason:
            error.reason = f"{error.reason}; {words}, which may be the cause"
            page = "docs/reference/versions.md"
            error.remedy = f"install the same release of NIXL on all ranks (see {page}); otherwise {error.remedy}"
        raise
