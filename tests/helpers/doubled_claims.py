# SPDX-License-Identifier: Apache-2.0
"""Claimants of ranks in memory: generators whose requests reach an etcd in memory through a proxy, on their own clock.

A program of a claimant yields a :class:`Call` for each request and gets its answer; a number to announce its rank; or a
:class:`Pause`. It returns when its process ends, and raises an error that its process would report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from helpers.doubled_nixl import DoubledClock
from pytest_nixl.checks.rank_race.race import Amplified
from pytest_nixl.checks.rank_race.system_under_test import ClaimOutcome, waits_for_lock
from pytest_nixl.etcd.proxy import Access, Request, State

#: Seconds between two steps of all claimants.
STEP = 0.01


@dataclass(frozen=True)
class Call:
    """A request: its method, its key (a prefix if it lists), what it writes, and its lease."""

    method: str
    key: str = ""
    value: bytes = b""
    lists: bool = False
    lease: int = 0


@dataclass(frozen=True)
class Pause:
    seconds: float


#: The causes of a rank that two claimants got.
READ_EARLY = (
    "claimant 0 and claimant 1 read '<group>/size' before any of them wrote it, and none of them took etcd's lock"
)
COUNTED = (
    "claimant 0 and claimant 1 listed the keys under '<group>/tokens/' after each of them had written one there, and "
    "took the same rank by their number"
)
LISTED_EARLY = (
    "claimant {} listed the keys under '<group>/tokens/' before claimant {} wrote one there, and took its rank by "
    "them, without etcd's lock"
)
#: A program, the options of the claims, their result, and the requests in the order in which they reached etcd.
Case = tuple["DoubledSubject", dict[str, Any], tuple[Any, ...], str]
Program = Callable[[str, int, int], Generator[Any, Any, None]]
WRITES = ("Put", "Txn", "DeleteRange", "Unlock")


@dataclass
class DoubledStore:
    """The keys of an etcd in the order in which they were made, and the client of the check."""

    keys: dict[str, bytes] = field(default_factory=dict)
    revoked: list[int] = field(default_factory=list)
    leases: int = 16

    def by_creation(self, prefix: str) -> tuple[Any, ...]:
        return tuple(
            SimpleNamespace(key=key, value=value) for key, value in self.keys.items() if key.startswith(prefix)
        )

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return {item.key: item.value for item in self.by_creation(prefix)}

    def revoke(self, lease: int) -> None:
        self.revoked.append(lease)

    def delete_prefix(self, prefix: str) -> None:
        for key in self.get_prefix(prefix):
            del self.keys[key]

    def execute(self, call: Call) -> Any:
        """Do what a request asks for, and return its answer."""
        if call.method == "LeaseGrant":
            self.leases += 1
            return self.leases
        if call.method == "Range":
            return list(self.get_prefix(call.key)) if call.lists else self.keys.get(call.key)
        if call.method == "Txn" and call.key in self.keys:
            return False
        if call.method == "Lock":
            self.keys[f"{call.key}/{call.lease:x}"] = b""
        elif call.method in ("Unlock", "DeleteRange"):
            self.keys.pop(call.key, None)
        elif call.method in WRITES:
            self.keys[call.key] = call.value
        return True


class DoubledProxyClient:
    """The client of a proxy that one claimant uses."""

    endpoint = "http://proxy:1"

    def __init__(self, path: DoubledPath, name: str) -> None:
        self.path, self.name = path, name
        self.requests: tuple[Request, ...] = ()
        self.closed = False
        self._calls: dict[Request, Call] = {}
        self._due: dict[Request, float] = {}
        self._matches: Callable[[Request], bool] | None = None
        self._loses = 0
        self.results: dict[Request, Any] = {}

    @property
    def held(self) -> tuple[Request, ...]:
        return tuple(request for request in self.requests if request.state is State.HELD)

    def hold(self, matching: Callable[[Request], bool] = lambda _: True) -> None:
        self._matches = matching

    def lose_answer(self, *, nth: int) -> None:
        self._loses = nth

    def release(self) -> None:
        self._matches = None
        for request in self.held:
            self._forward(request)

    def release_if_held(self, request: Request) -> bool:
        if request.state is State.HELD:
            self._forward(request)
            self.path.pass_time()
            return True
        return False

    def close(self) -> None:
        self.closed = True

    def send(self, call: Call) -> Request:
        start = call.key.encode()
        end = start[:-1] + bytes([start[-1] + 1]) if call.lists or call.method == "Lock" else start + b"\0"
        accesses = (Access(start, end, call.method in WRITES or call.method == "Lock"),) if call.key else ()
        request = Request(self.name, len(self.requests) + 1, call.method, call.key, accesses)
        self._calls[request] = call
        self.requests += (request,)
        request.state = State.HELD
        if self._matches is None or not self._matches(request):
            self._forward(request)
        return request

    def _forward(self, request: Request) -> None:
        request.state = State.SENT
        self.path.forwarded += 1
        request.sent = self.path.forwarded
        late = 4 * STEP * int(self.name.rpartition(" ")[2]) if self.path.slow else 0.0
        self._due[request] = self.path.clock.now + late
        if not late:
            self.results[request] = self.path.store.execute(self._calls[request])

    def answer(self, request: Request) -> bool:
        """Answer a forwarded request, or lose its answer; return False as long as it has none."""
        call = self._calls[request]
        if request.state is not State.SENT or self.path.clock.now < self._due[request]:
            return False
        if request not in self.results:
            self.results[request] = self.path.store.execute(call)
        if call.method == "Lock":
            queue = list(self.path.store.get_prefix(f"{call.key}/"))
            if queue[0] != f"{call.key}/{call.lease:x}":
                return False
        result = self.results[request]
        if call.method == "LeaseGrant":
            request.answer = json.dumps({"ID": str(result)}).encode()
        elif call.lists:
            request.answer = " ".join(result).encode()
        request.answered = self.path.forwarded
        self._loses -= 1
        request.state = State.ANSWER_LOST if self._loses == 0 else State.ANSWERED
        return True


class DoubledClaim:
    """The process of a claimant, which goes on by one step at a time."""

    def __init__(self, client: DoubledProxyClient, program: Generator[Any, Any, None], pid: int) -> None:
        self._client, self._program, self._pid = client, program, pid
        self._request: Request | None = None
        self._until = 0.0
        self._outcome: ClaimOutcome | None = None
        self._started = self._ended = self.killed = False

    def outcome(self) -> ClaimOutcome | None:
        return self._outcome

    def kill(self) -> None:
        self.killed = True

    def step(self) -> None:
        if self._ended or self.killed or self._client.path.clock.now < self._until:
            return
        answer: Any = None
        if self._request is not None:
            if not self._client.answer(self._request):
                return
            answer = self._client.results[self._request]
        self._go_on(answer)

    def _go_on(self, answer: Any) -> None:
        lost = self._request is not None and self._request.state is State.ANSWER_LOST
        self._request = None
        try:
            item = self._program.throw(ConnectionError("it was cut off")) if lost else self._program.send(answer)
        except StopIteration:
            self._end("its process ended without a message")
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
        else:
            if isinstance(item, Call):
                self._request = self._client.send(item)
            elif isinstance(item, Pause):
                self._until = self._client.path.clock.now + item.seconds
            else:
                self._outcome = ClaimOutcome(self._client.name, item, "h", self._pid)

    def _end(self, error: str) -> None:
        self._ended = True
        self._outcome = self._outcome or ClaimOutcome(self._client.name, None, "h", self._pid, error)


class DoubledPath:
    """A proxy with the claimants behind it. Waiting lets all of them go on.

    :ivar slow: whether they also go on when a request is released, and the requests of later claimants reach etcd
        later, as on a busy machine.
    """

    def __init__(self, clock: DoubledClock, store: DoubledStore) -> None:
        self.clock, self.store = clock, store
        self.slow = False
        self.forwarded = 0
        self.claims: list[DoubledClaim] = []
        self.clients: list[DoubledProxyClient] = []

    @property
    def is_clean(self) -> bool:
        """Whether no process, no path, no lease and no key is there any more."""
        ended = all(claim.killed for claim in self.claims) and all(client.closed for client in self.clients)
        granted = list(range(17, self.store.leases + 1))
        return ended and sorted(self.store.revoked) == granted and self.store.keys == {}

    def client(self, name: str) -> DoubledProxyClient:
        self.clients.append(DoubledProxyClient(self, name))
        return self.clients[-1]

    def wait_quietly(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        end = self.clock.now + seconds
        while not condition():
            if self.clock.now >= end:
                return False
            self._step()
        return True

    def pass_time(self) -> None:
        """Let the claimants go on by some steps if the machine is slow."""
        for _ in range(5 * self.slow):
            self._step()

    def _step(self) -> None:
        self.clock.sleep(STEP)
        for claim in self.claims:
            claim.step()


class DoubledSubject:
    """A program that claims ranks, or several, one for each claimant in turn.

    :param prefix: what stands before a group in its keys.
    :param awaits: the number of a claimant that waits for another in a way that only the subject knows.
    """

    name = "a program"

    def __init__(self, *programs: Program, prefix: str = "", awaits: int | None = None) -> None:
        self._programs, self._prefix, self._awaits = programs, prefix, awaits
        self.started: list[tuple[str, int]] = []

    def start(self, proxy_client: Any, group: str, size: int) -> Any:
        number = int(proxy_client.name.rpartition(" ")[2])
        self.started.append((group, size))
        program = self._programs[number % len(self._programs)](f"{self._prefix}{group}", size, number)
        claim = DoubledClaim(proxy_client, program, 70 + number)
        proxy_client.path.claims.append(claim)
        return claim

    def keys(self, group: str) -> str:
        return f"{self._prefix}{group}"

    def blocked(self, proxy_client: Any, group: str, keys: Any) -> bool:
        assert list(keys) == [key for key in keys if key.startswith(self.keys(group))]
        awaits = proxy_client.name == f"claimant {self._awaits}" and f"{self.keys(group)}rank/0" not in keys
        return waits_for_lock(proxy_client, keys) or awaits


# Programs


def read_modify_write(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Take the rank that a key has, and count it up: the known race."""
    rank = int((yield Call("Range", f"{group}size")) or b"0")
    lease = yield Call("LeaseGrant")
    if rank >= size:
        raise RuntimeError(f"rank {rank} of {size}")
    yield Call("Put", f"{group}rank/{rank}", lease=lease)
    yield Call("Put", f"{group}size", str(rank + 1).encode())
    yield rank


def locked(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Do the same behind etcd's lock."""
    lease = yield Call("LeaseGrant")
    yield Call("Lock", f"{group}lock", lease=lease)
    yield from read_modify_write(group, size, number)
    yield Call("Unlock", f"{group}lock/{lease:x}")


def paused(seconds: Sequence[float], program: Program, *, present: bool = False) -> Program:
    """Return a program that begins after a pause, before which it may write that it is there."""

    def start(group: str, size: int, number: int) -> Generator[Any, Any, None]:
        if present:
            yield Call("Put", f"{group}present/{number}")
        yield Pause(seconds[number])
        yield from program(group, size, number)

    return start


def announces(rank_of: Callable[[list[str], str], int], *, order: Sequence[int] = (0, 1)) -> Program:
    """Return a program that writes its own key, lists the keys of all, and takes its rank by them."""

    def start(group: str, size: int, number: int) -> Generator[Any, Any, None]:
        key = f"{group}tokens/{order[number]}"
        yield Call("Put", key)
        keys = yield Call("Range", f"{group}tokens/", lists=True)
        yield rank_of(keys, key)

    return start


def creates(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Create the key of the first free rank. It takes the next one if the answer to its own creation is lost."""
    for rank in range(size):
        try:
            if (yield Call("Txn", f"{group}rank/{rank}")):
                yield rank
                return
        except ConnectionError:
            continue
    raise RuntimeError("no rank is free")


def only_reads(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    yield Call("Range", f"{group}first")
    yield Call("Range", f"{group}size")
    yield Pause(1e9)


def polls(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Write a key, read the same key again and again until both are there, and take the rank of its number."""
    yield Call("Put", f"{group}there/{number}")
    while len((yield Call("Range", f"{group}there/", lists=True))) < size:
        pass
    yield number


def polls_for_rank_0(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Claimant 0 writes rank 0, and the other one reads until that is there."""
    yield Call("Put", f"{group}there/{number}")
    if number == 0:
        yield Call("Put", f"{group}rank/0")
    else:
        while (yield Call("Range", f"{group}rank/0")) is None:
            pass
    yield number


def silent(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    yield Pause(1e9)


def ends(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    return
    yield


def ends_after_a_read(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    yield Call("Range", f"{group}size")


def takes_zero(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Take rank 0 after a write of its own key, without a look at what is there."""
    yield Call("Put", f"{group}of/{number}")
    yield 0
    yield Call("Put", f"{group}after/{number}")


def follows(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Write that it is there; claimant 0 takes rank 0 after a minute, and the others wait without a request."""
    yield Call("Put", f"{group}there/{number}")
    if number == 0:
        yield Call("Put", f"{group}second/{number}")
        yield Pause(60)
        yield Call("Put", f"{group}rank/0")
    else:
        yield Pause(70)
        yield Call("Range", f"{group}rank/0")
    yield number


def outside(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Take a rank that the group does not have."""
    yield Call("Put", f"{group}of/{number}")
    yield number + 1


def keeps_a_lease(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Keep a lease alive before the first write; such requests are neither held nor counted as writes."""
    yield Call("LeaseGrant")
    yield Call("LeaseKeepAliveOnce")
    yield from read_modify_write(group, size, number)


def after_a_read(program: Program) -> Program:
    """Return a program that begins with a read."""

    def start(group: str, size: int, number: int) -> Generator[Any, Any, None]:
        yield Call("Range", f"{group}size")
        yield from program(group, size, number)

    return start


def deletes(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Delete a key some seconds after a read, list other keys, and take rank 0."""
    yield Call("Range", f"{group}size")
    yield Pause(5 * number)
    yield Call("DeleteRange", f"{group}old/{number}")
    yield Call("Range", f"{group}there/", lists=True)
    yield 0


def reads_much(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Read several keys, no key five times in a row, before it creates its rank."""
    for key in "abbbbaacd":
        yield Call("Range", f"{group}{key}")
    yield from creates(group, size, number)


def creates_slowly(group: str, size: int, number: int) -> Generator[Any, Any, None]:
    """Create the key of a rank, and announce the rank after a pause."""
    rank = 0 if (yield Call("Txn", f"{group}rank/0")) else 1
    yield Pause(0.5)
    yield rank


def by_count(keys: list[str], key: str) -> int:
    return len(keys) - 1


def by_order(keys: list[str], key: str) -> int:
    return sorted(keys).index(key)


def by_age(keys: list[str], key: str) -> int:
    return keys.index(key)


# Results


def shared(rank: int, *keys: str, prefix: str = "") -> tuple[str, ...]:
    """Return the faults of two claimants that got the same rank."""
    return (
        f"rank {rank} was given 2 times: to claimant 0 (h, pid 70) and claimant 1 (h, pid 71)",
        f"nobody has rank {1 - rank} of 2",
        f"keys in etcd: {', '.join(f'{prefix}/r/abababab/{key}' for key in keys)}",
    )


def short(order: str) -> str:
    """Return the order of requests in one line: ``CLAIMANT:METHOD(KEY)``."""
    title, *lines = order.splitlines()
    assert title == "the order of requests:"
    assert [line.partition(".")[0] for line in lines] == [f"  {number}" for number in range(1, len(lines) + 1)]
    text = " ".join(line.partition("claimant ")[2].replace(": ", ":").replace("<group>/", "") for line in lines)
    return text.replace(", its answer lost", "-lost")


#: Results of claims at once: good ones, the same rank twice, and claims that did not overlap.
RANKS = (ClaimOutcome("claimant 0", 0), ClaimOutcome("claimant 1", 1))
TWICE = (ClaimOutcome("claimant 0", 0), ClaimOutcome("claimant 1", 0))
GOOD = Amplified(RANKS, (), False, True, False, "", "", "the order", 1.0)
BAD = replace(GOOD, outcomes=TWICE, faults=("rank 0 twice", "nobody has rank 1"), cause="the cause")
APART = replace(GOOD, unmet="they were apart", faults=("no rank",))
