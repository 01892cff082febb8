# SPDX-License-Identifier: Apache-2.0
"""The members of one etcd: requests go to the one that answered last, and to the next one if it fails."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import hider
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError, error_at, explain_answer, explain_transport, not_etcd, printable

if TYPE_CHECKING:
    import requests
else:  # a run without an etcd does not need it
    requests = lazy_module("requests")

#: Failures before a request is sent: any request may then go to the next member.
_BEFORE_SENDING = {"refused", "unresolved", "unreachable"}
#: Failures of one member after which a repeatable request goes to the next member.
OF_ONE_MEMBER = {*_BEFORE_SENDING, "timeout", "closed", "no-leader", "tls", "untrusted"}
#: Timeout in seconds of the first attempt at each of several members. It may be short, because asking the next member
#: is harmless; if no member answers, slow members are asked again with the full timeout.
ATTEMPT_SECONDS = 1.5
#: Seconds for which a failed member is tried last.
_AVOIDED = 20.0
#: Maximum number of bytes of an error answer that are read for a message.
_SHOWN = 1 << 16
#: Exceptions that reading raises if the answer does not have the form of an etcd answer.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)

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


class EtcdMembers:
    """The members of one etcd cluster. Thread-safe.

    :param endpoints: the members.
    :param session: the HTTP session for all of them.
    :param timeout: seconds to connect, and again to receive the whole answer, for each request to a member.
    :param user: the user that authenticates; empty for none.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], session: requests.Session, *, timeout: float, user: str, password: str
    ) -> None:
        if not endpoints:
            raise ValueError("an etcd has at least one endpoint")
        self.all = tuple(endpoints)
        self.session = session
        self.timeout = timeout
        if user:
            session.auth = _TokenAuth(user, password, self._authenticate)
        self._password = password
        self._last = 0

    @property
    def last(self) -> Endpoint:
        """The member that answered last; the first one before any answer."""
        return self.all[self._last]

    def next(self) -> Endpoint:
        """Return the member to ask now."""
        return self.all[self._order()[0]]

    def _order(self) -> list[int]:
        """Return the order of the members by index: first the one that answered last; recently failed ones last."""
        count = len(self.all)
        order = [(self._last + step) % count for step in range(count)]
        return sorted(order, key=lambda place: _AVOIDED_MEMBERS.until(self.all[place]))

    def avoid(self, member: Endpoint) -> None:
        """Try this member last for a while, in all clients of this process."""
        if len(self.all) > 1:
            _AVOIDED_MEMBERS.add(member)

    def answered(self, member: Endpoint) -> None:
        """Note that a member works."""
        _AVOIDED_MEMBERS.remove(member)

    def post(
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
        members = [self.all[place] for place in self._order()]
        hasty = repeatable and len(members) > 1 and self.timeout > ATTEMPT_SECONDS
        while members:
            for member in members:
                try:
                    result = self._ask(member, path, payload, read, ATTEMPT_SECONDS if hasty else self.timeout)
                except EtcdError as error:
                    errors[member] = error
                    if error.cause in OF_ONE_MEMBER:
                        self.avoid(member)
                    if error.cause not in (OF_ONE_MEMBER if repeatable else _BEFORE_SENDING):
                        raise
                else:
                    _AVOIDED_MEMBERS.remove(member)
                    self._last = self.all.index(member)
                    return result
            members = [member for member in members if hasty and errors[member].cause == "timeout"]
            hasty = False
        raise _all_failed([errors[member] for member in self.all if member in errors])

    def post_each(
        self, path: str, payload: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]
    ) -> dict[Endpoint, T | EtcdError]:
        """Send a request to every member; return the answer of each, or the error. Parameters as :meth:`post`."""
        answers: dict[Endpoint, T | EtcdError] = {}
        for member in self.all:
            try:
                answers[member] = self._ask(member, path, payload, read, self.timeout)
            except EtcdError as error:
                answers[member] = error
        return answers

    def get_text(self, path: str) -> str | None:
        """Return a page that the member which answered last serves beside the gateway, such as ``/metrics``.

        :returns: its text; None if that member does not serve it to this client.
        """
        try:
            answer = self.session.get(f"{self.last}{path}", timeout=(self.timeout, self.timeout), auth=_no_auth)
        except (requests.RequestException, OSError, ValueError):
            return None
        return answer.content.decode(errors="replace") if answer.status_code == 200 else None

    def _ask(
        self,
        member: Endpoint,
        path: str,
        payload: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], T],
        seconds: float,
    ) -> T:
        try:
            answer = self.session.post(f"{member}/v3{path}", json=dict(payload), timeout=(seconds, seconds))
        except (requests.RequestException, OSError, ValueError) as error:
            raise self.explain(member, error, seconds) from error
        if answer.status_code != 200:
            raise self.explain_refusal(member, answer.content, answer.reason)
        try:
            document = json.loads(answer.content)
        except RecursionError as error:
            raise not_etcd(member, "its answer is nested too deeply") from error
        except ValueError as error:
            raise not_etcd(member, "its answer is not JSON") from error
        if not isinstance(document, dict) or not any(
            isinstance(document.get(name), dict) for name in ("header", "result")
        ):
            raise not_etcd(member, "its answer does not have the form of an etcd answer")
        try:
            return read(document)
        except MALFORMED as error:
            raise not_etcd(member, f"its answer to /v3{path} does not have the form of an etcd answer") from error

    def explain(self, member: Endpoint, error: BaseException, seconds: float) -> EtcdError:
        """Return the error for a request that failed. ``seconds`` was its timeout."""
        has_certificate = self.session.cert is not None
        return explain_transport(member, error, timeout=seconds, has_certificate=has_certificate)

    def explain_refusal(self, member: Endpoint, content: bytes, reason: str) -> EtcdError:
        """Return the error for an answer that is not 200, without the password that the answer may repeat.

        :param reason: HTTP's word for its status.
        """
        sent = (self._password, json.dumps(self._password)[1:-1])
        hide = hider({f"ETCD_{number}_PASSWORD": text for number, text in enumerate(sent)})
        reason = hide(reason or "")
        explained = explain_answer(member, hide(content[:_SHOWN].decode(errors="replace")))
        if explained is not None:
            return explained
        version = self._plain_version(member) if reason == "Not Found" else None
        if version is not None:
            return error_at(
                member,
                "gateway-off",
                f"etcd {version} runs with --enable-grpc-gateway=false, so /v3 answers 404",
                "start that etcd without --enable-grpc-gateway=false: NIXL does not need the gateway, but pytest-nixl "
                "does",
            )
        return not_etcd(member, f"it answers {printable(reason, 60)!r} to /v3")

    def _plain_version(self, member: Endpoint) -> str | None:
        """Return the version from ``/version``, which needs neither gateway nor password; None if it is not an etcd."""
        try:
            timeout = (self.timeout, self.timeout)
            answer = self.session.get(f"{member}/version", timeout=timeout, auth=_no_auth).json()
        except (requests.RequestException, ValueError, OSError, RecursionError):
            return None
        version = answer.get("etcdserver") if isinstance(answer, dict) else None
        return printable(str(version), 40) if version else None

    def _authenticate(self, base: str, user: str, password: str) -> str:
        """Return a token; empty if authentication is off in the etcd."""
        member = next(member for member in self.all if str(member).lower() == base.lower())
        try:
            answer = self.session.post(
                f"{base}/v3/auth/authenticate",
                json={"name": user, "password": password},
                timeout=(self.timeout, self.timeout),
                auth=_no_auth,
            )
        except (requests.RequestException, OSError, ValueError) as error:
            raise self.explain(member, error, self.timeout) from None
        if answer.status_code == 200:
            try:
                token = json.loads(answer.content)["token"]
                if not re.fullmatch(r"[\x21-\x7e]{1,8192}", token):
                    raise ValueError
            except MALFORMED:
                raise not_etcd(member, "its answer to /v3/auth/authenticate is not an etcd answer") from None
            return str(token)
        if b"authentication is not enabled" in answer.content:
            return ""
        raise self.explain_refusal(member, answer.content, answer.reason)


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


def _all_failed(errors: list[EtcdError]) -> EtcdError:
    if len(errors) == 1:
        return errors[0]
    reasons = "; ".join(error.reason.removeprefix("etcd at ") for error in errors)
    causes = {error.cause for error in errors}
    return EtcdError(
        f"no member of the etcd answered: {reasons}",
        errors[0].remedy,
        cause=causes.pop() if len(causes) == 1 else "no-member",
        endpoint=",".join(error.endpoint for error in errors),
    )


def _no_auth(request: Any) -> Any:
    return request


def _base(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])
