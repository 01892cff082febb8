# SPDX-License-Identifier: Apache-2.0
"""The installed pytest-nixl: its version, and the command that installs what an extra contains."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, such as ``pip install 'scipy>=1.11.1'``.

    It names these packages, because pytest-nixl itself may be on no index, but installed from a file or a folder.
    """
    try:
        required = importlib.metadata.requires("pytest-nixl") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    marker = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    parts = [text.partition(";") for text in required]
    packages = [package.strip() for package, _, condition in parts if marker.search(condition)]
    return f"pip install {shlex.join(packages) or shlex.quote(f'pytest-nixl[{extra}]')}"


def own_version() -> str:
    """Return the version of the installed pytest-nixl; ``from a clone`` if it is not installed."""
    try:
        return importlib.metadata.version("pytest-nixl")
    except importlib.metadata.PackageNotFoundError:
        return "from a clone"
