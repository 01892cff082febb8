# SPDX-License-Identifier: Apache-2.0
"""What ranks run while something is done to them: bytes move between the first and the last until it is enough."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pytest_nixl.measure.link import WorkerPairs
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.session.cluster import Cluster

#: Seconds after which they stop by themselves.
LONGEST = 60.0


@pytest.mark.nixl_check("bandwidth")
def test_bytes_move_until_a_file_is_there(nixl_cluster: Cluster, nixl_pairs: WorkerPairs) -> None:
    """The folder MOVING gets a file ``begun``, and a file ``enough`` there ends this."""
    folder = Path(os.environ["MOVING"])
    link = nixl_pairs.link("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), (0, nixl_cluster.ranks - 1))
    deadline = time.monotonic() + LONGEST
    while not (folder / "enough").exists():
        assert time.monotonic() < deadline, f"nobody said that it is enough within {LONGEST:g} s"
        assert link.move(4096) is None
        (folder / "begun").touch()
        time.sleep(0.05)


def test_what_comes_after_it(nixl_cluster: Cluster) -> None:
    """One more test, as a run has that goes on."""
    assert nixl_cluster.ranks > 1
