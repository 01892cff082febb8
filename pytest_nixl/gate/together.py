# SPDX-License-Identifier: Apache-2.0
"""Several pairs of ranks at one time: what they move together, and whether one of them starves."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from pytest_nixl.cluster.pairing import RankPair
from pytest_nixl.gate.verdicts import Verdict
from pytest_nixl.link import Link
from pytest_nixl.record.samples import Samples
from pytest_nixl.units import format_size, gigabytes

#: A pair starves that gets less than this share of what is usual among those beside it.
STARVED = 0.5
#: Pairs that are measured at one time, at most.
MOST_PAIRS = 32


def disjoint(ranks: int) -> list[RankPair]:
    """Return pairs that share no rank, across the middle: 0 with n/2, 1 with n/2+1, …; a last odd rank is left out."""
    half = ranks // 2
    return [(rank, rank + half) for rank in range(half)][:MOST_PAIRS]


@dataclass(frozen=True)
class Together:
    """What pairs came to that were measured at one time."""

    verdict: Verdict
    words: str
    remedy: str = ""


def at_once(what: str, links: Sequence[Link], block: int, depth: int) -> Together:
    """Measure one row of every link at the same time, and judge what it says of the network between them.

    :param what: the kind of link, in words.
    """
    with ThreadPoolExecutor(len(links)) as pool:
        samples = [one.result() for one in [pool.submit(link.measure, block, depth=depth) for link in links]]
    for each in samples:
        if each.corruption is not None:
            words = f"{what} of {_pair(each)} beside {len(links) - 1} other pairs: {each.corruption}"
            return Together(Verdict.CORRUPT, words, "run that pair alone; look at both hosts' memory and adapters")
    usual = median(each.bandwidth for each in samples)
    least = min(samples, key=lambda each: each.bandwidth)
    total, most = sum(each.bandwidth for each in samples), max(each.bandwidth for each in samples)
    words = (
        f"{what} of {format_size(block)}, {len(links)} pairs at once: {gigabytes(total)} GB/s together, from "
        f"{gigabytes(least.bandwidth)} ({_pair(least)}) to {gigabytes(most)} GB/s"
    )
    if least.bandwidth < STARVED * usual:
        remedy = "look at what these two ranks share with others: a switch's uplink, a host, an adapter"
        return Together(Verdict.WARN, f"{words}: that pair starves beside the others", remedy)
    return Together(Verdict.PASS, words)


def _pair(samples: Samples) -> str:
    return f"ranks {samples.key.pair[0]}-{samples.key.pair[1]}"
