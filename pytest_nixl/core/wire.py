# SPDX-License-Identifier: Apache-2.0
"""The messages between pytest and a worker: one JSON document per line, with bytes and references to objects."""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass, field
from typing import Any

from pytest_nixl.core.strict import ATOMS, StrictError

_SHOWN = 100


@dataclass(frozen=True)
class Ref:
    """A reference to an object in the worker, such as a NIXL agent, a buffer, a descriptor list or a handle.

    :param number: its number in that worker.
    :param kind: its kind, such as ``buffer`` or the name of NIXL's class.
    :param owner: the worker that has the object; None inside of that worker. It does not cross the process boundary.
    """

    number: int
    kind: str
    owner: object = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        """Return itself: a copy names the same object of the same worker."""
        return self


ATOMS.add(Ref)


class ForeignRefError(Exception):
    """A message to a worker contains a reference to an object of another worker.

    :param ref: the reference.
    """

    def __init__(self, ref: Ref) -> None:
        super().__init__(ref)
        self.ref = ref


def encode(message: dict[str, Any], owner: object = None) -> bytes:
    """Return the line for a message.

    :param owner: the worker that gets the message; None if it comes from a worker.
    :raises TypeError: the message contains something other than JSON values, NumPy scalars, bytes and :class:`Ref`.
    :raises ForeignRefError: a reference in it belongs to another worker.
    """
    return json.dumps(message, default=functools.partial(_plain, owner)).encode() + b"\n"


def decode(line: bytes, owner: object = None) -> dict[str, Any]:
    """Return the message in a line.

    :param owner: the worker that sent the line, which has the objects of its references.
    :raises StrictError: the line contains no message.
    """
    try:
        message = json.loads(line, object_hook=functools.partial(_rich, owner))
    except StrictError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictError(f"a line of {len(line)} bytes is not a message: {str(error)[:_SHOWN]}") from None
    if not isinstance(message, dict):
        raise StrictError(f"a line of {len(line)} bytes is not a message: expected an object")
    return message


def _plain(owner: object, value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Ref):
        if value.owner is not None and value.owner is not owner:
            raise ForeignRefError(value)
        return {"$ref": value.number, "$kind": value.kind}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()  # a scalar; numpy is not imported for it
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be sent between pytest and a worker: use JSON values or bytes"
    )


def _rich(owner: object, value: dict[str, Any]) -> Any:
    if "$bytes" in value:
        if not isinstance(value["$bytes"], str):
            raise StrictError("a message contains bytes that are not encoded as text")
        return base64.b64decode(value["$bytes"])
    if "$ref" in value:
        number, kind = value["$ref"], value.get("$kind")
        if type(number) is not int or not isinstance(kind, str):
            raise StrictError("a message contains a reference without a number or without the kind of its object")
        return Ref(number, kind, owner)
    return value
