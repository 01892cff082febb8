# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-NOTIFICATION-HANGS: a send_notif() to an agent whose process has died does not return.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [SECONDS]``, by default LIBFABRIC and 20. Seen with NIXL
1.0.1 to 1.5.1 and LIBFABRIC over tcp; UCX is healthy. It moves bytes to a target, kills the target, sends it up to 200
notifications, and waits so many seconds for the one that does not return.
"""

import multiprocessing
import signal
import sys
import time
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, NOTIFICATIONS = 1 << 16, 200
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0


def start(name: str) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def initiator(pipe: Any, metadata: bytes, there: int) -> None:
    agent, memory = start("initiator")
    agent.add_remote_agent(metadata)
    ends = [agent.get_xfer_descs([(base, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, there)]
    handle = agent.initialize_xfer("WRITE", *ends, "target")
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
    pipe.send(state)
    pipe.recv()  # the target is dead now
    for number in range(NOTIFICATIONS):
        try:
            agent.send_notif("target", b"lost")
        except Exception as error:
            pipe.send(f"send_notif() returned {number} times and then raised {type(error).__name__}")
            return
        pipe.send(number + 1)
        # A call that is made before the library notices the death returns, and its notification is lost.
        time.sleep(0.02)
    pipe.send(f"send_notif() returned {NOTIFICATIONS} times")


fork: Any = multiprocessing.get_context("fork")
to_target, of_target = fork.Pipe()
to_initiator, of_initiator = fork.Pipe()
first = fork.Process(target=target, args=(of_target,))
first.start()
second = fork.Process(target=initiator, args=(of_initiator, *to_target.recv()))
second.start()
print(f"a WRITE to the target: {to_initiator.recv()}", flush=True)
first.kill()
first.join()
to_initiator.send("killed")
returned, said = 0, ""
while not said and to_initiator.poll(seconds):
    answer = to_initiator.recv()
    returned, said = (answer, "") if isinstance(answer, int) else (returned, answer)
second.kill()
second.join()
if said:
    print(f"healthy: the target was killed, and {said}", flush=True)
else:
    print(f"DEFECT: the target was killed, and call {returned + 1} of send_notif() did not return in {seconds:.0f} s")
