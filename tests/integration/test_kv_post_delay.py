# SPDX-License-Identifier: Apache-2.0
"""A delay of 1 us per descriptor in post is found with a bound of 10 %, and nothing is found where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from helpers.cli_run import repeats
from helpers.delay_comparison import DELAY, check_delay
from helpers.slow_post import slow_post

from pytest_nixl.checks.kv_cache.blocks import KvLayout
from pytest_nixl.checks.kv_cache.link import KvLink, KvTraffic
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: 1024 descriptors of 64 bytes in each request: posts of larger ones also copy, and differ more from launch to launch.
LAYOUT, BLOCKS = KvLayout(tensors=64, blocks=32, block_bytes=64), 16
#: The number of requests of a launch, so many that one of them is hardly disturbed on a busy machine.
REQUESTS = 200


def launch(settings: Settings, variables: Mapping[str, str]) -> float:
    """Return the descriptors per second in the fastest post of one launch."""
    hosts = LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)
    pair = Launch(
        hosts, settings, BACKENDS["UCX"], MemoryPair("DRAM", "DRAM"), LAYOUT.size, regions=LAYOUT.tensors,
        variables=(variables, {}),
    )  # fmt: skip
    with closing(pair):
        samples = KvLink(pair, LAYOUT, "WRITE", settings.timeout).measure(
            KvTraffic(BLOCKS), duration=0.3, least=REQUESTS
        )
    assert samples.corruption is None
    return samples.descriptors / samples.step("post", 0)


@pytest.mark.alone  # it compares times
@pytest.mark.long
@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize(
    "delay",
    # That equal launches are no loss is seen in test_delay_comparison.py.
    [pytest.param(0.0, id="healthy", marks=pytest.mark.whole), pytest.param(DELAY, id="delayed")],
)
def test_a_microsecond_per_descriptor_in_post_is_found_and_nothing_where_there_is_none(
    make_settings: Callable[..., Settings],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    delay: float,
    repeat: int,
) -> None:
    healthy = slow_post(tmp_path / "healthy")  # both have the same code in the worker
    other = slow_post(tmp_path / "other", per_descriptor=delay)
    sides = [partial(launch, make_settings(), variables) for variables in (healthy, other)]
    check_delay(*sides, delayed=bool(delay), repeat=repeat, capsys=capsys)
