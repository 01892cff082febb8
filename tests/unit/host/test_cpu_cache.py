# SPDX-License-Identifier: Apache-2.0
"""The size of the last-level cache in a recorded tree, and the footprint that it cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fake_sysfs import root_of

from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.session.footprint import footprint_beyond, last_level_cache


def tree(folder: Path, *caches: tuple[str, str, str]) -> FactsRoot:
    """Return a tree of a processor with these caches: level, type and size as the kernel writes them."""
    files = {
        f"sys/devices/system/cpu/cpu0/cache/index{number}/{name}": text
        for number, cache in enumerate(caches)
        for name, text in zip(("level", "type", "size"), cache, strict=True)
    }
    return root_of(folder, files)


FIRST = (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"))


def test_the_cache_of_the_highest_level_counts(tmp_path: Path) -> None:
    assert last_level_cache(tree(tmp_path / "a", *FIRST, ("3", "Unified", "32768K"))) == 32 * MIB
    assert last_level_cache(tree(tmp_path / "b", *FIRST)) == 2 * MIB


@pytest.mark.parametrize(
    "caches", [(), (("3", "Unified", ""),), (("3", "Unified", "K"),), (("x", "Unified", "1K"),), (("1", "Data", "0K"),)]
)
def test_a_kernel_that_does_not_tell_is_unknown(tmp_path: Path, caches: tuple[tuple[str, str, str], ...]) -> None:
    assert last_level_cache(tree(tmp_path, *caches)) is None


@pytest.mark.parametrize(
    ("cache", "footprint"),
    [(32 * MIB, 64 * MIB), (64 * MIB, 128 * MIB), (60 * MIB, 128 * MIB), (300 * MIB, 512 * MIB), (KIB, 2 * KIB)],
)
def test_a_footprint_is_a_power_of_two_of_at_least_one_and_a_half_caches(cache: int, footprint: int) -> None:
    assert footprint_beyond(cache) == footprint
