# SPDX-License-Identifier: Apache-2.0
"""The etcd that rank 0 serves to the other ranks if the site has none.

If the group has a token, this etcd and the ranks have a certificate made from it (TLS on both sides). So strangers
cannot read the messages between the ranks, and get no answer from this etcd. A password is not enough: etcd asks for
none before it shows its metrics, members and leases, compacts its history, or raises an alarm that ends all writes.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.forms import LISTEN_FORM
from pytest_nixl.core.lazy_module import lazy_module, load
from pytest_nixl.etcd.client import Credentials, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import SupervisorClient

if TYPE_CHECKING:
    from pytest_nixl.etcd_servers import certificates
else:  # it imports cryptography, which only a group with a token needs
    certificates = lazy_module("pytest_nixl.etcd_servers.certificates")

#: Timeout in seconds of one attempt to connect, and again for the answer.
ATTEMPT_SECONDS = 2.0
#: Seconds between two messages about the wait.
MESSAGE_SECONDS = 5.0

_EVERYWHERE = "0.0.0.0"
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_OPTION = "--nixl-etcd-listen"
_SAME_TOKEN = "give every rank the same --nixl-group-token or NIXL_GROUP_TOKEN"
#: What the cause of a refused connection says of the tokens.
_OTHER_TOKEN = {
    "untrusted": "rank 0 has another group token than this rank",
    "tls-server": "rank 0 has a group token, and this rank has none",
    "plaintext": "rank 0 has no group token, and this rank has one",
}
#: Causes that may vanish when rank 0 has started; a Kubernetes name resolves only when its pod exists.
_NOT_YET = {"refused", "unresolved", "unreachable", "timeout", "closed", "no-leader", "no-member"}


@dataclass(frozen=True)
class ListenAddress:
    """Address of rank 0's etcd: a host name or IPv4 address (0.0.0.0 for all addresses of the host), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read ``ADDR:PORT``, or ``:PORT`` for all addresses.

        :raises ValueError: if ``text`` has another form; the message names the accepted form.
        """
        host, colon, port = text.strip().rpartition(":")
        fault = "names no port" if not colon else _fault_of_host(host) or _fault_of_port(port)
        if fault:
            raise ValueError(f"{text.strip()!r} {fault}: expected {LISTEN_FORM}")
        return cls(host or _EVERYWHERE, int(port))

    @property
    def everywhere(self) -> bool:
        """Whether rank 0 listens on all addresses of its host."""
        return self.host in ("", _EVERYWHERE)

    def endpoint_at(self, host: str) -> str:
        """Return the URL of the etcd if rank 0 runs on ``host``."""
        return str(Endpoint("http", host, self.port))


def _fault_of_host(host: str) -> str:
    if "/" in host:
        return "is a URL"
    if ":" in host:
        return "has an IPv6 address, which is not supported"
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return f"has the host {host!r}, which is not an IPv4 address"
    elif host and not _NAME.fullmatch(host):
        return f"has the host {host!r}, which is neither a name nor an IPv4 address"
    return ""


def _fault_of_port(port: str) -> str:
    if not re.fullmatch("[0-9]{1,18}", port):
        return f"has the port {port!r}, which is not a number" if port else "names no port"
    return "" if 1 <= int(port) <= 65535 else f"has the port {int(port)}, which is not between 1 and 65535"


def credentials(token: str, directory: Path) -> Credentials:
    """Write the certificates of a rank; return them as arguments of ``connect``. Empty without a token.

    :param directory: a private directory, which is removed with the run.
    :raises NixlPluginError: if the package that makes certificates cannot be imported.
    """
    if not token:
        return Credentials()
    try:
        load(certificates)
    except ImportError as error:
        raise NixlPluginError(
            f"{_OPTION} with a group token needs certificates, and the package cryptography cannot be imported: "
            f"{str(error).partition(chr(10))[0]}",
            "on every rank run `pip install cryptography`, or give --nixl-etcd URL instead",
        ) from None
    return certificates.write_certificates(directory, token)


def serve_etcd(supervisor: SupervisorClient, listen: ListenAddress, token: str = "") -> EmbeddedServer:
    """Start the group's etcd at ``listen``; only for the ranks of the group if ``token`` is not empty.

    :raises ExecutableMissingError: if there is no etcd program.
    :raises EtcdError: if the etcd cannot listen there or does not start.
    """
    address = claim_address(listen)
    try:
        server = EmbeddedServer.start(
            supervisor,
            host=address,
            port=listen.port,
            reached_at=own_address() if listen.everywhere else listen.host,
            credentials=credentials(token, supervisor.directory),
        )
    except EtcdError as error:
        if f":{listen.port}: bind: address already in use" in error.detail:
            raise _taken(listen) from None
        raise
    # Another group's healthy etcd may have taken the port in the meantime.
    if server.name not in _names_of_members(server):
        server.discard()
        raise _taken(listen)
    return server


def claim_address(listen: ListenAddress) -> str:
    """Return the IPv4 address to listen on. :raises EtcdError: if this host cannot listen there now."""
    try:
        address = _EVERYWHERE if listen.everywhere else socket.gethostbyname(listen.host)
    except (OSError, UnicodeError):
        raise _refused(listen, f"the name {listen.host!r} does not resolve to an IPv4 address") from None
    with socket.socket() as claiming:
        # As etcd does: ignore connections of an earlier run that are in TIME_WAIT.
        claiming.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claiming.bind((address, listen.port))
            claiming.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(listen) from None
            if error.errno == errno.EADDRNOTAVAIL:
                label = listen.host if listen.host == address else f"{listen.host} ({address})"
                raise _refused(listen, f"{label} is not an address of this host") from None
            raise _refused(listen, f"this process cannot listen there: {error.strerror}") from None
    return address


def _taken(listen: ListenAddress) -> EtcdError:
    return EtcdError(
        f"{_OPTION}={listen}: another process uses the port",
        "give every rank another port; if that process is an etcd for this group, give --nixl-etcd URL instead",
        cause="listen",
    )


def _refused(listen: ListenAddress, reason: str) -> EtcdError:
    return EtcdError(
        f"{_OPTION}={listen}: {reason}",
        f"give an address of rank 0's host and a free port above 1023; {_EVERYWHERE}:PORT stands for all addresses",
        cause="listen",
    )


def _names_of_members(server: EmbeddedServer) -> set[str]:
    """Return the names of the members of the etcd that answers at a server's address; empty if it refuses."""
    try:
        with server.client() as client:
            return {member.name for member in client.maintenance.listed()}
    except EtcdError:
        return set()


def own_address() -> str:
    """Return the IPv4 address by which other hosts most likely reach this one.

    It is the address of the default route's interface, else the first address that is not loopback, else loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        with contextlib.suppress(OSError):
            # Sends nothing: connect() only chooses a route, here to an unused documentation address.
            asking.connect(("192.0.2.1", 9))
            return str(asking.getsockname()[0])
    addresses = [ipaddress.ip_interface(text).ip for texts in ask_addresses().values() for text in texts]
    return next((str(ip) for ip in addresses if ip.version == 4 and not ip.is_loopback), "127.0.0.1")


def wait_for_etcd(
    endpoint: str, seconds: float, certificates: Credentials, waiting: Callable[[str], None] | None = None
) -> None:
    """Wait until rank 0's etcd accepts a request from this rank, because this rank may start before rank 0.

    :param endpoint: URL of the etcd.
    :param seconds: timeout in seconds.
    :param certificates: those of this rank; empty if its group has no token.
    :param waiting: called with a sentence every five seconds of the wait.
    :raises EtcdError: after ``seconds``, or at once if waiting cannot help (for example, if the tokens differ).
    """
    deadline = time.monotonic() + seconds
    due = time.monotonic() + MESSAGE_SECONDS
    pause = 0.05
    while True:
        error = _why_not(endpoint, certificates, max(0.1, min(ATTEMPT_SECONDS, deadline - time.monotonic())))
        if error is None:
            return
        if error.cause not in _NOT_YET:
            raise error
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            reason, remedy = (
                f"no etcd answered at {endpoint} within {seconds:g} s: rank 0 serves it ({_OPTION}), and has not "
                "started or cannot be reached there",
                "check that rank 0 runs, read its output, and check that no firewall blocks that port; if rank 0 has "
                "another address, name it with --nixl-etcd http://HOST:PORT",
            )
            if error.cause == "unresolved":
                reason, remedy = (
                    f"the host in {endpoint}, where rank 0 serves the etcd ({_OPTION}), did not resolve within "
                    f"{seconds:g} s",
                    "set MASTER_ADDR on this rank to a name or an IPv4 address of rank 0's host that resolves here, or "
                    "give --nixl-etcd http://HOST:PORT",
                )
            last = f"the last attempt: {error.reason}"
            raise EtcdError(reason, remedy, last, cause=error.cause, endpoint=endpoint)
        if waiting is not None and time.monotonic() >= due:
            so_far = f"{seconds - remaining:.0f} s of {seconds:g} s"
            waiting(f"waiting for the etcd that rank 0 serves at {endpoint}; {so_far}; last attempt: {error.reason}")
            due = time.monotonic() + MESSAGE_SECONDS
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, 0.5)


def _why_not(endpoint: str, certificates: Credentials, timeout: float) -> EtcdError | None:
    """Try once; return None if the etcd accepts the request, else the error."""
    try:
        with connect(parse_endpoints(endpoint), **certificates, timeout=timeout) as client:
            client.count_prefix("/pytest-nixl/")
    except EtcdError as error:
        if difference := _OTHER_TOKEN.get(error.cause):
            return EtcdError(f"etcd at {endpoint}: {difference}", _SAME_TOKEN, cause=error.cause, endpoint=endpoint)
        return error
    return None


def refusals(server: EmbeddedServer) -> int:
    """Return how many connections the etcd refused for a missing or wrong certificate; 0 if it is not known."""
    try:
        with open(server.log, encoding="utf-8", errors="replace") as lines:
            return sum("rejected connection" in line and "tls:" in line for line in lines)
    except OSError:
        return 0
