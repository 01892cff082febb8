# SPDX-License-Identifier: Apache-2.0
"""The last-level cache of this host's processors, and the footprint of transfers that does not fit into it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_nixl.core.units import KIB, MIB

if TYPE_CHECKING:
    from pytest_nixl.host.recorded_tree import FactsRoot

#: The folder of the caches of the first processor, as Linux names it.
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
#: The footprint on a host whose kernel does not tell the size of its caches, in bytes.
UNKNOWN_CACHE_FOOTPRINT = 512 * MIB


def last_level_cache(root: FactsRoot) -> int | None:
    """Return the size in bytes of the cache of the highest level that the first processor uses; None if unknown."""
    found: dict[int, int] = {}
    for name in root.entries(_CACHES):
        level = root.number(f"{_CACHES}/{name}/level")
        size = re.fullmatch(r"([0-9]{1,9})K", root.read(f"{_CACHES}/{name}/size") or "")
        if level is not None and size and root.read(f"{_CACHES}/{name}/type") != "Instruction":
            found[level] = int(size[1]) * KIB
    return found[max(found)] if found and found[max(found)] else None


def footprint_beyond(cache: int) -> int:
    """Return the least power of two that is at least one and a half times the size of a cache.

    :param cache: bytes; the result too.
    """
    return 1 << (3 * cache // 2 - 1).bit_length()
