# SPDX-License-Identifier: Apache-2.0
"""What the clients of object stores have in common. They share nothing with NIXL.

NIXL reports every failure of a server as ``NIXL_ERR_BACKEND``, without the server's answer. These clients write, read
and check the objects that NIXL moves, and find the reason.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.texts import Entries

T = TypeVar("T")

#: The keys of all objects begin with this.
PREFIX = "pytest-nixl"
#: The time for a connection and for each part of an answer, and for a whole :meth:`StoreClient.probe`, in seconds.
SECONDS = 20.0
#: Where Debian and Ubuntu have the certificates that they trust.
SYSTEM_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
#: Servers refuse a request whose time differs by more, in seconds.
MOST_SKEW = 900.0


@dataclass(frozen=True)
class StoreFault:
    """A fault of a server.

    :param id: its name in ``store-faults.toml``.
    :param kind: its kind, such as ``bucket`` or ``clock``.
    :param remedy: what to do, as an imperative.
    :param codes: the error codes of the answers that report it.
    :param statuses: the same of answers without such a code, by their HTTP status.
    """

    id: str
    kind: str
    remedy: str
    codes: Sequence[str] = ()
    statuses: Sequence[int] = ()


class ConnectionFaults(NamedTuple):
    """The faults of a connection, with the remedies of one kind of server."""

    #: It cannot be reached, or does not answer.
    address: StoreFault
    #: It does not speak TLS, as its URL says.
    no_tls: StoreFault
    #: Its certificate is signed by nobody whom this host trusts.
    untrusted: StoreFault


def faults_by_code(faults: Mapping[str, StoreFault]) -> dict[str, StoreFault]:
    return {code: fault for fault in faults.values() for code in fault.codes}


def faults_by_status(faults: Mapping[str, StoreFault]) -> dict[int, StoreFault]:
    return {status: fault for fault in faults.values() for status in fault.statuses}


def connection_faults(faults: Mapping[str, StoreFault]) -> ConnectionFaults:
    return ConnectionFaults(faults["unreachable"], faults["no-tls"], faults["untrusted"])


class ObjectStoreError(NixlPluginError):
    """An object store cannot be used, with the reason that it gave.

    :param kind: the kind of the fault, as :class:`StoreFault` names it, or ``settings`` for a value that is missing or
        malformed.
    """

    def __init__(self, reason: str, remedy: str = "", detail: str = "", kind: str = "settings") -> None:
        super().__init__(reason, remedy, detail)
        self.kind = kind


class StoreClient(ABC):
    """Put, get and delete objects, one request at a time.

    :param server: the server, for messages, such as ``the S3 server http://127.0.0.1:9000``.
    :param space: where the objects are on it, such as ``bucket models``.
    :param transport: how it is reached: ``http/HOST:PORT`` or ``https/HOST:PORT``.
    :param clock: what to do if its clock differs from this host's.
    :param faults: what to do about a connection that fails.
    """

    def __init__(self, server: str, space: str, transport: str, clock: StoreFault, faults: ConnectionFaults) -> None:
        self.server = server
        self.space = space
        self.transport = transport
        self.clock = clock
        self._faults = faults
        self._silent: ObjectStoreError | None = None
        #: The seconds by which the server's clock is ahead of this host's, from its last answer; None: unknown.
        self.ahead: float | None = None

    @abstractmethod
    def put(self, key: str, content: bytes) -> None:
        """Store an object. :raises ObjectStoreError: the server cannot be reached, or refuses it."""

    @abstractmethod
    def get(self, key: str, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of an object from ``offset``. :raises ObjectStoreError: as :meth:`put`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, which may be missing. :raises ObjectStoreError: as :meth:`put`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def doubt(self) -> ObjectStoreError | None:
        """Return what may keep NIXL from a server that answers this client; None: nothing that it could know."""
        return None

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which makes requests, unless they take too long all together.

        A server that sends an answer bit by bit, a name that does not resolve, and several addresses none of which
        answers would otherwise take longer than each single wait. Work that takes too long goes on in its thread.
        Every later call raises the same error, and makes no request.

        :param seconds: the time for all of them.
        :raises ObjectStoreError: a request fails, or the time is up.
        """
        if self._silent is not None:
            raise self._silent
        results: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="pytest-nixl object store", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            description, fault = fault_of(TimeoutError(), self._faults, seconds)
            self._silent = ObjectStoreError(f"{self.server} {description}", fault.remedy, kind=fault.kind)
            raise self._silent
        if failed:
            [failure] = failed
            raise failure
        [result] = results
        return result

    def discard(self, key: str, seconds: float) -> None:
        """Delete an object that may be missing. Give up after some seconds, or if the server fails.

        :param seconds: the time for it.
        """
        with contextlib.suppress(ObjectStoreError):
            self.within(seconds, lambda: self.delete(key))

    def probe(self, key: str, seconds: float = SECONDS) -> None:
        """Store an object, read it back and delete it.

        :param seconds: the time for all of it.
        :raises ObjectStoreError: it cannot be stored, read or deleted, other bytes are read, or the time is up.
        """
        self.within(seconds, lambda: self._probe(key))

    def _probe(self, key: str) -> None:
        content = secrets.token_bytes(1024)
        self.put(key, content)
        try:
            content_read = self.get(key, 0, len(content))
        except ObjectStoreError:
            with contextlib.suppress(ObjectStoreError):
                self.delete(key)
            raise
        self.delete(key)
        if content_read != content:
            raise ObjectStoreError(
                f"{self.server} returned other bytes than were stored in {self.space}",
                "read the log of the server, and check what is between it and this host",
                kind="server",
            )


def clock_ahead(date: str | None) -> float | None:
    """Return the seconds by which the time of an answer is ahead of this host's; None: it is not a time.

    :param date: the header ``Date`` of the answer.
    """
    try:
        server_time = parsedate_to_datetime(date or "")
        return (server_time - datetime.now(timezone.utc)).total_seconds()
    except (TypeError, ValueError):
        return None


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the system, or of HTTP, from which an error of a client's package came."""
    waiting: list[Any] = [error]
    visited: list[BaseException] = []
    while waiting:
        candidate = waiting.pop()
        if not isinstance(candidate, BaseException) or candidate in visited:
            continue
        visited.append(candidate)
        if isinstance(candidate, http.client.HTTPException):
            return candidate
        # The errors of requests are errors of the system by name only.
        if isinstance(candidate, OSError) and type(candidate).__module__ in ("builtins", "socket", "ssl"):
            return candidate
        waiting += [*candidate.args, candidate.__cause__, candidate.__context__, getattr(candidate, "reason", None)]
        waiting.append(getattr(candidate, "inner_exception", None))
    return error


def fault_of(error: BaseException, faults: ConnectionFaults, seconds: float = SECONDS) -> tuple[str, StoreFault]:
    """Return what a failed connection or request means: a sentence without its subject, and the fault.

    :param error: the :class:`OSError` or :class:`http.client.HTTPException`.
    :param faults: the faults of that kind of server.
    :param seconds: the time that the server had.
    """
    if isinstance(error, socket.gaierror):
        return f"has a host name that does not resolve ({error.strerror})", faults.address
    if isinstance(error, TimeoutError):
        return f"did not answer within {seconds:.3g} s", faults.address
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({error.verify_message})", faults.untrusted
    if isinstance(error, ssl.SSLError):
        return f"does not speak TLS ({error.reason})", faults.no_tls
    if isinstance(error, http.client.HTTPException):
        return f"closed the connection or does not speak HTTP ({type(error).__name__})", faults.address
    return f"cannot be reached ({getattr(error, 'strerror', '') or error})", faults.address


_FAULTS = Entries("store-faults", StoreFault, "s3")
BY_CODE, BY_STATUS, CONNECTION_FAULTS = faults_by_code(_FAULTS), faults_by_status(_FAULTS), connection_faults(_FAULTS)
#: For other answers.
UNKNOWN = _FAULTS["unknown"]
CHECKSUM = _FAULTS["checksum"]


def trusted_by(bundle: str) -> str:
    """Return what makes NIXL's plugin trust a server, as an imperative.

    :param bundle: the file with the certificates; empty: it is not known.
    """
    return f"use --nixl-backend-params=OBJ:ca_bundle={bundle or 'FILE'}, and give the engine's OBJ that parameter too"
