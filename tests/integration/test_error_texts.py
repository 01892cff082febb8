# SPDX-License-Identifier: Apache-2.0
"""The page of errors by their text has the texts that the installed NIXL really says."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.cli_run import environment

from pytest_nixl.core.texts import parse_texts, text_file
from pytest_nixl.nixl.installed import nixl_packages

#: Makes errors with the real NIXL, and prints the class and the text of each.
PROVOKE = """
import ctypes, os, sys
from nixl._api import nixl_agent, nixl_agent_config

def attempt(what, call):
    try:
        call()
    except Exception as error:
        print(what, type(error).__name__, error, flush=True)
    else:
        print(what, "none", flush=True)

agent = nixl_agent("a", nixl_agent_config(backends=["UCX"], capture_telemetry=True))
memory = ctypes.create_string_buffer(8192)
base = ctypes.addressof(memory)
agent.register_memory([(base, 8192, 0, "")], "DRAM")

def lists(*sides):
    return [agent.get_xfer_descs([(base + start, size, 0) for start, size in side], "DRAM") for side in sides]

def move():
    handle = agent.initialize_xfer("WRITE", *lists([(0, 64)], [(4096, 64)]), "a", b"")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    agent.get_xfer_telemetry(handle)

attempt("unknown-agent", lambda: agent.initialize_xfer("WRITE", *lists([(0, 64)], [(4096, 64)]), "nobody", b""))
attempt("unregistered", lambda: agent.initialize_xfer("WRITE", *lists([(0, 64)], [(8192, 64)]), "a", b""))
attempt("lengths", lambda: agent.initialize_xfer("WRITE", *lists([(0, 64)], [(4096, 128)]), "a", b""))
attempt("own-name", lambda: agent.add_remote_agent(agent.get_agent_metadata()))
attempt("garbage", lambda: agent.add_remote_agent(b"this is no metadata of an agent"))
attempt("telemetry", move)
# As an engine whose tensor-parallel sizes differ, and that counts replicated heads as heads of its own.
attempt("beyond-the-cache", lambda: agent.prep_xfer_dlist("", [(base + 512 * n, 512, 0) for n in range(32)], "DRAM"))
attempt("view-of-host", lambda: agent.prep_mem_view(agent.get_remote_descs([(base, 64, 0, "a")], "DRAM")))
attempt("view-of-unknown", lambda: agent.prep_mem_view(agent.get_remote_descs([(base, 64, 0, "a")], "VRAM")))
os._exit(0)
"""


def errors() -> list[dict[str, Any]]:
    """Return the errors of the page."""
    found: list[dict[str, Any]] = parse_texts(text_file("error-texts"))["error"]
    return found


def run(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(**variables), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_errors_of_the_real_nixl_are_on_the_page() -> None:
    said = run(PROVOKE, NIXL_TELEMETRY_ENABLE="n")
    found = dict(re.findall(r"^([a-z-]+) (nixl\w+Error) ", said, re.M))
    assert found == {
        "unknown-agent": "nixlNotFoundError",
        "unregistered": "nixlNotFoundError",
        "lengths": "nixlInvalidParamError",
        "own-name": "nixlInvalidParamError",
        "garbage": "nixlMismatchError",
        "telemetry": "nixlNoTelemetryError",
        "beyond-the-cache": "nixlNotFoundError",
        "view-of-host": "nixlBackendError",
        "view-of-unknown": "nixlNotFoundError",
    }, said
    for text in ("failed to prepare the", "failed to allocate memory for sys_dev", "A backend capable of"):
        [error] = [each for each in errors() if each["text"].startswith(text)]
        assert error["text"] in said
    page = {each["also"]: each["text"] for each in errors() if each.get("also", "").startswith("nixl")}
    for name in set(found.values()):
        assert f"{name} {page[name]}" in said
    # A transport alone that cannot carry NIXL's messages: the code is NIXL's, and the reason is in UCX's line.
    refused = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config(backends=['UCX']))", UCX_TLS="sm")
    assert "nixlBackendError: NIXL_ERR_BACKEND" in refused
    absent = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config(backends=['UCX']))",
                 UCX_NET_DEVICES="absent0:1", UCX_LOG_LEVEL="warn")  # fmt: skip
    assert "network device 'absent0:1' is not available" in absent
    switch = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config())", NIXL_TELEMETRY_ENABLE="perhaps")
    assert "Conversion to bool failed" in switch


def test_texts_of_libraries_are_in_the_installed_wheel() -> None:
    sayers = ("NIXL", "UCX", "libibverbs", "etcd's client in NIXL", "the loader")
    texts = {each["text"] for each in errors() if each["by"] in sayers}
    for package in nixl_packages():
        for file in importlib.metadata.distribution(package).files or ():
            path = Path(os.fspath(file.locate()))
            if path.suffix in (".py", ".so") or ".so." in path.name:
                data = path.read_bytes()
                texts = {text for text in texts if text.encode() not in data}
    # Composed at run time: the codes by the bindings, the others with a name in them.
    assert texts <= {
        "NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_NO_TELEMETRY", "active messages transport", "backend 'UCX' not found",
        "is not available, please use one or more of",
    }  # fmt: skip
