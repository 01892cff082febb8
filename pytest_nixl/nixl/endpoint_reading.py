# SPDX-License-Identifier: Apache-2.0
"""How NIXL reads a value of NIXL_ETCD_ENDPOINTS: the addresses that it contacts, and what it leaves out.

NIXL's client (etcd-cpp-apiv3) splits the value at ``,`` and ``;``. In each member it drops everything up to the first
``://``, takes the text behind the last colon as the port, and gives host and port to the C library's ``getaddrinfo``.
It skips without a message what does not resolve. It uses IPv6 only if no member has an IPv4 address. This module
raises no exception for any value. The check ``endpoints-conform`` compares it with the NIXL that is installed.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import parse_endpoints

#: NIXL's message for every value in which it finds no address.
INVALID = "the target uri is not valid"
#: The most characters of a value or a member that an explanation shows.
MOST_SHOWN = 200
#: Buffer size in bytes of etcd-cpp-apiv3 for a resolved address as text, including the final zero byte.
_ADDRESS_ROOM = 16
#: The most addresses or members of a list that an explanation shows.
_LISTED = 8


class ReadOutcome(str, Enum):
    """What an agent does with a value of NIXL_ETCD_ENDPOINTS."""

    PUBLISHES = "publishes"
    UNREACHED = "reads an address where nothing answers"
    INVALID = "reads no address"
    NO_AGENT = "makes no agent"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Address:
    """An address that NIXL connects to: a host name or numeric address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Note:
    """A warning about security or a skipped member; ``finding`` is the id of NIXL's defect."""

    text: str
    finding: str


@dataclass(frozen=True)
class EndpointReading:
    """How NIXL reads the value.

    :param works: whether NIXL finds an address in the value; nothing may answer at that address.
    :param reason: one sentence.
    :param contacts: addresses that NIXL connects to.
    """

    works: bool
    reason: str
    contacts: tuple[Address, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class _Member:
    name: str
    v4: tuple[str, ...]
    v6: tuple[str, ...]
    port: str
    fault: str


def read_as_nixl(text: str, resolver: Resolver) -> EndpointReading:
    """Return how NIXL's client reads ``text``."""
    if not text:
        return EndpointReading(
            False,
            "it is empty, and NIXL creates no agent if the variable is set but empty "
            "(before 1.5: it creates an agent without etcd)",
        )
    parts = _split(text)
    names = MemberNames(text, len(parts))
    members = [_nixl_member(names, number, part, resolver) for number, part in enumerate(parts, 1)]
    used = [(address, item) for item in members for address in item.v4]
    if not used:
        used = [(address, item) for item in members for address in item.v6]
    if not used:
        reason = next((f"{item.name} {item.fault}" for item in members if item.fault), "it has no member")
        reason += f"; NIXL reports only {INVALID!r}"
        return EndpointReading(False, reason, notes=tuple(_nixl_notes(text, members, [])))
    contacts = []
    for address, item in used:
        port = read_port(item.port)
        if port is None:
            reason = f"{item.name} has the port{names.part(item.port)}, which is not a number from 0 to 65535"
            if len(members) > 1:
                reason += ", and one such member makes NIXL ignore the others too"
            return EndpointReading(False, f"{reason}; NIXL reports only {INVALID!r}")
        contacts.append(Address(address, port))
    contacts = list(dict.fromkeys(contacts))
    notes = tuple(_nixl_notes(text, members, [item for _, item in used]))
    if names.torn:
        reason = "it finds addresses, which are not shown because they may contain credentials"
        return EndpointReading(True, reason, tuple(contacts), notes)
    return EndpointReading(True, f"it contacts {_joined(contacts)}", tuple(contacts), notes)


def _split(text: str) -> list[str]:
    """Split a text that is not empty as etcd-cpp-apiv3 does: a trailing separator adds no empty member."""
    parts = re.split("[,;]", text)
    return parts[:-1] if parts[-1] == "" else parts


def _nixl_member(names: MemberNames, number: int, part: str, resolver: Resolver) -> _Member:
    name = names.name(number, part)
    target = part.partition("://")[2] if "://" in part else part
    host, colon, port = target.rpartition(":")
    if not colon:
        return _Member(name, (), (), "", _form_fault(names, part, target) or "names no port, and NIXL has no default")
    v4 = tuple(resolver(host, port, socket.AF_INET))
    v6: tuple[str, ...] = ()
    if host.startswith("[") and host.endswith("]"):
        v6 = (host[1:-1],) if is_ipv6(host[1:-1]) else ()
    else:
        resolved = tuple(resolver(host, port, socket.AF_INET6))
        v6 = tuple(address for address in resolved if len(address) < _ADDRESS_ROOM)
        if resolved and not v6 and not v4:
            fault = "resolves only to IPv6 addresses that are too long for the buffer of NIXL's client"
            return _Member(name, (), (), port, fault)
    return _Member(name, v4, v6, port, "" if v4 or v6 else _fault(names, part, target, host, port))


def _fault(names: MemberNames, part: str, target: str, host: str, port: str) -> str:
    form = _form_fault(names, part, target)
    if form:
        return form
    if not host:
        return "names no host before its port"
    if not re.fullmatch("[0-9]+", port):
        return f"has the port{names.part(port)}, which is not a number"
    return f"has the host{names.part(host)}, which does not resolve to an IPv4 address"


def _form_fault(names: MemberNames, part: str, target: str) -> str:
    """Return what is wrong with the form of a member; empty if only its host or port can be wrong."""
    if not part:
        return "is empty"
    if "@" in part:
        return "has a user or password, which NIXL cannot send: it reads them as part of the host name"
    if re.search(r"['\"]", part):
        return "has quotes, which NIXL reads as part of the address"
    if re.search(r"\s", part.strip()) or re.search(r"\s", target):
        return "has a space in it, which NIXL reads as part of the address (separate members by a comma)"
    if re.match("unixs?:", part):
        return "names a socket file, but NIXL's client connects to TCP addresses only"
    if re.match("(dns|ipv4|ipv6|xds):", part):
        return "is an address in gRPC's own form, which NIXL's client splits before gRPC sees it"
    if "://" in target:
        return "has two schemes"
    if target.startswith("[") and "]" not in target:
        return "has a bracket that is not closed"
    if re.match("[A-Za-z]+:?/+", part) and "://" not in part:
        return "has a scheme that is not followed by ://"
    where = re.search("[/?#]", target)
    if where is None:
        return ""
    if target.endswith("/") and target.count("/") == 1:
        return "ends with a slash, which NIXL reads as part of the port"
    return f"has the path{names.part(target[where.start() :])}, which NIXL reads as part of the address"


def read_port(text: str) -> int | None:
    """Read a port as gRPC does; None if gRPC refuses it."""
    match = re.match(r"\s*\+?0*([0-9]{1,5})(?![0-9])", text, re.ASCII)
    return int(match[1]) if match is not None and int(match[1]) <= 65535 else None


def _nixl_notes(text: str, members: Sequence[_Member], used: Sequence[_Member]) -> Iterator[Note]:
    if used and any(re.match(r"\s*https://", part, re.IGNORECASE) for part in _split(text)):
        yield Note(
            "NIXL sends plaintext to https addresses: others on the network can read addresses and memory keys, and an "
            "etcd with TLS closes the connection",
            "NIXL-ETCD-HTTPS-PLAINTEXT",
        )
    if "@" in text:
        yield Note("NIXL never sends the user and password to the etcd", "NIXL-ETCD-CREDENTIALS-DROPPED")
    if used:
        notes: dict[str, None] = {}
        for item in members:
            if item not in used and item.fault != "is empty":
                reason = item.fault or "is an IPv6 address, which NIXL skips if another member has an IPv4 address"
                notes[f"NIXL skips {item.name} without a message: it {reason}"] = None
        for note in list(notes)[:_LISTED]:
            yield Note(note, "NIXL-ETCD-MEMBER-DROPPED")
        if len(notes) > _LISTED:
            yield Note(f"NIXL skips {len(notes) - _LISTED} more members", "NIXL-ETCD-MEMBER-DROPPED")


def _joined(contacts: Iterable[Address]) -> str:
    addresses = list(map(str, contacts))
    if len(addresses) > _LISTED:
        addresses = [", ".join(addresses[:_LISTED]), f"{len(addresses) - _LISTED} more"]
    return " and ".join(addresses)


def may_be_torn(text: str) -> bool:
    """Whether a separator may be part of a password, so that a member is only a piece of that password."""
    try:
        parse_endpoints(text.replace(";", ","))
    except ValueError:
        return True
    return False


class MemberNames:
    """How messages name the members of a value: by their text, or by number if that may be part of a password."""

    def __init__(self, text: str, count: int) -> None:
        self._torn = "@" in text and may_be_torn(text)
        self._count = count

    @property
    def torn(self) -> bool:
        """Whether the members may be pieces of a password."""
        return self._torn

    def name(self, number: int, member: str) -> str:
        """Return how a message names a member. ``number`` is its 1-based index."""
        if self._torn:
            return "it" if self._count == 1 else f"member {number} of {self._count}"
        return quoted(redact(member))

    def part(self, text: str) -> str:
        """Quote part of a member after a space; return nothing if it may be part of a password."""
        return "" if self._torn else f" {quoted(redact(text))}"


def quoted(text: str) -> str:
    """Quote a text in ASCII, shortened."""
    return ascii(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


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


def _with_zone(address: tuple[Any, ...]) -> str:
    """Return an address as the C library writes it: with its zone, which Python leaves out."""
    host, zone = str(address[0]), address[3] if len(address) > 3 else 0
    if not zone or "%" in host:
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
