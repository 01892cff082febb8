# SPDX-License-Identifier: Apache-2.0
"""NIXL-TELEMETRY-REFUSAL-UNCOUNTED: telemetry counts no error for a transfer whose two sides differ in length.

Run it with Python, NIXL and numpy: ``python SCRIPT``. Seen with NIXL 1.4.1, 1.5.0 and 1.5.1 and UCX. An agent asks for
a transfer of 4096 bytes to 2048 bytes of another agent of this process, and gets nixlInvalidParamError. The errors that
the endpoint of the exporter ``prometheus`` counts are read before and after. Then it asks for a transfer to an agent
that it does not know, whose error is counted.
"""

import os
import re
import socket
import time
from urllib.request import urlopen

import numpy

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
os.environ.update(
    NIXL_TELEMETRY_ENABLE="y",
    NIXL_TELEMETRY_EXPORTER="prometheus",
    NIXL_TELEMETRY_PROMETHEUS_LOCAL="y",
    NIXL_TELEMETRY_PROMETHEUS_PORT=str(PORT),
)

from nixl._api import nixl_agent, nixl_agent_config


def errors() -> float:
    time.sleep(2)  # twenty times the interval at which NIXL exports
    with urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
        counts = re.findall(r'^agent_errors_total\{.*agent_name="agent".*\} (\S+)$', answer.read().decode(), re.M)
    return sum(map(float, counts))


def refused(length: int, name: str) -> float:
    before = errors()
    try:
        agent.initialize_xfer("WRITE", local, agent.get_xfer_descs([(target_region[0], length, 0)], "DRAM"), name)
        print(f"undecided: a transfer of 4096 bytes to {length} bytes of {name} is accepted", flush=True)
        os._exit(0)
    except Exception as error:
        counted = errors() - before
        print(f"a transfer of 4096 bytes to {length} bytes of {name} raises {type(error).__name__}: {counted:g} errors")
        return counted


config = nixl_agent_config(backends=["UCX"])
agent = nixl_agent("agent", config)
os.environ["NIXL_TELEMETRY_ENABLE"] = "n"
peer = nixl_agent("peer", config)
source, target = (numpy.zeros(4096, dtype=numpy.uint8) for _ in range(2))
source_region, target_region = ((memory.ctypes.data, memory.nbytes, 0) for memory in (source, target))
agent.register_memory(agent.get_reg_descs([(*source_region, "")], "DRAM"))
peer.register_memory(peer.get_reg_descs([(*target_region, "")], "DRAM"))
agent.add_remote_agent(peer.get_agent_metadata())
local = agent.get_xfer_descs([source_region], "DRAM")
refused(4096, "nobody")
counted = refused(2048, "peer")
print(f"{'DEFECT: no error' if counted == 0 else f'healthy: {counted:g} error'} is counted", flush=True)
os._exit(0)  # because several builds crash at a normal exit of Python
