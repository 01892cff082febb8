# SPDX-License-Identifier: Apache-2.0
"""What other installed distributions add to pytest-nixl by entry points: found by name, loaded only when it is used."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pytest_nixl.core.errors import NixlPluginError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ExtensionError(NixlPluginError, ValueError):
    """An extension cannot be used. Its text is one sentence, which ends with what to do."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


@dataclass(frozen=True)
class ExtensionPoint:
    """A kind of thing that others may add.

    :param group: the group of entry points.
    :param noun: what messages call one of them, such as ``backend``.
    :param fold: makes the name that users type from the entry point's name.
    """

    group: str
    noun: str
    fold: Callable[[str], str] = str

    def extensions(self, own_names: Collection[str]) -> dict[str, Extension]:
        """Return what is installed, by name, in the order of the names. Nothing is loaded.

        :param own_names: the names that pytest-nixl itself has.
        :raises ExtensionError: if two distributions, or one and pytest-nixl, have the same name.
        """
        extensions: dict[str, Extension] = {}
        for entry in sorted(_entries(self.group, tuple(sys.path)), key=lambda entry: (entry.name, entry.value)):
            extension = Extension(self, self.fold(entry.name), entry)
            other = extensions.get(extension.name)
            if extension.name in own_names or other is not None:
                first = other.owner if other is not None else "pytest-nixl"
                raise ExtensionError(
                    f"{first} and {extension.owner} both have a {self.noun} {extension.name!r}",
                    f"uninstall one of them (pip uninstall {extension.distribution}), or ask for another name",
                )
            extensions[extension.name] = extension
        return extensions


@dataclass(frozen=True)
class Extension:
    """One entry point of another distribution."""

    point: ExtensionPoint
    name: str
    entry: EntryPoint

    @property
    def distribution(self) -> str:
        """The name by which pip knows its distribution."""
        return str(self.entry.dist.metadata["Name"]) if self.entry.dist is not None else "an unnamed distribution"

    @property
    def owner(self) -> str:
        """Its distribution with the version."""
        return f"{self.distribution} {self.entry.dist.version}" if self.entry.dist is not None else self.distribution

    def load(self) -> Any:
        """Import it. :raises ExtensionError: if that fails, whatever it raises."""
        return self.call(lambda: _loaded(self.entry), "cannot be loaded")

    def call(self, function: Callable[[], T], failed: str = "failed") -> T:
        """Call code of the extension.

        :param failed: what to say if it raises anything but a :class:`NixlPluginError`.
        :raises ExtensionError: instead of that; the traceback goes to the log.
        """
        try:
            return function()
        except NixlPluginError:
            raise
        except Exception as error:
            _log.debug("%s of %s %s", self.name, self.owner, failed, exc_info=True)
            description = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.fault(f"{failed} ({description})") from None

    def fault(self, fault: str) -> ExtensionError:
        """Return the error that says what is wrong with it, and what to do."""
        return ExtensionError(
            f"the {self.point.noun} {self.name!r} of {self.owner} ({self.entry.value}) {fault}",
            f"update or repair {self.distribution}, or remove it (pip uninstall {self.distribution})",
        )


def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(_installed(path).select(group=group))


@functools.lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> Any:
    """Return all entry points of what is installed, which takes 25 ms to read.

    :param path: the folders in which Python finds what is installed, so that a change of them is seen.
    """
    return entry_points()


@functools.cache
def _loaded(entry: EntryPoint) -> Any:
    _log.debug("loading %s (group %s)", entry.value, entry.group)
    return entry.load()


class Registry(MutableMapping[str, T]):
    """A table by name: first what pytest-nixl brings, then what other distributions add.

    :param own_entries: what pytest-nixl brings, or a function that returns it when it is first needed.
    :param accept: returns a loaded extension as it is used; raises :meth:`Extension.fault` if it cannot be.

    A look-up of an own name reads no entry point; iterating reads all, and so refuses a name that has two owners.
    """

    def __init__(
        self,
        point: ExtensionPoint,
        own_entries: Mapping[str, T] | Callable[[], Mapping[str, T]],
        accept: Callable[[Extension, Any], T],
    ) -> None:
        self.point = point
        self._source = own_entries
        self._accept = accept

    @functools.cached_property
    def _own(self) -> dict[str, T]:
        return dict(self._source() if callable(self._source) else self._source)

    def extensions(self) -> dict[str, Extension]:
        """Return what others add, by name, not loaded. :raises ExtensionError: if a name has two owners."""
        return self.point.extensions(self._own)

    def __getitem__(self, name: str) -> T:
        if name in self._own:
            return self._own[name]
        extension = self.extensions()[name]
        return self._accept(extension, extension.load())

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self.extensions()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self.extensions()))

    def __len__(self) -> int:
        return len(self._own) + len(self.extensions())

    def __setitem__(self, name: str, value: T) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]


def _ending(name: str) -> str:
    return f".{name.lower().lstrip('.')}"


BACKENDS = ExtensionPoint("pytest_nixl.backends", "backend", str.upper)
WORKER_COMMANDS = ExtensionPoint("pytest_nixl.worker_commands", "command of a worker")
LAUNCHERS = ExtensionPoint("pytest_nixl.launchers", "launcher")
DOCTOR_CHECKS = ExtensionPoint("pytest_nixl.doctor_checks", "check of the doctor")
PROFILES = ExtensionPoint("pytest_nixl.profiles", "directory of profiles")
REPORT_FORMATS = ExtensionPoint("pytest_nixl.report_formats", "report format", _ending)
