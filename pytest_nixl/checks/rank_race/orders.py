# SPDX-License-Identifier: Apache-2.0
"""Try the orders of two claimants' requests: the second one claims its rank after each step of the first.

Claims that only overlap miss a program in which the order of the steps decides: one that announces itself, lists the
announcements and takes its place among them is right as long as both announce before either lists. So each request of
the first claimant is held in turn, reads too, and the second one goes on to its rank in between.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pytest_nixl.checks.rank_race.order import describe_order, overlap, sent_requests
from pytest_nixl.checks.rank_race.race import STEP_SECONDS, clean_up
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    Running,
    Subject,
    faults,
    given_twice,
    owners_of_one_rank,
)
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient, Request, State

#: Seconds for all orders. A registration has about eight requests, and an order takes a second on a quiet host.
BUDGET = 90.0
#: Seconds for the second claimant to get its rank, or to wait for the first one, before the first one goes on.
_SECOND = 10.0
#: A claimant that makes the same read so many times in a row waits for another one. One may read twice to be sure. The
#: second one is not held, and each of its reads costs no time.
_POLLS, _POLLS_OF_SECOND = 5, 20
#: Seconds between two looks at the keys of a lock.
_LOOK = 0.1


@dataclass(frozen=True)
class TriedOrders:
    """The result of all orders, or of the first one in which the ranks were wrong.

    :param count: the number of orders that were tried.
    :param complete: whether no order is left: in the last one the first claimant had its rank, or waited for the other.
    :param outcomes: the claims of the last order.
    :param faults: what is wrong with their ranks.
    :param cause: why the order of the requests gave both the same rank; empty if unknown.
    :param order: the requests of the last order, one per line.
    """

    count: int
    complete: bool
    outcomes: tuple[ClaimOutcome, ...] = ()
    faults: tuple[str, ...] = ()
    cause: str = ""
    order: str = ""

    @property
    def twice(self) -> bool:
        """Whether both claimants got the same rank."""
        return bool(given_twice(self.outcomes))


def try_orders(
    path: EtcdProxy,
    etcd: EtcdClient,
    subject: Subject,
    *,
    group: str,
    seconds: float = STEP_SECONDS,
    budget: float = BUDGET,
) -> TriedOrders:
    """Let the second of two claimants claim its rank after each step of the first; stop at the first wrong ranks.

    If both begin with a write of a key of their own, each order is tried twice: the claimant whose key sorts last goes
    first, and then the other one. A program may take its place by such a key.

    :param path: the proxy through which the claimants reach etcd.
    :param etcd: a client of the same etcd that does not use the proxy.
    :param group: start of the group's name; the rest is new for each order.
    :param seconds: timeout of each wait for a claimant.
    :param budget: no order is begun after so many seconds.
    """
    end, count, step = time.monotonic() + budget, 0, 1
    while True:
        ended = False
        for last_first in (True, False):
            if count and time.monotonic() > end:
                return TriedOrders(count, complete=False)
            with _Pair.of(path, etcd, subject, group) as pair:
                own_keys = pair.meet(seconds, last_first=last_first)
                ended |= pair.claim_after(step, seconds)
                tried = pair.judged(count + 1, ended)
            count += 1
            if tried.faults:
                return tried
            if not own_keys:
                break  # the claimants do not differ
        if ended:
            return tried
        step += 1


class _Pair:
    """Two claimants whose requests are held."""

    def __init__(self, path: EtcdProxy, etcd: EtcdClient, subject: Subject, group: str) -> None:
        self._path, self._etcd, self._subject, self._group = path, etcd, subject, group
        self._proxy_clients: list[ProxyClient] = []
        self._running: dict[ProxyClient, Running] = {}
        self._late = ""

    @classmethod
    @contextmanager
    def of(cls, path: EtcdProxy, etcd: EtcdClient, subject: Subject, group: str) -> Iterator[_Pair]:
        """Start the claimants; they end with the context, and their keys are removed."""
        pair = cls(path, etcd, subject, f"{group}{secrets.token_hex(4)}/")
        pair._proxy_clients = [path.client(f"claimant {number}") for number in range(2)]
        try:
            for proxy_client in pair._proxy_clients:
                proxy_client.hold(_decides)
                pair._running[proxy_client] = subject.start(proxy_client, pair._group, 2)
            yield pair
        finally:
            clean_up(etcd, subject, pair._group, pair._proxy_clients, list(pair._running.values()))

    def meet(self, seconds: float, *, last_first: bool) -> bool:
        """Wait until the first read or write of each claimant is held, and choose which one goes first.

        :param last_first: whether that is the one whose key sorts last.
        :returns: whether both begin with a write of a key of their own.
        """
        firsts: list[Request] = []
        for proxy_client in self._proxy_clients:
            while self._wait_for_request(proxy_client, seconds) and not proxy_client.held[0].accesses:
                self._release(proxy_client, seconds)
            firsts += proxy_client.held[:1]
        own_keys = len(firsts) == 2 and all(first.writes for first in firsts) and firsts[0].key != firsts[1].key
        if own_keys and (firsts[0].key < firsts[1].key) == last_first:
            self._proxy_clients.reverse()
        return own_keys

    def claim_after(self, step: int, seconds: float) -> bool:
        """Let the second claimant claim its rank after so many requests of the first one, which then goes on.

        :returns: whether no order is left: the first one had its rank before, waits for the second one, or polls.
        """
        first, second = self._proxy_clients
        ended = False
        for _ in range(step):
            ended = not self._wait_for_request(first, seconds)
            if ended:
                break
            self._release(first, seconds)
        self._wait_for_request(first, seconds)
        ended |= self._ended(first) or _polls(first, _POLLS)
        second.release()
        self._wait(second, lambda: _polls(second, _POLLS_OF_SECOND), min(seconds, _SECOND))
        first.release()
        if not self._path.wait_quietly(lambda: all(map(self._ended, self._proxy_clients)), seconds=seconds):
            names = [proxy_client.name for proxy_client in self._proxy_clients if not self._ended(proxy_client)]
            self._late = f"{' and '.join(names)} had no rank after {seconds:g} s"
        return ended

    def judged(self, count: int, complete: bool) -> TriedOrders:
        """Judge the ranks of this order."""
        outcomes = tuple(outcome for claim in self._running.values() if (outcome := claim.outcome()) is not None)
        names = {self._group: "<group>/"}
        if self._late:
            wrong = [*given_twice(outcomes), self._late]
        else:
            wrong = faults(outcomes, 2, self._etcd.get_prefix(self._subject.keys(self._group)))
        return TriedOrders(
            count,
            complete,
            outcomes,
            tuple(wrong),
            overlap(self._proxy_clients, owners_of_one_rank(outcomes), names),
            describe_order(self._proxy_clients, names),
        )

    def _wait_for_request(self, proxy_client: ProxyClient, seconds: float) -> bool:
        """Wait until a request of a claimant is held; return False if it has its rank, or waits for the other one."""
        self._wait(proxy_client, lambda: bool(proxy_client.held), seconds)
        return bool(proxy_client.held) and not self._ended(proxy_client)

    def _release(self, proxy_client: ProxyClient, seconds: float) -> None:
        """Forward one request of a claimant, and wait for its answer, or until it waits in a lock."""
        request = proxy_client.held[0]
        if proxy_client.release_if_held(request):
            self._wait(proxy_client, lambda: request.state is not State.SENT, seconds)

    def _wait(self, proxy_client: ProxyClient, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a claimant has met a condition, has its rank or waits for the other one."""
        deadline = time.monotonic() + seconds
        while not self._path.wait_quietly(lambda: condition() or self._ended(proxy_client), seconds=_LOOK):
            if self._waits(proxy_client) or time.monotonic() > deadline:
                return

    def _ended(self, proxy_client: ProxyClient) -> bool:
        return self._running[proxy_client].outcome() is not None

    def _waits(self, proxy_client: ProxyClient) -> bool:
        keys = {item.key: item.value for item in self._etcd.by_creation(self._subject.keys(self._group))}
        return self._subject.blocked(proxy_client, self._group, keys)


def _polls(proxy_client: ProxyClient, count: int) -> bool:
    """Whether the last ``count`` requests of a claimant that reached etcd are the same read."""
    last = sent_requests([proxy_client])[-count:]
    return len(last) == count and not last[0].writes and len({(request.method, request.key) for request in last}) == 1


def _decides(request: Request) -> bool:
    """Whether a request is held: all but those that keep a lease."""
    return request.method != "LeaseKeepAliveOnce"
