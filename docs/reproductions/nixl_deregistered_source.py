# SPDX-License-Identifier: Apache-2.0
"""NIXL-DEREGISTERED-SOURCE: with LIBFABRIC, a transfer that is posted after its own region was deregistered crashes.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.5.0 and LIBFABRIC over tcp.
"""

import os
import sys
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
config = nixl_agent_config(enable_prog_thread=True, backends=[backend])
agent, peer = nixl_agent("agent", config), nixl_agent("peer", config)
memory = [numpy.zeros(1 << 16, dtype=numpy.uint8) for _ in range(2)]
source, target = ((buffer.ctypes.data, buffer.nbytes, 0) for buffer in memory)
registered = agent.register_memory(agent.get_reg_descs([(*source, "")], "DRAM"))
peer.register_memory(peer.get_reg_descs([(*target, "")], "DRAM"))
agent.add_remote_agent(peer.get_agent_metadata())
local, remote = agent.get_xfer_descs([source], "DRAM"), agent.get_xfer_descs([target], "DRAM")
handle = agent.initialize_xfer("WRITE", local, remote, "peer", b"written")
agent.deregister_memory(registered)
print("the region of a prepared transfer is deregistered: posting the transfer", flush=True)
try:
    state, deadline = agent.transfer(handle), time.monotonic() + 60
    while state != "DONE" and time.monotonic() < deadline:
        state = agent.check_xfer_state(handle)
        peer.get_new_notifs()
    print(f"healthy: the transfer is {state}")
except Exception as error:
    print(f"healthy: the transfer was refused with {type(error).__name__}")
sys.stdout.flush()
os._exit(0)  # because several builds crash at a normal exit of Python
