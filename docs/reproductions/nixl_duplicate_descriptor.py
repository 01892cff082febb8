# SPDX-License-Identifier: Apache-2.0
"""NIXL-DUPLICATE-DESCRIPTOR: deregister_memory with a list that names a region twice ends the process with SIGSEGV.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.5.1 and UCX, 1.5.0 and LIBFABRIC.
Upstream: https://github.com/ai-dynamo/nixl/issues/1792
"""

import os
import sys

import numpy
from nixl._api import nixl_agent, nixl_agent_config

backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
agent = nixl_agent("agent", nixl_agent_config(backends=[backend]))
memory = numpy.zeros(1 << 16, dtype=numpy.uint8)
region = (memory.ctypes.data, memory.nbytes, 0, "")
agent.register_memory(agent.get_reg_descs([region], "DRAM"))
print("deregistering a list that names the region twice", flush=True)
try:
    agent.deregister_memory(agent.get_reg_descs([region, region], "DRAM"))
    print("healthy: the list was accepted")
except Exception as error:
    print(f"healthy: the list was refused with {type(error).__name__}")
sys.stdout.flush()
os._exit(0)  # because several builds crash at a normal exit of Python
