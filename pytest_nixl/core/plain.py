# SPDX-License-Identifier: Apache-2.0
"""Plain data, as JSON has it, from dataclasses and back: by the types of their fields, and nothing else.

No value is converted in silence: a number is not a text, and ``true`` is not a number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, cast

from pytest_nixl.core.strict import TEXTS, StrictError, check, form_of

T = TypeVar("T")


def written_as_text(read: Callable[[str], Any], *kinds: type) -> None:
    """Let objects of these classes be written as text.

    :param read: returns the object of a text.
    """
    TEXTS.update(dict.fromkeys(kinds, read))


def to_plain(value: Any) -> Any:
    """Convert dataclasses, tuples and mappings to JSON values. A float that is NaN becomes None."""
    if type(value) in TEXTS:
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


def from_plain(kind: type[T], data: Any, *, exact: bool = False) -> T:
    """Restore an object from the JSON values of :func:`to_plain`.

    Each restored object that has a method ``check_plain`` is asked by it to refuse values that its types allow.

    :param kind: the class of the object.
    :param exact: whether no field may be missing, even if it has a default.
    :raises ValueError: the values do not fit the class.
    """
    try:
        restored: T = check(form_of(cast(Any, kind), sys.maxsize, exact=exact), data, kind.__name__)
    except StrictError as error:
        raise ValueError(str(error)) from None
    return restored


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
