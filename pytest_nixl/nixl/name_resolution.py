# SPDX-License-Identifier: Apache-2.0
"""Resolve host names and numeric addresses as the C library does, without an exception for any text."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence

#: Resolves a host, a port or service and an address family to numeric addresses; to none if that fails.
Resolver = Callable[[str, str, socket.AddressFamily], Sequence[str]]


def resolve(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve with the C library, as NIXL's client does. May block as long as the host's resolver does."""
    return _look_up(host, service, family, 0)


def resolve_numeric(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve numeric addresses only. Sends no query."""
    return _look_up(host, service, family, socket.AI_NUMERICHOST)


def suppose(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve every well-formed name to a documentation address, so that only the form of a value is judged."""
    resolved = resolve_numeric(host, service, family)
    is_name = re.fullmatch(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", host)
    if resolved or family is not socket.AF_INET or not is_name or is_short_number(host):
        return resolved
    return ("192.0.2.1",) if resolve_numeric("127.0.0.1", service, family) else ()


def is_short_number(host: str) -> bool:
    """Whether a host looks like an address of numbers, such as 127.1, which only the C library reads as one."""
    return re.fullmatch(r"[0-9.]+|0[xX][0-9A-Fa-fxX.]*", host) is not None


def _look_up(host: str, service: str, family: socket.AddressFamily, flags: int) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(_raw(host), _raw(service), family, socket.SOCK_STREAM, socket.IPPROTO_TCP, flags)
    except (OSError, ValueError):  # does not resolve, or contains a zero byte
        return ()
    return tuple(_with_zone(address) for *_, address in entries)


def _with_zone(address: tuple[object, ...]) -> str:
    """Return an address as the C library writes it: with its zone, which Python leaves out."""
    host, zone = str(address[0]), address[3] if len(address) > 3 else 0
    if not isinstance(zone, int) or not zone or "%" in host:
        return host
    try:
        return f"{host}%{socket.if_indextoname(zone)}"
    except OSError:
        return f"{host}%{zone}"


def _raw(text: str) -> bytes:
    """Return the bytes of an environment variable; half of a surrogate pair becomes a question mark."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address without brackets and zone."""
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def is_address(text: str) -> bool:
    """Whether the text is a complete IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
