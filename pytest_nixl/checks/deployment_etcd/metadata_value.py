# SPDX-License-Identifier: Apache-2.0
"""Read the beginning of an agent's metadata as NIXL serializes it: the agent's name and its connections.

NIXL writes ``nixlSerDes|`` and then fields: tag, length (8 bytes, little-endian), bytes, ``|``. The first are ``Agent``
and ``Conns``, the number of backends; then for each backend ``t``, its name, and ``c``, its connection info, which only
that backend can read. Mooncake's is the text ``IP:PORT``. UCX packs its addresses in a form of its own, which differs
between releases, so that no address is read from it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_BEGIN, _END = b"nixlSerDes|", b"|"
_LENGTH = 8
#: The most backends of an agent that are read.
_MOST_BACKENDS = 64
_ADDRESS = re.compile(rb"(?P<host>[0-9.]{7,15}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})\0*")


@dataclass(frozen=True)
class AgentMetadata:
    """What can be read from the metadata of an agent.

    :param fault: why no agent can load it; empty if nothing is wrong with it as far as it was read.
    :param agent: the name in it; empty if it was not read.
    :param backends: the names of its backends, as far as they were read.
    :param addresses: IP address and port of its backends, where their connection info is such a text.
    """

    fault: str
    agent: str = ""
    backends: tuple[str, ...] = ()
    addresses: tuple[tuple[str, int], ...] = ()


class _TruncatedError(ValueError):
    """A field is longer than what follows."""


class _OtherTagError(ValueError):
    """Another field follows."""


def read_metadata(value: bytes) -> AgentMetadata:
    """Read the value of a key with metadata. Any bytes are accepted."""
    if not value:
        return AgentMetadata("it is empty")
    if not value.startswith(_BEGIN):
        begin = "it is shorter than" if _BEGIN.startswith(value) else "it does not begin with"
        return AgentMetadata(f"{begin} 'nixlSerDes|', so it is not metadata of NIXL")
    name, backends, addresses = "", [], []
    place = len(_BEGIN)
    try:
        field, place = _field(value, place, b"Agent")
        name = field.decode(errors="surrogateescape")
        field, place = _field(value, place, b"Conns")
        for _ in range(min(int.from_bytes(field[:_LENGTH], "little"), _MOST_BACKENDS)):
            field, place = _field(value, place, b"t")
            backends.append(field[:64].decode(errors="replace"))
            field, place = _field(value, place, b"c")
            addresses += _address(field)
    except _TruncatedError:
        return AgentMetadata(f"it is truncated: a field goes beyond its end at byte {len(value)}", name)
    except _OtherTagError:
        if not name:
            return AgentMetadata("it does not begin with the name of an agent")
        # Another release may write other fields. The name is all that is known then.
    fault = "" if value.endswith(_END) else f"it is truncated: no '|' follows its last field, at byte {len(value)}"
    return AgentMetadata(fault, name, tuple(backends), tuple(addresses))


def _field(value: bytes, place: int, tag: bytes) -> tuple[bytes, int]:
    """Return the bytes of the field at ``place``, and the place of the next field."""
    if not value.startswith(tag, place):
        raise _TruncatedError if tag.startswith(value[place:]) else _OtherTagError
    start = place + len(tag) + _LENGTH
    end = start + int.from_bytes(value[start - _LENGTH : start], "little")
    if end >= len(value):
        raise _TruncatedError
    return value[start:end], end + 1


def _address(info: bytes) -> list[tuple[str, int]]:
    """Return the address that a connection info consists of, in a list; an empty list if it is something else."""
    match = _ADDRESS.fullmatch(info)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return []
    try:
        host = ipaddress.ip_address(match["host"].decode().strip("[]"))
    except ValueError:
        return []
    return [(str(host), int(match["port"]))]
