# SPDX-License-Identifier: Apache-2.0
"""The parts of an etcd transaction in the gateway's JSON, and how answers and events are read.

``client.transaction(txn([absent("/a")], [put("/a", b"1")]))``. Keys are text, values are bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_nixl.etcd.client import Lease

Part = dict[str, Any]


@dataclass(frozen=True)
class KeyValue:
    """A key as etcd has it; of one that was deleted only ``key`` and ``mod_revision`` are there.

    A key that is no UTF-8, which none of ours is, has its bytes escaped as Python's ``surrogateescape`` does.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    #: etcd's number of the lease that it was put with; 0: none.
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
class FoundKey:
    """What a range of keys had."""

    count: int
    items: tuple[KeyValue, ...]

    @property
    def first(self) -> KeyValue | None:
        """The first one; None where there is none."""
        return self.items[0] if self.items else None


@dataclass(frozen=True)
class TransactionResult:
    """What a transaction came to."""

    succeeded: bool
    #: The etcd's revision after it.
    revision: int
    answers: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any], revision: int | None = None) -> TransactionResult:
        """Read it from the gateway's JSON."""
        if revision is None:
            revision = int(answer["header"]["revision"])
        return cls(bool(answer.get("succeeded", False)), revision, tuple(answer.get("responses", ())))

    def inner(self, place: int) -> TransactionResult:
        """Return what the nested transaction at ``place`` came to."""
        return TransactionResult.of(self.answers[place]["response_txn"], self.revision)

    def found(self, place: int) -> FoundKey:
        """Return what the range at ``place`` had."""
        answer = self.answers[place]["response_range"]
        return FoundKey(int(answer.get("count", 0)), tuple(KeyValue.of(item) for item in answer.get("kvs", ())))

    def deleted(self, place: int) -> int:
        """Return how many keys the deletion at ``place`` removed."""
        return int(self.answers[place]["response_delete_range"].get("deleted", 0))


def txn(compare: Sequence[Part], success: Sequence[Part], failure: Sequence[Part] = ()) -> Part:
    """A transaction: ``success`` where every comparison holds, else ``failure``."""
    return {"compare": list(compare), "success": list(success), "failure": list(failure)}


def nested(transaction: Part) -> Part:
    """A transaction as an operation of another one."""
    return {"request_txn": transaction}


def absent(key: str) -> Part:
    """Compare: the key is not there."""
    return _compare(key, "CREATE", "EQUAL", create_revision=0)


def present(key: str) -> Part:
    """Compare: the key is there."""
    return _compare(key, "CREATE", "GREATER", create_revision=0)


def empty(prefix: str) -> Part:
    """Compare: no key starts with ``prefix``."""
    return {**absent(prefix), **key_range(prefix)}


def at_version(key: str, version: int) -> Part:
    """Compare: the key was written ``version`` times since it was created; 0 where it is not there."""
    return _compare(key, "VERSION", "EQUAL", version=version)


def unchanged(item: KeyValue) -> Part:
    """Compare: the key was not written since ``item`` was read."""
    return _compare(item.key, "MOD", "EQUAL", mod_revision=item.mod_revision)


def put(key: str, value: bytes, lease: Lease | None = None) -> Part:
    """Store a value; with a lease the key goes when that ends."""
    return {"request_put": put_payload(key, value, lease)}


def get(key: str) -> Part:
    """Read one key."""
    return {"request_range": {"key": encode(key)}}


def get_prefix(
    prefix: str, *, count_only: bool = False, keys_only: bool = False, limit: int = 0, by_creation: bool = False
) -> Part:
    """Read every key that starts with ``prefix``, in the order of the keys or of their creation."""
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


def put_payload(key: str, value: bytes, lease: Lease | None) -> Part:
    """A put as the gateway takes it."""
    payload: Part = {"key": encode(key), "value": encode(value)}
    return {**payload, "lease": lease.id} if lease else payload


def key_range(prefix: str) -> dict[str, str]:
    """The half-open range of keys that start with ``prefix``; of all keys where that is empty."""
    data = prefix.encode(errors="surrogateescape")
    while data and data[-1] == 0xFF:
        data = data[:-1]
    end = data[:-1] + bytes([data[-1] + 1]) if data else b"\0"
    return {"key": encode(prefix or b"\0"), "range_end": encode(end)}


def encode(text: str | bytes) -> str:
    """Write a key or a value as the gateway takes it."""
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    """Read a key or a value as the gateway gives it."""
    return base64.b64decode(text)


def number(item: Mapping[str, Any], name: str, default: int | None = 0) -> int:
    """Read a number of the gateway's, which writes large ones as text and leaves out 0.

    :param default: what one has that is left out; None: it must be there.
    :raises ValueError: where it is none; KeyError or TypeError where ``item`` has another form.
    """
    value = item[name] if default is None else item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} is no number")
    return int(value)


def items(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Read a list of the gateway's, which leaves out an empty one. :raises ValueError: where it is none."""
    value = answer.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is no list of objects")
    return value


#: The operations of a transaction: what asks, and what answers.
_ANSWERED_BY = {
    "request_put": "response_put",
    "request_range": "response_range",
    "request_delete_range": "response_delete_range",
    "request_txn": "response_txn",
}


def changes_nothing_twice(payload: Mapping[str, Any]) -> bool:
    """Whether a transaction only reads and deletes, without a condition: to do it twice is as good as once."""
    return not payload.get("compare") and all(
        "request_range" in part or "request_delete_range" in part for part in payload.get("success", ())
    )


def checked(payload: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a transaction, of which :class:`TransactionResult` can then read all.

    :raises ValueError: where it is not what an etcd answers to it; KeyError, TypeError or AttributeError too.
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
    for part, one in zip(parts, items(answer, "responses"), strict=True):
        kind = next(iter(part))
        inner = one[_ANSWERED_BY[kind]]
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
