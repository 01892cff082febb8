# SPDX-License-Identifier: Apache-2.0
"""Which rank is the culprit of a slow pair, and do pairs slow each other down?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Link, Samples, Settings, Verdict, WorkerPairs
from pytest_nixl.judge.concurrent import ConcurrentVerdict, at_once, disjoint
from pytest_nixl.judge.culprit import ACTION, MOST_PAIRS, RetestResult, blame, by_direction, failed_pairs, trials
from pytest_nixl.session.run import Run, asked_links

ALONE = "this run has only one rank"


@pytest.mark.nixl_check("rank-to-blame")
def test_no_rank_is_to_blame_for_a_slow_pair(
    nixl_run: Run,
    nixl_cluster: Cluster,
    nixl_pairs: WorkerPairs,
    expect: Callable[[Samples], Judgement],
    measure_until_clear: Callable[[Link, int, int, int], Samples],
    verdict: Callable[[Judgement], None],
) -> None:
    """Each end of a failed pair is measured again with a rank that is not suspected, which shows the culprit."""
    if not nixl_cluster.several:
        verdict(Judgement(Verdict.NOT_APPLICABLE, ALONE))
        return
    failed = failed_pairs(nixl_run.results, nixl_run.keys)
    if not failed:
        verdict(Judgement(Verdict.PASS, "no pair of ranks has failed"))
        return
    names = nixl_cluster.names
    if nixl_cluster.ranks == 2:
        said = list(by_direction(failed, nixl_run.results, nixl_run.keys, names))
        verdict(Judgement(Verdict.FAIL, "; ".join(dict.fromkeys(said)), f"start a third rank, or {ACTION}"))
        return
    guilty, said = [], []
    for each in failed[:MOST_PAIRS]:
        tried = []
        for trial in trials(each, failed, nixl_cluster.ranks):
            key = trial.key
            link = nixl_pairs.link(key.backend, key.op, key.memory, trial.ranks)
            samples = measure_until_clear(link, key.block, key.batch, key.depth)
            tried.append(RetestResult(trial, expect(samples), samples.transports))
        ranks, sentence = blame(each, tried, names)
        guilty += ranks
        said.append(sentence)
    verdict(Judgement(Verdict.FAIL if guilty else Verdict.WARN, "; ".join(said), ACTION))


@pytest.mark.nixl_check("pairs-together")
def test_pairs_do_not_hold_each_other_up(
    nixl_run: Run,
    nixl_settings: Settings,
    nixl_cluster: Cluster,
    nixl_pairs: WorkerPairs,
    verdict: Callable[[Judgement], None],
) -> None:
    """Pairs without a common rank transfer at the same time: report the sum, and whether a pair starves."""
    pairs = disjoint(nixl_cluster.ranks)
    if len(pairs) < 2:
        verdict(
            Judgement(
                Verdict.NOT_APPLICABLE, "this check needs two pairs without a common rank, and so at least four ranks"
            )
        )
        return
    said: list[ConcurrentVerdict] = []
    for kind in {(link.backend, link.op, link.memory): None for link in asked_links(nixl_settings, nixl_run.asked)}:
        backend, op, memory = kind
        if memory.target == "FILE":
            continue
        links = nixl_pairs.together(backend, op, memory, pairs)
        block, depth = max(nixl_settings.blocks), max(nixl_settings.depth)
        said.append(at_once(f"{backend} {op}", links, block, depth))
    bad = next((each for each in said if each.verdict is not Verdict.PASS), None)
    reasons = "; ".join(each.words for each in said)
    verdict(Judgement(bad.verdict if bad else Verdict.PASS, reasons, bad.remedy if bad else ""))
