# SPDX-License-Identifier: Apache-2.0
"""POSIX: host memory to files, by asynchronous reads and writes of the kernel; and what stood between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from pytest_nixl.model.memory import HOST, MemoryPair

_FILE = re.compile(r"^pytest-nixl: file (\S+)$", re.MULTILINE)


class PosixBackend:
    """The POSIX backend. Its DONE means that the kernel has the bytes; the storage has them after a sync."""

    NAME = "POSIX"
    PLUGIN = "POSIX"
    STORAGE = True
    COMPLETION_IMPLIES_DELIVERY = False
    SHAKES_HANDS = False

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Nothing is needed."""
        return {}

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """NIXL brings what it needs."""
        return {}

    def creating(self) -> AbstractContextManager[None]:
        """NIXL tells nothing when it makes it."""
        return nullcontext()

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the file was opened, and its file system: ``direct/ext4``, ``cached/ext4``, ``memory/tmpfs``."""
        return tuple(_FILE.findall(log)[-1:])

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """It moves host memory only."""
        return ""


BACKEND = PosixBackend()
