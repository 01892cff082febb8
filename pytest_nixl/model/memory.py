# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

import re
from dataclasses import dataclass

MEMORIES = ("DRAM", "VRAM")


#: What the target may be: a storage backend writes to a file.
TARGETS = (*MEMORIES, "FILE")


DEVICES_FORM = "INITIATOR:TARGET as numbers of GPUs, or auto"


MEMORY_FORM = "INITIATOR:TARGET with DRAM or VRAM, and FILE as the target of a storage backend"


OPS = ("WRITE", "READ")


@dataclass(frozen=True)
class MemoryPair:
    """The memory types of a link's two ends, ``DRAM`` or ``VRAM``; a storage backend's target is ``FILE``."""

    initiator: str
    target: str

    @classmethod
    def parse(cls, text: str) -> MemoryPair:
        """Read ``INITIATOR:TARGET``. :raises ValueError: where it is none."""
        initiator, _, target = text.strip().upper().partition(":")
        if initiator not in MEMORIES or target not in TARGETS:
            raise ValueError(f"{text.strip()!r} is no pair of memory types")
        return cls(initiator, target)

    def __str__(self) -> str:
        return f"{self.initiator}:{self.target}"


#: Host memory on both sides.
HOST = MemoryPair("DRAM", "DRAM")


@dataclass(frozen=True)
class DevicePair:
    """The GPUs of a link's two ends, as CUDA counts those that each worker sees."""

    initiator: int
    target: int

    @classmethod
    def parse(cls, text: str) -> DevicePair | None:
        """Read ``I:T``; None for ``auto``. :raises ValueError: where it is neither."""
        if text.strip().lower() == "auto":
            return None
        match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text.strip())
        if match is None:
            raise ValueError(f"{text.strip()!r} is no pair of GPUs")
        return cls(int(match[1]), int(match[2]))

    def of(self, memory: MemoryPair) -> str:
        """Print a pair of memory types with the GPUs: ``DRAM:VRAM@3``."""
        ends = ((memory.initiator, self.initiator), (memory.target, self.target))
        return ":".join(f"{kind}@{number}" if kind == "VRAM" else kind for kind, number in ends)

    def __str__(self) -> str:
        return f"{self.initiator}:{self.target}"
