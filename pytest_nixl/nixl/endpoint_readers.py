# SPDX-License-Identifier: Apache-2.0
"""How three programs read one text of NIXL_ETCD_ENDPOINTS: NIXL itself, NIXL's KV benchmark, and etcdctl.

NIXL's client (etcd-cpp-apiv3) splits at ``,`` and ``;``, drops all up to the first ``://`` of each member, takes what
is behind the last colon as the port and gives both to the C library's ``getaddrinfo``; what it cannot resolve it leaves
out without a word. IPv6 is used only where no member has an IPv4 address. No text is refused here by an exception.
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

#: etcd's port for clients where nobody chose another.
DEFAULT_PORT = 2379
#: NIXL's words for every text that it makes no address of.
INVALID = "the target uri is not valid"
#: What etcd-cpp-apiv3 has room for when it prints an address that it resolved, the final zero byte included.
_ADDRESS_ROOM = 16
#: Characters of a text that an explanation shows, and addresses or members of a list.
_SHOWN, _LISTED = 200, 8

#: Takes a host, a port or service and an address family; returns numeric addresses, none where it does not resolve.
Resolver = Callable[[str, str, socket.AddressFamily], Sequence[str]]


class ReadOutcome(str, Enum):
    """What becomes of an agent with such a text."""

    PUBLISHES = "publishes"
    UNREACHED = "reads an address where nothing answers"
    INVALID = "reads no address"
    NO_AGENT = "makes no agent"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Address:
    """Where a reader connects to: a name or a numeric address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Note:
    """A sentence about safety or about what is left out; ``finding`` is the id of the defect, empty for none."""

    text: str
    finding: str = ""


@dataclass(frozen=True)
class EndpointReading:
    """How one program reads the text.

    :param works: whether it makes an address of it; whether something answers there is another question.
    :param why: one sentence.
    :param contacts: the addresses that it connects to.
    """

    reader: str
    works: bool
    why: str
    contacts: tuple[Address, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What is to be said of one text. Nothing in it shows a user or a password.

    :param text: the text itself, redacted and cut.
    :param rewrite: what to write instead, so that all three read it; empty where the text does not tell.
    :param advice: sentences that go with it.
    """

    text: str
    nixl: EndpointReading
    kvbench: EndpointReading
    etcdctl: EndpointReading
    rewrite: str
    advice: tuple[str, ...] = ()
    #: Whether the addresses in ``contacts`` may be pieces of a password: they are then not to be shown.
    private: bool = False

    @property
    def readings(self) -> tuple[EndpointReading, ...]:
        """All three."""
        return (self.nixl, self.kvbench, self.etcdctl)

    @property
    def findings(self) -> tuple[str, ...]:
        """The ids of NIXL's defects that this text meets."""
        return tuple(dict.fromkeys(note.finding for note in self.nixl.notes if note.finding))

    @property
    def remedy(self) -> str:
        """What to write, in one sentence."""
        write = f"write {self.rewrite}" if self.rewrite else "write http://HOST:PORT"
        return "; ".join((write, *self.advice))

    def predict(self, answers: Callable[[Address], bool], version: str = "") -> ReadOutcome:
        """Return what a real agent will do.

        :param answers: whether an etcd answers in plaintext at an address.
        :param version: of NIXL, such as ``1.5.1``; empty for 1.5 and newer.
        """
        if not self.nixl.works:
            refused = not self.text and refuses_no_endpoints(version)
            return ReadOutcome.NO_AGENT if refused else ReadOutcome.INVALID
        return ReadOutcome.PUBLISHES if any(map(answers, self.nixl.contacts)) else ReadOutcome.UNREACHED


def resolve(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Ask the C library as NIXL's client does. It may take as long as the machine's resolver does."""
    return _look_up(host, service, family, 0)


def resolve_numeric(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Read numeric addresses only: nobody is asked."""
    return _look_up(host, service, family, socket.AI_NUMERICHOST)


def suppose(host: str, service: str, family: socket.AddressFamily) -> tuple[str, ...]:
    """Take every well-formed name for one that resolves, to an address of documentation: only the form is judged."""
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
    except (OSError, ValueError):  # it does not resolve, or has a zero byte, which no variable can have
        return ()
    return tuple(_with_zone(address) for *_, address in found)


def _with_zone(address: tuple[object, ...]) -> str:
    """Write an address as the C library does: with its zone where it has one, which Python leaves out."""
    host, zone = str(address[0]), address[3] if len(address) > 3 else 0
    if not isinstance(zone, int) or not zone or "%" in host:
        return host
    try:
        return f"{host}%{socket.if_indextoname(zone)}"
    except OSError:
        return f"{host}%{zone}"


def _raw(text: str) -> bytes:
    """The bytes of a variable; a half of a surrogate pair, which none can have, becomes a question mark."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def explain(text: str, resolver: Resolver = resolve) -> Explanation:
    """Say how each of the three reads ``text``."""
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
    # Not as it is: a control character would steer the terminal.
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(text)} characters)"


def _may_be_torn(text: str) -> bool:
    """Whether a separator may stand in a password, so that a member is a piece of one."""
    try:
        parse_endpoints(text.replace(";", ","))
    except ValueError:
        return True
    return False


class _Names:
    """What to call each member of a text: by itself, or by its number where it may be a piece of a password."""

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
        """Quote a part of a member, with a space before it; nothing where it may be a piece of a password."""
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
            "it is empty, and NIXL makes no agent where the variable is set and empty "
            "(before 1.5: one without an etcd)",
        )
    parts = _split(text)
    names = _Names(text, len(parts))
    members = [_nixl_member(names, number, part, resolver) for number, part in enumerate(parts, 1)]
    used = [(address, item) for item in members for address in item.v4]
    if not used:
        used = [(address, item) for item in members for address in item.v6]
    if not used:
        why = next((f"{item.name} {item.fault}" for item in members if item.fault), "it has no member")
        return EndpointReading(
            "NIXL", False, f"{why}; it says only {INVALID!r}", notes=tuple(_nixl_notes(text, members, []))
        )
    contacts = []
    for address, item in used:
        port = _grpc_port(item.port)
        if port is None:
            why = f"{item.name} has the port{names.part(item.port)}, which is no number from 0 to 65535"
            if len(members) > 1:
                why += ", and one such member spoils the others"
            return EndpointReading("NIXL", False, f"{why}; it says only {INVALID!r}")
        contacts.append(Address(address, port))
    contacts = list(dict.fromkeys(contacts))
    notes = tuple(_nixl_notes(text, members, [item for _, item in used]))
    if names.torn:
        return EndpointReading("NIXL", True, "it reads addresses in it, which are not shown as they may hold credentials",
                       tuple(contacts), notes)  # fmt: skip
    return EndpointReading("NIXL", True, f"it contacts {_joined(contacts)}", tuple(contacts), notes)


def _split(text: str) -> list[str]:
    """Split as etcd-cpp-apiv3 does: nothing is left behind a last separator."""
    parts = re.split("[,;]", text)
    return parts[:-1] if parts[-1] == "" and len(parts) > 1 else parts


def _nixl_member(names: _Names, number: int, part: str, resolver: Resolver) -> _Member:
    name = names.name(number, part)
    target = part.partition("://")[2] if "://" in part else part
    host, colon, port = target.rpartition(":")
    if not colon:
        return _Member(name, (), (), "", _form_fault(names, part, target) or "names no port, and NIXL knows no default")
    v4 = tuple(resolver(host, port, socket.AF_INET))
    v6: tuple[str, ...] = ()
    if host.startswith("[") and host.endswith("]"):
        v6 = (host[1:-1],) if _is_ipv6(host[1:-1]) else ()
    else:
        found = tuple(resolver(host, port, socket.AF_INET6))
        v6 = tuple(address for address in found if len(address) < _ADDRESS_ROOM)
        if found and not v6 and not v4:
            fault = "resolves to IPv6 addresses only, which are longer than NIXL's client has room for"
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
        return f"has the port{names.part(port)}, which is no number"
    return f"has the host{names.part(host)}, which does not resolve to an IPv4 address"


def _form_fault(names: _Names, part: str, target: str) -> str:
    """Say what is wrong with the form of a member; empty where only its host or its port can be wrong."""
    if not part:
        return "is empty"
    if "@" in part:
        return "has a user or password, which NIXL cannot send: it takes them for a part of the host's name"
    if re.search(r"['\"]", part):
        return "has quotes, which NIXL takes for a part of the address"
    if re.search(r"\s", part.strip()) or (part != part.strip() and re.search(r"\s", target)):
        return "has a space in it, which NIXL takes for a part of the address (members are separated by a comma)"
    if re.match("unixs?:", part):
        return "names a socket file, and NIXL's client speaks to TCP addresses only"
    if re.match("(dns|ipv4|ipv6|xds):", part):
        return "is an address in gRPC's own form, which NIXL's client takes apart before gRPC sees it"
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
        return "ends with a slash, which NIXL takes for a part of the port"
    return f"has the path{names.part(target[where.start() :])}, which NIXL takes for a part of the address"


def _grpc_port(text: str) -> int | None:
    """Read a port as gRPC's ``sscanf("%d")`` into 32 bits does; None where it refuses it."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]+)", text)
    if match is None:
        return None
    value = max(-(2**63), min(int(match[1] + match[2][:30]), 2**63 - 1)) & 0xFFFFFFFF
    value = value - 2**32 if value >= 2**31 else value
    return value if 0 <= value <= 65535 else None


def _nixl_notes(text: str, members: Sequence[_Member], used: Sequence[_Member]) -> Iterator[Note]:
    if used and any(re.match(r"\s*https://", part, re.IGNORECASE) for part in _split(text)):
        yield Note(
            "https is spoken in plaintext: addresses and memory keys can be read on the network, and an etcd behind "
            "TLS closes the connection",
            "NIXL-ETCD-HTTPS-PLAINTEXT",
        )
    if "@" in text:
        yield Note("its user and password are never sent to an etcd", "NIXL-ETCD-CREDENTIALS-DROPPED")
    if used:
        said: dict[str, None] = {}
        for item in members:
            if item not in used and item.fault != "is empty":
                why = item.fault or "is an IPv6 address, which NIXL leaves out where another member has one of IPv4"
                said[f"{item.name} is left out without a word: it {why}"] = None
        for words in list(said)[:_LISTED]:
            yield Note(words, "NIXL-ETCD-MEMBER-DROPPED")
        if len(said) > _LISTED:
            yield Note(f"and {len(said) - _LISTED} more members are left out", "NIXL-ETCD-MEMBER-DROPPED")


def _joined(contacts: Iterable[Address]) -> str:
    each = list(dict.fromkeys(map(str, contacts)))
    if len(each) > _LISTED:
        each = [", ".join(each[:_LISTED]), f"{len(each) - _LISTED} more"]
    return " and ".join(each)


def _port(digits: str) -> int:
    """Read a port of any number of digits; 0 where it is none."""
    digits = digits.lstrip("0")
    return int(digits) if 0 < len(digits) < 6 and int(digits) <= 65535 else 0


# The KV benchmark


def _kvbench(text: str, resolver: Resolver) -> EndpointReading:
    reader = "KV benchmark"
    match = re.match(r"(https?://)?([^:]+)(?::([0-9]+))?$", text)
    if match is None:
        return EndpointReading(
            reader, False, f"{_kvbench_fault(text)}; it reads one [http://]HOST[:PORT] and nothing else"
        )
    if "@" in text:
        return EndpointReading(reader, False, "it takes the user for a part of the host's name")
    host, port = match[2], _port(match[3]) if match[3] else DEFAULT_PORT
    if "," in host:
        return EndpointReading(reader, False, "it takes a list for one host")
    if re.search(r"[/\s]", host):
        return EndpointReading(reader, False, f"it takes {_quoted(host)} for the host's name")
    if not port:
        return EndpointReading(reader, False, f"{_quoted(match[3] or '')} is no port")
    if not _resolves_in_full(Address(host, port), resolver):
        return EndpointReading(reader, False, f"the host {_quoted(host)} does not resolve")
    notes = (Note("https is ignored and spoken in plaintext"),) if match[1] == "https://" else ()
    default = "" if match[3] else f", as it takes port {DEFAULT_PORT} where none is named"
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
        return "it has a slash or a path behind the port"
    if rest.count(":") > 1:
        return "it is an IPv6 address"
    return "it names no host" if rest in ("", ":") or rest.startswith(":") else "its port is no number"


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
            notes.append(Note("it speaks TLS to https://, and wants --cacert, --cert and --key for it"))
        if "@" in part:
            notes.append(Note("it ignores the user and password in the address: they are given by --user"))
    if not contacts:
        return EndpointReading(reader, False, faults[0] if faults else "it is empty")
    where = "addresses that are not shown, as they may hold credentials" if names.torn else _joined(contacts)
    return EndpointReading(
        reader, True, f"it contacts {where}", tuple(dict.fromkeys(contacts)), tuple(dict.fromkeys(notes))
    )


#: A name, in brackets or not, or an address in brackets with or without its zone; and a port.
_OF_GO = re.compile(r"(\[[^:\[\]/@\s%]*\]|\[[0-9A-Fa-f:.]*(?:%[^\[\]/@\s%]*)?\]|[^:\[\]/@\s]*):(\+?)([0-9]+)")


def _etcdctl_member(names: _Names, part: str) -> tuple[bool, Address | None, str]:
    """Return whether it asks for TLS, its address, and what is wrong where it has none."""
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
            return False, None, "has a zone behind a %, which is written %25 in a URL"
        zone = zone[2:]
    if percent and not _is_ipv6(host):
        return False, None, "has a zone, which IPv6 addresses alone have"
    if percent and zone and ipaddress.IPv6Address(host).is_link_local:
        host = f"{host}%{zone}"  # of others Go leaves the zone out
    return scheme == "https", Address(host or "localhost", port), ""


def _resolves_in_go(address: Address, resolver: Resolver) -> bool:
    """As names do for everybody; an address with a zone is read whether or not there is such an interface."""
    host, percent, _ = address.host.partition("%")
    return _is_ipv6(host) if percent else _resolves_in_full(address, resolver)


def _resolves_in_full(address: Address, resolver: Resolver) -> bool:
    """Neither Go nor Python's gRPC reads short addresses: 127.1 is a name to them."""
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
    """Return what all three read, empty where the text does not tell, and what is to be said of it.

    It names the hosts and ports that the text names, and no others: of what cannot be told apart, nothing is advised.
    """
    # What stands before the last @ may be a piece of a password.
    told = text.rpartition("@")[2] if "@" in text and _may_be_torn(text) else text
    urls: dict[str, None] = {}
    advice: dict[str, None] = {}
    for member in re.split("[,;]", told):
        parts = [part for part in member.split() if not re.fullmatch(r"(?:[A-Za-z]+://|['\"]+)", part)]
        found = [_rewritten(part, resolver) for part in parts]
        if any(not url for url, _ in found) and len(found) > 1:
            continue  # where a space is in the midst of an address, its pieces are none
        for url, remark in found:
            if url:
                urls[url] = None
            if remark:
                advice[remark] = None
    if urls and not _keeps(text, ",".join(urls), resolver):
        urls = {}
    if "@" in text:
        advice["no user or password can be given to NIXL"] = None
    if re.search("https://", text, re.IGNORECASE):
        advice[
            "where that etcd wants TLS, run `etcd grpc-proxy start` beside the agent and give NIXL the proxy's address"
        ] = None
    if len(urls) > 1:
        advice[f"the KV benchmark reads no list: give it {next(iter(urls))} alone"] = None
    if any("[" in url for url in urls):
        advice["the KV benchmark reads no IPv6 address: give it a name"] = None
    if not urls:
        advice["HOST must resolve to an IPv4 address where the agents run"] = None
    return ",".join(urls), tuple(advice)


#: A member as people write it, with what they put around it by mistake.
_WRITTEN = re.compile(
    r"""(?P<before>['"(<{\[]*)
        (?:[A-Za-z][A-Za-z0-9+.-]*:/*(?=.*:)|[A-Za-z][A-Za-z0-9+.-]*://|https?/+|//)*   # schemes, whole or not
        (?:[^@/]*@)?
        (?P<host>\[[^\[\]]+\]|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?=:[0-9])|[^\[\]:/?\#'"()<>{}]+)
        (?::(?:\+?(?P<port>[0-9]+))?)?
        (?:[/?\#](?!/).*?)?
        (?P<after>['")>}\]]*)""",
    re.VERBOSE,
)


def _rewritten(part: str, resolver: Resolver) -> tuple[str, str]:
    """Return a member as all three read it, empty where it does not name one, and what is to be said of that."""
    match = None if re.match("unixs?:", part) else _WRITTEN.fullmatch(part)
    if match is None:
        return "", _no_port(part)
    host, digits = match["host"].removeprefix("[").removesuffix("]"), match["port"]
    if digits is None:
        if _is_short_number(host) and not _is_address(host):
            return "", ""  # a port without a host, or a piece of something
        port, remark = DEFAULT_PORT, f"no port is named: {DEFAULT_PORT} is etcd's default"
    else:
        port, remark = _port(digits), ""
    if not port:
        return "", _no_port(part)
    shown = _rewritten_host(host, str(port), resolver)
    return (f"http://{shown}:{port}", remark) if shown else ("", "")


def _no_port(part: str) -> str:
    """Say that a member has a port that is none; empty where that is not what is wrong with it."""
    port = part.rpartition(":")[2]
    if re.fullmatch("[0-9]+", port) and _port(port):
        return ""
    return f"the port {_quoted(port)} is none: it is a number from 1 to 65535" if port and ":" in part else ""


def _keeps(text: str, rewrite: str, resolver: Resolver) -> bool:
    """Whether NIXL and etcdctl read a rewrite, and NIXL finds all in it that it finds in the text itself."""
    before, after = _nixl(text, resolver), _nixl(rewrite, resolver)
    found = {_plain(address) for address in after.contacts}
    return (
        after.works
        and _etcdctl(rewrite, resolver).works
        and all(_plain(address) in found for address in before.contacts)
    )


def _plain(address: Address) -> Address:
    """Return an IPv4 address that is written as one of IPv6 as what it is."""
    mapped = ipaddress.IPv6Address(address.host).ipv4_mapped if _is_ipv6(address.host) else None
    return Address(str(mapped), address.port) if mapped else address


def _rewritten_host(host: str, port: str, resolver: Resolver) -> str:
    """Return the host as a URL has it; empty where it does not resolve."""
    if _is_ipv6(host):
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        return str(mapped) if mapped else f"[{host}]"
    if not re.fullmatch("[A-Za-z0-9._-]+", host):
        return ""
    found = resolver(host, port, socket.AF_INET)
    if not found:
        return ""
    # Short forms such as 127.1 and 2130706433 are the C library's own.
    return found[0] if _is_short_number(host) else host
