# SPDX-License-Identifier: Apache-2.0
"""The checks ``rank-to-blame`` and ``pairs-together``: which rank slows a pair, and do pairs slow each other?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.judge.concurrent import at_once, disjoint
from pytest_nixl.judge.culprit import (
    ACTION,
    MOST_PAIRS,
    RetestResult,
    blame,
    by_direction,
    failed_pairs,
    remedy_of_two,
    trials,
)
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run


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
    failed = failed_pairs(run.found.results)
    if not failed:
        return Judgement(Verdict.PASS, "no pair of ranks has failed")
    names = cluster.names
    if cluster.ranks == 2:
        directions = list(by_direction(failed, run.found.results, names))
        return Judgement(Verdict.FAIL, "; ".join(dict.fromkeys(directions)), remedy_of_two(failed))
    guilty, judgements = [], []
    for failure in failed[:MOST_PAIRS]:
        tried = []
        for key in trials(failure, failed, cluster.ranks):
            link = pairs.link_of(key, key.pair)
            samples = link.measure_launches(key.block, batch=key.batch, depth=key.depth, another=needs_launch)
            tried.append(RetestResult(key, judge(samples), samples.transports))
        ranks, sentence = blame(failure, tried, names)
        guilty += ranks
        judgements.append(sentence)
    return Judgement(Verdict.FAIL if guilty else Verdict.WARN, "; ".join(judgements), ACTION)


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
