# SPDX-License-Identifier: Apache-2.0
"""The rate of wrong verdicts when two images are compared, with and without a loss of 10 % of the cable's rate.

Real launches are measured in turn. Comparisons are then drawn from them and judged like in a run: with 5 launches per
side, or 7 if these are INCONCLUSIVE.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from helpers.namespaces import require_tools, two_hosts
from test_real_libfabric import link

from pytest_nixl.judge.regression import compare_launches
from pytest_nixl.judge.run_comparison import wants_launch
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import COMPARED_LAUNCHES, MOST_LAUNCHES, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

MIB = 1 << 20
MARGIN = 0.05
DRAWN = 2000
MakeSettings = Callable[..., Settings]
Values = list[float]


def launches() -> int:
    """Launches of each condition: PYTEST_NIXL_LAUNCHES, 60 by default; fewer only show that the test runs."""
    return int(os.environ.get("PYTEST_NIXL_LAUNCHES", "60"))


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tools()
    monkeypatch.setenv("UCX_TLS", "tcp")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that keep a core busy each."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def in_turn(links: Sequence[Link], count: int, *, depth: int) -> list[Values]:
    """Measure ``count`` launches of each link in the order ABBA ABBA ..., each in new workers."""
    results: list[Values] = [[] for _ in links]
    for number in range(count):
        for place in range(len(links)) if number % 2 == 0 else reversed(range(len(links))):
            samples = links[place].measure(MIB, depth=depth)
            assert samples.corruption is None
            results[place] += samples.values
            links[place].relaunch()
    return results


def verdict(before: Values, now: Values) -> Verdict:
    """Compare like a run: with two more launches per side if five are INCONCLUSIVE."""
    for count in range(COMPARED_LAUNCHES, MOST_LAUNCHES + 1):
        sides = before[:count], now[:count]
        if not wants_launch(tuple(sides[0]), tuple(sides[1]), MARGIN):
            break
    return compare_launches(*sides, MARGIN).verdict


def drawn(before: Values, now: Values, seed: int, count: int) -> Counter[Verdict]:
    """Compare randomly drawn launches; if both sides are of the same image, no launch is on both sides."""
    choose = random.Random(seed)
    results: Counter[Verdict] = Counter()
    for _ in range(count):
        if before is now:
            both = choose.sample(before, 2 * MOST_LAUNCHES)
            first, other = both[:MOST_LAUNCHES], both[MOST_LAUNCHES:]
        else:
            first, other = choose.sample(before, MOST_LAUNCHES), choose.sample(now, MOST_LAUNCHES)
        results[verdict(first, other)] += 1
    return results


def successive(before: Values, now: Values) -> Counter[Verdict]:
    """Compare consecutive launches, including drift and lasting changes."""
    results: Counter[Verdict] = Counter()
    if before is now:  # ABBA ABBA ... among the launches of one image
        sides = ([v for n, v in enumerate(before) if n % 4 in phases] for phases in ((0, 3), (1, 2)))
        before, now = sides
    for start in range(0, len(before) - MOST_LAUNCHES + 1):
        results[verdict(before[start:], now[start:])] += 1
    return results


def between(before: Values, now: Values, expected: Verdict) -> tuple[float, float]:
    """Return the 95 % confidence interval of a verdict's rate, from resampled launches."""
    choose, remainder = random.Random(1), []
    for number in range(100):
        again = choose.choices(before, k=len(before))
        other = again if before is now else choose.choices(now, k=len(now))
        # Drawn again, a launch may be there twice: a hair apart, as the test takes no two for equal.
        again[:] = [value * (1 + 1e-9 * place) for place, value in enumerate(again)]
        remainder.append(drawn(again, other, number, 100)[expected] / 100)
    remainder.sort()
    return remainder[2], remainder[-3]


def reason(name: str, before: Values, now: Values, expected: Verdict) -> tuple[float, str]:
    """Return the rate of a verdict, and a line about it."""
    low, high = between(before, now, expected)
    all_ = drawn(before, now, 0, DRAWN)
    share = all_[expected] / DRAWN
    text = ", ".join(f"{100 * all_[verdict] / DRAWN:.1f} % {verdict}" for verdict in Verdict if all_[verdict])
    row = successive(before, now)
    in_row = ", ".join(f"{row[verdict]} {verdict}" for verdict in Verdict if row[verdict])
    return share, (
        f"{name}: {expected} in {100 * share:.2f} % of {DRAWN} drawn (95 % between {100 * low:.0f} and "
        f"{100 * high:.0f} %); all: {text}; of {sum(row.values())} made of successive launches: {in_row}"
    )


def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(blocks=(MIB,), depth=(2,), iterations=40)


@pytest.mark.soak
@pytest.mark.parametrize("load", [0, 2], ids=["quiet", "loaded"])
def test_loss_of_ten_percent_is_found_and_no_loss_is_not(
    make_settings: MakeSettings, capsys: pytest.CaptureFixture[str], load: int
) -> None:
    with ExitStack() as stack:
        cables = [stack.enter_context(two_hosts(name)) for name in ("1gbit", "900mbit")]
        links = [stack.enter_context(link(settings(make_settings), "UCX", "WRITE", hosts)) for hosts in cables]
        with busy(load):
            whole, lost = in_turn(links, launches(), depth=2)
    name = "loaded" if load else "quiet"
    results, text = reason(f"{name}, 10 % lost, {len(lost)} launches", whole, lost, Verdict.REGRESSED)
    alarms, none = reason(f"{name}, nothing lost, {len(whole)} launches", whole, whole, Verdict.REGRESSED)
    slower, more = reason(f"{name}, nothing lost at 900 Mbit/s", lost, lost, Verdict.REGRESSED)
    with capsys.disabled():
        print(f"\n{text}\n{none}\n{more}")
        print(f"load of the machine: {os.getloadavg()}, cores: {os.cpu_count()}")
        for label, values in (("1gbit", whole), ("900mbit", lost)):
            print(f"MB/s at {label}: {' '.join(f'{value / 1e6:.4g}' for value in values)}")
    assert max(alarms, slower) <= 0.01
    if not load:
        assert results >= 0.95


@pytest.mark.soak
def test_loopback_may_be_inconclusive_but_not_regressed(
    make_settings: MakeSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS")
    pairs = Launches((LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)), settings(make_settings))
    try:
        [values] = in_turn([pairs.link("UCX", "WRITE", MemoryPair("DRAM", "DRAM"))], launches(), depth=2)
    finally:
        pairs.close()
    alarms, text = reason(f"loopback, nothing lost, {len(values)} launches", values, values, Verdict.REGRESSED)
    with capsys.disabled():
        spread = f"{min(values) / 1e9:.3g} to {max(values) / 1e9:.3g} GB/s"
        print(f"\n{text}; {spread}; load of the machine: {os.getloadavg()}")
    assert alarms <= 0.01
