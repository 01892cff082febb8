# SPDX-License-Identifier: Apache-2.0
"""Do the requests that engines make for KV blocks move the right bytes, over an accepted transport?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement
from pytest_nixl.checks.kv_cache.check import KvRequestKind

#: Moves the blocks of one kind of request, and judges it.
Move = Callable[[KvRequestKind | None], Judgement]


@pytest.mark.nixl_check("kv-requests")
def test_a_request_moves_the_right_blocks(
    kv_kind: KvRequestKind | None, move_blocks: Move, verdict: Callable[[Judgement], None]
) -> None:
    """Requests for the KV blocks of a model move the right bytes to the right blocks, over an accepted transport."""
    verdict(move_blocks(kv_kind))


@pytest.mark.nixl_check("kv-requests-compared", level="extended")
def test_other_ways_to_make_a_request_move_the_right_blocks(
    other_kv_kind: KvRequestKind,
    move_blocks: Callable[[KvRequestKind], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Requests that NIXL does not merge, and requests without prepared descriptors, move the right bytes."""
    verdict(move_blocks(other_kv_kind))
