# SPDX-License-Identifier: Apache-2.0
"""Links that are measured at the same time: which pairs, when one starves, and what is said of them.

The links are doubles, because real ones give no known bandwidths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.judge import concurrent
from pytest_nixl.judge.concurrent import at_once, corrupt, disjoint, disturbance, measure_at_once, spread, starving
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Seconds that a busy machine may take.
PATIENCE = 60


@pytest.mark.parametrize(("ranks", "count"), [(62, 31), (66, 32)])
def test_at_most_32_pairs_are_measured(ranks: int, count: int) -> None:
    pairs = disjoint(ranks)
    assert len(pairs) == count
    assert pairs[0] == (0, ranks // 2)
    assert pairs[-1] == (count - 1, ranks // 2 + count - 1)


def test_a_link_starves_below_half_of_the_median() -> None:
    assert [starving(rates) for rates in ([4, 4, 4, 1.99], [1, 4, 4])] == [3, 0]
    assert [starving(rates) for rates in ([4, 4, 4, 2], [3, 4, 4, 9], [4])] == [None] * 3


@pytest.mark.parametrize(
    ("tries", "measured", "index", "slowest"),
    [
        ([[4, 4, 4]], 1, None, 0),
        ([[1, 4, 4], [4, 1, 4]], 2, None, 1),
        ([[1, 4, 4], [1, 4, 4], [4, 4, 3]], 3, None, 2),
        ([[4, 1, 4], [4, 1, 4], [4, 1.5, 4]], 3, 1, 1),
    ],
)
def test_a_link_starves_if_three_measurements_agree(
    tries: list[list[float]], measured: int, index: int | None, slowest: int
) -> None:
    measurements: Iterator[list[float]] = iter([*tries, [9.0, 9.0, 9.0]])
    judgement = spread(lambda: next(measurements))
    assert len(list(measurements)) == 1 + len(tries) - measured
    assert (judgement.starving, judgement.slowest, judgement.rates) == (index, slowest, tuple(tries[measured - 1]))
    assert judgement.total == sum(tries[measured - 1])


def samples(bandwidth: float = 1e9, corruption: object = None, contention: tuple[float, ...] = ()) -> Any:
    return SimpleNamespace(bandwidth=bandwidth, corruption=corruption, contention=contention)


def link(pair: tuple[int, int], measure: Callable[..., Any] | None = None) -> Any:
    return SimpleNamespace(key=lambda block: SimpleNamespace(pair=pair), measure=measure)


def test_a_wrong_byte_is_named_with_its_link() -> None:
    names = ["a", "b", "c"]
    assert corrupt("rows", names, [samples()] * 3) is None
    twice = [*[samples()] * 4, samples(corruption="3 bytes are wrong"), samples(corruption="other")]
    assert corrupt("rows", names, twice) == Judgement(
        Verdict.CORRUPT,
        "rows of b, measured at the same time as 2 others: 3 bytes are wrong",
        "run that pair alone; check the memory and NICs of both hosts",
    )


STARVES = (
    "rows of 64KiB, 3 pairs at once: 9 GB/s together, from 1 (ranks 1-4) to 4 GB/s: that pair starves while the others "
    "are measured"
)


@pytest.mark.parametrize(
    ("measured", "verdict", "reason", "remedy"),
    [
        ((samples(1e9), samples(4e9), samples(4e9), samples(4e9), samples(3e9), samples(2e9)), Verdict.PASS,
         "rows of 64KiB, 3 pairs at once: 9 GB/s together, from 2 (ranks 2-5) to 4 GB/s", ""),
        ((samples(4e9), samples(1e9), samples(4e9)), Verdict.WARN, STARVES,
         "check what these two ranks share with others: the uplink of a switch, a host, a NIC"),
        ((samples(4e9), samples(1e9, contention=(0.94,)), samples(4e9)), Verdict.INCONCLUSIVE,
         f"{STARVES}, but other processes used up to 0.9 of the cores that the links need",
         "stop other processes on the host, and run this check again"),
        ((samples(4e9, "bad"), samples(4e9), samples(4e9)), Verdict.CORRUPT,
         "rows of ranks 0-3, measured at the same time as 2 others: bad",
         "run that pair alone; check the memory and NICs of both hosts"),
    ],
)  # fmt: skip
def test_pairs_at_once_are_judged_by_the_one_that_starves(
    measured: tuple[Any, ...], verdict: Verdict, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[int, int]] = []

    def measure(links: Any, block: int, depth: int) -> list[Any]:
        start = 3 * len(requests) % len(measured)
        requests.append((block, depth))
        return list(measured[start : start + 3])

    monkeypatch.setattr(concurrent, "measure_at_once", measure)
    assert at_once("rows", [link(pair) for pair in disjoint(6)], 65536, 4) == Judgement(verdict, reason, remedy)
    assert set(requests) == {(65536, 4)}


def test_the_most_contention_of_any_link_is_told() -> None:
    links = [samples(contention=shares) for shares in ((0.1,), (0.2, 0.94, 0.3))]
    assert disturbance(links) == "other processes used up to 0.9 of the cores that the links need"
    assert disturbance([samples(), samples(contention=(0.3, 0.2))]) == disturbance([samples()]) == ""


def test_links_begin_together_and_each_has_its_answer() -> None:
    def measure(number: int) -> Callable[..., Any]:
        def measure_link(block: int, *, depth: int, beside: Callable[[float], object], links: Any) -> Any:
            beside(PATIENCE)  # returns only if all links are here
            return samples(number * block * depth)

        return measure_link

    link_samples = measure_at_once([link((0, 1), measure(number)) for number in range(1, 4)], 8, 2)
    assert [result.bandwidth for result in link_samples] == [16, 32, 48]


def test_the_error_of_one_link_ends_the_wait_of_the_others_and_is_the_one_that_is_raised() -> None:
    def fails(block: int, *, depth: int, beside: Callable[[float], object], links: Any) -> Any:
        raise ValueError("the worker died")

    def waits(block: int, *, depth: int, beside: Callable[[float], object], links: Any) -> Any:
        began = time.monotonic()
        try:
            beside(PATIENCE)
        finally:
            waited.append(time.monotonic() - began)
        raise AssertionError("it must not begin")

    waited: list[float] = []

    for order in ([waits, fails], [fails, waits]):
        with pytest.raises(ValueError, match="the worker died"):
            measure_at_once([link((0, 1), action) for action in order], 8, 2)
    assert len(waited) == 2
    assert max(waited) < PATIENCE, "it waits no longer than until the error"
