# SPDX-License-Identifier: Apache-2.0
"""The option ``--nixl-footprint``: the buffers that the transfers of bandwidth rows walk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.units import KIB, MIB, format_size, parse_size
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory, in_bytes
from pytest_nixl.nixl.backends import BACKENDS

if TYPE_CHECKING:
    import pytest

    from pytest_nixl.model.settings import Settings
else:  # the doctor reads the option's default, and does without it
    pytest = lazy_module("pytest")


#: The folder of the caches of the first processor, as Linux names it.
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
#: The footprint on a host whose kernel does not tell the size of its caches, in bytes.
UNKNOWN_CACHE_FOOTPRINT = 512 * MIB


def last_level_cache(root: FactsRoot) -> int | None:
    """Return the size in bytes of the cache of the highest level that the first processor uses; None if unknown."""
    sizes: dict[int, int] = {}
    for name in root.entries(_CACHES):
        level = root.number(f"{_CACHES}/{name}/level")
        size = re.fullmatch(r"([0-9]{1,9})K", root.read(f"{_CACHES}/{name}/size") or "")
        if level is not None and size and root.read(f"{_CACHES}/{name}/type") != "Instruction":
            sizes[level] = int(size[1]) * KIB
    return sizes.get(max(sizes, default=0)) or None


def footprint_beyond(cache: int) -> int:
    """Return the least power of two that is at least one and a half times the size of a cache.

    :param cache: bytes; the result too.
    """
    return 1 << (3 * cache // 2 - 1).bit_length()


#: The parsed value ``auto``, which :func:`automatic_footprint` replaces.
AUTO = 0
#: The most transfers of a walk. Each is prepared beforehand.
MOST_WALKED = 1 << 20


def parse_footprint(text: str) -> int | None:
    """Parse the footprint of rows: None for ``row``, :data:`AUTO` for ``auto``, else bytes.

    :raises ValueError: if it is none of them.
    """
    if text in ("row", "auto"):
        return None if text == "row" else AUTO
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is neither row, auto nor a size") from None


def automatic_footprint(blocks: Sequence[int], batch: Sequence[int], depth: Sequence[int]) -> tuple[int, str]:
    """Return a footprint in bytes that the last-level cache of this host cannot hold and every row fits into.

    The second value says where it is from.
    """
    cache = last_level_cache(FactsRoot())
    row = max(blocks) * max(batch) * max(depth)
    beyond = UNKNOWN_CACHE_FOOTPRINT if cache is None else footprint_beyond(cache)
    has = "has an unknown size" if cache is None else f"has {format_size(cache)}"
    # A power of two holds a whole number of most rows.
    return max(beyond, 1 << (row - 1).bit_length()), f"auto: the last-level cache {has}"


def refuse_footprint(settings: Settings) -> None:
    """Refuse a footprint that no row walks, or that is smaller than a row or too large for this host.

    :raises pytest.UsageError: with one sentence.
    """
    size = settings.footprint
    if size is None:
        return
    option = f"--nixl-footprint={format_size(size)}"
    if all(BACKENDS[name].STORAGE for name in settings.backend):
        raise pytest.UsageError(
            f"{option} has no effect on --nixl-backend={','.join(settings.backend)}, whose target is a file: expected "
            "a backend that moves bytes between two agents, such as UCX"
        )
    row = max(settings.blocks) * max(settings.batch) * max(settings.depth)
    if size < row:
        raise pytest.UsageError(
            f"{option} is smaller than the largest row, which has {format_size(row)} (block x batch x depth): expected "
            f"at least --nixl-footprint={format_size(row)}, or smaller --nixl-blocks"
        )
    least = min(settings.blocks) * min(settings.batch)
    if size // least > MOST_WALKED:
        raise pytest.UsageError(
            f"{option} has {size // least} transfers of {format_size(least)}, and a row walks at most {MOST_WALKED}: "
            f"expected a smaller footprint, or --nixl-blocks of at least {format_size(-(-size // MOST_WALKED))}"
        )
    needed, available = ends_here(settings) * size, available_memory(FactsRoot())
    if available is not None and needed > available.size:
        raise pytest.UsageError(
            f"{option} needs {in_bytes(needed)} of host memory on this host, but {available} are available: expected a "
            "smaller footprint"
        )


def ends_here(settings: Settings) -> int:
    """Return the number of ends of a link in host memory that are certain to be on this host."""
    ends = max((pair.initiator, pair.target).count("DRAM") for pair in settings.memory)
    # Several ranks may be on several hosts: then only one end is certain to be on this host.
    return min(ends, 1) if (settings.ranks or 1) > 1 or settings.rank is not None else ends
