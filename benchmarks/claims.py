# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of joining a group: requests of each rank and time for 2 to 512 processes; and of the etcd proxy.

Every member is a separate process. The clock starts when all processes have loaded their modules and are told to start,
and stops when the last one has its rank and has passed a barrier. Requests are counted in separate runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import h2.config
import h2.connection
import h2.events

from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.etcd.proxy import EtcdProxy, Request
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import supervisor

FUNCTION = "pytest_nixl.checks.rank_race.functions:membership_from_a_start"
#: Seconds for each step of a process, and seconds of a lease, which are enough to need no refresh.
SECONDS, TTL = 120.0, 120
REQUESTS = 300


def meet(endpoints: Sequence[str], group: str) -> float:
    """Let one process join through each endpoint; return the seconds until the last one has its rank."""
    size = len(endpoints)
    arguments = {"group": f"/bench/{group}/", "size": size, "ttl": TTL}
    claimants = [Claimant(FUNCTION, {**arguments, "endpoint": endpoint}) for endpoint in endpoints]
    try:
        for claimant in claimants:
            if announced_rank(claimant, lambda rank: rank == -1) != -1:
                raise SystemExit(f"a process could not start: {claimant.message}")
        start = time.perf_counter()
        for claimant in claimants:
            claimant.go_on()
        ranks = [announced_rank(claimant, lambda rank: rank >= 0) for claimant in claimants]
        took = time.perf_counter() - start
        if sorted(ranks) != list(range(size)):
            raise SystemExit(f"{size} processes got the ranks {sorted(ranks)}")
        for claimant in claimants:
            claimant.go_on()
        for claimant in claimants:
            claimant.wait_until_ended(SECONDS)
        return took
    finally:
        for claimant in claimants:
            claimant.close()


def announced_rank(claimant: Claimant, matches: Callable[[int], bool]) -> int:
    """Wait until a process announces a wanted rank, and return the rank. Exit if it reports an error."""
    rank = claimant.wait_for(lambda message: "error" in message or matches(message["rank"]), SECONDS)
    if rank is None or "error" in rank:
        raise SystemExit(f"a process failed: {rank}")
    return int(rank["rank"])


def claims(server: EmbeddedServer, repeats: int, sizes: Sequence[int]) -> None:
    """Print requests and time for each number of processes."""
    for size in sizes:
        # Large groups are measured once, because hundreds of processes overload a small machine.
        turns = range(repeats if size <= 128 else 1)
        times = [meet([server.endpoint] * size, f"{size}-{turn}") for turn in turns]
        with EtcdProxy(server.endpoint) as path:
            proxy_clients = [path.client() for _ in range(size)]
            meet([proxy_client.endpoint for proxy_client in proxy_clients], f"{size}-counted")
            # The first request of a barrier writes an arrival key. The first request to leave ends the lease.
            joined = [
                first(proxy_client.requests, lambda request: "/arrived/" in request.key)
                for proxy_client in proxy_clients
            ]
            passed = [
                first(proxy_client.requests, lambda request: request.method == "LeaseRevoke")
                for proxy_client in proxy_clients
            ]
        print(
            f"{size:4} ranks: {median(times):.2f} s (min {min(times):.2f}, max {max(times):.2f}); each sends "
            f"{min(joined)} to {max(joined)} requests to join, at most {max(passed)} to join and pass a barrier",
            flush=True,
        )


def first(requests: Sequence[Request], matches: Callable[[Request], bool]) -> int:
    """Return how many requests were made before the first one that is wanted."""
    return next(number for number, request in enumerate(requests) if matches(request))


class Grpc:
    """The smallest client of etcd's gRPC: one request at a time."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._authority = f"{host}:{port}"
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._connection.initiate_connection()

    def put(self) -> None:
        """Put one key, and wait for the answer."""
        stream = self._connection.get_next_available_stream_id()
        message = b"\x0a\x02/x\x12\x011"
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/etcdserverpb.KV/Put"),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        self._connection.send_headers(stream, headers)
        self._connection.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        self._socket.sendall(self._connection.data_to_send())
        while True:
            for event in self._connection.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.StreamEnded):
                    self._socket.sendall(self._connection.data_to_send())
                    return
            self._socket.sendall(self._connection.data_to_send())


def latency(protocol: str, endpoint: str) -> None:
    """Print the median time of a put in milliseconds. It runs in a separate process, as clients do."""
    if protocol == "grpc":
        put: Callable[[], None] = Grpc(endpoint).put
    else:
        from pytest_nixl.etcd.client import connect
        from pytest_nixl.etcd.endpoints import parse_endpoints

        client = connect(parse_endpoints(endpoint))

        def put() -> None:
            client.put("/x", b"1")

    times = []
    for _ in range(REQUESTS):
        start = time.perf_counter()
        put()
        times.append(time.perf_counter() - start)
    print(median(times) * 1000)


def path_cost(server: EmbeddedServer, repeats: int) -> None:
    """Print the time that a proxy without disturbances adds to a put, for both protocols."""
    with EtcdProxy(server.endpoint) as path:
        proxy_client = path.client()

        def measured(protocol: str, endpoint: str) -> float:
            command = [sys.executable, __file__, "--latency", protocol, endpoint]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

        for protocol, name in (("grpc", "gRPC (HTTP/2)"), ("gateway", "gateway (HTTP/1.1)")):
            added, plain = [], []
            for turn in range(repeats):
                pair = [(0, server.endpoint), (1, proxy_client.endpoint)]
                order = pair if turn % 2 else pair[::-1]
                results = {place: measured(protocol, endpoint) for place, endpoint in order}
                plain.append(results[0])
                added.append(results[1] - results[0])
            print(
                f"the etcd proxy, {name}: {median(added):+.2f} ms a request "
                f"(min {min(added):+.2f}, max {max(added):+.2f}), of {median(plain):.2f} ms",
                flush=True,
            )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="how often each figure is measured (default: 5)")
    parser.add_argument("--sizes", default="2,4,8,16,32,64,128,256,512", help="the numbers of processes")
    parser.add_argument("--latency", nargs=2, metavar=("PROTOCOL", "URL"), help="for internal use: time puts to URL")
    arguments = parser.parse_args()
    if arguments.latency:
        latency(*arguments.latency)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = EmbeddedServer.start(supervisor())
    print(
        f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, etcd {server.version}; "
        f"medians of {arguments.repeats}"
    )
    try:
        path_cost(server, arguments.repeats)
        claims(server, arguments.repeats, [int(size) for size in arguments.sizes.split(",")])
    finally:
        server.discard()


if __name__ == "__main__":
    main()
