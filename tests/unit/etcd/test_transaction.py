# SPDX-License-Identifier: Apache-2.0
"""The ranges of a transaction, and which answers to it are read, in the JSON form of etcd's gateway."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import pytest

from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    RangeResult,
    TransactionResult,
    absent,
    changes_nothing_twice,
    checked,
    delete,
    get,
    get_prefix,
    key_range,
    nested,
    none_leased,
    present,
    put,
    txn,
)


def code(text: str) -> str:
    return b64encode(text.encode()).decode()


def test_a_prefix_is_compared_and_read_with_these_options() -> None:
    prefix = {"key": code("/p/"), "range_end": code("/p0")}
    assert none_leased("/p/") == {**prefix, "target": "LEASE", "result": "EQUAL", "lease": 0}
    assert get_prefix("/p/", count_only=True, keys_only=True, limit=3, by_creation=True)["request_range"] == {
        **prefix, "count_only": True, "keys_only": True, "limit": 3, "sort_order": "ASCEND", "sort_target": "CREATE"
    }  # fmt: skip
    assert get("/p/", after=7) == {"request_range": {"key": code("/p/"), "min_mod_revision": 8}}


@pytest.mark.parametrize(
    ("prefix", "start", "end"),
    [
        ("/p/", b"/p/", b"/p0"),
        ("ab", b"ab", b"ac"),
        ("a\udcff", b"a\xff", b"b"),
        ("\udcff\udcff", b"\xff\xff", b"\0"),
        ("", b"\0", b"\0"),
    ],
)
def test_a_range_has_every_key_with_its_prefix(prefix: str, start: bytes, end: bytes) -> None:
    range_end = key_range(prefix)
    assert [b64decode(range_end[name]) for name in ("key", "range_end")] == [start, end]


def test_a_key_is_read_with_its_numbers_and_a_deleted_one_without() -> None:
    item = {"key": code("k"), "value": code("v"), "create_revision": "3", "mod_revision": "4", "version": 5, "lease": 6}
    assert KeyValue.of(item) == KeyValue("k", b"v", 3, 4, 5, 6)
    assert KeyValue.of({"key": code("k"), "mod_revision": "4"}) == KeyValue("k", b"", 0, 4, 0, 0)


HEADER = {"header": {"revision": "9"}}
#: A transaction with one operation of each kind, and what an etcd answers.
EVERY_OPERATION = txn(
    [present("/a")], [put("/a", b""), get("/a"), delete("/a"), nested(txn([], [get("/b")]))], [get("/c")]
)
ANSWERED: list[dict[str, Any]] = [
    {"response_put": {}},
    {"response_range": {"count": "2", "kvs": [{"key": code("/a")}, {"key": code("/b")}]}},
    {"response_delete_range": {"deleted": "1"}},
    {"response_txn": {"succeeded": True, "responses": [{"response_range": {}}]}},
]


def test_an_answer_is_read_by_the_places_of_its_operations() -> None:
    read = TransactionResult.of(checked(EVERY_OPERATION, {**HEADER, "succeeded": True, "responses": ANSWERED}))
    assert (read.range_result(1).count, read.range_result(1).first) == (2, KeyValue("/a", b"", 0, 0, 0))
    inner = read.inner(3)
    assert (read.succeeded, read.revision, read.deleted(2)) == (inner.succeeded, inner.revision, 1) == (True, 9, 1)
    failed = TransactionResult.of(checked(EVERY_OPERATION, {**HEADER, "responses": [{"response_range": {}}]}))
    assert (failed.succeeded, failed.range_result(0)) == (False, RangeResult(0, ()))


NO_NUMBERS: list[object] = ["many", True, 1.5, []]
NO_PAIRS: list[object] = [{}, [3], [{}]]


def answered(place: int, answer: dict[str, Any]) -> dict[str, Any]:
    """Replace one of the answers."""
    return {"responses": [*ANSWERED[:place], answer, *ANSWERED[place + 1 :]]}


@pytest.mark.parametrize(
    "answer",
    [
        {"header": {}},
        {"header": {"revision": "x"}},
        {"succeeded": 1},
        {"succeeded": False},
        {"responses": []},
        answered(0, {"response_range": {}}),
        *(answered(1, {"response_range": {"count": count}}) for count in NO_NUMBERS),
        *(answered(1, {"response_range": {"kvs": pairs}}) for pairs in NO_PAIRS),
        answered(1, {"response_range": {"kvs": [{"key": code("/a"), "version": "x"}]}}),
        answered(2, {"response_delete_range": {"deleted": None}}),
        answered(3, {"response_txn": {"responses": [{"response_range": {}}]}}),  # without a condition, it succeeds
        answered(3, {"response_txn": {"succeeded": True, "responses": []}}),
        answered(3, {"response_txn": {"succeeded": True, "responses": [{"response_range": {"count": []}}]}}),
    ],
)
def test_an_answer_that_no_etcd_sends_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        checked(EVERY_OPERATION, {**HEADER, "succeeded": True, "responses": ANSWERED, **answer})


@pytest.mark.parametrize(
    ("transaction", "harmless"),
    [
        (txn([], [get("/a"), delete("/a")]), True),
        (txn([], []), True),
        (txn([], [get("/a"), put("/a", b"")]), False),
        (txn([absent("/a")], [get("/a")]), False),
    ],
)
def test_only_reading_and_deleting_without_a_condition_may_be_repeated(transaction: Part, harmless: bool) -> None:
    assert changes_nothing_twice(transaction) is harmless
