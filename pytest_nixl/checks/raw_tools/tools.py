# SPDX-License-Identifier: Apache-2.0
"""The raw tool for each backend of NIXL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pytest_nixl.checks.raw_tools import fabtests, ucx_perftest
from pytest_nixl.checks.raw_tools.line import RawToolLine
from pytest_nixl.model.row_key import RowKey


class RawTool(Protocol):
    """Arguments and output of a raw tool."""

    NAME: str
    #: Its message if another process uses its port.
    TAKEN: str
    #: Environment variables for both sides; None unsets a variable.
    ENVIRONMENT: Mapping[str, str | None]

    def test(self, op: str) -> str:
        """Return the tool's name of an operation."""
        ...

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Return the arguments of the target's side.

        :param key: the row to measure.
        :param count: number of blocks that the initiator moves.
        :param warmup: number of blocks before them.
        :param port: port on which it listens.
        :param transports: transports that carried NIXL's bytes.
        """
        ...

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Return the arguments of the initiator's side; ``address`` is that of the target."""
        ...

    def read(self, text: str, block: int) -> RawToolLine | None:
        """Read the last line of the initiator's table; return None if there is none yet.

        :param text: output of the initiator's side.
        :param block: block size in bytes.
        :raises ValueError: if the figures contradict each other, so that their units are not the expected ones.
        """
        ...

    def version(self, text: str) -> str:
        """Return the version of the tool's library from its output; empty if it prints none."""
        ...

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the transports that carried the bytes, from its output; empty if it prints none.

        :param asked: NIXL's transports, which the tool was given.
        """
        ...

    def can(self, help: str, memory: str) -> bool:
        """Whether the tool supports a type of memory, according to its help."""
        ...


RAW_TOOLS: dict[str, RawTool] = {"UCX": ucx_perftest.TOOL, "LIBFABRIC": fabtests.TOOL}
