# SPDX-License-Identifier: Apache-2.0
"""Facts of an etcd server: whether it answers, its version, its latency and its clock."""

from __future__ import annotations

import contextlib
import email.utils
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.host.recorded_tree import Fact, FactsRoot

if TYPE_CHECKING:
    import requests

    from pytest_nixl.etcd import bounded_http
    from pytest_nixl.etcd import client as etcd_client
else:  # a host without an etcd needs none of them
    requests = lazy_module("requests")
    bounded_http = lazy_module("pytest_nixl.etcd.bounded_http")
    etcd_client = lazy_module("pytest_nixl.etcd.client")

#: The variables that may hold etcd's address, in the order in which they are tried.
ETCD_VARIABLES = ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS")
_LATENCY_SAMPLES = 5


@dataclass(frozen=True)
class Name:
    """A host name in etcd's endpoints and its addresses; ``fault`` says why it does not resolve."""

    host: str
    addresses: tuple[str, ...]
    fault: str


@dataclass(frozen=True)
class EtcdFacts:
    """The facts of an etcd server.

    :param endpoints: the endpoints as they were given, without secrets; unknown if none was given.
    :param names: the hosts of the endpoints.
    :param latency: the median of five answers, in seconds.
    :param clock: how far its clock is ahead of this host's, in seconds.
    :param fault: why it does not answer; empty if it does.
    :param remedy: what to do about the fault.
    """

    endpoints: Fact[str]
    names: tuple[Name, ...]
    version: Fact[str]
    latency: Fact[float]
    clock: Fact[float]
    fault: str
    remedy: str


def read_etcd(root: FactsRoot, endpoints: str, source: str, connect: Callable[[], Any] | None = None) -> EtcdFacts:
    """Ask an etcd server.

    :param root: this machine or a recorded tree, in which nothing is asked.
    :param endpoints: the endpoints as the user gave them; if empty, no server is asked.
    :param source: where the endpoints come from, such as the name of a variable.
    :param connect: returns the client; by default one with etcdctl's variables is created.
    """
    answer = root.ask("etcd", lambda: _ask(endpoints, source, connect))
    where = f"the etcd at {answer.get('endpoints') or 'no address'}"
    fault = answer.get("fault") or answer.get("why", "")
    return EtcdFacts(
        endpoints=Fact.read(answer.get("endpoints"), answer.get("source", ""), fault),
        names=from_plain(tuple[Name, ...], answer.get("names", [])),
        version=Fact.read(answer.get("version"), where, fault),
        latency=Fact.read(answer.get("latency"), where, fault or "it was not measured"),
        clock=Fact.read(answer.get("clock"), where, fault or "it does not report its time"),
        fault=answer.get("fault", ""),
        remedy=answer.get("remedy", ""),
    )


def _ask(endpoints: str, source: str, connect: Callable[[], Any] | None) -> dict[str, Any]:
    if not endpoints:
        return {"why": "no etcd address is given"}
    answer: dict[str, Any] = {"endpoints": redact(endpoints), "source": source}
    try:
        parsed = parse_endpoints(endpoints)
    except ValueError as error:
        return {**answer, "fault": str(error), "remedy": _correction(endpoints, source)}
    answer["names"] = [_resolve(host) for host in dict.fromkeys(endpoint.host for endpoint in parsed)]
    try:
        return {**answer, **_measure(connect() if connect is not None else client_as_etcdctl(parsed), parsed)}
    except NixlPluginError as error:
        return {**answer, "fault": error.reason, "remedy": error.remedy}


def _correction(endpoints: str, source: str) -> str:
    """Return the remedy of an address that NIXL cannot use: with the right one if only its end is wrong."""
    where = source or "the address"
    bare = ",".join(part.strip().rstrip("/") for part in endpoints.split(","))
    try:
        parse_endpoints(bare)
    except ValueError:
        return f"correct {where}: NIXL publishes nothing with it"
    return f"set {where} to {redact(bare)}: NIXL publishes nothing with the other"


def client_of(endpoints: str | None, how: str, timeout: float = 3) -> etcd_client.EtcdClient:
    """Return a client, with etcdctl's credentials, of an etcd that the user gives, or of the one that a variable names.

    :param how: how to give one, for the remedy.
    :raises NixlPluginError: there is neither.
    """
    endpoints_text = endpoints or next((os.environ[name] for name in ETCD_VARIABLES if os.environ.get(name)), "")
    if not endpoints_text:
        raise NixlPluginError("no etcd is given", f"{how}, or set {ETCD_VARIABLES[0]}")
    return client_as_etcdctl(parse_endpoints(endpoints_text), timeout)


def client_as_etcdctl(members: tuple[Endpoint, ...], timeout: float = 3) -> etcd_client.EtcdClient:
    """Return a client that uses etcdctl's variables (``ETCDCTL_…``) for certificates, user and password.

    Nothing is sent yet.

    :param timeout: seconds to connect, and again to receive the whole answer, for each request to a member.
    """
    return etcd_client.connect(members, **etcdctl_credentials(), timeout=timeout)


def etcdctl_credentials(defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the files, user and password of etcdctl's variables, as arguments of ``connect``.

    :param defaults: values for those whose variable is not set.
    """
    paths = {name: os.environ.get(f"ETCDCTL_{name.upper()}", "") for name in ("cacert", "cert", "key")}
    user, _, password = os.environ.get("ETCDCTL_USER", "").partition(":")
    paths |= {"user": user, "password": password or os.environ.get("ETCDCTL_PASSWORD", "")}
    return {**(defaults or {}), **{name: value for name, value in paths.items() if value or defaults is None}}


def _measure(client: Any, members: tuple[Endpoint, ...]) -> dict[str, Any]:
    client.status()  # the first request also connects
    taken = []
    for _ in range(_LATENCY_SAMPLES):
        start = time.perf_counter()
        client.status()
        taken.append(time.perf_counter() - start)
    return {"version": client.version(), "latency": median(taken), "clock": _ahead(members[0])}


def _ahead(member: Endpoint) -> float | None:
    """Return how many seconds a member's clock is ahead of this host's; None if unknown."""
    if member.scheme != "http":
        return None
    with (
        bounded_http.BoundedSession() as session,
        contextlib.suppress(OSError, requests.RequestException, ValueError, OverflowError),
    ):
        date = session.get(f"{member}/version", timeout=(3, 3)).headers.get("Date")
        if date:
            then = email.utils.parsedate_to_datetime(date).timestamp()
            now = time.time()
            # The member reports whole seconds, so a difference within that second is none.
            return 0.0 if then <= now < then + 1 else then - now if then > now else then + 1 - now
    return None


def _resolve(host: str) -> dict[str, Any]:
    try:
        entries = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError as error:
        return {"host": host, "addresses": [], "fault": error.strerror or str(error)}
    return {"host": host, "addresses": list(dict.fromkeys(str(entry[4][0]) for entry in entries)), "fault": ""}
