# SPDX-License-Identifier: Apache-2.0
"""May processes lock and share enough memory?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("memlock")
def test_enough_memory_may_be_locked(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """A process may lock as much memory as RDMA registers."""
    verdict(ask("memlock"))


@pytest.mark.nixl_check("shm")
def test_there_is_room_in_dev_shm(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """/dev/shm is larger than a container's default of 64 MiB, and has free space."""
    verdict(ask("shm"))


@pytest.mark.nixl_check("huge-pages")
def test_huge_pages_are_reserved_for_efa(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Huge pages are free for EFA's buffers, if there is EFA."""
    verdict(ask("huge-pages"))
