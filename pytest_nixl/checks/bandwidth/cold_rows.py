# SPDX-License-Identifier: Apache-2.0
"""The check ``bandwidth-cold``: some rows again, with transfers that walk a buffer larger than the last-level cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.units import KIB, format_size
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory, in_bytes
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.row_key import RowKey, row_variant
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.session.footprint import automatic_footprint, ends_here
from pytest_nixl.session.requested_links import link_id
from pytest_nixl.session.run import Run

#: The least block size in bytes. The time of smaller transfers is that of their posts, whatever the caches hold.
LEAST_BLOCK = 64 * KIB


def cold_rows(run: Run) -> dict[str, RowKey]:
    """Return what the check measures: the smallest, a middle and the largest block of each link between two agents.

    The rows are named by the ids of their tests, without the footprint: it may be another one on other ranks' hosts.
    """
    settings = run.settings
    if settings.footprint is not None:
        return {}
    blocks = sorted(block for block in settings.blocks if block >= LEAST_BLOCK) or [max(settings.blocks)]
    sizes = blocks[0], blocks[len(blocks) // 2], blocks[-1]
    footprint, _ = automatic_footprint(settings.blocks, settings.batch, settings.depth)
    links = [link for link in run.links if not BACKENDS[link.backend].STORAGE]
    rows = {}
    for link, block, batch, depth in product(links, sizes, settings.batch, settings.depth):
        name = f"{link_id(link, several=run.placement.several)}-{format_size(block)}-batch{batch}-depth{depth}"
        variant = row_variant(link.agent_variant, footprint, link.notify, link.pages)
        rows[name] = replace(link, block=block, batch=batch, depth=depth, variant=variant)
    return rows


def cold_link(row: RowKey | None, settings: Settings, pairs: Launches) -> Link:
    """Return the link that measures a row.

    :raises NotApplicableError: there is nothing to measure, or the buffers do not fit into the memory of this host.
    """
    if row is None and settings.footprint is not None:
        raise NotApplicableError(f"all rows walk the {format_size(settings.footprint)} of --nixl-footprint")
    if row is None:
        raise NotApplicableError(
            "no requested backend moves bytes between two agents",
            "give --nixl-backend=UCX or LIBFABRIC, and a --nixl-memory without FILE",
        )
    needed, available = ends_here(settings) * row.footprint, available_memory(FactsRoot())
    if available is not None and needed > available.size:
        raise NotApplicableError(
            f"buffers that the last-level cache cannot hold need {in_bytes(needed)}, but {available} are available",
            "give a smaller --nixl-footprint, which all rows then walk",
        )
    return pairs.link_of(row, row.pair)
