# SPDX-License-Identifier: Apache-2.0
"""What the backends that move bytes between host memory and storage have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from pytest_nixl.model.memory import HOST, MemoryPair

#: NIXL's plugins whose targets are objects of a server.
OBJECT_PLUGINS = ("OBJ", "AZURE_BLOB")
_SERVER = re.compile(r"^pytest-nixl: objects (\S+)$", re.MULTILINE)


class StorageBackend:
    """A backend of one agent: its plugin needs no variables and no libraries that NIXL does not contain.

    A subclass adds ``NAME``, ``PLUGIN``, ``COMPLETION_IMPLIES_DELIVERY`` and ``transports``. The members are those of
    :class:`~pytest_nixl.nixl.backends.Backend`.
    """

    STORAGE = True
    SHAKES_HANDS = False

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return no variables."""
        return {}

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load nothing: NIXL contains all libraries that the plugin needs."""
        return {}

    def creating(self) -> AbstractContextManager[None]:
        """Return an empty context: NIXL logs nothing and connects to nothing when it creates the backend."""
        return nullcontext()

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Return an empty text: only host memory is moved."""
        return ""


class ObjectBackend(StorageBackend):
    """A backend whose targets are objects of a server."""

    #: DONE of a WRITE means that the server has stored the object and said so.
    COMPLETION_IMPLIES_DELIVERY = True

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the server is reached: ``http/HOST:PORT`` or ``https/HOST:PORT``."""
        return tuple(_SERVER.findall(log)[-1:])
