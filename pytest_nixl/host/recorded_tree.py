# SPDX-License-Identifier: Apache-2.0
"""Read facts from this machine, or from a tree of files that was recorded on a machine.

Every read is remembered, so that it can be written as such a tree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_nixl.core.redaction import hide_all
from pytest_nixl.core.strict import loads
from pytest_nixl.core.untrusted_file import read_regular

#: The folder of a recorded tree for answers of libraries, servers and the kernel.
ANSWERS_FOLDER = "pytest-nixl"
#: At most this many bytes of a file are read.
MOST = 1 << 20
#: The most bytes of a recorded answer.
_LARGEST_ANSWER = 64 << 20

NOT_RECORDED = "it was not recorded"

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

    @classmethod
    def read(cls, value: T | None, source: str, reason: str) -> Fact[T]:
        """Return a fact. The reason counts only if there is no value."""
        return cls(value, source, "" if value is not None else reason)


class FactsRoot:
    """A file tree with the layout of ``/``. Paths begin with a slash and do not include the tree's own folder.

    :param folder: the folder of a recorded tree; None for this machine.
    :raises ValueError: ``folder`` is not a folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else os.path.realpath(folder)
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(
                f"{os.fspath(folder or '')!r} is not a folder: expected one that `pytest-nixl facts --record` wrote"
            )
        self.files: dict[str, str | None] = {}
        self.listings: dict[str, tuple[str, ...]] = {}
        self.links: dict[str, str] = {}
        self.looked_up: dict[str, bool] = {}
        self.answers: dict[str, Any] = {}
        #: The real path of each folder of a recorded tree, which must not change meanwhile: to resolve each of a tree's
        #: thousand paths takes a second.
        self._resolved: dict[str, str] = {}

    @property
    def live(self) -> bool:
        """Whether this is the machine itself, not a recorded tree."""
        return self.folder is None

    def read(self, path: str) -> str | None:
        """Return the text of a file without surrounding white space; None if it cannot be read."""
        try:
            if self.live:
                with open(self._inside(path), "rb") as file:
                    data = file.read(MOST)
            else:
                data = read_regular(Path(self._inside(path)), MOST, "a file of a recorded tree")
            text: str | None = data.decode(errors="replace").strip()
        except OSError:
            text = None
        self.files[path] = text
        return text

    def number(self, path: str) -> int | None:
        """Return the integer in a file; None if the file does not contain one."""
        text = self.read(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; empty if there is no such folder."""
        try:
            names = tuple(sorted(os.listdir(self._inside(path)), key=_natural))
        except OSError:
            return ()
        self.listings[path] = names
        return names

    def exists(self, path: str) -> bool:
        """Return whether a file or a folder exists."""
        try:
            exists = os.path.exists(self._inside(path))
        except OSError:
            exists = False
        self.looked_up[path] = exists
        return exists

    def resolve(self, path: str) -> str | None:
        """Return the target of a link as a path of this tree; None if it does not exist or lies outside the tree."""
        try:
            resolved = os.path.realpath(self._inside(path), strict=True)
        except OSError:
            return None
        if self.folder is not None:
            if not resolved.startswith(f"{self.folder}/"):
                return None
            resolved = resolved[len(self.folder) :]
        self.links[path] = resolved
        return resolved

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return an answer as JSON values.

        :param name: the name under which a recorded tree keeps the answer.
        :param question: returns the answer; it is not called for a recorded tree.
        :return: the answer; ``{"why": …}`` if the recorded tree does not contain it.
        :raises ValueError: the recorded file is not JSON, or lies outside the tree.
        """
        if self.folder is None:
            self.answers[name] = question()
            return self.answers[name]
        path, form = f"/{ANSWERS_FOLDER}/{name}.json", "a file that `pytest-nixl facts --record` wrote"
        try:
            content = read_regular(Path(self._inside(path)), _LARGEST_ANSWER, form)
            self.answers[name] = loads(content, most=_LARGEST_ANSWER)
        except FileNotFoundError:
            return {"why": NOT_RECORDED}
        except OSError as error:
            raise ValueError(f"{self.folder}{path} cannot be read ({error}): expected {form}") from None
        except ValueError as error:
            raise ValueError(f"{self.folder}{path} is not JSON ({error}): expected {form}") from None
        return self.answers[name]

    def write(self, folder: Path, hide: Callable[[str], str]) -> None:
        """Write everything that was read as a recorded tree.

        :param folder: the folder to create.
        :param hide: removes secrets from a text.
        :raises FileExistsError: the folder exists.
        """
        folder.mkdir(parents=True)
        for path, names in self.listings.items():
            place = _place(folder, path)
            place.mkdir(parents=True, exist_ok=True)
            for name in names:
                inner = f"{path.rstrip('/')}/{name}"
                if not any(other == inner or other.startswith(f"{inner}/") for other in self._all()):
                    (place / name).touch()
        for path, exists in self.looked_up.items():
            if exists and path not in self._all():
                place = _place(folder, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        for path, text in self.files.items():
            if text is not None:
                place = _place(folder, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(hide(text) + "\n")
        for path, target in self.links.items():
            if path != target:
                place = _place(folder, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                _place(folder, target).mkdir(parents=True, exist_ok=True)
                if place.is_dir() and not place.is_symlink():
                    shutil.rmtree(place)
                place.symlink_to(os.path.relpath(_place(folder, target), place.parent))
        answers_folder = folder / ANSWERS_FOLDER
        answers_folder.mkdir()
        for name, answer in self.answers.items():
            (answers_folder / f"{name}.json").write_text(json.dumps(hide_all(answer, hide), indent=1) + "\n")

    def _all(self) -> set[str]:
        return {*(path for path, text in self.files.items() if text is not None), *self.listings, *self.links}

    def _inside(self, path: str) -> str:
        if self.folder is None:
            return path
        above, name = os.path.split(self.folder + path)
        if above not in self._resolved:
            self._resolved[above] = os.path.realpath(above, strict=True)  # otherwise a loop of links may lead outside
        place = os.path.join(self._resolved[above], name)
        if name in ("", ".", "..") or os.path.islink(place):
            place = os.path.realpath(place, strict=True)
        if place != self.folder and not place.startswith(f"{self.folder}/"):
            raise PermissionError(f"{path} lies outside the recorded tree")
        return place


def _place(folder: Path, path: str) -> Path:
    return folder.joinpath(path.lstrip("/"))


def _natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that places ``eth10`` after ``eth9``."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
