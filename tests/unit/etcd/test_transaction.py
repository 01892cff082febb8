# SPDX-License-Identifier: Apache-2.0
"""The conditions of a transaction, in the JSON form of etcd's gateway."""

from __future__ import annotations

from base64 import b64decode, b64encode
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    TransactionResult,
    absent,
    changes_nothing_twice,
    checked,
    delete,
    delete_prefix,
    empty,
    get,
    get_prefix,
    items,
    key_range,
    nested,
    none_changed_after,
    none_leased,
    number,
    present,
    put,
    txn,
    unchanged,
)


def code(text: str) -> str:
    return b64encode(text.encode()).decode()


ALL = {"range_end": code("/p0")}


@pytest.mark.parametrize(
    ("condition", "compared", "operand"),
    [
        (absent("/p/"), ("CREATE", "EQUAL"), {"create_revision": 0}),
        (present("/p/"), ("CREATE", "GREATER"), {"create_revision": 0}),
        (empty("/p/"), ("CREATE", "EQUAL"), {"create_revision": 0, **ALL}),
        (unchanged(KeyValue("/p/", b"", 5, 7, 2)), ("MOD", "EQUAL"), {"mod_revision": 7}),
        (none_changed_after("/p/", 7), ("MOD", "LESS"), {"mod_revision": 8, **ALL}),
        (none_leased("/p/"), ("LEASE", "EQUAL"), {"lease": 0, **ALL}),
    ],
)
def test_each_condition_compares_the_field_that_it_names(
    condition: Part, compared: tuple[str, str], operand: dict[str, object]
) -> None:
    target, result = compared
    assert condition == {"key": code("/p/"), "target": target, "result": result, **operand}


def test_a_number_is_written_as_text_or_left_out_by_the_gateway() -> None:
    assert [number({"a": "12345678901234567890"}, "a"), number({"a": 3}, "a")] == [12345678901234567890, 3]
    assert [number({}, "a"), number({}, "a", 7)] == [0, 7]
    with pytest.raises(KeyError):
        number({}, "a", None)
    strange: list[object] = [True, False, 1.5, None, [], {}]
    for wrong in strange:
        with pytest.raises(ValueError, match=r"^a is not a number$"):
            number({"a": wrong}, "a")


def test_a_list_of_the_gateway_has_objects_only() -> None:
    assert [items({}, "a"), items({"a": [{"b": 1}, {}]}, "a")] == [[], [{"b": 1}, {}]]
    strange: list[object] = [None, {}, "x", [1], [{}, 1]]
    for wrong in strange:
        with pytest.raises(ValueError, match=r"^a is not a list of objects$"):
            items({"a": wrong}, "a")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (put("/p/", b"v"), {"request_put": {"key": code("/p/"), "value": code("v")}}),
        (
            put("/p/", b"v", SimpleNamespace(id=7)),
            {"request_put": {"key": code("/p/"), "value": code("v"), "lease": 7}},
        ),
        (get("/p/"), {"request_range": {"key": code("/p/")}}),
        (get("/p/", after=7), {"request_range": {"key": code("/p/"), "min_mod_revision": 8}}),
        (
            get_prefix("/p/"),
            {"request_range": {"key": code("/p/"), **ALL, "count_only": False, "keys_only": False, "limit": 0}},
        ),
        (
            get_prefix("/p/", count_only=True, keys_only=True, limit=3, by_creation=True),
            {
                "request_range": {
                    "key": code("/p/"), **ALL, "count_only": True, "keys_only": True, "limit": 3,
                    "sort_order": "ASCEND", "sort_target": "CREATE",
                }
            },
        ),
        (delete("/p/"), {"request_delete_range": {"key": code("/p/")}}),
        (delete_prefix("/p/"), {"request_delete_range": {"key": code("/p/"), **ALL}}),
        (nested(txn([], [])), {"request_txn": {"compare": [], "success": [], "failure": []}}),
    ],
)  # fmt: skip
def test_each_operation_has_the_form_of_the_gateway(operation: Part, expected: Part) -> None:
    assert operation == expected


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
    assert (read.succeeded, read.revision, len(read.answers)) == (True, 9, 4)
    second_range = read.range_result(1)
    assert (second_range.count, second_range.first) == (2, KeyValue("/a", b"", 0, 0, 0))
    assert read.deleted(2) == 1
    inner = read.inner(3)
    assert (inner.succeeded, inner.revision) == (True, 9)
    assert (inner.range_result(0).count, inner.range_result(0).first) == (0, None)
    none = TransactionResult.of({**HEADER, "responses": [{"response_delete_range": {}}, {"response_range": {}}]})
    assert (none.deleted(0), none.range_result(1).items) == (0, ())
    failed = TransactionResult.of(checked(EVERY_OPERATION, {**HEADER, "responses": [{"response_range": {"count": 1}}]}))
    assert (failed.succeeded, failed.range_result(0).count) == (False, 1)


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        (0, {"response_range": {}}),
        (1, {"response_range": {"count": "many"}}),
        (1, {"response_range": {"kvs": [3]}}),
        (1, {"response_range": {"kvs": [{"key": code("/a"), "version": "x"}]}}),
        (1, {"response_range": {"kvs": [{}]}}),
        (2, {"response_delete_range": {"deleted": None}}),
        (3, {"response_txn": {"responses": [{"response_range": {}}]}}),  # without a condition, it succeeds
        (3, {"response_txn": {"succeeded": True, "responses": []}}),
        (3, {"response_txn": {"succeeded": "yes", "responses": [{"response_range": {}}]}}),
        (3, {"response_txn": {"succeeded": True, "responses": [{"response_range": {"count": []}}]}}),
    ],
)
def test_an_answer_that_no_etcd_sends_is_refused(place: int, answer: dict[str, Any]) -> None:
    answers = [*ANSWERED[:place], answer, *ANSWERED[place + 1 :]]
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        checked(EVERY_OPERATION, {**HEADER, "succeeded": True, "responses": answers})


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"header": {}},
        {"header": {"revision": "x"}},
        {**HEADER, "succeeded": 1},
        {**HEADER, "succeeded": False},
        {**HEADER, "responses": []},
    ],
)
def test_an_answer_without_revision_success_or_results_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        checked(EVERY_OPERATION, {"succeeded": True, "responses": ANSWERED, **answer})


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
