# SPDX-License-Identifier: Apache-2.0
"""Objects of a store as targets of OBJ and AZURE_BLOB: one for each block, because NIXL writes whole objects."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from pytest_nixl.core.units import MIB
from pytest_nixl.nixl.worker.azure_blob import BlobClient
from pytest_nixl.nixl.worker.memory import PatternBuffer, chunks
from pytest_nixl.nixl.worker.object_stores import PREFIX, SECONDS, ObjectStoreError, StoreClient
from pytest_nixl.nixl.worker.s3 import ObjectClient

#: For how long the objects of a row are looked for one by one, in seconds.
_LOOKING_SECONDS = SECONDS / 2
#: If nothing has arrived in this time, in seconds, and all objects of a row have at most this many bytes, NIXL cannot
#: use the server.
_DOUBT_SECONDS, _DOUBT_BYTES = 20.0, 8 * MIB


def open_store(plugin: str, parameters: Mapping[str, str]) -> StoreClient:
    """Return a client of the store that a plugin of NIXL uses with these parameters and its variables.

    It connects with its first request.

    :param plugin: ``OBJ`` or ``AZURE_BLOB``.
    :raises ObjectStoreError: the parameters and variables do not name a store and the key to it.
    """
    if plugin == "AZURE_BLOB":
        return BlobClient.of(parameters, os.environ)
    return ObjectClient.of(parameters)


class ObjectBuffer(PatternBuffer):
    """Objects of one size, which are compared through a client that is not NIXL's.

    NIXL names a registered object by a number, which is here its index, from 1.

    :param size: the total size of all objects, in bytes.
    :param client: the client of the store, which is tried first, and closed with the buffer.
    :raises ObjectStoreError: the store cannot be used.
    """

    memory = "OBJ"
    address = device = 0

    def __init__(self, size: int, client: StoreClient) -> None:
        super().__init__(size)
        self._client = client
        self._name = f"{PREFIX}/{secrets.token_hex(8)}"
        self._block = self._count = 0
        self._registered: Any = None
        self._arrived = False
        print(f"pytest-nixl: objects {client.transport}", file=sys.stderr)
        self.probe()

    def probe(self) -> None:
        """Store, read and delete an object, and look for the objects that NIXL moves.

        :raises ObjectStoreError: the store cannot be used, or one of them is missing; with the reason.
        """
        self._client.probe(f"{self._name}/probe")
        until = time.monotonic() + _LOOKING_SECONDS
        for key in map(self._key, range(self._count)):
            if time.monotonic() > until:  # there are many, and the server answers
                break
            self._client.within(SECONDS - _LOOKING_SECONDS, functools.partial(self._client.get, key, 0, 1))

    def name_fault(self) -> None:
        """Do nothing if the store has no fault and NIXL has no known reason to fail.

        :raises ObjectStoreError: as :meth:`probe`; or the store answers, with what may keep NIXL from it.
        """
        self.probe()
        if (doubt := self._client.doubt()) is not None:
            raise doubt

    def arrived(self) -> None:
        """Note that NIXL has moved bytes, so that it can use the server."""
        self._arrived = True

    def stalled(self, seconds: float) -> None:
        """Ask the server why no transfer has ended, and raise an error if it has a fault.

        :param seconds: how long NIXL has been waiting.
        :raises ObjectStoreError: as :meth:`name_fault`.
        """
        self._client.probe(f"{self._name}/probe")
        small = self._block * self._count <= _DOUBT_BYTES
        if seconds >= _DOUBT_SECONDS and small and not self._arrived and (doubt := self._client.doubt()) is not None:
            raise doubt

    def prepare(self, agent: Any, block: int, count: int) -> None:
        """Divide the space into objects, and register them.

        :param agent: the raw agent.
        :param block: the size of each object, in bytes.
        :param count: the number of objects.
        """
        self.release(agent)
        self._block, self._count = block, count
        self._registered = agent.register_memory([(0, block, i + 1, self._key(i)) for i in range(count)], self.memory)

    def release(self, agent: Any) -> None:
        """Deregister the objects, and delete them."""
        if self._registered is not None:
            agent.deregister_memory(self._registered)
            self._registered = None
        for index in range(self._count):
            self._client.delete(self._key(index))
        self._block = self._count = 0

    def sync(self) -> None:
        """Return at once: the server has stored an object when it answers."""
        return

    def free(self) -> None:
        """Delete the objects that remain."""
        with contextlib.suppress(ObjectStoreError):
            for index in range(self._count):
                self._client.delete(self._key(index))
        self._client.close()

    def fill(self, seed: int, offset: int, size: int, *, inverted: bool = False) -> None:
        self._check(offset, size)
        content = bytearray(size)
        for start, chunk in chunks(seed, size):
            content[start : start + len(chunk)] = (~chunk if inverted else chunk).data
        self._put(offset, memoryview(content))

    def _key(self, index: int) -> str:
        return f"{self._name}/{index}"

    def _get(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            index, start = divmod(offset, self._block)
            length = min(size, self._block - start)
            parts.append(self._client.get(self._key(index), start, length))
            offset, size = offset + length, size - length
        return b"".join(parts)

    def _put(self, offset: int, data: memoryview) -> None:
        if not self._block or offset % self._block or len(data) % self._block:
            raise ObjectStoreError("only whole objects can be written", "write at multiples of the block size")
        for start in range(0, len(data), self._block):
            self._client.put(self._key((offset + start) // self._block), bytes(data[start : start + self._block]))
