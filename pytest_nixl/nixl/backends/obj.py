# SPDX-License-Identifier: Apache-2.0
"""The OBJ backend, which moves bytes between host memory and objects of an S3 server."""

from __future__ import annotations

import re

from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.nixl.backends.storage import StorageBackend

_SERVER = re.compile(r"^pytest-nixl: objects (\S+)$", re.MULTILINE)
#: The parameters that NIXL's plugin takes, although it lists none. Credentials are left to AWS's own variables, because
#: parameters are recorded.
PARAMETERS = (
    "bucket", "ca_bundle", "crtMinLimit", "endpoint_override", "region", "req_checksum", "resp_checksum", "scheme",
    "use_virtual_addressing",
)  # fmt: skip


class ObjBackend(StorageBackend):
    """The OBJ backend. DONE of a WRITE means that the server has stored the object and said so."""

    NAME = "OBJ"
    PLUGIN = "OBJ"
    COMPLETION_IMPLIES_DELIVERY = True

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return how the server is reached: ``http/HOST:PORT`` or ``https/HOST:PORT``."""
        return tuple(_SERVER.findall(log)[-1:])


BACKEND = ObjBackend()
