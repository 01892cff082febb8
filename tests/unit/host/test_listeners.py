# SPDX-License-Identifier: Apache-2.0
"""The process that listens on a port, with real sockets and with what a process may not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nixl.host.network import PortHolder, command_of, parent_of, port_holder

LISTEN = """
import socket
listening = socket.create_server(("{host}", 0), family=socket.{family})
print(listening.getsockname()[1], flush=True)
input()
"""


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", "AF_INET"), ("::1", "AF_INET6")])
def test_the_process_that_listens_is_named(host: str, family: str) -> None:
    if family == "AF_INET6" and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this host has no IPv6 address")
    program = LISTEN.format(host=host, family=family)
    with subprocess.Popen([sys.executable, "-c", program, "--password=x1y2"], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        holder = port_holder(int(child.stdout.readline()))
        child.communicate("\n")
    assert holder is not None
    assert (holder.pid, holder.parent) == (child.pid, os.getpid())
    assert sys.executable in holder.command
    assert "x1y2" not in str(holder)
    assert "\n" not in str(holder)


def test_a_recorded_process_is_found_and_that_of_another_user_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rows = ("2382 00000000:0000 0A", "2383 00000000:1F90 01")  # the process is only connected from the second
    table = [f" 0: 0100007F:{row} 0:0 00:0 0 0 0 4711 1" for row in rows]
    (tmp_path / "net/tcp").write_text("\n".join(["header", *table]))
    (tmp_path / "12").mkdir()  # without a readable folder fd
    assert port_holder(0x2382, tmp_path) is None
    (tmp_path / "12/fd").mkdir()
    (tmp_path / "12/fd/3").symlink_to("socket:[4711]")
    (tmp_path / "12/cmdline").write_bytes(b"")
    (tmp_path / "12/comm").write_text("kernel thing\n")
    (tmp_path / "12/status").write_text("Name: x\nNoPPid:\t5\nPPid:\t\nPPid:\t7\n")
    assert port_holder(0x2382, tmp_path) == PortHolder(12, "kernel thing", 7)
    assert port_holder(0x2383, tmp_path) is None
    for length, shown in ((200, 200 * "x"), (201, f"{200 * 'x'}…")):
        (tmp_path / "12/cmdline").write_text(length * "x" + "\0")
        assert command_of(tmp_path / "12") == shown
    (tmp_path / "12/cmdline").write_bytes(b"sh\0-c\0a\nb\x1b\0")
    assert command_of(tmp_path / "12") == "sh -c a 'b\\x1b'"
    assert (command_of(tmp_path / "13"), parent_of(tmp_path / "13")) == ("a process that has ended", 0)
