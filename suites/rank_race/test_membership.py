# SPDX-License-Identifier: Apache-2.0
"""Can two processes of a cluster run get the same rank? Tests pytest-nixl's membership under faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from pytest_nixl import EtcdClient, Judgement, Verdict, wait_until
from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.race import Race, amplify

Decide = Callable[[Judgement], None]

#: Seconds of the lease of a claimant that is killed. The next one is tried if it lost its lease before.
LEASES = (1, 4, 16)
#: Seconds of the leases of claimants that must survive on a busy machine.
LONG = 20
#: Seconds of the leases of a group that joins, and is killed then.
DYING = 4
#: Timeout of a claim in seconds: longer than the lease of a killed claimant, even on a busy machine.
SECONDS = 120.0
#: Seconds by which the end of a lease, and the reactions to it, may be late.
LATE = 3.0
REPORT = "report this output: it shows a defect of pytest-nixl's membership"


LESS = "run it again on a host that is less busy: this checks pytest-nixl itself"


@dataclass(frozen=True)
class Kill:
    """A claimant that was killed.

    :param group: its group, without the test's prefix.
    :param ttl: seconds of its lease.
    :param claimants: the claimants that get all ranks of the group.
    :param at: when it was killed, by :func:`time.monotonic`.
    """

    group: str
    ttl: int
    claimants: Sequence[Claimant]
    at: float

    @property
    def seconds(self) -> float:
        """The time from the kill until the last of the others had its rank."""
        return max(claimant.heard for claimant in self.claimants) - self.at


def kill_after(race: Race, group: str, requests: int, ttl: int, *, first: bool) -> Kill | None:
    """Kill a claimant of a group of two after some of its requests, and start the claimants that get all ranks.

    :param ttl: seconds of its lease.
    :param first: whether it is the first claimant of the group.
    :returns: None if it lost its lease before.
    """
    claimants = [] if first else [race.claim(group, 2, ttl=LONG)]
    _wait_for_members(race.etcd, f"{race.prefix}{group}/", len(claimants))
    proxy_client = race.path.client(group)
    proxy_client.hold(lambda request: request.method != "LeaseKeepAliveOnce")  # it refreshes its lease beside the claim
    victim = race.claim(group, 2, endpoint=proxy_client.endpoint, function="membership", ttl=ttl)
    reached = race.let_through(proxy_client, requests, seconds=SECONDS)
    proxy_client.cut()
    victim.kill()
    if not reached:
        for claimant in claimants:
            claimant.close()
        return None
    killed = time.monotonic()
    claimants += [race.claim(group, 2, ttl=LONG) for _ in range(2 - len(claimants))]
    return Kill(group, ttl, claimants, killed)


def _concluded(race: Race, faults: Sequence[str], good: str) -> Judgement:
    """Judge a check of pytest-nixl itself: on a busy host, mere lateness does not fail the run."""
    if faults:
        return Judgement(Verdict.FAIL, "; ".join(faults), REPORT)
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
            candidates = (kill_after(race, f"{case}-lease-{ttl}", requests, ttl, first=first) for ttl in LEASES)
            kill = next(filter(None, candidates), None)
            if kill is None:
                lost = f"{case}: the claimant lost its lease of {LEASES[-1]} s before it could be killed"
                verdict(Judgement(Verdict.INCONCLUSIVE, lost, LESS))
                return
            kills.append(kill)
    faults, deadline = [], time.monotonic() + SECONDS
    for kill in kills:
        remaining = deadline - time.monotonic()
        faults += [f"{kill.group}: {fault}" for fault in race.faults(kill.claimants, 2, kill.group, remaining)]
    latest = max(kills, key=lambda kill: kill.seconds - kill.ttl)
    if not faults and latest.seconds > latest.ttl + LATE:
        late = f"all ranks were claimed again, but only after {latest.seconds:.1f} s, with a lease of {latest.ttl} s"
        verdict(Judgement(Verdict.WARN, late, "run it again on a host that is less busy"))
        return
    longest = max(kill.seconds for kill in kills)
    verdict(_concluded(race, faults, f"killed at {len(kills)} points; all ranks claimed after at most {longest:.1f} s"))


@pytest.mark.nixl_check("rank-race-is-seen", own=True)
@pytest.mark.nixl_early
def test_the_known_race_is_detected(race: Race, verdict: Decide) -> None:
    """The known read-modify-write race is detected. Otherwise the other checks of this suite would prove little."""
    done = amplify(race.path, race.etcd, race.known_bad, 2, group=race.prefix)
    if done.faults:
        verdict(Judgement(Verdict.PASS, f"{done.faults[0]}; {done.cause}\n{done.order}"))
        return
    verdict(Judgement(Verdict.ERROR, "the known race was not detected", REPORT))


@pytest.mark.nixl_check("ranks-unique", own=True)
@pytest.mark.nixl_early
@pytest.mark.parametrize("claimants", [2, 8])
def test_simultaneous_claims_give_each_rank_once(race: Race, verdict: Decide, claimants: int) -> None:
    """Claims whose first writes reach etcd at the same time get the ranks 0 to n-1, each once."""
    done = amplify(race.path, race.etcd, race.membership, claimants, group=race.prefix)
    faults = done.faults
    if done.unmet and not done.twice:
        faults = ()
        race.late.append(f"the claims did not overlap: {done.unmet}")
    verdict(_concluded(race, faults, f"{claimants} claims that overlapped got {claimants} ranks"))


def follow_dead_group(race: Race) -> Judgement:
    """Judge whether a group starts after a dead group of the same name."""
    dead = [race.claim("again", 2, ttl=DYING) for _ in range(2)]
    faults = race.faults(dead, 2, "again", SECONDS)
    for claimant in dead:
        claimant.kill()
    stale = race.etcd.count_prefix(race.prefix)
    faults += race.faults([race.claim("again", 2, ttl=LONG) for _ in range(2)], 2, "again", SECONDS)
    return _concluded(race, faults, f"a new group started although a dead group had left {stale} keys")


@pytest.mark.nixl_check("ranks-stale-keys", own=True)
@pytest.mark.nixl_early(waits=6)
def test_keys_of_a_dead_group_do_not_affect_the_next_group(race: Race, verdict: Decide) -> None:
    """After a whole group was killed, the next group of the same name gets all ranks when the leases have ended."""
    verdict(follow_dead_group(race))


def _wait_for_members(etcd: EtcdClient, prefix: str, count: int) -> None:
    wait_until(lambda: etcd.count_prefix(f"{prefix}members/") == count, f"{count} registrations", seconds=SECONDS)
