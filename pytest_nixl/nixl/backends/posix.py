# SPDX-License-Identifier: Apache-2.0
"""The POSIX backend, which moves bytes between host memory and files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from pytest_nixl.model.memory import HOST, MemoryPair

_FILE = re.compile(r"^pytest-nixl: file (\S+)$", re.MULTILINE)


class PosixBackend:
    """The POSIX backend. DONE means that the kernel has the bytes; storage has them only after a sync."""

    NAME = "POSIX"
    PLUGIN = "POSIX"
    STORAGE = True
    COMPLETION_IMPLIES_DELIVERY = False
    SHAKES_HANDS = False

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return no variables: POSIX needs none."""
        return {}

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load nothing: NIXL contains all libraries that POSIX needs."""
        return {}

    def creating(self) -> AbstractContextManager[None]:
        """Return an empty context: NIXL logs nothing when it creates the backend."""
        return nullcontext()

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the file was opened, and its file system: ``direct/ext4``, ``cached/ext4``, ``memory/tmpfs``."""
        return tuple(_FILE.findall(log)[-1:])

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Return an empty text: POSIX moves only host memory."""
        return ""


BACKEND = PosixBackend()
