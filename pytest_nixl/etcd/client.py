# SPDX-License-Identifier: Apache-2.0
"""A client of etcd's HTTP gateway: several members, credentials and readable errors.

Keys are text, values are bytes, times are seconds. Every method raises :class:`EtcdError`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, error_at, printable
from pytest_nixl.etcd.maintenance import Maintenance
from pytest_nixl.etcd.members import EtcdMembers
from pytest_nixl.etcd.transaction import (
    KeyPage,
    KeyValue,
    absent,
    changes_nothing_twice,
    checked,
    encode,
    items,
    key_range,
    number,
    put,
    put_payload,
    txn,
)
from pytest_nixl.etcd.watch import Watched, WatchEvent, watch

if TYPE_CHECKING:
    import requests

    from pytest_nixl.etcd import bounded_http
else:  # it imports requests, which a run without an etcd does not need
    bounded_http = lazy_module("pytest_nixl.etcd.bounded_http")


class Lease:
    """A lease. It ends if it is not refreshed in time or is revoked; etcd then deletes the keys stored with it."""

    def __init__(self, members: EtcdMembers, id: int, ttl: int) -> None:
        self._members = members
        #: etcd's id of the lease.
        self.id = id
        #: Seconds that the lease lives without a refresh, as granted by etcd.
        self.ttl = ttl

    def refresh(self) -> int:
        """Restart the lease's time; return its remaining seconds.

        :raises EtcdError: with cause ``no-lease`` if it has ended.
        """

        def read(answer: Mapping[str, Any]) -> int:
            return number(answer.get("result", answer), "TTL")

        remaining = self._members.post("/lease/keepalive", {"ID": self.id}, read)
        if remaining < 1:
            explanation = "the lease does not exist: it expired or was revoked"
            raise error_at(self._members.last, "no-lease", explanation, "refresh a lease before it expires")
        return remaining

    def revoke(self) -> None:
        """End the lease now, which deletes its keys. Does nothing if it has already ended."""
        try:
            self._members.post("/lease/revoke", {"ID": self.id}, dict)
        except EtcdError as error:
            if error.cause != "no-lease":
                raise


class EtcdClient:
    """A client of one etcd cluster, made by :func:`connect`. Thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        session: requests.Session,
        *,
        timeout: float,
        user: str = "",
        password: str = "",
    ) -> None:
        self._members = EtcdMembers(endpoints, session, timeout=timeout, user=user, password=password)
        self._session = session

    def __repr__(self) -> str:
        return f"EtcdClient({', '.join(self.endpoints)})"

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The client can still be used."""
        self._session.close()

    @property
    def endpoint(self) -> str:
        """URL of the member that answered last (the first member before any answer)."""
        return str(self._members.last)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all members, without credentials."""
        return tuple(str(member) for member in self._members.all)

    @property
    def maintenance(self) -> Maintenance:
        """Requests about the etcd itself: its members, alarms, sizes and counters."""
        return Maintenance(self._members)

    def status(self) -> dict[str, Any]:
        """Return the member's status with etcd's field names: ``version``, ``leader``, ``dbSize``, ``raftIndex``, …"""
        return self._members.post("/maintenance/status", {}, dict)

    def version(self) -> str:
        """Return the member's version, such as ``3.5.1``."""
        return printable(str(self.status().get("version", "unknown")), 40)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Store ``value``. With a lease, etcd deletes the key when the lease ends."""
        self._members.post("/kv/put", put_payload(key, value, lease), _revision)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if the key does not exist."""
        pairs = self._range({"key": encode(key)})
        return pairs[0].value if pairs else None

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return keys and values of all keys that start with ``prefix``, sorted by key."""
        pairs = self._range({**key_range(prefix), "sort_order": "ASCEND", "sort_target": "KEY"})
        return {item.key: item.value for item in pairs}

    def by_creation(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return all keys that start with ``prefix``, oldest first."""
        return self._range({**key_range(prefix), "sort_order": "ASCEND", "sort_target": "CREATE"})

    def page(self, prefix: str, *, after: str = "", limit: int, keys_only: bool = False) -> KeyPage:
        """Return at most ``limit`` of the keys that start with ``prefix``, sorted by key.

        :param after: return only keys that follow this one; empty for the first page.
        :param keys_only: leave out the values.
        """
        payload: dict[str, Any] = {**key_range(prefix), "limit": limit, "keys_only": keys_only}
        if after:
            payload["key"] = encode(f"{after}\0")

        def read(answer: Mapping[str, Any]) -> KeyPage:
            pairs = tuple(KeyValue.of(item) for item in items(answer, "kvs"))
            return KeyPage(pairs, answer.get("more", False) is True, _revision(answer))

        return self._members.post("/kv/range", payload, read)

    def lease_of(self, key: str) -> int | None:
        """Return the lease id of ``key``: 0 if it has no lease, None if the key does not exist."""
        pairs = self._range({"key": encode(key), "keys_only": True})
        return pairs[0].lease if pairs else None

    def _range(self, payload: Mapping[str, Any]) -> tuple[KeyValue, ...]:
        def read(answer: Mapping[str, Any]) -> tuple[KeyValue, ...]:
            _revision(answer)
            return tuple(KeyValue.of(item) for item in items(answer, "kvs"))

        return self._members.post("/kv/range", payload, read)

    def count_prefix(self, prefix: str) -> int:
        """Return the number of keys that start with ``prefix``."""
        return self._members.post("/kv/range", {**key_range(prefix), "count_only": True}, partial(_count, name="count"))

    def delete(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._members.post("/kv/deleterange", {"key": encode(key)}, partial(_count, name="deleted")) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; return the number of deleted keys.

        :raises ValueError: if the prefix is empty or only slashes, because that would delete all keys of the etcd.
        """
        if not prefix.strip("/"):
            raise ValueError(f"refused to delete all keys of the etcd: the prefix is {prefix!r}")
        return self._members.post("/kv/deleterange", key_range(prefix), partial(_count, name="deleted"))

    def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Store ``value`` if ``key`` does not exist, in one transaction; return whether it was stored.

        A request that may have been sent is never repeated. A lost answer raises an error, and does not return False.
        """
        answer = self.transaction(txn([absent(key)], [put(key, value, lease)]))
        return bool(answer.get("succeeded", False))

    def transaction(self, payload: Mapping[str, Any], *, repeatable: bool = False) -> dict[str, Any]:
        """Send a transaction in the gateway's JSON form; return the answer.

        If the answer of a member is lost, the transaction is sent to another member only if it is repeatable.

        :param repeatable: whether doing it twice has the same effect as once. A transaction that only reads or
            deletes is always repeatable.
        """
        twice = repeatable or changes_nothing_twice(payload)
        return self._members.post("/kv/txn", payload, partial(checked, payload), repeatable=twice)

    def watch(self, *watched: Watched, seconds: float) -> Iterator[WatchEvent]:
        """Yield every event of the watched keys in order, and return when ``seconds`` have passed.

        A broken connection or a dead member is replaced without missing an event. Events of two different ``watched``
        items may come in another order. If an event comes late, the call may last up to half of ``seconds`` longer.

        :param watched: the keys to watch, each from its own revision on.
        :param seconds: duration of the watch.
        :raises EtcdError: with cause ``compacted`` if the etcd has compacted that revision away.
        """
        return watch(self._members, *watched, seconds=seconds)

    def lease(self, ttl_seconds: int) -> Lease:
        """Create a lease that ends after ``ttl_seconds`` without a refresh."""

        def read(answer: Mapping[str, Any]) -> Lease:
            return Lease(self._members, number(answer, "ID", None), number(answer, "TTL", None))

        return self._members.post("/lease/grant", {"TTL": ttl_seconds, "ID": 0}, read)

    def revoke(self, lease: int) -> None:
        """End a lease, which deletes its keys. Does nothing if it has already ended. ``lease`` is its id."""
        Lease(self._members, lease, 0).revoke()

    def time_to_live(self, lease: int) -> tuple[int, int] | None:
        """Return the remaining and the granted seconds of a lease; None if it has ended. ``lease`` is its id."""

        def read(answer: Mapping[str, Any]) -> tuple[int, int] | None:
            remaining = number(answer, "TTL")  # the gateway leaves out 0; a lease that does not exist has -1
            return (remaining, number(answer, "grantedTTL")) if remaining >= 0 else None

        return self._members.post("/lease/timetolive", {"ID": lease}, read)


class Credentials(TypedDict, total=False):
    """How a client of an etcd proves who it is, and knows the etcd: the keywords of :func:`connect`."""

    cacert: str
    cert: str
    key: str
    user: str
    password: str
    server_name: str


def connect(
    endpoints: Sequence[Endpoint],
    *,
    cacert: str = "",
    cert: str = "",
    key: str = "",
    user: str = "",
    password: str = "",
    server_name: str = "",
    timeout: float = 5.0,
) -> EtcdClient:
    """Make a client of the etcd at ``endpoints``. Sends nothing yet.

    :param cacert: PEM file of the CA that signed the server's certificate; empty for the system's CAs.
    :param cert: PEM file of a client certificate.
    :param key: PEM file of the client certificate's key.
    :param user: user name; if empty, user and password are taken from the first endpoint that has them.
    :param server_name: the name that the server's certificate has to contain; empty for the host of the endpoint.
    :param timeout: seconds to connect, and again to receive the whole answer, for each request to a member.
    """
    session = bounded_http.BoundedSession(server_name)
    if cacert:
        session.verify = cacert
    if cert:
        session.cert = (cert, key) if key else cert
    if not user:
        user, password = next(((e.user, e.password) for e in endpoints if e.user), ("", ""))
    bare = [Endpoint(e.scheme, e.host, e.port) for e in endpoints]
    return EtcdClient(bare, session, timeout=timeout, user=user, password=password)


def _revision(answer: Mapping[str, Any]) -> int:
    """Return the etcd's revision, which every answer about keys contains."""
    return number(answer["header"], "revision", None)


def _count(answer: Mapping[str, Any], name: str) -> int:
    _revision(answer)
    return number(answer, name)


#: The most pages in which the keys under one prefix are read, and the most seconds of one reading.
MOST_PAGES, MOST_SECONDS = 20_000, 15.0


class Pager:
    """Reads the keys that start with a prefix in pages, each after the one before.

    :param prefix: the start of the keys.
    :param keys_only: leave out the values.
    :param deadline: the monotonic time after which no page is read; None: 15 s from now.
    """

    def __init__(
        self, client: EtcdClient, prefix: str, *, keys_only: bool = False, deadline: float | None = None
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._keys_only = keys_only
        self._pages = 0
        self._deadline = time.monotonic() + MOST_SECONDS if deadline is None else deadline

    def read(self, after: str, limit: int) -> KeyPage:
        """Return at most ``limit`` keys that follow the key ``after``; empty for the first page.

        :raises EtcdError: if etcd does not answer, if a page does not begin where it has to, or if there have been too
            many pages or seconds.
        """
        if self._pages == MOST_PAGES or time.monotonic() > self._deadline:
            limits = f"{MOST_PAGES:,} pages and {MOST_SECONDS:g} s"
            raise self._fault(f"has more keys under {self._prefix} than can be read in {limits}", "endless")
        self._pages += 1
        page = self._client.page(self._prefix, after=after, limit=limit, keys_only=self._keys_only)
        last, start = _order(after), _order(self._prefix)
        for item in page.items:
            if _order(item.key) <= last or not _order(item.key).startswith(start):
                key = printable(item.key, 80)
                raise self._fault(f"was asked for keys after {printable(after or self._prefix, 80)!r} and sent {key!r}")
            last = _order(item.key)
        if len(page.items) > limit or (page.more and len(page.items) < limit):  # etcd sends all, or as many as asked
            raise self._fault(f"was asked for {limit} keys, sent {len(page.items)}, and says that there are more")
        return page

    def _fault(self, fault: str, cause: str = "unreadable") -> EtcdError:
        endpoint = self._client.endpoint
        remedy = "check that this is the address of an etcd, and not of another server or a broken proxy"
        return EtcdError(f"etcd at {endpoint} {fault}", remedy, cause=cause, endpoint=endpoint)


def _order(key: str) -> bytes:
    """Return the bytes by which etcd sorts a key."""
    return key.encode(errors="surrogateescape")
