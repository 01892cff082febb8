# SPDX-License-Identifier: Apache-2.0
"""The raw tools, by the backend of NIXL that each is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pytest_nixl.checks.raw_tools import fabtests, ucx_perftest
from pytest_nixl.checks.raw_tools.line import RawToolLine
from pytest_nixl.model.row_key import RowKey


class RawTool(Protocol):
    """What has to be known of a raw tool."""

    NAME: str
    #: What it says where another process has its port.
    TAKEN: str
    #: Variables for both of its sides.
    ENVIRONMENT: Mapping[str, str | None]

    def test(self, op: str) -> str:
        """Return what it calls the operation."""
        ...

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Return the arguments of the target's side.

        :param count: blocks that the initiator moves, after ``warmup`` of them.
        :param port: where it listens.
        :param transports: what carried NIXL's bytes.
        """
        ...

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Return the arguments of the initiator's side; ``address`` is the target's."""
        ...

    def read(self, text: str, block: int) -> RawToolLine | None:
        """Read the last line of the initiator's table; None: there is none yet.

        :raises ValueError: where its own figures contradict each other: their units are not what they are taken for.
        """
        ...

    def version(self, text: str) -> str:
        """Return the version of the library below it, from its output; empty: it does not say."""
        ...

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """Return what carried the bytes, from its output; empty: it does not say.

        :param asked: the transports of NIXL, as the tool was given them.
        """
        ...

    def can(self, help: str, memory: str) -> bool:
        """Whether it was built for a type of memory, from its help."""
        ...


RAW_TOOLS: dict[str, RawTool] = {"UCX": ucx_perftest.TOOL, "LIBFABRIC": fabtests.TOOL}
