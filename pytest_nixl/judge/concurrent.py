# SPDX-License-Identifier: Apache-2.0
"""Several links at one time, of pairs of ranks or of GPUs: what they move together, and whether one starves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Barrier, BrokenBarrierError

from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.measure.link import Link
from pytest_nixl.model.rank_pairs import RankPair
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict

#: A link starves that gets less than this share of what is usual among those beside it.
STARVED = 0.5
#: How often all are measured, at most, while one and the same starves: something else may have taken its share once.
TRIES = 3
#: Pairs that are measured at one time, at most.
MOST_PAIRS = 32


def disjoint(ranks: int) -> list[RankPair]:
    """Return pairs that share no rank, across the middle: 0 with n/2, 1 with n/2+1, …; a last odd rank is left out."""
    half = ranks // 2
    return [(rank, rank + half) for rank in range(half)][:MOST_PAIRS]


@dataclass(frozen=True)
class ConcurrentVerdict:
    """What links came to that were measured at one time."""

    verdict: Verdict
    words: str
    remedy: str = ""


@dataclass(frozen=True)
class ConcurrentRates:
    """What each of several links got, in bytes per second, while all were measured at one time.

    :param starving: the place of one that got less than :data:`STARVED` of what is usual, each time they were measured.
    """

    rates: tuple[float, ...]
    starving: int | None = None

    @property
    def total(self) -> float:
        """What all moved together."""
        return sum(self.rates)

    @property
    def slowest(self) -> int:
        """The place of the one that starves, else of the slowest."""
        return self.starving if self.starving is not None else self.rates.index(min(self.rates))


def starving(rates: Sequence[float]) -> int | None:
    """Return the place of the slowest, if it starves beside the others."""
    least = min(rates)
    return rates.index(least) if least < STARVED * median(rates) else None


def spread(measure: Callable[[], Sequence[float]]) -> ConcurrentRates:
    """Measure all together, and again while the same one starves: it is said to only if it does every time."""
    rates = tuple(measure())
    place = starving(rates)
    for _ in range(TRIES - 1):
        if place is None:
            break
        rates = tuple(measure())
        place = place if starving(rates) == place else None
    return ConcurrentRates(rates, place)


def measure_at_once(links: Sequence[Link], block: int, depth: int) -> list[Samples]:
    """Measure one row of every link: their transfers are timed at the same time, for the same time.

    :raises WorkerError: the first failure of one; the others then end too.
    """
    ready = Barrier(len(links))

    def one(link: Link) -> Samples:
        try:
            return link.measure(block, depth=depth, beside=ready.wait)
        except BaseException:
            ready.abort()  # nobody waits for one that does not come
            raise

    with ThreadPoolExecutor(len(links)) as pool:
        futures = [pool.submit(one, link) for link in links]
    faults = [fault for future in futures if (fault := future.exception()) is not None]
    for fault in sorted(faults, key=lambda each: isinstance(each, BrokenBarrierError)):
        raise fault
    return [future.result() for future in futures]


def corrupt(what: str, names: Sequence[str], samples: Sequence[Samples]) -> ConcurrentVerdict | None:
    """Return that one of them moved a wrong byte, if one did."""
    for name, each in zip(names, samples, strict=True):
        if each.corruption is not None:
            words = f"{what} of {name} beside {len(set(names)) - 1} others: {each.corruption}"
            return ConcurrentVerdict(
                Verdict.CORRUPT, words, "run that pair alone; look at both hosts' memory and adapters"
            )
    return None


def at_once(what: str, links: Sequence[Link], block: int, depth: int) -> ConcurrentVerdict:
    """Measure one row of every pair of ranks at the same time, and judge what it says of the network between them.

    :param what: the kind of link, in words.
    """
    wrong: list[ConcurrentVerdict] = []
    names = [f"ranks {pair[0]}-{pair[1]}" for pair in (link.key(block).pair for link in links)]

    def rates() -> list[float]:
        samples = measure_at_once(links, block, depth)
        fault = corrupt(what, names, samples)
        if fault is not None:
            wrong.append(fault)
        return [each.bandwidth for each in samples]

    found = spread(rates)
    if wrong:
        return wrong[0]
    least = found.slowest
    words = (
        f"{what} of {format_size(block)}, {len(links)} pairs at once: {gigabytes(found.total)} GB/s together, from "
        f"{gigabytes(found.rates[least])} ({names[least]}) to {gigabytes(max(found.rates))} GB/s"
    )
    if found.starving is not None:
        remedy = "look at what these two ranks share with others: a switch's uplink, a host, an adapter"
        return ConcurrentVerdict(Verdict.WARN, f"{words}: that pair starves beside the others", remedy)
    return ConcurrentVerdict(Verdict.PASS, words)
