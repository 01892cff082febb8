# SPDX-License-Identifier: Apache-2.0
"""Values that other processes wrote: any malformed value is refused with one short sentence."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_nixl.cluster.command_check import Command
from pytest_nixl.cluster.group import Candidate, Member, MembershipError, Roster
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.messages import REQUESTS, PeerAnswer, PeerRequest, check_answer, check_ask, read_message
from pytest_nixl.core.strict import (
    Every,
    Number,
    OneOf,
    RefTo,
    Restored,
    StrictError,
    Text,
    check,
    error_text,
    escape,
    loads,
    pack,
    printable,
    unpack,
)
from pytest_nixl.core.wire import Ref, decode
from pytest_nixl.etcd.transaction import KeyValue
from pytest_nixl.model.worker_commands import WORKER_COMMANDS
from pytest_nixl.processes import worker_process

KEY = "/pytest-nixl/groups/g/run/frozen"
MEMBERS = (Member(0, "a", "h", 1), Member(1, "b", "h", 2))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_NAMES = """
host pid size wanted ttl members refusal changes passed ask number answer result error remedy worker line ended code
verdict version options tests errors command arguments kind type message traceback $bytes $ref $kind windows transfers
latencies counted contention
"""
#: Objects with some of the right fields, but wrong values.
FIELDS = st.dictionaries(
    st.sampled_from(_NAMES.split()), JSON | st.lists(st.lists(JSON, max_size=4), max_size=3), max_size=6
)
VALUES = st.binary(max_size=60) | (JSON | FIELDS).map(lambda value: json.dumps(value).encode())

DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "deep list": DEEP,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep list that never ends": b"[" * 100_000,
    "deep behind a text": b'{"host": "[[[[", "x": ' + DEEP + b"}",
    "a text that never ends": b"[" * 100 + b'"' + b'\\"' * 500_000,
    "1.5 MB": b'"' + b"a" * 1_500_000 + b'"',
    "3 MB": b"0" * 3_000_000,
    "a long number": b"9" * 1_000_000,
    "a large number": b'{"ttl": 1e999, "passed": 1e999}',
    "NaN": b'{"ttl": NaN, "passed": NaN, "pid": NaN}',
    "half a character": b'{"host": "\\ud800", "pid": 1, "size": 1}',
    "an escape": b'{"host": "\\u001b[2J", "pid": 1, "size": 1}',
    "a list as a key": b'{"members": {}, "ttl": [], "wanted": [[]]}',
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "null": b"null",
}


def _frozen(data: bytes) -> None:
    values = GroupValues("/pytest-nixl/groups/g/")
    values.read_frozen(KeyValue(KEY, data, 1, 1, 1))


def _gate(data: bytes) -> None:
    GroupValues("/pytest-nixl/groups/g/").read_gate(KeyValue(KEY, data, 1, 1, 1), MEMBERS)


def _message(data: bytes) -> None:
    message = read_message(loads(data))
    if isinstance(message, PeerRequest):
        for request in REQUESTS:
            _refused(lambda name=request: check_ask(name, message.arguments))  # type: ignore[misc]
    elif isinstance(message, PeerAnswer):
        for request in REQUESTS:
            _refused(lambda name=request: check_answer(name, message.result))  # type: ignore[misc]


def _line(data: bytes) -> None:
    message = decode(data)
    for command in WORKER_COMMANDS:
        _refused(lambda name=command: worker_process.check_answer(name, message.get("result")))  # type: ignore[misc]
    check(worker_process.REPLY, message)


def _refused(read: Callable[[], object]) -> None:
    """Call ``read``. If it refuses, assert that the error is one short sentence that names the key."""
    remedy = "is only asked for of a key"
    try:
        read()
        return
    except MembershipError as error:
        message, remedy = error.reason, error.remedy
        assert f"'{KEY}'" in message
    except StrictError as error:
        message = str(error)
    assert message
    assert remedy
    assert len(message) < 500, message
    assert printable(message) == message, message
    assert "\n" not in message


READERS: dict[str, Callable[[bytes], object]] = {
    "member": lambda data: Candidate.of(KEY, data),
    "list": _frozen,
    "gate": _gate,
    "message": _message,
    "line of a worker": _line,
    "command": lambda data: Command.unpacked(pack(data)),
    "packed": lambda data: Command.unpacked(data.decode("latin-1")),
}


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=60, deadline=None)
@given(data=VALUES)
@example(data=b'{"ask": "end", "number": 1, "code": "0", "verdict": [], "refusal": {}}')
@example(data=b'{"members": [["a", "h", 1, 1]], "ttl": 6}')
@example(data=b'{"members": [[["a"], "h", 1]], "ttl": 6}')
@example(data=b'{"$bytes": []}')
@example(data=b'{"$ref": []}')
def test_any_value_is_read_or_refused_in_one_sentence(kind: str, data: bytes) -> None:
    _refused(lambda: READERS[kind](data))


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", READERS)
def test_a_hostile_value_is_refused_quickly(kind: str, hostile: str) -> None:
    before = time.thread_time()
    _refused(lambda: READERS[kind](HOSTILE[hostile]))
    assert time.thread_time() - before < 5, "CPU seconds of this thread"


def test_a_value_that_unpacks_to_a_thousand_times_its_size_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(50 << 20))).decode()
    with pytest.raises(StrictError, match="1000 bytes"):
        unpack(bomb, most=1000)
    with pytest.raises(StrictError, match="bytes"):
        Command.unpacked(bomb)
    assert unpack(pack(b"x" * 1000), most=1000) == b"x" * 1000
    with pytest.raises(StrictError, match="it is incomplete"):
        unpack(base64.b64encode(zlib.compress(b"abc")[:-2]).decode(), most=1000)


def test_values_written_by_ranks_are_readable() -> None:
    claimant = Candidate("a", "node-a", 7, 2, 1)
    assert Candidate.of("/members/a", claimant.value) == claimant
    item = KeyValue(KEY, Roster.value(6, [("a", "h", 1), ("b", "h", 2)], changes=3), 1, 1, 1)
    frozen = Roster.of(item)
    assert (frozen.members, frozen.changes, frozen.ttl) == (MEMBERS, 3, 6)
    command = Command("1", {"--nixl-op": "WRITE"}, ["suites/a.py::test[ä-\u2028]"] * 2000, 0)
    assert Command.unpacked(command.packed()) == command


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"windows": [0.1, -1.0]}, r"windows\[1\] is -1.0: expected a number from 1e-09"),
        ({"windows": [0.1, float("nan")]}, r"windows\[1\] is nan"),
        ({"windows": [0.1, True]}, r"windows\[1\] is True"),
        ({"windows": [], "transfers": []}, "one number of transfers for each"),
        ({"windows": [0.1]}, "one number of transfers for each"),
        ({"transfers": [1, 0]}, r"transfers\[1\] is 0: expected an integer from 1"),
        ({"transfers": [1, 1e300]}, r"transfers\[1\] is 1e\+300"),
        ({"latencies": [float("inf")]}, r"latencies\[0\] is inf"),
        ({"counted": [["eth0", "net", -1, None]]}, r"counted\[0\]\[2\] is -1"),
        ({"contention": None}, "contention is None: expected a number"),
        ({"corruption": {"wrong_bytes": 1}}, "corruption"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_measurement_with_impossible_numbers_is_refused(change: dict[str, Any], words: str) -> None:
    healthy = {
        "corruption": None,
        "windows": [0.1, 0.2],
        "transfers": [10, 10],
        "latencies": [0.0, 1e-6],
        "counted": [],
        "contention": 0.0,
    }
    worker_process.check_answer("measure", healthy)
    with pytest.raises(StrictError, match=words):
        worker_process.check_answer("measure", {**healthy, **change})


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    assert loads(json.dumps(["[" * 1000 + '"\\' + "{" * 1000]).encode()) == ["[" * 1000 + '"\\' + "{" * 1000]
    assert loads(b"[" * 32 + b"]" * 32)
    with pytest.raises(StrictError, match="32 deep"):
        loads(b"[" * 33 + b"]" * 33)
    wide = json.dumps([[number] for number in range(5000)]).encode()
    assert len(loads(wide)) == 5000
    check(Every(Every(Number(whole=True))), loads(wide))


EXACT = {"a": int, "b?": str}


@pytest.mark.parametrize(
    ("form", "value", "reason"),
    [
        *((Number(1, 9), value, f"it is {value}: expected a number from 1 to 9") for value in (0, 9.5, True)),
        (Number(1, 9, whole=True), 1.5, "it is 1.5: expected an integer from 1 to 9"),
        *((Text(3), value, f"it is {value!r}: expected a text of at most 3 characters") for value in ("abcd", 3)),
        (Text(9, "[a-z]+"), "aB", "it is 'aB': expected a text that matches [a-z]+"),
        (OneOf((None, Text(1))), "ab", "it is 'ab': expected a text of at most 1 characters"),
        (Every(int, 2), [1, 2, 3], "it has 3 items: expected at most 2"),
        (Every(int), {"a": 1}, "it is an object of 1: expected a list"),
        (Every(int, keys=True), [1], "it is a list of 1: expected an object"),
        (Every(int, keys=True), {"a": "b"}, "it['a'] is 'b': expected int"),
        (RefTo("x"), Ref(1, "y"), "it is Ref(number=1, kind='y'): expected a reference to an object of kind 'x'"),
        ((int, str), [1], "it is a list of 1: expected a list of 2"),
        ((int, str), [1, 2], "it[1] is 2: expected str"),
        (EXACT, {"b": "x"}, "it has no field 'a'"),
        (EXACT, {"a": 1, "c": 2}, "it has an unknown field 'c'"),
        (EXACT, [], "it is a list of 0: expected an object"),
        ({"a": {"b": int}}, {"a": {"b": "x"}}, "a.b is 'x': expected int"),
        ({"*": int}, {"x y": "z"}, "'x y' is 'z': expected int"),
        ({"*": int}, {61 * "x": "z"}, f"{60 * 'x'!r}… is 'z': expected int"),
        (int | None, "x", "it is 'x': expected int or null"),
        (float | None, True, "it is True: expected float or null"),
        (None, 1, "it is 1: expected null"),
        (int, 61 * "x", f"it is {60 * 'x'!r}…: expected int"),
        (int, 1 / 3, "it is 0.3333333333333333: expected int"),
    ],
)
def test_a_value_of_another_form_is_named_by_its_path(form: Any, value: Any, reason: str) -> None:
    with pytest.raises(StrictError) as refused:
        check(form, value)
    assert str(refused.value) == reason
    with pytest.raises(StrictError) as refused:
        check({"part": form}, {"part": value}, "value")
    text = reason.removeprefix("it")
    assert str(refused.value) == f"value.part{'' if text != reason else '.'}{text}"


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (Number(1, 9), 9, 9),
        (float | None, 3, 3.0),
        (float, 3, 3.0),
        (int | None, None, None),
        (OneOf((None, Text(2))), "ab", "ab"),
        (EXACT, {"a": 1, "b": "x"}, {"a": 1, "b": "x"}),
        ({"a": int, "*": str}, {"a": 1, "c": "x"}, {"a": 1, "c": "x"}),
        (Every(float, 2), [1, 2.5], [1.0, 2.5]),
        (Restored((int, int), tuple), [1, 2], (1, 2)),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Any, {"a": [None]}, {"a": [None]}),
    ],
)
def test_a_value_of_its_form_is_returned(form: Any, value: Any, expected: Any) -> None:
    assert repr(check(form, value)) == repr(expected)


@pytest.mark.parametrize("wrong", [2.0, True, "2", None])
def test_the_first_item_that_is_not_an_integer_is_named(wrong: object) -> None:
    form = Every(Number(0, 9, whole=True))
    check(form, [1, 9, 0])
    with pytest.raises(StrictError, match=r"^it\[1\] is .*: expected an integer from 0 to 9$"):
        check(form, [1, wrong, wrong])


@pytest.mark.parametrize(
    ("text", "printed", "on_one_line"),
    [
        ("a b\\c'é😀", None, None),
        ("a\nb\tc", None, r"a\nb\tc"),
        ("\u00a0\u3000", None, r"\xa0\u3000"),
        ("\x1b[2J\r\x00\x7f\x9b", r"\x1b[2J\r\x00\x7f\x9b", r"\x1b[2J\r\x00\x7f\x9b"),
        ("\u2028\u202e\udc80", r"\u2028\u202e\udc80", r"\u2028\u202e\udc80"),
    ],
)
def test_what_controls_a_terminal_is_escaped(text: str, printed: str | None, on_one_line: str | None) -> None:
    assert printable(text) == error_text(text) == (printed or text)
    assert escape(text) == (on_one_line or text)


def test_a_text_that_is_too_long_keeps_what_a_reader_needs() -> None:
    assert (escape("x" * 160), escape("x" * 161)) == ("x" * 160, "x" * 160 + "… (161 characters)")
    assert error_text("ab" * 5, 10) == "ab" * 5
    assert error_text("a" * 5 + "-" + "b" * 5, 10) == "aaaaa… (11 characters) …bbbbb"
