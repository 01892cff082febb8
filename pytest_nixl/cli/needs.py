# SPDX-License-Identifier: Apache-2.0
"""What a command needs that a plain installation does not bring."""

from __future__ import annotations

import importlib.util

from pytest_nixl.core.errors import NixlPluginError


def needs(package: str, extra: str) -> None:
    """Refuse a command whose package is not there. :raises NixlPluginError: naming the extra that brings it."""
    if importlib.util.find_spec(package) is None:
        reason = f"this command needs {package}, which is not installed"
        raise NixlPluginError(reason, f"pip install 'pytest-nixl[{extra}]'")
