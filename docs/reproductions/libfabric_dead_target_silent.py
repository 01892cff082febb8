# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC-DEAD-TARGET-SILENT: a transfer to a target that has died stays PROC, and no error is raised.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [ROUNDS] [SECONDS]``. Seen with NIXL 1.0.1 and 1.4.1, and
LIBFABRIC over tcp. Each round starts a target and an initiator, kills the target during transfers, and then asks for
the state of the transfers.
"""

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, COUNT = 16 << 20, 4
backend = sys.argv[1] if len(sys.argv) > 1 else "LIBFABRIC"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0


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
    agent, memory = start("initiator")
    metadata, address = pipe.recv()
    agent.add_remote_agent(metadata)
    handles = []
    for offset in range(0, COUNT * SIZE, SIZE):
        ends = [agent.get_xfer_descs([(base + offset, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, address)]
        handles.append(agent.initialize_xfer(op, *ends, "target"))
    in_flight: set[int] = set()
    done, last = 0, time.monotonic()
    try:
        # A busy machine needs longer for its first transfers than a dead target is given.
        while time.monotonic() - last < (seconds if done >= 2 * COUNT else 120.0):
            for number, handle in enumerate(handles):
                ask = agent.check_xfer_state if number in in_flight else agent.transfer
                if ask(handle) == "PROC":
                    in_flight.add(number)
                    continue
                in_flight.discard(number)
                done, last = done + 1, time.monotonic()
                if done == 2 * COUNT:
                    pipe.send("transfers are completed")
            time.sleep(0.0005)
        error_name = ""
    except Exception as error:
        error_name = type(error).__name__
    pipe.send(error_name)
    os._exit(0)  # because several builds crash or hang at a normal exit of Python


def received(pipe: Any) -> Any:
    """Return what a process sends; None if it has ended, or hangs in a call of NIXL."""
    try:
        return pipe.recv() if pipe.poll(180.0 + seconds) else None
    except EOFError:
        return None


silent, untried = 0, 0
fork: Any = multiprocessing.get_context("fork")
for number in range(rounds):
    op = ("WRITE", "READ")[number % 2]
    to_target, of_target = fork.Pipe()
    to_initiator, of_initiator = fork.Pipe()
    first = fork.Process(target=target, args=(of_target,))
    second = fork.Process(target=initiator, args=(of_initiator, op))
    first.start()
    of_target.close()
    second.start()
    of_initiator.close()
    metadata = received(to_target)
    if metadata is not None:
        to_initiator.send(metadata)
    moved = metadata is not None and received(to_initiator) is not None
    first.kill()
    error_name = received(to_initiator) if moved else None
    second.kill()
    first.join()
    second.join()
    if not moved:
        untried += 1
        shown = "no transfer was completed, before any fault was made"
    elif error_name is None:
        silent += 1
        shown = "the target was killed, and the initiator ended or hangs in a call of NIXL"
    elif error_name:
        shown = f"the target was killed, and the transfers report {error_name}"
    else:
        silent += 1
        shown = f"the target was killed, and for {seconds:.0f} s the transfers are PROC"
    print(f"round {number + 1}, {op}: {shown}", flush=True)
tried = rounds - untried
print(f"{'DEFECT' if silent else 'healthy'}: in {silent} of {tried} rounds no error was raised", flush=True)
