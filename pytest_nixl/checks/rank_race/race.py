# SPDX-License-Identifier: Apache-2.0
"""A rank race, and :func:`amplify`, which makes the claims of its claimants overlap every time.

All claimants read before any of them writes: the first request of each claimant is held until all have sent one, no
matter how late they start. After that only writes are held, until each claimant has sent one or waits in etcd's lock
behind another claimant. Later writes are held in the same way, because the first write need not be that of the rank: a
claimant may write that it is there, and look for its rank after a pause. Whoever reads after its write reads only when
etcd has all the writes that were held together with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.order import describe_order, overlap, read_too_late
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    FunctionSubject,
    MembershipSubject,
    Running,
    Subject,
    faults,
    given_twice,
    leases,
    outcome_of,
    owners_of_one_rank,
    waits_for_lock,
)
from pytest_nixl.core.cpu_contention import HostLoad
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient, Request, State
from pytest_nixl.etcd_servers.sources import OwnServer

FUNCTIONS = "pytest_nixl.checks.rank_race.functions"
#: A way to claim ranks with a known race.
KNOWN_BAD = f"{FUNCTIONS}:read_modify_write"
#: Start of error messages that a busy machine may cause too, because a claimant or its lease was late.
_LATE = ("MissingRanksError", "MemberLostError", "LeaseLostError", "EtcdError: etcd at")
_IN_TIME = "has no rank in time"

#: Timeout in seconds of each step of all claimants: the first request, the first write or lock, and the rank.
STEP_SECONDS = 300.0
#: Seconds between two polls of the keys of a lock.
_LOOK_SECONDS = 0.1
#: Seconds to wait for the next write of each claimant after its first one, before all go on by themselves.
NEXT_WRITE_SECONDS = 20.0
#: Timeout in seconds for ranks after claims that did not overlap; then only a duplicate rank proves anything.
_APART_SECONDS = 10.0
_WRITES = {"Put", "Txn", "DeleteRange"}


@dataclass
class Race:
    """An etcd to disturb, a proxy to it, and claimants."""

    server: OwnServer
    #: A client that does not use the proxy.
    etcd: EtcdClient
    path: EtcdProxy
    #: Prefix of the keys of this test.
    prefix: str
    claimants: list[Claimant] = field(default_factory=list)
    #: One sentence for each event that came too late. On a busy host that proves nothing.
    late: list[str] = field(default_factory=list)
    load: HostLoad = field(default_factory=HostLoad)

    @property
    def membership(self) -> MembershipSubject:
        """The membership of pytest-nixl."""
        return MembershipSubject()

    @property
    def known_bad(self) -> FunctionSubject:
        """A way to claim ranks with a known race."""
        return FunctionSubject(KNOWN_BAD)

    def claim(
        self, group: str, size: int, *, endpoint: str = "", function: str = "membership_with_barrier", **more: Any
    ) -> Claimant:
        """Start a claimant as a process. ``group`` is without the test's prefix."""
        arguments = {"endpoint": endpoint or self.server.endpoint, "group": f"{self.prefix}{group}/", "size": size}
        claimant = Claimant(f"{FUNCTIONS}:{function}", {**arguments, **more})
        self.claimants.append(claimant)
        return claimant

    def let_through(self, proxy_client: ProxyClient, count: int, *, seconds: float) -> bool:
        """Let ``count`` requests of a claimant pass through the proxy, and wait for the answer to each.

        :returns: whether it made them; False if it leaves before, as one does that was too slow to keep its lease.
        """
        for _ in range(count):
            [request] = self.path.wait(lambda: proxy_client.held, f"a request of {proxy_client.name}", seconds=seconds)
            if request.method == "LeaseRevoke":
                return False
            proxy_client.release(request)
            self.path.wait(partial(_answered, request), f"the answer to {request}", seconds=seconds)
        return True

    def outcomes(self, claimants: Sequence[Claimant], seconds: float) -> list[ClaimOutcome]:
        """Return the results of claims; wait up to ``seconds`` for all together."""
        deadline = time.monotonic() + seconds
        return [
            _outcome(number, claimant, max(0.0, deadline - time.monotonic()))
            for number, claimant in enumerate(claimants)
        ]

    def faults(self, claimants: Sequence[Claimant], size: int, group: str, seconds: float) -> list[str]:
        """Wait for claims and return the faults of their ranks; faults that are only late go to ``late``."""
        outcomes = self.outcomes(claimants, seconds)
        wrong = faults(outcomes, size, self.etcd.get_prefix(f"{self.prefix}{group}/"))
        ranks = [outcome.rank for outcome in outcomes if outcome.rank is not None]
        sound = len(set(ranks)) == len(ranks) and set(ranks) <= set(range(size))
        if sound and any(is_late(outcome) for outcome in outcomes):
            self.late += wrong
            return []
        return wrong


def _answered(request: Request) -> bool:
    return request.state is State.ANSWERED


def is_late(outcome: ClaimOutcome) -> bool:
    """Whether a claim failed only because of a timeout."""
    error = outcome.error
    return outcome.rank is None and (
        error == _IN_TIME or (error.startswith(_LATE) and (not error.startswith("EtcdError") or ": timeout, " in error))
    )


def _outcome(number: int, claimant: Claimant, seconds: float) -> ClaimOutcome:
    claimant.wait(seconds)
    name = f"claimant {number}"
    return outcome_of(name, claimant) or ClaimOutcome(name, pid=claimant.pid, error=_IN_TIME)


@dataclass(frozen=True)
class Amplified:
    """The result of one amplified run."""

    outcomes: tuple[ClaimOutcome, ...]
    #: What is wrong with the ranks. If not all claimants have finished, only duplicate ranks.
    faults: tuple[str, ...]
    #: Whether the answer to be lost was lost.
    lost: bool
    #: Whether every claimant's first write was held until all had sent one.
    met: bool
    #: Whether all other claimants waited in etcd's lock while a write of one claimant was held.
    locked: bool
    #: Why the claims neither overlapped nor were separated by a lock, so that good ranks prove nothing; else empty.
    unmet: str
    #: Why the order of requests gave two claimants the same rank; empty if unknown.
    cause: str
    #: The requests of all claimants in the order of forwarding to etcd, one per line.
    order: str
    seconds: float

    @property
    def twice(self) -> bool:
        """Whether two claimants got the same rank."""
        return bool(given_twice(self.outcomes))


class _Progress(Enum):
    """The state of a claimant after all first requests were released."""

    MOVING = "moving"
    WRITES = "its first write is held"
    WAITS = "waits in etcd's lock"
    ENDED = "ended"


def amplify(
    path: EtcdProxy,
    etcd: EtcdClient,
    subject: Subject,
    clients: int,
    *,
    group: str,
    seconds: float = STEP_SECONDS,
    loses: tuple[int, int] | None = None,
) -> Amplified:
    """Let several claimants claim ranks at once; hold their first writes until each has sent one or waits for a lock.

    :param path: the proxy through which the claimants reach etcd.
    :param etcd: a client of the same etcd that does not use the proxy.
    :param subject: how ranks are claimed.
    :param clients: number of claimants.
    :param group: start of the group's name; the rest is new for each run.
    :param seconds: timeout for the first requests of all claimants, again for their first writes, and for their ranks.
    :param loses: number of a claimant, and which of its answers is lost, from 1 on; None: no answer is lost. The
        claimants then ask for etcd's lock in the order of their numbers.
    """
    start = time.monotonic()
    group = f"{group}{secrets.token_hex(4)}/"
    names = {group: "<group>/"}
    proxy_clients = [path.client(f"claimant {number}") for number in range(clients)]
    running: list[Running] = []
    try:
        if loses is not None:
            proxy_clients[loses[0]].lose_answer(nth=loses[1])
        for proxy_client in proxy_clients:
            proxy_client.hold()
            running.append(subject.start(proxy_client, group, clients))
        claims = _Claims(path, etcd, subject, group, proxy_clients, running)
        unmet = claims.wait_for_first_requests(seconds)
        stands = claims.wait_for_first_writes(0.0 if unmet else seconds, in_turn=loses is not None)
        met = all(stand is _Progress.WRITES for stand in stands)
        locked = _Progress.WRITES in stands and _Progress.WAITS in stands
        locked = locked and set(stands) <= {_Progress.WRITES, _Progress.WAITS}
        if not unmet and not met and not locked:
            unmet = _reasons_apart(proxy_clients, running, stands, names, seconds)
        if not unmet:
            locked |= claims.go_on_in_step(seconds)
        for proxy_client in proxy_clients:
            proxy_client.release()
        remaining = min(seconds, _APART_SECONDS) if unmet else seconds
        done = path.wait_quietly(lambda: all(claim.outcome() is not None for claim in running), seconds=remaining)
        outcomes = tuple(outcome for claim in running if (outcome := claim.outcome()) is not None)
        if not done:
            late = [
                proxy_client.name
                for proxy_client, claim in zip(proxy_clients, running, strict=True)
                if claim.outcome() is None
            ]
            unmet = unmet or f"{' and '.join(late)} had no rank {seconds:g} s after the first writes"
        if not locked:
            unmet = unmet or read_too_late(proxy_clients, names)
        all_faults = faults(outcomes, clients, etcd.get_prefix(subject.keys(group))) if done else given_twice(outcomes)
        cause = overlap(proxy_clients, owners_of_one_rank(outcomes), names)
        lost = any(
            request.state is State.ANSWER_LOST for proxy_client in proxy_clients for request in proxy_client.requests
        )
        order = describe_order(proxy_clients, names)
        return Amplified(outcomes, tuple(all_faults), lost, met, locked, unmet, cause, order, time.monotonic() - start)
    finally:
        clean_up(etcd, subject, group, proxy_clients, running)


def clean_up(
    etcd: EtcdClient, subject: Subject, group: str, proxy_clients: Sequence[ProxyClient], running: Sequence[Running]
) -> None:
    """End claimants, close their paths through the proxy, and remove their leases and keys."""
    for claim in running:
        claim.kill()
    granted = [lease for proxy_client in proxy_clients for lease in leases(proxy_client)]
    for proxy_client in proxy_clients:
        proxy_client.close()
    for lease in granted:
        etcd.revoke(lease)
    etcd.delete_prefix(subject.keys(group))


@dataclass(frozen=True)
class _Claims:
    """The claims of one run, with the proxy's way of each claimant. The parameters are those of :func:`amplify`."""

    path: EtcdProxy
    etcd: EtcdClient
    subject: Subject
    group: str
    clients: Sequence[ProxyClient]
    running: Sequence[Running]

    @property
    def both(self) -> Iterator[tuple[ProxyClient, Running]]:
        """Each way with its claimant."""
        return zip(self.clients, self.running, strict=True)

    def keys(self) -> dict[str, bytes]:
        """Return the keys of the group in the order in which they were made."""
        return {item.key: item.value for item in self.etcd.by_creation(self.subject.keys(self.group))}

    def wait_for_first_requests(self, seconds: float) -> str:
        """Wait until the first request of each claimant is held; return why that failed, empty if it succeeded."""

        def all_there() -> bool:
            return all(bool(client.held) or claim.outcome() is not None for client, claim in self.both)

        if not self.path.wait_quietly(all_there, seconds=seconds):
            silent = [client.name for client, claim in self.both if not client.held and claim.outcome() is None]
            return f"{' and '.join(silent)} sent no request to etcd within {seconds:g} s"
        ended = [outcome for claim in self.running if (outcome := claim.outcome()) is not None]
        return "; ".join(f"{outcome.name} ended before the claims could overlap: {outcome}" for outcome in ended)

    def wait_for_first_writes(self, seconds: float, *, in_turn: bool) -> list[_Progress]:
        """Release everything except writes, until no claimant can continue, or ``seconds`` have passed.

        :param in_turn: whether each claimant goes on only when the one before has sent its first write or has ended.
        """
        for proxy_client, claim in self.both:
            _hold_only_writes(proxy_client)
            if in_turn and proxy_client is not self.clients[-1]:
                self.path.wait_quietly(partial(_writes_or_ended, proxy_client, claim), seconds=seconds)

        def all_progress() -> list[_Progress]:
            locks = any(request.method == "Lock" for proxy_client in self.clients for request in proxy_client.requests)
            keys = self.keys() if locks else {}
            return [_stand(proxy_client, claim, keys) for proxy_client, claim in self.both]

        deadline = time.monotonic() + seconds
        while True:
            self.path.wait_quietly(lambda: _Progress.MOVING not in all_progress(), seconds=_LOOK_SECONDS)
            stands = all_progress()
            if _Progress.MOVING not in stands or time.monotonic() > deadline:
                return stands

    def go_on_in_step(self, seconds: float) -> bool:
        """Release the held writes, and hold the next ones until each claimant has sent one, waits or has its rank.

        This ends when no write is held, or when a claimant neither writes nor waits for :data:`NEXT_WRITE_SECONDS`.

        :returns: whether all other claimants waited in etcd's lock while a write of one claimant was held.
        """
        locked, end = False, time.monotonic() + seconds
        while time.monotonic() < end:
            self._release_writes_together()
            deadline = min(end, time.monotonic() + NEXT_WRITE_SECONDS)
            while True:
                keys = self.keys()
                states = [self._state(proxy_client, claim, keys) for proxy_client, claim in self.both]
                if _Progress.MOVING not in states or time.monotonic() > deadline:
                    break
                self.path.wait_quietly(lambda: False, seconds=_LOOK_SECONDS)
            if _Progress.MOVING in states or _Progress.WRITES not in states:
                return locked
            waiting = [
                proxy_client
                for proxy_client, state in zip(self.clients, states, strict=True)
                if state is _Progress.WAITS
            ]
            locked |= len(waiting) == len(self.clients) - 1 and all(
                waits_for_lock(proxy_client, keys) for proxy_client in waiting
            )
        return locked

    def _release_writes_together(self) -> None:
        """Release the held writes; hold whatever the claimants send next until etcd has answered all these writes."""
        writes = [(proxy_client, request) for proxy_client in self.clients for request in proxy_client.held]
        for proxy_client in self.clients:
            proxy_client.hold()
        for proxy_client, request in writes:
            proxy_client.release_if_held(request)
        self.path.wait_quietly(
            lambda: all(write.state is not State.SENT for _, write in writes), seconds=NEXT_WRITE_SECONDS
        )
        for proxy_client in self.clients:
            _hold_only_writes(proxy_client)

    def _state(self, client: ProxyClient, claim: Running, keys: Mapping[str, bytes]) -> _Progress:
        stand = _stand(client, claim, keys)
        if stand is _Progress.ENDED:
            client.release()  # it has its rank: what it writes now does not decide about one
        return (
            _Progress.WAITS if stand is _Progress.MOVING and self.subject.blocked(client, self.group, keys) else stand
        )


def _stand(proxy_client: ProxyClient, claim: Running, keys: Mapping[str, bytes]) -> _Progress:
    if claim.outcome() is not None:
        return _Progress.ENDED
    if proxy_client.held:
        return _Progress.WRITES
    return _Progress.WAITS if waits_for_lock(proxy_client, keys) else _Progress.MOVING


def _reasons_apart(
    proxy_clients: Sequence[ProxyClient],
    running: Sequence[Running],
    stands: Sequence[_Progress],
    names: Mapping[str, str],
    seconds: float,
) -> str:
    reasons = []
    for proxy_client, claim, stand in zip(proxy_clients, running, stands, strict=True):
        last = proxy_client.requests[-1].label(names) if proxy_client.requests else "none"
        if stand is _Progress.MOVING:
            reasons.append(
                f"{proxy_client.name} neither wrote nor waited in a lock within {seconds:g} s; its last request: {last}"
            )
        elif stand is _Progress.ENDED:
            reasons.append(f"{proxy_client.name} ended before the other one wrote: {claim.outcome()}")
    return "; ".join(reasons) or "all claimants wait in etcd's lock, but none of them holds it"


def _writes_or_ended(proxy_client: ProxyClient, claim: Running) -> bool:
    return bool(proxy_client.held) or claim.outcome() is not None


def _hold_only_writes(proxy_client: ProxyClient) -> None:
    proxy_client.hold(_is_write)
    for request in proxy_client.held:
        if not _is_write(request):
            proxy_client.release_if_held(request)


def _is_write(request: Request) -> bool:
    return request.method in _WRITES and request.writes
