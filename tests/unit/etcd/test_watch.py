# SPDX-License-Identifier: Apache-2.0
"""How long one connection of a watch lasts, which ends of it are passed on, and which failures of a lease.

Connections, members and the clock are doubles, because a real etcd sends no event at a known time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from pytest_nixl.etcd import watch as watch_module
from pytest_nixl.etcd.client import Lease
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.members import EtcdMembers
from pytest_nixl.etcd.transaction import KeyValue, encode
from pytest_nixl.etcd.watch import Watched, WatchEvent, watch

MEMBER = Endpoint("http", "etcd", 2379)
REFUSED, COMPACTED = (EtcdError(cause, cause=cause) for cause in ("refused", "compacted"))
#: What a connection does: it fails, sends an event of the key ``k`` at these seconds after its start, or sends bytes.
Connection = Sequence["float | bytes"] | EtcdError


class WatchedEtcd:
    """The members of an etcd as a watch knows them, their connections and a clock.

    :param connections: what each connection does. Then it lasts for as long as it may without an event.
    :param count: the number of members.
    """

    timeout = 5.0

    def __init__(self, connections: Sequence[Connection], count: int = 1) -> None:
        self.now, self._connections, self._revision = 100.0, iter(connections), 10
        self.all = [MEMBER] * count
        self.session = SimpleNamespace(post=self.post)
        #: Of each connection: the start, the times to connect and to be confirmed, and the revision from which on.
        self.opened: list[tuple[float, tuple[float, float], int]] = []
        #: How long each confirmed connection may last; and what was told of the members.
        self.allowed: list[float] = []
        self.log: list[str] = []
        self.messages = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def next(self) -> Endpoint:
        return MEMBER

    def answered(self, member: Endpoint) -> None:
        self.log.append("answered")

    def avoid(self, member: Endpoint) -> None:
        self.log.append("avoided")

    def explain(self, member: Endpoint, error: OSError, seconds: float) -> EtcdError:
        return cast(EtcdError, error.args[0])

    def explain_refusal(self, member: Endpoint, content: bytes, reason: str) -> EtcdError:
        return EtcdError(f"{content.decode()} {reason}", cause="other")

    def post(self, url: str, *, data: str, stream: bool, timeout: tuple[float, float]) -> Any:
        assert (url, stream) == ("http://etcd:2379/v3/watch", True)
        revision = int(json.loads(data)["create_request"]["start_revision"])
        self.opened.append((round(self.now - 100.0, 6), timeout, revision))
        plan = next(self._connections, ())
        if isinstance(plan, EtcdError):
            raise OSError(plan)
        return SimpleNamespace(
            status_code=200, iter_content=lambda chunk_size: self.parts(plan), close=lambda: self.log.append("closed"),
            allow=self.allowed.append, next_message=self.next_message,
        )  # fmt: skip

    def next_message(self) -> None:
        self.messages += 1

    def parts(self, plan: Sequence[float | bytes]) -> Iterator[bytes]:
        start = self.now
        for part in plan:
            if isinstance(part, bytes):
                yield part
                continue
            self.now = start + part
            self._revision += 1
            event = {"kv": {"key": encode("k"), "mod_revision": self._revision}}
            yield json.dumps({"result": {"watch_id": 1, "events": [event]}}).encode() + b"\n"
        if plan and isinstance(plan[-1], bytes):
            return
        # The time limit begins again with each part of the answer.
        self.now += self.allowed[-1]
        raise requests.ConnectionError("Read timed out")


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[WatchedEtcd, list[int]]]:
    """Watch for some seconds over planned connections; return these and the revisions of the events."""

    def run(*connections: Connection, count: int = 1, seconds: float = 10) -> tuple[WatchedEtcd, list[int]]:
        etcd = WatchedEtcd(connections, count)
        monkeypatch.setattr(watch_module, "time", etcd)
        events = watch(cast(EtcdMembers, etcd), Watched("k", 5), seconds=seconds)
        return etcd, [event.item.mod_revision for event in events]

    monkeypatch.setattr("pytest_nixl.etcd.bounded_http.bounds_of", lambda answer: answer)
    return run


Watching = Callable[..., tuple[WatchedEtcd, list[int]]]


def test_a_connection_is_replaced_once_half_of_its_time_has_passed(watching: Watching) -> None:
    etcd, events = watching([1.0, 5.0, 6.0, 7.0], [1.0, 3.0])
    assert events == [11, 12, 13, 14, 15], "the event at seven seconds is read by the next connection"
    assert [(start, revision) for start, _, revision in etcd.opened] == [(0.0, 5), (6.0, 14), (9.0, 16)]
    assert etcd.allowed == [10.0, 4.0, 1.0]
    assert (etcd.now, etcd.log) == (110.0, ["closed", "answered"] * 3)


def test_a_connection_that_fails_is_replaced_unless_the_etcd_refuses(watching: Watching) -> None:
    etcd, events = watching(REFUSED, REFUSED, [0.5, 9.0], REFUSED)
    assert events == [11, 12]
    assert [start for start, _, _ in etcd.opened] == [0.0, 0.02, 0.06, 9.06, 9.08]
    assert etcd.log == ["avoided", "avoided", "closed", "answered", "avoided", "closed", "answered"]
    with pytest.raises(EtcdError, match="compacted"):
        watching(COMPACTED)


@pytest.mark.parametrize(
    ("count", "times", "lasts"),
    [(1, [(5.0, 60.0), (5.0, 59.98)], 59.94), (2, [(1.5, 1.5), (3.0, 3.0), (4.5, 4.5), (5.0, 5.0)], 3.0)],
)
def test_a_member_has_a_moment_to_confirm_a_watch_if_there_is_another(
    watching: Watching, count: int, times: list[tuple[float, float]], lasts: float
) -> None:
    """It takes no longer to connect than to answer, and a member that is alone is waited for."""
    etcd, _ = watching(*[REFUSED] * len(times), [], count=count, seconds=60.0)
    assert [tuple(round(seconds, 6) for seconds in timeout) for _, timeout, _ in etcd.opened[: len(times)]] == times
    # A confirmed watch lasts longer than that.
    assert etcd.allowed[0] == pytest.approx(lasts, abs=0.3)


CREATED = b'{"result": {"created": true}}\n'
UNLIKE = "etcd at http://etcd:2379: the server there is not an etcd: its answer "
OTHER_FORM = f"{UNLIKE}to a watch does not have the form of an etcd answer"


@pytest.mark.parametrize(
    "message",
    [
        b'{"result": {"canceled": true, "cancel_reason": "over"}}',
        b'{"error": {"message": "going away", "grpc_code": 14}}',
        b'{"error": {"message": "going away", "code": 14}}',
        CREATED,
        b'{"part of a mess',
    ],
)
def test_a_watch_that_its_member_ends_goes_on_at_another(watching: Watching, message: bytes) -> None:
    etcd, events = watching([CREATED + message[:5], message[5:]], [1.0])
    assert events == [11]
    assert etcd.log == ["closed", "avoided", "closed", "answered"]
    assert etcd.messages == (2 if message == CREATED else 1) + 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b'{"error": {"message": "going away"}}', f"{UNLIKE}is not a watch"),
        (b'{"error": "going away"}', f"{UNLIKE}is not a watch"),
        (b'{"error": {"code": 7, "message": "etcdserver: permission denied"}}', "etcd at http://etcd:2379: permission "
         "denied: the user's role does not allow this request on this key"),
        (b'{"result": {"compact_revision": 7}}', "etcd at http://etcd:2379: the requested revision was compacted away"),
        (b'{"result": {"events": [{}], "watch_id": 1}}', OTHER_FORM), (b"[" * 100_000, OTHER_FORM),
    ],
)  # fmt: skip
def test_a_watch_ends_with_what_no_etcd_sends_and_with_a_refusal(
    watching: Watching, message: bytes, reason: str
) -> None:
    with pytest.raises(EtcdError) as caught:
        watching([CREATED, message])
    assert caught.value.reason == reason


def test_a_watch_of_one_key_has_no_range() -> None:
    assert Watched("k", 5).payload(3, 9) == {"key": encode("k"), "start_revision": 9, "watch_id": 3}


def test_after_an_event_of_a_key_it_is_watched_from_the_next_revision_on() -> None:
    key, keys = Watched("k", 5), Watched("k/", 5, prefix=True)
    written, below, early = (
        WatchEvent(KeyValue(name, b"", 1, revision, 1), deleted=False)
        for name, revision in (("k", 7), ("k/1", 7), ("k", 3))
    )
    assert (key.after(written).since, key.after(below).since, key.after(early).since) == (8, 5, 5)
    assert (keys.after(written).since, keys.after(below)) == (5, Watched("k/", 8, prefix=True))


def lease(answer: Mapping[str, Any] | EtcdError) -> Lease:
    """Return a lease whose requests an etcd answers like this."""

    def post(path: str, payload: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> Any:
        assert payload == {"ID": 7}
        if isinstance(answer, EtcdError):
            raise answer
        return read(answer)

    return Lease(cast(EtcdMembers, SimpleNamespace(last=MEMBER, post=post)), 7, 10)


def test_a_lease_that_could_not_be_ended_says_so() -> None:
    with pytest.raises(EtcdError, match="refused"):
        lease(REFUSED).revoke()


@pytest.mark.parametrize("answer", [{}, {"result": {"TTL": "-1"}}, {"TTL": "0"}])
def test_a_refresh_of_a_lease_that_has_ended_says_so(answer: Mapping[str, Any]) -> None:
    assert lease({"TTL": "1"}).refresh() == 1
    with pytest.raises(EtcdError) as caught:
        lease(answer).refresh()
    assert caught.value.reason == f"etcd at {MEMBER}: the lease does not exist: it expired or was revoked"
    assert (caught.value.cause, caught.value.remedy) == ("no-lease", "refresh a lease before it expires")
