# SPDX-License-Identifier: Apache-2.0
"""libfabric's own ``fi_rma_bw``, of its fabtests: what it is asked, and what it says.

Its MB are 10^6 bytes (``shared.c``, ``show_perf``: bytes by microseconds). A WRITE is its ``writedata``, from the
client to the server alone; its ``read`` goes both ways at once, and each side tells what it has itself read. Delivery
is asked for (``-U``, FI_DELIVERY_COMPLETE): without, a write is done when it has left.
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
        """``writedata`` or ``read``."""
        return {"WRITE": "writedata", "READ": "read"}[op]

    def server(self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str]) -> list[str]:
        """Both sides are told the same."""
        size, window = ["-S", str(key.block), "-I", str(count), "-w", str(warmup)], ["-W", str(key.depth)]
        return ["-p", _provider(transports), "-e", "rdm", "-o", self.test(key.op), *size, *window, "-U", f"-E={port}"]

    def client(
        self, key: RowKey, count: int, warmup: int, port: int, transports: Sequence[str], address: str
    ) -> list[str]:
        """As the server, and where that is."""
        return [*self.server(key, count, warmup, port, transports), address]

    def read(self, text: str, block: int) -> RawToolLine | None:
        """Read the last line of its table."""
        lines = list(_LINE.finditer(text))
        if not lines:
            return None
        last = lines[-1]
        size, each, said = int(last["size"]) * _FACTOR[last["unit"]], float(last["each"]), float(last["mb"]) * _MB
        if each > 1 and abs(size / each * 1e6 - said) > 0.02 * said + 0.01 * _MB:
            raise ValueError(
                f"it contradicts itself: {size} bytes in {each:g} us are not {last['mb']} MB/s of 10^6 bytes"
            )
        return RawToolLine(0, said)

    def version(self, text: str) -> str:
        """It does not say."""
        return ""

    def transports(self, text: str, key: RowKey, asked: Sequence[str]) -> tuple[str, ...]:
        """It does not say; it was given a provider, and takes no other."""
        return (_provider(asked),)

    def can(self, help: str, memory: str) -> bool:
        """Only main memory is asked of it."""
        return memory == "DRAM"


def _provider(transports: Sequence[str]) -> str:
    """Return NIXL's provider; where that is not known, the one that is everywhere."""
    return transports[0].partition("/")[0] if transports else "tcp"


TOOL = FiRmaBw()
