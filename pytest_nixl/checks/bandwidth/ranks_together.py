# SPDX-License-Identifier: Apache-2.0
"""The checks ``rank-to-blame`` and ``pairs-together``: which rank slows a pair, and do pairs slow each other?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.judge.concurrent import at_once, disjoint
from pytest_nixl.judge.culprit import (
    ACTION,
    COMPARISONS,
    MOST_PAIRS,
    FailedPair,
    RetestResult,
    SlowerRank,
    blame,
    by_direction,
    compare,
    failed_pairs,
    remedy_of_two,
    rows_of_pairs,
    slower_ranks,
    trials,
)
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.results import Result
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

_ON_QUIET_HOSTS = (
    "Stop other processes on the hosts, and run it again with three ranks or more; --nixl-blocks=1MiB is enough."
)


def judge_culprit(
    run: Run,
    cluster: Cluster,
    pairs: Launches,
    needs_launch: Callable[[Samples], bool],
    judge: Callable[[Samples], Judgement],
) -> Judgement:
    """Measure each end of a failed pair again with a rank that is not suspected, and name the culprit.

    :param needs_launch: returns whether a row needs one more launch, from the samples so far.
    :param judge: judges samples by what the profile expects of their row.
    :raises NotApplicableError: the run has only one rank.
    """
    if not cluster.several:
        raise NotApplicableError("this run has only one rank")
    results, names = run.record.results, cluster.names
    failed = failed_pairs(results)
    if not failed:
        slower = slower_ranks(results)[:MOST_PAIRS] if cluster.ranks > 2 else []
        named, sentences, undecided = _name_slower(slower, cluster, pairs)
        if named:
            return Judgement(Verdict.FAIL, "; ".join(sentences), ACTION)
        if undecided:
            return Judgement(Verdict.INCONCLUSIVE, "; ".join(sentences), _ON_QUIET_HOSTS)
        return _without_culprit(results, cluster.ranks, sentences)
    if cluster.ranks == 2:
        directions = list(by_direction(failed, results, names))
        return Judgement(Verdict.FAIL, "; ".join(dict.fromkeys(directions)), remedy_of_two(failed))
    guilty, judgements = [], []
    for failure in failed[:MOST_PAIRS]:
        tried = []
        for key in trials(failure, failed, cluster.ranks):
            link = pairs.link_of(key, key.pair)
            samples = link.measure_launches(key.block, batch=key.batch, depth=key.depth, another=needs_launch)
            tried.append(RetestResult(key, judge(samples), samples.transports))
        ranks, sentence = blame(failure, tried, names)
        if not ranks and any(trial.judgement.verdict is Verdict.INCONCLUSIVE for trial in tried):
            ranks, sentences, _ = _name_slower(_ends(failure), cluster, pairs)
            sentence = "; ".join((sentence, *sentences))
        guilty += ranks
        judgements.append(sentence)
    return Judgement(Verdict.FAIL if guilty else Verdict.WARN, "; ".join(judgements), ACTION)


def _ends(failure: FailedPair) -> list[SlowerRank]:
    writes = failure.key.op == "WRITE"
    return [
        SlowerRank(rank, sends, failure.key) for rank, sends in zip(failure.ranks, (writes, not writes), strict=True)
    ]


def _name_slower(slower: Sequence[SlowerRank], cluster: Cluster, pairs: Launches) -> tuple[list[int], list[str], bool]:
    """Measure ranks in turn with others.

    :returns: the culprits; a sentence for each of these, or for each rank; and whether a rank may be one.
    """
    undecided = False
    named: list[int] = []
    culprits: list[str] = []
    others: list[str] = []
    for candidate in slower:
        keys = candidate.comparison(slower, cluster.ranks)
        in_turn: list[tuple[Samples, Samples]] = []
        verdict, sentence = Verdict.FAIL, ""
        while verdict is not Verdict.PASS and len(in_turn) < COMPARISONS:
            measured = {}
            for key in keys if len(in_turn) % 2 == 0 else keys[::-1]:  # a launch between two ranks serves twice
                link = pairs.link_of(key, key.pair)
                measured[key] = link.measure(key.block, batch=key.batch, depth=key.depth)
            in_turn.append((measured[keys[0]], measured[keys[1]]))
            verdict, sentence = compare(candidate, in_turn, cluster.names)
        (culprits if verdict is Verdict.FAIL else others).append(sentence)
        named += [candidate.rank] if verdict is Verdict.FAIL else []
        undecided |= verdict is Verdict.INCONCLUSIVE
    return named, culprits or others, undecided


def _without_culprit(results: Sequence[Result], ranks: int, sentences: Sequence[str]) -> Judgement:
    """Judge a run in which no pair has failed and no rank is much slower than the others."""
    rows = list(rows_of_pairs(results))
    reason = "; ".join(("no pair of ranks has failed", *sentences))
    undecided = [key for key, result in rows if result.verdict is Verdict.INCONCLUSIVE]
    hidden = [
        key
        for key, result in rows
        if ranks > 2
        and result.verdict is Verdict.NO_EXPECTATION
        and result.summary is not None
        and not result.summary.undisturbed
    ]
    if not undecided and len(hidden) <= len(rows) / 2:
        return Judgement(Verdict.PASS, reason)
    why = f"other processes took cores from {len(hidden)} of {len(rows)} rows"
    if undecided:
        why = f"{len(undecided)} of {len(rows)} rows are undecided"
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{reason}, but {why}, which can hide a rank that is more than half as fast as the others",
        _ON_QUIET_HOSTS,
    )


def judge_pairs_together(run: Run, settings: Settings, cluster: Cluster, pairs: Launches) -> Judgement:
    """Let pairs without a common rank transfer at the same time, and judge whether one of them starves.

    :raises NotApplicableError: the run has fewer than four ranks.
    """
    apart = disjoint(cluster.ranks)
    if len(apart) < 2:
        raise NotApplicableError("this check needs two pairs without a common rank, and so at least four ranks")
    block, depth = max(settings.blocks), max(settings.depth)
    judgements: list[Judgement] = []
    for backend, op, memory in {(link.backend, link.op, link.memory): None for link in run.links}:
        if not memory.stored:
            judgements.append(at_once(f"{backend} {op}", pairs.together(backend, op, memory, apart), block, depth))
    worst = most_severe([*judgements, Judgement(Verdict.PASS, "")])
    return replace(worst, reason="; ".join(judgement.reason for judgement in judgements))
