# SPDX-License-Identifier: Apache-2.0
"""The lease of a registration by this host's clock, and the rosters and arrivals that a member accepts.

The clock, the lease and the client are doubles, because a real etcd gives no known delays.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.cluster import joining as joining_module
from pytest_nixl.cluster.group import (
    Candidate,
    JoinRefusedError,
    LeaseLostError,
    Member,
    MemberLostError,
    MissingRanksError,
    Roster,
)
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.joining import Joining
from pytest_nixl.cluster.membership import LATE, Membership
from pytest_nixl.cluster.messages import LARGEST, TOGETHER, Mailbox, MailError, Message, WorkerLine, _text
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, Lease
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import KeyValue, RangeResult, TransactionResult
from pytest_nixl.etcd.watch import Watched, WatchEvent
from pytest_nixl.session import check_result
from pytest_nixl.session.parsers import parse_lease

ROOT = "/pytest-nixl/groups/g/"
NO_LEASE, REFUSED = (EtcdError(cause, cause=cause) for cause in ("no-lease", "refused"))


class KnownClock:
    """A clock that moves only while something waits or is asked."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> KnownClock:
    known_clock = KnownClock()
    monkeypatch.setattr("pytest_nixl.cluster.membership.time", known_clock)
    return known_clock


class SlowLease:
    """A lease of ten seconds whose refreshes take these seconds each, or fail."""

    id, ttl = 1, 10

    def __init__(self, clock: KnownClock, refreshes: Sequence[float | EtcdError] = ()) -> None:
        self._clock, self._refreshes = clock, iter(refreshes)
        #: When each refresh began.
        self.refreshed: list[float] = []
        self.revoked = False

    def refresh(self) -> int:
        self.refreshed.append(self._clock.now)
        taken = next(self._refreshes)
        if isinstance(taken, EtcdError):
            raise taken
        self._clock.now += taken
        return self.ttl

    def revoke(self) -> None:
        self.revoked = True


class LeasingClient:
    """A client that grants a lease after some seconds."""

    def __init__(self, clock: KnownClock, lease: SlowLease, seconds: float = 0.0) -> None:
        self._clock, self._lease, self._seconds = clock, lease, seconds

    def lease(self, ttl: int) -> SlowLease:
        self._clock.now += self._seconds
        return self._lease


class MovedEvent(threading.Event):
    """An event that nobody sets for a number of waits; a wait moves the clock, and takes no time."""

    def __init__(self, clock: KnownClock, waits: int) -> None:
        super().__init__()
        self._clock, self._waits = clock, waits

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now += timeout or 0.0
        self._waits -= 1
        return self._waits < 0


def registration(client: object = None, ttl: int = 10) -> Membership:
    return Membership(cast(EtcdClient, client), "g", 2, ttl=ttl, root=ROOT, host="here", wanted=None)


@pytest.fixture
def granted(clock: KnownClock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Membership, SlowLease]]:
    """Grant a lease, which no thread refreshes."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)

    def grant(refreshes: Sequence[float | EtcdError] = (), *, seconds: float = 0.0) -> tuple[Membership, SlowLease]:
        lease = SlowLease(clock, refreshes)
        member = registration(LeasingClient(clock, lease, seconds))
        member.grant(clock.now + 60)
        return member, lease

    return grant


Granted = Callable[..., tuple[Membership, SlowLease]]


def test_a_lease_is_over_that_long_after_it_was_asked_for(clock: KnownClock, granted: Granted) -> None:
    # etcd may have granted it at any moment of these four seconds.
    membership, _ = granted(seconds=4.0)
    clock.now = 109.99
    membership.check()
    clock.now = 110.0
    with pytest.raises(LeaseLostError, match=r"group 'g' \(here, pid \d+\) lost its etcd lease: .* for 10 s"):
        membership.check()


def test_a_refreshed_lease_is_over_that_long_after_the_refresh_was_sent(clock: KnownClock, granted: Granted) -> None:
    membership, lease = granted([4.0])
    membership._left = MovedEvent(clock, 1)
    membership._keep()
    assert lease.refreshed == [pytest.approx(100 + 10 / 3)]
    clock.now = lease.refreshed[0] + 9.99
    membership.check()
    clock.now = lease.refreshed[0] + 10.0
    with pytest.raises(LeaseLostError):
        membership.check()


def test_a_lease_that_etcd_denies_once_is_kept(clock: KnownClock, granted: Granted) -> None:
    """An etcd that restarts denies a lease that it has not read yet."""
    membership, lease = granted([NO_LEASE, REFUSED, NO_LEASE, 0.0, NO_LEASE])
    membership._left = MovedEvent(clock, 5)
    membership._keep()
    assert len(lease.refreshed) == 5
    membership.check()


def test_a_lease_that_etcd_denies_twice_is_lost_at_once(clock: KnownClock, granted: Granted) -> None:
    membership, lease = granted([NO_LEASE] * 3)
    membership._left = MovedEvent(clock, 3)
    membership._keep()
    assert lease.refreshed[1] - lease.refreshed[0] == pytest.approx(10 / 20)
    assert len(lease.refreshed) == 2
    with pytest.raises(LeaseLostError, match=r"reassigned \(last refresh: no-lease\)"):
        membership.check()


def test_a_refresh_that_failed_is_repeated_soon_and_until_the_lease_is_over(
    clock: KnownClock, granted: Granted
) -> None:
    membership, lease = granted([REFUSED, 0.0, REFUSED])
    membership._left = MovedEvent(clock, 3)
    membership._keep()
    first, second, third = lease.refreshed
    assert second - first == pytest.approx(10 / 20)
    assert third - second == pytest.approx(10 / 3)
    membership.check()
    membership, lease = granted([REFUSED] * 100)
    start = clock.now
    membership._left = MovedEvent(clock, 100)
    membership._keep()
    assert start + 10 < lease.refreshed[-1] < start + 11
    with pytest.raises(LeaseLostError, match=r"\(last refresh: refused\)"):
        membership.check()


def failing(*errors: EtcdError) -> Callable[[], str]:
    remaining = iter(errors)

    def ask() -> str:
        for error in remaining:
            raise error
        return "answer"

    return ask


def test_a_request_is_repeated_only_while_etcd_may_come_back(clock: KnownClock) -> None:
    membership = registration()
    membership._left = MovedEvent(clock, 1000)
    assert membership.retry(failing(*[REFUSED] * 5), clock.now + 60) == "answer"
    waited = clock.now - 100.0
    assert waited == pytest.approx(0.01 + 0.02 + 0.04 + 0.08 + 0.16)
    with pytest.raises(LeaseLostError):
        membership.retry(failing(NO_LEASE), clock.now + 60)
    for cause in ("compacted", "unresolved"):
        with pytest.raises(EtcdError, match=cause):
            membership.retry(failing(EtcdError(cause, cause=cause)), clock.now + 60)
    start = clock.now
    with pytest.raises(EtcdError, match="refused"):
        membership.retry(failing(*[REFUSED] * 1000), clock.now + 10)
    assert start + 9.5 <= clock.now <= start + 10


def member(rank: int, token: str = "") -> tuple[str, str, int]:
    return (token or f"token-{rank}", f"host-{rank}", 1)


def roster(members: Sequence[tuple[str, str, int]], changes: int) -> KeyValue:
    return KeyValue(f"{ROOT}run/frozen", Roster.value(10, members, changes=changes), 1, 1, 1)


def test_a_member_accepts_no_roster_that_is_older_or_of_another_run() -> None:
    membership = registration()
    our_member = member(0, membership.token)
    roster_of_two = Roster.of(roster([our_member, member(1, "second")], 1))
    membership.accept(roster_of_two, 0, 5)
    for refused in (roster([our_member, member(1, "first")], 0), roster([member(0), member(1)], 2)):
        membership._take(refused)
        assert membership.members == roster_of_two.members
        assert membership.values.ignored == {
            f"{ROOT}run/frozen": "it is the roster of another run, or an older roster of this run"
        }
    membership._take(roster([our_member, member(1, "third")], 2))
    assert membership.members[1].token == "third"


MANY = [Member(rank, *member(rank)) for rank in range(200)]


def arrival(rank: int, value: bytes = b"") -> KeyValue:
    return KeyValue(f"{ROOT}arrived/000001/{rank:06d}", value, 1, 1, 1)


@pytest.mark.parametrize("token", ["", "t"])
def test_only_members_arrive_and_each_once(token: str) -> None:
    values, prefix = GroupValues(ROOT, token), f"{ROOT}arrived/000001/"
    members = [Member(rank, *member(rank)) for rank in range(3)]
    items = [arrival(rank, values.arrival(arrival(rank).key, members[rank])) for rank in (0, 2)]
    strangers = [arrival(7), arrival(1, values.arrival(arrival(1).key, members[0]))] if token else [arrival(7)]
    arrived = values.arrived(RangeResult(9, (*items, *strangers)), prefix, members)
    assert arrived == {0, 2}


def test_a_key_is_ignored_once_and_not_too_many_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    values = GroupValues(ROOT, "t")
    for number in [0, *range(200), 0]:
        assert values.arrived(RangeResult(1, (arrival(number, b"forged"),)), f"{ROOT}arrived/000001/", MANY) == set()
    assert list(values.ignored) == [arrival(number).key for number in range(100)]
    assert len(caplog.messages) == 100
    assert caplog.messages[0].startswith(f"the key '{arrival(0).key}' is ignored: ")


class RecordingClient:
    """A client that keeps the sizes of the values in each transaction."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def transaction(self, transaction: dict[str, Any], *, repeatable: bool = False) -> dict[str, Any]:
        assert repeatable, "a message may be written again after a lost answer"
        self.written.append(len(transaction["success"]))
        return {}


@pytest.fixture
def box() -> tuple[Mailbox, RecordingClient, list[Message]]:
    """The mailbox of rank 0 of three. Its client is a double."""
    membership = registration()
    membership._lease = cast(Lease, SlowLease(KnownClock()))
    membership._valid_until = float("inf")
    members = [member(0, membership.token), member(1), member(2)]
    membership.accept(Roster.of(roster(members, 0)), 0, 5)
    client, read = RecordingClient(), list[Message]()

    def failed(error: NixlPluginError) -> None:
        raise AssertionError(error)

    mailbox = Mailbox(
        cast(EtcdClient, client), membership, handle=lambda _, message: read.append(message), failed=failed
    )
    return mailbox, client, read


Box = tuple[Mailbox, RecordingClient, list[Message]]


def sized(size: int) -> dict[str, Any]:
    """Return a message of this many bytes."""
    empty = len(_text(1, {"worker": 1, "line": ""}))
    return {"worker": 1, "line": "x" * (size - empty)}


def line_of(size: int) -> bytes:
    """Return a message of this many bytes as it would be sent, if it were not too large."""
    return json.dumps(sized(size), separators=(",", ":")).encode()


def test_the_largest_message_is_sent_and_a_larger_one_is_not(box: Box) -> None:
    membership, client, _ = box
    membership.send(1, sized(LARGEST))
    assert client.written == [1]
    with pytest.raises(MailError, match=f"a message of {LARGEST + 1} bytes to rank 2 is too large for etcd"):
        membership.send(2, sized(LARGEST + 1))
    assert client.written == [1]


def test_one_request_takes_messages_up_to_the_largest_size(box: Box) -> None:
    membership, client, _ = box
    membership.send_each({1: sized(LARGEST // 2), 2: sized(LARGEST // 2)})
    assert client.written == [2]
    membership.send_each({1: sized(LARGEST // 2), 2: sized(LARGEST // 2 + 1)})
    assert client.written == [2, 1, 1]


def test_a_message_is_read_once_and_up_to_the_largest_size(box: Box) -> None:
    membership, _, read = box
    key = f"{ROOT}mail/000000/000001/{{:012d}}"
    for number, size in ((0, LARGEST), (0, 100), (1, LARGEST + 1), (1, 100), (1, 100)):
        membership._take(key.format(number), line_of(size))
    assert [len(message.line) for message in read if isinstance(message, WorkerLine)] == [
        len(sized(size)["line"]) for size in (LARGEST, 100)
    ]
    assert list(membership._membership.values.ignored) == [key.format(1)]
    for strange in (f"{ROOT}mail/000000/000003/{0:012d}", f"{ROOT}mail/000000/000002/x", f"{ROOT}mail/000000/000002"):
        membership._take(strange, b'{"worker": 1, "line": ""}')
        assert strange in membership._membership.values.ignored
    assert len(read) == 2


def test_a_mailbox_goes_on_after_the_last_event_that_it_has_read(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, _, read = box
    began: list[int] = []

    def watch(watched: Watched, *, seconds: float) -> Iterator[WatchEvent]:
        began.append(watched.since)
        if len(began) == 3:
            membership.close()
            return
        for revision in (20 * len(began), 20 * len(began) + 5):
            key = f"{ROOT}mail/000000/000001/{revision:012d}"
            yield WatchEvent(KeyValue(key, line_of(100), revision, revision, 1), deleted=False)

    done = {"header": {"revision": "7"}, "succeeded": True, "responses": [{"response_range": {}}]}
    monkeypatch.setattr(membership, "_client", SimpleNamespace(transaction=lambda *_, **__: done, watch=watch))
    membership._read()
    assert began == [8, 26, 46]
    assert len(read) == 4


def test_a_mailbox_deletes_what_it_has_read_once_and_reads_no_deletion(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership, _, read = box
    deleted: list[int] = []

    def watch(*_: Watched, seconds: float) -> Iterator[WatchEvent]:
        for number in range(1, 2 * TOGETHER + 2):
            item = KeyValue(f"{ROOT}mail/000000/000001/{number:012d}", line_of(100), number, number, 1)
            yield WatchEvent(item, deleted=False)
            yield WatchEvent(KeyValue(item.key, b"", 0, number, 0), deleted=True)
        membership.close()

    def transaction(payload: dict[str, Any]) -> dict[str, Any]:
        deleted.append(sum("request_delete_range" in part for part in payload["success"]))
        return {"header": {"revision": "7"}, "succeeded": True, "responses": [{"response_range": {}}]}

    monkeypatch.setattr(membership, "_client", SimpleNamespace(transaction=transaction, watch=watch))
    membership._read()
    assert len(read) == 2 * TOGETHER + 1
    assert deleted == [0, TOGETHER, TOGETHER]
    assert membership._membership.values.ignored == {}


def test_a_mailbox_that_cannot_be_read_says_so_unless_it_is_closed(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, _, _ = box
    failures: list[NixlPluginError] = []

    def gone() -> None:
        raise NixlPluginError("etcd is gone")

    def closed() -> None:
        membership.close()
        gone()

    monkeypatch.setattr(membership, "_failed", failures.append)
    for read_on in (gone, closed):
        monkeypatch.setattr(membership._membership, "follow", lambda *_, read_on=read_on, **__: read_on())
        membership._read()
    assert [error.reason for error in failures] == ["etcd is gone"]


class WaitingClient:
    """A client whose watches take their whole time, unless an event is due: one at each of these seconds."""

    def __init__(self, clock: KnownClock, events: Sequence[float] = ()) -> None:
        self._clock, self._events = clock, list(events)
        #: How long each watch was to last.
        self.seconds: list[float] = []

    def watch(self, *watched: Watched, seconds: float) -> Iterator[WatchEvent]:
        self.seconds.append(round(seconds, 6))
        end = self._clock.now + seconds
        while self._events and self._events[0] < end:
            self._clock.now = self._events.pop(0)
            yield WatchEvent(KeyValue("k", b"", 1, 1, 1), deleted=False)
        self._clock.now = end


@pytest.mark.parametrize(("size", "times"), [(2, [105.0, 110.0]), (128, [110.0])])
def test_a_watch_tells_every_five_seconds_that_it_waits_and_less_often_in_a_large_group(
    clock: KnownClock, size: int, times: list[float]
) -> None:
    client = WaitingClient(clock, [103.0])
    membership = Membership(cast(EtcdClient, client), "g", size, ttl=10, root=ROOT, host="here", wanted=None)
    membership._valid_until = float("inf")
    intervals: list[float] = []
    assert len(list(membership.watch(Watched("k", 1), deadline=112.0, tick=lambda: intervals.append(clock.now)))) == 1
    assert intervals == times
    assert clock.now == 112.0
    assert sum(client.seconds) == 12.0


def test_a_watch_lasts_no_longer_than_the_lease(clock: KnownClock) -> None:
    client = WaitingClient(clock)
    membership = registration(client)
    membership._lease, membership._valid_until = cast(Lease, SlowLease(clock)), 104.0
    with pytest.raises(LeaseLostError):
        list(membership.watch(Watched("k", 1), deadline=200.0))
    assert client.seconds == [4.0]
    assert clock.now == 104.0


@pytest.fixture
def joining(clock: KnownClock, monkeypatch: pytest.MonkeyPatch) -> Joining:
    """An attempt to join that has seen revision 7, and has 60 s."""
    monkeypatch.setattr(joining_module, "time", clock)
    attempt = Joining(registration(), 60.0, None)
    attempt._seen = 7
    return attempt


CANDIDATES = [Candidate(f"token-{rank}", "here", 1, 2, requested_rank=0) for rank in range(2)]


@pytest.mark.parametrize(
    ("key", "value", "deleted", "expected"),
    [
        ("members/token-1", b"", True, (False, True)),
        ("run/frozen", Roster.value(10, [member(0), member(1)]), False, (True, False)),
        ("run/frozen", b"", True, (False, False)),
        ("members/stranger", b"", True, (False, False)),
    ],
)
def test_a_conflict_is_settled_by_the_roster_or_when_one_of_the_two_leaves(
    joining: Joining,
    key: str,
    value: bytes,
    deleted: bool,
    expected: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    revisions: list[int] = []

    def watch(*watched: Watched, **_: object) -> Iterator[WatchEvent]:
        revisions.extend(span.since for span in watched)
        yield WatchEvent(KeyValue(f"{ROOT}{key}", value, 1, 9, 1), deleted=deleted)

    monkeypatch.setattr(joining._membership, "watch", watch)
    frozen, settled = joining._wait_until_one_leaves(CANDIDATES, 110.0)
    assert (frozen is not None, settled) == expected
    assert revisions == [8, 8], "what was written before is known"


@pytest.mark.parametrize(("remaining", "until"), [(60.0, 100.0 + 10 + LATE), (5.0, 105.0)])
def test_a_conflict_may_settle_for_a_lease_and_no_longer_than_there_is_time(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, remaining: float, until: float
) -> None:
    waited: list[float] = []
    answers = iter([(None, True), (None, False)])

    def wait(candidates: Sequence[Candidate], until: float) -> tuple[Roster | None, bool]:
        waited.append(until)
        return next(answers)

    def freeze(candidates: Sequence[Candidate]) -> bytes:
        raise StopIteration

    joining._deadline = 100.0 + remaining
    monkeypatch.setattr(joining, "_first_candidates", lambda: CANDIDATES)
    monkeypatch.setattr(joining, "_wait_until_one_leaves", wait)
    monkeypatch.setattr(joining, "_value_to_freeze", freeze)
    with pytest.raises(StopIteration):
        joining._freeze()
    assert waited == [until, until]


@pytest.mark.parametrize(("remaining", "until"), [(60.0, 100.0 + 30 + LATE), (5.0, 105.0)])
def test_a_process_without_a_rank_waits_for_a_lease_of_the_group_and_no_longer_than_it_has_time(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, remaining: float, until: float
) -> None:
    members = [member(0), member(1)]
    frozen = Roster.of(KeyValue(f"{ROOT}run/frozen", Roster.value(30, members), 1, 1, 1))
    waited: list[float] = []

    def wait(present: object, until: float) -> bool:
        waited.append(until)
        return False

    joining._deadline = 100.0 + remaining
    membership = joining._membership
    monkeypatch.setattr(
        membership, "transact", lambda *_: SimpleNamespace(revision=9, range_result=lambda _: RangeResult(0, ()))
    )
    monkeypatch.setattr(
        membership.values, "read_members", lambda _: ([Candidate(*fields, 2) for fields in members], [])
    )
    monkeypatch.setattr(joining, "_roster_in", lambda _: frozen)
    monkeypatch.setattr(joining, "_wait_for_change", wait)
    with pytest.raises(JoinRefusedError, match="all its ranks are taken"):
        joining._take_over(frozen)
    assert waited == [until]


@pytest.mark.parametrize("token", ["", "t"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_refusal_is_for_the_processes_that_it_lists_and_without_a_token_for_all(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, token: str, listed: bool
) -> None:
    """With a token a process that is not listed may take the rank of one that leaves."""
    membership = joining._membership
    our_member = member(0, membership.token if listed else "")
    plain = Roster.value(10, [our_member, member(1)], refusal="rank 0 is requested twice")
    frozen = Roster.of(KeyValue(f"{ROOT}run/frozen", plain, 1, 1, 1))
    monkeypatch.setattr(membership, "values", GroupValues(ROOT, token))
    monkeypatch.setattr(membership, "grant", lambda *_: None)
    monkeypatch.setattr(joining, "_register", lambda: (frozen, 2))

    def take_over(roster: Roster) -> Roster | None:
        raise StopIteration

    monkeypatch.setattr(joining, "_take_over", take_over)
    with pytest.raises(JoinRefusedError if listed or not token else StopIteration):
        joining.run()


def test_a_wait_for_a_change_is_for_changes_after_what_was_read(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches: list[tuple[str, int, bool]] = []

    def watch(*watched: Watched, deadline: float, known: Sequence[str]) -> Iterator[WatchEvent]:
        watches.extend((span.key.removeprefix(ROOT), span.since, span.deletions) for span in watched)
        assert (deadline, known) == (110.0, ["one"])
        yield from events

    monkeypatch.setattr(joining._membership, "watch", watch)
    events: list[WatchEvent] = []
    assert not joining._wait_for_change(["one"], 110.0)
    assert watches == [("run/", 8, False), ("members/", 8, True)], "revision 7 was read"
    events.append(WatchEvent(KeyValue("k", b"", 1, 9, 1), deleted=False))
    assert joining._wait_for_change(["one"], 110.0)


def test_what_a_watch_has_missed_is_what_was_written_from_its_revision_on_and_what_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The etcd is a double whose history is compacted up to revision 20."""
    membership = registration()
    old, new, member = (KeyValue(key, b"", 1, revision, 1) for key, revision in (("r/a", 7), ("r/b", 8), ("m/x", 9)))
    answers = [RangeResult(2, (old, new)), RangeResult(1, (member,))]
    monkeypatch.setattr(membership, "retry", lambda *_: SimpleNamespace(revision=20, range_result=answers.__getitem__))
    watched = (Watched("r/", 8, prefix=True), Watched("m/", 8, prefix=True, deletions=True))
    again, missed = membership._read_anew(membership.client, watched, ["m/x", "m/gone"], 110.0)
    assert again == (Watched("r/", 21, prefix=True), Watched("m/", 21, prefix=True, deletions=True))
    assert missed == [
        WatchEvent(new, deleted=False), WatchEvent(KeyValue("m/gone", b"", 0, 20, 0), deleted=True),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "valid"), [("1s", False), ("2s", True), ("3600s", True), ("3601s", False)])
def test_a_lease_has_the_seconds_that_etcd_grants_and_an_hour_at_most(text: str, valid: bool) -> None:
    with nullcontext() if valid else pytest.raises(ValueError, match="from 2 to 3600"):
        parse_lease(text)


def test_a_registration_that_is_repeated_has_the_revision_of_the_first() -> None:
    answer = {"header": {"revision": "12"}, "responses": [{"response_range": {"count": "1", "kvs": [
        {"key": "ZnJlc2g=", "create_revision": "7", "mod_revision": "9", "version": "1"}]}}]}  # fmt: skip
    assert GroupValues.registration(TransactionResult.of(answer)) == 7
    assert GroupValues.registration(TransactionResult.of({**answer, "succeeded": True})) == 12


@pytest.mark.parametrize(("error", "busy"), [(MissingRanksError("2 of 3"), "busy"), (MemberLostError("rank 1"), "")])
def test_only_ranks_that_are_missing_may_be_late_because_the_host_was_busy(error: NixlPluginError, busy: str) -> None:
    item = cast(pytest.Item, SimpleNamespace(stash=pytest.Stash()))
    item.stash[check_result._LOAD], item.stash[check_result._BUSY] = cast(Any, None), "busy"
    assert check_result.late_because(item, error) == busy
