# SPDX-License-Identifier: Apache-2.0
"""What ranks accept of each other: each field of each message up to its limit, and nothing beyond it."""

from __future__ import annotations

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
FIGURE = {
    "check": "c",
    "name": "n",
    "labels": {"a": "b"},
    "value": 1.5,
    "unit": "s",
    "at_most": None,
    "at_least": 0.5,
    "verdict": "PASS",
}
FULL = {
    "verdict": "PASS",
    "gate": True,
    "warnings": 1,
    "interrupted": "",
    "checks": {"PASS": 3},
    "rows": 2,
    "failing": [],
    "known_limits": [],
    "failing_left_out": 0,
    "figures": [FIGURE],
}
FAILING = {"check": "c", "row": "r", "verdict": "FAIL", "reason": "x", "remedy": "y"}
END = {"code": 0, "verdict": "PASS", "refusal": "", "verdict_fields": {}}
START = {"worker": 0, "role": "agent", "environment": {"A": None, "B": "x" * (1 << 15)}}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"ask": "start", "number": 0, "role": "agent"}, PeerRequest("start", 0, {"role": "agent"})),
        ({"ask": "a" * 64, "number": NUMBER}, PeerRequest("a" * 64, NUMBER, {})),
        ({"worker": NUMBER, "line": "x" * LINE}, WorkerLine(NUMBER, "x" * LINE)),
        ({"answer": NUMBER, "result": [None, {"a": 1}]}, PeerAnswer(NUMBER, [None, {"a": 1}])),
        ({"answer": 3, "error": "no"}, PeerAnswer(3, None, "no", "")),
        ({"answer": 3, "error": "no", "remedy": "do it"}, PeerAnswer(3, None, "no", "do it")),
        ({"worker": 1, "ended": None}, WorkerEnded(1, None)),
        ({"worker": 1, "ended": -128}, WorkerEnded(1, -128)),
        ({"worker": 1, "ended": 255}, WorkerEnded(1, 255)),
        ({"left": "x" * 256}, PeerLeft("x" * 256)),
    ],
)
def test_a_message_is_read_up_to_its_limits(plain: Any, message: object) -> None:
    assert read_message(plain) == message


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        "ask",
        1,
        {},
        {"ask": "a" * 65, "number": 1},
        {"ask": "Start", "number": 1},
        {"ask": "", "number": 1},
        {"ask": "start"},
        {"ask": "start", "number": -1},
        {"ask": "start", "number": NUMBER + 1},
        {"ask": "start", "number": 1.5},
        {"ask": "1a", "number": 1},
        {"worker": 1, "line": "x" * (LINE + 1)},
        {"worker": -1, "line": ""},
        {"worker": 1.5, "line": ""},
        {"line": ""},
        {"worker": 1, "line": 2},
        {"worker": 1, "line": "", "more": 1},
        {"answer": -1, "result": 1},
        {"answer": 1.5, "result": 1},
        {"answer": 1},
        {"answer": 1, "result": 1, "more": 2},
        {"answer": 1, "error": None},
        {"answer": 1, "error": "x", "remedy": 1},
        {"answer": 1, "error": "x", "result": 1},
        {"worker": 1, "ended": -129},
        {"worker": 1, "ended": 256},
        {"worker": 1, "ended": 1.5},
        {"worker": 1, "ended": "1"},
        {"left": "x" * 257},
        {"left": None},
        {"left": "x", "more": 1},
    ],
)
def test_a_message_beyond_its_limits_is_refused(plain: Any) -> None:
    with pytest.raises(StrictError):
        read_message(plain)


@pytest.mark.parametrize(
    ("command", "accepted", "refused"),
    [
        (
            "start",
            [{}, {"worker": NUMBER}, {"environment": {}}, {"role": "a_1"}],
            [
                {"worker": -1},
                {"worker": NUMBER + 1},
                {"role": "Agent"},
                {"environment": {"A": 1}},
                {"environment": {"A": "x" * ((1 << 15) + 1)}},
                {"environment": ["A"]},
                {"more": 1},
            ],
        ),
        ("kill", [{"worker": 0}], [{"worker": "0"}, {"worker": -1}, {}]),
        ("state", [{"worker": 0}], [{"worker": 0.5}, {}]),
        ("output", [{"worker": 0}], [{"worker": None}, {}]),
        (
            "signal",
            [{"worker": 0, "signal": 1}, {"worker": 0, "signal": 64}],
            [{"worker": 0, "signal": 0}, {"worker": 0, "signal": 65}, {"worker": 0, "signal": 1.5}, {"signal": 9}],
        ),
        (
            "end",
            [
                {},
                {"code": 255},
                {"verdict_fields": FULL},
                {"verdict_fields": {**FULL, "failing": [FAILING] * 1024}},
                {"verdict_fields": {**FULL, "known_limits": ["x" * 256] * 1024}},
                {"verdict_fields": {**FULL, "figures": [FIGURE] * 1000}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "value": 1e300, "at_most": -1e300}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "check": "x" * 256, "unit": "u" * 64}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "verdict": "v" * 16, "name": "n" * 256}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "labels": {"a": "b" * 256}}]}},
            ],
            [
                {"code": -1},
                {"code": 256},
                {"code": 0.5},
                {"verdict": None},
                {"verdict_fields": {**FULL, "verdict": "x" * 17}},
                {"verdict_fields": {**FULL, "failing": [FAILING] * 1025}},
                {"verdict_fields": {**FULL, "known_limits": ["x"] * 1025}},
                {"verdict_fields": {**FULL, "known_limits": ["x" * 257]}},
                {"verdict_fields": {**FULL, "figures": [FIGURE] * 1001}},
                {"verdict_fields": {**FULL, "gate": 1}},
                {"verdict_fields": {**FULL, "rows": -1}},
                {"verdict_fields": {**FULL, "checks": {"PASS": "3"}}},
                {"verdict_fields": {**FULL, "failing": [{**FAILING, "row": None}]}},
                {"verdict_fields": {**FULL, "checks": [3]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "labels": ["b"]}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "labels": {"a": "b" * 257}}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "check": "c" * 257}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "verdict": "v" * 17}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "at_least": "1"}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "value": 1e301}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "value": None}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "unit": "u" * 65}]}},
                {"verdict_fields": {**FULL, "figures": [{**FIGURE, "name": "x" * 257}]}},
                {"verdict_fields": {"verdict": "PASS"}},
            ],
        ),
        ("command", [{}], [{"more": 1}]),
        ("address", [{}], [{"more": 1}]),
        ("last_words", [{}], [{"more": 1}]),
        ("devices", [{}], [{"more": 1}]),
        ("facts", [{"peers": []}, {"peers": ["x" * 255]}], [{}, {"peers": ["x" * 256]}, {"peers": {"a": "b"}}]),
        (
            "claim",
            [
                {"group": "g" * 128, "size": 1, "seconds": 0},
                {"group": "", "size": 1_000_000, "seconds": 86_400},
                {"group": "g", "size": 2, "seconds": 0.5},
            ],
            [
                {"group": "g" * 129, "size": 1, "seconds": 0},
                {"group": "g", "size": 0, "seconds": 0},
                {"group": "g", "size": 1, "seconds": -1},
                {"group": "g", "size": 1, "seconds": 86_401},
            ],
        ),
    ],
)
def test_the_arguments_of_a_request_have_limits(
    command: str, accepted: list[dict[str, Any]], refused: list[dict[str, Any]]
) -> None:
    usual: dict[str, Any] = {"start": START, "end": END}.get(command, {})
    for arguments in accepted:
        check_ask(command, {**usual, **arguments})
    for arguments in refused:
        with pytest.raises(StrictError):
            check_ask(command, {**usual, **arguments})
    for name in usual:
        with pytest.raises(StrictError):
            check_ask(command, {other: value for other, value in usual.items() if other != name})


@pytest.mark.parametrize(
    ("command", "accepted", "refused"),
    [
        ("start", [0, 1 << 32], [-1, (1 << 32) + 1, None, "1"]),
        ("kill", [None, -128, 0, 255], [-129, 256, 0.5, "0"]),
        ("state", ["", "x" * 255], ["x" * 256, None]),
        ("output", ["x" * LINE], ["x" * (LINE + 1), None]),
        ("signal", [None], [0, False]),
        ("end", [None], [0]),
        ("command", ["x" * LINE], ["x" * (LINE + 1), 1]),
        ("address", ["10.0.0.1", "fe80::1%eth_0-1", "h" * 255], ["", "a b", "h" * 256, None, "a/b"]),
        ("facts", [{}, {"a": [1]}], [[], None]),
        ("devices", [{}, {"a": [1]}], [[], None]),
        ("claim", [0, NUMBER], [-1, NUMBER + 1, 0.5, None]),
        ("last_words", [{}, {"w": "x"}], [{"w": 1}, ["x"]]),
    ],
)
def test_the_answer_to_a_request_has_limits(command: str, accepted: list[Any], refused: list[Any]) -> None:
    for result in accepted:
        check_answer(command, result)
    for result in refused:
        with pytest.raises(StrictError):
            check_answer(command, result)


def test_requests_of_tests_are_not_checked() -> None:
    check_ask("echo", {"anything": object})
    check_answer("echo", object)
