# SPDX-License-Identifier: Apache-2.0
"""``fi_rma_bw`` of libfabric's fabtests: its arguments and its output.

Its MB are 10^6 bytes (``shared.c``, ``show_perf``: bytes per microsecond). For WRITE it runs ``writedata``, only from
the client to the server. Its ``read`` goes both ways at once, and each side reports what it has read itself. ``-U``
(FI_DELIVERY_COMPLETE) requests delivery; without it, a write completes as soon as it has left the sender.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_nixl.checks.raw_tools.line import RawToolLine
from pytest_nixl.model.row_key import RowKey

_MB = 1_000_000
# bytes   iters   total       time     MB/sec    usec/xfer   Mxfers/sec
# 64k     1k      62m        0.05s   1318.27      49.71       0.02
_LINE = re.compile(
    r"^(?P<size>\d+)(?P<unit>[kmg]?)\s+\S+\s+\S+\s+[\d.]+s\s+(?P<mb>[\d.]+)\s+(?P<each>[\d.]+)\s+[\d.]+\s*$",
    re.MULTILINE,
)
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class FiRmaBw:
    """The raw tool of the LIBFABRIC backend."""

    NAME = "fi_rma_bw"
    TAKEN = "Address already in use"
    ENVIRONMENT: Mapping[str, str | None] = {}

    def test(self, op: str) -> str:
        """Return ``writedata`` or ``read``."""
        return {"WRITE": "writedata", "READ": "read"}[op]

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Return the arguments of the target's side, which are the same as the client's."""
        size, window = ["-S", str(key.block), "-I", str(count), "-w", str(warmup)], ["-W", str(key.depth)]
        return ["-p", _provider(transports), "-e", "rdm", "-o", self.test(key.op), *size, *window, "-U", f"-E={port}"]

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """Return the server's arguments, and the server's address."""
        return [*self.server(key, count, warmup, port, transports), address]

    def read(self, text: str, block: int) -> RawToolLine | None:
        """Read the last line of its table."""
        lines = list(_LINE.finditer(text))
        if not lines:
            return None
        last = lines[-1]
        size, count, printed_rate = (
            int(last["size"]) * _FACTOR[last["unit"]],
            float(last["each"]),
            float(last["mb"]) * _MB,
        )
        if count > 1 and abs(size / count * 1e6 - printed_rate) > 0.02 * printed_rate + 0.01 * _MB:
            raise ValueError(
                f"contradictory figures: {size} bytes in {count:g} us are not {last['mb']} MB/s of 10^6 bytes"
            )
        return RawToolLine(0, printed_rate)

    def version(self, text: str) -> str:
        """Return an empty string: it prints no version."""
        return ""

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the provider that it was given, because it uses no other and prints none."""
        return (_provider(asked),)

    def can(self, help: str, memory: str) -> bool:
        """Whether it supports a type of memory: it is used for DRAM only."""
        return memory == "DRAM"


def _provider(transports: Sequence[str]) -> str:
    """Return NIXL's provider; if unknown, ``tcp``, which every host has."""
    return transports[0].partition("/")[0] if transports else "tcp"


TOOL = FiRmaBw()
