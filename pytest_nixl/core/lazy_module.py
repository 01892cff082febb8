# SPDX-License-Identifier: Apache-2.0
"""Modules that are loaded when a name of theirs is first read, although they stand at the top of a file.

The import itself stands under ``TYPE_CHECKING``, where type checkers and import-linter read it::

    if TYPE_CHECKING:
        import docker
    else:
        docker = lazy_module("docker")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class LazyModule:
    """A module by its name. It is loaded when an attribute of it is read, and each time found in ``sys.modules``.

    Private names are refused: pytest asks everything in the module of a plugin for some, and would load it.

    :param name: the full name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return an attribute of the module. :raises ImportError: the module cannot be imported."""
        if attribute.startswith("_"):
            raise AttributeError(f"{attribute} of the lazy module {self._name} cannot be read: it is private")
        return getattr(import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"<lazy module {self._name}>"


def lazy_module(name: str) -> LazyModule:
    """Return a module that is loaded when it is first used. :param name: its full name."""
    return LazyModule(name)


def load(module: ModuleType | LazyModule) -> None:
    """Load a lazy module now. :raises ImportError: it cannot be imported."""
    if isinstance(module, LazyModule):
        import_module(module._name)
