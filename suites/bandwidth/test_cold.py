# SPDX-License-Identifier: Apache-2.0
"""How fast are transfers whose bytes are in no cache of the processor?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from pytest_nixl import Judgement, Launches, RowKey, Run, Settings
from pytest_nixl.checks.bandwidth.cold_rows import cold_link, cold_rows

from ..conftest import Rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    # None: the test says why there is nothing to measure.
    keys: Mapping[str, RowKey | None] = (cold_rows(run) if run.usable else {}) or {"None": None}
    metafunc.parametrize("cold_row", keys.values(), ids=keys)


@pytest.mark.nixl_check("bandwidth-cold", level="extended")
def test_bandwidth_of_bytes_in_no_cache(
    cold_row: RowKey | None,
    nixl_settings: Settings,
    nixl_launches: Launches,
    nixl_rows: Rows,
    verdict: Callable[[Judgement], None],
) -> None:
    """Integrity and transport of a row whose transfers walk a buffer larger than the last-level cache are right."""
    link = cold_link(cold_row, nixl_settings, nixl_launches)
    assert cold_row is not None
    samples = nixl_rows.measure(link, cold_row.block, batch=cold_row.batch, depth=cold_row.depth)
    nixl_rows.record(samples, link)
    verdict(nixl_rows.judge(samples))
