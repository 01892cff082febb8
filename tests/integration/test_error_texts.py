# SPDX-License-Identifier: Apache-2.0
"""The entries of errors have the texts that the installed NIXL really says."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.cli_run import ROOT, environment

from pytest_nixl.cli.log_scan import LogScan, read_messages
from pytest_nixl.core.texts import parse_texts, text_file
from pytest_nixl.nixl.installed import nixl_packages

#: The libraries that say what the entries of NIXL and UCX have.
LIBRARIES = re.compile(r"\.so")
#: Titles of messages of other releases or builds, and of those that are composed at run time.
NOT_IN_THE_WHEEL = {
    "[Handshake] Failed to modify QP to RTR",  # Mooncake's
    "ibv_query_port_speed(",
    "Adjusting num_iter to … to allow equal distribution",
    "QP … wqe[…]: SEND",
    "RTLD_DEEPBIND requested for",
    "XAmzContentSHA256Mismatch",  # a store's
    "no active messages transport to …: Unsupported operation",
    "(state=…): send(…) failed",
    "Caught signal 11 (Segmentation fault",
    "Caught signal 11 (Segmentation fault: invalid permissions for mapped object",
    "Error in setting up Batch",
    "Error opening HF3FS driver",
    "Failed to create engine: Missing config entry",
    "Failed to load plugin 'UCX' from any directory",
    "Failed to load plugin from … cannot open shared object file",
    "GPU memory pin failed",
    "IB_PCI_RELAXED_ORDERING=yes requires relaxed-only memory keys",
    "IO operation failed",
    "Local protection error on … (synd",
    "NIXL ETCD is excluded",
    "NIXL: … failed (Error code:",
    "Receive-no-ready retry count exceeded … (synd",
    "Remote access error on … (synd",
    "Transport retry count exceeded … (synd",
    "UCX … ERROR … loading modules for",
    "backend 'UCX' not found",
    "cannot invalidate itself",
    "cannot use a remote key on a different endpoint than it was unpacked on",
    "could not open gdr copy",
    "createBackend: backend creation failed for",
    "createBackend: unsupported backend",
    "deregisterMem: no available backends for mem type",
    "exceeded max iopool size",
    "failed to allocate … bytes using md posix",
    "failed to allocate … bytes using md sysv",
    "failed to connect to vfs socket",
    "failed to create … QP …: Invalid argument",
    "failed to modify to RTR: No such device",
    "failed to select lane for local device",
    "ibv_create_cq(…) failed: Invalid argument",
    "ibv_modify_qp(DCI, … failed",
    "ibv_open_device(…) failed: Cannot allocate memory",
    "ibv_reg_mr(…) failed: Bad address",
    "ibv_reg_mr(…) failed: Cannot allocate memory",
    "is deprecated (set UCX_",
    "local non-loopback remote loopback",
    "open(file_name=/proc/…) failed: No such file or directory",
    "pidfd_getfd(…) failed",
    "process_vm_readv(pid=…) returned",
    "shmget(…) for … failed: No space left on device",
    "uct_iface_open(…) failed: Address not valid",
    "was invalidated in between prepXferDlist and this call",
}

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


def explained(message: str) -> set[str]:
    """Return the titles of what ``pytest-nixl explain`` recognises in an output."""
    scan = LogScan(*read_messages(parse_texts(text_file("error-texts"))))
    scan.read(io.BytesIO(message.encode()))
    return {visited.message.title for visited in scan.seen()}


def run(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(**variables), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_errors_of_the_real_nixl_are_on_the_page() -> None:
    output = run(PROVOKE, NIXL_TELEMETRY_ENABLE="n")
    matches = dict(re.findall(r"^([a-z-]+) (nixl\w+Error) ", output, re.M))
    assert matches == {
        "unknown-agent": "nixlNotFoundError",
        "unregistered": "nixlNotFoundError",
        "lengths": "nixlInvalidParamError",
        "own-name": "nixlInvalidParamError",
        "garbage": "nixlMismatchError",
        "telemetry": "nixlNoTelemetryError",
        "beyond-the-cache": "nixlNotFoundError",
        "view-of-host": "nixlBackendError",
        "view-of-unknown": "nixlNotFoundError",
    }, output
    assert explained(output) >= {
        "NIXL_ERR_NOT_FOUND",
        "NIXL_ERR_INVALID_PARAM",
        "NIXL_ERR_MISMATCH",
        "NIXL_ERR_NO_TELEMETRY",
        "NIXL_ERR_BACKEND",
        "failed to prepare the descriptors for any of",
        "failed to allocate memory for sys_dev detection",
        "A backend capable of creating a list of remote memory descriptors was not found",
        "metadata for remote agent … not found",
        "length mismatch at index",
        "remote agent name same as local agent",
        "cannot return values when telemetry is not enabled",
    }
    # A transport alone that cannot carry NIXL's messages: the code is NIXL's, and the reason is in UCX's line.
    refused = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config(backends=['UCX']))", UCX_TLS="sm")
    assert "NIXL_ERR_BACKEND at create_backend" in explained(refused)
    absent = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config(backends=['UCX']))",
                 UCX_NET_DEVICES="absent0:1", UCX_LOG_LEVEL="warn")  # fmt: skip
    assert "network device … not available, please use one or more of" in explained(absent)
    switch = run("from nixl._api import *\nnixl_agent('a', nixl_agent_config())", NIXL_TELEMETRY_ENABLE="perhaps")
    assert "Conversion to bool failed" in explained(switch)


def test_texts_of_libraries_are_in_the_installed_wheel() -> None:
    """A part of a form that no file of the wheel has is misspelt, of another release, or composed at run time."""
    messages, _ = read_messages(parse_texts(text_file("error-texts")))
    titles = {message.forms[0].literal: message.title for message in messages
              if message.forms and message.by in ("NIXL", "UCX")}  # fmt: skip
    missing = set(titles)
    for package in nixl_packages():
        for file in importlib.metadata.distribution(package).files or ():
            if LIBRARIES.search(file.name):
                data = Path(os.fspath(file.locate())).read_bytes().lower()
                missing -= {literal for literal in missing if literal in data}
    assert {titles[literal] for literal in missing} <= NOT_IN_THE_WHEEL


def test_the_suites_that_an_entry_names_exist() -> None:
    text = (ROOT / "docs/reference/error-texts.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"pytest suites/(\w+)", text))
    assert named
    assert [name for name in sorted(named) if not list((ROOT / "suites" / name).glob("test_*.py"))] == []
