# SPDX-License-Identifier: Apache-2.0
"""UCX: which transport it used, as its own protocol report tells."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.backends.libfabric import Finder, LibraryError, find_plugin, needed, open_library

PLUGIN = "libplugin_UCX.so"
_OPERATIONS = {"WRITE": "remote memory write by ucp_put", "READ": "remote memory read by ucp_get"}

# [time] [host:pid :thread]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
_ROW = re.compile(r"\|(?P<first>[^|]*)(?:\|[^|]*\|(?P<config>[^|]*))?\|\s*$")
_RANGE = re.compile(r"(\d+)([KMG]?)(?:\.\.(?:(\d+)([KMG]?)|inf))?")
_TRANSPORT = re.compile(r"\b[a-z][a-z0-9_]*/[\w.:-]+")
_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class _Table:
    """One table of the report: to whom (``self``, ``intra-node``, ``inter-node``), and transports by size range."""

    scope: str
    ranges: tuple[tuple[float, float, tuple[str, ...]], ...]


class UcxBackend:
    """The UCX backend. Its DONE comes after a flush of the endpoint, so the bytes are in place."""

    NAME = "UCX"
    STORAGE = False
    DONE_IS_DELIVERED = True

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

    def transports(self, log: str, op: str, block: int) -> tuple[str, ...]:
        """Return what carried ``op`` of ``block`` bytes, from the tables that ``UCX_PROTO_INFO=y`` prints.

        The last table of the operation counts; one about the agent itself (``self``) only where there is no other.
        """
        tables = _tables(log, _OPERATIONS[op])
        chosen = [table for table in tables if table.scope != "self"] or tables
        for first, last, transports in chosen[-1].ranges if chosen else ():
            if first <= block <= last:
                return transports
        return ()


def _tables(log: str, operation: str) -> list[_Table]:
    tables: list[_Table] = []
    previous = ""
    wanted = False
    for line in log.splitlines():
        match = _ROW.search(line)
        if match is None:
            continue
        first = match["first"].strip()
        if match["config"] is None:
            # A heading: first the agent and the scope of the configuration, then the operation.
            wanted = first.startswith(operation)
            if wanted:
                tables.append(_Table(_scope(previous), ()))
            previous = first
        elif wanted and (size := _RANGE.fullmatch(first)):
            transports = tuple(_TRANSPORT.findall(match["config"]))
            table = tables[-1]
            tables[-1] = _Table(table.scope, (*table.ranges, (*_limits(size), transports)))
    return tables


def _scope(heading: str) -> str:
    return next((word for word in ("intra-node", "inter-node") if word in heading), "self")


def _limits(match: re.Match[str]) -> tuple[float, float]:
    first = float(int(match[1]) * _FACTOR[match[2]])
    if match[3]:
        return first, float(int(match[3]) * _FACTOR[match[4]])
    return first, math.inf if match[0].endswith("inf") else first


BACKEND = UcxBackend()
