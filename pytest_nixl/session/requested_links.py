# SPDX-License-Identifier: Apache-2.0
"""The links and rows that the settings of a run request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import LAST, RowKey, row_variant
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS

if TYPE_CHECKING:
    from pytest_nixl.cluster.placement import Placement
    from pytest_nixl.model.settings import Settings

#: Why a row is skipped in a worker of pytest-xdist.
NOT_IN_PARALLEL = "bandwidth is never measured in parallel: run it without pytest-xdist (-n)"


def requested_links(settings: Settings, placement: Placement) -> list[RowKey]:
    """Return the requested links, each as the key of its row of the first block size, with batch 1 and depth 1.

    Operations vary fastest, then ranks, then agents, and backends slowest.
    """
    block = settings.blocks[0]
    links: dict[RowKey, None] = {}
    for backend, memory in product(settings.backend, settings.memory):
        if BACKENDS[backend].STORAGE:
            between = [(rank, rank) for rank in range(placement.ranks)]
            memory = MemoryPair(memory.initiator, "OBJ" if BACKENDS[backend].PLUGIN in OBJECT_PLUGINS else "FILE")
        else:
            between = list(placement.pairs) if not memory.stored else []
        devices = settings.devices if memory.on_gpu else None
        for options, ranks, op in product(settings.agents, between, settings.op):
            walked, notify = (0, LAST) if BACKENDS[backend].STORAGE else (settings.footprint or 0, settings.notify)
            pages = settings.pages if "DRAM" in (memory.initiator, memory.target) else ""
            variant = row_variant(options.variant(backend, BACKENDS[backend].PLUGIN), walked, notify, pages)
            links[RowKey(backend, op, memory, block, pair=ranks, devices=devices, variant=variant)] = None
    return list(links)


def link_id(link: RowKey, *, several: bool) -> str:
    """Return the id of a test's parameter by its link.

    :param several: whether the run has several ranks, so that the id names them.
    """
    ranks = f"-{link.pair[0]}:{link.pair[1]}" if several else ""
    variant = "".join(f"-{name}={value}" for name, value in link.variant)
    return f"{link.backend}-{link.op}-{link.memory}{ranks}{variant}"


def requested_rows(settings: Settings, placement: Placement, memory: MemoryPair | None = None) -> Iterator[RowKey]:
    """Yield the key of every requested row.

    :param memory: only rows between these memory types; None: all rows.
    """
    links = [link for link in requested_links(settings, placement) if memory in (None, link.memory)]
    for link, block, batch, depth in product(links, settings.blocks, settings.batch, settings.depth):
        yield replace(link, block=block, batch=batch, depth=depth)


def row_of(item: pytest.Item) -> RowKey | None:
    """Return the key of the row that a test measures, by its parameters; None: it measures no row.

    A parameter is the key itself, or has it as its ``key``. The sizes of a row of ``nixl_link`` are parameters as well.
    """
    if "nixl_rows" not in getattr(item, "fixturenames", ()):
        return None
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    for name, value in params.items():
        key = value if isinstance(value, RowKey) else getattr(value, "key", None)
        if isinstance(key, RowKey):
            if name != "nixl_link":
                return key
            return replace(key, **{field: params[field] for field in ("block", "batch", "depth") if field in params})
    return None
