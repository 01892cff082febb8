# SPDX-License-Identifier: Apache-2.0
"""A client of an etcd over its HTTP gateway: etcd3gw, several members, credentials, and errors in words.

Keys are text, values are bytes, times are seconds. Every method raises :class:`EtcdError`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_answer, explain_transport, no_gateway, not_etcd, related
from pytest_nixl.etcd.transaction import KeyValue, absent, decode, encode, key_range, put, put_payload, txn

if TYPE_CHECKING:
    import requests
    from etcd3gw.client import Etcd3Client

__all__ = ["EtcdClient", "EtcdError", "Event", "Lease", "Watched", "connect"]

#: Failures that happen before a request was sent, so that any request may go to the next member.
_BEFORE_SENDING = {"refused", "unresolved", "unreachable"}
#: Failures of one member after which a request that may be repeated goes to the next one.
_OF_ONE_MEMBER = {*_BEFORE_SENDING, "timeout", "closed", "no-leader", "tls", "untrusted"}


class EtcdClient:
    """One etcd, made by :func:`connect`. May be used by several threads."""

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
            # Not by the constructor, which takes a session from 2.6 on only.
            client.session = session
        self._current = 0

    def __repr__(self) -> str:
        return f"EtcdClient({', '.join(self.endpoints)})"

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The client may be used again."""
        self._session.close()

    @property
    def endpoint(self) -> str:
        """The member that answered last (before the first answer, the first one)."""
        return str(self._members[self._current])

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All members, as URLs without credentials."""
        return tuple(str(member) for member in self._members)

    @property
    def raw(self) -> Etcd3Client:
        """The etcd3gw client of the member that answered last, with our credentials."""
        return self._clients[self._members[self._current]]

    def status(self) -> dict[str, Any]:
        """Return the member's status in etcd's own names: ``version``, ``leader``, ``dbSize``, ``raftIndex``, …"""
        return self._post("/maintenance/status", {})

    def version(self) -> str:
        """Return the member's version, such as ``3.5.1``."""
        return str(self.status().get("version", "unknown"))

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Store ``value``; with a lease the key goes when that ends."""
        self._post("/kv/put", put_payload(key, value, lease))

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, None where there is none."""
        kvs = self._post("/kv/range", {"key": encode(key)}).get("kvs", [])
        return decode(kvs[0].get("value", "")) if kvs else None

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return every key that starts with ``prefix``, in the order of the keys."""
        answer = self._post("/kv/range", {**key_range(prefix), "sort_order": "ASCEND", "sort_target": "KEY"})
        return {decode(kv["key"]).decode(): decode(kv.get("value", "")) for kv in answer.get("kvs", [])}

    def by_creation(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return every key that starts with ``prefix``, in the order of their creation."""
        answer = self._post("/kv/range", {**key_range(prefix), "sort_order": "ASCEND", "sort_target": "CREATE"})
        return tuple(KeyValue.of(item) for item in answer.get("kvs", ()))

    def lease_of(self, key: str) -> int | None:
        """Return etcd's number of the lease that ``key`` was put with, 0 for none; None where there is no such key."""
        kvs = self._post("/kv/range", {"key": encode(key), "keys_only": True}).get("kvs", [])
        return int(kvs[0].get("lease", 0)) if kvs else None

    def count_prefix(self, prefix: str) -> int:
        """Return how many keys start with ``prefix``."""
        return int(self._post("/kv/range", {**key_range(prefix), "count_only": True}).get("count", 0))

    def delete(self, key: str) -> bool:
        """Delete ``key``; return whether it was there."""
        return int(self._post("/kv/deleterange", {"key": encode(key)}).get("deleted", 0)) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; return how many.

        :raises ValueError: where the prefix is empty or only slashes: that would empty somebody's etcd.
        """
        if not prefix.strip("/"):
            raise ValueError(f"refused to delete every key of an etcd: the prefix is {prefix!r}")
        return int(self._post("/kv/deleterange", key_range(prefix)).get("deleted", 0))

    def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Store ``value`` if ``key`` is absent, in one transaction; return whether it was.

        The request is never repeated once it may have been sent: a lost answer is an error, not False.
        """
        answer = self.transaction(txn([absent(key)], [put(key, value, lease)]))
        return bool(answer.get("succeeded", False))

    def transaction(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send a transaction in the gateway's own JSON form. It is never repeated once it may have been sent."""
        return self._post("/kv/txn", payload, repeatable=False)

    def watch(self, *watched: Watched, seconds: float) -> Iterator[Event]:
        """Yield what happens to keys, all of it and in order, and end when ``seconds`` have passed.

        A connection that breaks, or a member that dies, is replaced, and nothing is missed. What happens to two watched
        keys may come in another order. Where something happens late, the end may come half of ``seconds`` later.

        :param watched: what to watch, each from its own revision on.
        :raises EtcdError: ``compacted`` where the etcd has forgotten that revision.
        """
        deadline = time.monotonic() + seconds
        failures = 0
        revisions = {number: item.since for number, item in enumerate(watched, 1)}
        while (left := deadline - time.monotonic()) > 0:
            try:
                for number, event in self._watch_once(watched, revisions, left):
                    yield event
                    revisions[number], failures = event.item.mod_revision + 1, 0
                    if deadline - time.monotonic() < left / 2:
                        break  # a connection waits as long as it was told at its start: take one that waits less
            except EtcdError as error:
                if error.cause not in _OF_ONE_MEMBER:
                    raise
                failures += 1
                self._current = (self._current + 1) % len(self._members)
                time.sleep(min(0.02 * failures, 0.5, max(0.0, deadline - time.monotonic())))

    def _watch_once(
        self, watched: Sequence[Watched], revisions: Mapping[int, int], seconds: float
    ) -> Iterator[tuple[int, Event]]:
        """Watch over one connection, until nothing has come for ``seconds``."""
        from requests.exceptions import ConnectionError, RequestException

        member = self._members[self._current]
        body = "\n".join(
            json.dumps({"create_request": item.payload(n, revisions[n])}) for n, item in enumerate(watched, 1)
        )
        try:
            answer = self._session.post(f"{member}/v3/watch", data=body, stream=True, timeout=(self._timeout, seconds))
        except (RequestException, OSError, ValueError) as error:
            raise self._explain(member, error) from error
        with contextlib.closing(answer):
            if answer.status_code != 200:
                raise self._explain_answer(member, answer.text, answer.reason)
            try:
                start = b""
                for part in answer.iter_content(chunk_size=None):
                    *lines, start = (start + part).split(b"\n")
                    for line in filter(None, lines):
                        yield from self._events(member, json.loads(line))
            except ConnectionError as error:
                # So requests calls a read that takes too long here: all is well, and nothing has happened.
                if "Read timed out" in str(error):
                    return
                raise self._explain(member, error) from error
            except (RequestException, OSError) as error:
                raise self._explain(member, error) from error
        raise EtcdError(f"etcd at {member}: it ended a watch", cause="closed", endpoint=str(member))

    @staticmethod
    def _events(member: Endpoint, message: Mapping[str, Any]) -> Iterator[tuple[int, Event]]:
        result = message.get("result")
        if result is None:
            raise explain_answer(member, json.dumps(message.get("error"))) or not_etcd(member, "its answer is no watch")
        if "compact_revision" in result:
            raise EtcdError(
                f"etcd at {member}: it was compacted, and has forgotten what is asked for", cause="compacted"
            )
        if result.get("canceled"):
            raise EtcdError(f"etcd at {member}: it ended a watch: {result.get('cancel_reason', '')}", cause="closed")
        for event in result.get("events", ()):
            yield int(result["watch_id"]), Event(KeyValue.of(event["kv"]), event.get("type") == "DELETE")

    def lease(self, ttl_seconds: int) -> Lease:
        """Ask for a lease of ``ttl_seconds``."""
        answer = self._post("/lease/grant", {"TTL": ttl_seconds, "ID": 0})
        return Lease(self, int(answer["ID"]), int(answer["TTL"]))

    def require_password(self, password: str) -> None:
        """Make the user ``root`` with this password; from now on, the etcd answers nobody else."""
        steps: tuple[tuple[str, dict[str, str]], ...] = (
            ("user/add", {"name": "root", "password": password}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        )
        for path, payload in steps:
            self._post(f"/auth/{path}", payload, repeatable=False)

    def time_to_live(self, lease: int) -> tuple[int, int] | None:
        """Return the seconds that a lease of this number still has, and those it was granted; None where it ended."""
        answer = self._post("/lease/timetolive", {"ID": lease})
        left = int(answer.get("TTL", 0))  # what is 0 is left out; one that is not there has -1
        return (left, int(answer.get("grantedTTL", 0))) if left >= 0 else None

    def _post(self, path: str, payload: Mapping[str, Any], *, repeatable: bool = True) -> dict[str, Any]:
        """Ask the members in turn, first the one that answered last."""
        errors: list[EtcdError] = []
        first = self._current
        for step in range(len(self._members)):
            index = (first + step) % len(self._members)
            try:
                answer = self._ask(self._members[index], path, payload)
            except EtcdError as error:
                errors.append(error)
                if error.cause not in (_OF_ONE_MEMBER if repeatable else _BEFORE_SENDING):
                    raise
            else:
                self._current = index
                return answer
        raise _all_failed(errors)

    def _ask(self, member: Endpoint, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        from etcd3gw.exceptions import Etcd3Exception
        from requests.exceptions import RequestException

        raw = self._clients[member]
        try:
            answer = raw.post(raw.get_url(path), json=dict(payload))
        except (Etcd3Exception, RequestException, OSError, ValueError) as error:
            raise self._explain(member, error) from error
        if not isinstance(answer, dict) or not ({"header", "result"} & answer.keys()):
            raise not_etcd(member, "its answer has another form")
        return answer

    def _explain(self, member: Endpoint, error: BaseException) -> EtcdError:
        from etcd3gw.exceptions import Etcd3Exception
        from requests.exceptions import JSONDecodeError, RequestException

        chain = list(related(error))
        if any(isinstance(item, JSONDecodeError) for item in chain):
            return not_etcd(member, "its answer is not JSON")
        unanswered = any(isinstance(item, (RequestException, OSError)) for item in chain)
        if unanswered or not isinstance(error, Etcd3Exception):
            has_certificate = self._session.cert is not None
            return explain_transport(member, error, timeout=self._timeout, has_certificate=has_certificate)
        reason = str(error.args[0]) if error.args else ""
        return self._explain_answer(member, str(error.detail_text), reason)

    def _explain_answer(self, member: Endpoint, text: str, reason: str) -> EtcdError:
        explained = explain_answer(member, text, reason=reason)
        if explained is not None:
            return explained
        version = self._plain_version(member)
        if version is not None and reason == "Not Found":
            return no_gateway(member, version)
        return not_etcd(member, f"it answers {reason!r} to /v3")

    def _plain_version(self, member: Endpoint) -> str | None:
        """Return what ``/version`` says (it needs neither gateway nor password), None where that is no etcd's."""
        from requests.exceptions import RequestException

        try:
            answer = self._session.get(f"{member}/version", timeout=self._timeout, auth=_no_auth).json()
        except (RequestException, ValueError, OSError):
            return None
        version = answer.get("etcdserver") if isinstance(answer, dict) else None
        return str(version) if version else None

    def _authenticate(self, base: str, user: str, password: str) -> str:
        """Return a token, empty where the etcd has authentication turned off."""
        from requests.exceptions import RequestException

        member = next(member for member in self._members if str(member).lower() == base.lower())
        try:
            answer = self._session.post(
                f"{base}/v3/auth/authenticate",
                json={"name": user, "password": password},
                timeout=self._timeout,
                auth=_no_auth,
            )
            if answer.status_code == 200:
                return str(answer.json()["token"])
        except (RequestException, OSError, ValueError, KeyError) as error:
            raise self._explain(member, error) from None
        if "authentication is not enabled" in answer.text:
            return ""
        raise self._explain_answer(member, answer.text, answer.reason)


@dataclass(frozen=True)
class Watched:
    """What :meth:`EtcdClient.watch` watches: one key, or every key that starts with it."""

    key: str
    #: The first revision of interest.
    since: int
    prefix: bool = False
    #: Whether only deletions are of interest: etcd then sends nothing else.
    deletions: bool = False

    def payload(self, number: int, revision: int) -> dict[str, Any]:
        """The request as the gateway takes it."""
        keys: dict[str, Any] = dict(key_range(self.key)) if self.prefix else {"key": encode(self.key)}
        filters = {"filters": ["NOPUT"]} if self.deletions else {}
        return {**keys, **filters, "start_revision": revision, "watch_id": number}


@dataclass(frozen=True)
class Event:
    """A key was written or deleted; of a deleted one, ``item`` has its key and the revision only."""

    item: KeyValue
    deleted: bool


class Lease:
    """Keys stored with it go when it ends: when it is not refreshed within its time, or is revoked."""

    def __init__(self, client: EtcdClient, id: int, ttl: int) -> None:
        self._client = client
        #: etcd's number of it.
        self.id = id
        #: Seconds that it lives without a refresh, as etcd granted them.
        self.ttl = ttl

    def refresh(self) -> int:
        """Start its time again; return the seconds it has now. :raises EtcdError: where it has ended (``no-lease``)."""
        answer = self._client._post("/lease/keepalive", {"ID": self.id})
        left = int(answer.get("result", answer).get("TTL", 0))
        if left < 1:
            raise EtcdError(
                f"etcd at {self._client.endpoint}: the lease is not there: it has expired or was revoked",
                "refresh a lease before its time is over",
                cause="no-lease",
                endpoint=self._client.endpoint,
            )
        return left

    def revoke(self) -> None:
        """End it now, and delete its keys; nothing happens where it has ended already."""
        try:
            self._client._post("/lease/revoke", {"ID": self.id})
        except EtcdError as error:
            if error.cause != "no-lease":
                raise


class _TokenAuth:
    """Adds etcd's token to each request, and a fresh one where the server has forgotten it (401)."""

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
        """Return the token; ask for another one where it is still the one that was refused."""
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
        # The connection goes back to its pool once the body is read.
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
    """Make a client. Nothing is sent yet.

    :param cacert: PEM file of the authority that signed the server's certificate; empty for the system's.
    :param cert: PEM file of a client certificate, :param key: of its key.
    :param user: empty for the user and password of the first endpoint that has one.
    :param timeout: seconds for the connection, and as much again for the answer, of each request.
    """
    import requests

    session = requests.Session()
    # Neither a proxy, nor REQUESTS_CA_BUNDLE (which would win over the CA given), nor ~/.netrc.
    session.trust_env = False
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


def _no_auth(request: Any) -> Any:
    return request


def _base(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])
