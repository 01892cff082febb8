# SPDX-License-Identifier: Apache-2.0
"""The values that are computed from the samples of a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.model.device_counters import Carrier, CarrierBytes, LossyDevice
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import BUSY_GPU, DISTURBED_CORES, Samples, percentile

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "VRAM"), 65536)
LAUNCH = Samples(KEY, (1.0, 2.0, 0.5), (10, 30, 1), (3e-6, 1e-6, 2e-6))


def test_the_rate_of_a_window_is_its_bytes_divided_by_its_time() -> None:
    assert LAUNCH.rates == (655360.0, 983040.0, 131072.0)
    assert replace(LAUNCH, key=replace(KEY, batch=2)).rates == (1310720.0, 1966080.0, 262144.0)


def test_the_bandwidth_is_the_median_over_the_windows() -> None:
    assert LAUNCH.bandwidth == 655360.0
    assert replace(LAUNCH, windows=(1.0, 2.0), transfers=(10, 30)).bandwidth == (655360.0 + 983040.0) / 2
    launches = replace(LAUNCH, windows=(1.0,) * 5, transfers=(1, 3, 2, 4, 9), windows_of_launches=(3, 1, 1))
    assert (launches.values, launches.bandwidth) == ((131072.0, 262144.0, 589824.0), 262144.0)


def test_a_window_without_its_count_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _ = replace(LAUNCH, transfers=(1, 2)).rates


def test_percentiles_are_computed_from_the_latencies() -> None:
    assert (LAUNCH.p50, LAUNCH.p99) == (2e-6, 3e-6)


@pytest.mark.parametrize("percent", [1, 50, 99, 100])
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(percent: int) -> None:
    for count in range(1, 1201):
        smallest = int(percentile(range(count, 0, -1), percent))
        assert smallest * 100 >= percent * count > (smallest - 1) * 100


@pytest.mark.parametrize("launches", [(), (0,), (1,), (0, 1), (1, 0), (0, 0)])
def test_one_disturbed_launch_disturbs_a_row(launches: tuple[int, ...]) -> None:
    waits, cores = (tuple(2 * bound * launch for launch in launches) for bound in (BUSY_GPU, DISTURBED_CORES))
    assert replace(LAUNCH, gpu_waits=waits).gpu_is_busy is any(launches)
    assert replace(LAUNCH, gpu_waits=waits).disturbed is replace(LAUNCH, contention=cores).disturbed is any(launches)


def test_the_samples_of_two_launches_are_one_after_the_other() -> None:
    first = replace(
        LAUNCH, transports=("a", "b"), corruption="wrong", contention=(0.1,), gpu_waits=(1e-5,), obstacle="o",
        counted=CarrierBytes((Carrier("eth0", "net", 5),), 10), lossy=(LossyDevice("h", "d", 5, {"x": 1}),),
    )  # fmt: skip
    second = replace(
        first, windows=(4.0,), transfers=(7,), latencies=(9e-6,), transports=("b", "c"), corruption="later",
        contention=(0.2,), gpu_waits=(2e-5,), obstacle="p",
    )  # fmt: skip
    both = replace(
        first, windows=(*LAUNCH.windows, 4.0), transfers=(*LAUNCH.transfers, 7), latencies=(*LAUNCH.latencies, 9e-6),
        transports=("a", "b", "c"), contention=(0.1, 0.2), gpu_waits=(1e-5, 2e-5), windows_of_launches=(3, 1),
        counted=CarrierBytes((Carrier("eth0", "net", 10),), 20), lossy=(LossyDevice("h", "d", 10, {"x": 2}),),
    )  # fmt: skip
    assert first.with_launch(second) == both
    assert both.with_launch(LAUNCH) == replace(
        both, windows=both.windows + LAUNCH.windows, transfers=both.transfers + LAUNCH.transfers,
        latencies=both.latencies + LAUNCH.latencies, windows_of_launches=(3, 1, 3), counted=None,
    )  # fmt: skip
    assert replace(first, corruption=None).with_launch(second).corruption == "later"
    assert LAUNCH.with_launch(first).counted is None
