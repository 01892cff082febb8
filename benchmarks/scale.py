# SPDX-License-Identifier: Apache-2.0
"""Measure how ranks scale: 64 ranks on this machine, a pytest each, and simulated groups of up to 1,024 ranks.

The 64 ranks measure the pairs `first` and `ring`, and all pairs in rounds (`alltoall`), with the real NIXL. They are
forked from one process that has imported pytest, so that they fit into its memory; as root, each has a host name of its
own, because ranks of one host are never measured at the same time. The simulated ranks are threads of a few processes:
they join, answer rank 0 and leave through a real etcd, with the code of a run, and start no worker. etcd counts their
requests, which stand beside those of the model in `benchmarks/group_load.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import pkgutil
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

from group_load import kept, roster_bytes, whole_run

from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.model.traffic_pattern import factors
from pytest_nixl.processes.supervisor import close_supervisor, supervisor

ROOT = Path(__file__).parents[1]
#: Seconds for each step, also on a machine that is busy with other work.
SECONDS = 1800
TOKEN = "of the bench"
#: The ranks of a process that simulates, and how often rank 0 asks all of them.
THREADS, TURNS = 64, 5
#: Seconds of a lease and of a request, so long that a busy machine repeats none.
LEASE, PATIENCE = 600, 120.0
#: Numbers of the kernel, for unshare(2) and prctl(2).
_NEW_HOST_NAME, _PARENT_DEATH_SIGNAL = 0x04000000, 1
_STEERING = re.compile(r"(NIXL_|UCX_|FI_|ETCD|SLURM_|OMPI_|PMI_|PYTEST_|WORLD_SIZE$)")

#: What all ranks run, by the name of the schedule.
ROWS = ("suites/bandwidth/test_bandwidth.py", "--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-backend=UCX")
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "first": (*ROWS, "--nixl-pairs=first"),
    "ring": (*ROWS, "--nixl-pairs=ring"),
    "alltoall": ("suites/pattern", "--nixl-op=WRITE", "--nixl-blocks=4KiB", "--nixl-backend=UCX",
                 "--nixl-pattern=alltoall"),
}  # fmt: skip


class EtcdCounts:
    """The requests that an etcd was sent, and its bytes, since this was made."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._first = self._read()

    def since(self) -> dict[str, float]:
        """Return requests, refreshes of leases, and bytes received and sent by etcd."""
        now = self._read()
        return {name: now[name] - self._first[name] for name in now}

    def _read(self) -> dict[str, float]:
        text = self._client.maintenance.metrics()
        started = re.findall(r'^grpc_server_started_total\{.*grpc_method="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        counts = dict.fromkeys(("requests", "refreshes", "received", "sent"), 0.0)
        for method, count in started:
            kind = "refreshes" if method == "LeaseKeepAlive" else "requests"
            counts[kind] += float(count) if method in _METHODS else 0.0
        for name in ("received", "sent"):
            match = re.search(rf"^etcd_network_client_grpc_{name}_bytes_total (\S+)$", text, re.MULTILINE)
            counts[name] = float(match[1]) if match else 0.0
        return counts


_METHODS = {"Range", "Put", "DeleteRange", "Txn", "LeaseGrant", "LeaseRevoke", "LeaseKeepAlive", "Watch"}


# Simulated ranks.


def simulated_ranks(url: str, group: str, size: int, first: int, count: int) -> None:
    """Be some ranks of a simulated group, each in its own threads. It runs in a separate process."""

    def client() -> EtcdClient:
        return connect(parse_endpoints(url), timeout=PATIENCE)

    def be(rank: int) -> None:
        membership = joined(client(), group, size, rank)
        membership.barrier(SECONDS)
        serve(membership, client, supervisor(), services={"echo": lambda text: text})
        membership.barrier(SECONDS)
        membership.leave()

    end_with_parent()
    # A cluster's etcd does not share its cores with all ranks.
    os.nice(10)
    # Each thread that waits for the interpreter asks for it once in this time. With Python's own 5 ms some hundred
    # waiting threads use the cores up by asking.
    sys.setswitchinterval(1)
    supervisor()
    with ThreadPoolExecutor(count) as pool:
        print("ready", flush=True)
        sys.stdin.readline()
        for done in [pool.submit(be, rank) for rank in range(first, first + count)]:
            done.result()
    close_supervisor()


def joined(client: EtcdClient, group: str, size: int, rank: int) -> Membership:
    """Return the membership of a simulated rank."""
    return join(
        client, group, size, wanted=rank, ttl=LEASE, timeout=SECONDS, token=TOKEN, host=f"node-{rank:06d}"
    )  # fmt: skip


def simulate(server: EmbeddedServer, size: int) -> None:
    """Print times, requests and bytes of a group of simulated ranks, beside those of the model."""
    group = f"simulated-{size}"

    def client() -> EtcdClient:
        return connect(parse_endpoints(server.endpoint), timeout=PATIENCE)

    command = [sys.executable, __file__, "--simulated-ranks", server.endpoint, group, str(size)]
    hosts = [
        subprocess.Popen([*command, str(first), str(min(THREADS, size - first))], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for first in range(1, size, THREADS)
    ]  # fmt: skip
    try:
        for host in hosts:
            assert host.stdout is not None
            if host.stdout.readline().strip() != "ready":
                raise SystemExit("a process of simulated ranks did not start")
        with client() as rank_client:
            counts = EtcdCounts(rank_client)
            start = time.perf_counter()
            for host in hosts:
                assert host.stdin is not None
                host.stdin.write("go\n")
                host.stdin.flush()
            membership = joined(rank_client, group, size, 0)
            took = {"join": time.perf_counter() - start}
            took["first barrier"] = timed(lambda: membership.barrier(SECONDS))
            driver = RankDriver(membership, client, timeout=SECONDS)
            took["first answer of all peers"] = timed(lambda: driver.ask_all("echo", text="0"))
            turns = [timed(lambda: driver.ask_all("echo", text="x")) for _ in range(TURNS)]
            took[f"answers of all peers (median of {TURNS})"] = median(turns)
            driver.end(Ending(0))
            membership.barrier(SECONDS)
            membership.leave()
            took["all"] = time.perf_counter() - start
            for host in hosts:
                if host.wait(SECONDS):
                    raise SystemExit("a process of simulated ranks failed")
            results = counts.since()
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    model = whole_run(size, TURNS + 2, sealed=True)
    rosters = size * roster_bytes(size, len("node-000000"))
    print(f"{size} simulated ranks: " + ", ".join(f"{label} {seconds:.2f} s" for label, seconds in took.items()))
    print(
        f"  {results['requests']:.0f} requests, the model says {model.total} "
        f"({results['requests'] / model.total - 1:+.1%}); "
        f"{model.each} of a rank, {model.one} of rank 0; etcd received {results['received'] / 1e6:.2f} MB and sent "
        f"{results['sent'] / 1e6:.2f} MB, of which {rosters / 1e6:.2f} MB are rosters",
        flush=True,
    )


def end_with_parent() -> ctypes.CDLL:
    """Let this process be killed when the one that started it ends; return the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return libc


def timed(step: Callable[[], object]) -> float:
    """Return the seconds of a step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# Ranks that are a pytest each.


def forked_ranks(size: int, folder: Path, arguments: Sequence[str]) -> int:
    """Run ranks, and return 0 if all end with 0. It runs in a separate process, which has no supervisor."""
    import pytest  # noqa: F401 (for all ranks)
    import requests  # noqa: F401

    # All ranks share the cores of one machine, so that each import would count for all of them.
    for part in ("checks.pattern", "cluster", "etcd", "judge", "measure", "nixl", "processes", "report", "session"):
        package = importlib.import_module(f"pytest_nixl.{part}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    # What is imported stays: no rank need look whether it is garbage.
    gc.freeze()

    pids = {fork_rank(number, folder, arguments): number for number in range(size)}
    while pids:
        pid, status = os.wait()
        number, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            # The other ranks end with this process.
            print(
                f"rank {number} ended with {code}:\n{(folder / f'rank-{number}.log').read_text()[-1000:]}", flush=True
            )
            return 1
    return 0


def fork_rank(number: int, folder: Path, arguments: Sequence[str]) -> int:
    """Start a rank, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        libc = end_with_parent()
        log = os.open(folder / f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if os.geteuid() == 0 and libc.unshare(_NEW_HOST_NAME) == 0:
            socket.sethostname(f"node-{number}")
        for name in [name for name in os.environ if _STEERING.match(name)]:
            del os.environ[name]
        os.environ |= {"NIXL_GROUP_TOKEN": TOKEN, "TMPDIR": str(folder)}
        tempfile.tempdir = None
        os.chdir(ROOT)
        import pytest

        code = int(pytest.main([*arguments, f"--nixl-rank={number}"]))
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def schedule(server: EmbeddedServer, name: str, size: int, folder: Path) -> None:
    """Print what a schedule of this many ranks took, and what it cost etcd.

    :raises SystemExit: a rank does not end with 0.
    """
    folder.mkdir()
    arguments = [
        # hypothesis imports itself at the end of a run, whatever ran: for 64 ranks that is half a minute of two cores.
        *SCHEDULES[name], "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--benchmark-quiet",
        f"--nixl-ranks={size}",
        f"--nixl-etcd={server.endpoint}", f"--nixl-group=bench-{name}", f"--nixl-join-timeout={SECONDS}",
        f"--nixl-lease={LEASE}", "--nixl-timeout=300", "--nixl-start-timeout=600",
    ]  # fmt: skip
    free, least = available(), available()
    with server.client() as client:
        counts, start, met = EtcdCounts(client), time.perf_counter(), 0.0
        last = folder / f"rank-{size - 1}.log"
        command = [sys.executable, __file__, "--forked-ranks", str(size), str(folder), *arguments]
        ranks = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            while ranks.poll() is None:
                least = min(least, available())
                if not met and last.exists() and " serves rank 0" in last.read_text(errors="replace"):
                    met = time.perf_counter() - start
                time.sleep(0.2)
        finally:
            ranks.kill()
        took, elapsed = time.perf_counter() - start, counts.since()
    shown = (folder / "rank-0.log").read_text(errors="replace")
    if ranks.returncode:
        reason = ranks.stdout.read() if ranks.stdout is not None else ""
        raise SystemExit(f"{size} ranks, {name}: {reason}\nrank 0:\n{shown[-1000:]}")
    verdict = re.search(r"^NIXL verdict: (.*)$", shown, re.MULTILINE)
    print(
        f"{size} ranks, {name}: {took:.0f} s, of which {met:.0f} s until all had met; "
        f"{elapsed['requests'] / size:.0f} requests of a rank to etcd in the mean, {elapsed['requests'] / took:.0f} "
        f"a second in all, {elapsed['refreshes'] / took:.1f} refreshes of leases a second "
        f"(the model says {kept(size, LEASE):.0f} with renewed watches); "
        f"{elapsed['received'] / 1e6:.1f} MB received, {elapsed['sent'] / 1e6:.1f} MB sent; "
        f"{(free - least) / 2**30:.1f} GiB of memory; {verdict[1] if verdict else 'no verdict'}",
        flush=True,
    )


def available() -> int:
    """Return the bytes of memory that are available."""
    match = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="ranks that are a pytest each (default: 64)")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="what they run; empty: nothing")
    parser.add_argument("--simulate", default="2,4,8,16,32,64,256,1024",
                        help="sizes of simulated groups")  # fmt: skip
    parser.add_argument("--simulated-ranks", nargs=5, metavar=("URL", "GROUP", "SIZE", "FIRST", "COUNT"),
                        help="for internal use: be some ranks of a simulated group")  # fmt: skip
    if sys.argv[1:2] == ["--forked-ranks"]:  # for internal use
        raise SystemExit(forked_ranks(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.simulated_ranks:
        url, group, *numbers = options.simulated_ranks
        simulated_ranks(url, group, *map(int, numbers))
        return
    server = EmbeddedServer.start(supervisor())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, etcd {server.version}", flush=True)
    try:
        for size in [int(text) for text in options.simulate.split(",") if text]:
            simulate(server, size)
        start = time.perf_counter()
        rounds = len(factors(1024))
        took = time.perf_counter() - start
        print(f"the schedule of 1024 ranks: {rounds} rounds of 512 pairs, made in {took:.2f} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for name in [text for text in options.schedules.split(",") if text]:
                schedule(server, name, options.ranks, Path(folder) / name)
    finally:
        server.discard()
        close_supervisor()


if __name__ == "__main__":
    main()
