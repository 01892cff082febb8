# SPDX-License-Identifier: Apache-2.0
"""What travels between pytest and a worker: one JSON document a line, with bytes and references to objects."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.strict import StrictError

_SHOWN = 100


@dataclass(frozen=True)
class Ref:
    """An object that stays in the worker: a NIXL agent, a buffer, a descriptor list, a handle."""

    number: int
    kind: str


def encode(message: dict[str, Any]) -> bytes:
    """Return the line for ``message``. :raises TypeError: where it holds what JSON, bytes and Ref cannot express."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of a line. :raises StrictError: where it holds none."""
    try:
        message = json.loads(line, object_hook=_rich)
    except StrictError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictError(f"a line of {len(line)} bytes is no message: {str(error)[:_SHOWN]}") from None
    if not isinstance(message, dict):
        raise StrictError(f"a line of {len(line)} bytes is no message: expected an object")
    return message


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Ref):
        return {"$ref": value.number, "$kind": value.kind}
    raise TypeError(f"a {type(value).__name__} cannot be sent between pytest and a worker: use JSON values or bytes")


def _rich(value: dict[str, Any]) -> Any:
    if "$bytes" in value:
        if not isinstance(value["$bytes"], str):
            raise StrictError("a message holds bytes that are no text")
        return base64.b64decode(value["$bytes"])
    if "$ref" in value:
        number, kind = value["$ref"], value.get("$kind")
        if type(number) is not int or not isinstance(kind, str):
            raise StrictError("a message refers to an object by what is no number, or not to what kind of object")
        return Ref(number, kind)
    return value
