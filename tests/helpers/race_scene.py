# SPDX-License-Identifier: Apache-2.0
"""The clients of one explored run, and when none of them can continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from helpers.race_events import DivergenceError, RequestEvent
from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome, Running, Subject, leases
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient, Request, State
from pytest_nixl.etcd.proxy.request import EVERYTHING

#: Timeout in seconds for the next request of a client that nothing blocks.
QUIET_SECONDS = 30.0
#: Timeout in seconds for the first request of a claimant, whose program may start slowly.
START_SECONDS = 300.0


class Scene:
    """The clients of one run. It decides when none of them can continue until an event is chosen."""

    def __init__(self, path: EtcdProxy, etcd: EtcdClient, subject: Subject, size: int, group: str) -> None:
        self.group = group
        self.ways: list[ProxyClient] = []
        self.dead: set[int] = set()
        self.replaced: dict[int, int] = {}
        self._path, self._etcd, self._subject, self._size = path, etcd, subject, size
        self._running: list[Running] = []
        self._ended: set[int] = set()
        self._done: dict[tuple[int, str], int] = {}
        self._labels: dict[Request, str] = {}

    def start(self, number: int) -> None:
        """Start a claimant. Each of its requests is held."""
        proxy_client = self._path.client(f"client {number}")
        proxy_client.hold()
        self.ways.append(proxy_client)
        self._running.append(self._subject.start(proxy_client, self.group, self._size))

    def settle(self) -> None:
        """Wait until no client can continue. :raises DivergenceError: if one neither sends a request nor is blocked."""
        missing = [number for number in range(len(self.ways)) if number not in self.dead]

        def all_quiet() -> bool:
            return all(self._quiet(number) for number in missing)

        def all_started() -> bool:
            return all(self.ways[client].requests or self._running[client].outcome() is not None for client in missing)

        self._path.wait_quietly(all_started, seconds=START_SECONDS)
        if not self._path.wait_quietly(all_quiet, seconds=QUIET_SECONDS):
            busy = next(number for number in missing if not self._quiet(number))
            raise DivergenceError(
                f"client {busy} of {self._subject.name} neither sent a request nor ended within {QUIET_SECONDS:g} s",
                "if it waits for others by a watch, let blocked() of its subject return true",
                self._path.describe(),
            )

    def _quiet(self, number: int) -> bool:
        proxy_client = self.ways[number]
        if self._running[number].outcome() is not None:
            return True
        if proxy_client.held:
            return True
        sent = [request for request in proxy_client.requests if request.state is State.SENT]
        if any(not request.stream and request.method != "Lock" for request in sent):
            return False  # an answer is pending
        return bool(sent) and self._subject.blocked(proxy_client, self.group, self._keys())

    def _keys(self) -> dict[str, bytes]:
        """Return keys and values of the group, oldest first."""
        results = self._etcd.by_creation(self._subject.keys(self.group))
        return {item.key: item.value for item in results}

    def events(self, number: int, way: ProxyClient) -> list[RequestEvent]:
        """Return the held requests of a living client as events."""
        if self._running[number].outcome() is not None:
            return []
        held = sorted(way.held, key=self._label)
        return [
            RequestEvent(number, "", label := self._label(request), self._done.get((number, label), 0) + 1, place,
                  request.accesses if request.method != "LeaseRevoke" else (EVERYTHING,))
            for place, request in enumerate(held)
        ]  # fmt: skip

    def endings(self, number: int) -> Iterator[RequestEvent]:
        """Yield the end of a dead client's leases, unless it has already happened."""
        if number not in self._ended and leases(self.ways[number]):
            yield RequestEvent(number, "e", "", 1, 0, (EVERYTHING,))

    def do(self, event: RequestEvent) -> RequestEvent | None:
        """Execute one event, wait until it has happened, and return it.

        The client may have ended or cancelled its request in the meantime. Then return what happened instead: None for
        nothing, or the same request without the fault.
        """
        proxy_client = self.ways[event.client]
        if event.kind == "c":
            # Cut it off before killing it, so that it cannot reconnect in between.
            self.dead.add(event.client)
            proxy_client.cut()
            self._running[event.client].kill()
            self.replaced[len(self.ways)] = event.client
            self.start(len(self.ways))
            return event
        if event.kind == "e":
            self._ended.add(event.client)
            for lease in leases(proxy_client):
                self._etcd.revoke(lease)
            return event
        held = sorted(proxy_client.held, key=self._label)
        request = held[event.place] if event.place < len(held) else None
        if request is None or self._label(request) != event.label:
            return None
        queue = self._queue(request)
        if event.kind == "l":
            proxy_client.lose_answer(lambda answered: answered is request)
        if not proxy_client.release_if_held(request):
            return None
        self._done[event.client, event.label] = event.nth
        over = {State.ANSWERED, State.ANSWER_LOST, State.DROPPED, State.UNANSWERED}
        if request.method == "Lock":
            # Its answer may have to wait for other clients. It has taken effect when its key exists, so poll for that.
            wait_until(
                lambda: request.state in over or self._waits_in(request, queue, first=event.kind == ""),
                f"the key of {request}",
                seconds=QUIET_SECONDS,
            )
        else:
            self._path.wait(lambda: request.state in over, f"the answer to {request}", seconds=QUIET_SECONDS)
            if event.kind == "l" and request.state is not State.ANSWER_LOST:
                return replace(event, kind="")
        return event

    def _queue(self, request: Request) -> list[str]:
        """Return the keys of the holder of a lock and its waiters, in order; empty for other requests."""
        return [key for key in self._keys() if request.method == "Lock" and key.startswith(f"{request.key}/")]

    def _waits_in(self, request: Request, before: Sequence[str], *, first: bool) -> bool:
        """Whether a lock's queue has a new key since ``before``; unless ``first``, the holder's does not count."""
        queue = self._queue(request)
        new = set(queue) - set(before)
        return bool(new if first else new - set(queue[:1]))

    def outcomes(self) -> tuple[ClaimOutcome, ...]:
        """Return the outcome of every claimant that was not killed."""
        return tuple(
            running.outcome()
            or ClaimOutcome(
                proxy_client.name,
                error=f"waits forever; its last request was {proxy_client.requests[-1].label(self._names())}",
            )
            for number, (proxy_client, running) in enumerate(zip(self.ways, self._running, strict=True))
            if number not in self.dead
        )

    def close(self) -> None:
        """Kill every claimant and delete its keys."""
        for running in self._running:
            running.kill()
        granted = [lease for proxy_client in self.ways for lease in leases(proxy_client)]
        for proxy_client in self.ways:
            proxy_client.close()
        for lease in granted:
            self._etcd.revoke(lease)
        self._etcd.delete_prefix(self._subject.keys(self.group))

    def _label(self, request: Request) -> str:
        if request not in self._labels:
            self._labels[request] = request.label(self._names())
        return self._labels[request]

    def _names(self) -> dict[str, str]:
        return {self.group: "<group>/"}
