# SPDX-License-Identifier: Apache-2.0
"""What workers do around a fault."""

from __future__ import annotations

from collections.abc import Callable

from pytest_nixl.model import nixl_releases


def error_of(call: Callable[[], object]) -> str:
    """Return the class of the error that NIXL raises in a call; empty for none."""
    try:
        call()
    except Exception as error:
        if not nixl_releases.is_error(type(error).__module__):
            raise
        return type(error).__name__
    return ""
