# SPDX-License-Identifier: Apache-2.0
"""The links and rows that the settings of a run request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.core.units import format_size
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import LAST, RowKey, Variant, of_row
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS

if TYPE_CHECKING:
    from pytest_nixl.cluster.placement import Placement
    from pytest_nixl.model.rank_pairs import RankPair
    from pytest_nixl.model.settings import Settings


@dataclass(frozen=True)
class LinkParam:
    """One parameter of the fixture ``nixl_link``: a requested link."""

    backend: str
    op: str
    memory: MemoryPair
    #: Ranks of initiator and target; the same rank for a storage backend.
    ranks: RankPair = (0, 1)
    #: Whether the run has several ranks, so that the test id names them.
    several: bool = False
    #: GPUs that were requested by number; None: none were, or the link has no GPU memory.
    devices: DevicePair | None = None
    #: How the agents are created.
    agent_options: AgentOptions = AgentOptions()  # noqa: RUF009 - frozen
    #: The bytes of each buffer that the transfers of a row walk; 0: every transfer of a row has the same bytes.
    footprint: int = 0
    #: Which transfers of a window carry a notification.
    notify: str = LAST

    @property
    def variant(self) -> Variant:
        """What differs from the default in how the agents are created, what the transfers walk, and which notify."""
        agent = self.agent_options.variant(self.backend, BACKENDS[self.backend].PLUGIN)
        return of_row(agent, self.footprint, self.notify)

    def __str__(self) -> str:
        ranks = f"-{self.ranks[0]}:{self.ranks[1]}" if self.several else ""
        variant = "".join(f"-{name}={value}" for name, value in self.variant)
        return f"{self.backend}-{self.op}-{self.memory}{ranks}{variant}"

    def key(self, block: int, batch: int, depth: int) -> RowKey:
        """Return the key of a row of this link.

        :param block: block size in bytes.
        :param batch: blocks in one transfer; ``depth`` is the number of transfers in flight.
        """
        devices, variant = self.devices, self.variant
        return RowKey(self.backend, self.op, self.memory, block, batch, depth, self.ranks, devices, variant)


@dataclass(frozen=True)
class LinkRow:
    """A row of a link, as one parameter of a test."""

    link: LinkParam
    block: int
    batch: int
    depth: int

    @property
    def key(self) -> RowKey:
        """The key of the row."""
        return self.link.key(self.block, self.batch, self.depth)

    def __str__(self) -> str:
        # Without the footprint, which may be another one on the host of another rank.
        link = replace(self.link, footprint=0)
        return f"{link}-{format_size(self.block)}-batch{self.batch}-depth{self.depth}"


def requested_links(settings: Settings, placement: Placement) -> list[LinkParam]:
    """Return the requested links: operations vary fastest, then ranks, then agents, and backends slowest."""
    links: dict[LinkParam, None] = {}
    for backend, memory in product(settings.backend, settings.memory):
        if BACKENDS[backend].STORAGE:
            between = [(rank, rank) for rank in range(placement.ranks)]
            memory = MemoryPair(memory.initiator, "OBJ" if BACKENDS[backend].PLUGIN in OBJECT_PLUGINS else "FILE")
        else:
            between = list(placement.pairs) if not memory.stored else []
        devices = settings.devices if "VRAM" in (memory.initiator, memory.target) else None
        for agent, ranks, op in product(settings.agents, between, settings.op):
            walked, notify = (0, LAST) if BACKENDS[backend].STORAGE else (settings.footprint or 0, settings.notify)
            links[LinkParam(backend, op, memory, ranks, placement.several, devices, agent, walked, notify)] = None
    return list(links)


def requested_rows(settings: Settings, placement: Placement, memory: MemoryPair | None = None) -> Iterator[RowKey]:
    """Yield the key of every requested row.

    :param memory: only rows between these memory types; None: all rows.
    """
    links = [link for link in requested_links(settings, placement) if memory in (None, link.memory)]
    for link, block, batch, depth in product(links, settings.blocks, settings.batch, settings.depth):
        yield link.key(block, batch, depth)


def row_of(item: pytest.Item) -> RowKey | None:
    """Return the key of the row that a test measures, by its parameters; None: it measures no row.

    A parameter is the key itself, or has it as its ``key``. A link has it with the sizes that are parameters as well.
    """
    if "row_benchmark" not in getattr(item, "fixturenames", ()):
        return None
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    for value in params.values():
        key = getattr(value, "key", value)
        if isinstance(key, RowKey):
            return key
    link = params.get("nixl_link")
    if not isinstance(link, LinkParam):
        return None
    return link.key(params["block"], params.get("batch", 1), params.get("depth", 1))
