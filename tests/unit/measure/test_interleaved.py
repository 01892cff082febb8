# SPDX-License-Identifier: Apache-2.0
"""The order of two images that are measured in turn, and the workers of each launch.

The links are doubles, because a real one does not tell when its workers were started.
"""

from __future__ import annotations

from typing import cast

from pytest_nixl.measure.interleaved import alternate
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples


class LoggedLink:
    """A link that writes what is done with it to a log, and measures one second more in each launch."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self._launch = 0

    def relaunch(self) -> None:
        self._log.append(f"new workers of {self._name}")

    def measure(self, block: int, *, batch: int, depth: int) -> Samples:
        self._log.append(self._name)
        self._launch += 1
        key = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), block, batch, depth, (0, 1))
        return Samples(key, windows=(float(self._launch),), transfers=(1,), latencies=(0.1,))


def test_two_links_are_measured_abba_and_each_launch_has_new_workers() -> None:
    log: list[str] = []
    windows: list[tuple[int, int]] = []

    def needs_another(first: Samples, second: Samples) -> bool:
        windows.append((len(first.windows), len(second.windows)))
        return len(first.windows) < 3

    links = [cast(Link, LoggedLink(name, log)) for name in "AB"]
    first, second = alternate(links[0], links[1], 4096, batch=2, depth=3, needs_another=needs_another)
    assert log == [
        "A", "B", "new workers of B", "B", "new workers of A", "A", "new workers of A", "A", "new workers of B", "B",
    ]  # fmt: skip
    assert windows == [(1, 1), (2, 2), (3, 3)]
    assert [samples.windows for samples in (first, second)] == [(1.0, 2.0, 3.0)] * 2
    assert (first.key.block, first.key.batch, first.key.depth) == (4096, 2, 3)
