# SPDX-License-Identifier: Apache-2.0
"""The lease of a registration by this host's clock, and the rosters and arrivals that a member accepts.

The clock, the lease and the client are doubles, because a real etcd gives no known delays.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.cluster.group import (
    LeaseLostError,
    Member,
    MemberLostError,
    MissingRanksError,
    Roster,
)
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import KeyValue, RangeResult, TransactionResult, encode
from pytest_nixl.etcd.watch import Watched, WatchEvent
from pytest_nixl.session import check_result

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


class MovedEvent(threading.Event):
    """An event that nobody sets for a number of waits; a wait moves the clock, and takes no time."""

    waits = 1000

    def __init__(self, clock: KnownClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now += timeout or 0.0
        self.waits -= 1
        return self.waits < 0


class Refreshed:
    """A client that grants one lease of ten seconds after some seconds, and the thread that refreshes it.

    :param refreshes: how long each refresh takes, or how it fails; the last one for all further ones.
    """

    id, ttl = 1, 10

    def __init__(self, clock: KnownClock, patch: pytest.MonkeyPatch, *refreshes: float | EtcdError) -> None:
        self._clock, self._refreshes = clock, list(refreshes)
        self.seconds = 0.0
        #: When each refresh began.
        self.refreshed: list[float] = []
        self.run: Callable[[], None]
        self.event = MovedEvent(clock)
        doubles = SimpleNamespace(Event=lambda: self.event, Thread=self.thread)
        patch.setattr("pytest_nixl.cluster.membership.threading", doubles)
        self.membership = registration(self)

    def thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> Any:
        assert (name, daemon) == ("lease of g", True)
        return SimpleNamespace(start=lambda: setattr(self, "run", target))

    def lease(self, ttl: int) -> Refreshed:
        self._clock.now += self.seconds
        return self

    def refresh(self) -> int:
        self.refreshed.append(self._clock.now)
        refresh = self._refreshes.pop(0) if len(self._refreshes) > 1 else self._refreshes[0]
        if isinstance(refresh, EtcdError):
            raise refresh
        self._clock.now += refresh
        return self.ttl

    def waits(self, count: int) -> Membership:
        """Grant the lease, let the thread wait this many times, and return the membership."""
        self.membership.grant(self._clock.now + 60)
        self.event.waits = count
        self.run()
        return self.membership


Refresh = Callable[..., Refreshed]


def registration(client: object = None, ttl: int = 10, size: int = 2) -> Membership:
    return Membership(cast(EtcdClient, client), "g", size, ttl=ttl, root=ROOT, host="here", wanted=None)


@pytest.fixture
def refreshed(clock: KnownClock, monkeypatch: pytest.MonkeyPatch) -> Refresh:
    return lambda *refreshes: Refreshed(clock, monkeypatch, *refreshes)


def ends_at(membership: Membership, clock: KnownClock, end: float) -> None:
    """Check that a lease is over at this moment, and not before."""
    clock.now = end - 0.01
    membership.check()
    clock.now = end
    with pytest.raises(LeaseLostError) as caught:
        membership.check()
    assert caught.value.reason == (
        f"this member of group 'g' (here, pid {os.getpid()}) lost its etcd lease: etcd heard nothing from it for 10 s, "
        "so its rank may have been reassigned"
    )
    assert caught.value.remedy == (
        "check that etcd runs, and that this host was not suspended or cut off from it; if this host is busy with "
        "other work, give every rank --nixl-lease=100s; then start the run again"
    )


def test_a_lease_is_over_that_long_after_it_or_its_refresh_was_asked_for(clock: KnownClock, refreshed: Refresh) -> None:
    # etcd may have granted it at any moment of these four seconds.
    leased = refreshed(4.0)
    leased.seconds = 4.0
    ends_at(leased.waits(0), clock, 110.0)
    leased = refreshed(4.0)
    membership, start = leased.waits(1), leased.refreshed[0]
    ends_at(membership, clock, start + 10.0)


def test_a_lease_that_etcd_denies_once_is_kept_and_one_that_it_denies_twice_is_lost(refreshed: Refresh) -> None:
    """An etcd that restarts denies a lease that it has not read yet."""
    leased = refreshed(NO_LEASE, REFUSED, NO_LEASE, 0.0, NO_LEASE)
    leased.waits(5).check()
    assert len(leased.refreshed) == 5
    leased = refreshed(NO_LEASE)
    membership = leased.waits(3)
    first, second = leased.refreshed
    assert second - first == pytest.approx(10 / 20)
    with pytest.raises(LeaseLostError, match=r"reassigned \(last refresh: no-lease\)"):
        membership.check()


def test_a_refresh_that_failed_is_repeated_soon_and_until_the_lease_is_over(
    clock: KnownClock, refreshed: Refresh
) -> None:
    leased = refreshed(REFUSED, 0.0, REFUSED)
    leased.waits(3).check()
    first, second, third = leased.refreshed
    assert first == pytest.approx(100 + 10 / 3)
    assert second - first == pytest.approx(10 / 20)
    assert third - second == pytest.approx(10 / 3)
    leased, start = refreshed(REFUSED), clock.now
    membership = leased.waits(100)
    assert start + 10 < leased.refreshed[-1] < start + 11
    with pytest.raises(LeaseLostError, match=r"\(last refresh: refused\)"):
        membership.check()


def failing(*errors: EtcdError) -> Callable[[], str]:
    remaining = iter(errors)

    def ask() -> str:
        for error in remaining:
            raise error
        return "answer"

    return ask


def test_a_request_is_repeated_only_while_etcd_may_come_back(clock: KnownClock, refreshed: Refresh) -> None:
    membership, messages = refreshed(0.0).membership, list[str]()
    assert membership.retry(failing(*[REFUSED] * 5), clock.now + 60, messages.append) == "answer"
    assert clock.now - 100.0 == pytest.approx(0.01 + 0.02 + 0.04 + 0.08 + 0.16)
    with pytest.raises(LeaseLostError):
        membership.retry(failing(NO_LEASE), clock.now + 60)
    for cause in ("compacted", "unresolved"):
        with pytest.raises(EtcdError, match=cause):
            membership.retry(failing(EtcdError(cause, cause=cause)), clock.now + 60)
    assert messages == []
    for cause in ("refused", "unreachable", "timeout", "closed", "no-member", "busy", "no-leader"):
        start = clock.now
        with pytest.raises(EtcdError, match=cause):
            membership.retry(failing(*[EtcdError(cause, cause=cause)] * 1000), clock.now + 10, messages.append)
        assert start + 9.5 <= clock.now <= start + 10
        seconds = [float(message.split("; ")[1].partition(" ")[0]) for message in messages]
        assert (len(messages), seconds[0]) == (1, 5.0)
        assert messages.pop() == f"waiting for the etcd of group 'g'; 5 s of 10 s; last attempt: {cause}"
    # Without a deadline it is repeated for as long as a lease lasts, and longer only if etcd says that it is busy.
    for cause, seconds_in_all in (("refused", 10.0), ("busy", 30.0), ("no-leader", 30.0)):
        start = clock.now
        with pytest.raises(EtcdError, match=cause):
            membership.retry(failing(*[EtcdError(cause, cause=cause)] * 1000), busy_until=start + 30.0)
        assert start + seconds_in_all - 0.5 <= clock.now <= start + seconds_in_all


def member(rank: int, token: str = "") -> tuple[str, str, int]:
    return (token or f"token-{rank}", f"host-{rank}", 1)


def roster(members: Sequence[tuple[str, str, int]], changes: int) -> KeyValue:
    return KeyValue(f"{ROOT}run/frozen", Roster.value(10, members, changes=changes), 1, 1, 1)


def test_a_member_accepts_no_roster_that_is_older_or_of_another_run() -> None:
    """The client is a double, with which the barrier is open and the roster is this one."""

    def transaction(payload: object, *, repeatable: bool) -> dict[str, Any]:
        items: list[dict[str, Any]] = [
            {"key": encode(f"{ROOT}run/gate"), "value": encode(b'{"passed": 9}')},
            {"key": encode(written.key), "value": encode(written.value), "mod_revision": 7},
        ]
        ranges = [{"response_range": {"kvs": [item]}} for item in items]
        puts = [{"response_put": {}}, {"response_delete_range": {}}, {"response_range": {"count": 1}}]
        return {"header": {"revision": "9"}, "succeeded": True, "responses": [*puts, *ranges]}

    membership = registration(SimpleNamespace(transaction=transaction, lease=lambda ttl: SimpleNamespace(id=1, ttl=60)))
    membership.grant(time.monotonic() + 60)
    our_member = member(0, membership.token)
    roster_of_two = Roster.of(roster([our_member, member(1, "second")], 1))
    membership.accept(roster_of_two, 0, 5)
    for refused in (roster([our_member, member(1, "first")], 0), roster([member(0), member(1)], 2)):
        written = refused
        membership.barrier(1)
        assert membership.members == roster_of_two.members
        assert membership.values.ignored == {
            f"{ROOT}run/frozen": "it is the roster of another run, or an older roster of this run"
        }
    written = roster([our_member, member(1, "third")], 2)
    membership.barrier(1)
    assert membership.members[1].token == "third"
    with pytest.raises(AttributeError):  # the lease is a double, which cannot be ended
        membership.leave()


MANY = [Member(rank, *member(rank)) for rank in range(200)]


def arrival(rank: int, value: bytes = b"") -> KeyValue:
    return KeyValue(f"{ROOT}arrived/000001/{rank:06d}", value, 1, 1, 1)


def test_a_key_is_ignored_once_and_not_too_many_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    values = GroupValues(ROOT, "t")
    for number in [0, *range(200), 0]:
        assert values.arrived(RangeResult(1, (arrival(number, b"forged"),)), f"{ROOT}arrived/000001/", MANY) == set()
    assert list(values.ignored) == [arrival(number).key for number in range(100)]
    assert len(caplog.messages) == 100
    assert caplog.messages[0].startswith(f"the key '{arrival(0).key}' is ignored: ")


def test_what_follows_a_key_goes_on_after_its_last_event(clock: KnownClock) -> None:
    """First comes what the keys show, and that known ones are gone. The etcd is a double, compacted up to 20."""
    closed, opened = threading.Event(), list[list[int]]()
    old, new, other = (
        {"key": encode(key), "mod_revision": revision} for key, revision in (("r/a", 7), ("r/b", 8), ("m/x", 9))
    )
    listed = [{"response_range": {"kvs": keys}} for keys in ([old, new], [other])]

    def watch(*watched: Watched, seconds: float) -> Iterator[WatchEvent]:
        assert [(span.prefix, span.deletions) for span in watched] == [(True, False), (True, True)]
        opened.append([span.since for span in watched])
        if len(opened) == 3:
            closed.set()
        yield WatchEvent(KeyValue("r/c", b"", 1, 20 + 5 * len(opened), 1), deleted=False)

    client: Any = SimpleNamespace(
        watch=watch, transaction=lambda _: {"header": {"revision": "20"}, "succeeded": True, "responses": listed}
    )
    watched = (Watched("r/", 8, prefix=True), Watched("m/", 8, prefix=True, deletions=True))
    events = list(registration().follow(client, *watched, closed=closed, known=["m/x", "m/gone"]))
    assert [(event.item.key, event.item.mod_revision, event.deleted) for event in events] == [
        ("r/b", 8, False), ("m/gone", 20, True), ("r/c", 25, False), ("r/c", 30, False),
    ]  # fmt: skip
    assert opened == [[21, 21], [26, 21], [31, 21]]


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


def leased(client: WaitingClient, clock: KnownClock, size: int, seconds: float) -> Membership:
    """Return a membership whose lease lasts for these seconds, and is not refreshed."""
    membership = registration(client, size=size)
    cast(Any, client).lease = lambda ttl: SimpleNamespace(id=1, ttl=seconds)
    membership.grant(clock.now + 60)
    return membership


@pytest.mark.parametrize(("size", "times"), [(2, [105.0, 110.0]), (128, [110.0])])
def test_a_watch_tells_every_five_seconds_that_it_waits_and_less_often_in_a_large_group(
    clock: KnownClock, refreshed: Refresh, size: int, times: list[float]
) -> None:
    refreshed(0.0)
    client = WaitingClient(clock, [103.0])
    membership = leased(client, clock, size, 1e9)
    intervals: list[float] = []
    assert len(list(membership.watch(Watched("k", 1), deadline=112.0, tick=lambda: intervals.append(clock.now)))) == 1
    assert intervals == times
    assert membership.ttl == 1e9, "etcd may grant a longer lease than was requested"
    assert clock.now == 112.0
    assert sum(client.seconds) == 12.0


def test_a_watch_lasts_no_longer_than_the_lease(clock: KnownClock, refreshed: Refresh) -> None:
    refreshed(0.0)
    client = WaitingClient(clock)
    with pytest.raises(LeaseLostError):
        list(leased(client, clock, 2, 4.0).watch(Watched("k", 1), deadline=200.0))
    assert client.seconds == [4.0]
    assert clock.now == 104.0


def test_a_registration_that_is_repeated_has_the_revision_of_the_first() -> None:
    answer = {"header": {"revision": "12"}, "responses": [{"response_range": {"count": "1", "kvs": [
        {"key": "ZnJlc2g=", "create_revision": "7", "mod_revision": "9", "version": "1"}]}}]}  # fmt: skip
    assert GroupValues.registration(TransactionResult.of(answer)) == 7
    assert GroupValues.registration(TransactionResult.of({**answer, "succeeded": True})) == 12


@pytest.mark.parametrize(
    ("error", "late"), [(MissingRanksError("2 of 3"), "2 of 3; busy"), (MemberLostError("rank 1"), "")]
)
def test_only_ranks_that_are_missing_may_be_late_because_the_host_was_busy(error: NixlPluginError, late: str) -> None:
    item = cast(pytest.Item, SimpleNamespace(stash=pytest.Stash()))
    item.stash[check_result._LOAD], item.stash[check_result._BUSY] = cast(Any, None), "busy"
    assert check_result.late_because(item, error) == late
