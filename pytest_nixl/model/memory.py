# SPDX-License-Identifier: Apache-2.0
"""Memory types and GPUs of a row's two ends, and the operations between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

MEMORIES = ("DRAM", "VRAM")


#: Targets of storage backends: a file, or objects of an object store.
STORED = ("FILE", "OBJ")
#: Memory types of a target.
TARGETS = (*MEMORIES, *STORED)


OPS = ("WRITE", "READ")


@dataclass(frozen=True)
class MemoryPair:
    """The memory types of the two ends of a link: ``DRAM`` or ``VRAM``; storage as a target is ``FILE`` or ``OBJ``."""

    initiator: str
    target: str

    @classmethod
    def parse(cls, text: str) -> MemoryPair:
        """Parse ``INITIATOR:TARGET``. :raises ValueError: if the text is not a pair of memory types."""
        initiator, _, target = text.strip().upper().partition(":")
        if initiator not in MEMORIES or target not in TARGETS:
            raise ValueError(f"{text.strip()!r} is not a pair of memory types")
        return cls(initiator, target)

    @property
    def on_gpu(self) -> bool:
        """Whether an end is GPU memory."""
        return "VRAM" in (self.initiator, self.target)

    @property
    def stored(self) -> bool:
        """Whether the target is storage."""
        return self.target in STORED

    def __str__(self) -> str:
        return f"{self.initiator}:{self.target}"


#: Host memory at both ends.
HOST = MemoryPair("DRAM", "DRAM")


@dataclass(frozen=True)
class DevicePair:
    """The GPUs of the two ends of a link, numbered as CUDA numbers the GPUs visible to each worker."""

    initiator: int
    target: int

    @classmethod
    def parse(cls, text: str) -> DevicePair | None:
        """Parse ``I:T``; return None for ``auto``. :raises ValueError: if the text is neither."""
        if text.strip().lower() == "auto":
            return None
        match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text.strip())
        if match is None:
            raise ValueError(f"{text.strip()!r} is not a pair of GPU numbers")
        return cls(int(match[1]), int(match[2]))

    def of(self, memory: MemoryPair) -> str:
        """Return a pair of memory types as text with the GPU numbers: ``DRAM:VRAM@3``."""
        ends = ((memory.initiator, self.initiator), (memory.target, self.target))
        return ":".join(f"{kind}@{number}" if kind == "VRAM" else kind for kind, number in ends)

    def __str__(self) -> str:
        return f"{self.initiator}:{self.target}"
