# SPDX-License-Identifier: Apache-2.0
"""Run every relevant order of the requests of several clients, each once.

Four independent parts work together. The proxy holds requests. :class:`_Scene` decides by rules when no client can
continue. :class:`DepthFirst` chooses the next event depth first and prunes by sleep sets; alternatively
:class:`~pytest_nixl.checks.rank_race.random_scheduler.RandomScheduler` chooses at random.
:mod:`pytest_nixl.checks.rank_race.invariants` checks the ranks.

If the order of two events cannot matter (they share no key, or both only read it), only one order is run. A crash cuts
a client off between two requests, kills it and starts another claimant in its place; the end of its leases is a further
event. A lost answer is another way in which a request can end. A run has at most one such fault.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_nixl.checks.rank_race.depth_first import DepthFirst
from pytest_nixl.checks.rank_race.events import DivergenceError, RequestEvent
from pytest_nixl.checks.rank_race.invariants import faults, owners_of_one_rank
from pytest_nixl.checks.rank_race.order import overlap
from pytest_nixl.checks.rank_race.random_scheduler import RandomScheduler
from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome, Running, Subject, leases
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, Lease
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient, Request, State
from pytest_nixl.etcd.proxy.request import EVERYTHING

#: Timeout in seconds for the next request of a client that nothing blocks.
QUIET_SECONDS = 30.0
#: Timeout in seconds for the first request of a claimant, whose program may start slowly.
START_SECONDS = 300.0
#: Maximum number of chosen requests per random run that their client has cancelled in the meantime.
MISSED = 200
_SEED = re.compile(r"(?P<clients>\d+):(?P<moves>[\d\w#.]*)@(?P<check>[0-9a-f]{8})")
_MOVE = re.compile(r"(?P<client>\d+)(?P<kind>[lce]?)(?:#(?P<place>\d+))?")


@dataclass(frozen=True)
class ExploredRun:
    """One order that was run, and its result."""

    seed: str
    events: tuple[RequestEvent, ...]
    outcomes: tuple[ClaimOutcome, ...]
    faults: tuple[str, ...]
    #: Why two clients got the same rank, if that does not need a crash or a lost answer; else empty.
    overlap: str = ""

    @property
    def lost(self) -> bool:
        """Whether an answer was lost."""
        return any(event.kind == "l" for event in self.events)

    @property
    def twice(self) -> bool:
        """Whether a rank was given more than once."""
        ranks = [outcome.rank for outcome in self.outcomes if outcome.rank is not None]
        return len(set(ranks)) < len(ranks)

    def describe(self) -> str:
        """Return the order with one event per line, the faults, and the seed."""
        lines = [f"  {number}. {event}" for number, event in enumerate(self.events, 1)]
        why = [f"  {self.overlap}"] if self.overlap else []
        return "\n".join(["the order:", *lines, *(f"  {each}" for each in self.faults), *why, f"  seed {self.seed}"])


@dataclass(frozen=True)
class ExplorationReport:
    """The result of an exploration."""

    subject: str
    clients: int
    crashes: bool
    losses: bool
    #: Number of orders that were run completely, and of runs that were abandoned as equivalent to earlier ones.
    run: int
    left: int
    #: Number of orders that the runs represent, including themselves.
    orders: int
    #: Runs with wrong ranks, and the number of orders that they represent.
    bad: tuple[ExploredRun, ...]
    bad_orders: int
    #: Why it ended before all orders were run; empty if it did not.
    stopped: str
    seconds: float

    @property
    def pruned(self) -> int:
        """Number of orders that were not run because they are equivalent to one that was run."""
        return self.orders - self.run

    def __str__(self) -> str:
        extra = [name for name, asked in (("one crash", self.crashes), ("one lost answer", self.losses)) if asked]
        with_ = f" with {' or '.join(extra)}" if extra else ""
        total = f"at least {self.orders}" if self.stopped else f"{self.orders}"
        text = (
            f"{self.subject}, {self.clients} clients{with_}: {total} orders, {self.run} run, {self.pruned} pruned "
            "(they only swap requests that share no key or only read); "
            f"{len(self.bad)} of those run are bad, and stand for {self.bad_orders}; {self.seconds:.1f} s"
        )
        return f"{text}; stopped: {self.stopped}" if self.stopped else text


def _never(run: ExploredRun) -> bool:
    return False


class Explorer:
    """Explores the orders of requests of one way to claim ranks.

    :param path: the proxy through which the claimants reach etcd.
    :param etcd: a client of the same etcd that does not use the proxy.
    :param subject: how ranks are claimed.
    :param clients: number of claimants.
    :param group: start of the groups' names; each run has a new group.
    :param crashes: whether one client per run may crash, between any two of its requests.
    :param losses: whether one answer per run may be lost. A run has at most one fault.
    """

    def __init__(
        self,
        path: EtcdProxy,
        etcd: EtcdClient,
        subject: Subject,
        clients: int,
        *,
        group: str,
        crashes: bool = False,
        losses: bool = False,
    ) -> None:
        self._path = path
        self._etcd = etcd
        self._subject = subject
        self._clients = clients
        self._group = group
        self._crashes = crashes
        self._losses = losses

    def explore(
        self,
        *,
        runs: int = 10_000,
        seconds: float = 60.0,
        until: Callable[[ExploredRun], bool] = _never,
        by_chance: bool = False,
    ) -> ExplorationReport:
        """Run orders until all are done.

        :param runs: maximum number of runs.
        :param seconds: maximum duration in seconds.
        :param until: called with each bad run; true ends the exploration.
        :param by_chance: whether to choose orders at random, for a subject that does not repeat itself. Such an
            exploration has no last order.
        """
        start = time.monotonic()
        tree: DepthFirst | RandomScheduler = RandomScheduler() if by_chance else DepthFirst()
        bad: list[ExploredRun] = []
        ran = left = orders = bad_orders = 0
        stopped = ""
        while tree.more:
            if stopped:
                break
            run, replaced = self._run(tree.choose, by_chance=by_chance)
            if run is None:
                left += 1
            else:
                ran += 1
                count = 1 if by_chance else linear_extensions(run.events, replaced)
                orders += count
                if run.faults:
                    bad.append(run)
                    bad_orders += count
            tree.advance()
            if bad and run is bad[-1] and until(run):
                stopped = "at the first bad order, as requested"
            elif tree.more and ran + left >= runs:
                stopped = f"after {runs} runs (the limit)"
            elif tree.more and time.monotonic() - start > seconds:
                stopped = f"after {seconds:g} s (the limit)"
        return ExplorationReport(
            self._subject.name, self._clients, self._crashes, self._losses, ran, left, orders, tuple(bad), bad_orders,
            stopped if tree.more else "", time.monotonic() - start,
        )  # fmt: skip

    def replay(self, seed: str) -> ExploredRun:
        """Run the order of a seed again.

        :param seed: seed that an exploration printed.
        :raises ValueError: if the seed is malformed or for another number of clients.
        :raises DivergenceError: if the subject behaves differently from the recorded run.
        """
        match = _SEED.fullmatch(seed)
        if match is None or int(match["clients"]) != self._clients:
            raise ValueError(
                f"{seed!r} is not a seed for {self._clients} clients: expected a seed that an exploration printed"
            )
        moves = iter(match["moves"].split(".") if match["moves"] else ())

        def choose(depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent | None:
            move = next(moves, None)
            if move is None:
                raise DivergenceError(f"seed {seed} has ended, but {enabled[0]} is still pending")
            found = next((event for event in enabled if event.move == move), None)
            if found is None:
                there = ", ".join(map(str, enabled))
                raise DivergenceError(f"step {depth + 1} of seed {seed} is {move}, but the possible events are {there}")
            return found

        run, _ = self._run(choose)
        assert run is not None, "a replay is never abandoned"
        if run.seed != seed:
            raise DivergenceError(
                f"seed {seed} now leads to other requests than when it was printed: {run.seed}", detail=run.describe()
            )
        return run

    def _run(self, choose: Choose, *, by_chance: bool = False) -> tuple[ExploredRun | None, Mapping[int, int]]:
        scene = _Scene(self._path, self._etcd, self._subject, self._clients, f"{self._group}{secrets.token_hex(4)}/")
        events: list[RequestEvent] = []
        missed = 0
        try:
            for number in range(self._clients):
                scene.start(number)
            while True:
                scene.settle()
                enabled = list(self._enabled(scene, events))
                if not enabled:
                    break
                event = choose(len(events), enabled, scene.replaced)
                if event is None:
                    return None, scene.replaced
                happened = scene.do(event)
                if happened == event:
                    events.append(event)
                elif by_chance and missed < MISSED:
                    missed += 1
                    # The program cancelled a request by its own clock: look again at what it does next.
                    events += [happened] if happened is not None else []
                else:
                    raise DivergenceError(
                        f"client {event.client} of {self._subject.name} cancelled a request by its own clock: {event}",
                        "give its etcd client no timeout or a longer one: here it must wait for etcd's answers",
                        self._path.describe(),
                    )
            outcomes = scene.outcomes()
            keys = self._etcd.get_prefix(self._subject.keys(scene.group))
            found = faults(outcomes, self._clients, [key.replace(scene.group, "<group>/") for key in keys])
            why = overlap(scene.ways, owners_of_one_rank(outcomes), {scene.group: "<group>/"})
            return ExploredRun(
                seed_of(self._clients, events), tuple(events), outcomes, tuple(found), why
            ), scene.replaced
        finally:
            scene.close()

    def _enabled(self, scene: _Scene, events: Sequence[RequestEvent]) -> Iterator[RequestEvent]:
        """Yield the events that may happen next, always in the same order."""
        spent = any(event.fault for event in events)
        for number, way in enumerate(scene.ways):
            if number in scene.dead:
                yield from scene.endings(number)
                continue
            requests = scene.events(number, way)
            yield from requests
            if spent:
                continue
            if self._losses:
                for event in requests:
                    yield RequestEvent(event.client, "l", event.label, event.nth, event.place, event.accesses)
            if self._crashes and number < self._clients and requests:
                yield RequestEvent(number, "c", "", 1)


Choose = Callable[[int, Sequence[RequestEvent], Mapping[int, int]], "RequestEvent | None"]


def seed_of(clients: int, events: Sequence[RequestEvent]) -> str:
    """Return the seed of an order: its moves and a checksum of its events."""
    check = zlib.crc32("\n".join(map(str, events)).encode())
    return f"{clients}:{'.'.join(event.move for event in events)}@{check:08x}"


class _Scene:
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
        way = self._path.client(f"client {number}")
        way.hold()
        self.ways.append(way)
        self._running.append(self._subject.start(way, self.group, self._size))

    def settle(self) -> None:
        """Wait until no client can continue. :raises DivergenceError: if one neither sends a request nor is blocked."""
        missing = [number for number in range(len(self.ways)) if number not in self.dead]

        def all_quiet() -> bool:
            return all(self._quiet(number) for number in missing)

        def all_started() -> bool:
            return all(self.ways[each].requests or self._running[each].outcome() is not None for each in missing)

        self._path.wait_quietly(all_started, seconds=START_SECONDS)
        if not self._path.wait_quietly(all_quiet, seconds=QUIET_SECONDS):
            busy = next(number for number in missing if not self._quiet(number))
            raise DivergenceError(
                f"client {busy} of {self._subject.name} neither sent a request nor ended within {QUIET_SECONDS:g} s",
                "if it waits for others by a watch, let blocked() of its subject return true",
                self._path.describe(),
            )

    def _quiet(self, number: int) -> bool:
        way = self.ways[number]
        if self._running[number].outcome() is not None:
            return True
        if way.held:
            return self._subject.complete(way)
        sent = [request for request in way.requests if request.state is State.SENT]
        if any(not request.stream and request.method != "Lock" for request in sent):
            return False  # an answer is pending
        return bool(sent) and self._subject.blocked(way, self.group, self._keys())

    def _keys(self) -> dict[str, bytes]:
        """Return keys and values of the group, oldest first."""
        found = self._etcd.by_creation(self._subject.keys(self.group))
        return {item.key: item.value for item in found}

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
        way = self.ways[event.client]
        if event.kind == "c":
            # Cut it off before killing it, so that it cannot reconnect in between.
            self.dead.add(event.client)
            way.cut()
            self._running[event.client].kill()
            self.replaced[len(self.ways)] = event.client
            self.start(len(self.ways))
            return event
        if event.kind == "e":
            self._ended.add(event.client)
            for lease in leases(way):
                Lease(self._etcd, lease, 0).revoke()
            return event
        held = sorted(way.held, key=self._label)
        request = held[event.place] if event.place < len(held) else None
        if request is None or self._label(request) != event.label:
            return None
        queue = self._queue(request)
        if not way.release_if_held(request, lose_answer=event.kind == "l"):
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
                way.name, error=f"waits forever; its last request was {way.requests[-1].label(self._names())}"
            )
            for number, (way, running) in enumerate(zip(self.ways, self._running, strict=True))
            if number not in self.dead
        )

    def close(self) -> None:
        """Kill every claimant and delete its keys."""
        for running in self._running:
            running.kill()
        granted = [lease for way in self.ways for lease in leases(way)]
        for way in self.ways:
            way.close()
        for lease in granted:
            Lease(self._etcd, lease, 0).revoke()
        self._etcd.delete_prefix(self._subject.keys(self.group))

    def _label(self, request: Request) -> str:
        if request not in self._labels:
            self._labels[request] = request.label(self._names())
        return self._labels[request]

    def _names(self) -> dict[str, str]:
        return {self.group: "<group>/"}


def linear_extensions(events: Sequence[RequestEvent], replaced: Mapping[int, int]) -> int:
    """Return the number of orders that are equivalent to this one, including itself."""
    chains: dict[int, list[int]] = {}
    for place, event in enumerate(events):
        chains.setdefault(event.client, []).append(place)
    before = [
        [earlier for earlier in range(place) if events[earlier].dependent(event, replaced)]
        for place, event in enumerate(events)
    ]
    names = sorted(chains)
    known: dict[tuple[int, ...], int] = {}

    def count(state: tuple[int, ...]) -> int:
        if state not in known:
            gone = {place for name, taken in zip(names, state, strict=True) for place in chains[name][:taken]}
            total = 0
            for index, name in enumerate(names):
                taken = state[index]
                if taken < len(chains[name]) and gone.issuperset(before[chains[name][taken]]):
                    total += count((*state[:index], taken + 1, *state[index + 1 :]))
            known[state] = total or 1
        return known[state]

    return count((0,) * len(names))
