# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-NO-RECONNECT: after remove_remote_agent() and add_remote_agent(), a transfer to that agent fails.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND]``. Seen with NIXL 1.4.1 and 1.5.0, and LIBFABRIC over tcp,
where the transfer fails after a minute. NIXL 1.0.1 is healthy, and so is UCX of 1.5.0 and 1.5.1. The target lives all
the time.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 1 << 16
#: The deadline of a transfer in seconds.
DEADLINE = 180.0
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"


def start(name: str) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def write(agent: Any, source: int, destination: int) -> str:
    """Return the state of a WRITE to the target, or the error that NIXL raised."""
    local, remote = (agent.get_xfer_descs([(address, SIZE, 0)], "DRAM") for address in (source, destination))
    began = time.monotonic()
    try:
        handle = agent.initialize_xfer("WRITE", local, remote, "target")
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() - began < DEADLINE:
            time.sleep(0.001)
            state = agent.check_xfer_state(handle)
    except Exception as error:
        state = type(error).__name__
    return f"{state} after {time.monotonic() - began:.1f} s"


fork: Any = multiprocessing.get_context("fork")
ours, theirs = fork.Pipe()
process = fork.Process(target=target, args=(theirs,), daemon=True)
process.start()
theirs.close()
try:
    metadata, destination = ours.recv()
except EOFError:
    sys.exit("the target did not start")
agent, memory = start("initiator")
agent.add_remote_agent(metadata)
outcome = write(agent, memory.ctypes.data, destination)
if not outcome.startswith("DONE"):
    sys.exit(f"the first WRITE ended as {outcome}, before any fault was made")
agent.remove_remote_agent("target")
time.sleep(1.0)  # UCX ends the old connection meanwhile
agent.add_remote_agent(metadata)
outcome = write(agent, memory.ctypes.data, destination)
verdict = "healthy" if outcome.startswith("DONE") else "DEFECT"
print(f"{verdict}: a WRITE after remove_remote_agent() and add_remote_agent(): {outcome}", flush=True)
process.kill()
process.join()
os._exit(0)  # because several builds crash or hang at a normal exit of Python
