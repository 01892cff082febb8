# SPDX-License-Identifier: Apache-2.0
"""Can two processes of a cluster run get the same rank? Tests pytest-nixl's membership under faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from pytest_nixl import EtcdClient, Judgement, Settings, Verdict, supervisor, wait_until
from pytest_nixl.checks.rank_race.amplify import amplify
from pytest_nixl.checks.rank_race.explore import ExploredRun, Explorer
from pytest_nixl.checks.rank_race.forkserver import ForkedClaimant
from pytest_nixl.checks.rank_race.race import Race, is_late, is_transaction, lost_an_answer

Decide = Callable[[Judgement], None]

#: Seconds of the lease of a claimant that is killed. The next one is tried if it lost its lease before.
LEASES = (1, 4, 16)
#: Seconds of the leases of claimants that must survive on a busy machine.
LONG = 20
#: Seconds of the leases of a group that joins, and is killed then.
DYING = 4
#: Seconds of the leases of a group that refuses late claimants. They wait that long for a rank to become free.
REFUSING = 6
#: Timeout of a claim in seconds: longer than the lease of a killed claimant, even on a busy machine.
SECONDS = 120.0
#: Maximum duration in seconds of exploring the orders of requests.
EXPLORING = 60.0
#: Number of orders with a fault that the level ``standard`` tries: each has the fault one step later.
ORDERS = 12
#: Seconds by which the end of a lease, and the reactions to it, may be late.
LATE = 3.0
#: What a member says that etcd did not hear, or that did not hear of another one, for the length of a lease.
LOST = ("LeaseLostError", "MemberLostError")
REPORT = "report this output: it shows a defect of pytest-nixl's membership"


LESS = "run it again on a host that is less busy: this checks pytest-nixl itself"


@dataclass(frozen=True)
class Kill:
    """A claimant that was killed.

    :param group: its group, without the test's prefix.
    :param ttl: seconds of its lease.
    :param others: the claimants that get all ranks of the group.
    :param at: when it was killed, by :func:`time.monotonic`.
    """

    group: str
    ttl: int
    others: Sequence[ForkedClaimant]
    at: float

    @property
    def seconds(self) -> float:
        """The time from the kill until the last of the others had its rank."""
        return max(each.heard for each in self.others) - self.at


def kill_after(race: Race, group: str, requests: int, ttl: int, *, first: bool) -> Kill | None:
    """Kill a claimant of a group of two after some of its requests, and start the claimants that get all ranks.

    :param ttl: seconds of its lease.
    :param first: whether it is the first claimant of the group.
    :returns: None if it lost its lease before.
    """
    others = [] if first else [race.claim(group, 2, ttl=LONG)]
    _wait_for_members(race.etcd, f"{race.prefix}{group}/", len(others))
    way = race.path.client(group)
    way.hold(lambda request: request.method != "LeaseKeepAliveOnce")  # it refreshes its lease beside the claim
    victim = race.claim(group, 2, endpoint=way.endpoint, function="membership", ttl=ttl)
    kept = race.let_through(way, requests, seconds=SECONDS)
    way.cut()
    victim.kill()
    if not kept:
        for each in others:
            each.close()
        return None
    killed = time.monotonic()
    others += [race.claim(group, 2, ttl=LONG) for _ in range(2 - len(others))]
    return Kill(group, ttl, others, killed)


def _concluded(race: Race, found: Sequence[str], good: str) -> Judgement:
    """Judge a check of pytest-nixl itself: on a busy host, mere lateness does not fail the run."""
    if found:
        return Judgement(Verdict.FAIL, "; ".join(found), REPORT)
    if not race.late:
        return Judgement(Verdict.PASS, good)
    late, busy = "; ".join(race.late), race.load.words()
    if busy:
        return Judgement(Verdict.WARN, f"undecided: no rank was wrong, but {late}; {busy}", LESS)
    return Judgement(Verdict.FAIL, late, REPORT)


@pytest.mark.nixl_check("ranks-after-a-kill", own=True)
@pytest.mark.nixl_early(waits=3)
def test_a_killed_claimant_blocks_nobody_longer_than_its_lease(race: Race, verdict: Decide) -> None:
    """A claimant is killed between any two requests; its rank is claimed again after its lease has ended."""
    kills: list[Kill] = []
    for first in (True, False):
        # The first claimant sends two requests and waits; the last one sends four and has joined.
        for requests in range(3 if first else 5):
            case = f"{'first' if first else 'last'}-after-{requests}"
            made = (kill_after(race, f"{case}-lease-{ttl}", requests, ttl, first=first) for ttl in LEASES)
            kill = next(filter(None, made), None)
            if kill is None:
                lost = f"{case}: the claimant lost its lease of {LEASES[-1]} s before it could be killed"
                verdict(Judgement(Verdict.INCONCLUSIVE, lost, LESS))
                return
            kills.append(kill)
    found, deadline = [], time.monotonic() + SECONDS
    for kill in kills:
        left = deadline - time.monotonic()
        found += [f"{kill.group}: {fault}" for fault in race.faults(kill.others, 2, kill.group, left)]
    latest = max(kills, key=lambda kill: kill.seconds - kill.ttl)
    if not found and latest.seconds > latest.ttl + LATE:
        late = f"all ranks were claimed again, but only after {latest.seconds:.1f} s, with a lease of {latest.ttl} s"
        verdict(Judgement(Verdict.WARN, late, "run it again on a host that is less busy"))
        return
    longest = max(kill.seconds for kill in kills)
    verdict(_concluded(race, found, f"killed at {len(kills)} points; all ranks claimed after at most {longest:.1f} s"))


@pytest.mark.nixl_check("rank-race-is-seen", own=True)
@pytest.mark.nixl_early
def test_the_known_race_is_detected(race: Race, verdict: Decide) -> None:
    """The known read-modify-write race is detected. Otherwise the other checks of this suite would prove little."""
    amplified = amplify(race.path, race.etcd, race.known_bad, 2, group=race.prefix)
    explorer = Explorer(race.path, race.etcd, race.known_bad, 2, group=race.prefix)
    explored = explorer.explore(until=_is_twice)
    blind = [how for how, seen in (("amplified", amplified.faults), ("explored", explored.bad)) if not seen]
    if blind:
        verdict(Judgement(Verdict.ERROR, f"the known race was not detected when {' and '.join(blind)}", REPORT))
        return
    again = explorer.replay(explored.bad[0].seed)
    if not again.faults:
        verdict(Judgement(Verdict.ERROR, f"seed {again.seed} gave wrong ranks once and right ranks once", REPORT))
        return
    verdict(Judgement(Verdict.PASS, f"{amplified.faults[0]}; {explored}; {explored.bad[0].describe()}"))


@pytest.mark.nixl_check("ranks-unique", own=True)
@pytest.mark.nixl_early
@pytest.mark.parametrize("claimants", [2, 8])
def test_simultaneous_claims_give_each_rank_once(race: Race, verdict: Decide, claimants: int) -> None:
    """Claims whose first writes reach etcd at the same time get the ranks 0 to n-1, each once."""
    done = amplify(race.path, race.etcd, race.membership, claimants, group=race.prefix)
    found = done.faults
    if done.unmet and not done.twice:
        found = ()
        race.late.append(f"the claims did not overlap: {done.unmet}")
    verdict(_concluded(race, found, f"{claimants} claims that overlapped got {claimants} ranks"))


@pytest.mark.nixl_check("ranks-in-every-order", own=True)
@pytest.mark.nixl_early
@pytest.mark.parametrize("fault", ["no-fault", "one-lost-answer", "one-crash"])
def test_no_order_of_requests_gives_wrong_ranks(
    race: Race, verdict: Decide, fault: str, nixl_settings: Settings
) -> None:
    """No order of two claimants' requests gives a wrong rank, even with one crash or one lost answer.

    The orders with a crash or a lost answer are all tried at the level extended. The level standard tries 12 of each,
    chosen at random, with the fault at one place after the other.
    """
    explorer = Explorer(race.path, race.etcd, race.membership, 2, group=race.prefix, crashes=fault == "one-crash",
                        losses=fault == "one-lost-answer")  # fmt: skip
    sampled = fault != "no-fault" and not nixl_settings.extended
    if sampled:
        report = explorer.explore(runs=ORDERS, seconds=EXPLORING, by_chance=True)
    else:
        report = explorer.explore(seconds=EXPLORING)
    if report.bad:
        verdict(Judgement(Verdict.FAIL, f"{report}\n{report.bad[0].describe()}", REPORT))
    elif sampled and report.run == ORDERS:
        verdict(Judgement(Verdict.PASS, f"{report}; --nixl-level=extended tries all orders"))
    elif report.stopped:
        # The tests of pytest-nixl run all orders. There was no time for the rest of them here.
        verdict(Judgement(Verdict.WARN, f"no wrong rank, but there was no time for all orders: {report}", LESS))
    else:
        verdict(Judgement(Verdict.PASS, str(report)))


def refuse_late(race: Race) -> Judgement:
    """Judge whether a live group refuses late claimants, and continues."""
    members = [race.claim("live", 2, ttl=REFUSING) for _ in range(2)]
    found = race.faults(members, 2, "live", SECONDS)
    late = [race.claim("live", size, ttl=LONG) for size in (2, 2, 2, 3)]
    for outcome in race.outcomes(late, SECONDS):
        named = [f"rank {rank} on {outcome.host} (pid" for rank in range(2)]
        if is_late(outcome):
            race.late.append(f"a late claimant: {outcome}")
        elif outcome.rank is not None or not all(name in outcome.error for name in ("'live'", *named)):
            found.append(f"a late claimant was not refused with the names of the group's members: {outcome}")
    for member in members:
        member.go_on()  # it passes one more barrier and leaves
    for number, member in enumerate(members):
        ended = member.wait_until_ended(SECONDS)
        if not ended:
            race.late.append(f"member {number} had not ended {SECONDS:g} s after it was told to leave")
        elif member.message is not None and member.message.get("kind") in LOST:
            race.late.append(f"member {number} lost its lease or another member: {member.message['error']}")
        elif member.message is None or "error" in member.message:
            found.append(f"member {number} failed because of late claimants: {member.message}")
    left = race.etcd.get_prefix(race.prefix) if not race.late else {}
    found += [f"keys were left behind: {', '.join(left)}"] if left else []
    return _concluded(race, found, "4 late claimants were refused; the group continued and left no keys behind")


@pytest.mark.nixl_check("ranks-late-claimant", own=True)
@pytest.mark.nixl_early(waits=8)
def test_a_late_claimant_is_refused_and_harms_no_member(race: Race, verdict: Decide) -> None:
    """An extra claimant and a second job are refused with the members' names, and the live group continues."""
    verdict(refuse_late(race))


def follow_dead_group(race: Race) -> Judgement:
    """Judge whether a group starts after a dead group of the same name."""
    dead = [race.claim("again", 2, ttl=DYING) for _ in range(2)]
    found = race.faults(dead, 2, "again", SECONDS)
    for claimant in dead:
        claimant.kill()
    stale = race.etcd.count_prefix(race.prefix)
    found += race.faults([race.claim("again", 2, ttl=LONG) for _ in range(2)], 2, "again", SECONDS)
    return _concluded(race, found, f"a new group started although a dead group had left {stale} keys")


@pytest.mark.nixl_check("ranks-stale-keys", own=True)
@pytest.mark.nixl_early(waits=6)
def test_keys_of_a_dead_group_do_not_affect_the_next_group(race: Race, verdict: Decide) -> None:
    """After a whole group was killed, the next group of the same name gets all ranks when the leases have ended."""
    verdict(follow_dead_group(race))


@pytest.mark.nixl_check("ranks-lost-answer", own=True)
@pytest.mark.nixl_early
def test_a_claim_whose_answer_is_lost_is_not_made_twice(race: Race, verdict: Decide) -> None:
    """If the answer of an executed write is lost, the second attempt finds the first. Tested for every write."""
    found: list[str] = []
    for nth in range(1, 4):
        group, ways = f"lost-{nth}", [race.path.client(f"{nth}.{number}") for number in range(2)]
        for way in ways:
            way.lose_answer(is_transaction, nth=nth)
        claimants = [race.claim(group, 2, endpoint=way.endpoint, ttl=LONG) for way in ways]
        found += race.faults(claimants, 2, group, SECONDS)
        if not any(lost_an_answer(way) for way in ways):
            found.append(f"no answer of transaction {nth} was lost, so nothing was tested")
        members = race.etcd.count_prefix(f"{race.prefix}{group}/members/")
        if members != 2 and not race.late:
            found.append(f"2 claimants have {members} registrations after a lost answer")
    verdict(_concluded(race, found, "each answer in turn was lost, and no claimant registered twice"))


@pytest.mark.nixl_check("ranks-etcd-restart", own=True)
@pytest.mark.nixl_early
def test_an_etcd_that_restarts_does_not_affect_the_group(race: Race, verdict: Decide) -> None:
    """Registrations survive a kill and restart of etcd, and the group starts."""
    early = [race.claim("restarted", 4, ttl=LONG) for _ in range(3)]
    _wait_for_members(race.etcd, f"{race.prefix}restarted/", 3)
    race.server.kill()
    race.server.restart()
    claimants = [*early, race.claim("restarted", 4, ttl=LONG)]
    verdict(_concluded(race, race.faults(claimants, 4, "restarted", SECONDS), "4 ranks met across a restart of etcd"))


@pytest.mark.nixl_check("ranks-leader-change", own=True)
@pytest.mark.nixl_early
def test_another_leader_does_not_affect_the_group(race: Race, verdict: Decide) -> None:
    """A three-member etcd changes its leader and then loses it during registration, and the group starts."""
    from pytest_nixl import ThreeNodeEtcd

    if not ThreeNodeEtcd.possible():
        verdict(Judgement(Verdict.NOT_APPLICABLE, "an etcd of three members needs the etcd program on this host"))
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


def _wait_for_members(etcd: EtcdClient, prefix: str, count: int) -> None:
    wait_until(lambda: etcd.count_prefix(f"{prefix}members/") == count, f"{count} registrations", seconds=SECONDS)
