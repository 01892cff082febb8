# SPDX-License-Identifier: Apache-2.0
"""In a clone: the plugin also where it is not installed, and pytester for our own tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution


def _plugins() -> list[str]:
    try:
        distribution("pytest-nixl")
    except PackageNotFoundError:
        return ["pytester", "pytest_nixl.plugin"]
    return ["pytester"]


pytest_plugins = _plugins()
