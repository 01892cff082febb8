# SPDX-License-Identifier: Apache-2.0
"""The messages between pytest and a worker: one JSON document per line, with bytes and references to objects."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.strict import StrictError

_SHOWN = 100


@dataclass(frozen=True)
class Ref:
    """A reference to an object in the worker, such as a NIXL agent, a buffer, a descriptor list or a handle.

    :param number: its number in that worker.
    :param kind: its kind, for messages.
    """

    number: int
    kind: str


def encode(message: dict[str, Any]) -> bytes:
    """Return the line for a message.

    :raises TypeError: the message contains something other than JSON values, bytes and :class:`Ref`.
    """
    return json.dumps(message, default=_plain).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    :raises StrictError: the line contains no message.
    """
    try:
        message = json.loads(line, object_hook=_rich)
    except StrictError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictError(f"a line of {len(line)} bytes is not a message: {str(error)[:_SHOWN]}") from None
    if not isinstance(message, dict):
        raise StrictError(f"a line of {len(line)} bytes is not a message: expected an object")
    return message


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Ref):
        return {"$ref": value.number, "$kind": value.kind}
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be sent between pytest and a worker: use JSON values or bytes"
    )


def _rich(value: dict[str, Any]) -> Any:
    if "$bytes" in value:
        if not isinstance(value["$bytes"], str):
            raise StrictError("a message contains bytes that are not encoded as text")
        return base64.b64decode(value["$bytes"])
    if "$ref" in value:
        number, kind = value["$ref"], value.get("$kind")
        if type(number) is not int or not isinstance(kind, str):
            raise StrictError("a message contains a reference without a number or without the kind of its object")
        return Ref(number, kind)
    return value
