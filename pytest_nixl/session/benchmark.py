# SPDX-License-Identifier: Apache-2.0
"""Rows as pytest-benchmark records them: its statistics, its files, its comparisons, over samples taken in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.model.samples import Samples, percentile

if TYPE_CHECKING:
    from pytest_nixl.measure.link import Link


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
    clock.load(rounds(samples))
    key = samples.key
    benchmark.fullname = str(key)
    benchmark.name = str(key)
    benchmark.group = f"{key.backend} {key.op} {key.memory}"
    benchmark.extra_info.update({**described(samples), **extra})
    benchmark.pedantic(_nothing, rounds=len(samples.windows), iterations=1, warmup_rounds=0)


def versions_of(link: Link) -> dict[str, str]:
    """Return what the workers of a link told of themselves; the target's only where it differs."""
    here, there = (
        {
            name: str(value)
            for name, value in end.worker.versions.items()
            if name not in ("pid", "host", "gpu", "nixl_module", "obstacle")
        }
        for end in (link.initiator, link.target)
    )
    return {**here, **{f"target_{name}": text for name, text in there.items() if here.get(name) != text}}


def rounds(samples: Samples) -> tuple[float, ...]:
    """Return what pytest-benchmark takes for a round: in each window, the seconds for one transfer."""
    return tuple(s / n for s, n in zip(samples.windows, samples.transfers, strict=True))


def described(samples: Samples) -> dict[str, object]:
    """Return what a record says of a row beside pytest-benchmark's statistics; ``launches`` are bytes per second."""
    percents = (50, 90, 99, 99.9) if samples.latencies else ()
    latencies = {f"p{percent:g}_us": percentile(samples.latencies, percent) * 1e6 for percent in percents}
    return {
        "key": str(samples.key),
        "GB/s": samples.bandwidth / 1e9,
        "Gb/s": samples.bandwidth * 8 / 1e9,
        "launches": list(samples.values),
        **latencies,
        "transfers": sum(samples.transfers),
        "transfer_bytes": samples.transfer_bytes,
        "others_cores": list(samples.others),
        "transports": list(samples.transports),
        "payload_bytes": sum(samples.transfers) * samples.transfer_bytes,
        "counted_bytes": _counted(samples),
    }


def _counted(samples: Samples) -> dict[str, int]:
    """Bytes that each device of the initiator's host carried of the payload, as its own counters say."""
    carriers = samples.counted.carriers(samples.transports) if samples.counted is not None else ()
    return {item.device: item.carried for item in carriers}


def _nothing() -> None:
    """The work was done in the workers."""
