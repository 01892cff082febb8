# SPDX-License-Identifier: Apache-2.0
"""Explain how NIXL, NIXL's KV benchmark and etcdctl each read one value of NIXL_ETCD_ENDPOINTS.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.model.nixl_releases import refuses_no_endpoints

#: etcd's default port for clients.
DEFAULT_PORT = 2379
#: NIXL's message for every value in which it finds no address.
INVALID = "the target uri is not valid"
#: Buffer size in bytes of etcd-cpp-apiv3 for a resolved address as text, including the final zero byte.
_ADDRESS_ROOM = 16
#: How much an explanation shows: characters of the value, and addresses or members of a list.
_SHOWN, _LISTED = 200, 8

#: Resolves a host, a port or service and an address family to numeric addresses; to none if that fails.
Resolver = Callable[[str, str, socket.AddressFamily], Sequence[str]]


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
    """An address that a reader connects to: a host name or numeric address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Note:
    """A warning about security or a skipped member; ``finding`` is the id of NIXL's defect, empty if none."""

    text: str
    finding: str = ""


@dataclass(frozen=True)
class EndpointReading:
    """How one program reads the value.

    :param reader: name of the program.
    :param works: whether the program finds an address in the value; nothing may answer at that address.
    :param why: one sentence.
    :param contacts: addresses that the program connects to.
    """

    reader: str
    works: bool
    why: str
    contacts: tuple[Address, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The readings of one value, and a better one. Only ``contacts`` may show parts of a password: see ``private``.

    :param text: the value, without credentials and shortened.
    :param rewrite: a value that all three programs can read; empty if the text does not say what is meant.
    :param advice: sentences that complete the remedy.
    """

    text: str
    nixl: EndpointReading
    kvbench: EndpointReading
    etcdctl: EndpointReading
    rewrite: str
    advice: tuple[str, ...] = ()
    #: Whether the addresses in ``contacts`` may be parts of a password. If true, do not show them.
    private: bool = False

    @property
    def readings(self) -> tuple[EndpointReading, ...]:
        """The readings of all three programs."""
        return (self.nixl, self.kvbench, self.etcdctl)

    @property
    def findings(self) -> tuple[str, ...]:
        """Ids of the findings about NIXL that apply to this value."""
        return tuple(dict.fromkeys(note.finding for note in self.nixl.notes if note.finding))

    @property
    def remedy(self) -> str:
        """One sentence that says what to write instead."""
        write = f"write {self.rewrite}" if self.rewrite else "write http://HOST:PORT"
        return "; ".join((write, *self.advice))

    def predict(self, answers: Callable[[Address], bool], version: str = "") -> ReadOutcome:
        """Return what a real agent will do.

        :param answers: tells whether an etcd answers in plaintext at an address.
        :param version: version of NIXL, such as ``1.5.1``; empty for 1.5 and newer.
        """
        if not self.nixl.works:
            refused = not self.text and refuses_no_endpoints(version)
            return ReadOutcome.NO_AGENT if refused else ReadOutcome.INVALID
        return ReadOutcome.PUBLISHES if any(map(answers, self.nixl.contacts)) else ReadOutcome.UNREACHED


def resolve(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve with the C library, as NIXL's client does. May block as long as the host's resolver does."""
    return _look_up(host, service, family, 0)


def resolve_numeric(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve numeric addresses only. Sends no query."""
    return _look_up(host, service, family, socket.AI_NUMERICHOST)


def suppose(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Resolve every well-formed name to a documentation address, so that only the form of a value is judged."""
    found = resolve_numeric(host, service, family)
    is_name = re.fullmatch(r"(?!-)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", host)
    if found or family is not socket.AF_INET or not is_name or _is_short_number(host):
        return found
    return ("192.0.2.1",) if resolve_numeric("127.0.0.1", service, family) else ()


def _is_short_number(host: str) -> bool:
    return re.fullmatch(r"[0-9.]+|0[xX][0-9A-Fa-fxX.]*", host) is not None


def _look_up(host: str, service: str, family: socket.AddressFamily, flags: int) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(_raw(host), _raw(service), family, socket.SOCK_STREAM, socket.IPPROTO_TCP, flags)
    except (OSError, ValueError):  # does not resolve, or contains a zero byte
        return ()
    return tuple(_with_zone(address) for *_, address in found)


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


def explain(text: str, resolver: Resolver = resolve) -> Explanation:
    """Explain how each of the three programs reads ``text``."""
    rewrite, advice = _rewrite(text, resolver)
    return Explanation(
        text=_shown(text),
        nixl=_nixl(text, resolver),
        kvbench=_kvbench(text, resolver),
        etcdctl=_etcdctl(text, resolver),
        rewrite=rewrite,
        advice=advice,
        private="@" in text and _may_be_torn(text),
    )


def _shown(text: str) -> str:
    shown = redact(text)
    if "@" in text and _may_be_torn(text):
        shown = f"***@{text.rpartition('@')[2]}"
    # Escape control characters, which would control the terminal.
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(text)} characters)"


def _may_be_torn(text: str) -> bool:
    """Whether a separator may be part of a password, so that a member is only a piece of that password."""
    try:
        parse_endpoints(text.replace(";", ","))
    except ValueError:
        return True
    return False


class _Names:
    """How messages name the members of a value: by their text, or by number if that may be part of a password."""

    def __init__(self, text: str, count: int) -> None:
        self._torn = "@" in text and _may_be_torn(text)
        self._count = count

    @property
    def torn(self) -> bool:
        return self._torn

    def name(self, number: int, member: str) -> str:
        if self._torn:
            return "it" if self._count == 1 else f"member {number} of {self._count}"
        return _quoted(redact(member))

    def part(self, text: str) -> str:
        """Quote part of a member after a space; return nothing if it may be part of a password."""
        return "" if self._torn else f" {_quoted(text)}"


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


# NIXL


@dataclass(frozen=True)
class _Member:
    name: str
    v4: tuple[str, ...]
    v6: tuple[str, ...]
    port: str
    fault: str


def _nixl(text: str, resolver: Resolver) -> EndpointReading:
    if not text:
        return EndpointReading(
            "NIXL",
            False,
            "it is empty, and NIXL creates no agent if the variable is set but empty "
            "(before 1.5: it creates an agent without etcd)",
        )
    parts = _split(text)
    names = _Names(text, len(parts))
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
        port = _grpc_port(item.port)
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


def _nixl_member(names: _Names, number: int, part: str, resolver: Resolver) -> _Member:
    name = names.name(number, part)
    target = part.partition("://")[2] if "://" in part else part
    host, colon, port = target.rpartition(":")
    if not colon:
        return _Member(name, (), (), "", _form_fault(names, part, target) or "names no port, and NIXL has no default")
    v4 = tuple(resolver(host, port, socket.AF_INET))
    v6: tuple[str, ...] = ()
    if host.startswith("[") and host.endswith("]"):
        v6 = (host[1:-1],) if _is_ipv6(host[1:-1]) else ()
    else:
        found = tuple(resolver(host, port, socket.AF_INET6))
        v6 = tuple(address for address in found if len(address) < _ADDRESS_ROOM)
        if found and not v6 and not v4:
            fault = "resolves only to IPv6 addresses that are too long for the buffer of NIXL's client"
            return _Member(name, (), (), port, fault)
    return _Member(name, v4, v6, port, "" if v4 or v6 else _fault(names, part, target, host, port))


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def _fault(names: _Names, part: str, target: str, host: str, port: str) -> str:
    form = _form_fault(names, part, target)
    if form:
        return form
    if not host:
        return "names no host before its port"
    if not re.fullmatch("[0-9]+", port):
        return f"has the port{names.part(port)}, which is not a number"
    return f"has the host{names.part(host)}, which does not resolve to an IPv4 address"


def _form_fault(names: _Names, part: str, target: str) -> str:
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


def _grpc_port(text: str) -> int | None:
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


def _port(digits: str) -> int:
    """Read a port with any number of digits; 0 if it is not a port."""
    digits = digits.lstrip("0")
    return int(digits) if 0 < len(digits) < 6 and int(digits) <= 65535 else 0


# The KV benchmark


def _kvbench(text: str, resolver: Resolver) -> EndpointReading:
    reader = "KV benchmark"
    match = re.match(r"(https?://)?([^:]+)(?::([0-9]+))?$", text)
    if match is None:
        return EndpointReading(
            reader, False, f"{_kvbench_fault(text)}; the KV benchmark reads only one [http://]HOST[:PORT]"
        )
    if "@" in text:
        return EndpointReading(reader, False, "it reads the user as part of the host name")
    host, port = match[2], _port(match[3]) if match[3] else DEFAULT_PORT
    if "," in host:
        return EndpointReading(reader, False, "it reads a list as one host")
    if re.search(r"[/\s]", host):
        return EndpointReading(reader, False, f"it reads {_quoted(host)} as the host name")
    if not port:
        return EndpointReading(reader, False, f"{_quoted(match[3] or '')} is not a port")
    if not _resolves_in_full(Address(host, port), resolver):
        return EndpointReading(reader, False, f"the host {_quoted(host)} does not resolve")
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


def _etcdctl(text: str, resolver: Resolver) -> EndpointReading:
    reader = "etcdctl"
    try:
        parts = [part.strip() for part in next(csv.reader([text.split("\n")[0]], strict=True), [])]
    except csv.Error:
        return EndpointReading(reader, False, "it has quotes that are not closed")
    names = _Names(text, len(parts))
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


def _etcdctl_member(names: _Names, part: str) -> tuple[bool, Address | None, str]:
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
    port = _port(match[3])
    if not port:
        return False, None, f"has the port{names.part(match[3])}"
    host, percent, zone = match[1].strip("[]").partition("%")
    if percent and scheme:
        if not zone.startswith("25"):
            return False, None, "has a zone after %: write %25 in a URL"
        zone = zone[2:]
    if percent and not _is_ipv6(host):
        return False, None, "has a zone, which only an IPv6 address can have"
    if percent and zone and ipaddress.IPv6Address(host).is_link_local:
        host = f"{host}%{zone}"  # Go drops the zone of other addresses
    return scheme == "https", Address(host or "localhost", port), ""


def _resolves_in_go(address: Address, resolver: Resolver) -> bool:
    """Whether Go resolves the address; Go accepts a zone even if the interface does not exist."""
    host, percent, _ = address.host.partition("%")
    return _is_ipv6(host) if percent else _resolves_in_full(address, resolver)


def _resolves_in_full(address: Address, resolver: Resolver) -> bool:
    """Whether Go and Python's gRPC resolve the address; both read a short address such as 127.1 as a name."""
    if _is_short_number(address.host):
        return _is_address(address.host)
    return bool(
        resolver(address.host, str(address.port), socket.AF_INET)
        or resolver(address.host, str(address.port), socket.AF_INET6)
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# What to write instead


def _rewrite(text: str, resolver: Resolver) -> tuple[str, tuple[str, ...]]:
    """Return a value that all three programs can read (empty if the meaning is unclear), and advice about it.

    The result contains only hosts and ports that the text names. If the text is ambiguous, nothing is suggested.
    """
    # The text before the last @ may be part of a password.
    told = text.rpartition("@")[2] if "@" in text and _may_be_torn(text) else text
    urls: dict[str, None] = {}
    advice: dict[str, None] = {}
    for member in re.split("[,;]", told):
        parts = [part for part in member.split() if not re.fullmatch(r"(?:[A-Za-z]+://|['\"]+)", part)]
        found = [_rewritten(part, resolver) for part in parts]
        if any(not url for url, _ in found) and len(found) > 1:
            continue  # a space split an address: its pieces are not addresses
        for url, remark in found:
            if url:
                urls[url] = None
            if remark:
                advice[remark] = None
    if urls and not _keeps(text, ",".join(urls), resolver):
        urls = {}
    if "@" in text:
        advice["NIXL accepts no user or password"] = None
    if re.search("https://", text, re.IGNORECASE):
        advice[
            "if that etcd needs TLS, run `etcd grpc-proxy start` on the agent's host and give NIXL the proxy's address"
        ] = None
    if len(urls) > 1:
        advice[f"the KV benchmark cannot read a list: give it only {next(iter(urls))}"] = None
    if any("[" in url for url in urls):
        advice["the KV benchmark cannot read an IPv6 address: give it a host name"] = None
    if not urls:
        advice["HOST must resolve to an IPv4 address on the hosts of the agents"] = None
    return ",".join(urls), tuple(advice)


#: A member as people write it, including brackets and quotes that they add by mistake.
_WRITTEN = re.compile(
    r"""(?P<before>['"(<{\[]*)
        (?:[A-Za-z][A-Za-z0-9+.-]*:/*(?=.*:)|[A-Za-z][A-Za-z0-9+.-]*://|https?/+|//)*   # schemes, complete or not
        (?:[^@/]*@)?
        (?P<host>\[[^\[\]]+\]|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?=:[0-9])|[^\[\]:/?\#'"()<>{}]+)
        (?::(?:\+?(?P<port>[0-9]+))?)?
        (?:[/?\#](?!/).*?)?
        (?P<after>['")>}\]]*)""",
    re.VERBOSE,
)


def _rewritten(part: str, resolver: Resolver) -> tuple[str, str]:
    """Return a member in a form that all three programs read (empty if impossible), and a remark about it."""
    match = None if re.match("unixs?:", part) else _WRITTEN.fullmatch(part)
    if match is None:
        return "", _no_port(part)
    host, digits = match["host"].removeprefix("[").removesuffix("]"), match["port"]
    if digits is None:
        if _is_short_number(host) and not _is_address(host):
            return "", ""  # a port without a host, or a fragment
        port, remark = DEFAULT_PORT, f"no port is named: {DEFAULT_PORT} is etcd's default"
    else:
        port, remark = _port(digits), ""
    if not port:
        return "", _no_port(part)
    shown = _rewritten_host(host, str(port), resolver)
    return (f"http://{shown}:{port}", remark) if shown else ("", "")


def _no_port(part: str) -> str:
    """Return a remark if a member has an invalid port; empty if its port is not the fault."""
    port = part.rpartition(":")[2]
    if re.fullmatch("[0-9]+", port) and _port(port):
        return ""
    return f"the port {_quoted(port)} is invalid: give a number from 1 to 65535" if port and ":" in part else ""


def _keeps(text: str, rewrite: str, resolver: Resolver) -> bool:
    """Whether NIXL and etcdctl can read ``rewrite``, and NIXL finds every address of ``text`` in it."""
    before, after = _nixl(text, resolver), _nixl(rewrite, resolver)
    found = {_plain(address) for address in after.contacts}
    return (
        after.works
        and _etcdctl(rewrite, resolver).works
        and all(_plain(address) in found for address in before.contacts)
    )


def _plain(address: Address) -> Address:
    """Return an IPv4-mapped IPv6 address as IPv4; any other address unchanged."""
    mapped = ipaddress.IPv6Address(address.host).ipv4_mapped if _is_ipv6(address.host) else None
    return Address(str(mapped), address.port) if mapped else address


def _rewritten_host(host: str, port: str, resolver: Resolver) -> str:
    """Return the host in URL form; empty if it does not resolve to IPv4."""
    if _is_ipv6(host):
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        return str(mapped) if mapped else f"[{host}]"
    if not re.fullmatch("[A-Za-z0-9._-]+", host):
        return ""
    found = resolver(host, port, socket.AF_INET)
    if not found:
        return ""
    # Only the C library reads short forms such as 127.1 and 2130706433.
    return found[0] if _is_short_number(host) else host
