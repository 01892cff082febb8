# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-NO-RECONNECT: an agent that was removed and loaded again cannot be reached: a transfer to it fails.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.4.1 and 1.5.0, and LIBFABRIC over tcp,
where the transfer waits a minute for a handshake. NIXL 1.0.1 is healthy, and so is UCX.
"""

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 1 << 16
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"


def start(name: str) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def state_of_a_write() -> str:
    """Return DONE, ERR, or the error that NIXL raised."""
    ends = [agent.get_xfer_descs([(base, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, there)]
    try:
        handle = agent.initialize_xfer("WRITE", *ends, "target")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.001)
            state = agent.check_xfer_state(handle)
    except Exception as error:
        return type(error).__name__
    return str(state)


fork: Any = multiprocessing.get_context("fork")
ours, theirs = fork.Pipe()
process = fork.Process(target=target, args=(theirs,))
process.start()
metadata, there = ours.recv()
agent, memory = start("initiator")
agent.add_remote_agent(metadata)
print(f"the first WRITE: {state_of_a_write()}", flush=True)
agent.remove_remote_agent("target")
agent.add_remote_agent(metadata)
began = time.monotonic()
state = state_of_a_write()
said = "healthy" if state == "DONE" else "DEFECT"
took = time.monotonic() - began
print(f"{said}: a WRITE after remove_remote_agent() and add_remote_agent(): {state} after {took:.1f} s", flush=True)
process.kill()
process.join()
os._exit(0)  # because several builds crash or hang at a normal exit of Python
