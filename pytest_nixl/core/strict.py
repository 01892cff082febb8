# SPDX-License-Identifier: Apache-2.0
"""Read values that other processes wrote: limit their size before decoding, and check their types afterwards.

For any bytes the only exception is :class:`StrictError`, with one short sentence.
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
from unicodedata import category

#: Maximum size of a value in bytes, and maximum nesting of lists and objects in it.
MOST_BYTES, MOST_DEPTH = 1 << 21, 32
#: Maximum number of digits of an integer, enough for 64 bits.
_DIGITS = 20
_SHOWN = 60
#: A character that may not be printable.
_UNUSUAL = re.compile(r"[^\n\t -~]")
#: A JSON string, whose brackets do not count, or a bracket. An unterminated string matches too, so one pass suffices.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class StrictError(ValueError):
    """A value does not have the expected form."""


@dataclass(frozen=True)
class Number:
    """Form of a finite number from ``least`` to ``most``; with ``whole``, of an integer."""

    least: float = 0
    most: float = float(1 << 63)
    whole: bool = False


@dataclass(frozen=True)
class Text:
    """Form of a string with at most ``most`` characters that fully matches the regular expression ``pattern``."""

    most: int = 1 << 20
    pattern: str = ""


@dataclass(frozen=True)
class OneOf:
    """Form of a value that matches one of several forms."""

    forms: tuple[Any, ...]


@dataclass(frozen=True)
class Every:
    """Form of a list of at most ``most`` items that all have ``form``; with ``keys``, of an object with such values."""

    form: Any
    most: int = 1 << 16
    keys: bool = False


@dataclass(frozen=True)
class RefTo:
    """Form of a reference (:class:`pytest_nixl.core.wire.Ref`) to an object of this ``kind``."""

    kind: str


#: A form for :func:`check`: one of the above, a type, None, a tuple with the forms of a list's items, or a dict of
#: forms by field name. ``"name?"`` marks an optional field; ``"*"`` is the form of all fields without a name here.
Form: TypeAlias = Any


def loads(data: bytes, *, most: int = MOST_BYTES, depth: int = MOST_DEPTH) -> Any:
    """Decode JSON.

    :param data: UTF-8 text.
    :param most: maximum size in bytes.
    :param depth: maximum nesting of lists and objects.
    :raises StrictError: if ``data`` is larger or nested deeper, or is not JSON with finite numbers.
    """
    if len(data) > most:
        raise StrictError(f"it has {len(data)} bytes: expected at most {most}")
    # With few brackets it cannot be nested too deeply. Otherwise check the nesting.
    if data.count(b"[") + data.count(b"{") > depth:
        _refuse_depth(data, depth)
    try:
        value = json.loads(data.decode(), parse_constant=_constant, parse_int=_integer, parse_float=_float)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be neither printed nor written
        return value
    except StrictError:
        raise
    except (ValueError, RecursionError) as error:
        raise StrictError(f"it is not JSON ({shorten(str(error))})") from None


def check(form: Form, value: Any, where: str = "it") -> None:
    """Check that a decoded value has the given form.

    :param where: name of the value in messages.
    :raises StrictError: if it differs; the message names the first part that differs.
    """
    if isinstance(form, Every):
        _check_every(form, value, where)
    elif isinstance(form, dict):
        _check_fields(form, value, where)
    elif isinstance(form, tuple):
        if not isinstance(value, list) or len(value) != len(form):
            raise StrictError(f"{where} is {shorten(value)}: expected a list of {len(form)}")
        for number, (part, item) in enumerate(zip(form, value, strict=True)):
            check(part, item, f"{where}[{number}]")
    elif isinstance(form, OneOf):
        _check_one_of(form, value, where)
    elif isinstance(form, RefTo):
        if getattr(value, "kind", None) != form.kind:
            raise StrictError(f"{where} is {shorten(value)}: expected a reference to an object of kind {form.kind!r}")
    else:
        _check_scalar(form, value, where)


def _check_scalar(form: Form, value: Any, where: str) -> None:
    if form is Any:
        return
    if form is None:
        if value is not None:
            raise StrictError(f"{where} is {shorten(value)}: expected null")
    elif isinstance(form, Number):
        kinds: tuple[type, ...] = (int,) if form.whole else (int, float)
        # bool is a subclass of int, so compare types. NaN fails the comparison.
        if type(value) not in kinds or not form.least <= value <= form.most:
            expected = "an integer" if form.whole else "a number"
            raise StrictError(f"{where} is {shorten(value)}: expected {expected} from {form.least:g} to {form.most:g}")
    elif isinstance(form, Text):
        if not isinstance(value, str) or len(value) > form.most:
            raise StrictError(f"{where} is {shorten(value)}: expected a text of at most {form.most} characters")
        if form.pattern and not re.fullmatch(form.pattern, value):
            raise StrictError(f"{where} is {shorten(value)}: expected a text that matches {form.pattern}")
    else:
        kinds_of_union = form.__args__ if isinstance(form, UnionType) else (form,)
        if type(value) not in kinds_of_union:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds_of_union)
            raise StrictError(f"{where} is {shorten(value)}: expected {names}")


def _check_every(form: Every, value: Any, where: str) -> None:
    if not isinstance(value, dict if form.keys else list):
        raise StrictError(f"{where} is {shorten(value)}: expected {'an object' if form.keys else 'a list'}")
    if len(value) > form.most:
        raise StrictError(f"{where} has {len(value)} items: expected at most {form.most}")
    if isinstance(value, list) and isinstance(form.form, Number) and _are_numbers(form.form, value):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        check(form.form, part, f"{where}[{shorten(key)}]")


def _are_numbers(form: Number, values: list[Any]) -> bool:
    """Whether all values have a form. To check each, and to name it, takes ten times as long for a row's latencies."""
    kinds = {int} if form.whole else {int, float}
    return set(map(type, values)) <= kinds and all(form.least <= value <= form.most for value in values)


def _check_fields(form: Mapping[str, Form], value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise StrictError(f"{where} is {shorten(value)}: expected an object")
    forms = {name.rstrip("?"): part for name, part in form.items()}
    for name in value:
        if name not in forms and "*" not in forms:
            raise StrictError(f"{where} has an unknown field {shorten(name)}")
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
    """Return the bytes that :func:`pack` compressed.

    :param most: maximum number of unpacked bytes.
    :raises StrictError: if ``text`` does not come from :func:`pack`, or unpacks to more bytes.
    """
    try:
        packed = base64.b64decode(text, validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, most)
        # Do not unpack the rest: compressed bytes may unpack to a thousand times their size.
        if unpacking.unconsumed_tail:
            raise StrictError(f"it unpacks to more than {most} bytes")
        if not unpacking.eof or unpacking.unused_data:
            raise StrictError("it is incomplete")
    except (ValueError, binascii.Error, zlib.error) as error:
        if isinstance(error, StrictError):
            raise
        raise StrictError(f"it is not compressed text ({shorten(str(error))})") from None
    return data


def pack(data: bytes) -> str:
    """Return ``data`` compressed and base64-encoded."""
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
    raise StrictError(f"it contains {name}, which is not a number")


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise StrictError(f"it contains a number with {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictError(f"it contains the number {shorten(text)}, which is too large")
    return number


def printable(text: str) -> str:
    """Return ``text`` with escaped control characters and halves of surrogate pairs, so that it can be written anywhere
    and cannot control a terminal. Line breaks, tabs and spaces of any width are kept.
    """
    return _UNUSUAL.sub(lambda match: _escaped(match[0]), text)


def error_text(text: str, most: int = 2000) -> str:
    """Return the text of an error for a terminal: :func:`printable`, and of a longer one its start and its end."""
    if len(text) > most:
        text = f"{text[: most // 2]}… ({len(text)} characters) …{text[-most // 2 :]}"
    return printable(text)


def escape(text: str, most: int = 160) -> str:
    """Return the first ``most`` characters of a text for a message: on one line, with control characters as escapes."""
    start = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text[: most + 1])
    return start if len(start) <= most else f"{start[:most]}… ({len(text)} characters)"


def _escaped(sign: str) -> str:
    return sign if sign.isprintable() or category(sign) == "Zs" else ascii(sign)[1:-1]


def shorten(value: object) -> str:
    """Return a short description of a value, in one line, without formatting all of a large value."""
    if isinstance(value, (str, bytes)):
        return repr(value[:_SHOWN]) + ("…" if len(value) > _SHOWN else "")
    if isinstance(value, (dict, list)):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    text = repr(value)
    return text[:_SHOWN] + ("…" if len(text) > _SHOWN else "")
