# SPDX-License-Identifier: Apache-2.0
"""A request to an etcd, as its path sees it: what it asks for, the keys it touches, and what became of it.

The body is read in both of its forms: protobuf (gRPC) and the JSON of the HTTP gateway.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Requests whose answer has no end: they and their answers pass as they come, and are never held.
STREAMS = frozenset({"Watch", "LeaseKeepAlive", "Observe", "Snapshot"})

#: The last parts of the gateway's addresses, and the names that gRPC has for them.
_GATEWAY = {
    "kv/range": "Range", "kv/put": "Put", "kv/deleterange": "DeleteRange", "kv/txn": "Txn",
    "kv/compaction": "Compact", "lease/grant": "LeaseGrant", "lease/revoke": "LeaseRevoke",
    "kv/lease/revoke": "LeaseRevoke", "lease/timetolive": "LeaseTimeToLive", "kv/lease/timetolive": "LeaseTimeToLive",
    "lease/leases": "LeaseLeases", "kv/lease/leases": "LeaseLeases", "watch": "Watch", "lock/lock": "Lock",
    "lock/unlock": "Unlock", "maintenance/status": "Status", "auth/authenticate": "Authenticate",
    # One answer, and then its end: through the gateway it is no stream.
    "lease/keepalive": "LeaseKeepAliveOnce",
}  # fmt: skip
_RANDOM = re.compile(r"[0-9a-f]{12,}")


class BadClientError(Exception):
    """A client sent what is neither HTTP/1.1 nor HTTP/2."""


class State(str, Enum):
    """What became of a request."""

    HELD = "held"
    SENT = "sent"
    ANSWERED = "answered"
    #: The etcd has done it and answered, and the client was cut off before it could know.
    ANSWER_LOST = "answer lost"
    #: It was sent on, and its connection ended before an answer came: nobody knows whether the etcd has done it.
    UNANSWERED = "unanswered"
    #: It never reached the etcd.
    DROPPED = "dropped"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Access:
    """Keys that a request touches, from ``start`` until before ``end``."""

    start: bytes
    end: bytes
    write: bool

    def conflicts(self, other: Access) -> bool:
        """Whether their order can matter: they touch a common key, and one of them writes."""
        return (self.write or other.write) and self.start < other.end and other.start < self.end


#: What ends a lease may touch any key.
EVERYTHING = Access(b"", b"\xff" * 64, True)


@dataclass(eq=False)
class Request:
    """One request of one client.

    :param client: the name of the client that made it.
    :param number: its place among the client's requests, from 1.
    :param method: etcd's name of it, such as ``Range`` or ``Txn``; for what is not etcd's, the line ``GET /version``.
    :param key: the first key that it writes, or else reads; empty where it names none.
    """

    client: str
    number: int
    method: str
    key: str = ""
    accesses: tuple[Access, ...] = ()
    state: State = State.SENT
    #: The body of the answer (of gRPC, without its five bytes of framing), once there is one; not of streams.
    answer: bytes = field(default=b"", repr=False)
    #: Its place among all requests of the path, from 1, in the order in which they were sent on; 0: it was not.
    sent: int = 0

    @property
    def stream(self) -> bool:
        """Whether its answer has no end."""
        return self.method in STREAMS

    @property
    def writes(self) -> bool:
        """Whether it may change a key."""
        return any(access.write for access in self.accesses)

    def label(self, names: Mapping[str, str] | None = None) -> str:
        """Return method and key, with ``*`` for what is random in it.

        :param names: what to write for parts of the key that differ from run to run.
        """
        key = self.key
        for part, name in (names or {}).items():
            key = key.replace(part, name)
        return f"{self.method}({_RANDOM.sub('*', key)})"

    def granted(self) -> int | None:
        """Return the lease that this request was granted; None where it asked for none, or has no answer yet."""
        if self.method != "LeaseGrant" or not self.answer:
            return None
        if self.answer.startswith(b"{"):
            number = json.loads(self.answer).get("ID")
            return int(number) if number else None
        return next((value for field, value in _fields(self.answer) if field == 2 and isinstance(value, int)), None)

    def __str__(self) -> str:
        return f"{self.client} {self.number}: {self.method}({self.key}), {self.state}"


def gateway_method(verb: str, target: str) -> str:
    """Return the method that a request to the HTTP gateway asks for; ``VERB TARGET`` where it is none of etcd's."""
    path = target.split("?", 1)[0]
    match = re.fullmatch(r"/v3(?:alpha|beta)?/(.+)", path)
    return _GATEWAY.get(match[1], f"{verb} {path}") if match else f"{verb} {path}"


def grpc_method(path: str) -> str:
    """Return the last part of a gRPC address, such as ``Range`` of ``/etcdserverpb.KV/Range``."""
    return path.rsplit("/", 1)[-1]


def gateway_accesses(method: str, body: bytes) -> tuple[Access, ...]:
    """Return what a request of the gateway touches; nothing where its body cannot be read."""
    try:
        payloads = [json.loads(line) for line in (body.splitlines() if method == "Watch" else [body]) if line]
    except ValueError:
        return ()
    return tuple(access for item in payloads if isinstance(item, dict) for access in _of_json(method, item))


def grpc_accesses(method: str, message: bytes) -> tuple[Access, ...]:
    """Return what a gRPC message touches; nothing where it cannot be read."""
    try:
        return tuple(_of_message(method, message))
    except (IndexError, ValueError):
        return ()


def main_key(accesses: tuple[Access, ...]) -> str:
    """Return the first key that is written, or else read."""
    first = next((access for access in accesses if access.write), accesses[0] if accesses else None)
    return "" if first is None or first is EVERYTHING else first.start.decode(errors="replace")


def _access(start: bytes, end: bytes, write: bool) -> Access:
    if end == b"\0":
        return Access(start, EVERYTHING.end, write)
    return Access(start, end or start + b"\0", write)


def _lock(name: bytes) -> Access:
    """A lock is one key for each that waits, under the lock's name and a slash."""
    return Access(name, name + b"0", True)


# The gateway's JSON: bytes are base64, names are of either form, ``range_end`` or ``rangeEnd``.
_JSON_OPERATIONS = {"request_range": "Range", "request_put": "Put", "request_delete_range": "DeleteRange",
                    "request_txn": "Txn"}  # fmt: skip


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
        found = dict(_fields(message))
        end = b"" if method == "Put" else _blob(found.get(2))
        yield _access(_blob(found.get(1)), end, method != "Range")
    elif method == "Watch":
        for number, value in _fields(message):
            if number == 1:
                yield from _of_message("Range", _blob(value))
    elif method == "Txn":
        for number, value in _fields(message):
            if number == 1:
                found = dict(_fields(_blob(value)))
                yield _access(_blob(found.get(3)), _blob(found.get(64)), False)
            elif number in (2, 3):
                for kind, operation in _fields(_blob(value)):
                    yield from _of_message(_OPERATION_FIELDS.get(kind, ""), _blob(operation))
    elif method == "Lock":
        yield _lock(_blob(dict(_fields(message)).get(1)))
    elif method == "Unlock":
        yield _access(_blob(dict(_fields(message)).get(1)), b"", True)
    elif method == "LeaseRevoke":
        yield EVERYTHING


def _blob(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message. :raises IndexError, ValueError: where it is none."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            number, place = _varint(message, place)
            yield tag >> 3, number
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no protobuf: wire type {kind}")
        if place + size > len(message):
            raise ValueError("no protobuf: it ends within a field")
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
