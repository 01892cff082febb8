# SPDX-License-Identifier: Apache-2.0
"""The tests that ranks run while a fault is made: bytes move between the first and the last rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.session.cluster import Cluster

#: Seconds after which the transfers stop by themselves: longer than any fault takes on a busy machine.
LONGEST = 600.0


@pytest.mark.nixl_check("bandwidth")
def test_bytes_move_until_a_file_is_there(nixl_cluster: Cluster, nixl_launches: Launches) -> None:
    """Write the file ``begun`` to the folder $MOVING after the first transfer; end when ``enough`` is there."""
    folder = Path(os.environ["MOVING"])
    link = nixl_launches.link("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), (0, nixl_cluster.ranks - 1))
    deadline = time.monotonic() + LONGEST
    while not (folder / "enough").exists():
        assert time.monotonic() < deadline, f"no file {folder / 'enough'} within {LONGEST:g} s"
        assert link.move(4096) is None
        (folder / "begun").touch()
        time.sleep(0.05)


def test_the_run_goes_on(nixl_cluster: Cluster) -> None:
    """A second test shows that the run continues."""
    assert nixl_cluster.ranks > 1
