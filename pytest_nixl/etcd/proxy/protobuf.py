# SPDX-License-Identifier: Apache-2.0
"""Read the fields of a protobuf message by number, of any message, without its ``.proto``.

The package protobuf is not used for this: its generated modules ask for a release of it that is at least as new as the
generator, while vLLM, grpcio and etcd3 each pin another one. ``tests/unit/etcd/test_protobuf.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_HIGHEST_FIELD = (1 << 29) - 1
#: etcd and protobuf drop the bits above.
_MOST = (1 << 64) - 1


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message. A number of four or eight bytes is yielded as bytes.

    :raises IndexError, ValueError: the message is invalid, or has a group, which etcd's messages do not have.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _HIGHEST_FIELD:
            raise ValueError(f"invalid protobuf: field {number}")
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _LENGTH:
            size, place = _varint(message, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"invalid protobuf: wire type {kind}")
        if place + size > len(message):
            raise ValueError("invalid protobuf: it ends within a field")
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value & _MOST, place
    raise ValueError("invalid protobuf: a number of more than ten bytes")
