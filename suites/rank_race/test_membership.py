# SPDX-License-Identifier: Apache-2.0
"""Can two processes of a cluster run get one rank? Our membership, under all that etcd and processes can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pytest_nixl import EtcdClient, Judgement, ProxyClient, Verdict, supervisor, wait_until
from pytest_nixl.checks.rank_race.amplify import amplify
from pytest_nixl.checks.rank_race.explore import ExploredRun, Explorer
from pytest_nixl.checks.rank_race.forkserver import ForkedClaimant
from pytest_nixl.etcd.proxy import Request, State

from .race import Race, is_late

Decide = Callable[[Judgement], None]

#: Seconds of the leases of those that are killed, and of those that have to live on a busy machine.
SHORT, LONG = 1, 20
#: Seconds for any claim: more than a lease of those that are killed, and what a busy machine takes.
SECONDS = 120.0
#: Seconds for all orders of requests: some tens of a quiet machine's.
EXPLORING = 60.0
#: Seconds that etcd may be late with the end of a lease, and everybody with what follows from it.
LATE = 3.0
REPORT = "this is a defect of pytest-nixl's membership: report it, with what is printed here"


LESS = "run it again where there is less to do: this is a check of pytest-nixl itself"


def _concluded(race: Race, found: Sequence[str], good: str) -> Judgement:
    """Judge a check of our own: for want of time, on a busy host, it fails nobody's run."""
    if found:
        return Judgement(Verdict.FAIL, "; ".join(found), REPORT)
    if not race.late:
        return Judgement(Verdict.PASS, good)
    late, busy = "; ".join(race.late), race.load.words()
    if busy:
        return Judgement(Verdict.WARN, f"not decided, no rank was wrong: {late}; {busy}", LESS)
    return Judgement(Verdict.FAIL, late, REPORT)


@pytest.mark.nixl_check("rank-race-is-seen", own=True)
def test_a_race_that_is_there_is_seen(race: Race, verdict: Decide) -> None:
    """The read-modify-write that made two pods rank 0 is caught: else what is not found below would say little."""
    amplified = amplify(race.path, race.etcd, race.known_bad, 2, group=race.prefix)
    explorer = Explorer(race.path, race.etcd, race.known_bad, 2, group=race.prefix)
    explored = explorer.explore(until=_is_twice)
    blind = [how for how, seen in (("amplified", amplified.faults), ("explored", explored.bad)) if not seen]
    if blind:
        verdict(Judgement(Verdict.ERROR, f"the known race was not seen when {' and '.join(blind)}", REPORT))
        return
    again = explorer.replay(explored.bad[0].seed)
    if not again.faults:
        verdict(Judgement(Verdict.ERROR, f"seed {again.seed} is bad once and good once", REPORT))
        return
    verdict(Judgement(Verdict.PASS, f"{amplified.faults[0]}; {explored}; {explored.bad[0].describe()}"))


@pytest.mark.nixl_check("ranks-unique", own=True)
@pytest.mark.parametrize("claimants", [2, 8])
def test_simultaneous_claims_give_each_rank_once(race: Race, verdict: Decide, claimants: int) -> None:
    """Claims whose first writes all reach etcd at one time get the ranks 0 to n-1, each once."""
    done = amplify(race.path, race.etcd, race.membership, claimants, group=race.prefix)
    found = done.faults
    if done.unmet and not done.twice:
        found = ()
        race.late.append(f"the claims did not overlap: {done.unmet}")
    verdict(_concluded(race, found, f"{claimants} claims that overlapped got {claimants} ranks"))


@pytest.mark.nixl_check("ranks-in-every-order", own=True)
@pytest.mark.parametrize("fault", ["no-fault", "one-lost-answer", "one-crash"])
def test_no_order_of_requests_breaks_it(race: Race, verdict: Decide, fault: str) -> None:
    """In no order of two claimants' requests, with a crash between any two or any answer lost, is a rank wrong."""
    explorer = Explorer(race.path, race.etcd, race.membership, 2, group=race.prefix, crashes=fault == "one-crash",
                        losses=fault == "one-lost-answer")  # fmt: skip
    report = explorer.explore(seconds=EXPLORING)
    if report.bad:
        verdict(Judgement(Verdict.FAIL, f"{report}\n{report.bad[0].describe()}", REPORT))
    elif report.stopped:
        # Our own correctness is proven where pytest-nixl is tested: here there was no time for the rest of it.
        verdict(Judgement(Verdict.WARN, f"none is bad of those that there was time for: {report}", LESS))
    else:
        verdict(Judgement(Verdict.PASS, str(report)))


@pytest.mark.nixl_check("ranks-after-a-kill", own=True)
def test_a_killed_claimant_blocks_nobody_longer_than_its_lease(race: Race, verdict: Decide) -> None:
    """Wherever between two of its requests a claimant is killed, its place is claimed again once its lease is over."""
    started: list[tuple[str, list[ForkedClaimant], float]] = []
    for first in (True, False):
        # The first to come makes two requests and waits; the last to come makes four, and is in.
        for requests in range(3 if first else 5):
            case = f"{'first' if first else 'last'}-after-{requests}"
            others = [] if first else [race.claim(case, 2, ttl=LONG)]
            if not first:
                _wait_for_members(race.etcd, f"{race.prefix}{case}/", 1)
            way = race.path.client(case)
            way.hold()
            victim = race.claim(case, 2, endpoint=way.endpoint, function="membership", ttl=SHORT)
            _let_through(race, way, requests)
            way.cut()
            victim.kill()
            others += [race.claim(case, 2, ttl=LONG) for _ in range(2 - len(others))]
            started.append((case, others, time.monotonic()))
    found, longest, deadline = [], 0.0, time.monotonic() + SECONDS
    for case, others, killed in started:
        left = deadline - time.monotonic()
        found += [f"{case}: {fault}" for fault in race.faults(others, 2, case, left)]
        longest = max(longest, time.monotonic() - killed)
    if not found and longest > SHORT + LATE:
        late = f"all places were claimed again, but it took up to {longest:.1f} s where the lease is {SHORT} s"
        verdict(Judgement(Verdict.WARN, late, "run it again where there is less to do"))
        return
    verdict(_concluded(race, found, f"killed at {len(started)} points, and all there after {longest:.1f} s at most"))


@pytest.mark.nixl_check("ranks-late-claimant", own=True)
def test_who_comes_late_is_refused_by_name_and_harms_nobody(race: Race, verdict: Decide) -> None:
    """A claimant too many, and a whole second job in a live group, are told who has it, and that group goes on."""
    members = [race.claim("live", 2, ttl=LONG) for _ in range(2)]
    found = race.faults(members, 2, "live", SECONDS)
    late = [race.claim("live", size, ttl=LONG) for size in (2, 2, 2, 3)]
    for outcome in race.outcomes(late, SECONDS):
        named = [f"rank {rank} on {outcome.host} (pid" for rank in range(2)]
        if is_late(outcome):
            race.late.append(f"a late claimant: {outcome}")
        elif outcome.rank is not None or not all(name in outcome.error for name in ("'live'", *named)):
            found.append(f"a late claimant was not refused by the names of the group's members: {outcome}")
    for member in members:
        member.go_on()  # through one more barrier, and out
    for number, member in enumerate(members):
        ended = member.wait_until_ended(SECONDS)
        if not ended:
            race.late.append(f"member {number} had not ended {SECONDS:g} s after it was let go on")
        elif member.message is None or "error" in member.message:
            found.append(f"member {number} did not end well beside late claimants: {member.message}")
    left = race.etcd.get_prefix(race.prefix) if not race.late else {}
    found += [f"keys were left behind: {', '.join(left)}"] if left else []
    verdict(_concluded(race, found, "4 late claimants were refused, the group went on, and left nothing behind"))


@pytest.mark.nixl_check("ranks-stale-keys", own=True)
def test_keys_of_a_dead_group_do_not_poison_the_next(race: Race, verdict: Decide) -> None:
    """After a whole group was killed, the next one of its name gets all ranks once the leases are over."""
    dead = [race.claim("again", 2, ttl=SHORT + 1) for _ in range(2)]
    found = race.faults(dead, 2, "again", SECONDS)
    for claimant in dead:
        claimant.kill()
    stale = race.etcd.count_prefix(race.prefix)
    found += race.faults([race.claim("again", 2, ttl=LONG) for _ in range(2)], 2, "again", SECONDS)
    verdict(_concluded(race, found, f"a new group met though a dead one had left {stale} keys"))


@pytest.mark.nixl_check("ranks-lost-answer", own=True)
def test_a_claim_whose_answer_is_lost_is_not_made_twice(race: Race, verdict: Decide) -> None:
    """Where etcd has done a write and its answer is lost, the second attempt finds the first, for every write."""
    found: list[str] = []
    for nth in range(1, 4):
        group, ways = f"lost-{nth}", [race.path.client(f"{nth}.{number}") for number in range(2)]
        for way in ways:
            way.lose_answer(_is_transaction, nth=nth)
        claimants = [race.claim(group, 2, endpoint=way.endpoint, ttl=LONG) for way in ways]
        found += race.faults(claimants, 2, group, SECONDS)
        if not any(request.state is State.ANSWER_LOST for way in ways for request in way.requests):
            found.append(f"no answer of a {nth}. transaction was lost: nothing was tried")
        members = race.etcd.count_prefix(f"{race.prefix}{group}/members/")
        if members != 2 and not race.late:
            found.append(f"2 claimants have {members} places after a lost answer")
    verdict(_concluded(race, found, "each answer in turn was lost, and nobody claimed twice"))


@pytest.mark.nixl_check("ranks-etcd-restart", own=True)
def test_an_etcd_that_restarts_in_the_middle_changes_nothing(race: Race, verdict: Decide) -> None:
    """Claims that were made before etcd was killed and started again count, and the group comes together."""
    early = [race.claim("restarted", 4, ttl=LONG) for _ in range(3)]
    _wait_for_members(race.etcd, f"{race.prefix}restarted/", 3)
    race.server.kill()
    race.server.restart()
    claimants = [*early, race.claim("restarted", 4, ttl=LONG)]
    verdict(_concluded(race, race.faults(claimants, 4, "restarted", SECONDS), "4 ranks met across a restart of etcd"))


@pytest.mark.nixl_check("ranks-leader-change", own=True)
def test_another_leader_in_the_middle_changes_nothing(race: Race, verdict: Decide) -> None:
    """An etcd of three changes its leader, then loses it, while claims are made: the group comes together."""
    from pytest_nixl import ThreeNodeEtcd
    from pytest_nixl.etcd_servers.binary import find_binary

    if find_binary() is None:
        verdict(Judgement(Verdict.NOT_APPLICABLE, "an etcd of three members needs the etcd program on this machine"))
        return
    with ThreeNodeEtcd(supervisor()) as trio, trio.client() as client:
        claimants = []
        for count, disturb in enumerate((trio.change_leader, trio.kill_leader), 1):
            claimants.append(race.claim("leaders", 3, endpoint=trio.endpoint, ttl=LONG))
            _wait_for_members(client, f"{race.prefix}leaders/", count)
            disturb()
        claimants.append(race.claim("leaders", 3, endpoint=trio.endpoint, ttl=LONG))
        found = race.faults(claimants, 3, "leaders", SECONDS)
    verdict(_concluded(race, found, "3 ranks met across a change and a loss of etcd's leader"))


def _is_twice(run: ExploredRun) -> bool:
    return run.twice


def _is_transaction(request: Request) -> bool:
    return request.method == "Txn"


def _wait_for_members(etcd: EtcdClient, prefix: str, count: int) -> None:
    wait_until(lambda: etcd.count_prefix(f"{prefix}members/") == count, f"{count} claims in etcd", seconds=SECONDS)


def _let_through(race: Race, way: ProxyClient, count: int) -> None:
    """Let a client make some requests, and wait until it has its last answer and asks on, or watches."""
    for _ in range(count):
        [request] = race.path.wait(lambda: way.held, f"a request of {way.name}", seconds=SECONDS)
        way.release(request)
        race.path.wait(partial(_answered, request), f"the answer to {request}", seconds=SECONDS)


def _answered(request: Request) -> bool:
    return request.state is State.ANSWERED
