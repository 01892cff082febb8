# SPDX-License-Identifier: Apache-2.0
"""UCX: which transport it used, as its own protocol report tells."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.nixl.backends.libfabric import Finder, LibraryError, find_plugin, needed, open_library

#: The id of the finding that UCX took memory of a GPU for host memory.
VRAM_AS_HOST = "VRAM-AS-HOST-MEMORY"
PLUGIN = "libplugin_UCX.so"
_OPERATIONS = {"WRITE": "remote memory write by ucp_put", "READ": "remote memory read by ucp_get"}

# What a heading tells of the memory at the initiator and at the target (proto_debug.c of UCX): "from host memory to
# cuda/GPU0", "into cuda/dev[0] from host". The name before the slash is one of ucs_memory_type_names.
_MEMORY = re.compile(r" (?:from|into) (?P<here>[a-z-]+)(?: memory|/\S+)? (?:to|from) (?P<there>[a-z-]+)")
# What NIXL's plugin says (ucx_utils.cpp, since 0.7) when it refuses to register such memory.
_REFUSED = re.compile(r"(\S+ memory is detected as host by UCX)")

_RANGE = re.compile(r"([0-9]{1,18})([KMG]?)(?:\.\.(?:([0-9]{1,18})([KMG]?)|inf))?")
_TRANSPORT = re.compile(r"\b[a-z][a-z0-9_]*/[\w.:-]+")
_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class _ProtocolTable:
    """One table of the report: to whom (``self``, ``intra-node``, ``inter-node``), and transports by size range.

    :param memory: what UCX takes the initiator's and the target's memory for, such as ``host`` and ``cuda``; None: it
        does not say.
    """

    scope: str
    memory: tuple[str, str] | None
    ranges: tuple[tuple[float, float, tuple[str, ...]], ...]

    def suits(self, memory: MemoryPair) -> bool:
        """Whether it is about such memory: everything but the host's is a GPU's."""
        wanted = (memory.initiator == "VRAM", memory.target == "VRAM")
        return self.memory is None or tuple(kind != "host" for kind in self.memory) == wanted


class UcxBackend:
    """The UCX backend. Its DONE comes after a flush of the endpoint, so the bytes are in place."""

    NAME = "UCX"
    PLUGIN = "UCX"
    STORAGE = False
    COMPLETION_IMPLIES_DELIVERY = True
    SHAKES_HANDS = False

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return what makes UCX report its choice of transport."""
        return {"UCX_PROTO_INFO": "y"}

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """NIXL brings its own UCX; before 0.10 its plugin asks for the CUDA driver as well, on hosts without a GPU too.

        :raises LibraryError: where it does, and there is none.
        """
        plugin = find_plugin(os.environ, Path("/proc/self/maps").read_text(), [nixl["nixl_package"]], PLUGIN)
        backend = f"UCX of {nixl['nixl_package']} {nixl['nixl']}"
        finder = Finder(os.environ, backend=backend)
        for library, soname in needed(plugin) if plugin else ():
            try:
                path = finder.candidates(library, soname)[0]
            except LibraryError as error:
                raise LibraryError(
                    error.reason, f"{error.remedy}; or take NIXL 0.10 or newer: its UCX does without"
                ) from None
            open_library(library, path, backend)
        return {}

    def creating(self) -> AbstractContextManager[None]:
        """UCX reports its transports later, when it connects."""
        return nullcontext()

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return what carried ``op`` of ``block`` bytes, from the tables that ``UCX_PROTO_INFO=y`` prints.

        The last table of the operation between such memory counts; one about the agent itself (``self``) only where
        there is no other.
        """
        tables = [table for table in _tables(log, _OPERATIONS[op]) if table.suits(memory)]
        chosen = [table for table in tables if table.scope != "self"] or tables
        for first, last, transports in chosen[-1].ranges if chosen else ():
            if first <= block <= last:
                return transports
        return ()

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Say what memory UCX took for the host's, where it moved bytes to another agent only as such; or nothing."""
        tables = [table for table in _tables(log, _OPERATIONS[op]) if table.scope != "self"]
        if not tables or any(table.suits(memory) for table in tables) or tables[-1].memory is None:
            return ""
        ends = zip(("initiator", "target"), (memory.initiator, memory.target), tables[-1].memory, strict=True)
        wrong = [end for end, kind, taken in ends if kind == "VRAM" and taken == "host"]
        took = " and ".join(f"{end}'s VRAM" for end in wrong)
        return f"UCX moved the {took} as host memory" if wrong else ""


def taken_for_host(log: str) -> str:
    """Return NIXL's words for it where its plugin refused to register a GPU's memory that UCX took for the host's."""
    found = _REFUSED.findall(log)
    return str(found[-1]) if found else ""


@lru_cache(maxsize=4)
def _tables(log: str, operation: str) -> tuple[_ProtocolTable, ...]:
    found: list[tuple[str, tuple[str, str] | None, list[tuple[float, float, tuple[str, ...]]]]] = []
    previous = ""
    wanted = False
    for line in log.splitlines():
        # [time] [host:pid :thread]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if len(cells) < 2 or cells.pop():
            continue
        if len(cells) < 3:
            # A heading: the agent and the scope of the configuration, then, on the next line or in older releases
            # beside it, the operation.
            wanted = cells[-1].startswith(operation)
            if wanted:
                told = _MEMORY.search(cells[-1])
                memory = (told["here"], told["there"]) if told else None
                found.append((_scope(cells[0] if len(cells) == 2 else previous), memory, []))
            previous = cells[-1]
        elif wanted and (size := _RANGE.fullmatch(cells[0])):
            found[-1][2].append((*_limits(size), tuple(_TRANSPORT.findall(cells[2]))))
    return tuple(_ProtocolTable(scope, memory, tuple(ranges)) for scope, memory, ranges in found)


def _scope(heading: str) -> str:
    return next((word for word in ("intra-node", "inter-node") if word in heading), "self")


def _limits(match: re.Match[str]) -> tuple[float, float]:
    first = float(int(match[1]) * _FACTOR[match[2]])
    if match[3]:
        return first, float(int(match[3]) * _FACTOR[match[4]])
    return first, math.inf if match[0].endswith("inf") else first


BACKEND = UcxBackend()
