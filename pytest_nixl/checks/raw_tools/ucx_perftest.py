# SPDX-License-Identifier: Apache-2.0
"""UCX's own ``ucx_perftest``: what it is asked, and what it says.

Its MB are 2^20 bytes (``perftest_run.c`` divides by 1024.0 * 1024.0), and its times microseconds for one message.
``ucp_put_bw`` lets the given number of puts be outstanding, each until the sender may use its memory again; at the end
it flushes, and the server acknowledges the last byte, so that all of them are delivered within its time
(``ucp_tests.cc``, ``run_stream_uni``). ``ucp_get`` is done with a message when its bytes are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_nixl.checks.raw_tools.line import RawToolLine
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.nixl.backends.ucx import BACKEND

_MIB = 1 << 20
_MEMORY = {"DRAM": "host", "VRAM": "cuda"}
# [thread 0]  148  183.362  6792.494  6792.494  147.22  147.22  147  147, or "Final:" in front, or nothing
_LINE = re.compile(
    r"^(?:\[thread \d+\]|Final:)?\s*(?P<count>\d+)\s+[\d.]+\s+[\d.]+\s+(?P<overall>[\d.]+)\s+[\d.]+\s+(?P<mb>[\d.]+)"
    r"\s+\d+\s+\d+\s*$",
    re.MULTILINE,
)
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
# ep_cfg[0]: rma(sysv/memory posix/memory), or rma_am where put and get are made of active messages
_LANES = re.compile(r"ep_cfg\[\d+\]:.*?\brma(?:_am)?\(([^)]*)\)")


class UcxPerftest:
    """The raw tool of the UCX backend."""

    NAME = "ucx_perftest"
    TAKEN = "Address already in use"
    #: What makes UCX say its version and which transports it chose. A file of its own for that is left aside.
    ENVIRONMENT: Mapping[str, str | None] = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": None}

    def test(self, op: str) -> str:
        """``ucp_put_bw`` or ``ucp_get``."""
        return {"WRITE": "ucp_put_bw", "READ": "ucp_get"}[op]

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """It is told all else by the client."""
        return ["-p", str(port)]

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Ask for the row's operation, block, depth and memory."""
        memory = f"{_MEMORY[key.memory.initiator]},{_MEMORY[key.memory.target]}"
        return [address, "-p", str(port), "-t", self.test(key.op), "-s", str(key.block), "-n", str(count),
                "-w", str(warmup), "-O", str(key.depth), "-m", memory]  # fmt: skip

    def read(self, text: str, block: int) -> RawToolLine | None:
        """Read the last line of its table."""
        lines = list(_LINE.finditer(text))
        if not lines:
            return None
        last = lines[-1]
        seconds = float(last["overall"]) / 1e6
        if seconds <= 0:
            raise ValueError(f"it took no time for a message: {last[0].strip()!r}")
        value, said = block / seconds, float(last["mb"]) * _MIB
        # Two decimals of small blocks' MB say little, and three of a microsecond, too.
        if abs(value - said) > 0.02 * value + 0.01 * _MIB + value * 0.0005e-6 / seconds:
            raise ValueError(
                f"it contradicts itself: {block} bytes in {last['overall']} us are not {last['mb']} MB/s of 2^20 bytes"
            )
        return RawToolLine(int(last["count"]), value)

    def version(self, text: str) -> str:
        """UCX's own word."""
        found = _VERSION.search(text)
        return f"UCX {found[1]}" if found else ""

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """By the table of protocols where this version prints it, else by its lanes."""
        if reported := BACKEND.transports(text, key.op, key.block):
            return reported
        lanes = _LANES.findall(text)
        return tuple(dict.fromkeys(lanes[-1].split())) if lanes else ()

    def can(self, help: str, memory: str) -> bool:
        """``cuda`` is in its help where it was built with that."""
        return re.search(rf"^\s+{_MEMORY[memory]} - ", help, re.MULTILINE) is not None


TOOL = UcxPerftest()
