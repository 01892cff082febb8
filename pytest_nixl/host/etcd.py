# SPDX-License-Identifier: Apache-2.0
"""The etcd: whether it answers, what it is, how fast, and whether its clock and ours agree."""

from __future__ import annotations

import contextlib
import email.utils
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.host.fact import Fact
from pytest_nixl.host.recorded_tree import FactsRoot

if TYPE_CHECKING:
    from pytest_nixl.etcd.client import EtcdClient

_ASKED = 5


@dataclass(frozen=True)
class Name:
    """A host of the etcd, and what it resolves to; ``fault`` is why it does not."""

    host: str
    addresses: tuple[str, ...]
    fault: str


@dataclass(frozen=True)
class EtcdFacts:
    """An etcd. ``latency`` is the median of five answers in seconds; ``clock`` is how much its clock is ahead of ours.

    :param endpoints: as they were given, without secrets; empty: none was.
    :param fault: why it does not answer, and ``remedy`` what to do.
    """

    endpoints: Fact[str]
    names: tuple[Name, ...]
    version: Fact[str]
    latency: Fact[float]
    clock: Fact[float]
    fault: str
    remedy: str


def read_etcd(root: FactsRoot, endpoints: str, source: str, connect: Callable[[], Any] | None = None) -> EtcdFacts:
    """Ask the etcd.

    :param endpoints: as a person gave them; empty: none, and nothing is asked.
    :param source: where they came from.
    :param connect: makes the client; else one without certificates is made.
    """
    found = root.ask("etcd", lambda: _ask(endpoints, source, connect))
    where = f"the etcd at {found.get('endpoints') or 'no address'}"
    why = found.get("fault") or found.get("why", "")
    return EtcdFacts(
        endpoints=Fact(found.get("endpoints"), found.get("source", ""), "" if found.get("endpoints") else why),
        names=tuple(Name(each["host"], tuple(each["addresses"]), each["fault"]) for each in found.get("names", ())),
        version=Fact(found.get("version"), where, "" if found.get("version") else why),
        latency=Fact(found.get("latency"), where, "" if found.get("latency") is not None else why),
        clock=Fact(found.get("clock"), where, "" if found.get("clock") is not None else why or "it tells no time"),
        fault=found.get("fault", ""),
        remedy=found.get("remedy", ""),
    )


def _ask(endpoints: str, source: str, connect: Callable[[], Any] | None) -> dict[str, Any]:
    if not endpoints:
        return {"why": "no etcd is given"}
    found: dict[str, Any] = {"endpoints": redact(endpoints), "source": source}
    try:
        parsed = parse_endpoints(endpoints)
    except ValueError as error:
        return {**found, "fault": str(error), "remedy": "correct it: NIXL publishes nothing with it"}
    found["names"] = [_resolve(host) for host in dict.fromkeys(each.host for each in parsed)]
    try:
        return {**found, **_measure(connect() if connect is not None else client_as_etcdctl(parsed), parsed)}
    except NixlPluginError as error:
        return {**found, "fault": error.reason, "remedy": error.remedy}


def client_as_etcdctl(members: tuple[Endpoint, ...]) -> EtcdClient:
    """Make a client with etcdctl's own variables for certificates and users."""
    from pytest_nixl.etcd.client import connect

    files = {name: os.environ.get(f"ETCDCTL_{name.upper()}", "") for name in ("cacert", "cert", "key")}
    user, _, password = os.environ.get("ETCDCTL_USER", "").partition(":")
    return connect(members, **files, user=user, password=password or os.environ.get("ETCDCTL_PASSWORD", ""), timeout=3)


def _measure(client: Any, members: tuple[Endpoint, ...]) -> dict[str, Any]:
    client.status()  # the first one connects
    taken = []
    for _ in range(_ASKED):
        start = time.perf_counter()
        client.status()
        taken.append(time.perf_counter() - start)
    return {"version": client.version(), "latency": median(taken), "clock": _ahead(members[0])}


def _ahead(member: Endpoint) -> float | None:
    """Return by how many seconds a member's clock is ahead of ours; None: it does not tell. It tells whole seconds."""
    from requests.exceptions import RequestException

    from pytest_nixl.etcd.bounded_http import BoundedSession

    if member.scheme != "http":
        return None
    with BoundedSession() as session, contextlib.suppress(OSError, RequestException, ValueError, OverflowError):
        date = session.get(f"{member}/version", timeout=(3, 3)).headers.get("Date")
        if date:
            then = email.utils.parsedate_to_datetime(date).timestamp()
            now = time.time()
            # Any moment of that second is as likely: what is within it is no difference.
            return 0.0 if then <= now < then + 1 else then - now if then > now else then + 1 - now
    return None


def _resolve(host: str) -> dict[str, Any]:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return {"host": host, "addresses": [], "fault": error.strerror or str(error)}
    return {"host": host, "addresses": list(dict.fromkeys(str(each[4][0]) for each in found)), "fault": ""}
