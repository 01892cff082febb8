# SPDX-License-Identifier: Apache-2.0
"""NIXL-DEAD-TARGET-CRASHES: transfer() to a target that has just died crashes the process, in a few of 100 rounds.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [ROUNDS]``. Seen with NIXL 1.0.1 and UCX over tcp, in 2 of
100 rounds. Each round starts a target and an initiator, kills the target during transfers, and posts them again until
NIXL raises an error.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # cuda_copy: else NIXL refuses UCX on a host with a GPU

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, COUNT = 4 << 20, 4
backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 100


def start(name: str) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(COUNT * SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def initiator(pipe: Any, op: str) -> None:
    faulthandler.enable()
    agent, memory = start("initiator")
    metadata, address = pipe.recv()
    agent.add_remote_agent(metadata)
    handles = []
    for offset in range(0, COUNT * SIZE, SIZE):
        ends = [agent.get_xfer_descs([(base + offset, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, address)]
        handles.append(agent.initialize_xfer(op, *ends, "target"))
    in_flight: set[int] = set()
    done, deadline = 0, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            for number, handle in enumerate(handles):
                ask = agent.check_xfer_state if number in in_flight else agent.transfer
                if ask(handle) == "PROC":
                    in_flight.add(number)
                    continue
                in_flight.discard(number)
                done += 1
                if done == 2 * COUNT:
                    pipe.send("transfers are completed")
            time.sleep(0.0005)
        outcome = "no error in 60 s"
    except Exception as error:
        outcome = type(error).__name__
    pipe.send(outcome)
    os._exit(0)  # because several builds crash at a normal exit of Python


crashed = 0
fork: Any = multiprocessing.get_context("fork")
for number in range(rounds):
    op = ("WRITE", "READ")[number % 2]
    to_target, of_target = fork.Pipe()
    to_initiator, of_initiator = fork.Pipe()
    first = fork.Process(target=target, args=(of_target,))
    second = fork.Process(target=initiator, args=(of_initiator, op))
    first.start()
    second.start()
    of_initiator.close()  # so that the death of the initiator is seen
    to_initiator.send(to_target.recv())
    try:
        to_initiator.recv()
        first.kill()
        outcome = to_initiator.recv()
    except EOFError:
        outcome = "no answer"
    first.kill()
    first.join()
    second.join()
    if second.exitcode:
        outcome = f"the initiator was ended by {signal.Signals(-second.exitcode).name}"
    crashed += second.exitcode == -signal.SIGSEGV
    print(f"round {number + 1}, {op}: the target was killed: {outcome}", flush=True)
print(f"{'DEFECT' if crashed else 'healthy'}: {crashed} of {rounds} initiators were ended by SIGSEGV", flush=True)
