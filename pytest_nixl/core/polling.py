# SPDX-License-Identifier: Apache-2.0
"""Wait for a condition by polling it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pytest_nixl.core.errors import LateError

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], description: str, *, seconds: float, remedy: Callable[[], str] = lambda: ""
) -> T:
    """Call ``condition`` every 10 ms and return its first true value.

    :param description: completes the message "waited N s for …".
    :param seconds: timeout in seconds.
    :param remedy: returns the remedy; called after the timeout, so that it can quote output of that time.
    :raises LateError: after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise LateError(f"waited {seconds:g} s for {description}", remedy())
        time.sleep(0.01)
    return value
