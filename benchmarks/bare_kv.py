# SPDX-License-Identifier: Apache-2.0
"""A minimal program that requests KV blocks with NIXL: two processes, prepared descriptors, and a clock.

It makes the same requests as the suite ``kv_cache`` does in the way ``scattered-prepped``: ``prep_xfer_dlist`` of both
caches once, and for each request ``make_prepped_xfer`` of newly drawn block numbers, a post with a notification that
the other side answers, and a release. It does not use pytest-nixl and verifies nothing. It prints the bandwidth of the
median request in bytes per second.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from bare_loop import answered, exchange, serve
from nixl._api import nixl_agent, nixl_agent_config


def make_agent(name: str, tensors: int, size: int) -> tuple[Any, int]:
    """Return an agent and the address of its cache, each tensor of which is registered."""
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    whole = tensors * size
    pages = mmap.mmap(-1, whole + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    memory.fill(1)
    address = memory.ctypes.data + -memory.ctypes.data % (2 << 20)
    agent.register_memory([(address + number * size, size, 0, "") for number in range(tensors)], "DRAM")
    agent.keep = memory
    return agent, address


def rows(address: int, count: int, block: int) -> Any:
    """Return descriptors of all blocks of a cache."""
    results = np.zeros((count, 3), dtype=np.uint64)
    results[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(block)
    results[:, 1] = block
    return results


def drive(agent: Any, address: int, channel: socket.socket, op: str, shape: tuple[int, int, int, int, int]) -> float:
    """Make requests, and return the rate of the median request in bytes per second."""
    tensors, blocks, block, count, requests = shape
    target, remote = exchange(channel, agent, address)
    agent.make_connection(target)
    agent.send_notif(target, b"hello")
    answered(agent)
    here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(address, tensors * blocks, block), "DRAM")
    far = agent.prep_xfer_dlist(target, rows(remote, tensors * blocks, block), "DRAM")
    starts = np.arange(tensors, dtype=np.int32) * np.int32(blocks)
    draw = np.random.default_rng()
    drawn = [[draw.permutation(blocks)[:count].astype(np.int32) for _ in range(2)] for _ in range(requests + 1)]
    taken = []
    for number, sides in enumerate(drawn):
        start = time.perf_counter()
        local, other = ((starts[:, None] + side[None, :]).ravel() for side in sides)
        handle = agent.make_prepped_xfer(op, here, local, far, other, b"request-%d" % number, ["UCX"], False)
        state = agent.transfer(handle)
        while state == "PROC":
            os.sched_yield()
            state = agent.check_xfer_state(handle)
        answered(agent)
        taken.append(time.perf_counter() - start)
        agent.release_xfer_handle(handle)
    return tensors * count * block / median(taken[1:])


def main() -> None:
    """Run ``bare_kv.py OP TENSORS BLOCKS BLOCK_BYTES BLOCKS_OF_A_REQUEST REQUESTS``."""
    op, *numbers = sys.argv[1:]
    tensors, blocks, block, count, requests = (int(number) for number in numbers)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        serve(theirs, lambda: make_agent("bare-target", tensors, blocks * block))
    theirs.close()
    agent, address = make_agent("bare-initiator", tensors, blocks * block)
    rate = drive(agent, address, ours, op, (tensors, blocks, block, count, requests))
    print(f"rates: {rate:.0f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
