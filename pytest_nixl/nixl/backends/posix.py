# SPDX-License-Identifier: Apache-2.0
"""The POSIX backend, which moves bytes between host memory and files."""

from __future__ import annotations

import re

from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.nixl.backends.storage import StorageBackend

_FILE = re.compile(r"^pytest-nixl: file (\S+)$", re.MULTILINE)


class PosixBackend(StorageBackend):
    """The POSIX backend. DONE means that the kernel has the bytes; storage has them only after a sync."""

    NAME = "POSIX"
    PLUGIN = "POSIX"
    COMPLETION_IMPLIES_DELIVERY = False

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the file was opened, and its file system: ``direct/ext4``, ``cached/ext4``, ``memory/tmpfs``."""
        return tuple(_FILE.findall(log)[-1:])


BACKEND = PosixBackend()
