# SPDX-License-Identifier: Apache-2.0
"""NIXL-TELEMETRY-DISCONNECT-UNCOUNTED: telemetry counts no error for a transfer whose other agent has died.

Run it with Python, NIXL and numpy: ``python SCRIPT``. Seen with NIXL 1.4.1, 1.5.0 and 1.5.1 and UCX. A second process
is the other agent. It is killed, and the next transfer to it raises nixlRemoteDisconnectError. The errors that the
endpoint of the exporter ``prometheus`` counts are read before and after.
"""

import os
import re
import signal
import socket
import time
from urllib.request import urlopen

import numpy
from nixl._api import nixl_agent, nixl_agent_config

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
reading, writing = os.pipe()
peer = os.fork()  # before there is an agent
if peer:
    os.environ.update(
        NIXL_TELEMETRY_ENABLE="y",
        NIXL_TELEMETRY_EXPORTER="prometheus",
        NIXL_TELEMETRY_PROMETHEUS_LOCAL="y",
        NIXL_TELEMETRY_PROMETHEUS_PORT=str(PORT),
    )


def errors() -> float:
    time.sleep(2)  # twenty times the interval at which NIXL exports
    with urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
        return sum(map(float, re.findall(r"^agent_errors_total\{.*\} (\S+)$", answer.read().decode(), re.M)))


def write() -> str:
    handle = agent.initialize_xfer("WRITE", local, remote, "peer")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.release_xfer_handle(handle)
    return str(state)


config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
agent = nixl_agent("agent" if peer else "peer", config)
memory = numpy.zeros(4096, dtype=numpy.uint8)
source = (memory.ctypes.data, memory.nbytes, 0)
agent.register_memory(agent.get_reg_descs([(*source, "")], "DRAM"))
if not peer:
    with os.fdopen(writing, "w") as pipe:
        pipe.write(f"{source[0]} {agent.get_agent_metadata().hex()}\n")
    signal.pause()

os.close(writing)
try:
    with os.fdopen(reading) as pipe:
        address, metadata = pipe.readline().split()
    agent.add_remote_agent(bytes.fromhex(metadata))
    local = agent.get_xfer_descs([source], "DRAM")
    remote = agent.get_xfer_descs([(int(address), memory.nbytes, 0)], "DRAM")
    print(f"a transfer to the living agent ends with {write()}")
    before = errors()
finally:
    os.kill(peer, signal.SIGKILL)
    os.waitpid(peer, 0)
time.sleep(1)
try:
    print(f"undecided: a transfer to the dead agent ends with {write()}", flush=True)
except Exception as error:
    print(f"a transfer to the dead agent raises {type(error).__name__}")
    counted = errors() - before
    print(f"{'DEFECT: no error' if counted == 0 else f'healthy: {counted:g} error'} is counted", flush=True)
os._exit(0)  # because several builds crash at a normal exit of Python
