# SPDX-License-Identifier: Apache-2.0
"""Waiting for something that nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pytest_nixl.core.errors import LateError

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, *, seconds: float, remedy: Callable[[], str] = lambda: "") -> T:
    """Return the first true value of ``condition``, asked every 10 ms.

    :param what: completes the sentence "waited N s for …".
    :param remedy: asked when the wait is over, so that it can quote what was said meanwhile.
    :raises LateError: when ``seconds`` have passed.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise LateError(f"waited {seconds:g} s for {what}", remedy())
        time.sleep(0.01)
    return value
