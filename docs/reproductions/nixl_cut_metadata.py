# SPDX-License-Identifier: Apache-2.0
"""NIXL-CUT-METADATA: after add_remote_agent() refused cut metadata, it also refuses the whole metadata of that agent.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.0.1 to 1.5.1 and UCX; LIBFABRIC is
healthy. UCX is also healthy if half of the metadata is missing, because NIXL then fails before it adds the connection.
"""

import os
import sys

import numpy
from nixl._api import nixl_agent, nixl_agent_config

backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
config = nixl_agent_config(backends=[backend])
agent, peer = nixl_agent("agent", config), nixl_agent("peer", config)
memory = numpy.zeros(1 << 16, dtype=numpy.uint8)
peer.register_memory(peer.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
metadata = peer.get_agent_metadata()
try:
    agent.add_remote_agent(metadata[:-1])
    print("DEFECT: metadata without its last byte was accepted")
except Exception as error:
    print(f"metadata without its last byte was refused with {type(error).__name__}", flush=True)
try:
    agent.add_remote_agent(metadata)
    print("healthy: the whole metadata was accepted after that")
except Exception as error:
    print(f"DEFECT: the whole metadata was refused after that with {type(error).__name__}")
sys.stdout.flush()
os._exit(0)  # because several builds crash at a normal exit of Python
