# SPDX-License-Identifier: Apache-2.0
"""The messages between pytest and a worker, and the bounded output of a program."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from pytest_nixl.core.ring_buffer import RingBuffer
from pytest_nixl.core.strict import StrictError
from pytest_nixl.core.wire import ForeignRefError, Ref, decode, encode


def test_a_message_has_bytes_references_and_scalars_of_numpy() -> None:
    ours, theirs = object(), object()
    references = [Ref(7, "buffer"), Ref(8, "agent", ours)]
    message = {"data": b"\x00\xff", "refs": references, "n": np.int64(3), "f": np.float32(0.5)}
    line = encode(message, ours)
    assert json.loads(line) == {
        "data": {"$bytes": "AP8="},
        "refs": [{"$ref": 7, "$kind": "buffer"}, {"$ref": 8, "$kind": "agent"}],
        "n": 3,
        "f": 0.5,
    }
    assert line.endswith(b"}\n")
    answer = decode(line, theirs)
    assert answer == {**message, "refs": [Ref(7, "buffer", theirs), Ref(8, "agent", theirs)]}
    [reference, _] = answer["refs"]
    assert copy.deepcopy(reference) is reference
    assert repr(reference) == "Ref(number=7, kind='buffer')"
    with pytest.raises(ForeignRefError) as refused:
        encode(message, theirs)
    assert refused.value.ref == Ref(8, "agent", ours)
    assert str(refused.value) == str(refused.value.ref)


@pytest.mark.parametrize("value", [{1}, np.zeros(2), object])
def test_a_value_that_json_does_not_have_is_not_sent(value: Any) -> None:
    reason = (
        f"^a value of type {type(value).__name__} cannot be sent between pytest and a worker: use JSON values or bytes$"
    )
    with pytest.raises(TypeError, match=reason):
        encode({"x": value})


NO_KIND = "a message contains a reference without a number or without the kind of its object"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[]", "a line of 2 bytes is not a message: expected an object"),
        (b"{", "a line of 1 bytes is not a message: Expecting property name enclosed in double quotes: line 1 column 2 "
               "(char 1)"),
        (b'{"a": {"$bytes": 1}}', "a message contains bytes that are not encoded as text"),
        *((b'{"a": {"$ref": %s}}' % rest, NO_KIND) for rest in (b"1", b'true, "$kind": "x"', b'1, "$kind": 2')),
    ],
)  # fmt: skip
def test_a_line_without_a_message_is_refused(line: bytes, reason: str) -> None:
    with pytest.raises(StrictError) as refused:
        decode(line)
    assert str(refused.value) == reason


def test_an_error_that_quotes_bytes_that_are_no_text_is_short() -> None:
    line = b'{"a": "' + 200 * b"\xff" + b'"}'
    with pytest.raises(StrictError, match=r"^a line of 209 bytes is not a message: .{1,100}$"):
        decode(line)


@pytest.mark.parametrize(
    ("offset", "most", "part"),
    [(0, 9, (3, b"defgh")), (3, 2, (3, b"de")), (4, 9, (4, b"efgh")), (8, 9, (8, b""))],
)
def test_the_last_bytes_of_an_output_are_kept_by_their_offsets(offset: int, most: int, part: tuple[int, bytes]) -> None:
    buffer = RingBuffer(5)
    buffer.write(b"ab")
    assert (buffer.total, buffer.text(), buffer.since(0)) == (2, "ab", (0, b"ab"))
    buffer.write(b"cdefgh")
    assert (buffer.total, buffer.text()) == (8, "defgh")
    assert buffer.since(offset, most) == part
