# SPDX-License-Identifier: Apache-2.0
"""Compare the rate that a loop measures which stops its clock at DONE with the delivered rate of LIBFABRIC's WRITE.

The naive loop posts a WRITE, waits for DONE, stops its clock, and does something else for a millisecond. It sends no
notification and does not ask the target. Run it on a machine where LIBFABRIC works, with an interface that is up and is
not the loopback: see docs/explanation/transports.md. Two optional arguments are the command prefixes that start the
worker of the initiator and of the target in a network namespace, such as ``"nsenter --target=PID --net --mount"``.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import close_supervisor, supervisor
from pytest_nixl.processes.worker_process import results
from pytest_nixl.session.settings import read_settings

BLOCKS = (65536, 1 << 20)
COUNT = 200


def naive(agent: Any, local_address: int, remote_address: int, block: int, target: str) -> list[float]:
    """Return the seconds from post to DONE of single WRITEs. This function runs in the worker of the initiator."""
    local = agent.get_xfer_descs([(local_address, block, 0)], "DRAM")
    remote = agent.get_xfer_descs([(remote_address, block, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", local, remote, target)
    seconds = []
    for _ in range(COUNT):
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - start)
        assert state == "DONE", state
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:  # go on polling the libraries, as the loop of an application does
            agent.check_xfer_state(handle)
    return seconds


def claimed(link: Link, block: int) -> float:
    """Return the rate in bytes per second that follows from the median time of the naive loop."""
    serving = link.target.worker.request("serve", agent=link.target.ref, timeout=30.0)
    arguments = {"local_address": link.source.address, "remote_address": link.destination.address, "block": block}
    running = link.initiator.worker.request(
        "run", agent=link.initiator.ref, function="naive_libfabric:naive",
        arguments={**arguments, "target": link.target.name},
    )  # fmt: skip
    seconds: list[float] = results([running], serving=[serving])[0]
    return block / median(seconds)


def main() -> None:
    """Print the rate of the naive loop and the delivered rate, for three launches and two sizes."""
    config = SimpleNamespace(getoption=lambda name, default=None: default, getini=lambda name: None)
    settings: Settings = replace(read_settings(cast(Any, config), environ={}), blocks=BLOCKS)
    for _ in range(3):
        first, other = (
            LocalHost(supervisor(), rank, shlex.split(prefix)) for rank, prefix in enumerate(sys.argv[1:] or ("", ""))
        )
        pairs = Launches((first, other), settings)
        link = pairs.link("LIBFABRIC", "WRITE", MemoryPair("DRAM", "DRAM"))
        for block in BLOCKS:
            samples = link.measure(block)
            print(
                f"{block >> 10:4} KiB WRITE over {'+'.join(samples.transports)}: the naive loop claims "
                f"{claimed(link, block) / 1e9:.2f} GB/s, delivered {samples.bandwidth / 1e9:.2f} GB/s"
            )
        pairs.close()
    close_supervisor()


if __name__ == "__main__":
    main()
