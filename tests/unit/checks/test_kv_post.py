# SPDX-License-Identifier: Apache-2.0
"""The time to post a request may grow with its descriptors, and not with their square; with the real NIXL, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.slow_post import slow_post

from pytest_nixl.checks.kv_cache import post
from pytest_nixl.checks.kv_cache.blocks import KvLayout
from pytest_nixl.checks.kv_cache.link import KvTraffic
from pytest_nixl.checks.kv_cache.post import COUNTS, PostTimes, judge_posts, measure_posts
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor


def posts(settings: Settings) -> PostTimes:
    hosts = [LocalHost(supervisor(), rank) for rank in range(2)]
    return measure_posts(hosts, settings, "UCX", "WRITE")


#: The seconds of the posts of 10,000 descriptors: linear, five times as long for each as of 100, and quadratic.
LINEAR, LIMIT, QUADRATIC = 5e-3, 30e-3, 0.6
GROWN = (
    "in a post of 10000 descriptors each takes 60 us, 100.0 times as long as the 0.6 us in a post of 100; the limit is "
    "5 times"
)
SLIGHTLY = GROWN.replace("60 us, 100.0", "3.01 us, 5.0")
EARLY = (
    "in a post of 100 descriptors each takes 11 us, 5.5 times as long as the 2 us in a post of 1; the limit is 5 times"
)


def of(many: float, contention: float = 0.0, hundred: float = 60e-6) -> PostTimes:
    """Return posts that were not measured in the order of their sizes."""
    return PostTimes({100: hundred, 1: 2e-6, 10_000: many}, contention)


@pytest.mark.parametrize(
    ("times", "verdict", "reason"),
    [
        ({"UCX READ": of(LIMIT)}, "PASS", "UCX READ: post of 100 in 60 us, 1 in 2 us, 10000 in 30000 us"),
        ({"UCX READ": of(30.1e-3)}, "FAIL", f"UCX READ: {SLIGHTLY}"),
        ({"UCX READ": of(LINEAR, hundred=1.1e-3)}, "FAIL", f"UCX READ: {EARLY}"),
        (
            {"UCX READ": of(QUADRATIC), "UCX WRITE": of(QUADRATIC, DISTURBED_CORES)}, "FAIL",
            f"UCX READ: {GROWN.partition('; the')[0]}; UCX WRITE: {GROWN}",
        ),
        (
            {"UCX READ": of(LINEAR, 3.0), "UCX WRITE": of(QUADRATIC, 0.8), "A WRITE": of(QUADRATIC, 0.1)},
            "INCONCLUSIVE",
            f"UCX WRITE: {GROWN.partition('; the')[0]}; A WRITE: {GROWN.partition('; the')[0]}, but other processes "
            "used 0.8 of the cores that the requests needed",
        ),
    ],
)  # fmt: skip
def test_a_post_that_grows_faster_than_its_descriptors_fails_unless_contention_may_explain_it(
    times: dict[str, PostTimes], verdict: str, reason: str
) -> None:
    judgement = judge_posts(times)
    assert (judgement.verdict.value, judgement.reason) == (verdict, reason)


def test_the_fastest_post_of_each_size_counts_and_the_largest_contention(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers are doubles, whose fastest posts take as many seconds as they have descriptors."""
    launch, link = MagicMock(), MagicMock()
    monkeypatch.setattr(post, "Launch", launch)
    monkeypatch.setattr(post, "KvLink", link)

    def measure(traffic: KvTraffic, **_: object) -> Any:
        seconds = {("post", 0): float(traffic.blocks)}
        contention = (0.0, 0.9 if traffic.blocks == 100 else 0.1, 0.0)
        return SimpleNamespace(step=lambda name, percent: seconds[name, percent], contention=contention)

    link.return_value.measure.side_effect = measure
    settings = make_settings(timeout=7.0)
    hosts: Any = ["a", "b", "c"]
    assert measure_posts(hosts, settings, "UCX", "READ") == PostTimes({1: 1.0, 100: 100.0, 10_000: 10_000.0}, 0.9)
    layout = KvLayout(1, 20_000, 64, 1)
    launch.assert_called_once_with(("a", "b"), settings, BACKENDS["UCX"], MemoryPair("DRAM", "DRAM"), 20_000 * 64)
    link.assert_called_once_with(launch.return_value, layout, "READ", 7.0)
    assert link.return_value.measure.mock_calls == [
        call(KvTraffic(count, merge=False), duration=0.0, least=20) for count in (1, 100, 10_000)
    ]
    launch.return_value.close.assert_called_once_with()


@pytest.mark.long
def test_posts_of_the_real_nixl_grow_with_their_descriptors(make_settings: Callable[..., Settings]) -> None:
    measured = posts(make_settings())
    assert tuple(measured.seconds) == COUNTS
    judgement = judge_posts({"UCX WRITE": measured})
    assert judgement.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), judgement.reason  # INCONCLUSIVE with contention


@pytest.mark.long
def test_a_quadratic_post_is_found(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With three nanoseconds for each pair of descriptors, a post of 10,000 takes 0.3 s more."""
    for name, value in slow_post(tmp_path / "slow", per_pair=3e-9).items():
        monkeypatch.setenv(name, value)
    judgement = judge_posts({"UCX WRITE": replace(posts(make_settings()), contention=0.0)})
    assert judgement.verdict is Verdict.FAIL, judgement.reason
    assert "in a post of 10000 descriptors each takes " in judgement.reason
