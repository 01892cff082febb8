# SPDX-License-Identifier: Apache-2.0
"""NIXL-RELEASED-HANDLE: a transfer handle that is posted after its release ends the process with SIGSEGV.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.5.1 and UCX, 1.5.0 and LIBFABRIC.
"""

import os
import sys
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
config = nixl_agent_config(enable_prog_thread=True, backends=[backend])
agent, peer = nixl_agent("agent", config), nixl_agent("peer", config)
memory = [numpy.zeros(1 << 16, dtype=numpy.uint8) for _ in range(2)]
source, target = ((buffer.ctypes.data, buffer.nbytes, 0) for buffer in memory)
agent.register_memory(agent.get_reg_descs([(*source, "")], "DRAM"))
peer.register_memory(peer.get_reg_descs([(*target, "")], "DRAM"))
agent.add_remote_agent(peer.get_agent_metadata())
local, remote = agent.get_xfer_descs([source], "DRAM"), agent.get_xfer_descs([target], "DRAM")
handle = agent.initialize_xfer("WRITE", local, remote, "peer", b"written")
state, deadline = agent.transfer(handle), time.monotonic() + 60
while state != "DONE" and time.monotonic() < deadline:
    state = agent.check_xfer_state(handle)
    peer.get_new_notifs()
agent.release_xfer_handle(handle)
print(f"the transfer is {state}, and its handle is released: posting the handle again", flush=True)
try:
    print(f"healthy: the transfer is {agent.transfer(handle)}")
except Exception as error:
    print(f"healthy: the handle was refused with {type(error).__name__}")
sys.stdout.flush()
os._exit(0)  # because several builds crash at a normal exit of Python
