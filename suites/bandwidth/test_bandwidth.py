# SPDX-License-Identifier: Apache-2.0
"""Are bytes delivered, right, over an accepted transport, and as fast as the profile says?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl.gate.verdicts import Judgement
from pytest_nixl.link import Link
from pytest_nixl.record.samples import Samples


@pytest.mark.nixl_check("bandwidth")
def test_bandwidth(
    nixl_link: Link,
    block: int,
    batch: int,
    depth: int,
    another: Callable[[Samples], bool],
    record: Callable[[Samples], None],
    expect: Callable[[Samples], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Delivered bandwidth, latency, integrity and transport of one row are as the profile expects."""
    samples = nixl_link.measure_launches(block, batch=batch, depth=depth, another=another)
    record(samples)
    verdict(expect(samples))
