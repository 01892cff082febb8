# SPDX-License-Identifier: Apache-2.0
"""Import modules as pytest has them: with ``--import-mode=importlib`` their folders are not on ``sys.path``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from types import ModuleType


def import_file(name: str, file: str) -> ModuleType:
    """Return a module that pytest has from a file.

    A module that can be imported by its name from this file is imported so. Otherwise it is loaded from the file, after
    its packages, so that it can also import from their other modules.

    :param name: its name in pytest, such as ``tests.unit.test_x``.
    :param file: its file.
    """
    with suppress(ModuleNotFoundError, ValueError):  # a parent is not a package, or __main__ has no specification
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None and spec.origin and _same(spec.origin, file):
            return importlib.import_module(name)
    parent, _, _ = name.rpartition(".")
    if parent:
        _import_package(parent, os.path.dirname(file))
    return _load(name, file, None)


def _import_package(name: str, folder: str) -> None:
    """Import the package of a folder, with an ``__init__.py`` or without one."""
    loaded = sys.modules.get(name)
    if loaded is not None and folder in getattr(loaded, "__path__", ()):
        return
    parent, _, _ = name.rpartition(".")
    if parent:
        _import_package(parent, os.path.dirname(folder))
    file = os.path.join(folder, "__init__.py")
    if os.path.exists(file):
        _load(name, file, [folder])
    else:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [folder]


def _load(name: str, file: str, folders: list[str] | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _same(first: str, other: str) -> bool:
    return os.path.exists(first) and os.path.exists(other) and os.path.samefile(first, other)
