# SPDX-License-Identifier: Apache-2.0
"""Build etcd transactions in the gateway's JSON, and read the answers.

``client.transaction(txn([absent("/a")], [put("/a", b"1")]))``. Keys are text, values are bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Part = dict[str, Any]

#: The most bytes of a request that etcd accepts unless it was started with --max-request-bytes.
REQUEST_LIMIT = 1_572_864


class LeaseId(Protocol):
    """A lease, as a transaction needs it: by etcd's number of it."""

    id: int


@dataclass(frozen=True)
class KeyValue:
    """A key with its value and revisions. For a deleted key only ``key`` and ``mod_revision`` are set.

    Bytes of a key that are not UTF-8 are escaped as by Python's ``surrogateescape``.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    #: Id of its lease; 0 if it has none.
    lease: int = 0

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> KeyValue:
        """Read it from the gateway's JSON."""
        return cls(
            decode(item["key"]).decode(errors="surrogateescape"),
            decode(item.get("value", "")),
            *(number(item, name) for name in ("create_revision", "mod_revision", "version", "lease")),
        )


@dataclass(frozen=True)
class RangeResult:
    """The result of reading a range of keys."""

    count: int
    items: tuple[KeyValue, ...]

    @property
    def first(self) -> KeyValue | None:
        """The first key; None if the range is empty."""
        return self.items[0] if self.items else None


@dataclass(frozen=True)
class KeyPage:
    """Some of the keys of a range, sorted by key.

    :param more: whether the range has keys after these.
    :param revision: revision of the etcd when it was read.
    """

    items: tuple[KeyValue, ...]
    more: bool
    revision: int


@dataclass(frozen=True)
class TransactionResult:
    """The result of a transaction."""

    succeeded: bool
    #: Revision of the etcd after the transaction.
    revision: int
    answers: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any], revision: int | None = None) -> TransactionResult:
        """Read it from the gateway's JSON."""
        if revision is None:
            revision = int(answer["header"]["revision"])
        return cls(bool(answer.get("succeeded", False)), revision, tuple(answer.get("responses", ())))

    def inner(self, place: int) -> TransactionResult:
        """Return the result of the nested transaction at index ``place``."""
        return TransactionResult.of(self.answers[place]["response_txn"], self.revision)

    def range_result(self, place: int) -> RangeResult:
        """Return the result of the range at index ``place``."""
        answer = self.answers[place]["response_range"]
        return RangeResult(int(answer.get("count", 0)), tuple(KeyValue.of(item) for item in answer.get("kvs", ())))

    def deleted(self, place: int) -> int:
        """Return the number of keys that the deletion at index ``place`` removed."""
        return int(self.answers[place]["response_delete_range"].get("deleted", 0))


def txn(compare: Sequence[Part], success: Sequence[Part], failure: Sequence[Part] = ()) -> Part:
    """Build a transaction that runs ``success`` if every comparison holds, else ``failure``."""
    return {"compare": list(compare), "success": list(success), "failure": list(failure)}


def nested(transaction: Part) -> Part:
    """Make a transaction an operation of another transaction."""
    return {"request_txn": transaction}


def absent(key: str) -> Part:
    """Compare: the key does not exist."""
    return _compare(key, "CREATE", "EQUAL", create_revision=0)


def present(key: str) -> Part:
    """Compare: the key exists."""
    return _compare(key, "CREATE", "GREATER", create_revision=0)


def empty(prefix: str) -> Part:
    """Compare: no key starts with ``prefix``."""
    return {**absent(prefix), **key_range(prefix)}


def unchanged(item: KeyValue) -> Part:
    """Compare: the key was not written since ``item`` was read."""
    return _compare(item.key, "MOD", "EQUAL", mod_revision=item.mod_revision)


def none_changed_after(prefix: str, revision: int) -> Part:
    """Compare: no key that starts with ``prefix`` was written after ``revision``."""
    return {**_compare(prefix, "MOD", "LESS", mod_revision=revision + 1), **key_range(prefix)}


def none_leased(prefix: str) -> Part:
    """Compare: no key that starts with ``prefix`` has a lease."""
    return {**_compare(prefix, "LEASE", "EQUAL", lease=0), **key_range(prefix)}


def put(key: str, value: bytes, lease: LeaseId | None = None) -> Part:
    """Store a value. With a lease, etcd deletes the key when the lease ends."""
    return {"request_put": put_payload(key, value, lease)}


def get(key: str, *, after: int = 0) -> Part:
    """Read one key.

    :param after: a revision: find the key only if it was written later.
    """
    return {"request_range": {"key": encode(key), **({"min_mod_revision": after + 1} if after else {})}}


def get_prefix(
    prefix: str, *, count_only: bool = False, keys_only: bool = False, limit: int = 0, by_creation: bool = False
) -> Part:
    """Read every key that starts with ``prefix``, sorted by key or by creation."""
    options: Part = {"count_only": count_only, "keys_only": keys_only, "limit": limit}
    if by_creation:
        options |= {"sort_order": "ASCEND", "sort_target": "CREATE"}
    return {"request_range": {**key_range(prefix), **options}}


def delete(key: str) -> Part:
    """Delete one key."""
    return {"request_delete_range": {"key": encode(key)}}


def delete_prefix(prefix: str) -> Part:
    """Delete every key that starts with ``prefix``."""
    return {"request_delete_range": key_range(prefix)}


def put_payload(key: str, value: bytes, lease: LeaseId | None) -> Part:
    """Return a put in the gateway's JSON form."""
    payload: Part = {"key": encode(key), "value": encode(value)}
    return {**payload, "lease": lease.id} if lease else payload


def key_range(prefix: str) -> dict[str, str]:
    """Return the half-open range of keys that start with ``prefix``; all keys if it is empty."""
    data = prefix.encode(errors="surrogateescape")
    while data and data[-1] == 0xFF:
        data = data[:-1]
    end = data[:-1] + bytes([data[-1] + 1]) if data else b"\0"
    return {"key": encode(prefix or b"\0"), "range_end": encode(end)}


def encode(text: str | bytes) -> str:
    """Encode a key or a value in base64, as the gateway expects it."""
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    """Decode a key or a value from the gateway's base64."""
    return base64.b64decode(text)


def number(item: Mapping[str, Any], name: str, default: int | None = 0) -> int:
    """Read a number from the gateway's JSON, which writes large numbers as text and leaves out 0.

    :param default: result if the field is missing; None if the field is required.
    :raises ValueError: if the field is not a number.
    :raises KeyError, TypeError: if ``item`` has another form.
    """
    value = item[name] if default is None else item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} is not a number")
    return int(value)


def items(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Read a list of objects; the gateway leaves out an empty list. :raises ValueError: if it is anything else."""
    value = answer.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is not a list of objects")
    return value


#: For each operation of a transaction: its field in the request and in the answer.
_ANSWERED_BY = {
    "request_put": "response_put",
    "request_range": "response_range",
    "request_delete_range": "response_delete_range",
    "request_txn": "response_txn",
}


def changes_nothing_twice(payload: Mapping[str, Any]) -> bool:
    """Whether a transaction only reads and deletes, without a condition, so that repeating it is harmless."""
    return not payload.get("compare") and all(
        "request_range" in part or "request_delete_range" in part for part in payload.get("success", ())
    )


def checked(payload: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Check that ``answer`` fits the transaction ``payload``, so that :class:`TransactionResult` can read it.

    :raises ValueError, KeyError, TypeError, AttributeError: if an etcd would not send this answer.
    """
    number(answer["header"], "revision", None)
    _check_answers(payload, answer)
    return dict(answer)


def _check_answers(payload: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    succeeded = answer.get("succeeded", False)
    if not isinstance(succeeded, bool):
        raise ValueError("succeeded is neither true nor false")
    if not succeeded and not payload.get("compare"):
        raise ValueError("a transaction without a condition did not succeed")
    parts = payload.get("success" if succeeded else "failure", ())
    for part, response in zip(parts, items(answer, "responses"), strict=True):
        kind = next(iter(part))
        inner = response[_ANSWERED_BY[kind]]
        if kind == "request_txn":
            _check_answers(part[kind], inner)
        elif kind == "request_range":
            number(inner, "count")
            for item in items(inner, "kvs"):
                KeyValue.of(item)
        else:
            number(inner, "deleted")


def _compare(key: str, target: str, result: str, **value: int) -> Part:
    return {"key": encode(key), "target": target, "result": result, **value}
