# SPDX-License-Identifier: Apache-2.0
"""Explain a value of NIXL_ETCD_ENDPOINTS: how NIXL reads it, and what to write instead."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from pytest_nixl.core.forms import HOST_NAME
from pytest_nixl.core.redaction import redact
from pytest_nixl.model.nixl_releases import refuses_no_endpoints
from pytest_nixl.nixl.endpoint_reading import (
    MOST_SHOWN,
    Address,
    EndpointReading,
    ReadOutcome,
    Resolver,
    is_address,
    is_ipv6,
    is_short_number,
    may_be_torn,
    quoted,
    read_as_nixl,
    read_port,
    resolve,
)

#: etcd's default port for clients.
_DEFAULT_PORT = 2379


@dataclass(frozen=True)
class Explanation:
    """How NIXL reads one value, and a better one. Only ``contacts`` may show parts of a password: see ``private``.

    :param text: the value, without credentials and shortened.
    :param rewrite: a value that NIXL and etcdctl can read; empty if the text does not say what is meant.
    :param advice: sentences that complete the remedy.
    """

    text: str
    nixl: EndpointReading
    rewrite: str
    advice: tuple[str, ...] = ()
    #: Whether the addresses in ``contacts`` may be parts of a password. If true, do not show them.
    private: bool = False

    @property
    def findings(self) -> tuple[str, ...]:
        """Ids of the findings about NIXL that apply to this value."""
        return tuple(dict.fromkeys(note.finding for note in self.nixl.notes))

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


def explain(text: str, resolver: Resolver = resolve) -> Explanation:
    """Explain how NIXL reads ``text``."""
    rewrite, advice = _rewrite(text, resolver)
    return Explanation(
        text=_shown(text),
        nixl=read_as_nixl(text, resolver),
        rewrite=rewrite,
        advice=advice,
        private="@" in text and may_be_torn(text),
    )


def _shown(text: str) -> str:
    shown = redact(text)
    if "@" in text and may_be_torn(text):
        shown = f"***@{text.rpartition('@')[2]}"
    # Escape control characters, which would control the terminal.
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown[: MOST_SHOWN + 1])
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}… ({len(text)} characters)"


def _rewrite(text: str, resolver: Resolver) -> tuple[str, tuple[str, ...]]:
    """Return a value that NIXL can read (empty if the meaning is unclear), and advice about it.

    The result contains only hosts and ports that the text names. If the text is ambiguous, nothing is suggested.
    """
    # The text before the last @ may be part of a password.
    shown = text.rpartition("@")[2] if "@" in text and may_be_torn(text) else text
    urls: dict[str, None] = {}
    advice: dict[str, None] = {}
    for member in re.split("[,;]", shown):
        parts = [part for part in member.split() if not re.fullmatch(r"[A-Za-z]+://|(?i:https?):/?|['\"]+", part)]
        rewritten = [_rewritten(part, resolver) for part in parts]
        if any(not url for url, _ in rewritten) and len(rewritten) > 1:
            continue  # a space split an address: its pieces are not addresses
        for url, remark in rewritten:
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
    r"""['"(<{\[]*
        (?:[A-Za-z][A-Za-z0-9+.-]*:/*(?=.*:)|[A-Za-z][A-Za-z0-9+.-]*://|(?i:https?):?/+|//)*  # schemes, complete or not
        (?:[^@/]*@)?
        (?P<host>\[[^\[\]]+\]|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?=:[0-9])|[^\[\]:/?\#'")(<>{}]+)
        (?::(?:\+?(?P<port>[0-9]+))?)?
        (?:[/?\#](?!/).*?)?
        ['")>}\]]*""",
    re.VERBOSE,
)


def _rewritten(part: str, resolver: Resolver) -> tuple[str, str]:
    """Return a member as ``http://HOST:PORT`` (empty if impossible), and a remark about it."""
    if re.match("unixs?:", part):
        return "", ""  # a socket file has no port
    match = _WRITTEN.fullmatch(part)
    if match is None:
        return "", _no_port(part)
    host, digits = match["host"].removeprefix("[").removesuffix("]"), match["port"]
    if digits is None:
        if is_short_number(host) and not is_address(host):
            return "", ""  # a port without a host, or a fragment
        port, remark = _DEFAULT_PORT, f"no port is named: {_DEFAULT_PORT} is etcd's default"
    else:
        port, remark = read_port(digits) or 0, ""
    if not port:
        return "", _no_port(part)
    shown = _rewritten_host(host, str(port), resolver)
    return (f"http://{shown}:{port}", remark) if shown else ("", "")


def _no_port(part: str) -> str:
    """Return a remark if a member has an invalid port; empty if its port is not the fault."""
    port = part.rpartition(":")[2]
    if re.fullmatch("[0-9]+", port) and read_port(port):
        return ""
    return f"the port {quoted(port)} is invalid: give a number from 1 to 65535" if port and ":" in part else ""


def _keeps(text: str, rewrite: str, resolver: Resolver) -> bool:
    """Whether NIXL can read ``rewrite``, and finds every address of ``text`` in it."""
    before, after = read_as_nixl(text, resolver), read_as_nixl(rewrite, resolver)
    addresses = {_plain(address) for address in after.contacts}
    return after.works and all(_plain(address) in addresses for address in before.contacts)


def _plain(address: Address) -> Address:
    """Return an IPv4-mapped IPv6 address as IPv4; any other address unchanged."""
    mapped = ipaddress.IPv6Address(address.host).ipv4_mapped if is_ipv6(address.host) else None
    return Address(str(mapped), address.port) if mapped else address


def _rewritten_host(host: str, port: str, resolver: Resolver) -> str:
    """Return the host in URL form; empty if it does not resolve to IPv4."""
    if is_ipv6(host):
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        return str(mapped) if mapped else f"[{host}]"
    if not re.fullmatch(HOST_NAME, host):
        return ""
    resolved = resolver(host, port, socket.AF_INET)
    if not resolved:
        return ""
    # Only the C library reads short forms such as 127.1 and 2130706433.
    return resolved[0] if is_short_number(host) else host
