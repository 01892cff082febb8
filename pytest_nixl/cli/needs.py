# SPDX-License-Identifier: Apache-2.0
"""Check for packages that a command needs and that only an extra installs."""

from __future__ import annotations

import importlib.util

from pytest_nixl.core.errors import NixlPluginError


def needs(package: str, extra: str) -> None:
    """Check that a package is installed.

    :param package: the name under which the package is imported.
    :param extra: the extra of pytest-nixl that installs it.
    :raises NixlPluginError: if it is not installed; the remedy installs the extra.
    """
    if importlib.util.find_spec(package) is None:
        reason = f"this command needs {package}, which is not installed"
        raise NixlPluginError(reason, f"pip install 'pytest-nixl[{extra}]'")
