# SPDX-License-Identifier: Apache-2.0
"""Find the culprit of a failed pair of ranks: measure each of its two ranks again, paired with a third rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_nixl.model.results import Result, measured_rows
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Verdicts of a row that a single bad rank may cause.
BAD = (Verdict.FAIL, Verdict.WRONG_TRANSPORT, Verdict.CORRUPT, Verdict.REGRESSED, Verdict.IMPLAUSIBLE)
#: Those of a row that is not too slow; WARN: packets were lost.
FAST = (Verdict.PASS, Verdict.WARN)
#: The most pairs to measure again. A slow rank is in many failed pairs, and two of them are enough to identify it.
MOST_PAIRS = 4
_OTHER = {"WRITE": "READ", "READ": "WRITE"}

ACTION = (
    "take that host out of use (kubectl cordon NODE, scontrol update NodeName=NODE State=DRAIN Reason=nixl); on that "
    "host check the interface (ethtool DEVICE, ethtool -S DEVICE, rdma link, dmesg) and run `pytest-nixl doctor`; put "
    "it back into use when this run passes with --nixl-pairs for its rank"
)


@dataclass(frozen=True)
class FailedPair:
    """A failed pair of ranks.

    :param key: its failed row with the largest blocks, which is measured again.
    """

    key: RowKey
    judgement: Judgement

    @property
    def ranks(self) -> tuple[int, int]:
        """Initiator and target."""
        return self.key.pair


@dataclass(frozen=True)
class RetestResult:
    """The result of a trial.

    :param key: the row that was measured. Its initiator is the suspect, and its target a good rank.
    :param transports: the transports and devices that carried the suspect's bytes.
    """

    key: RowKey
    judgement: Judgement
    transports: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether the suspect is bad with another partner, too."""
        return self.judgement.verdict in BAD


def failed_pairs(results: Sequence[Result]) -> list[FailedPair]:
    """Return the failed pairs of each backend. Pairs whose ranks are in the most failed pairs come first.

    :param results: the results of the run.
    """
    worst: dict[tuple[str, tuple[int, int]], FailedPair] = {}
    for key, result in measured_rows(results):
        if key.program or key.kv or key.pattern or result.verdict not in BAD or key.pair[0] == key.pair[1]:
            continue
        place = (key.backend, key.pair)
        worse = worst.get(place)
        if worse is None or key.block >= worse.key.block:
            worst[place] = FailedPair(key, Judgement(result.verdict, result.reason, result.remedy))
    often = Counter(rank for backend, pair in worst for rank in pair)
    return sorted(worst.values(), key=lambda row: -sum(often[rank] for rank in row.ranks))


def trials(failed: FailedPair, all_failed: Sequence[FailedPair], ranks: int) -> list[RowKey]:
    """Return the two rows that show which rank of a pair is bad; an empty list if there are only two ranks.

    The initiator of each is the suspect. Its bytes leave or arrive in the same direction as in the failed row. Its
    partner is a rank in no failed pair. If there is no such rank, it is the one in the fewest failed pairs.

    :param ranks: the number of ranks of the run.
    """
    often = Counter(rank for row in all_failed if row.key.backend == failed.key.backend for rank in row.ranks)
    partners = sorted((rank for rank in range(ranks) if rank not in failed.ranks), key=lambda rank: (often[rank], rank))
    if not partners:
        return []
    initiator, other = failed.ranks
    first = replace(failed.key, pair=(initiator, partners[0]))
    return [first, replace(first, op=_OTHER[first.op], pair=(other, partners[0]))]


def blame(failed: FailedPair, tried: Sequence[RetestResult], names: Sequence[str]) -> tuple[list[int], str]:
    """Return the culprits of a failed pair, and a sentence with their hosts and interfaces.

    :param tried: the results of the two trials.
    :param names: a name for each rank, with its host.
    """
    pair = f"{failed.ranks[0]}-{failed.ranks[1]}"
    attempts = "; ".join(f"rank {e.key.pair[0]} with rank {e.key.pair[1]}: {e.judgement.reason}" for e in tried)
    bad = [trial for trial in tried if trial.bad]
    guilty = [f"{names[trial.key.pair[0]]} (its {_over(trial.transports)})" for trial in bad]
    ranks = [trial.key.pair[0] for trial in bad]
    if len(bad) == 1:
        return ranks, f"{guilty[0]} is the culprit in the pair {pair} ({attempts})"
    if bad:
        partner = names[bad[0].key.pair[1]]
        return (
            ranks,
            f"the culprits are {' and '.join(guilty)}, or {partner}, because both were measured with it ({attempts})",
        )
    ends = " and ".join(names[rank] for rank in failed.ranks)
    if all(trial.judgement.verdict is Verdict.PASS for trial in tried):
        return (
            [],
            f"{ends} are each good with another rank: the network between these two is bad, or the fault is over "
            f"({attempts})",
        )
    return [], f"which of {ends} is the culprit is undecided ({attempts})"


def _over(transports: Sequence[str]) -> str:
    return ", ".join(transports) or "interface"


def by_direction(failed: Sequence[FailedPair], results: Sequence[Result], names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each failed pair of a run with two ranks, by the direction of the bytes that is slow.

    The bytes of a WRITE leave the initiator, and those of a READ reach it. A wrong transport says nothing of speed.
    """
    for row in failed:
        first, second = row.ranks
        of_backend = [(key, result.verdict) for key, result in measured_rows(results) if not key.kv and not key.pattern]
        bad = {key.op for key, verdict in of_backend if key.backend == row.key.backend and verdict in BAD}
        good = {key.op for key, verdict in of_backend if key.backend == row.key.backend and verdict in FAST}
        if row.judgement.verdict is Verdict.WRONG_TRANSPORT:
            yield (
                f"bytes between {names[first]} and {names[second]} took a transport that the profile does not accept: "
                "with only two ranks nothing shows which one is the culprit"
            )
        elif len(bad) == 1 and good - bad:
            source, destination = row.ranks if bad == {"WRITE"} else row.ranks[::-1]
            yield (
                f"bytes from {names[source]} to {names[destination]} are slow, and bytes in the other direction are "
                f"not: check what {names[source]} sends through first, then what {names[destination]} receives through"
            )
        else:
            yield (
                f"{names[first]} and {names[second]} are slow in both directions: with only two ranks nothing shows "
                "which one is the culprit"
            )


def remedy_of_two(failed: Sequence[FailedPair]) -> str:
    """Return the remedy of a run with two ranks: that of a row with a wrong transport, if there is one."""
    for row in failed:
        if row.judgement.verdict is Verdict.WRONG_TRANSPORT and row.judgement.remedy:
            return row.judgement.remedy
    return f"start a third rank, or {ACTION}"
