# SPDX-License-Identifier: Apache-2.0
"""Find the culprit of a failed pair of ranks: measure each of its two ranks again, paired with a third rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_nixl.core.units import gigabytes
from pytest_nixl.model.results import Result, measured_rows
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES, Samples
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Verdicts of a row that a single bad rank may cause.
BAD = (Verdict.FAIL, Verdict.WRONG_TRANSPORT, Verdict.CORRUPT, Verdict.REGRESSED, Verdict.IMPLAUSIBLE)
#: Those of a row that is not too slow; WARN: packets were lost.
FAST = (Verdict.PASS, Verdict.WARN)
#: The most pairs to measure again. A slow rank is in many failed pairs, and two of them are enough to identify it.
MOST_PAIRS = 4
#: A rank is slower than the others if it moves less than this share of what they move, each time that it is compared.
SLOWER, COMPARISONS = 0.5, 3
#: Blocks are measured again whose transfer takes at most so many seconds: larger ones make a slow pair no clearer.
QUICK_SECONDS = 0.1
_OTHER = {"WRITE": "READ", "READ": "WRITE"}

ACTION = (
    "take that host out of use (kubectl cordon NODE, scontrol update NodeName=NODE State=DRAIN Reason=nixl); on that "
    "host check the interface (ethtool DEVICE, ethtool -S DEVICE, rdma link, dmesg) and run `pytest-nixl doctor`; put "
    "it back into use when this run passes with --nixl-pairs for its rank"
)


@dataclass(frozen=True)
class FailedPair:
    """A failed pair of ranks.

    :param key: its failed row that is measured again: the one with the largest blocks that are quick to move.
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
    rows: dict[tuple[str, tuple[int, int]], list[Result]] = defaultdict(list)
    for key, result in rows_of_pairs(results):
        if result.verdict in BAD:
            rows[key.backend, key.pair].append(result)
    worst = {}
    for place, failed in rows.items():
        key, result = _to_repeat(failed)
        worst[place] = FailedPair(key, Judgement(result.verdict, result.reason, result.remedy))
    often = Counter(rank for backend, pair in worst for rank in pair)
    return sorted(worst.values(), key=lambda row: -sum(often[rank] for rank in row.ranks))


def rows_of_pairs(results: Sequence[Result]) -> Iterator[tuple[RowKey, Result]]:
    """Yield the rows of blocks that NIXL moved between two ranks, each with its result."""
    for key, result in measured_rows(results):
        if not (key.program or key.kv or key.pattern or key.pair[0] == key.pair[1]):
            yield key, result


def _to_repeat(results: Sequence[Result]) -> tuple[RowKey, Result]:
    """Return the row with the largest blocks whose transfer is quick; if none is, that with the smallest blocks."""

    def preference(row: tuple[RowKey, Result]) -> tuple[bool, int]:
        key, result = row
        assert result.summary is not None
        quick = key.block * key.batch * key.depth <= QUICK_SECONDS * result.summary.bandwidth
        return quick, key.block if quick else -key.block

    return max(reversed(list(measured_rows(results))), key=preference)  # of equal ones the last


@dataclass(frozen=True)
class SlowerRank:
    """A rank that may be slower than the others in one direction of the bytes.

    :param sends: whether the bytes leave it.
    :param key: a row that is like those in which it was slow.
    """

    rank: int
    sends: bool
    key: RowKey

    @property
    def direction(self) -> str:
        """What the rank does with these bytes."""
        return "what it sends" if self.sends else "what it receives"

    def comparison(self, candidates: Sequence[SlowerRank], ranks: int) -> tuple[RowKey, RowKey]:
        """Return two rows with one target: the rank initiates the first, and another rank the second.

        The target is the rank that is in the fewest candidates.

        :param ranks: the number of ranks of the run, three or more.
        """
        often = Counter(candidate.rank for candidate in candidates)
        partner, other, *_ = sorted((rank for rank in range(ranks) if rank != self.rank), key=lambda r: (often[r], r))
        row = replace(self.key, op="WRITE" if self.sends else "READ", pair=(self.rank, partner))
        return row, replace(row, pair=(other, partner))


def slower_ranks(results: Sequence[Result]) -> list[SlowerRank]:
    """Return the ranks that are slow in all their pairs, in a direction of the bytes, and other ranks are not.

    Rows are compared with the same row of pairs without the rank, over the same transport. A row that passed its floor
    is not slow. It takes no floor to be slow, and no other process can hide it that slows all pairs alike.
    """
    alike: dict[tuple[RowKey, frozenset[str]], list[tuple[RowKey, Result, float]]] = defaultdict(list)
    for key, result in rows_of_pairs(results):
        assert result.summary is not None
        kinds = frozenset(name.partition("/")[0] for name in result.summary.transports)
        alike[replace(key, pair=(0, 1)), kinds].append((key, result, result.summary.bandwidth))
    shares: dict[tuple[str, int, bool], dict[RowKey, list[tuple[int, float, Result]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rows in alike.values():
        for key, result, bandwidth in rows:
            assert result.summary is not None
            passed = result.verdict in FAST and result.summary.floor > 0
            for rank in key.pair:
                others = [rate for other, _, rate in rows if rank not in other.pair]
                if others:
                    sends = (rank == key.pair[0]) == (key.op == "WRITE")
                    share = 1.0 if passed else bandwidth / median(others)
                    shares[key.backend, rank, sends][replace(key, block=1)].append((key.block, share, result))
    found = []
    for (_, rank, sends), series in shares.items():
        # Of small blocks the latency counts, which is the same on a slow link.
        larger = [sorted(row, key=lambda entry: entry[0])[len(row) // 2 :] for row in series.values()]
        if all(median(share for _, share, _ in row) < SLOWER for row in larger):
            initiates = [entries for key, entries in series.items() if key.pair[0] == rank]
            slow = [
                result for entries in initiates or series.values() for _, share, result in entries if share < SLOWER
            ]
            found.append(SlowerRank(rank, sends, _to_repeat(slow)[0]))
    return found


def compare(
    slower: SlowerRank, in_turn: Sequence[tuple[Samples, Samples]], names: Sequence[str]
) -> tuple[Verdict, str]:
    """Judge a rank by rows that were measured in turn with those of another rank: FAIL, PASS or INCONCLUSIVE.

    :param in_turn: each time the samples of the rank, and of the other rank with the same target.
    :param names: a name for each rank, with its host.
    """
    (rank, partner), (other, _) = (samples.key.pair for samples in in_turn[0])
    figures = ", ".join(f"{gigabytes(one.bandwidth)} and {gigabytes(two.bandwidth)} GB/s" for one, two in in_turn)
    row = replace(in_turn[0][0].key, pair=(0, 1)).words
    measured = f"{row}, in turn with {names[other]}, both with rank {partner}: {figures}"
    if not all(one.bandwidth < SLOWER * two.bandwidth for one, two in in_turn):
        return Verdict.PASS, f"{names[rank]} ({slower.direction}) is not slower than half of the others ({measured})"
    cores = median(_cores(one) for one, _ in in_turn), median(_cores(two) for _, two in in_turn)
    only_its_gpu = sum(one.gpu_is_busy > two.gpu_is_busy for one, two in in_turn) > len(in_turn) / 2
    lost = cores[0] - cores[1]
    if lost > DISTURBED_CORES:
        measured += f"; other processes took {cores[0]:.1f} and {cores[1]:.1f} cores"
    # A rank that lost 0.4 of its core still reaches 0.6 of its bandwidth. Load does not explain a lower one.
    ratio = median(one.bandwidth / two.bandwidth for one, two in in_turn)
    if only_its_gpu or (lost > DISTURBED_CORES and ratio >= SLOWER * (1 - lost)):
        return Verdict.INCONCLUSIVE, f"{names[rank]} is slower, and only its host is busy ({measured})"
    if any(_placement(one) != _placement(two) for one, two in in_turn):
        return Verdict.INCONCLUSIVE, f"{names[rank]} is slower, but its bytes take another way ({measured})"
    over = _over(in_turn[0][0].transports)
    return Verdict.FAIL, f"{names[rank]} ({slower.direction}, over {over}) is the culprit ({measured})"


def _cores(samples: Samples) -> float:
    """Return the most cores that other processes took during a launch."""
    return max(samples.contention, default=0.0)


def _placement(samples: Samples) -> tuple[bool, set[str]]:
    """Return whether a row is within one host, and its transports without devices."""
    return len({*samples.hosts}) == 1, {name.partition("/")[0] for name in samples.transports}


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
    nobody = "with only two ranks nothing shows which one is the culprit"
    for row in failed:
        first, second = (names[rank] for rank in row.ranks)
        of_backend = [(key, result.verdict) for key, result in measured_rows(results) if not key.kv and not key.pattern]
        bad = {key.op for key, verdict in of_backend if key.backend == row.key.backend and verdict in BAD}
        good = {key.op for key, verdict in of_backend if key.backend == row.key.backend and verdict in FAST}
        source, destination = (first, second) if bad == {"WRITE"} else (second, first)
        slow = f"bytes from {source} to {destination} are slow"
        if row.judgement.verdict is Verdict.WRONG_TRANSPORT:
            yield f"bytes between {first} and {second} took a transport that the profile does not accept: {nobody}"
        elif len(bad) == 2:
            yield f"{first} and {second} are slow in both directions: {nobody}"
        elif good - bad:
            yield (
                f"{slow}, and bytes in the other direction are not: check what {source} sends through first, then what "
                f"{destination} receives through"
            )
        else:
            yield f"{slow}; no row of the other direction was judged, and {nobody}"


def remedy_of_two(failed: Sequence[FailedPair]) -> str:
    """Return the remedy of a run with two ranks: that of a row with a wrong transport, if there is one."""
    for row in failed:
        if row.judgement.verdict is Verdict.WRONG_TRANSPORT and row.judgement.remedy:
            return row.judgement.remedy
    return f"start a third rank, or {ACTION}"
