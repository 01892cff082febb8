# SPDX-License-Identifier: Apache-2.0
"""A delay of 1 us per descriptor is found with a bound of 10 %, and nothing is found where there is none.

NIXL itself cannot be made to need longer, so that the worker of one side waits. Both sides are launched in turn, as two
runs are compared. The value of a launch is that of its fastest call, which no other process interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from operator import add
from pathlib import Path

import pytest
from helpers.cli_run import repeats
from helpers.slow_post import slow_post

from pytest_nixl.checks.kv_cache.blocks import KvLayout
from pytest_nixl.checks.kv_cache.link import KvLink, KvTraffic
from pytest_nixl.judge.regression import compare_launches
from pytest_nixl.judge.run_comparison import wants_launch
from pytest_nixl.measure.interleaved import take_turns
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import COMPARED_LAUNCHES, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

# They compare times, and CI would wait for them alone: there tests/unit/checks/test_kv_post.py finds a post that grows
# too fast, and tests/unit/session/test_baseline.py a slower image.
pytestmark = [pytest.mark.alone, pytest.mark.whole, pytest.mark.soak]

#: The planted delay of each descriptor in seconds, and the loss up to which a launch is unchanged.
DELAY, MARGIN = 1e-6, 0.10
#: 1024 descriptors of 64 bytes in each request: posts of larger ones also copy, and differ more from launch to launch.
LAYOUT, BLOCKS = KvLayout(tensors=64, blocks=32, block_bytes=64), 16
#: The requests of a launch, so many that one of them is hardly disturbed on a busy machine.
CALLS = 200


def post_in_launch(settings: Settings, variables: Mapping[str, str]) -> float:
    """Return the descriptors per second in the fastest post of one launch."""
    hosts = LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)
    pair = Launch(
        hosts, settings, BACKENDS["UCX"], MemoryPair("DRAM", "DRAM"), LAYOUT.size, regions=LAYOUT.tensors,
        variables=(variables, {}),
    )  # fmt: skip
    with closing(pair):
        samples = KvLink(pair, LAYOUT, "WRITE", settings.timeout).measure(KvTraffic(BLOCKS), duration=0.3, least=CALLS)
    assert samples.corruption is None
    return samples.descriptors / samples.step("post", 0)


def compare(healthy: Callable[[], float], other: Callable[[], float]) -> Verdict:
    """Compare as many launches as a comparison of two runs does."""

    def more(before: tuple[float, ...], now: tuple[float, ...]) -> bool:
        return len(now) < COMPARED_LAUNCHES or wants_launch(before, now, MARGIN)

    before, now = take_turns(lambda: (healthy(),), lambda: (other(),), add, more)
    return compare_launches(before, now, MARGIN).verdict


@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize("delay", [pytest.param(0.0, id="healthy"), pytest.param(DELAY, id="delayed")])
def test_a_microsecond_per_descriptor_in_post_is_found_and_nothing_where_there_is_none(
    make_settings: Callable[..., Settings], tmp_path: Path, delay: float, repeat: int
) -> None:
    healthy = slow_post(tmp_path / "healthy")  # both have the same code in the worker
    other = slow_post(tmp_path / "other", per_descriptor=delay)
    settings = make_settings()
    verdict = compare(lambda: post_in_launch(settings, healthy), lambda: post_in_launch(settings, other))
    assert (verdict is Verdict.REGRESSED) is bool(delay)
