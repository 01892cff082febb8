# SPDX-License-Identifier: Apache-2.0
"""Do the blocks of a KV cache move to storage and back, and what do fragments of a file cost?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Figure, Judgement, NotApplicableError, Run, Verdict
from pytest_nixl.checks.kv_cache.check import KvLaunches, KvRequestKind, with_bounds
from pytest_nixl.checks.kv_cache.storage import judge_stored, measure_stored, stored_kinds


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stored_kind" in metafunc.fixturenames:
        run = Run.of(metafunc.config)
        # None: the test says why there is nothing to measure.
        metafunc.parametrize("stored_kind", (list(stored_kinds(run.settings)) if run.usable else []) or [None], ids=str)


@pytest.mark.nixl_check("kv-storage", level="extended")
def test_blocks_move_between_memory_and_storage(
    stored_kind: KvRequestKind | None,
    kv_launches: KvLaunches,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    nixl_run: Run,
    verdict: Callable[[Judgement], None],
) -> None:
    """Requests for KV blocks move the right bytes between memory and a file, or objects of a store."""
    if stored_kind is None:
        raise NotApplicableError("no requested backend moves bytes to storage", "give --nixl-backend=POSIX or OBJ")
    measured = measure_stored(kv_launches, stored_kind)
    bounded = record_figures(measured.figures)
    judged = judge_stored(measured)
    if judged.verdict is Verdict.PASS:
        nixl_run.record.note_detail(f"KV blocks in storage: {judged.reason}")
    verdict(with_bounds(judged, bounded))
