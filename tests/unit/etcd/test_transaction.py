# SPDX-License-Identifier: Apache-2.0
"""The conditions of a transaction, in the JSON form of etcd's gateway."""

from __future__ import annotations

from base64 import b64encode

import pytest

from pytest_nixl.etcd.client import _count
from pytest_nixl.etcd.transaction import (
    KeyValue,
    Part,
    absent,
    empty,
    items,
    none_changed_after,
    none_leased,
    number,
    present,
    unchanged,
)


def code(text: str) -> str:
    return b64encode(text.encode()).decode()


ALL = {"range_end": code("/p0")}


@pytest.mark.parametrize(
    ("condition", "compared", "rest"),
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
    condition: Part, compared: tuple[str, str], rest: dict[str, object]
) -> None:
    target, result = compared
    assert condition == {"key": code("/p/"), "target": target, "result": result, **rest}


def test_a_count_is_believed_only_with_the_revision_of_an_etcd() -> None:
    assert _count({"header": {"revision": "9"}, "count": "3"}, "count") == 3
    assert _count({"header": {"revision": "9"}}, "count") == 0
    with pytest.raises(KeyError):
        _count({"count": "3"}, "count")
    with pytest.raises(KeyError):
        _count({"header": {}, "count": "3"}, "count")


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
