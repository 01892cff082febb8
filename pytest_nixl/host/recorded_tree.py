# SPDX-License-Identifier: Apache-2.0
"""Where facts are read from: this machine, or a tree of files that was recorded on one.

Every read is remembered, so that what a run of the readers saw can be written as such a tree.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_nixl.core.redaction import hide_all

#: In a recorded tree: what was not read from a file, but asked of a library, a server or the kernel.
ASKED = "pytest-nixl"
#: Each file is read to here at most, in bytes.
MOST = 1 << 20

NOT_RECORDED = "it was not recorded"


class FactsRoot:
    """A tree with the layout of ``/``. Paths are given without its name, and begin with a slash.

    :param folder: a recorded tree; None: this machine.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else os.path.realpath(folder)
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(f"{os.fspath(folder or '')!r} is no folder: expected one that `facts --record` wrote")
        self.files: dict[str, str | None] = {}
        self.listings: dict[str, tuple[str, ...]] = {}
        self.links: dict[str, str] = {}
        self.found: dict[str, bool] = {}
        self.answers: dict[str, Any] = {}

    @property
    def live(self) -> bool:
        """Whether this is the machine itself."""
        return self.folder is None

    def read(self, path: str) -> str | None:
        """Return the text of a file without the white space around it; None where it is not there or closed to us."""
        try:
            with open(self._inside(path), "rb") as file:
                text: str | None = file.read(MOST).decode(errors="replace").strip()
        except OSError:
            text = None
        self.files[path] = text
        return text

    def number(self, path: str) -> int | None:
        """Return the whole number that a file holds; None where it holds none."""
        text = self.read(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted; none where there is no such folder."""
        try:
            names = tuple(sorted(os.listdir(self._inside(path)), key=_natural))
        except OSError:
            return ()
        self.listings[path] = names
        return names

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder of this name."""
        try:
            there = os.path.exists(self._inside(path))
        except OSError:
            there = False
        self.found[path] = there
        return there

    def resolve(self, path: str) -> str | None:
        """Return where a link leads, as a path of this tree; None where there is no such link, or it leads out."""
        try:
            found = os.path.realpath(self._inside(path), strict=True)
        except OSError:
            return None
        if self.folder is not None:
            if not found.startswith(f"{self.folder}/"):
                return None
            found = found[len(self.folder) :]
        self.links[path] = found
        return found

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return what ``question`` answers, as JSON values; in a recorded tree, what it answered there.

        What was not recorded is ``{"why": …}``.
        """
        if self.folder is None:
            self.answers[name] = question()
            return self.answers[name]
        path = Path(self.folder, ASKED, f"{name}.json")
        try:
            self.answers[name] = json.loads(path.read_text())
        except FileNotFoundError:
            return {"why": NOT_RECORDED}
        except ValueError as error:
            raise ValueError(
                f"{path} is not JSON ({error}): expected what `pytest-nixl facts --record` wrote"
            ) from None
        return self.answers[name]

    def write(self, folder: Path, hide: Callable[[str], str]) -> None:
        """Write all that was read as a tree in ``folder``, which must not be there; ``hide`` takes secrets away."""
        folder.mkdir(parents=True)
        for path, names in self.listings.items():
            place = _place(folder, path)
            place.mkdir(parents=True, exist_ok=True)
            for name in names:
                inner = f"{path.rstrip('/')}/{name}"
                if not any(other == inner or other.startswith(f"{inner}/") for other in self._all()):
                    (place / name).touch()
        for path, there in self.found.items():
            if there and path not in self._all():
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
        asked = folder / ASKED
        asked.mkdir()
        for name, answer in self.answers.items():
            (asked / f"{name}.json").write_text(json.dumps(hide_all(answer, hide), indent=1) + "\n")

    def _all(self) -> set[str]:
        return {*(path for path, text in self.files.items() if text is not None), *self.listings, *self.links}

    def _inside(self, path: str) -> str:
        if self.folder is None:
            return path
        place = os.path.realpath(self.folder + path)
        if place != self.folder and not place.startswith(f"{self.folder}/"):
            raise PermissionError(f"{path} leads out of the recorded tree")
        return place


def _place(folder: Path, path: str) -> Path:
    return folder.joinpath(path.lstrip("/"))


def _natural(name: str) -> tuple[Any, ...]:
    """Sort ``eth10`` behind ``eth9``."""
    import re

    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
