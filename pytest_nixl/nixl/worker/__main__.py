# SPDX-License-Identifier: Apache-2.0
"""The worker process: ``python __main__.py FD PARENT`` serves commands on the socket FD until its parent ends.

``python __main__.py FD`` is the process from which workers are forked: it gets the requests for them on the socket FD.
"""

from __future__ import annotations

import signal
import socket
import sys
from importlib import import_module
from pathlib import Path


def main(descriptor: str, parent: str = "") -> None:
    """Be a worker, or without a parent the process from which workers are forked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pytest says what ended it; Python would print a traceback
    # The package is that of pytest. All else, NIXL above all, is what any program finds: PYTHONPATH first.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    import_module("pytest_nixl")
    del sys.path[0]
    from pytest_nixl.nixl.worker import forks, serving  # they cannot be found before

    channel = socket.socket(fileno=int(descriptor))
    if parent:
        serving.work(channel, int(parent))
    forks.serve_forks(channel, serving.work)


if __name__ == "__main__":
    main(*sys.argv[1:])
