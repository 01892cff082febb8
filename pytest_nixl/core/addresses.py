# SPDX-License-Identifier: Apache-2.0
"""The addresses of this host's network interfaces, from getifaddrs(3)."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from typing import Any


class _Address(ctypes.Structure):
    pass


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
]


#: Where an address stands in a socket address, in bytes, and how long it is.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


def ask_addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface with prefix lengths, such as ``10.0.0.11/16``."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)):
        return {}
    hosts: dict[str, list[str]] = {}
    try:
        node: Any = first
        while node:
            entry = node.contents
            if entry.address and entry.netmask:
                family = ctypes.c_ushort.from_address(entry.address).value
                if family in _PLACES:
                    address, mask = (_bytes(place, family) for place in (entry.address, entry.netmask))
                    length = sum(byte.bit_count() for byte in mask)
                    text = f"{ipaddress.ip_address(address)}/{length}"
                    hosts.setdefault(entry.name.decode(), []).append(text)
            node = entry.next
    finally:
        libc.freeifaddrs(first)
    return hosts


def _bytes(place: int, family: int) -> bytes:
    offset, length = _PLACES[socket.AddressFamily(family)]
    return ctypes.string_at(place + offset, length)
