# SPDX-License-Identifier: Apache-2.0
"""Facts of other hosts: whether their names resolve, and whether packets reach them."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.host.recorded_tree import FactsRoot

PEER_FORM = "HOST, or HOST:PORT if a program must listen there, such as an engine's side channel"
#: The default port. No program listens there: a refused connection is the answer.
_PORT = 1
_PATIENCE = 2.0


@dataclass(frozen=True)
class ReachedPeer:
    """Another host and its addresses; ``fault`` says why it is not reached, and is empty if it is."""

    name: str
    addresses: tuple[str, ...]
    fault: str


def read_peers(root: FactsRoot, names: Sequence[str]) -> tuple[ReachedPeer, ...]:
    """Try to reach each host.

    :param names: the hosts, as ``HOST`` or ``HOST:PORT``.
    :raises ValueError: a name does not have this form.
    """
    for name in names:
        _split(name)
    found = root.ask("peers", lambda: {name: _ask(name) for name in names})
    return tuple(
        ReachedPeer(name, tuple(each["addresses"]), each["fault"]) for name, each in found.items() if name != "why"
    )


def _split(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?", name)
    if match is None:
        raise ValueError(f"peer {name!r} cannot be parsed: expected {PEER_FORM}")
    return match[1].strip("[]"), int(match[2] or _PORT)


def _ask(name: str) -> dict[str, Any]:
    host, port = _split(name)
    named = name.endswith(f":{port}")
    try:
        found = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "fault": f"its name does not resolve ({error.strerror or error})"}
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    with socket.socket(found[0][0], socket.SOCK_STREAM) as trying:
        trying.settimeout(_PATIENCE)
        try:
            code = trying.connect_ex(found[0][4])
        except TimeoutError:
            code = errno.ETIMEDOUT
    if code == errno.ECONNREFUSED and named:
        return {"addresses": addresses, "fault": f"{addresses[0]} is reached, and no program listens on port {port}"}
    if code in (0, errno.ECONNREFUSED):
        return {"addresses": addresses, "fault": ""}
    why = f"no answer within {_PATIENCE:.0f} s" if code in (errno.EAGAIN, errno.ETIMEDOUT) else os.strerror(code)
    return {"addresses": addresses, "fault": f"{addresses[0]} port {port}: {why}"}
