# SPDX-License-Identifier: Apache-2.0
"""Read values that other processes wrote: limit their size before decoding, and check their types afterwards.

For any bytes the only exception is :class:`StrictError`, with one short sentence.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import operator
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints, is_typeddict
from unicodedata import category

#: Maximum size of a value in bytes, and maximum nesting of lists and objects in it.
MOST_BYTES, MOST_DEPTH = 1 << 21, 32
#: Maximum number of digits of an integer, enough for 64 bits.
_DIGITS = 20
_SHOWN = 60
#: Maximum number of items of a list or an object, unless its form has another one.
MOST_ITEMS = 1 << 16
#: The least integer that :func:`check` does not convert to a float.
_TOO_LARGE = 1 << 1023
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
    most: int = MOST_ITEMS
    keys: bool = False


@dataclass(frozen=True)
class RefTo:
    """Form of a reference (:class:`pytest_nixl.core.wire.Ref`) to an object of this ``kind``."""

    kind: str


@dataclass(frozen=True)
class Restored:
    """Form of a value from which ``build`` makes the object that :func:`check` returns in its place."""

    form: Any
    build: Callable[[Any], Any]


#: A form for :func:`check` is a type annotation. ``Annotated[int, Number(0, 9)]`` bounds a value by one of the above,
#: which is a form by itself, too. A tuple has the forms of a list's items, and a dict those of an object's fields:
#: ``"name?"`` marks an optional field; ``"*"`` is the form of all fields without a name here.
Form: TypeAlias = Any

#: Classes whose objects are not taken apart.
ATOMS: set[type] = {str, int, float, bool, bytes, list, dict, type(None)}
#: The function that reads objects of a class from the text that ``str`` gives.
TEXTS: dict[type, Callable[[str], Any]] = {}


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


def check(form: Form, value: Any, where: str = "it") -> Any:
    """Check that a decoded value has the given form, and return it: an object in place of each dataclass's fields.

    :param where: name of the value in messages.
    :raises StrictError: if it differs; the message names the first part that differs.
    """
    try:
        return _read(form, value)
    except _MisfitError as misfit:
        raise StrictError(misfit.describe(where)) from None


@functools.cache
def form_of(annotation: Any, most: int = MOST_ITEMS, *, exact: bool = False) -> Form:
    """Return the form that a type annotation stands for.

    :param most: maximum number of items of a list or an object.
    :param exact: whether no field of a dataclass may be missing, even if it has a default.
    """
    part = functools.partial(form_of, most=most, exact=exact)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return arguments[1]
    if origin in (UnionType, Union):
        if ATOMS.issuperset(arguments):
            return functools.reduce(operator.or_, arguments)
        null_first = sorted(arguments, key=lambda argument: argument is not type(None))  # an error names the last form
        return OneOf(tuple(map(part, null_first)))
    if origin is tuple and arguments[-1] is not ...:
        return Restored(tuple(map(part, arguments)), tuple)
    if origin in (tuple, list):
        every = Every(part(arguments[0]), most)
        return Restored(every, tuple) if origin is tuple else every
    if origin in (dict, Mapping):
        return Every(part(arguments[1]), most, keys=True)
    kind: Any = origin or annotation
    if annotation is Any or annotation in ATOMS or not isinstance(kind, type):
        return annotation
    if annotation in TEXTS:
        return Restored(str, TEXTS[annotation])
    if issubclass(kind, Enum):
        return Restored(Any, kind)
    record: Any = kind
    hints = get_type_hints(record, include_extras=True)
    if is_typeddict(annotation):
        return _Fields({name: part(hint) for name, hint in hints.items()}, record.__required_keys__)
    if arguments:  # Fact is the only generic dataclass
        hints["value"] = arguments[0] | None
    optional = {field.name for field in fields(record) if (field.default, field.default_factory) != (MISSING, MISSING)}
    forms = {field.name: part(hints[field.name]) for field in fields(record)}
    return Restored(
        _Fields(forms, frozenset(forms if exact else forms.keys() - optional)), functools.partial(_build, record)
    )


def _build(kind: Any, values: dict[str, Any]) -> Any:
    built = kind(**values)
    if hasattr(kind, "check_plain"):
        built.check_plain()
    return built


class _MisfitError(Exception):
    """A value does not have its form; ``text`` says how, and ``path`` is where it is in the outermost value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.path = text, ""

    def within(self, step: str) -> _MisfitError:
        """Return the error for the value that this one is in."""
        self.path = f"{step}{self.path}"
        return self

    def describe(self, where: str) -> str:
        """Return the sentence for a value named ``where``."""
        path = self.path.removeprefix(".") if where == "it" and self.path.startswith(".") else f"{where}{self.path}"
        return f"{path} {self.text}"


def _differs(value: Any, expected: str) -> _MisfitError:
    return _MisfitError(f"is {shorten(value)}: expected {expected}")


def _read(form: Form, value: Any) -> Any:
    reader = _READERS.get(type(form))
    return reader(form, value) if reader is not None else _read(form_of(form), value)


def _read_class(form: Any, value: Any) -> Any:
    if type(value) is form:
        return value
    if form not in ATOMS:
        return _read(form_of(form), value)
    if form is float and type(value) is int and abs(value) < _TOO_LARGE:
        return float(value)
    raise _differs(value, "null" if form is type(None) else form.__name__)


def _read_union(form: UnionType, value: Any) -> Any:
    if not ATOMS.issuperset(form.__args__):
        return _read(form_of(form), value)
    if type(value) in form.__args__:
        return value
    if float in form.__args__ and type(value) is int:
        return _read_class(float, value)
    raise _differs(value, " or ".join("null" if kind is type(None) else kind.__name__ for kind in form.__args__))


def _read_number(form: Number, value: Any) -> Any:
    kinds: tuple[type, ...] = (int,) if form.whole else (int, float)
    # bool is a subclass of int, so compare types. NaN fails the comparison.
    if type(value) not in kinds or not form.least <= value <= form.most:
        expected = "an integer" if form.whole else "a number"
        raise _differs(value, f"{expected} from {form.least:g} to {form.most:g}")
    return value


def _read_text(form: Text, value: Any) -> Any:
    if not isinstance(value, str) or len(value) > form.most:
        raise _differs(value, f"a text of at most {form.most} characters")
    if form.pattern and not re.fullmatch(form.pattern, value):
        raise _differs(value, f"a text that matches {form.pattern}")
    return value


def _read_reference(form: RefTo, value: Any) -> Any:
    if getattr(value, "kind", None) != form.kind:
        raise _differs(value, f"a reference to an object of kind {form.kind!r}")
    return value


def _read_one_of(form: OneOf, value: Any) -> Any:
    refusals = []
    for part in form.forms:
        try:
            return _read(part, value)
        except _MisfitError as error:
            refusals.append(error)
    raise refusals[-1]


def _read_items(form: tuple[Form, ...], value: Any) -> Any:
    if not isinstance(value, list) or len(value) != len(form):
        raise _differs(value, f"a list of {len(form)}")
    return [_read_part(part, item, number) for number, (part, item) in enumerate(zip(form, value, strict=True))]


def _read_every(form: Every, value: Any) -> Any:
    if not isinstance(value, dict if form.keys else list):
        raise _differs(value, "an object" if form.keys else "a list")
    if len(value) > form.most:
        raise _MisfitError(f"has {len(value)} items: expected at most {form.most}")
    if isinstance(value, dict):
        return {key: _read_part(form.form, part, key) for key, part in value.items()}
    if isinstance(form.form, Number) and _are_numbers(form.form, value):
        return value
    return [_read_part(form.form, part, number) for number, part in enumerate(value)]


def _read_part(form: Form, value: Any, key: Any) -> Any:
    try:
        return _read(form, value)
    except _MisfitError as error:
        raise error.within(f"[{shorten(key)}]") from None


def _are_numbers(form: Number, values: list[Any]) -> bool:
    """Whether all values have a form. To check each, and to name it, takes ten times as long for a row's latencies."""
    kinds = {int} if form.whole else {int, float}
    return set(map(type, values)) <= kinds and all(form.least <= value <= form.most for value in values)


@dataclass(frozen=True)
class _Fields:
    """The forms of an object's fields by name, and the names of those that may not be missing."""

    forms: Mapping[str, Form]
    required: frozenset[str]

    @classmethod
    def of(cls, form: Mapping[str, Form]) -> _Fields:
        required = frozenset(name for name in form if not name.endswith("?") and name != "*")
        return cls({name.rstrip("?"): part for name, part in form.items()}, required)


def _read_fields(form: _Fields, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _differs(value, "an object")
    forms = form.forms
    if "*" not in forms and (unknown := [name for name in value if name not in forms]):
        raise _MisfitError(f"has an unknown field {shorten(unknown[0])}")
    if missing := form.required - value.keys():
        raise _MisfitError(f"has no field {next(name for name in forms if name in missing)!r}")
    read, name = {}, ""
    try:
        for name, part in value.items():
            read[name] = _read(forms[name] if name in forms else forms["*"], part)
    except _MisfitError as error:
        raise error.within(f".{_field(name)}") from None
    return read


_READERS: Mapping[type, Callable[[Any, Any], Any]] = {
    Every: _read_every,
    Number: _read_number,
    OneOf: _read_one_of,
    RefTo: _read_reference,
    Restored: lambda form, value: form.build(_read(form.form, value)),
    Text: _read_text,
    UnionType: _read_union,
    _Fields: _read_fields,
    dict: lambda form, value: _read_fields(_Fields.of(form), value),
    tuple: _read_items,
    type: _read_class,
    type(Any): lambda _, value: value,
    type(None): lambda _, value: _read_class(type(None), value),
}


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
