# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY: an agent that is deleted leaves memory in use, also that of its peer.

Run it with Python, NIXL, numpy and glibc 2.33 or newer: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.5.0 and LIBFABRIC
over tcp of libfabric 2.5.1. UCX leaves less than 512 B. Both agents are in this process. Two causes were found by a
trace of ``malloc``: libfabric's provider tcp never frees the copy of ``fi_info`` of a domain that is closed
(``xnet_domain_mplex_open``), and the peer keeps a connection for each agent that made a handshake with it
(``nixlLibfabricEngine::createAgentConnection``), until the peer is deleted.
"""

import ctypes
import gc
import itertools
import os
import statistics
import sys
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

ROUNDS, TIMES = 5, 10
#: The bytes that a healthy backend may leave of each agent.
HEALTHY = 768
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
library: Any = ctypes.CDLL(None)


class Mallinfo2(ctypes.Structure):
    _fields_ = tuple((f"member{number}", ctypes.c_size_t) for number in range(10))


def in_use() -> int:
    """Return the bytes in use by ``malloc``: hblkhd and uordblks of ``mallinfo2``."""
    gc.collect()
    counters = library.mallinfo2()
    return int(counters.member4 + counters.member7)


def start(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))


def create_and_delete(name: str, connect: bool) -> None:
    agent = start(name)
    if connect:
        agent.add_remote_agent(peer.get_agent_metadata())
        agent.send_notif("peer", b"hello")
        while name not in peer.get_new_notifs():
            pass
        agent.remove_remote_agent("peer")


def bytes_kept(connect: bool) -> float:
    """Return the bytes that each agent leaves: the median of some rounds, because pools grow in steps."""
    counts = [in_use()]
    for round in range(ROUNDS + 1):
        for number in range(TIMES):
            create_and_delete(f"agent-{connect:d}-{round}-{number}", connect)
        counts.append(in_use())
    return statistics.median((after - before) / TIMES for before, after in itertools.pairwise(counts[1:]))


library.mallinfo2.restype = Mallinfo2
memory = numpy.zeros(4096, dtype=numpy.uint8)
peer = start("peer")
peer.register_memory(peer.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
alone, connected = bytes_kept(connect=False), bytes_kept(connect=True)
print(
    f"{'DEFECT' if min(alone, connected) > HEALTHY else 'healthy'}: each deleted agent left {alone:.0f} B in use, and "
    f"{connected:.0f} B if it had notified another one",
    flush=True,
)
os._exit(0)  # because several builds crash or hang at a normal exit of Python
