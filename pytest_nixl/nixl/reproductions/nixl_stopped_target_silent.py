# SPDX-License-Identifier: Apache-2.0
"""NIXL-STOPPED-TARGET-SILENT: transfers to an agent whose process is stopped stay PROC, and no error is raised.

Run it with Python, NIXL and numpy: ``python SCRIPT [BACKEND] [SECONDS]``, by default UCX and 30. Seen with NIXL 1.0.1
to 1.5.1, with UCX and LIBFABRIC over tcp. It stops the target during transfers and watches their states for so many
seconds. Then it lets the target go on.
"""

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp")

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE, COUNT = 16 << 20, 4
backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0


def start(name: str) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
    memory = numpy.zeros(COUNT * SIZE, dtype=numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def target(pipe: Any) -> None:
    agent, memory = start("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    signal.pause()


def initiator(pipe: Any, metadata: bytes, there: int) -> None:
    agent, memory = start("initiator")
    agent.add_remote_agent(metadata)
    handles = []
    for offset in range(0, COUNT * SIZE, SIZE):
        ends = [agent.get_xfer_descs([(base + offset, SIZE, 0)], "DRAM") for base in (memory.ctypes.data, there)]
        handles.append(agent.initialize_xfer("WRITE", *ends, "target"))
    in_flight: set[int] = set()
    done = 0
    try:
        while True:
            for number, handle in enumerate(handles):
                ask = agent.check_xfer_state if number in in_flight else agent.transfer
                if ask(handle) == "PROC":
                    in_flight.add(number)
                    continue
                in_flight.discard(number)
                done += 1
                pipe.send(done)
            time.sleep(0.0005)
    except Exception as error:
        pipe.send(type(error).__name__)
        os._exit(0)  # because several builds crash or hang at a normal exit of Python


def next_answer(wait: float) -> int | str | None:
    """Return how many transfers are completed, or the error that one raised; None if neither is said in time."""
    answer: int | str | None = to_initiator.recv() if to_initiator.poll(wait) else None
    return answer


fork: Any = multiprocessing.get_context("fork")
to_target, of_target = fork.Pipe()
to_initiator, of_initiator = fork.Pipe()
first = fork.Process(target=target, args=(of_target,))
first.start()
second = fork.Process(target=initiator, args=(of_initiator, *to_target.recv()))
second.start()
answer: int | str | None = 0
while isinstance(answer, int) and answer < 2 * COUNT:
    answer = next_answer(180.0)
if not isinstance(answer, int):
    sys.exit("no transfer was completed, before any fault was made")
os.kill(first.pid, signal.SIGSTOP)
# What had arrived before may still be completed.
stopped = last = time.monotonic()
while isinstance(answer, int) and last - stopped < seconds:
    answer = next_answer(seconds)
    last = time.monotonic()
if isinstance(answer, str):
    said = f"healthy: the target was stopped, and a transfer raised {answer}"
elif isinstance(answer, int):
    said = f"healthy: the target was stopped, and transfers were completed for {seconds:.0f} s"
else:
    said = f"DEFECT: the target was stopped, and for {seconds:.0f} s the transfers were PROC"
os.kill(first.pid, signal.SIGCONT)
went_on = isinstance(next_answer(60.0), int)
print(f"the target went on, and transfers were {'' if went_on else 'not '}completed", flush=True)
for process in (first, second):
    process.kill()
    process.join()
print(said, flush=True)
