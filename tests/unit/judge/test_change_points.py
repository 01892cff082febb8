# SPDX-License-Identifier: Apache-2.0
"""Change points of a row's history: artificial changes are found, and none is found in a history without a change."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest
from helpers.records import KEY, record
from numpy.typing import NDArray

from pytest_nixl.judge import change_points
from pytest_nixl.judge.change_points import FEWEST_RUNS, steps
from pytest_nixl.report.history import courses, lines, of_one_machine
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

Values = NDArray[numpy.float64]


def noise(seed: int, count: int, spread: float) -> Values:
    """Return a heavy-tailed history around 1, similar to real rows."""
    return numpy.asarray(numpy.exp(numpy.random.default_rng(seed).standard_t(3, count) * spread * 0.6))


@pytest.mark.parametrize("spread", [0.002, 0.01, 0.08], ids=["quiet", "usual", "noisy"])
def test_a_history_without_a_change_has_no_change_point(spread: float) -> None:
    """At most 2 of 60 histories of 40 runs have a false change point."""
    assert sum(bool(steps((1e9 * noise(seed, 40, spread)).tolist())) for seed in range(60)) <= 2


@pytest.mark.parametrize(("spread", "ratio"), [(0.002, 0.93), (0.01, 0.9), (0.08, 0.7), (0.002, 1.1)])
def test_a_change_is_found_at_its_run(spread: float, ratio: float) -> None:
    hits = 0
    for seed in range(20):
        values = noise(seed, 40, spread)
        values[25:] *= ratio
        [*all_] = steps((1e9 * values).tolist())
        hits += len(all_) == 1 and abs(all_[0].place - 25) <= 1 and all_[0].ratio == pytest.approx(ratio, rel=0.1)
    assert hits >= 18


@pytest.mark.parametrize("spread", [0.01, 0.08], ids=["quiet", "noisy"])
def test_a_history_of_4000_runs_takes_seconds(spread: float) -> None:
    """A search over all pairs of runs would take hours. Only this process's CPU time is measured."""
    values = noise(5, 4000, spread)
    values[1000:] *= 0.85
    values[3900:] *= 1.3
    start = time.process_time()
    changes = steps((1e9 * values).tolist())
    assert time.process_time() - start < 60
    assert [round(step.place, -1) for step in changes] == [1000, 3900]
    assert steps((1e9 * noise(6, 4000, spread)).tolist()) == []


def test_a_change_is_found_anywhere_in_a_long_history() -> None:
    """The positions are around the borders of the windows of the search."""
    for place in (3, 127, 128, 129, 255, 256, 383, 384, 385, 512, 640, 1020, 1197):
        values = noise(7, 1200, 0.002)
        values[place:] *= 0.9
        assert [step.place for step in steps((1e9 * values).tolist())] == [place]


def test_two_changes_are_both_found() -> None:
    values = noise(3, 45, 0.003)
    values[15:] *= 0.8
    values[30:] *= 1.25
    assert [(step.place, round(step.ratio, 1)) for step in steps(values.tolist())] == [(15, 0.8), (30, 1.2)]


def history(**lost: Any) -> list[RecordedRun]:
    """Return runs of twelve weeks. The last five have a newer UCX and are 12 % slower."""
    return [
        parse_recorded(
            record(
                f"nixl:{week // 2}", {KEY: [(0.88 if week >= 7 else 1.0) * (1 + 0.001 * (week % 3))] * 3}, week=week,
                versions={"ucx": "1.20.0" if week >= 7 else "1.19.0"}, **(lost if week >= 7 else {}),
            ),
            f"{week}.json",
        )
        for week in range(12)
    ]  # fmt: skip


def test_a_change_is_reported_with_its_image_and_the_differences() -> None:
    runs = history()
    shown = [line.text for line in lines(runs, courses(runs))]
    assert shown == [
        "12 runs from 2026-03-02 03:00 to 2026-05-18 03:00 UTC",
        f"{KEY}: 12 runs, 1 to 0.882 GB/s, 1 change",
        "    -12.0 % (1 to 0.881 GB/s) from nixl:3 of 2026-04-20 03:00 UTC on",
        "        versions ucx: 1.19.0 -> 1.20.0",
    ]
    other = history(extra={"transports": ["tcp/eth0", "cma"]})
    assert [line.text for line in lines(other, courses(other))][2:] == [
        *shown[2:], "        transport: tcp/eth0 -> tcp/eth0+cma"
    ]  # fmt: skip
    assert [line.text for line in lines(runs[-2:], courses(runs[-2:]))] == [
        "2 runs from 2026-05-11 03:00 to 2026-05-18 03:00 UTC",
        f"{KEY}: 2 runs, 0.881 to 0.882 GB/s; finding a change needs at least 6 runs",
    ]


def test_runs_of_another_kind_of_machine_are_left_out_and_reported() -> None:
    history_of_runs = history(cores=4096)
    runs, remark = of_one_machine(history_of_runs)
    assert len(runs) == 5
    assert len(remark) == 7
    cores = history_of_runs[0].provenance.host["cores"]
    assert remark[0] == f"left out: 0.json was measured on another kind of machine (cores: {cores} -> 4096)"


def test_the_best_split_has_the_largest_distance_of_all_pairs() -> None:
    values = [*noise(1, 9, 0.02).tolist(), *(1.1 * noise(2, 14, 0.05)).tolist()]

    def distance(left_half: list[float], second: list[float], pairs: int) -> float:
        return sum(abs(a - b) for a in left_half for b in second) / pairs

    def energy(place: int) -> float:
        left_half, second = values[:place], values[place:]
        n, m = len(left_half), len(second)
        within = distance(left_half, left_half, n * (n - 1)) + distance(second, second, m * (m - 1))
        return n * m / (n + m) * (2 * distance(left_half, second, n * m) - within)

    expected = max(range(FEWEST_RUNS, len(values) - FEWEST_RUNS + 1), key=energy)
    place, best_distance = change_points._best_split(*change_points._levels(numpy.array(values)))
    assert place == expected
    assert best_distance == pytest.approx(energy(expected))


@pytest.mark.parametrize("seed", range(5))
def test_a_window_is_partitioned_as_by_ruptures(seed: int) -> None:
    """The library takes most of a second to import, and finds the same partition."""
    import ruptures

    chance = numpy.random.default_rng(seed)
    values = numpy.log(1e9 * noise(seed, int(chance.integers(2 * FEWEST_RUNS, 513)), 0.01))
    for _ in range(seed):
        values[chance.integers(len(values)) :] += chance.normal(0, 0.03)
    penalty = 0.01**2 * float(numpy.log(len(values)))  # so small that noise is partitioned, too
    search = ruptures.KernelCPD(kernel="linear", min_size=FEWEST_RUNS, jump=1).fit(values)
    assert change_points._partition(values, penalty) == search.predict(pen=penalty)[:-1]


def test_a_value_is_a_spike_by_the_five_around_it() -> None:
    assert change_points._without_spikes([0, 0, 0, 9, 9, 0, 0, 0], 1) == [0, 0, 0, 1, 1, 0, 0, 0]
    assert change_points._without_spikes([0, 0, 0, 0, 9, 9, 9, 9], 1) == [0, 0, 0, 0, 9, 9, 9, 9], "a step is none"
    assert change_points._without_spikes([0, -9, 0], 1) == [0, -1, 0]


@pytest.mark.parametrize("spread", [0.004, 0.01])
@pytest.mark.parametrize(("height", "places"), [(0.98, []), (1.02, [20])])
def test_a_change_must_explain_five_variances_times_the_logarithm_of_the_runs(
    spread: float, height: float, places: list[int]
) -> None:
    """A step of h in the middle of n runs explains n h²/4 of the squares."""
    runs = 40
    step = height * float(numpy.sqrt(5 * spread**2 * numpy.log(runs) * 4 / runs))
    assert change_points._cheapest([0.0] * 20 + [step] * 20, spread) == places


@pytest.mark.parametrize(("same", "places"), [(0, [3, 6]), (1, [3, 6]), (2, [])])
def test_two_of_199_orders_that_split_as_well_are_too_many(
    same: int, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders are given, and not by chance. Both sides of a change are searched again, if they are long enough."""

    class Orders:
        def __init__(self) -> None:
            self.left = same

        def permutation(self, levels: Values) -> Values:
            self.left -= 1
            return levels if self.left >= 0 else numpy.concatenate((levels[::2], levels[1::2]))

    monkeypatch.setattr(numpy.random, "default_rng", lambda seed: Orders())
    assert change_points._e_divisive([0.0] * 3 + [1.0] * 3 + [9.0] * 3, seed=0) == places


def test_the_test_of_each_part_tries_as_many_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[int] = []
    best = change_points._best_split

    def split(levels: Any, widths: Any, stride: int = 1) -> tuple[int, float]:
        strides.append(stride)
        return best(levels, widths, stride)

    monkeypatch.setattr(change_points, "_PLACES", 20)
    monkeypatch.setattr(change_points, "_best_split", split)
    assert change_points._e_divisive([0.0] * 40 + [1.0] * 60, seed=0) == [40]
    assert set(strides) == {1, 100 // 20, 40 // 20, 60 // 20}


@pytest.mark.parametrize("count", [1, 255, 256, 512, 513, 767, 768, 1000, 1024, 2000])
def test_each_position_of_a_history_is_decided_by_one_window_and_not_near_its_ends(count: int) -> None:
    decided: list[int] = []
    for begin, end, positions in change_points._windows(count):
        assert 0 <= begin < end <= count
        assert end - begin in (512, count)
        assert positions.start - begin >= 128 or positions.start == 0
        assert end - positions.stop >= 128 or positions.stop == count
        decided += positions
    assert decided == list(range(count))


def test_the_spread_of_a_row_is_that_of_normal_noise_between_neighbours() -> None:
    assert change_points._spread([0.0, 0.1] * 5) == pytest.approx(0.1 / 0.6745 / 2**0.5)
    assert change_points._spread([0.0] * 5) == 0.002


def test_values_are_compared_on_a_grid_of_64_at_most() -> None:
    levels, widths = change_points._levels(numpy.arange(64.0))
    assert levels.tolist() == list(range(64))
    assert widths.tolist() == [1.0] * 63
    levels, widths = change_points._levels(numpy.arange(65.0))
    assert (len(widths), widths.sum(), levels[0], levels[-1]) == (63, 64, 0, 63)


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1.0] * 3 + [2.0] * 3, [3]),
        ([1.0] * 6 + [0.95] * 6, [6]),  # five percent are enough
        ([1.0] * 6 + [0.5] * 3, [6]),  # and three runs
        ([1.0] * 6 + [0.5] * 2, []),
        ([1.0] * 10 + [0.5] * 2, []),
        ([1.0] * 6 + [0.96] * 6, []),
        ([1.0] * 5 + [0.3] + [1.0] * 6, []),  # one bad night
        ([1.0, 0.5, 1.0, 0.5, 1.0], []),  # too few
        ([1.0] * 12, []),
        ([], []),
        # Of two steps that are too small, the smaller one is dropped, and the other is then large enough.
        ([1.0] * 5 + [1.04] * 5 + [1.09] * 5, [10]),
    ],
)
def test_a_change_that_lasts_counts_from_five_percent_and_three_runs_on(values: list[float], places: list[int]) -> None:
    assert [step.place for step in steps(values)] == places
