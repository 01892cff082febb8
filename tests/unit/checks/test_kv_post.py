# SPDX-License-Identifier: Apache-2.0
"""The time to post a request may grow with its descriptors, and not with their square; with the real NIXL, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.slow_post import slow_post

from pytest_nixl.checks.kv_cache.post import COUNTS, PostTimes, judge_posts, measure_posts
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor


def posts(settings: Settings) -> PostTimes:
    hosts = [LocalHost(supervisor(), rank) for rank in range(2)]
    return measure_posts(hosts, settings, "UCX", "WRITE")


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ({1: 2e-6, 100: 60e-6, 10_000: 5e-3}, Verdict.PASS),
        ({1: 2e-6, 100: 60e-6, 10_000: 30e-3}, Verdict.PASS),  # exactly five times
        ({1: 2e-6, 100: 60e-6, 10_000: 30.1e-3}, Verdict.FAIL),
        ({1: 2e-6, 100: 1.1e-3, 10_000: 5e-3}, Verdict.FAIL),
    ],
)
def test_a_post_that_grows_faster_than_its_descriptors_fails(seconds: dict[int, float], verdict: Verdict) -> None:
    assert judge_posts({"UCX WRITE": PostTimes(seconds, 0.0)}).verdict is verdict


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(5e-3, Verdict.PASS), (0.6, Verdict.INCONCLUSIVE)], ids=["linear", "quadratic"]
)
def test_contention_may_explain_a_slow_post_but_not_a_fast_one(seconds: float, verdict: Verdict) -> None:
    judgement = judge_posts({"UCX WRITE": PostTimes({1: 2e-6, 100: 60e-6, 10_000: seconds}, 0.8)})
    assert judgement.verdict is verdict
    assert ("other processes used 0.8 of the cores" in judgement.reason) is (verdict is Verdict.INCONCLUSIVE)


def test_the_message_names_counts_times_and_the_limit() -> None:
    healthy = PostTimes({1: 2e-6, 100: 60e-6, 10_000: 5e-3}, 0.0)
    judgement = judge_posts({"UCX READ": healthy, "UCX WRITE": PostTimes({1: 2e-6, 100: 60e-6, 10_000: 0.6}, 0.2)})
    assert judgement.reason == (
        "UCX WRITE: in a post of 10000 descriptors each takes 60 us, 100.0 times as long as the 0.6 us in a post of "
        "100; the limit is 5 times"
    )
    assert judge_posts({"UCX READ": healthy}).reason == "UCX READ: post of 1 in 2 us, 100 in 60 us, 10000 in 5000 us"


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
