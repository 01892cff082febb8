# SPDX-License-Identifier: Apache-2.0
"""``ucx_perftest`` of UCX: its arguments and its output.

Its MB are 2^20 bytes (``perftest_run.c`` divides by 1024.0 * 1024.0). Its times are microseconds per message.
``ucp_put_bw`` keeps the given number of puts in flight, each until the sender may reuse its memory. At the end it
flushes, and the server acknowledges the last byte, so the time includes all deliveries (``ucp_tests.cc``,
``run_stream_uni``). ``ucp_get`` completes a message when its bytes have arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_nixl.checks.raw_tools.line import RawToolLine
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.nixl.backends.ucx import BACKEND

_MIB = 1 << 20
_MEMORY = {"DRAM": "host", "VRAM": "cuda"}
# [thread 0]  148  183.362  6792.494  6792.494  147.22  147.22  147  147; or with "Final:" or nothing in front
_LINE = re.compile(
    r"^(?:\[thread \d+\]|Final:)?\s*(?P<count>\d+)\s+[\d.]+\s+[\d.]+\s+(?P<overall>[\d.]+)\s+[\d.]+\s+(?P<mb>[\d.]+)"
    r"\s+\d+\s+\d+\s*$",
    re.MULTILINE,
)
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
# ep_cfg[0]: rma(sysv/memory posix/memory); or rma_am if put and get are emulated by active messages
_LANES = re.compile(r"ep_cfg\[\d+\]:.*?\brma(?:_am)?\(([^)]*)\)")


class UcxPerftest:
    """The raw tool of the UCX backend."""

    NAME = "ucx_perftest"
    TAKEN = "Address already in use"
    #: Let UCX print its version and its transports in the output, even if the user's UCX_LOG_FILE names a file.
    ENVIRONMENT: Mapping[str, str | None] = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": None}

    def test(self, op: str) -> str:
        """Return ``ucp_put_bw`` or ``ucp_get``."""
        return {"WRITE": "ucp_put_bw", "READ": "ucp_get"}[op]

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Return the port; the client sends everything else to the server."""
        return ["-p", str(port)]

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Return the arguments for the row's operation, block, depth and memory."""
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
            raise ValueError(f"the time per message is 0: {last[0].strip()!r}")
        value, printed_rate = block / seconds, float(last["mb"]) * _MIB
        # Allow for rounding: it prints 2 decimals of MB/s and 3 of microseconds.
        if abs(value - printed_rate) > 0.02 * value + 0.01 * _MIB + value * 0.0005e-6 / seconds:
            raise ValueError(
                f"contradictory figures: {block} bytes in {last['overall']} us are not {last['mb']} MB/s of 2^20 bytes"
            )
        return RawToolLine(int(last["count"]), value)

    def version(self, text: str) -> str:
        """Return the version that UCX prints."""
        match = _VERSION.search(text)
        return f"UCX {match[1]}" if match else ""

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the transports of the protocol table, if this version prints it; else those of its lanes."""
        if reported := BACKEND.transports(text, key.op, key.block):
            return reported
        lanes = _LANES.findall(text)
        return tuple(dict.fromkeys(lanes[-1].split())) if lanes else ()

    def can(self, help: str, memory: str) -> bool:
        """Whether its help lists a type of memory, such as ``cuda``."""
        return re.search(rf"^\s+{_MEMORY[memory]} - ", help, re.MULTILINE) is not None


TOOL = UcxPerftest()
