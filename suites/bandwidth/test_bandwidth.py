# SPDX-License-Identifier: Apache-2.0
"""Do the right bytes arrive, over an accepted transport, and as fast as the profile says?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Link, Samples


@pytest.mark.nixl_check("bandwidth", level="quick")
def test_bandwidth(
    nixl_link: Link,
    block: int,
    batch: int,
    depth: int,
    measure: Callable[..., Samples],
    record_row: Callable[[Samples, Link], None],
    judge: Callable[[Samples], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Bandwidth, latency, integrity and transport of one row are as the profile expects."""
    samples = measure(nixl_link, block, batch=batch, depth=depth)
    record_row(samples, nixl_link)
    verdict(judge(samples))
