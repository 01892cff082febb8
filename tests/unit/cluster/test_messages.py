# SPDX-License-Identifier: Apache-2.0
"""What ranks accept of each other: each field of each message up to its limit, and nothing beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_nixl.cluster.messages import (
    PeerAnswer,
    PeerLeft,
    PeerRequest,
    WorkerEnded,
    WorkerLine,
    check_answer,
    check_ask,
    read_message,
)
from pytest_nixl.core.strict import StrictError

NUMBER, LINE = 1 << 53, 1 << 20
#: The values of a field that are accepted, and those that are refused.
Values = tuple[list[Any], list[Any]]
Plain = dict[str, Any]
NUMBERS: Values = ([0, NUMBER], [-1, NUMBER + 1, 1.5, "0", None])
CODES: Values = ([None, -128, 0, 255], [-129, 256, 0.5, "0"])


def text(most: int, *refused: object) -> Values:
    """Return the values of a text of this many characters at most."""
    return ["", "x" * most], ["x" * (most + 1), 1, None, *refused]


def only(accepted: list[Any], *refused: object) -> Values:
    return accepted, list(refused)


def check_fields(
    check: Callable[[Plain], object],
    usual: Plain,
    fields: Mapping[str, Values],
    *,
    optional: str = "",
    more: bool = False,
) -> None:
    """Check that a form has these fields, each with its limits, none of which may be missing, and no others.

    :param optional: a field that may be missing.
    :param more: whether it may have others.
    """
    for name, (accepted, refused) in fields.items():
        for value in accepted:
            check({**usual, name: value})
        missing = {other: value for other, value in usual.items() if other != name}
        for plain in [*({**usual, name: value} for value in refused), *([missing] if name != optional else [])]:
            with pytest.raises(StrictError):
                check(plain)
    if not more:
        with pytest.raises(StrictError):
            check({**usual, "more": 1})


ASK = ["a" * 64, "a_1"], ["a" * 65, "Start", "", "1a", None]


@pytest.mark.parametrize(
    ("message", "plain", "fields"),
    [
        (PeerRequest("start", 1, {"role": "agent"}), {"ask": "start", "number": 1, "role": "agent"},
         {"ask": ASK, "number": NUMBERS}),
        (WorkerLine(1, "x"), {"worker": 1, "line": "x"}, {"worker": NUMBERS, "line": text(LINE)}),
        (PeerAnswer(3, [None, {"a": 1}]), {"answer": 3, "result": [None, {"a": 1}]},
         {"answer": NUMBERS, "result": only([None, "x", {}])}),
        (PeerAnswer(3, None, "no", "do it"), {"answer": 3, "error": "no", "remedy": "do it"},
         {"answer": NUMBERS, "error": only([""], None, 1), "remedy": only([""], None, 1)}),
        (WorkerEnded(1, -9), {"worker": 1, "ended": -9}, {"worker": NUMBERS, "ended": CODES}),
        (PeerLeft("x"), {"left": "x"}, {"left": text(256)}),
    ],
)  # fmt: skip
def test_a_message_is_read_up_to_its_limits(message: object, plain: Plain, fields: Mapping[str, Values]) -> None:
    assert read_message(plain) == message
    check_fields(read_message, plain, fields, optional="remedy", more="ask" in plain)


def test_an_error_needs_no_remedy_and_has_no_result_and_other_values_are_no_messages() -> None:
    assert read_message({"answer": 3, "error": "no"}) == PeerAnswer(3, None, "no", "")
    strange: list[Any] = [None, [], "ask", 1, {}, {"answer": 1, "error": "x", "result": 1}]
    for plain in strange:
        with pytest.raises(StrictError):
            read_message(plain)


FIGURE: Plain = {
    "check": "c", "name": "n", "labels": {"a": "b"}, "value": 1.5, "unit": "s", "at_most": None, "at_least": 0.5,
    "verdict": "PASS",
}  # fmt: skip
FAILING = {"check": "c", "row": "r", "verdict": "FAIL", "reason": "x", "remedy": "y"}
FULL: Plain = {
    "verdict": "PASS", "gate": True, "warnings": 1, "interrupted": "", "checks": {"PASS": 3}, "rows": 2, "failing": [],
    "known_limits": [], "failing_left_out": 0, "figures": [FIGURE],
}  # fmt: skip
END: Plain = {"code": 0, "verdict": "PASS", "refusal": "", "verdict_fields": {}}
SIZE = only([1, 1_000_000], 0, 1_000_001, 1.5)


@pytest.mark.parametrize(
    ("request_name", "usual", "fields", "answers"),
    [
        ("start", {"worker": 0, "role": "agent", "environment": {"A": None}}, {
            "worker": NUMBERS, "role": ASK,
            "environment": only([{}, {"A": "x" * (1 << 15)}], {"A": 1}, {"A": "x" * ((1 << 15) + 1)}, ["A"]),
        }, only([0, 1 << 32], -1, (1 << 32) + 1, None, "1")),
        ("kill", {"worker": 0}, {"worker": NUMBERS}, CODES),
        ("state", {"worker": 0}, {"worker": NUMBERS}, text(255)),
        ("output", {"worker": 0}, {"worker": NUMBERS}, text(LINE)),
        ("signal", {"worker": 0, "signal": 9}, {"worker": NUMBERS, "signal": only([1, 64], 0, 65, 1.5, None)},
         only([None], 0, False)),
        ("end", END, {
            "code": only([0, 255], -1, 256, 0.5, None), "verdict": only([""], None), "refusal": only([""], None),
            "verdict_fields": only([FULL], None, {"verdict": "PASS"}),
        }, only([None], 0)),
        ("command", {}, {}, text(LINE)),
        ("address", {}, {}, only(["10.0.0.1", "fe80::1%eth_0-1", "h" * 255], "", "a b", "h" * 256, None, "a/b")),
        ("facts", {"peers": []}, {"peers": only([["x" * 255]], ["x" * 256], {"a": "b"}, None)},
         only([{}, {"a": [1]}], [], None)),
        ("devices", {}, {}, only([{}, {"a": [1]}], [], None)),
        ("claim", {"group": "g", "size": 2, "seconds": 0.5},
         {"group": text(128), "size": SIZE, "seconds": only([0, 86_400], -1, 86_401, None)}, NUMBERS),
        ("last_words", {}, {}, only([{}, {"w": "x"}], {"w": 1}, ["x"])),
    ],
)  # fmt: skip
def test_the_arguments_and_the_answer_of_a_request_have_limits(
    request_name: str, usual: Plain, fields: Mapping[str, Values], answers: Values
) -> None:
    check_fields(lambda plain: check_ask(request_name, plain), usual, fields)
    for answer in answers[0]:
        check_answer(request_name, answer)
    for answer in answers[1]:
        with pytest.raises(StrictError):
            check_answer(request_name, answer)


def test_the_verdict_that_a_peer_gets_has_limits() -> None:
    def check(verdict: Plain) -> None:
        check_ask("end", {**END, "verdict_fields": verdict})

    check_fields(check, FULL, {
        "verdict": text(16), "gate": only([False], 1, None), "warnings": NUMBERS, "interrupted": only(["x"], None),
        "checks": only([{}, {"PASS": 0}], {"PASS": "3"}, [3]), "rows": NUMBERS, "failing_left_out": NUMBERS,
        "failing": only([[FAILING] * 1024], [FAILING] * 1025, [{**FAILING, "row": None}], [{"check": "c"}]),
        "known_limits": only([["x" * 256] * 1024], ["x"] * 1025, ["x" * 257]),
        "figures": only([[], [FIGURE] * 1000], [FIGURE] * 1001),
    })  # fmt: skip
    check_fields(lambda figure: check({**FULL, "figures": [figure]}), FIGURE, {
        "check": text(256), "name": text(256), "labels": only([{}, {"a": "b" * 256}], ["b"], {"a": "b" * 257}),
        "value": only([1e300, -1e300], 1e301, None), "unit": text(64), "at_most": only([None, -1e300], "1"),
        "at_least": only([None, 1e300], "1"), "verdict": text(16),
    })  # fmt: skip
