# SPDX-License-Identifier: Apache-2.0
"""A minimal program that moves blocks with NIXL: two processes, one transfer in flight, and a clock around a loop.

It makes the same pattern of transfers as a row of pytest-nixl: windows whose last WRITE carries a notification that the
other side answers. It does not use pytest-nixl and verifies nothing. It prints the median bandwidth over its windows in
bytes per second for each block size.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

CAPACITY = 64 << 20
WINDOWS = 10


def make_agent(name: str) -> tuple[Any, int]:
    """Return an agent and the address of its registered buffer."""
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    pages = mmap.mmap(-1, CAPACITY + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    memory.fill(1)
    address = memory.ctypes.data + -memory.ctypes.data % (2 << 20)
    agent.register_memory([(address, CAPACITY, 0, "")], "DRAM")
    agent.keep = memory
    return agent, address


def exchange(channel: socket.socket, agent: Any, address: int) -> tuple[str, int]:
    """Swap metadata and addresses with the other process."""
    metadata = agent.get_agent_metadata()
    channel.sendall(len(metadata).to_bytes(8, "little") + address.to_bytes(8, "little") + metadata)
    with channel.makefile("rb") as stream:
        size, other = (int.from_bytes(stream.read(8), "little") for _ in range(2))
        name = agent.add_remote_agent(stream.read(size))
    return name.decode() if isinstance(name, bytes) else name, other


def serve(channel: socket.socket, make: Callable[[], tuple[Any, int]] = lambda: make_agent("bare-target")) -> None:
    """Answer notifications until the other side closes the channel."""
    agent, address = make()
    exchange(channel, agent, address)
    channel.setblocking(False)
    naps = 0
    while True:
        for sender, messages in agent.get_new_notifs().items():
            for message in messages:
                agent.send_notif(sender, b"answer" + message)
        time.sleep(0.00002)
        naps += 1
        if naps % 8 == 0:
            try:
                if not channel.recv(1):
                    os._exit(0)
            except BlockingIOError:
                continue


def answered(agent: Any) -> None:
    """Wait for the other side's answer."""
    while not agent.get_new_notifs():
        os.sched_yield()


def drive(channel: socket.socket, op: str, blocks: list[int], per_window: list[int]) -> list[float]:
    """Measure each block size, and return the rates in bytes per second."""
    agent, address = make_agent("bare-initiator")
    target, remote = exchange(channel, agent, address)
    agent.make_connection(target)
    agent.send_notif(target, b"hello")
    answered(agent)
    results = []
    for block, count in zip(blocks, per_window, strict=True):
        local = agent.get_xfer_descs([(address, block, 0)], "DRAM")
        far = agent.get_xfer_descs([(remote, block, 0)], "DRAM")
        plain, last = (agent.initialize_xfer(op, local, far, target) for _ in range(2))

        def post(handle: Any, tag: bytes = b"") -> None:
            state = agent.transfer(handle, tag)
            while state == "PROC":
                os.sched_yield()
                state = agent.check_xfer_state(handle)

        for _ in range(10):
            post(plain)
        rates = []
        for _ in range(WINDOWS):
            start = time.perf_counter()
            for _ in range(count - 1):
                post(plain)
            if op == "WRITE":
                post(last, b"last")
                answered(agent)
            else:
                post(plain)
            rates.append(count * block / (time.perf_counter() - start))
        results.append(median(rates))
    return results


def main() -> None:
    """Run ``bare_loop.py OP BLOCK:TRANSFERS_PER_WINDOW…``, with block sizes in bytes."""
    pairs = [argument.split(":") for argument in sys.argv[2:]]
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    rates = drive(ours, sys.argv[1], [int(p[0]) for p in pairs], [int(p[1]) for p in pairs])
    print("rates:", " ".join(f"{rate:.0f}" for rate in rates), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
