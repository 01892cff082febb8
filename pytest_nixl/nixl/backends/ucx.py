# SPDX-License-Identifier: Apache-2.0
"""The UCX backend: read the transports that it used from its own protocol report."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.rdma_fault import cuda_fault, transport_fault
from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.model.nixl_releases import refuses_no_cuda
from pytest_nixl.nixl.backends import driver_standin, libraries
from pytest_nixl.nixl.backends.libraries import Finder, LibraryError, find_plugin, locate, needed, open_library

#: The id of the finding that UCX treats GPU memory as host memory.
VRAM_AS_HOST = "VRAM-AS-HOST-MEMORY"
PLUGIN = "libplugin_UCX.so"
_OPERATIONS = {"WRITE": "remote memory write by ucp_put", "READ": "remote memory read by ucp_get"}

# The memory of initiator and target in a table's heading (proto_debug.c of UCX), such as "from host memory to
# cuda/GPU0" or "into cuda/dev[0] from host". The name before the slash is one of ucs_memory_type_names.
_MEMORY = re.compile(r" (?:from|into) (?P<here>[a-z-]+)(?: memory|/\S+)? (?:to|from) (?P<there>[a-z-]+)")
# The message of NIXL's plugin (ucx_utils.cpp, since 0.7) when it refuses to register such memory.
_REFUSED = re.compile(r"(\S+ memory is detected as host by UCX)")

_RANGE = re.compile(r"([0-9]{1,18})([KMG])?(?:\.\.(?:([0-9]{1,18})([KMG])?|inf))?")
_TRANSPORT = re.compile(r"\b[a-z][a-z0-9_]*/[\w.:-]+")
_FACTOR = {None: 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

#: When UCX is loaded it replaces eight functions of libc. It waits 50 ms at each, so that no thread is within it, and
#: keeps a processor busy meanwhile. A worker has no thread that does anything then: 1 ms is enough.
_GRACE, _SHORT = "UCX_MEM_BISTRO_GRACE_DURATION", "1ms"


@dataclass(frozen=True)
class _ProtocolRange:
    """A line of a table: how transfers of a range of sizes are made.

    :param first: the smallest size in bytes.
    :param last: the largest size in bytes.
    :param description: UCX's word for the protocol, such as ``zero-copy`` or ``software emulation``.
    :param transports: the transports that carry the bytes.
    """

    first: float
    last: float
    description: str
    transports: tuple[str, ...]


@dataclass(frozen=True)
class _ProtocolTable:
    """One table of UCX's protocol report.

    :param scope: the peers that it is about: ``self``, ``intra-node`` or ``inter-node``.
    :param memory: UCX's types of the initiator's and the target's memory, such as ``host`` and ``cuda``; None if the
        report does not say.
    :param ranges: how transfers of a range of sizes are made.
    """

    scope: str
    memory: tuple[str, str] | None
    ranges: tuple[_ProtocolRange, ...]

    def suits(self, memory: MemoryPair) -> bool:
        """Return whether the table is about this memory; every type except ``host`` counts as GPU memory."""
        on_gpu = (memory.initiator == "VRAM", memory.target == "VRAM")
        return self.memory is None or tuple(kind != "host" for kind in self.memory) == on_gpu


class UcxBackend:
    """The UCX backend. DONE comes after a flush of the endpoint, so the bytes have arrived."""

    NAME = "UCX"
    PLUGIN = "UCX"
    STORAGE = False
    COMPLETION_IMPLIES_DELIVERY = True
    SHAKES_HANDS = False
    #: The version of NIXL in this worker; empty: unknown.
    _nixl = ""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variable that makes UCX print its protocol report."""
        return {"UCX_PROTO_INFO": "y"}

    def load(self, nixl: Mapping[str, str]) -> dict[str, str]:
        """Load the libraries that NIXL's plugin needs, such as the CUDA driver before NIXL 0.10. UCX is part of NIXL.

        It also sets a variable of UCX, if the UCX in NIXL's package knows it: the loading is 0.4 s shorter.

        :raises LibraryError: the plugin needs a library that was not found or cannot be loaded.
        """
        self._nixl = nixl["nixl"]
        plugin = find_plugin(os.environ, Path("/proc/self/maps").read_text(), [nixl["nixl_package"]], PLUGIN)
        if plugin is not None and _knows_grace(plugin, nixl["nixl_package"]):
            os.environ.setdefault(_GRACE, _SHORT)
        backend = f"UCX of {nixl['nixl_package']} {nixl['nixl']}"
        finder = Finder(os.environ, backend=backend)
        recorded: dict[str, str] = {}
        for library, soname in needed(plugin) if plugin else ():
            try:
                candidates, origin = locate(finder, library, soname, plugin)
            except LibraryError as error:
                raise LibraryError(
                    error.reason, f"{error.remedy}; or install NIXL 0.10 or newer, whose UCX does not need it"
                ) from None
            open_library(library, candidates[0], backend)
            recorded |= origin
        if plugin is None or driver_standin.RECORDED in recorded:
            return recorded
        return recorded | libraries.load(finder, plugin, nixl["nixl_package"], backend)

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Say which variable makes NIXL refuse UCX, of which NIXL reports no more than ``NIXL_ERR_BACKEND``."""
        try:
            yield
        except Exception as error:
            fault, remedy = transport_fault(os.environ), "`unset UCX_TLS`"
            if not fault and refuses_no_cuda(self._nixl):
                fault, remedy = cuda_fault(os.environ)
            if fault:
                raise NixlPluginError(f"{fault}: NIXL refuses UCX ({error})", remedy) from error
            raise

    def transports(self, log: str, op: str, block: int, memory: MemoryPair = HOST) -> tuple[str, ...]:
        """Return the transports that carried ``op``, from the tables that ``UCX_PROTO_INFO=y`` prints.

        The last table for this operation and memory is used. A table about the agent itself (``self``) is used only
        if there is no other.
        """
        used = _range(log, op, block, memory)
        return used.transports if used else ()

    def mistaken(self, log: str, op: str, memory: MemoryPair) -> str:
        """Return a sentence if UCX moved GPU memory to another agent only as host memory; otherwise an empty text."""
        tables = [table for table in _tables(log, _OPERATIONS[op]) if table.scope != "self"]
        moved = tables[-1].memory if tables else None
        if moved is None or any(table.suits(memory) for table in tables):
            return ""
        ends = zip(("initiator", "target"), (memory.initiator, memory.target), moved, strict=True)
        wrong = [end for end, kind, taken in ends if kind == "VRAM" and taken == "host"]
        took = " and ".join(f"{end}'s VRAM" for end in wrong)
        return f"UCX moved the {took} as host memory" if wrong else ""


def protocol(log: str, op: str, block: int, memory: MemoryPair) -> str:
    """Return UCX's word for the protocol of ``op``, such as ``zero-copy``; empty if the log has no table for it.

    ``software emulation`` is no RDMA operation: UCX sends messages, and the target's processor copies the bytes. The
    transport in the table carries the messages.

    :param log: the stdout and stderr of the initiator's worker; the other parameters as for the transports.
    """
    used = _range(log, op, block, memory)
    return used.description if used else ""


def _range(log: str, op: str, block: int, memory: MemoryPair) -> _ProtocolRange | None:
    tables = [table for table in _tables(log, _OPERATIONS[op]) if table.suits(memory)]
    chosen = [table for table in tables if table.scope != "self"] or tables
    ranges = chosen[-1].ranges if chosen else ()
    return next((candidate for candidate in ranges if candidate.first <= block <= candidate.last), None)


def taken_for_host(log: str) -> str:
    """Return NIXL's message if its plugin refused to register GPU memory that UCX detected as host memory.

    :param log: the stdout and stderr of a worker.
    """
    refusals = _REFUSED.findall(log)
    return str(refusals[-1]) if refusals else ""


@lru_cache(maxsize=4)
def _tables(log: str, operation: str) -> tuple[_ProtocolTable, ...]:
    tables: list[tuple[str, tuple[str, str] | None, list[_ProtocolRange]]] = []
    previous = ""
    relevant = False
    for line in log.splitlines():
        # [time] [host:pid :thread]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if len(cells) < 2 or cells.pop():
            continue
        if len(cells) < 3:
            # A heading names the agent and the scope. The operation follows on the next line, or on the same line in
            # older releases.
            relevant = cells[-1].startswith(operation)
            if relevant:
                match = _MEMORY.search(cells[-1])
                memory = (match["here"], match["there"]) if match else None
                tables.append((_scope(cells[0] if len(cells) == 2 else previous), memory, []))
            previous = cells[-1]
        elif relevant and (size := _RANGE.fullmatch(cells[0])):
            tables[-1][2].append(_ProtocolRange(*_limits(size), cells[1], tuple(_TRANSPORT.findall(cells[2]))))
    return tuple(_ProtocolTable(scope, memory, tuple(ranges)) for scope, memory, ranges in tables)


def _scope(heading: str) -> str:
    return next((scope for scope in ("intra-node", "inter-node") if scope in heading), "self")


def _limits(match: re.Match[str]) -> tuple[float, float]:
    first = float(int(match[1]) * _FACTOR[match[2]])
    if match[3]:
        return first, float(int(match[3]) * _FACTOR[match[4]])
    return first, math.inf if match[0].endswith("inf") else first


BACKEND = UcxBackend()


def _knows_grace(plugin: str, package: str) -> bool:
    """Return whether the UCX beside a plugin of a package of NIXL knows the variable; any other UCX would warn."""
    folder = Path(plugin).parents[2] / f"{package.replace('-', '_')}.libs"
    name = _GRACE.removeprefix("UCX_MEM_").encode()
    return any(name in path.read_bytes() for path in folder.glob("libucs-*.so*"))
