# SPDX-License-Identifier: Apache-2.0
"""The option ``--nixl-footprint``: what it accepts, what ``auto`` is, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.core.units import GIB, MIB
from pytest_nixl.model.settings import Settings
from pytest_nixl.session import footprint as footprint_of_run
from pytest_nixl.session.requested_links import link_id
from pytest_nixl.session.run import Run
from pytest_nixl.session.settings import changed_settings, read_settings


def read(pytester: pytest.Pytester, *options: str) -> Settings:
    return read_settings(parse_config(pytester, *options), {})


def refusal(pytester: pytest.Pytester, *options: str) -> str:
    with pytest.raises(pytest.UsageError) as caught:
        read(pytester, *options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cache", "footprint", "has"),
    [(32 * MIB, 64 * MIB, "32MiB"), (300 * MIB, 512 * MIB, "300MiB"), (None, 512 * MIB, "an unknown size")],
)
def test_auto_does_not_fit_into_the_last_level_cache(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, cache: int | None, footprint: int, has: str
) -> None:
    monkeypatch.setattr(footprint_of_run, "last_level_cache", lambda _: cache)
    settings = read(pytester, "--nixl-footprint=auto")
    assert settings.footprint == footprint
    shown = [line for line in changed_settings(settings) if "footprint" in line]
    assert shown == [f"--nixl-footprint={footprint // MIB}MiB (auto: the last-level cache has {has})"]


def test_auto_holds_the_largest_row(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_of_run, "last_level_cache", lambda _: MIB)
    options = ("--nixl-footprint=auto", "--nixl-blocks=1MiB,3MiB", "--nixl-batch=2,1", "--nixl-depth=1,3")
    assert read(pytester, *options).footprint == 32 * MIB


@pytest.mark.parametrize("text", ["", "cold", "0", "-1", "1.5B"])
def test_anything_else_is_refused(pytester: pytest.Pytester, text: str) -> None:
    assert "--nixl-footprint: " in refusal(pytester, f"--nixl-footprint={text}")


def test_a_footprint_that_is_smaller_than_a_row_is_refused(pytester: pytest.Pytester) -> None:
    message = refusal(
        pytester, "--nixl-footprint=1MiB", "--nixl-blocks=64KiB,1MiB", "--nixl-batch=3,1", "--nixl-depth=4,2"
    )
    assert message == (
        "--nixl-footprint=1MiB is smaller than the largest row, which has 12MiB (block x batch x depth): expected at "
        "least --nixl-footprint=12MiB, or smaller --nixl-blocks"
    )


def test_a_footprint_that_does_not_fit_into_memory_is_refused(pytester: pytest.Pytester) -> None:
    message = refusal(pytester, f"--nixl-footprint={1 << 50}", f"--nixl-blocks={GIB}")
    assert message.startswith(
        "--nixl-footprint=1048576GiB needs 2097152.0 GiB (2251799813685248 bytes) of host memory "
    )
    assert message.endswith(" are available: expected a smaller footprint")


def test_a_walk_of_too_many_transfers_is_refused(pytester: pytest.Pytester) -> None:
    message = refusal(pytester, "--nixl-footprint=128MiB", "--nixl-blocks=16B,8B", "--nixl-batch=4,2")
    assert message == (
        "--nixl-footprint=128MiB has 8388608 transfers of 16B, and a row walks at most 1048576: expected a smaller "
        "footprint, or --nixl-blocks of at least 128B"
    )


def test_a_footprint_without_a_row_that_walks_it_is_refused(pytester: pytest.Pytester) -> None:
    message = refusal(pytester, "--nixl-footprint=1GiB", "--nixl-backend=POSIX")
    assert message.startswith("--nixl-footprint=1GiB has no effect on --nixl-backend=POSIX, whose target is a file: ")
    assert read(pytester, "--nixl-footprint=1GiB", "--nixl-backend=POSIX,UCX").footprint == GIB


def test_only_rows_between_agents_walk(pytester: pytest.Pytester) -> None:
    options = ("--nixl-footprint=1GiB", "--nixl-backend=POSIX,UCX", "--nixl-op=READ", "--nixl-blocks=4KiB")
    links = Run.of(parse_config(pytester, *options)).links
    assert [str(link) for link in links] == [
        "POSIX/READ/DRAM:FILE/4KiB/batch1/depth1/0-0",
        "UCX/READ/DRAM:DRAM/4KiB/batch1/depth1/0-1/footprint=1GiB",
    ]
    assert link_id(links[1], several=False) == "UCX-READ-DRAM:DRAM-footprint=1GiB"
    assert link_id(links[1], several=True) == "UCX-READ-DRAM:DRAM-0:1-footprint=1GiB"


def test_only_rows_between_agents_notify_and_only_host_memory_has_pages(pytester: pytest.Pytester) -> None:
    options = ("--nixl-notify=each", "--nixl-footprint=1GiB", "--nixl-backend=POSIX,UCX", "--nixl-op=READ",
               "--nixl-pages=base", "--nixl-memory=DRAM:DRAM,VRAM:VRAM")  # fmt: skip
    keys = Run.of(parse_config(pytester, *options, "--nixl-blocks=4KiB")).links
    keys = [key for key in keys if key.memory.initiator == "DRAM" or not key.memory.stored]
    assert [str(key) for key in keys] == [
        "POSIX/READ/DRAM:FILE/4KiB/batch1/depth1/0-0/pages=base",
        "UCX/READ/DRAM:DRAM/4KiB/batch1/depth1/0-1/footprint=1GiB,notify=each,pages=base",
        "UCX/READ/VRAM:VRAM/4KiB/batch1/depth1/0-1/footprint=1GiB,notify=each",
    ]
    assert [key.notify for key in keys] == ["last", "each", "each"]
    assert [key.pages for key in keys] == ["base", "base", ""]
    assert keys[1].agent_variant == ()
