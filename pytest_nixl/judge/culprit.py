# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame for a pair that failed: each end is paired with a rank that is not suspected, and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_nixl.model.rank_pairs import RankPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Verdicts of a row for which a rank may be to blame.
BAD = (Verdict.FAIL, Verdict.WRONG_TRANSPORT, Verdict.CORRUPT, Verdict.REGRESSED, Verdict.IMPLAUSIBLE)
#: Pairs that are looked into, at most: a rank that is slow is in many, and two of them tell.
MOST_PAIRS = 4
_OTHER = {"WRITE": "READ", "READ": "WRITE"}

ACTION = (
    "take that host out of use (kubectl cordon NODE, scontrol update NodeName=NODE State=DRAIN Reason=nixl), look "
    "there at the interface (ethtool DEVICE, ethtool -S DEVICE, rdma link, dmesg) and run `pytest-nixl doctor`; take "
    "it back when this run passes with --nixl-pairs of it"
)


@dataclass(frozen=True)
class FailedPair:
    """A pair of ranks that failed: the row of the most bytes, which is measured again."""

    key: RowKey
    judgement: Judgement

    @property
    def ranks(self) -> RankPair:
        """Initiator and target."""
        return self.key.pair


@dataclass(frozen=True)
class Retest:
    """One end of a failed pair, as initiator, with another rank: bytes flow through it the same way as in that row."""

    suspect: int
    partner: int
    key: RowKey

    @property
    def ranks(self) -> RankPair:
        """Initiator and target."""
        return self.suspect, self.partner


@dataclass(frozen=True)
class RetestResult:
    """What came of a trial: its verdict, and over which transports and devices the suspect's bytes went."""

    trial: Retest
    judgement: Judgement
    transports: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether the suspect is slow with another partner, too."""
        return self.judgement.verdict in BAD


def failed_pairs(results: Sequence[Result], keys: dict[str, RowKey]) -> list[FailedPair]:
    """Return the pairs that failed, one for each backend, those of the ranks first that are in the most of them.

    :param keys: of the rows that were measured, by their text.
    """
    worst: dict[tuple[str, RankPair], FailedPair] = {}
    for result in results:
        key = keys.get(result.row)
        if key is None or result.verdict not in BAD or key.pair[0] == key.pair[1]:
            continue
        place = (key.backend, key.pair)
        known = worst.get(place)
        if known is None or key.block >= known.key.block:
            worst[place] = FailedPair(key, Judgement(result.verdict, result.reason, result.remedy))
    often = Counter(rank for backend, pair in worst for rank in pair)
    return sorted(worst.values(), key=lambda each: -sum(often[rank] for rank in each.ranks))


def trials(failed: FailedPair, all_failed: Sequence[FailedPair], ranks: int) -> list[Retest]:
    """Return the two trials that tell the ends of a pair apart; none where there are only two ranks.

    The partner is in no failed pair, where there is such a rank; else in the fewest.
    """
    often = Counter(rank for each in all_failed if each.key.backend == failed.key.backend for rank in each.ranks)
    partners = sorted((rank for rank in range(ranks) if rank not in failed.ranks), key=lambda rank: (often[rank], rank))
    if not partners:
        return []
    one, other = failed.ranks
    found = []
    for suspect, op in ((one, failed.key.op), (other, _OTHER[failed.key.op])):
        key = replace(failed.key, op=op, pair=(suspect, partners[0]))
        found.append(Retest(suspect, partners[0], key))
    return found


def blame(failed: FailedPair, tried: Sequence[RetestResult], names: Sequence[str]) -> tuple[list[int], str]:
    """Return the ranks that are to blame, and a sentence with their hosts and interfaces.

    :param tried: the two trials with what each came to.
    """
    pair = f"{failed.ranks[0]}-{failed.ranks[1]}"
    told = "; ".join(f"rank {e.trial.suspect} with rank {e.trial.partner}: {e.judgement.reason}" for e in tried)
    bad = [each for each in tried if each.bad]
    guilty = [f"{names[each.trial.suspect]} (its {_over(each.transports)})" for each in bad]
    ranks = [each.trial.suspect for each in bad]
    if len(bad) == 1:
        return ranks, f"{guilty[0]} is to blame for the pair {pair} ({told})"
    if bad:
        partner = names[bad[0].trial.partner]
        return ranks, f"{' and '.join(guilty)}, or {partner} with which both were tried, are to blame ({told})"
    ends = " and ".join(names[rank] for rank in failed.ranks)
    if all(each.judgement.verdict is Verdict.PASS for each in tried):
        return (
            [],
            f"{ends} are each good with another rank: it is the path between these two, or it has passed ({told})",
        )
    return [], f"{ends} cannot be told apart ({told})"


def _over(transports: Sequence[str]) -> str:
    return ", ".join(transports) or "interface"


def by_direction(failed: Sequence[FailedPair], results: Sequence[Result], keys: dict[str, RowKey], names: Sequence[str]
                 ) -> Iterator[str]:  # fmt: skip
    """Yield, of two ranks, what the directions tell: bytes of a WRITE leave the initiator, those of a READ reach it."""
    for each in failed:
        of_backend = [(keys[result.row], result.verdict) for result in results if result.row in keys]
        bad = {key.op for key, verdict in of_backend if key.backend == each.key.backend and verdict in BAD}
        good = {key.op for key, verdict in of_backend if key.backend == each.key.backend and verdict is Verdict.PASS}
        if len(bad) == 1 and good - bad:
            source, destination = each.ranks if bad == {"WRITE"} else each.ranks[::-1]
            yield (
                f"bytes that leave {names[source]} for {names[destination]} are slow, and the other way they are not: "
                f"look at the way out of {names[source]} first, then at the way into {names[destination]}"
            )
        else:
            one, other = each.ranks
            yield f"{names[one]} and {names[other]} are slow both ways, and two ranks cannot be told apart"
