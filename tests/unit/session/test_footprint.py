# SPDX-License-Identifier: Apache-2.0
"""The option ``--nixl-footprint``: what it accepts, what ``auto`` is, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.core.units import GIB, MIB
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.session import footprint as footprint_of_run
from pytest_nixl.session.footprint import ends_here
from pytest_nixl.session.requested_links import link_id, requested_rows
from pytest_nixl.session.run import Run
from pytest_nixl.session.settings import changed_settings

pytest_plugins = ["settings_fixtures"]

Read = Callable[..., Settings]


@pytest.mark.parametrize(
    ("cache", "options", "footprint", "has"),
    [
        (32 * MIB, {}, 64 * MIB, "32MiB"),
        (None, {}, 512 * MIB, "an unknown size"),
        # It holds the largest row.
        (MIB, {"blocks": "1MiB,3MiB", "batch": "2,1", "depth": "1,5"}, 32 * MIB, "1MiB"),
    ],
)
def test_auto_does_not_fit_into_the_last_level_cache(
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    cache: int | None,
    options: dict[str, str],
    footprint: int,
    has: str,
) -> None:
    monkeypatch.setattr(footprint_of_run, "last_level_cache", lambda _: cache)
    settings = read({"footprint": "auto", **options})
    assert settings.footprint == footprint
    shown = [line for line in changed_settings(settings) if "footprint" in line]
    assert shown == [f"--nixl-footprint={footprint // MIB}MiB (auto: the last-level cache has {has})"]


@pytest.mark.parametrize(
    ("options", "start", "end"),
    [
        ({"footprint": "1MiB", "blocks": "64KiB,1MiB", "batch": "3,1", "depth": "4,2"},
         "--nixl-footprint=1MiB is smaller than the largest row, which has 12MiB (block x batch x depth): ",
         "expected at least --nixl-footprint=12MiB, or smaller --nixl-blocks"),
        ({"footprint": str(1 << 50), "blocks": str(GIB)},
         "--nixl-footprint=1048576GiB needs 2097152.0 GiB (2251799813685248 bytes) of host memory ",
         " are available: expected a smaller footprint"),
        ({"footprint": "128MiB", "blocks": "16B,8B", "batch": "4,2"},
         "--nixl-footprint=128MiB has 8388608 transfers of 16B, and a row walks at most 1048576: ",
         "expected a smaller footprint, or --nixl-blocks of at least 128B"),
        ({"footprint": "1GiB", "backend": "POSIX"},
         "--nixl-footprint=1GiB has no effect on --nixl-backend=POSIX, whose target is a file: ", ""),
    ],
)  # fmt: skip
def test_a_footprint_that_no_row_can_walk_is_refused(read: Read, options: dict[str, str], start: str, end: str) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        read(options)
    message = str(caught.value)
    assert (message[: len(start)], message[len(message) - len(end) :]) == (start, end)


def test_a_footprint_needs_one_backend_that_walks_it(read: Read) -> None:
    assert read({"footprint": "1GiB", "backend": "POSIX,UCX"}).footprint == GIB
    assert read({"footprint": "12MiB", "blocks": "1MiB", "batch": "3", "depth": "4"}).footprint == 12 * MIB


@pytest.mark.parametrize(
    ("memory", "ranks", "ends"),
    [
        ("VRAM:DRAM", {}, 1), ("VRAM:VRAM,DRAM:DRAM,VRAM:DRAM", {}, 2), ("DRAM:DRAM", {"ranks": "1"}, 2),
        # Several ranks may be on several hosts.
        ("DRAM:DRAM", {"ranks": "2"}, 1), ("VRAM:VRAM", {"ranks": "2"}, 0),
        ("DRAM:DRAM", {"ranks": "1", "rank": "0"}, 1),
    ],
)  # fmt: skip
def test_the_ends_in_host_memory_that_are_certain_to_be_here(
    read: Read, memory: str, ranks: dict[str, str], ends: int
) -> None:
    assert ends_here(read({"memory": memory, **ranks})) == ends


def test_every_row_that_the_settings_request(pytester: pytest.Pytester) -> None:
    options = ("--nixl-backend=POSIX,UCX", "--nixl-op=READ,WRITE", "--nixl-blocks=4KiB,8KiB", "--nixl-batch=1,2",
               "--nixl-depth=3,4", "--nixl-memory=VRAM:DRAM,VRAM:FILE", "--nixl-pages=base")  # fmt: skip
    run = Run.of(parse_config(pytester, *options))
    links = ["POSIX/{}/VRAM:FILE/{}/batch{}/depth{}/0-0", "UCX/{}/VRAM:DRAM/{}/batch{}/depth{}/0-1/pages=base"]
    assert [str(row) for row in requested_rows(run.settings, run.placement)] == [
        link.format(op, block, batch, depth)
        for link in links for op in ("READ", "WRITE") for block in ("4KiB", "8KiB") for batch in (1, 2)
        for depth in (3, 4)
    ]  # fmt: skip
    vram = [str(row) for row in requested_rows(run.settings, run.placement, MemoryPair("VRAM", "DRAM"))]
    assert (len(vram), {row[:3] for row in vram}) == (16, {"UCX"})


def test_only_rows_between_agents_walk_and_notify_and_only_host_memory_has_pages(pytester: pytest.Pytester) -> None:
    options = ("--nixl-notify=each", "--nixl-footprint=1GiB", "--nixl-backend=POSIX,UCX", "--nixl-op=READ",
               "--nixl-pages=base", "--nixl-memory=DRAM:DRAM,VRAM:VRAM")  # fmt: skip
    keys = Run.of(parse_config(pytester, *options, "--nixl-blocks=4KiB")).links
    keys = [key for key in keys if key.memory.initiator == "DRAM" or not key.memory.stored]
    assert [str(key) for key in keys] == [
        "POSIX/READ/DRAM:FILE/4KiB/batch1/depth1/0-0/pages=base",
        "UCX/READ/DRAM:DRAM/4KiB/batch1/depth1/0-1/footprint=1GiB,notify=each,pages=base",
        "UCX/READ/VRAM:VRAM/4KiB/batch1/depth1/0-1/footprint=1GiB,notify=each",
    ]
    assert link_id(keys[1], several=False) == "UCX-READ-DRAM:DRAM-footprint=1GiB-notify=each-pages=base"
    assert link_id(keys[1], several=True) == "UCX-READ-DRAM:DRAM-0:1-footprint=1GiB-notify=each-pages=base"
