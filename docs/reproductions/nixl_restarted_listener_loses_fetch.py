# SPDX-License-Identifier: Apache-2.0
"""NIXL-RESTARTED-LISTENER-LOSES-FETCH: the first fetch from an agent that restarted on its port is lost.

Run it with Python and NIXL: ``python SCRIPT``. Seen with NIXL 1.0.1 to 1.5.1. The agent that fetches keeps the
connection to the agent that has ended, sends its request there, and does not connect again until the next request.
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time

from nixl._api import nixl_agent, nixl_agent_config

LOOPBACK, SECONDS = "127.0.0.1", 10
#: An agent that listens on a port until its standard input is closed.
PEER = """
import os, sys
from nixl._api import nixl_agent, nixl_agent_config
config = nixl_agent_config(
    enable_prog_thread=True, enable_listen_thread=True, listen_port=int(sys.argv[1]), backends=["UCX"]
)
agent = nixl_agent("peer", config)
print("listening", flush=True)
sys.stdin.read()
os._exit(0)
"""


def start() -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PEER, str(port)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    while "listening" not in (line := started.stdout.readline()):
        assert line, f"the other agent could not listen on port {port}"
    return started


def free_port() -> int:
    """Return a port that the system does not give to outgoing connections."""
    for candidate in random.sample(range(10_000, 30_000), 1000):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", candidate))
            return candidate
    raise OSError("no port is free")


def fetched() -> bool:
    agent.fetch_remote_metadata("peer", LOOPBACK, port)
    deadline = time.monotonic() + SECONDS
    while not (loaded := agent.check_remote_metadata("peer")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(loaded)


port = free_port()
config = nixl_agent_config(enable_prog_thread=True, enable_listen_thread=True, listen_port=0, backends=["UCX"])
agent = nixl_agent("agent", config)
peer = start()
while not fetched():
    print(f"the agent is not fetched yet after {SECONDS} s", flush=True)
peer.kill()
peer.wait()
agent.remove_remote_agent("peer")
peer = start()
first, second = fetched(), fetched()
print(f"the agent has restarted, and is {'' if second else 'not '}fetched by the second call", flush=True)
first_call = "healthy: the first had an answer" if first else f"DEFECT: the first had no answer in {SECONDS} s"
print(first_call, flush=True)
os._exit(0)  # because several builds crash at a normal exit of Python
