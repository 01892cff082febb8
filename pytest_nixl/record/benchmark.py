# SPDX-License-Identifier: Apache-2.0
"""Rows as pytest-benchmark records them: its statistics, its files, its comparisons, over samples taken in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pytest_nixl.record.samples import Samples


class ReplayClock:
    """A timer for pytest-benchmark that tells the times measured elsewhere.

    pytest-benchmark reads its timer before and after each round; round ``i`` then lasts ``seconds[i]``.
    """

    __name__ = "pytest_nixl_replay_clock"

    def __init__(self) -> None:
        self._ticks: Iterator[float] = iter(())
        self._now = 0.0

    def load(self, seconds: tuple[float, ...]) -> None:
        """Take the rounds to replay."""
        self._ticks = iter([tick for second in seconds for tick in (0.0, second)])

    def __call__(self) -> float:
        self._now += next(self._ticks, 0.0)
        return self._now


#: On an item: the clock that its ``benchmark`` fixture reads.
CLOCK = pytest.StashKey[ReplayClock]()


def prepare_row(item: pytest.Item) -> None:
    """Make a test that measures a row a benchmark of pytest-benchmark, with a clock of its own."""
    item.stash[CLOCK] = ReplayClock()
    item.add_marker(pytest.mark.benchmark(timer=item.stash[CLOCK]))
    fixtures: list[str] = getattr(item, "fixturenames", [])
    if item.config.pluginmanager.has_plugin("benchmark") and "benchmark" not in fixtures:
        # By name, so that pytest-benchmark's own options know the test for a benchmark.
        fixtures.append("benchmark")


def record_samples(benchmark: Any, clock: ReplayClock, samples: Samples, extra: Mapping[str, object]) -> None:
    """Hand a row to pytest-benchmark.

    A round is one window, and its time the seconds for one transfer in it: the median round is the row's delivered
    bandwidth. ``fullname`` is the row's key, so that runs from a clone and from a wheel compare.
    """
    clock.load(tuple(s / n for s, n in zip(samples.windows, samples.transfers, strict=True)))
    key = samples.key
    benchmark.fullname = str(key)
    benchmark.name = str(key)
    benchmark.group = f"{key.backend} {key.op} {key.memory}"
    benchmark.extra_info.update(
        {
            "key": str(key),
            "GB/s": samples.bandwidth / 1e9,
            "Gb/s": samples.bandwidth * 8 / 1e9,
            "p50_us": samples.p50 * 1e6,
            "p99_us": samples.p99 * 1e6,
            "transfers": sum(samples.transfers),
            "transfer_bytes": samples.transfer_bytes,
            "transports": list(samples.transports),
            **extra,
        }
    )
    benchmark.pedantic(_nothing, rounds=len(samples.windows), iterations=1, warmup_rounds=0)


def _nothing() -> None:
    """The work was done in the workers."""
