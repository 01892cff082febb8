# SPDX-License-Identifier: Apache-2.0
"""Contention: CPU time that other processes take during a launch, and on a host during a test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.contention import spinning
from helpers.etcd import wait_until

from pytest_nixl.core import cpu_contention
from pytest_nixl.core.cpu_contention import CpuContention, busy_ticks, cpu_seconds
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair


def cpu_ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.alone
def test_cpu_time_of_the_row_does_not_count_as_contention() -> None:
    with spinning() as pid:
        with CpuContention() as everybody:
            with CpuContention([pid]) as contention:
                before = cpu_ticks(pid)
                wait_until(lambda: cpu_ticks(pid) - before >= 30, seconds=300, description="0.3 s of processor time")
                inner = time.monotonic() - contention._start[2]
        outer = time.monotonic() - everybody._start[2]
    # Only the first value includes the spinning process. What else runs on this machine, also between the two readings
    # at either end, makes the difference larger.
    assert everybody.taken * outer - contention.taken * inner > 0.1


def test_only_processors_that_a_process_may_use_count() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 10 1 5000 7 8 9 1000 0 0\ncpu1 3 0 0 9 9\ncpu10 70 0 0 9 9\nctxt 5\n"
    assert busy_ticks(stat, {"cpu0"}) == 1111
    assert busy_ticks(stat, {"cpu0", "cpu1"}) == 1114


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The CPU seconds of all processes and the clock, in the order in which they are read, on four processors."""
    values: list[tuple[float, float]] = []
    names = {"cpu0", "cpu1", "cpu2", "cpu7"}
    monkeypatch.setattr(cpu_contention, "busy_seconds", lambda processors: values[0][0] if processors == names else 0)
    monkeypatch.setattr(time, "monotonic", lambda: values.pop(0)[1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 7})
    return values


@pytest.mark.parametrize(
    ("busy", "seconds", "needed", "taken", "cores"),
    [
        (3000.0, 1000.0, 0, 3.0, 1.0),  # of four processors, the row's two processes need two
        (3000.0, 1000.0, 5, 3.0, 3.0),
        (2000.0, 1000.0, 2, 2.0, 0.0),
        (-5.0, 1000.0, 0, 0.0, 0.0),
        (3000.0, 0.0, 0, 0.0, 0.0),
    ],
)
def test_contention_is_the_mean_number_of_cores_that_others_took(
    readings: list[tuple[float, float]], busy: float, seconds: float, needed: int, taken: float, cores: float
) -> None:
    readings[:] = [(100.0, 50.0), (100.0 + busy, 50.0 + seconds)]
    with CpuContention([1 << 30], needed) as contention:
        assert (contention.taken, contention.cores) == (0.0, 0.0)
    assert (contention.taken, contention.cores) == pytest.approx((taken, cores), abs=0.01)


OTHERS = "other processes used 2.5 of this host's 4 processors during the test"


@pytest.mark.parametrize(("busy", "text"), [(2490.0, ""), (2510.0, OTHERS)])
def test_a_host_that_was_busy_is_a_sentence(readings: list[tuple[float, float]], busy: float, text: str) -> None:
    readings[:] = [(100.0, 50.0), (100.0 + busy, 1050.0), (0.0, 60.0)]
    load = cpu_contention.HostLoad()
    assert (load.words(), load.seconds) == (text, 10.0)


def test_cpu_time_is_that_of_a_process_and_of_all_below_it(tmp_path: Path) -> None:
    def process(pid: int, user: int, system: int, *children: int) -> None:
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        ended = (user * 10, system * 10)
        (tmp_path / f"{pid}/stat").write_text(
            f"{pid} (a) b) S {' '.join('1' for _ in range(10))} {user} {system} {ended[0]} {ended[1]} 1 1"
        )
        (tmp_path / f"{pid}/task/{pid}/children").write_text(" ".join(map(str, children)))

    process(7, 100, 200, 8, 9, 99)
    process(8, 1, 2, 10)
    process(9, 10, 20)
    process(10, 1000, 2000)
    process(11, 5000, 5000)
    (tmp_path / "7/task/12/children").mkdir(parents=True)  # a thread that cannot be read
    ticks = 11 * (300 + 3 + 30 + 3000)
    assert cpu_seconds(7, tmp_path) == ticks / os.sysconf("SC_CLK_TCK")
    assert cpu_seconds(99, tmp_path) == 0


@pytest.mark.alone
@pytest.mark.long
def test_measured_row_contains_the_contention_of_each_launch(make_pairs: Callable[..., Launches]) -> None:
    link = make_pairs(duration=1.0, iterations=10).link("UCX", "WRITE", MemoryPair("DRAM", "DRAM"))
    quiet = link.measure(65536)
    # One process fewer than cores: on two cores, it competes with the initiator and the target.
    with ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0)) - 1):
            stack.enter_context(spinning())
        busy = link.measure(65536)
    assert len(quiet.contention) == len(busy.contention) == 1
    assert busy.contention[0] > 0.1
