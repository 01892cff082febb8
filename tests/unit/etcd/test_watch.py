# SPDX-License-Identifier: Apache-2.0
"""How long one connection of a watch lasts, and which failures of a lease are passed on.

Connections, members and the clock are doubles, because a real etcd sends no event at a known time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.etcd import watch as watch_module
from pytest_nixl.etcd.client import Lease
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.members import ATTEMPT_SECONDS, EtcdMembers
from pytest_nixl.etcd.transaction import KeyValue, encode, key_range
from pytest_nixl.etcd.watch import Watched, WatchEvent, _watch_once, watch


class OneMember:
    """An etcd of one member, whose answers are given."""

    last = "http://etcd:2379"

    def __init__(self, answer: Mapping[str, Any] | EtcdError | None = None) -> None:
        self._answer = answer
        self.log: list[Any] = []

    def next(self) -> str:
        return "member"

    def answered(self, member: str) -> None:
        self.log.append("answered")

    def avoid(self, member: str) -> None:
        self.log.append("avoid")

    def post(self, path: str, payload: object, read: Callable[[Mapping[str, Any]], Any]) -> Any:
        if isinstance(self._answer, EtcdError):
            raise self._answer
        assert self._answer is not None
        return read(self._answer)


class PlannedWatch:
    """Connections whose events come at these seconds after the start of each; then it lasts for its whole time.

    :param connections: for each connection, the seconds of its events, or the error that ends it.
    """

    def __init__(self, connections: Sequence[Sequence[float] | EtcdError]) -> None:
        self.now = 100.0
        self._connections = iter(connections)
        #: The start, the time limit and the first revision of each connection.
        self.opened: list[tuple[float, float, int]] = []
        self._revision = 10

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def connect(
        self, members: Any, member: Any, watched: Any, revisions: Mapping[int, int], seconds: float, failures: int
    ) -> Iterator[tuple[int, WatchEvent]]:
        start = self.now
        self.opened.append((start - 100.0, seconds, revisions[1]))
        plan = next(self._connections, ())
        if isinstance(plan, EtcdError):
            raise plan
        for at in plan:
            self.now = start + at
            self._revision += 1
            yield 1, WatchEvent(KeyValue("k", b"", 1, self._revision, 1), deleted=False)
        # The time limit begins again with each part of the answer.
        self.now += seconds


Planned = Callable[..., tuple[PlannedWatch, list[int]]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Watch for ten seconds over planned connections; return them and the revisions of the events."""

    def run(*connections: Sequence[float] | EtcdError) -> tuple[PlannedWatch, list[int]]:
        plan = PlannedWatch(connections)
        monkeypatch.setattr(watch_module, "time", plan)
        monkeypatch.setattr(watch_module, "_watch_once", plan.connect)
        members = cast(EtcdMembers, OneMember())
        events = [event.item.mod_revision for event in watch(members, Watched("k", 5), seconds=10)]
        return plan, events

    return run


def test_a_connection_is_replaced_once_half_of_its_time_has_passed(planned: Planned) -> None:
    plan, events = planned([1.0, 4.0, 6.0, 7.0], [1.0, 3.0])
    assert events == [11, 12, 13, 14, 15], "the event at seven seconds is read by the next connection"
    assert plan.opened == [(0.0, 10.0, 5), (6.0, 4.0, 14), (9.0, 1.0, 16)]
    assert plan.now == 110.0


def test_a_connection_without_a_late_event_lasts(planned: Planned) -> None:
    plan, events = planned([1.0, 2.0, 5.0])
    assert events == [11, 12, 13]
    assert len(plan.opened) == 1
    assert plan.now == 115.0


def test_a_connection_that_fails_is_replaced_unless_the_etcd_refuses(planned: Planned) -> None:
    refused = EtcdError("refused", cause="refused")
    plan, events = planned([1.0], refused, refused, [0.5])
    assert events == [11]
    plan, events = planned(refused, refused, [0.5])
    assert events == [11]
    assert [start for start, _, _ in plan.opened] == [0.0, pytest.approx(0.02), pytest.approx(0.06)]
    with pytest.raises(EtcdError, match="compacted"):
        planned(EtcdError("compacted", cause="compacted"))


def lease(answer: Mapping[str, Any] | EtcdError) -> Lease:
    return Lease(cast(EtcdMembers, OneMember(answer)), 7, 10)


@pytest.mark.parametrize("cause", ["refused", "timeout", "other"])
def test_a_lease_that_could_not_be_ended_says_so(cause: str) -> None:
    with pytest.raises(EtcdError, match=cause):
        lease(EtcdError(cause, cause=cause)).revoke()
    lease(EtcdError("it has ended", cause="no-lease")).revoke()


@pytest.mark.parametrize("answer", [{}, {"result": {}}, {"result": {"TTL": "0"}}, {"result": {"TTL": "-1"}}])
def test_a_refresh_of_an_ended_lease_is_an_error(answer: Mapping[str, Any]) -> None:
    with pytest.raises(EtcdError, match=r"http://etcd:2379: the lease does not exist") as caught:
        lease(answer).refresh()
    assert caught.value.cause == "no-lease"


def test_a_refresh_returns_the_remaining_seconds() -> None:
    assert lease({"result": {"TTL": "1"}}).refresh() == 1
    assert lease({"TTL": "12"}).refresh() == 12


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ({"message": "going away", "grpc_code": 14}, "closed"),
        ({"message": "going away"}, "no-etcd"),
        ({"grpc_code": 14}, "no-etcd"),
        ("going away", "no-etcd"),
    ],
)
def test_only_the_end_of_a_watch_in_the_form_of_an_etcd_is_one(error: object, cause: str) -> None:
    error_text = watch_module._ended(Endpoint("http", "etcd", 2379), error)
    assert (error_text.cause == "closed") is (cause == "closed")
    assert ("going away" in error_text.reason) is (cause == "closed")


@pytest.mark.parametrize(
    ("count", "failures", "timeouts"),
    [(1, 0, (5.0, 60.0)), (2, 0, (ATTEMPT_SECONDS,) * 2), (2, 1, (2 * ATTEMPT_SECONDS,) * 2), (2, 99, (5.0, 5.0))],
)
def test_a_member_has_a_moment_to_confirm_a_watch_if_there_is_another(
    count: int, failures: int, timeouts: tuple[float, float]
) -> None:
    """It takes no longer to connect than to answer, and a member that is alone is waited for."""
    time_limits: list[tuple[float, float]] = []

    def post(url: str, *, data: str, stream: bool, timeout: tuple[float, float]) -> None:
        time_limits.append(timeout)
        raise OSError("no etcd is there")

    members = SimpleNamespace(
        all=["member"] * count,
        timeout=5.0,
        session=SimpleNamespace(post=post),
        explain=lambda *_: EtcdError("it cannot be reached"),
    )
    opened = _watch_once(
        cast(EtcdMembers, members), cast(Endpoint, "http://a"), [Watched("k", 5)], {1: 5}, 60.0, failures
    )
    with pytest.raises(EtcdError, match="cannot be reached"):
        next(opened)
    assert time_limits == [timeouts]


class _Answer:
    """The answer to a watch: its parts, and the limits that were set for it."""

    status_code = 200

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self.allowed: list[float] = []
        self.messages = 0

    def iter_content(self, chunk_size: int) -> Iterator[bytes]:
        return iter(self._parts)

    def close(self) -> None:
        pass

    def allow(self, seconds: float) -> None:
        self.allowed.append(seconds)

    def next_message(self) -> None:
        self.messages += 1


@pytest.mark.parametrize(("count", "seconds"), [(1, 60.0), (2, 3.0)])
def test_a_confirmed_watch_lasts_longer_than_the_moment_for_its_confirmation(
    monkeypatch: pytest.MonkeyPatch, count: int, seconds: float
) -> None:
    answer = _Answer(b'{"result": {"created": true}}\n{"resu', b'lt": {"canceled": true, "cancel_reason": "over"}}\n')
    monkeypatch.setattr("pytest_nixl.etcd.bounded_http.bounds_of", lambda given: given)
    members = SimpleNamespace(
        all=["member"] * count, timeout=5.0, session=SimpleNamespace(post=lambda *_, **__: answer)
    )
    opened = _watch_once(cast(EtcdMembers, members), cast(Endpoint, "http://a"), [Watched("k", 5)], {1: 5}, 60.0, 0)
    with pytest.raises(EtcdError, match="the server ended the watch: over"):
        list(opened)
    assert answer.allowed == [seconds]
    assert answer.messages == 1


def test_a_watch_of_deletions_asks_for_no_writes() -> None:
    request = {"start_revision": 9, "watch_id": 3}
    assert Watched("k", 5).payload(3, 9) == {"key": encode("k"), **request}
    assert Watched("k/", 5, prefix=True, deletions=True).payload(3, 9) == {
        **key_range("k/"), "filters": ["NOPUT"], **request,
    }  # fmt: skip
