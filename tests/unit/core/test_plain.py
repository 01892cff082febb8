# SPDX-License-Identifier: Apache-2.0
"""Plain data becomes objects by the types of their fields, and nothing is converted in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest

from pytest_nixl.core.plain import from_plain, to_plain, written_as_text
from pytest_nixl.core.strict import TEXTS


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    name: str
    size: float


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[int, str]
    colour: Colour
    more: Mapping[str, Part | None] = field(default_factory=dict)
    any: Any = None
    on: bool = False


WHOLE = Whole((Part("a", 1.5),), (3, "b"), Colour.RED, {"c": None, "d": Part("e", 2.0)}, [1, {"x": None}], True)
PLAIN = {
    "parts": [{"name": "a", "size": 1.5}],
    "pair": [3, "b"],
    "colour": "red",
    "more": {"c": None, "d": {"name": "e", "size": 2.0}},
    "any": [1, {"x": None}],
    "on": True,
}


def test_an_object_becomes_plain_data_and_is_restored() -> None:
    assert to_plain(WHOLE) == PLAIN
    assert from_plain(Whole, PLAIN) == from_plain(Whole, PLAIN, exact=True) == WHOLE
    assert to_plain(Part("a", float("nan"))) == {"name": "a", "size": None}


def test_an_object_that_is_written_as_text_is_read_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_nixl.core.plain.TEXTS", texts := dict(TEXTS))
    monkeypatch.setattr("pytest_nixl.core.strict.TEXTS", texts)
    written_as_text(Fraction, Fraction)
    assert to_plain({"half": [Fraction(1, 2)]}) == {"half": ["1/2"]}
    assert from_plain(list[Fraction], ["1/2", "3"]) == [Fraction(1, 2), Fraction(3)]


def test_a_whole_number_is_a_float_and_a_field_with_a_default_may_be_missing() -> None:
    few = {"parts": [{"name": "a", "size": 2}], "pair": [3, "b"], "colour": "red"}
    record = from_plain(Whole, few)
    assert record == Whole((Part("a", 2.0),), (3, "b"), Colour.RED)
    assert type(record.parts[0].size) is float
    with pytest.raises(ValueError, match=r"^Whole has no field 'more'$"):
        from_plain(Whole, few, exact=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parts": [{"name": "a", "size": True}]}, "Whole.parts[0].size is True: expected float"),
        ({"parts": [{"name": "a", "size": -(10**400)}]}, "Whole.parts[0].size is -10000"),
        ({"parts": [{"name": "a", "size": 1}, {"name": "b"}]}, "Whole.parts[1] has no field 'size'"),
        ({"parts": [{"name": "a", "size": 1, "new": 1}]}, "Whole.parts[0] has an unknown field 'new'"),
        ({"pair": [1, "b", 2]}, "Whole.pair is a list of 3: expected a list of 2"),
        ({"pair": [True, "b"]}, "Whole.pair[0] is True: expected int"),
        ({"more": []}, "Whole.more is a list of 0: expected an object"),
        ({"colour": "blue"}, "'blue' is not a valid Colour"),
    ],
)
def test_a_value_of_another_form_is_refused_by_its_path(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_plain(Whole, {**PLAIN, **changed})
    assert type(caught.value) is ValueError  # readers of records name the type
    assert str(caught.value).startswith(reason)
