# SPDX-License-Identifier: Apache-2.0
"""A client of etcd's HTTP gateway: etcd3gw with several members, credentials and readable errors.

Keys are text, values are bytes, times are seconds. Every method raises :class:`EtcdError`.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_answer, explain_transport, no_gateway, not_etcd, printable
from pytest_nixl.etcd.transaction import (
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

if TYPE_CHECKING:
    import requests
    from etcd3gw.client import Etcd3Client

__all__ = ["EtcdClient", "EtcdError", "Lease", "WatchEvent", "Watched", "connect"]

#: Failures before a request is sent: any request may then go to the next member.
_BEFORE_SENDING = {"refused", "unresolved", "unreachable"}
#: Failures of one member after which a repeatable request goes to the next member.
_OF_ONE_MEMBER = {*_BEFORE_SENDING, "timeout", "closed", "no-leader", "tls", "untrusted"}
#: Timeout in seconds of the first attempt at each of several members. It may be short, because asking the next member
#: is harmless; if no member answers, slow members are asked again with the full timeout.
_ATTEMPT = 1.5
#: Seconds for which a failed member is tried last.
_AVOIDED = 20.0
#: Seconds that one watch connection lasts with several members: otherwise a stopped member would go unnoticed.
_WATCHED = 3.0
#: Maximum number of bytes of an error answer that are read for a message.
_SHOWN = 1 << 16
#: Exceptions that reading raises if the answer does not have the form of an etcd answer.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)

T = TypeVar("T")


class _Avoided:
    """Members that failed recently, shared by all clients of this process so that not each one waits for them."""

    def __init__(self) -> None:
        self._until: dict[Endpoint, float] = {}

    def add(self, member: Endpoint) -> None:
        self._until[member] = time.monotonic() + _AVOIDED

    def remove(self, member: Endpoint) -> None:
        self._until.pop(member, None)

    def until(self, member: Endpoint) -> float:
        """Return the monotonic time until which the member is tried last; 0.0 if it is not avoided."""
        until = self._until.get(member, 0.0)
        return until if until > time.monotonic() else 0.0


_AVOIDED_MEMBERS = _Avoided()


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
        from etcd3gw.client import Etcd3Client

        if not endpoints:
            raise ValueError("an etcd has at least one endpoint")
        self._members = tuple(endpoints)
        self._session = session
        self._timeout = timeout
        if user:
            session.auth = _TokenAuth(user, password, self._authenticate)
        self._clients: dict[Endpoint, Etcd3Client] = {
            member: Etcd3Client(
                host=member.host,
                port=member.port,
                protocol=member.scheme,
                timeout=timeout,
                api_path="/v3/",
            )
            for member in self._members
        }
        for client in self._clients.values():
            # The constructor accepts a session only from etcd3gw 2.6 on.
            client.session = session
        self._current = 0

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
        return str(self._members[self._current])

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all members, without credentials."""
        return tuple(str(member) for member in self._members)

    @property
    def raw(self) -> Etcd3Client:
        """The etcd3gw client of the member that answered last, with this client's credentials."""
        return self._clients[self._members[self._current]]

    def status(self) -> dict[str, Any]:
        """Return the member's status with etcd's field names: ``version``, ``leader``, ``dbSize``, ``raftIndex``, …"""
        return self._post("/maintenance/status", {}, dict)

    def version(self) -> str:
        """Return the member's version, such as ``3.5.1``."""
        return printable(str(self.status().get("version", "unknown")), 40)

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Store ``value``. With a lease, etcd deletes the key when the lease ends."""
        self._post("/kv/put", put_payload(key, value, lease), _revision)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if the key does not exist."""
        found = self._range({"key": encode(key)})
        return found[0].value if found else None

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return keys and values of all keys that start with ``prefix``, sorted by key."""
        found = self._range({**key_range(prefix), "sort_order": "ASCEND", "sort_target": "KEY"})
        return {item.key: item.value for item in found}

    def by_creation(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return all keys that start with ``prefix``, oldest first."""
        return self._range({**key_range(prefix), "sort_order": "ASCEND", "sort_target": "CREATE"})

    def lease_of(self, key: str) -> int | None:
        """Return the lease id of ``key``: 0 if it has no lease, None if the key does not exist."""
        found = self._range({"key": encode(key), "keys_only": True})
        return found[0].lease if found else None

    def _range(self, payload: Mapping[str, Any]) -> tuple[KeyValue, ...]:
        def read(answer: Mapping[str, Any]) -> tuple[KeyValue, ...]:
            _revision(answer)
            return tuple(KeyValue.of(item) for item in items(answer, "kvs"))

        return self._post("/kv/range", payload, read)

    def count_prefix(self, prefix: str) -> int:
        """Return the number of keys that start with ``prefix``."""
        return self._post("/kv/range", {**key_range(prefix), "count_only": True}, partial(_count, name="count"))

    def delete(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._post("/kv/deleterange", {"key": encode(key)}, partial(_count, name="deleted")) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; return the number of deleted keys.

        :raises ValueError: if the prefix is empty or only slashes, because that would delete all keys of the etcd.
        """
        if not prefix.strip("/"):
            raise ValueError(f"refused to delete all keys of the etcd: the prefix is {prefix!r}")
        return self._post("/kv/deleterange", key_range(prefix), partial(_count, name="deleted"))

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
        return self._post("/kv/txn", payload, partial(checked, payload), repeatable=twice)

    def watch(self, *watched: Watched, seconds: float) -> Iterator[WatchEvent]:
        """Yield every event of the watched keys in order, and return when ``seconds`` have passed.

        A broken connection or a dead member is replaced without missing an event. Events of two different ``watched``
        items may come in another order. If an event comes late, the call may last up to half of ``seconds`` longer.

        :param watched: the keys to watch, each from its own revision on.
        :param seconds: duration of the watch.
        :raises EtcdError: with cause ``compacted`` if the etcd has compacted that revision away.
        """
        deadline = time.monotonic() + seconds
        failures = 0
        revisions = {number: item.since for number, item in enumerate(watched, 1)}
        while (left := deadline - time.monotonic()) > 0:
            member = self._members[self._order()[0]]
            try:
                for number, event in self._watch_once(member, watched, revisions, left, failures):
                    yield event
                    revisions[number], failures = event.item.mod_revision + 1, 0
                    if deadline - time.monotonic() < left / 2:
                        break  # the time limit of a connection is fixed at its start: open one with a shorter limit
                _AVOIDED_MEMBERS.remove(member)
            except EtcdError as error:
                if error.cause not in _OF_ONE_MEMBER:
                    raise
                failures += 1
                self._leave(member)
                time.sleep(min(0.02 * failures, 0.5, max(0.0, deadline - time.monotonic())))

    def _watch_once(
        self,
        member: Endpoint,
        watched: Sequence[Watched],
        revisions: Mapping[int, int],
        seconds: float,
        failures: int,
    ) -> Iterator[tuple[int, WatchEvent]]:
        """Watch over one connection: for ``seconds``, or for at most ``_WATCHED`` if there are several members."""
        from requests.exceptions import ConnectionError, RequestException

        from pytest_nixl.etcd.bounded_http import bounds_of

        first = seconds
        if len(self._members) > 1:
            # etcd confirms a watch at once. A member that does not is slow or stopped: allow more time per failure.
            first = min(seconds, self._timeout, _ATTEMPT * (1 + failures))
            seconds = min(seconds, _WATCHED)
        connecting = min(self._timeout, first)
        body = "\n".join(
            json.dumps({"create_request": item.payload(n, revisions[n])}) for n, item in enumerate(watched, 1)
        )
        try:
            answer = self._session.post(f"{member}/v3/watch", data=body, stream=True, timeout=(connecting, first))
        except (RequestException, OSError, ValueError) as error:
            raise self._explain(member, error, first) from error
        with contextlib.closing(answer):
            try:
                if answer.status_code != 200:
                    raise self._explain_answer(member, answer.content, answer.reason)
                bounds = bounds_of(answer)
                bounds.allow(seconds)
                start = bytearray()
                for part in answer.iter_content(chunk_size=1 << 16):
                    head, *lines = part.split(b"\n")
                    start += head
                    for line in lines:
                        if start:
                            yield from self._events(member, bytes(start))
                            bounds.next_message()
                        start = bytearray(line)
                # A server that is not an etcd may end its answer without a newline. Part of a message is ignored.
                if _whole(bytes(start)):
                    yield from self._events(member, bytes(start))
            except ConnectionError as error:
                # requests reports a read timeout this way: the watch is fine, there was just no event.
                if "Read timed out" in str(error):
                    return
                raise self._explain(member, error, seconds) from error
            except (RequestException, OSError) as error:
                raise self._explain(member, error, seconds) from error
        raise EtcdError(f"etcd at {member}: the server ended the watch", cause="closed", endpoint=str(member))

    @staticmethod
    def _ended(member: Endpoint, error: Any) -> EtcdError:
        """Make the error for a watch that the server ended; an etcd that shuts down sends a message to each watch."""
        if known := explain_answer(member, json.dumps(error)):
            return known
        words = error.get("message") if isinstance(error, dict) else None
        if not isinstance(words, str) or not isinstance(error.get("grpc_code", error.get("code")), int):
            return not_etcd(member, "its answer is not a watch")
        return EtcdError(
            f"etcd at {member}: the server ended the watch: {printable(words)}", cause="closed", endpoint=str(member)
        )

    def _events(self, member: Endpoint, line: bytes) -> list[tuple[int, WatchEvent]]:
        """Read one message of a watch."""
        try:
            message = json.loads(line)
            result = message.get("result")
            if result is None:
                raise self._ended(member, message["error"])
            if "compact_revision" in result:
                raise EtcdError(f"etcd at {member}: the requested revision was compacted away", cause="compacted")
            if result.get("canceled"):
                why = printable(str(result.get("cancel_reason", "")))
                raise EtcdError(f"etcd at {member}: the server ended the watch: {why}", cause="closed")
            return [
                (number(result, "watch_id", None), WatchEvent(KeyValue.of(event["kv"]), event.get("type") == "DELETE"))
                for event in items(result, "events")
            ]
        except _MALFORMED as error:
            raise not_etcd(member, "its answer to a watch does not have the form of an etcd answer") from error

    def lease(self, ttl_seconds: int) -> Lease:
        """Create a lease that ends after ``ttl_seconds`` without a refresh."""

        def read(answer: Mapping[str, Any]) -> Lease:
            return Lease(self, number(answer, "ID", None), number(answer, "TTL", None))

        return self._post("/lease/grant", {"TTL": ttl_seconds, "ID": 0}, read)

    def require_password(self, password: str) -> None:
        """Create the user ``root`` with this password and turn authentication on: all later requests need it."""
        steps: tuple[tuple[str, dict[str, str]], ...] = (
            ("user/add", {"name": "root", "password": password}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        )
        for path, payload in steps:
            self._post(f"/auth/{path}", payload, dict, repeatable=False)

    def time_to_live(self, lease: int) -> tuple[int, int] | None:
        """Return the remaining and the granted seconds of a lease; None if it has ended. ``lease`` is its id."""

        def read(answer: Mapping[str, Any]) -> tuple[int, int] | None:
            left = number(answer, "TTL")  # the gateway leaves out 0; a lease that does not exist has -1
            return (left, number(answer, "grantedTTL")) if left >= 0 else None

        return self._post("/lease/timetolive", {"ID": lease}, read)

    def _order(self) -> list[int]:
        """Return the order of the members by index: first the one that answered last; recently failed ones last."""
        count = len(self._members)
        order = [(self._current + step) % count for step in range(count)]
        return sorted(order, key=lambda place: _AVOIDED_MEMBERS.until(self._members[place])) if count > 1 else order

    def _leave(self, member: Endpoint) -> None:
        """Try this member last for a while, in all clients of this process."""
        if len(self._members) > 1:
            _AVOIDED_MEMBERS.add(member)

    def _post(
        self,
        path: str,
        payload: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        *,
        repeatable: bool = True,
    ) -> T:
        """Send a request to the members in turn, first to the one that answered last.

        A repeatable request goes to each member with a short timeout, then to the slow ones with the full timeout.

        :param read: turns the answer into the result; if it raises, the server is not an etcd.
        :param repeatable: whether the next member may be asked although this one may have executed the request.
        """
        errors: dict[Endpoint, EtcdError] = {}
        members = [self._members[place] for place in self._order()]
        hasty = repeatable and len(members) > 1 and self._timeout > _ATTEMPT
        while members:
            for member in members:
                try:
                    result = self._ask(member, path, payload, read, _ATTEMPT if hasty else self._timeout)
                except EtcdError as error:
                    errors[member] = error
                    if error.cause in _OF_ONE_MEMBER:
                        self._leave(member)
                    if error.cause not in (_OF_ONE_MEMBER if repeatable else _BEFORE_SENDING):
                        raise
                else:
                    _AVOIDED_MEMBERS.remove(member)
                    self._current = self._members.index(member)
                    return result
            members = [member for member in members if hasty and errors[member].cause == "timeout"]
            hasty = False
        raise _all_failed([errors[member] for member in self._members if member in errors])

    def _ask(
        self,
        member: Endpoint,
        path: str,
        payload: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        seconds: float,
    ) -> T:
        from requests.exceptions import RequestException

        try:
            answer = self._session.post(f"{member}/v3{path}", json=dict(payload), timeout=(seconds, seconds))
        except (RequestException, OSError, ValueError) as error:
            raise self._explain(member, error, seconds) from error
        if answer.status_code != 200:
            raise self._explain_answer(member, answer.content, answer.reason)
        try:
            found = json.loads(answer.content)
        except RecursionError as error:
            raise not_etcd(member, "its answer is nested too deeply") from error
        except ValueError as error:
            raise not_etcd(member, "its answer is not JSON") from error
        if not isinstance(found, dict) or not any(isinstance(found.get(name), dict) for name in ("header", "result")):
            raise not_etcd(member, "its answer does not have the form of an etcd answer")
        try:
            return read(found)
        except _MALFORMED as error:
            raise not_etcd(member, f"its answer to /v3{path} does not have the form of an etcd answer") from error

    def _explain(self, member: Endpoint, error: BaseException, seconds: float) -> EtcdError:
        has_certificate = self._session.cert is not None
        return explain_transport(member, error, timeout=seconds, has_certificate=has_certificate)

    def _explain_answer(self, member: Endpoint, content: bytes, reason: str) -> EtcdError:
        explained = explain_answer(member, content[:_SHOWN].decode(errors="replace"))
        if explained is not None:
            return explained
        version = self._plain_version(member) if reason == "Not Found" else None
        if version is not None:
            return no_gateway(member, version)
        return not_etcd(member, f"it answers {printable(reason or '', 60)!r} to /v3")

    def _plain_version(self, member: Endpoint) -> str | None:
        """Return the version from ``/version``, which needs neither gateway nor password; None if it is not an etcd."""
        from requests.exceptions import RequestException

        try:
            timeout = (self._timeout, self._timeout)
            answer = self._session.get(f"{member}/version", timeout=timeout, auth=_no_auth).json()
        except (RequestException, ValueError, OSError, RecursionError):
            return None
        version = answer.get("etcdserver") if isinstance(answer, dict) else None
        return printable(str(version), 40) if version else None

    def _authenticate(self, base: str, user: str, password: str) -> str:
        """Return a token; empty if authentication is off in the etcd."""
        from requests.exceptions import RequestException

        member = next(member for member in self._members if str(member).lower() == base.lower())
        try:
            answer = self._session.post(
                f"{base}/v3/auth/authenticate",
                json={"name": user, "password": password},
                timeout=(self._timeout, self._timeout),
                auth=_no_auth,
            )
        except (RequestException, OSError, ValueError) as error:
            raise self._explain(member, error, self._timeout) from None
        if answer.status_code == 200:
            try:
                token = json.loads(answer.content)["token"]
                if not re.fullmatch(r"[\x21-\x7e]{1,8192}", token):
                    raise ValueError
            except _MALFORMED:
                raise not_etcd(member, "its answer to /v3/auth/authenticate is not an etcd answer") from None
            return str(token)
        if b"authentication is not enabled" in answer.content:
            return ""
        raise self._explain_answer(member, answer.content, answer.reason)


@dataclass(frozen=True)
class Watched:
    """One key to watch, or (with ``prefix``) every key that starts with it. See :meth:`EtcdClient.watch`."""

    key: str
    #: The first revision whose events are sent.
    since: int
    prefix: bool = False
    #: Whether to receive deletions only.
    deletions: bool = False

    def payload(self, number: int, revision: int) -> dict[str, Any]:
        """Return the watch request in the gateway's JSON form."""
        keys: dict[str, Any] = dict(key_range(self.key)) if self.prefix else {"key": encode(self.key)}
        filters = {"filters": ["NOPUT"]} if self.deletions else {}
        return {**keys, **filters, "start_revision": revision, "watch_id": number}


@dataclass(frozen=True)
class WatchEvent:
    """A key was written or deleted. For a deletion, ``item`` holds only the key and the revision."""

    item: KeyValue
    deleted: bool


class Lease:
    """A lease. It ends if it is not refreshed in time or is revoked; etcd then deletes the keys stored with it."""

    def __init__(self, client: EtcdClient, id: int, ttl: int) -> None:
        self._client = client
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

        left = self._client._post("/lease/keepalive", {"ID": self.id}, read)
        if left < 1:
            raise EtcdError(
                f"etcd at {self._client.endpoint}: the lease does not exist: it expired or was revoked",
                "refresh a lease before it expires",
                cause="no-lease",
                endpoint=self._client.endpoint,
            )
        return left

    def revoke(self) -> None:
        """End the lease now, which deletes its keys. Does nothing if it has already ended."""
        try:
            self._client._post("/lease/revoke", {"ID": self.id}, dict)
        except EtcdError as error:
            if error.cause != "no-lease":
                raise


class _TokenAuth:
    """Adds etcd's token to each request, and gets a new token if the server rejects it (401)."""

    def __init__(self, user: str, password: str, authenticate: Callable[[str, str, str], str]) -> None:
        self._user, self._password = user, password
        self._authenticate = authenticate
        self._token: str | None = None
        self._lock = threading.Lock()

    def __call__(self, request: Any) -> Any:
        base = _base(request.url)
        self._add(request, self._fresh(base, unlike=None))
        request.register_hook("response", self._renew)
        return request

    def _fresh(self, base: str, unlike: str | None) -> str:
        """Return the token; request a new one if it is still ``unlike``, the rejected one."""
        with self._lock:
            if self._token is None or self._token == unlike:
                self._token = self._authenticate(base, self._user, self._password)
            return self._token

    @staticmethod
    def _add(request: Any, token: str) -> None:
        if token:
            request.headers["Authorization"] = token

    def _renew(self, response: Any, **kwargs: Any) -> Any:
        if response.status_code != 401:
            return response
        # Read the body so that the connection returns to its pool; the session limits its size.
        _ = response.content
        response.close()
        request = response.request.copy()
        self._add(request, self._fresh(_base(request.url), unlike=request.headers.get("Authorization")))
        again = response.connection.send(request, **kwargs)
        again.history.append(response)
        again.request = request
        return again


def connect(
    endpoints: Sequence[Endpoint],
    *,
    cacert: str = "",
    cert: str = "",
    key: str = "",
    user: str = "",
    password: str = "",
    timeout: float = 5.0,
) -> EtcdClient:
    """Make a client of the etcd at ``endpoints``. Sends nothing yet.

    :param cacert: PEM file of the CA that signed the server's certificate; empty for the system's CAs.
    :param cert: PEM file of a client certificate.
    :param key: PEM file of the client certificate's key.
    :param user: user name; if empty, user and password are taken from the first endpoint that has them.
    :param timeout: seconds to connect, and again to receive the whole answer, for each request to a member.
    """
    from pytest_nixl.etcd.bounded_http import BoundedSession

    session = BoundedSession()
    if cacert:
        session.verify = cacert
    if cert:
        session.cert = (cert, key) if key else cert
    if not user:
        user, password = next(((e.user, e.password) for e in endpoints if e.user), ("", ""))
    bare = [Endpoint(e.scheme, e.host, e.port) for e in endpoints]
    return EtcdClient(bare, session, timeout=timeout, user=user, password=password)


def _all_failed(errors: list[EtcdError]) -> EtcdError:
    if len(errors) == 1:
        return errors[0]
    what = "; ".join(error.reason.removeprefix("etcd at ") for error in errors)
    causes = {error.cause for error in errors}
    return EtcdError(
        f"no member of the etcd answered: {what}",
        errors[0].remedy,
        cause=causes.pop() if len(causes) == 1 else "no-member",
        endpoint=",".join(error.endpoint for error in errors),
    )


def _revision(answer: Mapping[str, Any]) -> int:
    """Return the etcd's revision, which every answer about keys contains."""
    return number(answer["header"], "revision", None)


def _count(answer: Mapping[str, Any], name: str) -> int:
    _revision(answer)
    return number(answer, name)


def _whole(line: bytes) -> bool:
    """Whether ``line`` is complete JSON, and not just the first part of a message."""
    try:
        json.loads(line)
    except ValueError:
        return False
    except RecursionError:
        pass  # refused later, when it is read
    return True


def _no_auth(request: Any) -> Any:
    return request


def _base(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])
