# SPDX-License-Identifier: Apache-2.0
"""A client of an etcd over its HTTP gateway: etcd3gw, several members, credentials, and errors in words.

Keys are text, values are bytes, times are seconds. Every method raises :class:`EtcdError`.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_answer, explain_transport, no_gateway, not_etcd, related

if TYPE_CHECKING:
    import requests
    from etcd3gw.client import Etcd3Client

__all__ = ["EtcdClient", "EtcdError", "Lease", "connect"]

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
        self._post("/kv/put", _put(key, value, lease))

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, None where there is none."""
        kvs = self._post("/kv/range", {"key": _encode(key)}).get("kvs", [])
        return _decode(kvs[0].get("value", "")) if kvs else None

    def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return every key that starts with ``prefix``, in the order of the keys."""
        answer = self._post("/kv/range", {**_range(prefix), "sort_order": "ASCEND", "sort_target": "KEY"})
        return {_decode(kv["key"]).decode(): _decode(kv.get("value", "")) for kv in answer.get("kvs", [])}

    def count_prefix(self, prefix: str) -> int:
        """Return how many keys start with ``prefix``."""
        return int(self._post("/kv/range", {**_range(prefix), "count_only": True}).get("count", 0))

    def delete(self, key: str) -> bool:
        """Delete ``key``; return whether it was there."""
        return int(self._post("/kv/deleterange", {"key": _encode(key)}).get("deleted", 0)) > 0

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; return how many.

        :raises ValueError: where the prefix is empty or only slashes: that would empty somebody's etcd.
        """
        if not prefix.strip("/"):
            raise ValueError(f"refused to delete every key of an etcd: the prefix is {prefix!r}")
        return int(self._post("/kv/deleterange", _range(prefix)).get("deleted", 0))

    def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Store ``value`` if ``key`` is absent, in one transaction; return whether it was.

        The request is never repeated once it may have been sent: a lost answer is an error, not False.
        """
        absent = {"key": _encode(key), "result": "EQUAL", "target": "CREATE", "create_revision": 0}
        put = {"request_put": _put(key, value, lease)}
        return bool(self.transaction({"compare": [absent], "success": [put], "failure": []}).get("succeeded", False))

    def transaction(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send a transaction in the gateway's own JSON form. It is never repeated once it may have been sent."""
        return self._post("/kv/txn", payload, repeatable=False)

    def lease(self, ttl_seconds: int) -> Lease:
        """Ask for a lease of ``ttl_seconds``."""
        answer = self._post("/lease/grant", {"TTL": ttl_seconds, "ID": 0})
        return Lease(self, int(answer["ID"]), int(answer["TTL"]))

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


def _encode(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _put(key: str, value: bytes, lease: Lease | None) -> dict[str, Any]:
    payload: dict[str, Any] = {"key": _encode(key), "value": _encode(value)}
    return {**payload, "lease": lease.id} if lease else payload


def _range(prefix: str) -> dict[str, str]:
    """The half-open range of keys that start with ``prefix``; of all keys where that is empty."""
    data = prefix.encode()
    while data and data[-1] == 0xFF:
        data = data[:-1]
    end = data[:-1] + bytes([data[-1] + 1]) if data else b"\0"
    return {"key": _encode(prefix or b"\0"), "range_end": _encode(end)}
