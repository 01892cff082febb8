# SPDX-License-Identifier: Apache-2.0
"""The addresses of an etcd, as a person gives them to us."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

ENDPOINTS_FORM = "URL[,URL] where URL is http://HOST:PORT or https://HOST:PORT, with no path and no trailing slash"

_SHAPE = re.compile(r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?:(?P<user>[^@/]*)@)?(?P<rest>[^@]*)")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>\d+)")


@dataclass(frozen=True)
class Endpoint:
    """One member of an etcd. ``user`` and ``password`` are empty where the URL has none; neither is ever printed."""

    scheme: str
    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def redact(text: str) -> str:
    """Hide the user and password of every URL in ``text``."""
    return re.sub(r"(^|[,;\s]|://)[^@/,;\s]+@", r"\1***@", text)


def parse_endpoint(text: str) -> Endpoint:
    """Read one endpoint.

    :raises ValueError: with one sentence that names the fault and the accepted form; credentials are not repeated.
    """

    def refuse(fault: str) -> ValueError:
        return ValueError(f"etcd endpoint {redact(text)!r} {fault}: expected {ENDPOINTS_FORM}")

    if text != text.strip() or re.search(r"\s", text):
        raise refuse("has a space in it")
    shape = _SHAPE.fullmatch(text)
    if not text or shape is None:
        raise refuse("is empty" if not text else "is no URL")
    scheme = (shape["scheme"] or "http").lower()
    if scheme not in ("http", "https"):
        raise refuse(f"has the unknown scheme {scheme!r}")
    rest = shape["rest"]
    if "/" in rest:
        bare = rest.split("/", 1)[0]
        fault = "ends with a slash" if rest == bare + "/" else f"has the path {rest[len(bare) :]!r}"
        raise refuse(fault)
    match = _HOST_PORT.fullmatch(rest)
    if match is None:
        raise refuse("names no port" if rest and ":" not in rest else "is not HOST:PORT")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise refuse(f"has the port {port}, which is not between 1 and 65535")
    user, _, password = (shape["user"] or "").partition(":")
    return Endpoint(scheme, match["host"].strip("[]"), port, unquote(user), unquote(password))


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read a comma-separated list of endpoints. :raises ValueError: as :func:`parse_endpoint`."""
    return tuple(parse_endpoint(part) for part in text.split(","))
