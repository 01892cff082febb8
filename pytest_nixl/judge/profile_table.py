# SPDX-License-Identifier: Apache-2.0
"""A table of a profile's TOML file, and the values in it. What is not clear is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from difflib import get_close_matches
from typing import Any, TypeVar

from pytest_nixl.core import units
from pytest_nixl.model.memory import OPS

T = TypeVar("T")

#: The most tables of a kind in a profile. The checks of each with each other take a second or two for so many.
MOST_TABLES = 1000
SOURCE_FORM = "a text that says where each figure is from"


@dataclass(frozen=True)
class ProfileTable:
    """One table of a profile's file. What it holds is not trusted: every fault is one sentence.

    :param where: its name in error messages.
    :param form: what is expected at its place.
    """

    where: str
    data: Mapping[str, Any]
    form: str

    def fault(self, key: str, fault: str, form: str) -> ValueError:
        """Return the error for the value at ``key``."""
        return ValueError(f"{self.where}, {key}: {fault}: expected {form}")

    def allow(self, *keys: str) -> None:
        """Refuse every other key."""
        for key in self.data:
            if key not in keys:
                near = get_close_matches(key.lower(), keys, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise self.fault(key, f"unknown key{hint}", ", ".join(keys))

    def table(self, key: str, *, mandatory: bool = False) -> ProfileTable:
        """Return the table at ``key``; an empty one if there is none."""
        if key not in self.data and mandatory:
            raise self.fault(key, "missing", self.form)
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, f"{_kind(value)}, not a table", f"[{key}]")
        return ProfileTable(f"{self.where}, {key}", value, self.form)

    def tables(self, key: str) -> list[ProfileTable]:
        """Return the list of tables at ``key``."""
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fault(key, f"{_kind(value)}, not a list of tables", f"[[{key}]], with two brackets")
        if len(value) > MOST_TABLES:  # each is compared with each other
            raise self.fault(key, f"{len(value):,} tables", f"at most {MOST_TABLES:,}")
        return [ProfileTable(f"{self.where}, {key} #{number}", item, self.form) for number, item in enumerate(value, 1)]

    def text(self, key: str, form: str, read: Callable[[str], T], *, mandatory: bool = False) -> T | None:
        """Read the text at ``key``; None: there is none."""
        if key in self.data:
            return self._read(key, self.data[key], form, read)
        if mandatory:
            raise self.fault(key, "missing", form)
        return None

    def texts(self, key: str, form: str, read: Callable[[str], T]) -> tuple[T, ...] | None:
        """Read the list of texts at ``key``; None: there is none."""
        form = f"a list of {form}"
        return self._list(key, form, lambda item: self._read(key, item, form, read))

    def count(self, key: str, *, mandatory: bool = False) -> int | None:
        """Read the positive integer at ``key``; None: there is none."""
        form = "a positive integer"
        if key in self.data:
            return self._count(key, self.data[key], form)
        if mandatory:
            raise self.fault(key, "missing", form)
        return None

    def counts(self, key: str) -> tuple[int, ...] | None:
        """Read the list of positive integers at ``key``; None: there is none."""
        form = "a list of positive integers"
        return self._list(key, form, lambda item: self._count(key, item, form))

    def flag(self, key: str, *, default: bool) -> bool:
        """Read true or false at ``key``."""
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, f"{_kind(value)}, not a boolean", "true or false, without quotes")
        return value

    def day(self, key: str) -> date:
        """Read the mandatory day at ``key``."""
        form = "a day without quotes, such as 2030-01-31"
        if key not in self.data:
            raise self.fault(key, "missing", form)
        value = self.data[key]
        if not isinstance(value, date) or isinstance(value, datetime):
            raise self.fault(key, f"{_kind(value)}, not a day", form)
        return value

    def _count(self, key: str, value: object, form: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(key, f"{_kind(value)}, not an integer", form)
        if value < 1:
            raise self.fault(key, f"{value} is not above zero", form)
        return value

    def _list(self, key: str, form: str, read: Callable[[object], T]) -> tuple[T, ...] | None:
        if key not in self.data:
            return None
        value = self.data[key]
        if not isinstance(value, list):
            raise self.fault(key, f"{_kind(value)}, not a list", form)
        if not value:
            raise self.fault(key, "an empty list", form)
        items = tuple(read(item) for item in value)
        for item in items:
            if items.count(item) > 1:
                raise self.fault(key, f"{item} is named twice", form)
        return items

    def _read(self, key: str, value: object, form: str, read: Callable[[str], T]) -> T:
        if not isinstance(value, str):
            raise self.fault(key, f"{_kind(value)}, not a text", form)
        try:
            return read(value)
        except ValueError as error:
            message = str(error)
            if ": expected " in message:
                message, _, form = message.partition(": expected ")
            raise self.fault(key, message, form) from None


def _kind(value: object) -> str:
    """Return TOML's name for the type of a value. Show a number itself, because usually its unit is missing."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the bare number {value}"
    names = ((str, "a text"), (list, "a list"), (dict, "a table"))
    return next((name for kind, name in names if isinstance(value, kind)), "a date or time")


def one_line(text: str) -> str:
    """Read one line of text. :raises ValueError: if the text is something else."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of text")
    return text.strip()


def filled(text: str) -> str:
    """Read a text that is not empty. :raises ValueError: if the text is something else."""
    if not text.strip():
        raise ValueError("empty")
    return text.strip()


def check_name(text: str) -> str:
    """Read the id of a check. :raises ValueError: if the text is something else."""
    if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", text):
        raise ValueError(f"{text!r} is not a check id (lower-case letters, digits and single dashes)")
    return text


def backend_name(text: str) -> str:
    """Read the name of a backend. :raises ValueError: if the text is something else."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is not a backend name")
    return text.upper()


def operation(text: str) -> str:
    """Read an operation. :raises ValueError: if the text is something else."""
    if text.upper() not in OPS:
        raise ValueError(f"{text!r} is not an operation")
    return text.upper()


def size_range(text: str) -> tuple[int, int]:
    """Read one size, or an inclusive range ``A..B``: the least and the largest size in bytes.

    :raises ValueError: if the text is something else.
    """
    first, dots, last = text.partition("..")
    try:
        sizes = units.parse_size(first), units.parse_size(last if dots else first)
    except ValueError as error:
        fault = str(error).partition(": expected ")[0]
        raise ValueError(f"{text!r} is neither a size nor a range, because {fault}" if dots else fault) from None
    if sizes[0] > sizes[1]:
        raise ValueError(f"{text!r} is a reversed range, because {first.strip()} is more than {last.strip()}")
    return sizes


def one_of(first: str, second: str) -> Callable[[str], str]:
    """Return a function that reads one of two texts. It raises ValueError if the text is something else."""

    def parse(text: str) -> str:
        if text not in (first, second):
            raise ValueError(f"{text!r} is neither {first} nor {second}")
        return text

    return parse


def transport_name(text: str) -> str:
    """Read the name of a transport. :raises ValueError: if the text is something else."""
    if not re.fullmatch(r"[A-Za-z0-9_.:+-]+", text):
        raise ValueError(f"{text!r} is not a transport name")
    return text


def positive(read: Callable[[str], float]) -> Callable[[str], float]:
    """Return a function that reads a number as ``read`` does, and refuses one that is not above zero."""

    def parse(text: str) -> float:
        value = read(text)
        if value <= 0:
            raise ValueError(f"{text!r} is not above zero")
        return value

    return parse


def share(text: str) -> float:
    """Read a share above 0 and at most 1. :raises ValueError: if the text is something else."""
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip()) or not 0 < float(text) <= 1:
        raise ValueError(f"{text!r} is not a share")
    return float(text)
