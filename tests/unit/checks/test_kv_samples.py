# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks as samples of a row: windows, latencies from the intended start, and several launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption
from pytest_nixl.checks.kv_cache.samples import STEPS, KvSamples, RequestTimes
from pytest_nixl.model.device_counters import CarrierBytes, LossyDevice
from pytest_nixl.model.row_key import RowKey

KEY = RowKey.parse("UCX/WRITE/DRAM:DRAM/1KiB/batch4/depth1/0-1/kv=scattered-prepped,model=generic,tokens=64")
#: make, post, transfer, notify, release.
TIMES = (0.1, 0.2, 0.3, 0.4, 0.5)


def samples(*requests: RequestTimes, alone: bool = True) -> KvSamples:
    return KvSamples(
        BlockOrder.SCATTERED, 4096, 4, (0.25,), (requests,), alone=alone, corruption=None, transports=("cma/memory",),
        counted=CarrierBytes((), 4096 * len(requests)), contention=(0.0,),
    )  # fmt: skip


def test_a_request_lasts_until_its_notification_was_there() -> None:
    """Its latency is counted from its intended start."""
    measured = samples(RequestTimes(0.0, 0.0, TIMES), RequestTimes(1.5, 2.5, tuple(2 * time_ for time_ in TIMES)))
    assert measured.requests == pytest.approx((1.0, 3.0))
    assert measured.bandwidth == pytest.approx((4096 + 4096 / 3) / 2)
    assert measured.descriptors_per_second == pytest.approx(measured.bandwidth / 1024)
    assert [measured.step(name) for name in STEPS] == list(TIMES)
    row = measured.row(KEY)
    assert row.windows == measured.requests
    assert row.latencies == measured.requests
    assert (row.transfers, row.transfer_bytes, row.bandwidth) == ((1, 1), 4096, measured.bandwidth)


def test_requests_in_flight_together_are_one_window() -> None:
    """Two requests that end together would make the windows between them infinitely fast."""
    together = [RequestTimes(0.0, 0.0, TIMES), RequestTimes(0.0, 0.0, TIMES), RequestTimes(1.0, 1.0, TIMES)]
    row = samples(*together, alone=False).row(KEY)
    assert row.windows == pytest.approx((2.0,))
    assert row.transfers == (3,)
    assert row.bandwidth == pytest.approx(3 * 4096 / 2)


def test_launches_are_kept_apart() -> None:
    first = samples(RequestTimes(0.0, 0.0, TIMES), RequestTimes(1.0, 1.0, TIMES))
    wrong = KvCorruption("after the timed requests", 1, 1, "layer 0 K, block 1, offset 2", 3, 4, "")
    slow = tuple(4 * time_ for time_ in TIMES)
    second = replace(samples(RequestTimes(0.0, 0.0, slow)), corruption=wrong, prepares=(0.75,), contention=(0.5,))
    first, second = (
        replace(launch, lossy=(LossyDevice("node-a", "rxe0", packets, {"rcvd_seq_err": packets // 100}),))
        for launch, packets in ((first, 100), (second, 300))
    )
    both = first.with_launch(second)
    row = both.row(KEY)
    assert row.windows_of_launches == (2, 1)
    assert row.values == pytest.approx((4096.0, 1024.0))
    assert row.contention == (0.0, 0.5)
    assert both.prepare == 0.5
    assert str(row.corruption).endswith("layer 0 K, block 1, offset 2: expected 0x03, found 0x04")
    assert both.counted.payload == 3 * 4096
    assert row.lossy == (LossyDevice("node-a", "rxe0", 400, {"rcvd_seq_err": 4}),)
