# SPDX-License-Identifier: Apache-2.0
"""NIXL-REMOVED-IN-FLIGHT: a READ writes into the memory of an agent after it has reported an error.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.5.1 and UCX over tcp. With 64 MiB the
transfer is still in flight when it is cancelled; on a slow or very fast machine run it again.
"""

import os
import sys
import time

os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # cuda_copy: else NIXL refuses UCX on a host with a GPU

import numpy
from nixl._api import nixl_agent, nixl_agent_config

backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
config = nixl_agent_config(enable_prog_thread=True, backends=[backend])
agent, peer = nixl_agent("agent", config), nixl_agent("peer", config)
memory = [numpy.zeros(64 << 20, dtype=numpy.uint8) for _ in range(2)]
source, target = ((buffer.ctypes.data, buffer.nbytes, 0) for buffer in memory)
agent.register_memory(agent.get_reg_descs([(*source, "")], "DRAM"))
peer.register_memory(peer.get_reg_descs([(*target, "")], "DRAM"))
agent.add_remote_agent(peer.get_agent_metadata())
agent.make_connection("peer")
local, remote = agent.get_xfer_descs([source], "DRAM"), agent.get_xfer_descs([target], "DRAM")
handle = agent.initialize_xfer("READ", local, remote, "peer")
state = agent.transfer(handle)
agent.remove_remote_agent("peer")
try:
    outcome = agent.check_xfer_state(handle)
except Exception as error:
    outcome = type(error).__name__
print(f"the READ was {state}, remove_remote_agent() has returned, and the READ reports {outcome}", flush=True)
end = memory[0][-(64 << 10) :]
end[:] = 255  # the program uses its memory again
changed, deadline = 0, time.monotonic() + 30
while changed < end.nbytes and state != "DONE" and time.monotonic() < deadline:
    time.sleep(0.1)
    changed = int(numpy.count_nonzero(end != 255))
print(f"{'DEFECT' if changed else 'healthy'}: {changed} bytes were overwritten after that", flush=True)
os._exit(0)  # because several builds crash at a normal exit of Python
