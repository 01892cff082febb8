# SPDX-License-Identifier: Apache-2.0
"""NIXL's backends: one module each, found by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pytest_nixl.backends import ucx

__all__ = ["BACKENDS", "Backend"]


class Backend(Protocol):
    """What the plugin has to know of a backend of NIXL."""

    NAME: str
    #: Whether a transfer's DONE means that its bytes are in place. Where not, every transfer carries a notification.
    DONE_IS_DELIVERED: bool

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a worker needs besides those ``given``."""
        ...

    def transports(self, log: str, op: str, block: int) -> tuple[str, ...]:
        """Return what carried ``op`` of ``block`` bytes, such as ``cma/memory`` or ``tcp/eth0``, read from ``log``.

        ``log`` is all that the initiator's worker wrote to stdout and stderr. Empty: the log does not tell.
        """
        ...


BACKENDS: dict[str, Backend] = {ucx.BACKEND.NAME: ucx.BACKEND}
