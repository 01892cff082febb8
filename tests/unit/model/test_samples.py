# SPDX-License-Identifier: Apache-2.0
"""Row keys, and the values that are computed from the samples of a launch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, Corruption, Samples, percentile

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "VRAM"), 65536)
LAUNCH = Samples(KEY, (1.0, 2.0, 0.5), (10, 30, 1), (3e-6, 1e-6, 2e-6))


def test_a_key_prints_everything_that_was_requested() -> None:
    assert str(KEY) == "UCX/WRITE/DRAM:VRAM/64KiB/batch1/depth1/0-1"
    assert str(replace(KEY, block=1000, batch=8, depth=4, pair=(2, 5))) == (
        "UCX/WRITE/DRAM:VRAM/1000B/batch8/depth4/2-5"
    )
    assert str(replace(KEY, devices=DevicePair(0, 3))) == "UCX/WRITE/DRAM:VRAM@3/64KiB/batch1/depth1/0-1"
    between = replace(KEY, memory=MemoryPair("VRAM", "VRAM"), devices=DevicePair(1, 2))
    assert str(between) == "UCX/WRITE/VRAM@1:VRAM@2/64KiB/batch1/depth1/0-1"


@pytest.mark.parametrize(
    ("part", "value"),
    [("backend", "LIBFABRIC"), ("op", "READ"), ("memory", MemoryPair("VRAM", "DRAM")), ("block", 65537), ("batch", 2),
     ("depth", 2), ("pair", (1, 0)), ("devices", DevicePair(0, 0)), ("devices", DevicePair(0, 1)),
     ("variant", (("threads", "4"),))],
)  # fmt: skip
def test_different_keys_print_differently(part: str, value: object) -> None:
    other = RowKey(**{**{item.name: getattr(KEY, item.name) for item in fields(KEY)}, part: value})
    assert str(other) != str(KEY)
    assert other != KEY


def test_a_key_contains_only_what_was_requested() -> None:
    requested = ["backend", "op", "memory", "block", "batch", "depth", "pair", "devices", "variant"]
    assert [item.name for item in fields(RowKey)] == requested


def test_a_transfer_moves_a_batch_of_blocks() -> None:
    assert LAUNCH.transfer_bytes == 65536
    assert replace(LAUNCH, key=replace(KEY, batch=8)).transfer_bytes == 8 * 65536


def test_the_rate_of_a_window_is_its_bytes_divided_by_its_time() -> None:
    assert LAUNCH.rates == (655360.0, 983040.0, 131072.0)
    assert replace(LAUNCH, key=replace(KEY, batch=2)).rates == (1310720.0, 1966080.0, 262144.0)


def test_depth_does_not_change_the_bytes_of_a_transfer() -> None:
    assert replace(LAUNCH, key=replace(KEY, depth=16)).rates == LAUNCH.rates


def test_the_bandwidth_is_the_median_over_the_windows() -> None:
    assert LAUNCH.bandwidth == 655360.0
    assert replace(LAUNCH, windows=(1.0, 2.0), transfers=(10, 30)).bandwidth == (655360.0 + 983040.0) / 2


def test_a_window_without_its_count_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _ = replace(LAUNCH, transfers=(1, 2)).rates


def test_percentiles_are_computed_from_the_latencies() -> None:
    assert (LAUNCH.p50, LAUNCH.p99) == (2e-6, 3e-6)


@pytest.mark.parametrize(("percent", "expected"), [(0, 15), (5, 15), (30, 20), (40, 20), (50, 35), (99, 50), (100, 50)])
def test_a_percentile_uses_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([50, 15, 40, 20, 35], percent) == expected


@pytest.mark.parametrize("percent", [50, 99])
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(percent: int) -> None:
    for count in range(1, 1201):
        smallest = int(percentile(range(1, count + 1), percent))
        assert smallest * 100 >= percent * count > (smallest - 1) * 100


@pytest.mark.parametrize("launches", [(), (0,), (1,), (0, 1), (1, 0), (0, 0)])
def test_one_disturbed_launch_disturbs_a_row(launches: tuple[int, ...]) -> None:
    waits, cores = (tuple(2 * bound * launch for launch in launches) for bound in (BUSY_GPU, DISTURBED_CORES))
    assert replace(LAUNCH, gpu_waits=waits).gpu_is_busy is any(launches)
    assert replace(LAUNCH, gpu_waits=waits).disturbed is replace(LAUNCH, contention=cores).disturbed is any(launches)


def test_a_corruption_is_described_in_one_sentence() -> None:
    assert str(Corruption("after warm-up", 2, 4096, 9, 0x0F, 0xA0)) == (
        "2 of 4096 bytes are wrong after warm-up, the first at offset 9: expected 0x0f, found 0xa0"
    )
