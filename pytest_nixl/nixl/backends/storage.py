# SPDX-License-Identifier: Apache-2.0
"""The backends that move bytes between host memory and storage: what they have in common, and those of objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from pytest_nixl.model.memory import HOST, MemoryPair

#: NIXL's plugins whose targets are objects of a server, with the parameters that each takes, although it lists none.
#: Credentials and the account's URL are left to the variables of AWS and Azure: parameters are recorded, and a row key
#: holds no URL.
OBJECT_PARAMETERS = {
    "OBJ": (
        "bucket",
        "ca_bundle",
        "crtMinLimit",
        "endpoint_override",
        "region",
        "req_checksum",
        "resp_checksum",
        "scheme",
        "use_virtual_addressing",
    ),
    "AZURE_BLOB": ("ca_bundle", "container_name"),
}
OBJECT_PLUGINS = tuple(OBJECT_PARAMETERS)
_FILE = re.compile(r"^pytest-nixl: file (\S+)$", re.MULTILINE)
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
    """A backend whose targets are objects of a server: of S3 (OBJ), or of an Azure storage account (AZURE_BLOB).

    :param name: its name, which is also that of its plugin.
    """

    #: DONE of a WRITE means that the server has stored the object and said so.
    COMPLETION_IMPLIES_DELIVERY = True

    def __init__(self, name: str) -> None:
        self.NAME = self.PLUGIN = name

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the server is reached: ``http/HOST:PORT`` or ``https/HOST:PORT``."""
        return tuple(_SERVER.findall(log)[-1:])


class PosixBackend(StorageBackend):
    """The POSIX backend. DONE means that the kernel has the bytes; storage has them only after a sync."""

    NAME = "POSIX"
    PLUGIN = "POSIX"
    COMPLETION_IMPLIES_DELIVERY = False

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the file was opened, and its file system: ``direct/ext4``, ``cached/ext4``, ``memory/tmpfs``."""
        return tuple(_FILE.findall(log)[-1:])
