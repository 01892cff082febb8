# SPDX-License-Identifier: Apache-2.0
"""Run a sweep of 15 sizes with two nixlbench processes of this host, as its users run it: the peer of ours."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from tempfile import TemporaryFile

from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.model.nixlbench_table import read_output
from pytest_nixl.processes.supervisor import close_supervisor, supervisor

#: What both processes are told, whatever the runtime.
SWEEP = (
    "--backend=UCX", "--op_type=WRITE", "--initiator_seg_type=DRAM", "--target_seg_type=DRAM",
    "--start_block_size=4096", "--max_block_size=67108864", "--start_batch_size=1", "--max_batch_size=1",
)  # fmt: skip
#: What is measured, by the name of the peer: the runtime, and further flags.
PEERS: Mapping[str, tuple[str, ...]] = {
    "ETCD": ("ETCD",),
    "ASIO": ("ASIO",),
    "ASIO with 64 MiB": ("ASIO", "--total_buffer_size=67108864"),
}
#: Seconds for a sweep: by ETCD it takes two and a half minutes on a quiet machine.
SECONDS = 1800.0


def sweep(program: str, runtime: str, *more: str) -> tuple[float, dict[int, float]]:
    """Return the seconds of a sweep, and the bytes per second of each block size.

    :raises SystemExit: a process fails, or there are no rows.
    """
    with _meeting(runtime) as flags:
        command = [program, f"--runtime_type={runtime}", *flags, *SWEEP, *more]
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(TemporaryFile("w+")) for _ in range(2)]
            ranks = [subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) for output in outputs]
            try:
                codes = [rank.wait(SECONDS) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            taken = time.perf_counter() - start
            texts = [(output.seek(0), output.read())[1] for output in outputs]
    rates = rates_of(texts)
    if any(codes) or not rates:
        raise SystemExit(f"{' '.join(command)} ended with {codes}:\n{texts[0][-2000:]}\n{texts[1][-2000:]}")
    return taken, rates


def rates_of(texts: Sequence[str]) -> dict[int, float]:
    """Return the bytes per second of each block size in the outputs of both processes."""
    return {row.block: float(row.bandwidth) for text in texts for row in read_output(text).rows}


def spreads(sweeps: Sequence[Mapping[int, float]]) -> list[float]:
    """Return how far each row's figures of several sweeps are apart, in percent of their median."""
    rows = [[entry[block] for entry in sweeps if block in entry] for block in sweeps[0]]
    return [100 * (max(values) - min(values)) / median(values) for values in rows]


@contextlib.contextmanager
def _meeting(runtime: str) -> Iterator[list[str]]:
    """Yield the flags by which the two processes find each other."""
    if runtime == "ASIO":
        with socket.create_server(("127.0.0.1", 0)) as asking:
            port = asking.getsockname()[1]
        yield ["--asio_address=127.0.0.1", f"--asio_port={port}"]
        return
    server = EmbeddedServer.start(supervisor())
    try:
        yield [f"--etcd_endpoints={server.endpoint}", f"--benchmark_group=bench-{secrets.token_hex(4)}"]
    finally:
        server.discard()
        close_supervisor()
