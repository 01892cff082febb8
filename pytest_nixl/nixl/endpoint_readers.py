# SPDX-License-Identifier: Apache-2.0
"""How NIXL, NIXL's KV benchmark and etcdctl each read one value of NIXL_ETCD_ENDPOINTS.

NIXL's client (etcd-cpp-apiv3) splits the value at ``,`` and ``;``. In each member it drops everything up to the first
``://``, takes the text behind the last colon as the port, and gives host and port to the C library's ``getaddrinfo``.
It skips without a message what does not resolve. It uses IPv6 only if no member has an IPv4 address. This module
raises no exception for any value.
"""

from __future__ import annotations

import csv
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_nixl.nixl.endpoint_members import MemberNames, quoted, read_port
from pytest_nixl.nixl.endpoint_reading import Address, EndpointReading, Note
from pytest_nixl.nixl.name_resolution import Resolver, is_address, is_ipv6, is_short_number

#: etcd's default port for clients.
DEFAULT_PORT = 2379
#: NIXL's message for every value in which it finds no address.
INVALID = "the target uri is not valid"
#: Buffer size in bytes of etcd-cpp-apiv3 for a resolved address as text, including the final zero byte.
_ADDRESS_ROOM = 16
#: The most addresses or members of a list that an explanation shows.
_LISTED = 8


# NIXL


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
            "NIXL",
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
        why = next((f"{item.name} {item.fault}" for item in members if item.fault), "it has no member")
        why += f"; NIXL reports only {INVALID!r}"
        return EndpointReading("NIXL", False, why, notes=tuple(_nixl_notes(text, members, [])))
    contacts = []
    for address, item in used:
        port = grpc_port(item.port)
        if port is None:
            why = f"{item.name} has the port{names.part(item.port)}, which is not a number from 0 to 65535"
            if len(members) > 1:
                why += ", and one such member makes NIXL ignore the others too"
            return EndpointReading("NIXL", False, f"{why}; NIXL reports only {INVALID!r}")
        contacts.append(Address(address, port))
    contacts = list(dict.fromkeys(contacts))
    notes = tuple(_nixl_notes(text, members, [item for _, item in used]))
    if names.torn:
        why = "it finds addresses, which are not shown because they may contain credentials"
        return EndpointReading("NIXL", True, why, tuple(contacts), notes)
    return EndpointReading("NIXL", True, f"it contacts {_joined(contacts)}", tuple(contacts), notes)


def _split(text: str) -> list[str]:
    """Split as etcd-cpp-apiv3 does: a trailing separator adds no empty member."""
    parts = re.split("[,;]", text)
    return parts[:-1] if parts[-1] == "" and len(parts) > 1 else parts


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
        found = tuple(resolver(host, port, socket.AF_INET6))
        v6 = tuple(address for address in found if len(address) < _ADDRESS_ROOM)
        if found and not v6 and not v4:
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
    if re.search(r"\s", part.strip()) or (part != part.strip() and re.search(r"\s", target)):
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


def grpc_port(text: str) -> int | None:
    """Read a port as gRPC does (``sscanf("%d")`` into 32 bits); None if gRPC refuses it."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]+)", text)
    if match is None:
        return None
    value = max(-(2**63), min(int(match[1] + match[2][:30]), 2**63 - 1)) & 0xFFFFFFFF
    value = value - 2**32 if value >= 2**31 else value
    return value if 0 <= value <= 65535 else None


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
        said: dict[str, None] = {}
        for item in members:
            if item not in used and item.fault != "is empty":
                why = item.fault or "is an IPv6 address, which NIXL skips if another member has an IPv4 address"
                said[f"NIXL skips {item.name} without a message: it {why}"] = None
        for words in list(said)[:_LISTED]:
            yield Note(words, "NIXL-ETCD-MEMBER-DROPPED")
        if len(said) > _LISTED:
            yield Note(f"NIXL skips {len(said) - _LISTED} more members", "NIXL-ETCD-MEMBER-DROPPED")


def _joined(contacts: Iterable[Address]) -> str:
    each = list(dict.fromkeys(map(str, contacts)))
    if len(each) > _LISTED:
        each = [", ".join(each[:_LISTED]), f"{len(each) - _LISTED} more"]
    return " and ".join(each)


# The KV benchmark


def read_as_kvbench(text: str, resolver: Resolver) -> EndpointReading:
    """Return how NIXL's KV benchmark reads ``text``."""
    reader = "KV benchmark"
    match = re.match(r"(https?://)?([^:]+)(?::([0-9]+))?$", text)
    if match is None:
        return EndpointReading(
            reader, False, f"{_kvbench_fault(text)}; the KV benchmark reads only one [http://]HOST[:PORT]"
        )
    if "@" in text:
        return EndpointReading(reader, False, "it reads the user as part of the host name")
    host, port = match[2], read_port(match[3]) if match[3] else DEFAULT_PORT
    if "," in host:
        return EndpointReading(reader, False, "it reads a list as one host")
    if re.search(r"[/\s]", host):
        return EndpointReading(reader, False, f"it reads {quoted(host)} as the host name")
    if not port:
        return EndpointReading(reader, False, f"{quoted(match[3] or '')} is not a port")
    if not _resolves_in_full(Address(host, port), resolver):
        return EndpointReading(reader, False, f"the host {quoted(host)} does not resolve")
    notes = (Note("it ignores https and sends plaintext"),) if match[1] == "https://" else ()
    default = "" if match[3] else f": port {DEFAULT_PORT} is its default"
    return EndpointReading(reader, True, f"it contacts {Address(host, port)}{default}", (Address(host, port),), notes)


def _kvbench_fault(text: str) -> str:
    if not text:
        return "it is empty"
    if "@" in text:
        return "it has a user or password"
    if "," in text or ";" in text:
        return "it is a list"
    if re.search(r"\s|['\"]", text):
        return "it has a space or quotes in it"
    scheme = re.match("https?://", text)
    rest = text[scheme.end() :] if scheme else text
    if "://" in rest:
        return "its scheme is neither http:// nor https:// in lower case"
    if re.search("[/?#]", rest):
        return "it has a slash or a path after the port"
    if rest.count(":") > 1:
        return "it is an IPv6 address"
    return "it names no host" if rest in ("", ":") or rest.startswith(":") else "its port is not a number"


# etcdctl


def read_as_etcdctl(text: str, resolver: Resolver) -> EndpointReading:
    """Return how etcdctl reads ``text``."""
    reader = "etcdctl"
    try:
        parts = [part.strip() for part in next(csv.reader([text.split("\n")[0]], strict=True), [])]
    except csv.Error:
        return EndpointReading(reader, False, "it has quotes that are not closed")
    names = MemberNames(text, len(parts))
    contacts: list[Address] = []
    notes: list[Note] = []
    faults: list[str] = []
    for number, part in enumerate(parts, 1):
        secure, address, fault = _etcdctl_member(names, part)
        if address is not None and not _resolves_in_go(address, resolver):
            fault = "names a host that does not resolve"
        if address is None or fault:
            faults.append(f"{names.name(number, part)} {fault}" if part else "it is empty")
            continue
        contacts.append(address)
        if secure:
            notes.append(Note("it uses TLS for https://, with the options --cacert, --cert and --key"))
        if "@" in part:
            notes.append(Note("it ignores the user and password in the address: give them with --user"))
    if not contacts:
        return EndpointReading(reader, False, faults[0] if faults else "it is empty")
    where = "addresses that are not shown because they may contain credentials" if names.torn else _joined(contacts)
    return EndpointReading(
        reader, True, f"it contacts {where}", tuple(dict.fromkeys(contacts)), tuple(dict.fromkeys(notes))
    )


#: HOST:PORT as Go reads it: a name with or without brackets, or an address in brackets with an optional zone.
_OF_GO = re.compile(r"(\[[^:\[\]/@\s%]*\]|\[[0-9A-Fa-f:.]*(?:%[^\[\]/@\s%]*)?\]|[^:\[\]/@\s]*):(\+?)([0-9]+)")


def _etcdctl_member(names: MemberNames, part: str) -> tuple[bool, Address | None, str]:
    """Return whether the member asks for TLS, its address, and the fault if it has no address."""
    if re.match("unixs?:", part):
        return False, None, "names a socket file"
    scheme = ""
    if "://" in part:
        scheme, _, rest = part.partition("://")
        scheme, rest = scheme.lower(), re.split("[/?#]", rest)[0].rpartition("@")[2]
        if scheme not in ("http", "https"):
            return False, None, "has a scheme that is neither http nor https"
    else:
        rest = part
    match = _OF_GO.fullmatch(rest)
    if match is None or (scheme and match[2]):  # a URL's port has no sign
        return False, None, "is not HOST:PORT"
    port = read_port(match[3])
    if not port:
        return False, None, f"has the port{names.part(match[3])}"
    host, percent, zone = match[1].strip("[]").partition("%")
    if percent and scheme:
        if not zone.startswith("25"):
            return False, None, "has a zone after %: write %25 in a URL"
        zone = zone[2:]
    if percent and not is_ipv6(host):
        return False, None, "has a zone, which only an IPv6 address can have"
    if percent and zone and ipaddress.IPv6Address(host).is_link_local:
        host = f"{host}%{zone}"  # Go drops the zone of other addresses
    return scheme == "https", Address(host or "localhost", port), ""


def _resolves_in_go(address: Address, resolver: Resolver) -> bool:
    """Whether Go resolves the address; Go accepts a zone even if the interface does not exist."""
    host, percent, _ = address.host.partition("%")
    return is_ipv6(host) if percent else _resolves_in_full(address, resolver)


def _resolves_in_full(address: Address, resolver: Resolver) -> bool:
    """Whether Go and Python's gRPC resolve the address; both read a short address such as 127.1 as a name."""
    if is_short_number(address.host):
        return is_address(address.host)
    return bool(
        resolver(address.host, str(address.port), socket.AF_INET)
        or resolver(address.host, str(address.port), socket.AF_INET6)
    )
