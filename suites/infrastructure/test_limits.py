# SPDX-License-Identifier: Apache-2.0
"""May processes lock and share enough memory, set up queues for files, and use fast and near cores?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("memlock", level="quick")
def test_enough_memory_may_be_locked(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A process may lock as much memory as RDMA registers."""
    verdict(ask("memlock"))


@pytest.mark.nixl_check("shm", level="quick")
def test_there_is_room_in_dev_shm(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """/dev/shm is larger than a container's default of 64 MiB, and has free space."""
    verdict(ask("shm"))


@pytest.mark.nixl_check("huge-pages", level="quick")
def test_huge_pages_are_reserved_for_efa(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Huge pages are free for EFA's buffers, if there is EFA."""
    verdict(ask("huge-pages"))


@pytest.mark.nixl_check("storage-queues", level="quick")
def test_queues_for_files_may_be_set_up(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """With POSIX, a process may set up the kernel's queues for files, aio and io_uring."""
    verdict(ask("storage-queues"))


@pytest.mark.nixl_check("cpu-governor", level="quick")
def test_cores_run_at_full_speed(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """The kernel does not slow down the cores that a process may use to save power."""
    verdict(ask("cpu-governor"))


@pytest.mark.nixl_check("numa-cores", level="quick")
def test_cores_are_near_gpus_and_cards(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A process may use cores of the NUMA nodes of its GPUs and of a network card."""
    verdict(ask("numa-cores"))
