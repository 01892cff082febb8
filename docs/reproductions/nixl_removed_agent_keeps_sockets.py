# SPDX-License-Identifier: Apache-2.0
"""NIXL-REMOVED-AGENT-KEEPS-SOCKETS: remove_remote_agent() leaves the sockets of a connection open.

Run it with Python, NIXL and numpy: ``python SCRIPT``. Seen with NIXL 1.5.0 and 1.5.1 and UCX; NIXL
1.4.1 is healthy. Both agents are in this process, so that the sockets of both sides are counted. They stay open until
the agents are deleted.
"""

import contextlib
import os
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

TIMES = 50
#: The time in seconds in which the progress threads of a healthy NIXL close their sockets.
SECONDS = 5


def sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


def connect_and_remove() -> None:
    agent.add_remote_agent(peer.get_agent_metadata())
    handle = agent.initialize_xfer("WRITE", local, remote, "peer")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    agent.remove_remote_agent("peer")


config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
agent, peer = nixl_agent("agent", config), nixl_agent("peer", config)
memory = [numpy.zeros(4096, dtype=numpy.uint8) for _ in range(2)]
source, target = ((buffer.ctypes.data, buffer.nbytes, 0) for buffer in memory)
agent.register_memory(agent.get_reg_descs([(*source, "")], "DRAM"))
peer.register_memory(peer.get_reg_descs([(*target, "")], "DRAM"))
local, remote = agent.get_xfer_descs([source], "DRAM"), agent.get_xfer_descs([target], "DRAM")
connect_and_remove()
before = sockets()
for _ in range(TIMES):
    connect_and_remove()
deadline = time.monotonic() + SECONDS
while (count := sockets() - before) > 0 and time.monotonic() < deadline:
    time.sleep(0.01)  # the progress threads close what they want to close
print(f"{'DEFECT' if count >= TIMES else 'healthy'}: {count} sockets are open after {TIMES} removals", flush=True)
os._exit(0)  # because several builds crash at a normal exit of Python
