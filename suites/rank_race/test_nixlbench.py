# SPDX-License-Identifier: Apache-2.0
"""Can two processes of the installed nixlbench get the same rank? Not applicable without nixlbench."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Verdict
from pytest_nixl.checks.rank_race.orders import TriedOrders, try_orders
from pytest_nixl.checks.rank_race.race import Amplified, Race, amplify
from pytest_nixl.checks.rank_race.system_under_test import NixlbenchSubject, remedy_for

from ..conftest import FindingFixture

Decide = Callable[[Judgement], None]

#: Number of runs with overlapping claims. A race shows in each of them.
RUNS = 3
#: Timeout in seconds of each step of two processes of which one loses an answer. It may end or wait indefinitely then.
STEP = 20.0
#: Maximum duration in seconds of the search with lost answers.
SECONDS = 120.0
APART = "the registrations of two processes did not overlap, and no lock separated them"
NOT_TRIED = "run `nixlbench --runtime_type=ETCD --etcd_endpoints=URL` by hand, and check whether and when it registers"
WITHOUT_LOSS = "this nixlbench gives a rank twice although no answer of etcd was lost"


@pytest.mark.nixl_check("nixlbench-ranks-unique")
def test_two_nixlbench_processes_that_start_at_once_get_two_ranks(
    nixlbench: NixlbenchSubject, race: Race, verdict: Decide
) -> None:
    """Two processes get the ranks 0 and 1 in any order of their requests, as nixlbench's lock must ensure."""
    for run in range(1, RUNS + 1):
        done = amplify(race.path, race.etcd, nixlbench, 2, group=f"race-{run}-")
        if done.twice or (done.faults and not done.unmet):
            verdict(Judgement(Verdict.FAIL, _describe(done), remedy_for(done.outcomes)))
            return
        if done.unmet:
            verdict(Judgement(Verdict.INCONCLUSIVE, f"{APART}: {'; '.join((done.unmet, *done.faults))}", NOT_TRIED))
            return
    how = "a lock made one wait while the other wrote" if done.locked else "both wrote at once"
    tried = try_orders(race.path, race.etcd, nixlbench, group="race-order-")
    if tried.faults:
        verdict(Judgement(Verdict.FAIL, _describe(tried), remedy_for(tried.outcomes)))
        return
    good = f"two processes that registered at once got two ranks, {RUNS} times: {how}"
    orders = f"{tried.count} orders of their requests" + ("" if tried.complete else ", for more there was no time")
    verdict(Judgement(Verdict.PASS, f"{good}; and in {orders}"))


@pytest.mark.nixl_check("nixlbench-lost-answer", level="extended")
def test_nixlbench_gives_no_rank_twice_after_a_lost_answer(
    nixlbench: NixlbenchSubject, race: Race, finding: FindingFixture, verdict: Decide
) -> None:
    """No lost answer of etcd during the registration gives rank 0 twice."""
    done = amplify(race.path, race.etcd, nixlbench, 2, group="race-lost-")
    if done.twice:
        verdict(Judgement(Verdict.NOT_APPLICABLE, f"{WITHOUT_LOSS}: see nixlbench-ranks-unique"))
        return
    if done.unmet:
        verdict(Judgement(Verdict.INCONCLUSIVE, f"{APART}: {'; '.join((done.unmet, *done.faults))}", NOT_TRIED))
        return
    deadline = time.monotonic() + SECONDS
    for answer in itertools.count(1):
        runs = [_lose(nixlbench, race, claimant, answer) for claimant in range(2)]
        twice = next((run for run in runs if run.twice), None)
        if twice is not None and not twice.lost:
            verdict(Judgement(Verdict.FAIL, f"{WITHOUT_LOSS}: {_describe(twice)}", remedy_for(twice.outcomes)))
            return
        if twice is not None:
            finding("NIXLBENCH-RANK-TWICE", True, f"answer {answer} of a process was lost: {_describe(twice)}")
            return
        if not any(run.lost for run in runs):  # both registrations have fewer answers
            finding("NIXLBENCH-RANK-TWICE", False, f"each of {answer - 1} answers of both processes was lost once")
            return
        if time.monotonic() > deadline:
            few = f"no rank was given twice, but there was time to lose {answer} answers of each process only"
            verdict(Judgement(Verdict.INCONCLUSIVE, few, "run it again on a host that is less busy"))
            return


def _lose(nixlbench: NixlbenchSubject, race: Race, claimant: int, answer: int) -> Amplified:
    group = f"race-lost-{claimant}-{answer}-"
    return amplify(race.path, race.etcd, nixlbench, 2, group=group, seconds=STEP, loses=(claimant, answer))


def _describe(done: Amplified | TriedOrders) -> str:
    """Return the faults, their cause and the order of requests."""
    first, *more = done.faults
    return "; ".join(filter(None, (first, done.cause, *more))) + f"\n{done.order}"
