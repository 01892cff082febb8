# SPDX-License-Identifier: Apache-2.0
"""Do the right bytes arrive, over an accepted transport, and as fast as the profile says?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Link

from ..conftest import Rows


@pytest.mark.nixl_check("bandwidth", level="quick")
def test_bandwidth(
    nixl_link: Link,
    block: int,
    batch: int,
    depth: int,
    nixl_rows: Rows,
    verdict: Callable[[Judgement], None],
) -> None:
    """Bandwidth, latency, integrity and transport of one row are as the profile expects."""
    samples = nixl_rows.measure(nixl_link, block, batch=batch, depth=depth)
    nixl_rows.record(samples, nixl_link)
    verdict(nixl_rows.judge(samples))
