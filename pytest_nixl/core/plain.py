# SPDX-License-Identifier: Apache-2.0
"""Plain data, as JSON has it, from dataclasses and back: by the types of their fields, and nothing else.

No value is converted in silence: a number is no text, and ``true`` is no number. cattrs would convert them, msgspec
would ignore an unknown field and not name the wrong value, and each takes longer to import than the unused plugin.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from pytest_nixl.core.strict import shorten

T = TypeVar("T")

#: The reader of each class whose objects are written as the text that ``str`` gives.
_TEXTS: dict[type, Callable[[str], Any]] = {}


def written_as_text(read: Callable[[str], Any], *kinds: type) -> None:
    """Let objects of these classes be written as text.

    :param read: returns the object of a text.
    """
    _TEXTS.update(dict.fromkeys(kinds, read))


def to_plain(value: Any) -> Any:
    """Convert dataclasses, tuples and mappings to JSON values. A float that is NaN becomes None."""
    if type(value) in _TEXTS:
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and math.isnan(value) else value


class _MisfitError(ValueError):
    """A value does not fit its type.

    :param words: what is wrong with it.
    """

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words, self.path = words, ""

    def __str__(self) -> str:
        return f"{self.path} {self.words}"

    def within(self, step: str) -> _MisfitError:
        """Return the error for the value that this one is in."""
        self.path = f"{step}{self.path}"
        return self


def from_plain(kind: type[T], data: Any, *, exact: bool = False) -> T:
    """Restore an object from the JSON values of :func:`to_plain`.

    Each restored object that has a method ``check_plain`` is asked by it to refuse values that its types allow.

    :param kind: the class of the object.
    :param exact: whether no field may be missing, even if it has a default.
    :raises ValueError: the values do not fit the class.
    """
    try:
        restored: T = _reader(typing.cast(Any, kind), exact)(data)
        return restored
    except _MisfitError as error:
        raise ValueError(str(error.within(kind.__name__))) from None


@functools.cache
def _reader(kind: Any, exact: bool) -> Callable[[Any], Any]:
    """Return the function that restores a value of a type."""
    if kind is Any:
        return lambda data: data
    if kind in (str, int, float, bool):
        return _scalar(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        reader = _reader(next(argument for argument in arguments if argument is not type(None)), exact)
        optional = type(None) in arguments
        return lambda data: None if data is None and optional else reader(data)
    if origin is tuple:
        count = None if arguments[-1] is ... else len(arguments)
        return _items(tuple(_reader(argument, exact) for argument in arguments if argument is not ...), count)
    if origin in (dict, Mapping):
        return _values(_reader(arguments[1], exact))
    if kind in _TEXTS:
        parse, text = _TEXTS[kind], _scalar(str)
        return lambda data: parse(text(data))
    plain_kind = origin or kind
    if dataclasses.is_dataclass(plain_kind):
        return _object(plain_kind, arguments, exact)
    assert issubclass(plain_kind, Enum), f"{plain_kind.__name__} is not plain data"
    return lambda data: plain_kind(data)


def _scalar(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int and abs(data) < 1 << 1023:  # a larger one is no float
            return float(data)
        raise _MisfitError(f"is {shorten(data)}, not {'text' if kind is str else kind.__name__}")

    return read


def _items(readers: tuple[Callable[[Any], Any], ...], count: int | None) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if not isinstance(data, list) or count not in (None, len(data)):
            raise _MisfitError("is not a list" if count is None else f"is not a list of {count}")
        items = []
        for number, part in enumerate(data):
            try:
                items.append(readers[number if count is not None else 0](part))
            except _MisfitError as error:
                raise error.within(f"[{number}]") from None
        return tuple(items)

    return read


def _values(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _MisfitError("is no object")
        values = {}
        for key, part in data.items():
            try:
                values[key] = reader(part)
            except _MisfitError as error:
                raise error.within(f"[{shorten(key)}]") from None
        return values

    return read


def _object(kind: Any, arguments: tuple[Any, ...], exact: bool) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    if arguments:  # Fact is the only generic dataclass
        hints["value"] = arguments[0] | None
    fields = dataclasses.fields(kind)
    readers = {field.name: _reader(hints[field.name], exact) for field in fields}
    missing = dataclasses.MISSING
    needed = {field.name for field in fields if field.default is missing and field.default_factory is missing}
    checked = hasattr(kind, "check_plain")

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _MisfitError("is no object")
        if exact and data.keys() != readers.keys():
            raise _MisfitError(f"does not have exactly the fields {', '.join(sorted(readers))}")
        if unknown := data.keys() - readers:
            raise _MisfitError(f"has the unknown field {shorten(min(unknown))}")
        if absent := needed - data.keys():
            raise _MisfitError(f"has no field {min(absent)!r}")
        found = {}
        for name, part in data.items():
            try:
                found[name] = readers[name](part)
            except _MisfitError as error:
                raise error.within(f".{name}") from None
        instance = kind(**found)
        if checked:
            instance.check_plain()
        return instance

    return read


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
