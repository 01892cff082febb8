# SPDX-License-Identifier: Apache-2.0
"""Measure several links at the same time, between ranks or GPUs, and find a link that starves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Barrier, BrokenBarrierError

from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.measure.link import Link
from pytest_nixl.model.samples import DISTURBED_CORES, Samples
from pytest_nixl.model.verdicts import Judgement, Verdict

#: A link starves if its bandwidth is less than this share of the median of all links.
STARVED = 0.5
#: The number of measurements that must agree before a link counts as starved: one may be a coincidence.
TRIES = 3
#: The most pairs to measure at the same time.
MOST_PAIRS = 32
QUIET = "stop other processes on the host, and run this check again"


def disjoint(ranks: int) -> list[tuple[int, int]]:
    """Return pairs that share no rank: 0 with n/2, 1 with n/2+1, and so on. A last odd rank is left out.

    At most :data:`MOST_PAIRS` pairs are returned.

    :param ranks: the number of ranks, n.
    """
    half = ranks // 2
    return [(rank, rank + half) for rank in range(half)][:MOST_PAIRS]


@dataclass(frozen=True)
class ConcurrentRates:
    """The bandwidth of several links that were measured at the same time.

    :param rates: bytes per second of each link.
    :param starving: the index of a link that starved in every measurement; None: there is none.
    """

    rates: tuple[float, ...]
    starving: int | None = None

    @property
    def total(self) -> float:
        """The sum of all links in bytes per second."""
        return sum(self.rates)

    @property
    def slowest(self) -> int:
        """The index of the link that starves; if none does, of the slowest."""
        return self.starving if self.starving is not None else self.rates.index(min(self.rates))


def starving(rates: Sequence[float]) -> int | None:
    """Return the index of the slowest link if it starves; None: no link starves.

    :param rates: bytes per second of each link.
    """
    least = min(rates)
    return rates.index(least) if least < STARVED * median(rates) else None


def spread(measure: Callable[[], Sequence[float]]) -> ConcurrentRates:
    """Measure all links at the same time, and again while the same link starves.

    A link counts as starved only if all :data:`TRIES` measurements agree.

    :param measure: returns bytes per second of each link.
    """
    rates = tuple(measure())
    place = starving(rates)
    for _ in range(TRIES - 1):
        if place is None:
            break
        rates = tuple(measure())
        place = place if starving(rates) == place else None
    return ConcurrentRates(rates, place)


def measure_at_once(links: Sequence[Link], block: int, depth: int) -> list[Samples]:
    """Measure one row of every link at the same time and for the same duration.

    :param block: block size in bytes; ``depth`` is the number of transfers in flight.
    :raises WorkerError: if one link fails; the others are then ended too.
    """
    ready = Barrier(len(links))

    def measure_link(link: Link) -> Samples:
        try:
            return link.measure(block, depth=depth, beside=ready.wait, links=links)
        except BaseException:
            ready.abort()  # the other links must not wait for this one
            raise

    with ThreadPoolExecutor(len(links)) as pool:
        futures = [pool.submit(measure_link, link) for link in links]
    faults = [fault for future in futures if (fault := future.exception()) is not None]
    for fault in sorted(faults, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise fault
    return [future.result() for future in futures]


def disturbance(samples: Sequence[Samples]) -> str:
    """Return a clause about the processor time that other processes took; empty: too little to slow a link."""
    most = max((cores for sample in samples for cores in sample.contention), default=0.0)
    return f"other processes used up to {most:.1f} of the cores that the links need" if most > DISTURBED_CORES else ""


def corrupt(subject: str, names: Sequence[str], samples: Sequence[Samples]) -> Judgement | None:
    """Return the verdict CORRUPT if one of the links moved a wrong byte; None: all bytes were right.

    :param subject: the kind of link, in words.
    :param names: the name of each link.
    :param samples: those of each link, in order, once or more times.
    """
    for number, sample in enumerate(samples):
        if sample.corruption is not None:
            name, count = names[number % len(names)], len(set(names)) - 1
            description = f"{subject} of {name}, measured at the same time as {count} others: {sample.corruption}"
            return Judgement(
                Verdict.CORRUPT, description, "run that pair alone; check the memory and NICs of both hosts"
            )
    return None


def at_once(subject: str, links: Sequence[Link], block: int, depth: int) -> Judgement:
    """Measure one row of every pair of ranks at the same time, and judge whether the network starves one of them.

    :param subject: the kind of link, in words.
    :param block: block size in bytes; ``depth`` is the number of transfers in flight.
    """
    moved: list[Samples] = []
    names = [f"ranks {pair[0]}-{pair[1]}" for pair in (link.key(block).pair for link in links)]

    def rates() -> list[float]:
        moved.extend(measure_at_once(links, block, depth))
        return [link_samples.bandwidth for link_samples in moved[-len(links) :]]

    together = spread(rates)
    fault = corrupt(subject, names, moved)
    if fault is not None:
        return fault
    least = together.slowest
    description = (
        f"{subject} of {format_size(block)}, {len(links)} pairs at once: {gigabytes(together.total)} GB/s together, "
        f"from {gigabytes(together.rates[least])} ({names[least]}) to {gigabytes(max(together.rates))} GB/s"
    )
    if together.starving is not None:
        remedy = "check what these two ranks share with others: the uplink of a switch, a host, a NIC"
        description = f"{description}: that pair starves while the others are measured"
        if took := disturbance(moved):
            return Judgement(Verdict.INCONCLUSIVE, f"{description}, but {took}", QUIET)
        return Judgement(Verdict.WARN, description, remedy)
    return Judgement(Verdict.PASS, description)
