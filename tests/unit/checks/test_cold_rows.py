# SPDX-License-Identifier: Apache-2.0
"""The rows of the check ``bandwidth-cold``: which are measured, and when they can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.checks.bandwidth import cold_rows
from pytest_nixl.checks.bandwidth.cold_rows import cold_link
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.system import AvailableMemory
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.session import footprint
from pytest_nixl.session.run import Run

HOT = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)
COLD = replace(HOT, variant=(("footprint", "64MiB"),))


def keys(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    monkeypatch.setattr(footprint, "last_level_cache", lambda _: 32 << 20)
    run = Run.of(parse_config(pytester, *options))
    return [str(row) for row in cold_rows.cold_rows(run).values()]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("--nixl-backend=UCX,POSIX --nixl-op=READ", ["64KiB/batch1/depth1 64MiB", "2MiB/batch1/depth1 64MiB",
                                                    "64MiB/batch1/depth1 64MiB"]),
        # Small blocks are measured only if there are no others.
        ("--nixl-blocks=4KiB,8KiB --nixl-op=READ", ["8KiB/batch1/depth1 64MiB"]),
        ("--nixl-blocks=64KiB,8KiB,128KiB --nixl-op=READ", ["64KiB/batch1/depth1 64MiB", "128KiB/batch1/depth1 64MiB"]),
        # Every batch and every depth, of which the largest fits into the footprint.
        ("--nixl-blocks=1MiB --nixl-op=READ --nixl-batch=1,4 --nixl-depth=2", ["1MiB/batch1/depth2 64MiB",
                                                                             "1MiB/batch4/depth2 64MiB"]),
        ("--nixl-blocks=64MiB --nixl-op=READ --nixl-batch=1,4 --nixl-depth=2,1",
         ["64MiB/batch1/depth2 512MiB", "64MiB/batch1/depth1 512MiB", "64MiB/batch4/depth2 512MiB",
          "64MiB/batch4/depth1 512MiB"]),
        # Nothing is measured twice, and no storage.
        ("--nixl-footprint=auto", []),
        ("--nixl-backend=POSIX", []),
    ],
)  # fmt: skip
def test_three_sizes_of_each_link_between_agents_are_measured(
    options: str, rows: list[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [row.replace(" ", "/0-1/footprint=") for row in rows]
    assert keys(pytester, monkeypatch, *options.split()) == [f"UCX/READ/DRAM:DRAM/{row}" for row in expected]


def test_the_id_of_a_test_is_the_same_on_hosts_with_other_caches(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for cache in (1 << 20, 300 << 20):
        monkeypatch.setattr(footprint, "last_level_cache", lambda _, size=cache: size)
        ids.append(list(cold_rows.cold_rows(Run.of(parse_config(pytester)))))
    assert ids[0] == ids[1]
    assert ids[0][0] == "UCX-WRITE-DRAM:DRAM-64KiB-batch1-depth1"


@pytest.mark.parametrize(
    ("ends", "room", "fits"), [(2, 0, True), (2, -1, False), (1, -(64 << 20), True), (2, None, True)]
)
def test_a_cold_row_has_a_link_if_its_buffers_fit_into_this_host(
    ends: int, room: int | None, fits: bool, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its ends may be on another host, and the free memory may not be known."""
    monkeypatch.setattr(cold_rows, "ends_here", lambda settings: ends)
    memory = None if room is None else AvailableMemory(2 * (64 << 20) + room, "a test")
    monkeypatch.setattr(cold_rows, "available_memory", lambda _: memory)
    pairs, row = MagicMock(), replace(COLD, pair=(2, 3))
    if fits:
        assert cold_link(row, make_settings(), pairs) is pairs.link_of.return_value
        pairs.link_of.assert_called_once_with(row, (2, 3))
        return
    with pytest.raises(NotApplicableError) as error:
        cold_link(row, make_settings(), pairs)
    assert error.value.reason == (
        f"buffers that the last-level cache cannot hold need 128.0 MiB (134217728 bytes), but {memory} are available"
    )


def test_a_run_without_cold_rows_says_why(make_settings: Callable[..., Settings]) -> None:
    for settings, reason in (
        (make_settings(), "no requested backend moves bytes between two agents"),
        (make_settings(footprint=64 << 20), "all rows walk the 64MiB of --nixl-footprint"),
    ):
        with pytest.raises(NotApplicableError) as error:
            cold_link(None, settings, MagicMock())
        assert error.value.reason == reason
