# SPDX-License-Identifier: Apache-2.0
"""A fact with its source, and the conversion of facts to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pytest_nixl.core.strict import shorten

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and its source.

    :param value: the value; None if it is unknown.
    :param source: the path or the interface that it was read from, such as ``/proc/meminfo`` or ``NVML``.
    :param why: why the value is unknown; otherwise empty.
    """

    value: T | None
    source: str
    why: str = ""


def to_plain(value: Any) -> Any:
    """Convert dataclasses, tuples and mappings to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """Restore an object from the JSON values of :func:`to_plain`.

    :param kind: the class of the object.
    :raises ValueError: the values do not fit the class.
    """
    return typing.cast(T, _restore(kind, data, kind.__name__))


def _restore(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        [some] = [argument for argument in arguments if argument is not type(None)]
        return _restore(some, data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} is not a list")
        return tuple(_restore(arguments[0], part, f"{where}[{number}]") for number, part in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where} is no object")
        return {key: _restore(arguments[1], part, f"{where}[{shorten(key)}]") for key, part in data.items()}
    known = origin or kind
    if dataclasses.is_dataclass(known):
        return _dataclass(known, arguments, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"{where} is {shorten(data)}, not {'text' if kind is str else kind.__name__}")
    return data


def _dataclass(kind: Any, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is no object")
    names = {field.name for field in dataclasses.fields(kind)}
    if set(data) != names:
        raise ValueError(f"{where} does not have exactly the fields {', '.join(sorted(names))}")
    hints = _hints(kind)
    if arguments:  # Fact is the only generic dataclass
        hints = {**hints, "value": arguments[0] | None}
    return kind(**{name: _restore(hints[name], data[name], f"{where}.{name}") for name in names})


_hints = functools.cache(typing.get_type_hints)
