# SPDX-License-Identifier: Apache-2.0
"""Run every relevant order of the requests of several clients, each once.

Four independent parts work together. The proxy holds requests. :class:`~helpers.race_scene.Scene`
decides by rules when no client can continue. :class:`DepthFirst` chooses the next event depth first and prunes by sleep
sets; alternatively :class:`~helpers.race_explorer.RandomScheduler` chooses at random.
:mod:`pytest_nixl.checks.rank_race.system_under_test` checks the ranks.

If the order of two events cannot matter (they share no key, or both only read it), only one order is run. A crash cuts
a client off between two requests, kills it and starts another claimant in its place; the end of its leases is a further
event. A lost answer is another way in which a request can end. A run has at most one such fault.
"""

from __future__ import annotations

import random
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from helpers.race_events import DivergenceError, RequestEvent
from helpers.race_scene import Scene
from pytest_nixl.checks.rank_race.order import overlap
from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome, Subject, faults, owners_of_one_rank
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.proxy import EtcdProxy


@dataclass
class _Node:
    """A point of choice: the possible events, those that need not be tried there, and those already tried."""

    enabled: tuple[RequestEvent, ...]
    asleep: frozenset[RequestEvent]
    chosen: RequestEvent | None = None
    done: list[RequestEvent] = field(default_factory=list)

    def next(self) -> RequestEvent | None:
        return next((event for event in self.enabled if event not in self.asleep and event not in self.done), None)


class DepthFirst:
    """Chooses events depth first, and skips by sleep sets what would repeat an equivalent order."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self.more = True

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent | None:
        """Return the next event; None if every order from here on was already run."""
        if depth < len(self._nodes):
            node = self._nodes[depth]
            if set(node.enabled) != set(enabled):
                raise DivergenceError(
                    f"after the same {depth} events a client sends other requests than before: "
                    f"{', '.join(map(str, enabled))}; before: {', '.join(map(str, node.enabled))}",
                    "make the subject deterministic: remove random numbers and times from its keys",
                )
            # The stored event has the keys of an earlier run's group, so return the current one.
            return next(event for event in enabled if event == node.chosen)
        asleep: frozenset[RequestEvent] = frozenset()
        if self._nodes:
            last = self._nodes[-1]
            assert last.chosen is not None
            sleeping = [*last.asleep, *last.done]
            current = {event: event for event in enabled}
            asleep = frozenset(
                event
                for event in sleeping
                if event in current and not _dependent(current[event], last.chosen, last, replaced)
            )
        node = _Node(tuple(enabled), asleep)
        node.chosen = node.next()
        self._nodes.append(node)
        return node.chosen

    def advance(self) -> None:
        """Go on to the next order."""
        while self._nodes:
            node = self._nodes[-1]
            if node.chosen is not None:
                node.done.append(node.chosen)
            node.chosen = node.next()
            if node.chosen is not None:
                return
            self._nodes.pop()
        self.more = False


def _dependent(event: RequestEvent, chosen: RequestEvent, node: _Node, replaced: Mapping[int, int]) -> bool:
    # Compare both events as of the same point of the same run, so that their keys belong to one group.
    same = next((item for item in node.enabled if item == event), event)
    return same.dependent(chosen, replaced)


class RandomScheduler:
    """Chooses the next event at random. From run to run, the single fault of a run happens one step later."""

    #: There is always another order.
    more = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._fault_at = self._deepest = 0

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent:
        """Return the next event: from the depth of the fault on, a fault if the run has had none."""
        self._deepest = max(self._deepest, depth)
        faults = [event for event in enabled if event.fault]
        if faults and depth >= self._fault_at:
            return self._random.choice(faults)
        return self._random.choice([event for event in enabled if not event.fault])

    def advance(self) -> None:
        """Prepare the next order."""
        self._fault_at = self._fault_at + 1 if self._fault_at < self._deepest else 0


#: Maximum number of chosen requests per random run that their client has cancelled in the meantime.
MISSED = 200
_SEED = re.compile(r"(?P<clients>\d+):(?P<moves>[\d\w#.]*)@(?P<check>[0-9a-f]{8})")


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
        reason = [f"  {self.overlap}"] if self.overlap else []
        return "\n".join(
            ["the order:", *lines, *(f"  {fault}" for fault in self.faults), *reason, f"  seed {self.seed}"]
        )


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
        extra = [name for name, included in (("one crash", self.crashes), ("one lost answer", self.losses)) if included]
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


@dataclass
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

    path: EtcdProxy
    etcd: EtcdClient
    subject: Subject
    clients: int
    group: str
    crashes: bool = False
    losses: bool = False

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
        ran = remaining = orders = bad_orders = 0
        stopped = ""
        while tree.more:
            if stopped:
                break
            run, replaced = self._run(tree.choose, by_chance=by_chance)
            if run is None:
                remaining += 1
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
            elif tree.more and ran + remaining >= runs:
                stopped = f"after {runs} runs (the limit)"
            elif tree.more and time.monotonic() - start > seconds:
                stopped = f"after {seconds:g} s (the limit)"
        return ExplorationReport(
            self.subject.name, self.clients, self.crashes, self.losses, ran, remaining, orders, tuple(bad), bad_orders,
            stopped if tree.more else "", time.monotonic() - start,
        )  # fmt: skip

    def replay(self, seed: str) -> ExploredRun:
        """Run the order of a seed again.

        :param seed: seed that an exploration printed.
        :raises ValueError: if the seed is malformed or for another number of clients.
        :raises DivergenceError: if the subject behaves differently from the recorded run.
        """
        match = _SEED.fullmatch(seed)
        if match is None or int(match["clients"]) != self.clients:
            raise ValueError(
                f"{seed!r} is not a seed for {self.clients} clients: expected a seed that an exploration printed"
            )
        moves = iter(match["moves"].split(".") if match["moves"] else ())

        def choose(depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent | None:
            move = next(moves, None)
            if move is None:
                raise DivergenceError(f"seed {seed} has ended, but {enabled[0]} is still pending")
            result = next((event for event in enabled if event.move == move), None)
            if result is None:
                possible = ", ".join(map(str, enabled))
                raise DivergenceError(
                    f"step {depth + 1} of seed {seed} is {move}, but the possible events are {possible}"
                )
            return result

        run, _ = self._run(choose)
        assert run is not None, "a replay is never abandoned"
        if run.seed != seed:
            raise DivergenceError(
                f"seed {seed} now leads to other requests than when it was printed: {run.seed}", detail=run.describe()
            )
        return run

    def _run(self, choose: Choose, *, by_chance: bool = False) -> tuple[ExploredRun | None, Mapping[int, int]]:
        scene = Scene(self.path, self.etcd, self.subject, self.clients, f"{self.group}{secrets.token_hex(4)}/")
        events: list[RequestEvent] = []
        missed = 0
        try:
            for number in range(self.clients):
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
                        f"client {event.client} of {self.subject.name} cancelled a request by its own clock: {event}",
                        "give its etcd client no timeout or a longer one: here it must wait for etcd's answers",
                        self.path.describe(),
                    )
            outcomes = scene.outcomes()
            keys = self.etcd.get_prefix(self.subject.keys(scene.group))
            results = faults(outcomes, self.clients, [key.replace(scene.group, "<group>/") for key in keys])
            reason = overlap(scene.ways, owners_of_one_rank(outcomes), {scene.group: "<group>/"})
            return ExploredRun(
                seed_of(self.clients, events), tuple(events), outcomes, tuple(results), reason
            ), scene.replaced
        finally:
            scene.close()

    def _enabled(self, scene: Scene, events: Sequence[RequestEvent]) -> Iterator[RequestEvent]:
        """Yield the events that may happen next, always in the same order."""
        spent = any(event.fault for event in events)
        for number, proxy_client in enumerate(scene.ways):
            if number in scene.dead:
                yield from scene.endings(number)
                continue
            requests = scene.events(number, proxy_client)
            yield from requests
            if spent:
                continue
            if self.losses:
                for event in requests:
                    yield RequestEvent(event.client, "l", event.label, event.nth, event.place, event.accesses)
            if self.crashes and number < self.clients and requests:
                yield RequestEvent(number, "c", "", 1)


Choose = Callable[[int, Sequence[RequestEvent], Mapping[int, int]], "RequestEvent | None"]


def seed_of(clients: int, events: Sequence[RequestEvent]) -> str:
    """Return the seed of an order: its moves and a checksum of its events."""
    check = zlib.crc32("\n".join(map(str, events)).encode())
    return f"{clients}:{'.'.join(event.move for event in events)}@{check:08x}"


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
    counts: dict[tuple[int, ...], int] = {}

    def count(state: tuple[int, ...]) -> int:
        if state not in counts:
            gone = {place for name, taken in zip(names, state, strict=True) for place in chains[name][:taken]}
            total = 0
            for index, name in enumerate(names):
                taken = state[index]
                if taken < len(chains[name]) and gone.issuperset(before[chains[name][taken]]):
                    total += count((*state[:index], taken + 1, *state[index + 1 :]))
            counts[state] = total or 1
        return counts[state]

    return count((0,) * len(names))
