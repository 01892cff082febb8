# SPDX-License-Identifier: Apache-2.0
"""The rows of the check ``bandwidth-cold``: which are measured, and what of a profile is expected of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.checks.bandwidth import cold_rows
from pytest_nixl.checks.bandwidth.cold_rows import cold_link
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.system import AvailableMemory
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.judge.row import judge
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session import footprint
from pytest_nixl.session.run import Run

HOT = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)
COLD = replace(HOT, variant=(("footprint", "64MiB"),))
EXPECTED = Expectation("a test", floor=10e9, ceiling=100e9, p50=1e-6, p99=2e-6, transports=("cma",), raw=0.9)
PROFILE = Profile("test", "a test", "a test", (), expectations=(EXPECTED,))


def keys(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    monkeypatch.setattr(footprint, "last_level_cache", lambda _: 32 << 20)
    run = Run.of(parse_config(pytester, *options))
    return [str(row) for row in cold_rows.cold_rows(run).values()]


def test_three_sizes_of_each_link_between_agents_are_measured(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_keys = keys(pytester, monkeypatch, "--nixl-backend=UCX,POSIX", "--nixl-op=READ")
    suffix = "batch1/depth1/0-1/footprint=64MiB"
    assert row_keys == [f"UCX/READ/DRAM:DRAM/{size}/{suffix}" for size in ("64KiB", "2MiB", "64MiB")]


def test_small_blocks_are_measured_only_if_there_are_no_others(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row_key] = keys(pytester, monkeypatch, "--nixl-blocks=4KiB,8KiB", "--nixl-op=READ")
    assert "/8KiB/" in row_key


def test_every_batch_and_every_depth_is_measured(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    row_keys = keys(pytester, monkeypatch, "--nixl-blocks=1MiB", "--nixl-op=READ", "--nixl-batch=1,4", "--nixl-depth=2")
    assert [key.split("/")[4:6] for key in row_keys] == [["batch1", "depth2"], ["batch4", "depth2"]]


def test_the_largest_row_fits_into_the_footprint(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--nixl-blocks=1MiB,64MiB", "--nixl-op=READ", "--nixl-batch=1,4", "--nixl-depth=2,1")
    assert {key.rpartition("=")[2] for key in keys(pytester, monkeypatch, *options)} == {"512MiB"}


def test_nothing_is_measured_twice(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys(pytester, monkeypatch, "--nixl-footprint=auto") == []
    assert keys(pytester, monkeypatch, "--nixl-backend=POSIX") == []


def test_the_id_of_a_test_is_the_same_on_hosts_with_other_caches(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for cache in (1 << 20, 300 << 20):
        monkeypatch.setattr(footprint, "last_level_cache", lambda _, size=cache: size)
        ids.append(list(cold_rows.cold_rows(Run.of(parse_config(pytester)))))
    assert ids[0] == ids[1]
    assert ids[0][0] == "UCX-WRITE-DRAM:DRAM-64KiB-batch1-depth1"


def test_floors_and_latency_bounds_are_for_rows_in_place(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    assert PROFILE.expectation_in(settings, HOT) == EXPECTED
    expectation = PROFILE.expectation_in(settings, COLD)
    assert expectation == Expectation("a test", ceiling=100e9, transports=("cma",))
    # whoever lets all rows walk has chosen a profile for such rows
    assert PROFILE.expectation_in(make_settings(footprint=64 << 20), COLD) == EXPECTED
    assert replace(PROFILE, expectations=()).expectation_in(settings, COLD) is None


@pytest.mark.parametrize(
    ("transports", "bandwidth", "verdict"),
    [
        (("cma/memory",), 1e9, Verdict.PASS),
        (("tcp/lo",), 1e9, Verdict.WRONG_TRANSPORT),
        (("cma/memory",), 200e9, Verdict.IMPLAUSIBLE),
    ],
)
def test_a_cold_row_is_judged_by_its_transport_and_the_ceiling(
    make_settings: Callable[..., Settings], transports: tuple[str, ...], bandwidth: float, verdict: Verdict
) -> None:
    seconds = 65536 / bandwidth
    samples = Samples(COLD, (seconds,) * 10, (1,) * 10, (seconds,) * 10, transports)
    assert judge(samples, PROFILE.expectation_in(make_settings(), COLD), PROFILE.machine).verdict is verdict


def test_a_host_without_room_for_the_buffers_has_no_cold_rows(
    pytester: pytest.Pytester, make_pairs: Callable[..., Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.of(parse_config(pytester))
    row = next(iter(cold_rows.cold_rows(run).values()))
    monkeypatch.setattr(cold_rows, "available_memory", lambda _: AvailableMemory(1 << 20, "a test"))
    with pytest.raises(NotApplicableError, match=r"buffers that the last-level cache cannot hold need [\d.]+ [MG]iB"):
        cold_link(row, run.settings, make_pairs())


def test_a_run_without_cold_rows_says_why(
    make_pairs: Callable[..., Launches], make_settings: Callable[..., Settings]
) -> None:
    with pytest.raises(NotApplicableError, match="no requested backend moves bytes between two agents"):
        cold_link(None, make_settings(), make_pairs())
    with pytest.raises(NotApplicableError, match="all rows walk the 64MiB of --nixl-footprint"):
        cold_link(None, make_settings(footprint=64 << 20), make_pairs())
