# SPDX-License-Identifier: Apache-2.0
"""What travels between pytest and a worker: one JSON document a line, with bytes and references to objects."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ref:
    """An object that stays in the worker: a NIXL agent, a buffer, a descriptor list, a handle."""

    number: int
    kind: str


def encode(message: dict[str, Any]) -> bytes:
    """Return the line for ``message``. :raises TypeError: where it holds what JSON, bytes and Ref cannot express."""
    return json.dumps(message, default=_plain).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of a line."""
    message = json.loads(line, object_hook=_rich)
    assert isinstance(message, dict)
    return message


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Ref):
        return {"$ref": value.number, "$kind": value.kind}
    raise TypeError(f"a {type(value).__name__} cannot be sent between pytest and a worker: use JSON values or bytes")


def _rich(value: dict[str, Any]) -> Any:
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$ref" in value:
        return Ref(value["$ref"], value["$kind"])
    return value
