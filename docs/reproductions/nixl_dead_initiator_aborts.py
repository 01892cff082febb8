# SPDX-License-Identifier: Apache-2.0
"""NIXL-DEAD-INITIATOR-ABORTS: if an initiator dies during a READ, UCX sometimes ends its target with SIGABRT.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [ROUNDS]``, by default UCX and 100. Seen with UCX over
tcp on two cores, in 2 to 7 of 100 rounds, whether the cores were busy or idle. Each round starts an initiator, kills it
while it reads from the target, and checks whether the target lives. A new target replaces one that has ended.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import time
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # cuda_copy: else NIXL refuses UCX on a host with a GPU

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, COUNT = 16 << 20, 4
#: How long a target is watched after the death of its initiator, in seconds.
WATCHED = 0.5
backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 100


def start(name: str) -> Any:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends with its parent
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(COUNT * SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def initiator(pipe: Any, metadata: bytes, address: int) -> None:
    agent, memory = start(f"initiator-{os.getpid()}")
    agent.add_remote_agent(metadata)
    handles = []
    for offset in range(0, COUNT * SIZE, SIZE):
        ends = [agent.get_xfer_descs([(base + offset, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, address)]
        handles.append(agent.initialize_xfer("READ", *ends, "target"))
    in_flight: set[int] = set()
    done = 0
    while True:
        for number, handle in enumerate(handles):
            ask = agent.check_xfer_state if number in in_flight else agent.transfer
            if ask(handle) == "PROC":
                in_flight.add(number)
                continue
            in_flight.discard(number)
            done += 1
            if done == COUNT:
                pipe.send("transfers are completed")


fork: Any = multiprocessing.get_context("fork")


def start_target() -> Any:
    ours, theirs = fork.Pipe()
    process = fork.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return (process, *ours.recv())


aborted = 0
first, metadata, memory = start_target()
for number in range(rounds):
    ours, theirs = fork.Pipe()
    second = fork.Process(target=initiator, args=(theirs, metadata, memory), daemon=True)
    second.start()
    theirs.close()
    ours.recv()
    time.sleep(random.uniform(0, 0.1))
    second.kill()
    second.join()
    first.join(WATCHED)
    outcome = "the target lives"
    if first.exitcode is not None:
        outcome = f"the target was ended by {signal.Signals(-first.exitcode).name}"
        aborted += first.exitcode == -signal.SIGABRT
        first, metadata, memory = start_target()
    print(f"round {number + 1}: the initiator was killed: {outcome}", flush=True)
first.kill()
outcome = "DEFECT" if aborted else "healthy"
print(f"{outcome}: in {aborted} of {rounds} rounds the target was ended by SIGABRT", flush=True)
