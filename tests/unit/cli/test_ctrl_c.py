# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a command with one line and exit code 130."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from helpers.etcd import environment

#: Ctrl-C may be ignored here, as in a job of a shell in the background.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pytest_nixl.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("command", [["etcd"], ["clean", "--group=x", "--etcd"]], ids=["etcd", "clean"])
def test_ctrl_c_in_a_command_is_one_line(command: Sequence[str]) -> None:
    """The command waits for an etcd that accepts its connection, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        waiting = subprocess.Popen(
            [sys.executable, "-c", MAIN, *command, url], env=environment(), stderr=subprocess.PIPE, text=True
        )
        with waiting, silent.accept()[0]:
            waiting.send_signal(signal.SIGINT)
            errors = waiting.communicate(timeout=120)[1]
    assert (waiting.returncode, errors) == (130, "pytest-nixl: ended by Ctrl-C (SIGINT)\n")
