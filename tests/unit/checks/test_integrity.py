# SPDX-License-Identifier: Apache-2.0
"""The check ``bytes-of-every-transfer``: how many transfers of which sizes, and what is said of a corrupt one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.checks.integrity.check import EXTENDED_TRANSFERS, TRANSFERS, detection, judge_every_transfer
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Corruption
from pytest_nixl.model.verdicts import Judgement, Verdict


def judged(
    *answers: Corruption | None, blocks: tuple[int, ...] = (4096, 1 << 20), extended: bool = False, backend: str = "UCX"
) -> tuple[Judgement, list[tuple[int, int]]]:
    """Return the judgement of a link that answers so, and the size and the number of the transfers of each request."""
    requests, remaining = list[tuple[int, int]](), list(answers)

    def move_each(block: int, count: int) -> Corruption | None:
        requests.append((block, len(range(count))))
        return remaining.pop(0) if remaining else None

    def key(block: int) -> RowKey:
        return RowKey(backend, "WRITE", MemoryPair("DRAM", "DRAM"), block)

    link = cast(Any, SimpleNamespace(backend=backend, move_each=move_each, key=key))
    return judge_every_transfer(link, cast(Any, SimpleNamespace(blocks=blocks, extended=extended))), requests


def test_the_figures_of_the_docs_are_those_of_the_check() -> None:
    assert (TRANSFERS, EXTENDED_TRANSFERS) == (200, 5000)
    assert round(detection(1 / 100, TRANSFERS), 2) == 0.87
    assert round(detection(1 / 1000, EXTENDED_TRANSFERS), 2) == 0.99


@pytest.mark.parametrize(
    ("blocks", "extended", "sizes"),
    [
        ((1 << 20, 4096), False, [(4096, 100), (65536, 100)]),
        ((1 << 20, 4096), True, [(4096, 2500), (65536, 2500)]),
        ((512, 4096), False, [(512, 100), (4096, 100)]),
        ((1 << 20,), False, [(65536, 100), (1 << 20, 100)]),
        ((4096,), False, [(4096, 200)]),
    ],
)
def test_half_of_the_transfers_are_small(blocks: tuple[int, ...], extended: bool, sizes: list[tuple[int, int]]) -> None:
    judgement, requests = judged(blocks=blocks, extended=extended)
    assert (judgement.verdict, requests) == (Verdict.PASS, sizes)


def test_a_corrupt_transfer_is_named_with_its_size() -> None:
    corruption = Corruption("in transfer 17 (3 of 100 are corrupt)", 1, 65536, 5, 6, 7)
    judgement, requests = judged(None, corruption)
    assert judgement.verdict is Verdict.CORRUPT
    assert judgement.reason == (
        "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1, a pattern for each transfer: 1 of 65536 bytes are wrong in "
        "transfer 17 (3 of 100 are corrupt), the first at offset 5: expected 0x06, found 0x07"
    )
    assert len(requests) == 2


def test_storage_is_not_concerned() -> None:
    with pytest.raises(NotApplicableError, match="POSIX moves bytes to storage"):
        judged(backend="POSIX")
