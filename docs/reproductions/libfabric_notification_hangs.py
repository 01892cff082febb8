# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-NOTIFICATION-HANGS: after the process of an agent has died, a send_notif() to it does not return.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [SECONDS]``, by default LIBFABRIC and 90. Seen with NIXL
1.0.1 to 1.5.1 and LIBFABRIC over tcp; UCX over tcp and cma is healthy. The initiator writes to a target, which is then
killed. For 30 s the initiator sends notifications to it, and each call has SECONDS to return. The first calls may
return: their notifications are lost.
"""

import ctypes
import multiprocessing
import signal
import sys
import time
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 1 << 16
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 90.0


def start(name: str) -> Any:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def initiator(pipe: Any, metadata: bytes, address: int) -> None:
    agent, memory = start("initiator")
    agent.add_remote_agent(metadata)
    local, remote = (agent.get_xfer_descs([(base, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, address))
    handle = agent.initialize_xfer("WRITE", local, remote, "target")
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
    pipe.send(state)
    pipe.recv()  # the target has been killed
    began, returned = time.monotonic(), 0
    while time.monotonic() - began < 30.0:
        try:
            agent.send_notif("target", b"lost")
        except Exception as error:
            pipe.send(f"send_notif() returned {returned} times and then raised {type(error).__name__}")
            return
        returned += 1
        pipe.send(returned)
        time.sleep(0.02)
    pipe.send(f"send_notif() returned {returned} times")


def begin(function: Any, *arguments: Any) -> Any:
    """Start a process; return it and the end of a pipe to it."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(pipe: Any, wait: float = 180.0) -> Any:
    """Return what a process sends; None if it has ended, or sends nothing in time."""
    try:
        return pipe.recv() if pipe.poll(wait) else None
    except EOFError:
        return None


fork: Any = multiprocessing.get_context("fork")
target_process, to_target = begin(target)
described = answer(to_target)
if described is None:
    sys.exit("the target did not start")
initiator_process, to_initiator = begin(initiator, *described)
if answer(to_initiator) != "DONE":
    sys.exit("no transfer was completed before the target was killed")
target_process.kill()
target_process.join()
to_initiator.send("killed")
message = answer(to_initiator, seconds)
returned = 0
while isinstance(message, int):
    returned, message = message, answer(to_initiator, seconds)
initiator_process.join(1.0)
if message:
    print(f"healthy: the target was killed, and {message}", flush=True)
elif initiator_process.is_alive():
    print(f"DEFECT: the target was killed, and call {returned + 1} of send_notif() did not return in {seconds:.0f} s")
else:
    sys.exit(f"another defect: the initiator has ended, with exit code {initiator_process.exitcode}")
initiator_process.kill()
