# SPDX-License-Identifier: Apache-2.0
"""Read etcd addresses that a user gave, and hide the credentials in them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from pytest_nixl.core.forms import ENDPOINTS_FORM, HOST_NAME
from pytest_nixl.core.redaction import URL_SCHEME

_SHAPE = re.compile(rf"(?P<scheme>{URL_SCHEME})?(?:(?P<user>.*)@)?(?P<rest>[^@]*)", re.DOTALL)
_HOST_PORT = re.compile(r"(?P<host>\[[^\[\]]*\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,18})")


@dataclass(frozen=True)
class Endpoint:
    """One member of an etcd. ``user`` and ``password`` are empty if the URL has none; ``str()`` leaves both out."""

    scheme: str
    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read one endpoint.

    :raises ValueError: with one sentence that names the fault and the accepted form, without the credentials.
    """
    try:
        return _parse(text)
    except _FaultError as fault:
        raise ValueError(f"etcd endpoint {_shown(text)!r} {fault}: expected {ENDPOINTS_FORM}") from None


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read a comma-separated list of endpoints. :raises ValueError: as :func:`parse_endpoint`."""
    parts = text.split(",")
    if len(parts) == 1 or "@" not in text:
        return tuple(parse_endpoint(part) for part in parts)
    endpoints = []
    for number, part in enumerate(parts, 1):
        try:
            endpoints.append(_parse(part))
        except _FaultError:
            # The comma may belong to a password, so this part may be a piece of it: show nothing.
            raise ValueError(
                f"etcd endpoint {number} of {len(parts)} is malformed (not shown, because the list contains a user or "
                f"password; write a comma in a password as %2C): expected {ENDPOINTS_FORM}"
            ) from None
    return tuple(endpoints)


class _FaultError(Exception):
    """The fault of an endpoint, in words without its user and password."""


def _shown(text: str) -> str:
    """Return the endpoint with everything before its last @ hidden."""
    shape = _SHAPE.fullmatch(text)
    if shape is None or shape["user"] is None:
        return text
    return f"{shape['scheme'] or ''}***@{shape['rest']}"


def _parse(text: str) -> Endpoint:
    if not text:
        raise _FaultError("is empty")
    if re.search(r"\s", text):
        raise _FaultError("has a space in it")
    shape = _SHAPE.fullmatch(text)
    assert shape is not None  # Every text matches: all groups may be empty.
    scheme = (shape["scheme"] or "http://").removesuffix("://").lower()
    if scheme not in ("http", "https"):
        raise _FaultError(f"has the unknown scheme {scheme!r}")
    user, password = _credentials(shape["user"])
    return Endpoint(scheme, *_host_port(shape["rest"]), user, password)


def _credentials(text: str | None) -> tuple[str, str]:
    if text is None:
        return "", ""
    if re.search(r"[/@?#]", text):
        raise _FaultError("has one of / @ ? # in its user or password: write %2F %40 %3F %23")
    user, _, password = text.partition(":")
    if not user:
        raise _FaultError("names no user before its @")
    return unquote(user), unquote(password)


def _host_port(text: str) -> tuple[str, int]:
    """Read what follows the credentials. A message may show all of it."""
    bare, slash, _ = text.partition("/")
    if slash:
        raise _FaultError("ends with a slash" if text == f"{bare}/" else f"has the path {text[len(bare) :]!r}")
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        if text.count(":") > 1 and "[" not in text:
            raise _FaultError("has an IPv6 address without brackets (http://[::1]:2379)")
        raise _FaultError("names no port" if re.fullmatch(r"\[.*\]|[^:]+", text) else "is not HOST:PORT")
    host, port = match["host"], int(match["port"])
    if not (_is_ipv6(host[1:-1]) if host.startswith("[") else re.fullmatch(HOST_NAME, host)):
        raise _FaultError(f"has the host {host!r}, which is neither a name nor an address")
    if not 1 <= port <= 65535:
        raise _FaultError(f"has the port {port}, which is not between 1 and 65535")
    return host.strip("[]"), port


def _is_ipv6(text: str) -> bool:

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
