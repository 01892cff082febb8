# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-RELEASE-STALLS: a transfer that is prepared after one was released in flight stays PROC.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [SECONDS]``, by default LIBFABRIC and 60. Seen with NIXL
1.5.0 and LIBFABRIC over tcp; UCX over tcp is healthy. With 64 MiB the transfer is still in flight when it is released.
"""

import os
import sys
import time
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # cuda_copy: else NIXL refuses UCX on a host with a GPU

import numpy
from nixl._api import nixl_agent, nixl_agent_config

LARGE, SMALL = 64 << 20, 64 << 10
#: On a busy machine the transfer may have ended when it is released, which shows nothing.
ATTEMPTS = 10
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
config = nixl_agent_config(enable_prog_thread=True, backends=[backend])
agent, *peers = (nixl_agent(name, config) for name in ("agent", "peer", "other"))
memory = {name: numpy.zeros(LARGE, dtype=numpy.uint8) for name in ("agent", "peer", "other")}
for member in (agent, *peers):
    member.register_memory(member.get_reg_descs([(memory[member.name].ctypes.data, LARGE, 0, "")], "DRAM"))
for peer in peers:
    agent.add_remote_agent(peer.get_agent_metadata())
    agent.make_connection(peer.name)


def prepared(peer: str, size: int) -> Any:
    local, remote = (agent.get_xfer_descs([(memory[name].ctypes.data, size, 0)], "DRAM") for name in ("agent", peer))
    return agent.initialize_xfer("WRITE", local, remote, peer)


def finish(peer: str) -> str:
    """Write to a peer; return the state after at most ``seconds``."""
    handle = prepared(peer, SMALL)
    began, state = time.monotonic(), agent.transfer(handle)
    while state == "PROC" and time.monotonic() - began < seconds:
        time.sleep(0.01)
        state = agent.check_xfer_state(handle)
    return f"{state} after {time.monotonic() - began:.1f} s"


for _ in range(ATTEMPTS):
    first = prepared("peer", LARGE)
    state = agent.transfer(first)
    agent.release_xfer_handle(first)
    to_other, to_peer = finish("other"), finish("peer")
    if to_peer.startswith("PROC"):
        break
print(
    f"{'DEFECT' if to_peer.startswith('PROC') else 'healthy'}: a WRITE was {state} and released; then one to another "
    f"agent was {to_other}, and one to the same agent {to_peer}",
    flush=True,
)
os._exit(0)  # because several builds crash at a normal exit of Python
