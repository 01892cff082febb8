# SPDX-License-Identifier: Apache-2.0
"""Find TCP ports for servers that are about to start on this host."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

#: The file with the lowest and the highest port that the system gives to outgoing connections.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Many services have fixed ports below the first; if fewer ports than the second are left, the system chooses.
_LOWEST, _FEWEST = 10_000, 1_000
#: How many ports are tried if other processes take those that were free.
PORT_TRIES = 5
#: The ports that :func:`free_ports` returned: another thread may not have bound its port yet.
_handed_out: set[int] = set()
_handed_out_lock = threading.Lock()
_MOST_HANDED_OUT = 5_000


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports that are free on all addresses, and that this process did not get before.

    They are not among the ports that the system gives to outgoing connections, one of which could otherwise take such
    a port before its server binds it.
    """
    ports: list[int] = []
    for port in chain(_candidates(_ephemeral_start()), repeat(0)):
        with _handed_out_lock:
            if len(_handed_out) >= _MOST_HANDED_OUT:
                _handed_out.clear()
            if (free := _bindable(port)) and free not in _handed_out:
                _handed_out.add(free)
                ports.append(free)
        if len(ports) == count:
            break
    return ports


def is_free(port: int) -> bool:
    """Return whether a server could listen on a port."""
    return _bindable(port) == port


def _ephemeral_start() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _candidates(end: int) -> Iterator[int]:
    """Yield the ports from which to choose, in a random order; none if the system leaves too few."""
    ports = list(range(_LOWEST, end))
    while ports and end - _LOWEST >= _FEWEST:  # few are used: drawing each when it is wanted takes 30 ms less
        drawn = random.randrange(len(ports))
        ports[drawn], ports[-1] = ports[-1], ports[drawn]
        yield ports.pop()


def _bindable(port: int) -> int:
    """Return the port if a socket can be bound to it, a free port for 0, and 0 for a port that is taken."""
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return 0
        return int(tried.getsockname()[1])
