# SPDX-License-Identifier: Apache-2.0
"""Facts of other hosts: whether their names resolve, packets reach them, and an engine's side channel answers."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.host.recorded_tree import FactsRoot

PEER_FORM = "HOST or HOST:PORT (any port, because a refused connection shows that the host is reached)"
#: vLLM listens here by ZMQ over TCP; VLLM_NIXL_SIDE_CHANNEL_PORT is another port.
SIDE_CHANNEL_PORT = 5600
SIDE_CHANNEL_FORM = f"HOST or HOST:PORT (default: {SIDE_CHANNEL_PORT}, as VLLM_NIXL_SIDE_CHANNEL_PORT)"
#: Why a side channel does not answer.
REFUSED, DROPPED, SILENT = "connection refused", "no answer", "no greeting of ZMQ"
#: ZMTP: a ZMQ socket sends these bytes at once when a connection is made; eight bytes of padding lie between them.
_FIRST, _TENTH = 0xFF, 0x7F
#: The default port. No program listens there: a refused connection is the answer.
_PORT = 1
_CONNECT_SECONDS = 2.0


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
    answers = root.ask("peers", lambda: {name: _ask(name) for name in names})
    return tuple(
        ReachedPeer(name, tuple(answer["addresses"]), answer["fault"])
        for name, answer in answers.items()
        if name != "why"
    )


def read_side_channels(root: FactsRoot, names: Sequence[str]) -> tuple[ReachedPeer, ...]:
    """Try whether ZMQ answers at the side channel of each engine.

    :param names: the side channels, as ``HOST`` or ``HOST:PORT``.
    :raises ValueError: a name does not have this form.
    """
    for name in names:
        _split(name, SIDE_CHANNEL_FORM, SIDE_CHANNEL_PORT)
    answers = root.ask("side-channels", lambda: {name: _ask_side_channel(name) for name in names})
    return tuple(ReachedPeer(name, (), answer["fault"]) for name, answer in answers.items() if name != "why")


def _split(name: str, form: str = PEER_FORM, default: int = _PORT) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?", name)
    if match is None:
        kind = "peer" if form == PEER_FORM else "side channel"
        raise ValueError(f"{kind} {name!r} cannot be parsed: expected {form}")
    return match[1].strip("[]"), int(match[2] or default)


def _ask_side_channel(name: str) -> dict[str, str]:
    """Connect, and read the first bytes that a ZMQ socket sends: a stopped process accepts, and sends nothing."""
    host, port = _split(name, SIDE_CHANNEL_FORM, SIDE_CHANNEL_PORT)
    try:
        trying = socket.create_connection((host, port), _CONNECT_SECONDS)
    except socket.gaierror as error:
        return {"fault": f"its name does not resolve ({error.strerror})"}
    except ConnectionRefusedError:
        return {"fault": f"{host} port {port}: {REFUSED}, so no engine listens there"}
    except TimeoutError:
        return {"fault": f"{host} port {port}: {DROPPED} within {_CONNECT_SECONDS:.0f} s"}
    except OSError as error:
        return {"fault": f"{host} port {port}: {error.strerror or error}"}
    with trying:
        try:
            reply = trying.recv(10)
        except OSError:
            reply = b""
    greeted = len(reply) == 10 and reply[0] == _FIRST and reply[9] == _TENTH
    return {
        "fault": "" if greeted else f"{host} port {port}: connected, but {SILENT} came within {_CONNECT_SECONDS:.0f} s"
    }


def _ask(name: str) -> dict[str, Any]:
    host, port = _split(name)
    try:
        entries = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "fault": f"its name does not resolve ({error.strerror or error})"}
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    with socket.socket(entries[0][0], socket.SOCK_STREAM) as trying:
        trying.settimeout(_CONNECT_SECONDS)
        try:
            code = trying.connect_ex(entries[0][4])
        except TimeoutError:
            code = errno.ETIMEDOUT
    if code in (0, errno.ECONNREFUSED):
        return {"addresses": addresses, "fault": ""}
    reason = (
        f"no answer within {_CONNECT_SECONDS:.0f} s" if code in (errno.EAGAIN, errno.ETIMEDOUT) else os.strerror(code)
    )
    return {"addresses": addresses, "fault": f"{addresses[0]} port {port}: {reason}"}
