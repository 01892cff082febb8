# SPDX-License-Identifier: Apache-2.0
"""A request to an etcd as the proxy sees it: its method, the keys that it accesses, and its state.

The body may be protobuf (gRPC) or the JSON of the HTTP gateway.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_HIGHEST_FIELD = (1 << 29) - 1
#: etcd and protobuf drop the bits above.
_MOST = (1 << 64) - 1


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message. A number of four or eight bytes is yielded as bytes.

    :raises IndexError, ValueError: the message is invalid, or has a group, which etcd's messages do not have.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _HIGHEST_FIELD:
            raise ValueError(f"invalid protobuf: field {number}")
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _LENGTH:
            size, place = _varint(message, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"invalid protobuf: wire type {kind}")
        if place + size > len(message):
            raise ValueError("invalid protobuf: it ends within a field")
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value & _MOST, place
    raise ValueError("invalid protobuf: a number of more than ten bytes")


#: Methods with an endless answer. Their requests and answers pass at once and are never held.
STREAMS = frozenset({"Watch", "LeaseKeepAlive", "Observe", "Snapshot"})

#: The end of a gateway URL, and gRPC's name of that method.
_GATEWAY = {
    "kv/range": "Range",
    "kv/put": "Put",
    "kv/deleterange": "DeleteRange",
    "kv/txn": "Txn",
    "kv/compaction": "Compact",
    "lease/grant": "LeaseGrant",
    "lease/revoke": "LeaseRevoke",
    "kv/lease/revoke": "LeaseRevoke",
    "lease/timetolive": "LeaseTimeToLive",
    "kv/lease/timetolive": "LeaseTimeToLive",
    "lease/leases": "LeaseLeases",
    "kv/lease/leases": "LeaseLeases",
    "watch": "Watch",
    "lock/lock": "Lock",
    "lock/unlock": "Unlock",
    "maintenance/status": "Status",
    "auth/authenticate": "Authenticate",
    # Through the gateway it has a single answer, so it is not a stream.
    "lease/keepalive": "LeaseKeepAliveOnce",
}
_RANDOM = re.compile(r"[0-9a-f]{12,}")


class BadClientError(Exception):
    """A client sent something that is neither HTTP/1.1 nor HTTP/2."""


class State(str, Enum):
    """The state of a request."""

    HELD = "held"
    SENT = "sent"
    ANSWERED = "answered"
    #: The etcd executed it and answered, but the client was cut off before it got the answer.
    ANSWER_LOST = "answer lost"
    #: It was forwarded, but its connection ended before an answer: it is unknown whether the etcd executed it.
    UNANSWERED = "unanswered"
    #: It never reached the etcd.
    DROPPED = "dropped"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Access:
    """A range of keys that a request accesses: from ``start`` inclusive to ``end`` exclusive."""

    start: bytes
    end: bytes
    write: bool


#: All keys, for example for a revoked lease, which may delete any key.
EVERYTHING = Access(b"", b"\xff" * 64, True)


@dataclass(eq=False)
class Request:
    """One request of one client.

    :param client: name of the client that sent it.
    :param number: 1-based index among the client's requests.
    :param method: etcd's name of the method, such as ``Range`` or ``Txn``; otherwise verb and path: ``GET /version``.
    :param key: the first key that it writes, else the first that it reads; empty if it names none.
    """

    client: str
    number: int
    method: str
    key: str = ""
    accesses: tuple[Access, ...] = ()
    state: State = State.SENT
    #: Body of the answer, if there is one (for gRPC without its 5 bytes of framing); always empty for a stream.
    answer: bytes = field(default=b"", repr=False)
    #: 1-based index among all requests of the proxy, in the order of forwarding; 0 if it was not forwarded.
    sent: int = 0
    #: How many requests of the proxy were forwarded before its answer came; 0 if none came.
    answered: int = 0
    #: Whether etcd has confirmed this watch: it reports every later change. A change before that may be missed.
    confirmed: bool = False

    @property
    def stream(self) -> bool:
        """Whether its answer is an endless stream."""
        return self.method in STREAMS

    @property
    def writes(self) -> bool:
        """Whether it may change a key."""
        return any(access.write for access in self.accesses)

    def label(self, names: Mapping[str, str] | None = None) -> str:
        """Return ``METHOD(KEY)``, with ``*`` for random parts of the key.

        :param names: replacements for parts of the key that differ from run to run.
        """
        key = self.key
        for part, name in (names or {}).items():
            key = key.replace(part, name)
        return f"{self.method}({_RANDOM.sub('*', key)})"

    def granted(self) -> int | None:
        """Return the id of the lease that this request was granted; None if it asked for none or has no answer."""
        if self.method != "LeaseGrant" or not self.answer:
            return None
        if self.answer.startswith(b"{"):
            number = json.loads(self.answer).get("ID")
            return int(number) if number else None
        return next((value for number, value in fields(self.answer) if number == 2 and isinstance(value, int)), None)

    def __str__(self) -> str:
        return f"{self.client} {self.number}: {self.method}({self.key}), {self.state}"


class RequestObserver(Protocol):
    """A client of the proxy, as a protocol's reader sees it: it is told of each request, and may hold or lose it."""

    def passed(self, method: str, accesses: tuple[Access, ...]) -> Request: ...

    def confirmed(self, request: Request) -> None: ...

    def withdrawn(self, request: Request) -> None: ...

    def arrived(self, link: Any, method: str, accesses: tuple[Access, ...], forward: Callable[[], None]) -> Request: ...

    def answered(self, link: Any, request: Request, answer: bytes, deliver: Callable[[], None]) -> None: ...


class ClientLink(Protocol):
    """A connection, as the reader of its protocol sees it."""

    @property
    def client(self) -> RequestObserver: ...

    def to_client(self, data: bytes) -> None: ...

    def to_server(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def gateway_method(verb: str, target: str) -> str:
    """Return etcd's method for a request to the HTTP gateway; ``VERB PATH`` if it is not a method of etcd."""
    path = target.split("?", 1)[0]
    match = re.fullmatch(r"/v3(?:alpha|beta)?/(.+)", path)
    return _GATEWAY.get(match[1], f"{verb} {path}") if match else f"{verb} {path}"


def grpc_method(path: str) -> str:
    """Return the last part of a gRPC path, such as ``Range`` of ``/etcdserverpb.KV/Range``."""
    return path.rsplit("/", 1)[-1]


def gateway_accesses(method: str, body: bytes) -> tuple[Access, ...]:
    """Return the key ranges that a gateway request accesses; none if its body is unreadable."""
    try:
        payloads = [json.loads(line) for line in (body.splitlines() if method == "Watch" else [body]) if line]
    except ValueError:
        return ()
    return tuple(access for item in payloads if isinstance(item, dict) for access in _of_json(method, item))


def grpc_accesses(method: str, message: bytes) -> tuple[Access, ...]:
    """Return the key ranges that a gRPC message accesses; none if it is unreadable."""
    try:
        return tuple(_of_message(method, message))
    except (IndexError, ValueError):
        return ()


def grpc_confirms(message: bytes) -> bool:
    """Return whether a gRPC answer to a watch says that the watch was created; False if it is unreadable."""
    try:
        return any(number == 3 and value == 1 for number, value in fields(message))
    except (IndexError, ValueError):
        return False


def gateway_confirms(line: bytes) -> bool:
    """Return whether a line of the gateway's answer to a watch says that it was created; False if it is unreadable."""
    try:
        answer = json.loads(line)
    except ValueError:
        return False
    result = answer.get("result") if isinstance(answer, dict) else None
    return isinstance(result, dict) and result.get("created") is True


def main_key(accesses: tuple[Access, ...]) -> str:
    """Return the first written key, else the first read key, else an empty string."""
    first = next((access for access in accesses if access.write), accesses[0] if accesses else None)
    return "" if first is None or first is EVERYTHING else first.start.decode(errors="replace")


def _access(start: bytes, end: bytes, write: bool) -> Access:
    if end == b"\0":
        return Access(start, EVERYTHING.end, write)
    return Access(start, end or start + b"\0", write)


def _lock(name: bytes) -> Access:
    """Return the range of a lock, which has one key per waiting client under its name and a slash."""
    return Access(name, name + b"0", True)


# In the gateway's JSON bytes are base64, and a name may be ``range_end`` or ``rangeEnd``.
_JSON_OPERATIONS = {
    "request_range": "Range",
    "request_put": "Put",
    "request_delete_range": "DeleteRange",
    "request_txn": "Txn",
}


def _of_json(method: str, payload: Mapping[str, Any]) -> Iterator[Access]:
    values = {re.sub(r"(?<=[a-z])([A-Z])", lambda m: f"_{m[1].lower()}", name): item for name, item in payload.items()}
    if method in ("Range", "Put", "DeleteRange"):
        start, end = _bytes(values.get("key")), _bytes(values.get("range_end"))
        yield _access(start, end, method != "Range")
    elif method == "Watch":
        create = values.get("create_request") or {}
        yield from _of_json("Range", create)
    elif method == "Txn":
        for compare in values.get("compare") or ():
            yield from _of_json("Range", compare)
        for operation in [*(values.get("success") or ()), *(values.get("failure") or ())]:
            for name, item in operation.items():
                snake = re.sub(r"(?<=[a-z])([A-Z])", lambda m: f"_{m[1].lower()}", name)
                yield from _of_json(_JSON_OPERATIONS.get(snake, ""), item)
    elif method == "Lock":
        yield _lock(_bytes(values.get("name")))
    elif method == "Unlock":
        yield _access(_bytes(values.get("key")), b"", True)
    elif method == "LeaseRevoke":
        yield EVERYTHING


def _bytes(text: object) -> bytes:
    return base64.b64decode(text) if isinstance(text, str) else b""


_OPERATION_FIELDS = {1: "Range", 2: "Put", 3: "DeleteRange", 4: "Txn"}


def _of_message(method: str, message: bytes) -> Iterator[Access]:
    if method in ("Range", "Put", "DeleteRange"):
        values = dict(fields(message))
        end = b"" if method == "Put" else _blob(values.get(2))
        yield _access(_blob(values.get(1)), end, method != "Range")
    elif method == "Watch":
        for number, value in fields(message):
            if number == 1:
                yield from _of_message("Range", _blob(value))
    elif method == "Txn":
        for number, value in fields(message):
            if number == 1:
                values = dict(fields(_blob(value)))
                yield _access(_blob(values.get(3)), _blob(values.get(64)), False)
            elif number in (2, 3):
                for kind, operation in fields(_blob(value)):
                    yield from _of_message(_OPERATION_FIELDS.get(kind, ""), _blob(operation))
    elif method == "Lock":
        yield _lock(_blob(dict(fields(message)).get(1)))
    elif method == "Unlock":
        yield _access(_blob(dict(fields(message)).get(1)), b"", True)
    elif method == "LeaseRevoke":
        yield EVERYTHING


def _blob(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""
