# SPDX-License-Identifier: Apache-2.0
"""Container images made of this Python, of installed packages and of programs of this host: CI can pull none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pytest_nixl.processes.supervisor import supervisor

#: The real path of this Python, which it also has in images.
PYTHON = os.path.realpath(sys.executable)
_LIBRARY = re.compile(r"(/\S+) \(0x")
_LEFT_OUT = ("/site-packages", "/config-", "/test", "/idlelib", "/ensurepip", "/__pycache__")
#: Files of an image by their names in it.
Files = Mapping[str, Path]


def import_image(engine: Any, image: str, files: Files, changes: Sequence[str]) -> None:
    """Make an image of files, and of the shared libraries that they need.

    :param engine: the client of the container engine.
    :param image: ``REPOSITORY:TAG``.
    :param changes: instructions of a Dockerfile, such as ``ENV NAME=VALUE``.
    """
    repository, tag = image.rsplit(":", 1)
    linked = [str(path) for path in files.values() if _is_linked(path)]
    output = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    needed = {os.path.normpath(library) for library in _LIBRARY.findall(output) if not library.startswith(sys.prefix)}
    archive = supervisor().directory / "image.tar"
    with tarfile.open(archive, "w") as tar:
        temporary = tarfile.TarInfo("/tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(temporary)
        for name, path in {**files, **{library: Path(os.path.realpath(library)) for library in needed}}.items():
            tar.add(path, name, recursive=False)
    answer = engine.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=list(changes))
    archive.unlink()
    assert "sha256" in str(json.loads(answer.splitlines()[-1])), answer


def _is_linked(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def python() -> Iterator[tuple[str, Path]]:
    """Yield the interpreter and each file of the standard library. Both keep their paths."""
    yield PYTHON, Path(PYTHON)
    for top in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}):
        root = Path(sys.base_prefix, Path(top).relative_to(sys.prefix)) if top.startswith(sys.prefix) else Path(top)
        for path in sorted(root.rglob("*")):
            inner = f"/{path.relative_to(root)}"
            if path.is_file() and not any(f"{part}/" in inner or inner.startswith(part) for part in _LEFT_OUT):
                yield from _with_bytecode(str(path), path)


def with_dependencies(*names: str) -> list[str]:
    """Return the names of installed packages, and of those that they need.

    :param names: requirements, such as ``moto[s3]``.
    """
    waiting, visited = [Requirement(name) for name in names], list[str]()
    while waiting:
        expected = waiting.pop()
        name = canonicalize_name(expected.name)
        if name not in visited:
            visited.append(name)
            for needed in map(Requirement, importlib.metadata.distribution(name).requires or ()):
                extras = ({"extra": extra} for extra in ("", *expected.extras))
                if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                    waiting.append(needed)
    return visited


def packages(names: Iterable[str], site: str) -> Iterator[tuple[str, Path]]:
    """Yield each file of installed packages.

    :param site: the folder in the image.
    """
    for name in names:
        for file in importlib.metadata.distribution(name).files or ():
            path = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
                yield from _with_bytecode(f"{site}/{file}", path)


def _with_bytecode(name: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield a file, and what Python has compiled of it: else each start of Python in a container compiles it again."""
    yield name, path
    if path.suffix == ".py" and (compiled := Path(cache_from_source(str(path)))).is_file():
        yield f"{os.path.dirname(name)}/__pycache__/{compiled.name}", compiled
