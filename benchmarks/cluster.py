# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of two ranks: the round trip of a request through etcd, and the time until a dead peer is named.

Both ranks are processes on this host with a private etcd. The peer serves rank 0 as in a run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from statistics import median, quantiles

from pytest_nixl.cluster.driver import RankDriver
from pytest_nixl.cluster.joining import join
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import close_supervisor, supervisor

GROUP, TOKEN, SECONDS = "bench", "of the bench", 60.0

PEER = f"""
import sys
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.driver import serve
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.processes.supervisor import supervisor

def client():
    return connect(parse_endpoints(sys.argv[1]))

membership = join(client(), {GROUP!r}, 2, wanted=1, token={TOKEN!r})
membership.barrier()
serve(membership, client, supervisor(), services={{"echo": lambda text: text}})
"""


def once(server: EmbeddedServer, trips: int) -> tuple[list[float], float]:
    """Return the seconds of each round trip, and the seconds from the SIGKILL of the peer until rank 0 names it."""
    peer = subprocess.Popen([sys.executable, "-c", PEER, server.endpoint])
    try:
        with server.client() as client, join(client, GROUP, 2, wanted=0, token=TOKEN) as membership:
            membership.barrier()
            driver = RankDriver(membership, server.client, timeout=SECONDS)
            took = []
            for number in range(trips):
                start = time.perf_counter()
                if driver.peers[1].ask("echo", text=str(number)) != str(number):
                    raise SystemExit("the peer sent a wrong answer")
                took.append(time.perf_counter() - start)
            start = time.perf_counter()
            os.kill(peer.pid, signal.SIGKILL)
            while not driver.gone:
                if time.perf_counter() - start > SECONDS:
                    raise SystemExit(f"rank 0 did not name the dead peer within {SECONDS:g} s")
                time.sleep(0.005)
            named = time.perf_counter() - start
            driver.close()
    finally:
        peer.kill()
        peer.wait()
    return took, named


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="how often a peer is killed (default: 5)")
    parser.add_argument("--trips", type=int, default=200, help="round trips before each kill (default: 200)")
    arguments = parser.parse_args()
    server = EmbeddedServer.start(supervisor())
    try:
        results = [once(server, arguments.trips) for _ in range(arguments.repeat)]
    finally:
        server.discard()
        close_supervisor()
    trips = [1e3 * seconds for took, _ in results for seconds in took]
    named = [seconds for _, seconds in results]
    print(f"round trip of a request: median {median(trips):.2f} ms, 99 % within {quantiles(trips, n=100)[98]:.1f} ms "
          f"({len(trips)} trips)")  # fmt: skip
    print(f"a killed peer is named after {median(named):.1f} s, at most {max(named):.1f} s ({len(named)} kills)")


if __name__ == "__main__":
    main()
