# SPDX-License-Identifier: Apache-2.0
"""NIXL-STOPPED-TARGET-SILENT: transfers to an agent whose process is stopped stay PROC, and no error is raised.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [SECONDS]``, by default UCX and 30. Seen with NIXL 1.0.1
to 1.5.1, with UCX over tcp and LIBFABRIC over tcp. It sets ``UCX_TLS`` unless it is set: over cma the transfers go on.
A target gets SIGSTOP during transfers, as if it hung. SIGCONT follows after SECONDS.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,cuda_copy")  # cuda_copy: else NIXL refuses UCX on a host with a GPU

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, COUNT = 16 << 20, 4
backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0


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
    """Every 0.1 s, send the time, how many transfers were completed, and how many are PROC; at the end an error."""
    agent, memory = start("initiator")
    agent.add_remote_agent(metadata)
    handles = []
    for offset in range(0, COUNT * SIZE, SIZE):
        ends = [agent.get_xfer_descs([(base + offset, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, address)]
        handles.append(agent.initialize_xfer("WRITE", *ends, "target"))
    in_flight: set[int] = set()
    done, sent_at = 0, 0.0
    try:
        while True:
            for number, handle in enumerate(handles):
                ask = agent.check_xfer_state if number in in_flight else agent.transfer
                if ask(handle) == "PROC":
                    in_flight.add(number)
                    continue
                in_flight.discard(number)
                done += 1
            if time.monotonic() - sent_at > 0.1:
                sent_at = time.monotonic()
                pipe.send((sent_at, done, len(in_flight)))
            time.sleep(0.0005)
    except Exception as error:
        pipe.send(type(error).__name__)
        os._exit(0)  # because several builds crash or hang at a normal exit of Python


def begin(function: Any, *arguments: Any) -> Any:
    """Start a process; return it and the end of a pipe to it."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(pipe: Any) -> Any:
    """Return what a process sends; None if it has ended, or sends nothing for 180 s."""
    try:
        return pipe.recv() if pipe.poll(180.0) else None
    except EOFError:
        return None


def report(moment: float, least: int = 0) -> Any:
    """Return what the initiator says after a moment, or for at most 60 s longer until it has completed so many."""
    message = answer(to_initiator)
    while isinstance(message, tuple) and (message[0] < moment or (message[1] < least and message[0] < moment + 60.0)):
        message = answer(to_initiator)
    return message


def verdict() -> str:
    before = report(time.monotonic(), least=2 * COUNT)
    if not isinstance(before, tuple) or before[1] < 2 * COUNT:
        return f"no fault was made: the initiator said {before}"
    os.kill(target_process.pid, signal.SIGSTOP)
    # What had arrived before may still be completed.
    first = report(time.monotonic() + 1.0)
    last = report(first[0] + seconds) if isinstance(first, tuple) else first
    os.kill(target_process.pid, signal.SIGCONT)
    if isinstance(last, str):
        return f"healthy: the target was stopped, and a transfer raised {last}"
    if last is None:
        return f"another defect: the initiator hangs or has ended, with exit code {initiator_process.exitcode}"
    if last[1] > first[1]:
        return f"healthy: the target was stopped, and transfers were completed for {seconds:.0f} s"
    after = report(time.monotonic(), least=last[1] + COUNT)
    went_on = isinstance(after, tuple) and after[1] > last[1]
    print(f"after SIGCONT the transfers were {'' if went_on else 'not '}completed", flush=True)
    return f"DEFECT: the target was stopped, and for {seconds:.0f} s {last[2]} transfers were PROC"


fork: Any = multiprocessing.get_context("fork")
target_process, to_target = begin(target)
described = answer(to_target)
if described is None:
    sys.exit("the target did not start")
initiator_process, to_initiator = begin(initiator, *described)
try:
    message = verdict()
finally:
    for process in (target_process, initiator_process):
        process.kill()
print(message, flush=True)
