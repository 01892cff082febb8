# SPDX-License-Identifier: Apache-2.0
"""Reading values that others wrote: bounded before they are decoded, and of the expected types afterwards.

Whatever the bytes are, the only exception is :class:`StrictError`, with one short sentence.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias

#: Bytes of a value, and levels of lists and objects within it, at most.
MOST_BYTES, MOST_DEPTH = 1 << 21, 32
#: Digits of an integer, at most: those of 64 bits.
_DIGITS = 20
_SHOWN = 60
#: A text, of which the brackets do not count, or a bracket. A text without an end matches too: one pass is enough.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class StrictError(ValueError):
    """A value is not what it should be."""


@dataclass(frozen=True)
class Number:
    """A finite number from ``least`` to ``most``; with ``whole`` an integer."""

    least: float = 0
    most: float = float(1 << 63)
    whole: bool = False


@dataclass(frozen=True)
class Text:
    """A text of at most ``most`` characters, all of it of the form ``pattern``."""

    most: int = 1 << 20
    pattern: str = ""


@dataclass(frozen=True)
class OneOf:
    """What one of several forms allows."""

    forms: tuple[Any, ...]


@dataclass(frozen=True)
class Every:
    """A list whose items all have one form, ``most`` of them; or with ``keys`` an object whose values have it."""

    form: Any
    most: int = 1 << 16
    keys: bool = False


#: What :func:`check` takes: one of the above, a type, None, a dict of forms by field (``"name?"``: may be absent), or a
#: tuple of the forms of a list's items. A dict's field ``"*"`` is the form of all that it does not name.
Form: TypeAlias = Any


def loads(data: bytes, *, most: int = MOST_BYTES, depth: int = MOST_DEPTH) -> Any:
    """Return the JSON value of ``data``.

    :param most: bytes at most.
    :param depth: levels of lists and objects at most.
    :raises StrictError: where it is larger, deeper, or no JSON with finite numbers.
    """
    if len(data) > most:
        raise StrictError(f"it has {len(data)} bytes: expected {most} at most")
    # Without so many brackets it cannot be too deep; only else are they looked at one by one.
    if data.count(b"[") + data.count(b"{") > depth:
        _refuse_depth(data, depth)
    try:
        value = json.loads(data.decode(), parse_constant=_constant, parse_int=_integer, parse_float=_float)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a character can be neither printed nor written
        return value
    except StrictError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictError(f"it is no JSON ({shorten(str(error))})") from None


def check(form: Form, value: Any, where: str = "it") -> None:
    """Compare a decoded value with its form. :raises StrictError: naming the first part that differs."""
    if isinstance(form, Every):
        _check_every(form, value, where)
    elif isinstance(form, dict):
        _check_fields(form, value, where)
    elif isinstance(form, tuple):
        if not isinstance(value, list) or len(value) != len(form):
            raise StrictError(f"{where} is {shorten(value)}: expected a list of {len(form)}")
        for number, (part, one) in enumerate(zip(form, value, strict=True)):
            check(part, one, f"{where}[{number}]")
    elif isinstance(form, OneOf):
        _check_one_of(form, value, where)
    else:
        _check_scalar(form, value, where)


def _check_scalar(form: Form, value: Any, where: str) -> None:
    if form is Any:
        return
    if form is None:
        if value is not None:
            raise StrictError(f"{where} is {shorten(value)}: expected nothing")
    elif isinstance(form, Number):
        kinds: tuple[type, ...] = (int,) if form.whole else (int, float)
        # Not a bool, which is an int; and not what is no number at all, which is between no two.
        if type(value) not in kinds or not form.least <= value <= form.most:
            what = "a whole number" if form.whole else "a number"
            raise StrictError(f"{where} is {shorten(value)}: expected {what} from {form.least:g} to {form.most:g}")
    elif isinstance(form, Text):
        if not isinstance(value, str) or len(value) > form.most:
            raise StrictError(f"{where} is {shorten(value)}: expected a text of {form.most} characters at most")
        if form.pattern and not re.fullmatch(form.pattern, value):
            raise StrictError(f"{where} is {shorten(value)}: expected a text such as {form.pattern}")
    else:
        kinds_of_union = form.__args__ if isinstance(form, UnionType) else (form,)
        if type(value) not in kinds_of_union:
            names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds_of_union)
            raise StrictError(f"{where} is {shorten(value)}: expected {names}")


def _check_every(form: Every, value: Any, where: str) -> None:
    if not isinstance(value, dict if form.keys else list):
        raise StrictError(f"{where} is {shorten(value)}: expected {'an object' if form.keys else 'a list'}")
    if len(value) > form.most:
        raise StrictError(f"{where} has {len(value)} parts: expected {form.most} at most")
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        check(form.form, part, f"{where}[{shorten(key)}]")


def _check_fields(form: Mapping[str, Form], value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise StrictError(f"{where} is {shorten(value)}: expected an object")
    forms = {name.rstrip("?"): part for name, part in form.items()}
    for name in value:
        if name not in forms and "*" not in forms:
            raise StrictError(f"{where} has a field {shorten(name)}, which is not known")
    for name in form:
        if not name.endswith("?") and name != "*" and name not in value:
            raise StrictError(f"{where} has no field {name!r}")
    for name, part in value.items():
        check(forms.get(name, forms.get("*")), part, f"{where}.{_field(name)}" if where != "it" else _field(name))


def _check_one_of(form: OneOf, value: Any, where: str) -> None:
    refusals = []
    for part in form.forms:
        try:
            check(part, value, where)
        except StrictError as error:
            refusals.append(error)
        else:
            return
    raise refusals[-1]


def unpack(text: str, *, most: int) -> bytes:
    """Return what :func:`pack` made a text of. :raises StrictError: where it is none, or larger than ``most`` bytes."""
    try:
        packed = base64.b64decode(text, validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, most)
        # Whatever is left is not looked at: some bytes unfold to a thousand times as many.
        if unpacking.unconsumed_tail:
            raise StrictError(f"it unfolds to more than {most} bytes")
        if not unpacking.eof or unpacking.unused_data:
            raise StrictError("it is not whole")
    except (ValueError, binascii.Error, zlib.error) as error:
        if isinstance(error, StrictError):
            raise
        raise StrictError(f"it is no compressed text ({shorten(str(error))})") from None
    return data


def pack(data: bytes) -> str:
    """Return bytes as a short text."""
    return base64.b64encode(zlib.compress(data)).decode()


def _refuse_depth(data: bytes, depth: int) -> None:
    level = 0
    for match in _TOKENS.finditer(data):
        token = match[0]
        if token in b"[{":
            level += 1
            if level > depth:
                raise StrictError(f"it is nested more than {depth} deep")
        elif token in b"]}":
            level -= 1


def _field(name: str) -> str:
    return name if len(name) <= _SHOWN and name.isidentifier() else shorten(name)


def _constant(name: str) -> None:
    raise StrictError(f"it holds {name}, which is no number")


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise StrictError(f"it holds a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictError(f"it holds the number {shorten(text)}, which is too large")
    return number


def printable(text: str) -> str:
    """Return a text of another's without what moves a terminal's cursor; lines stay lines."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(value: object) -> str:
    """Return a value in few characters, without line breaks, and without writing all of it first."""
    if isinstance(value, (str, bytes)):
        return repr(value[:_SHOWN]) + ("…" if len(value) > _SHOWN else "")
    if isinstance(value, (dict, list)):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    text = repr(value)
    return text[:_SHOWN] + ("…" if len(text) > _SHOWN else "")
