# SPDX-License-Identifier: Apache-2.0
"""Two workers with different releases of NIXL: mostly they work together; where they do not, NIXL does not say why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pytest_nixl.processes.worker_process import Worker, WorkerError


def differing(workers: Sequence[Worker]) -> str:
    """Say which release each worker has, with the UCX in it; empty where they have the same."""
    told = [(worker.rank, f"{worker.versions['nixl_package']} {worker.versions['nixl']}{_ucx(worker)}")
            for worker in workers]  # fmt: skip
    if len({words for _, words in told}) < 2:
        return ""
    return " and ".join(f"rank {rank} has {words}" for rank, words in told)


def _ucx(worker: Worker) -> str:
    return f" (UCX {worker.versions['ucx']})" if worker.versions.get("ucx") else ""


@contextmanager
def versions_named(workers: Sequence[Worker]) -> Iterator[None]:
    """Have a failure between workers of different releases name both: that may be its cause.

    :raises WorkerError: the one that was raised within.
    """
    try:
        yield
    except WorkerError as error:
        words = differing(workers)
        if words and words not in error.reason:
            error.reason = f"{error.reason}; {words}, which may be the cause"
            page = "docs/reference/versions.md"
            error.remedy = f"run one release of NIXL on all ranks, and see {page}; else {error.remedy}"
        raise
