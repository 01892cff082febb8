# SPDX-License-Identifier: Apache-2.0
"""The version of pytest-nixl."""

from __future__ import annotations


def own_version() -> str:
    """Return the version of the installed pytest-nixl; ``from a clone`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pytest-nixl")
    except PackageNotFoundError:
        return "from a clone"
