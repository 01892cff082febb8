# SPDX-License-Identifier: Apache-2.0
"""Explain why a request to etcd failed.

The texts matched here come from a real etcd 3.5.1. Newer servers word some alerts differently; both are matched.
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.etcd.endpoints import Endpoint

if TYPE_CHECKING:
    from pytest_nixl.etcd import bounded_http
else:  # it imports requests, which a run without an etcd does not need
    bounded_http = lazy_module("pytest_nixl.etcd.bounded_http")

#: Timeout in seconds of the connection that finds out which protocol a port speaks, after a failed request.
PROBE_TIMEOUT = 1.0

_CN = "CommonName of client sending a request against gateway"
_CERTIFICATE_ALERTS = (
    "BAD_CERTIFICATE",
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "UNSUPPORTED_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_REVOKED",
)
#: OpenSSL's codes of a certificate that is not valid yet, or no longer.
_OF_THE_CLOCK = (9, 10)
_UNREADABLE_FILES = ("PEM lib", "NO_CERTIFICATE_OR_CRL_FOUND", "KEY_VALUES_MISMATCH", "NO_START_LINE")


class EtcdError(NixlPluginError):
    """A request to an etcd failed: the etcd could not be reached, or it refused the request.

    :param cause: short word for programs: ``refused``, ``unresolved``, ``timeout``, ``untrusted``, …
    :param endpoint: URL of the failed member, or of all members separated by commas, without credentials.
    """

    def __init__(
        self, reason: str, remedy: str = "", detail: str = "", *, cause: str = "other", endpoint: str = ""
    ) -> None:
        super().__init__(reason, remedy, detail)
        self.cause = cause
        self.endpoint = endpoint
        self.late = cause == "timeout"


def error_at(endpoint: Endpoint, cause: str, fault: str, remedy: str = "", detail: str = "") -> EtcdError:
    """Return an error of the etcd at one endpoint. ``fault`` says what is wrong with it."""
    return EtcdError(f"etcd at {endpoint}: {fault}", remedy, detail, cause=cause, endpoint=str(endpoint))


def related(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and every exception that it wraps: context, cause, urllib3's ``reason`` and arguments."""
    visited: set[int] = set()
    todo = [error]
    while todo:
        item = todo.pop(0)
        if not isinstance(item, BaseException) or id(item) in visited:
            continue
        visited.add(id(item))
        yield item
        todo += [getattr(item, "reason", None), item.__cause__, item.__context__, *item.args]


def explain_transport(endpoint: Endpoint, error: BaseException, *, timeout: float, has_certificate: bool) -> EtcdError:
    """Return an error that says why no answer came from ``endpoint``.

    May open one more connection to find out which protocol the port speaks.

    :param error: the exception that the request raised.
    :param timeout: timeout of the request in seconds, for the message.
    :param has_certificate: whether a client certificate was sent.
    """
    chain = list(related(error))
    text = " ".join(f"{type(item).__name__} {item}" for item in chain)
    because = partial(error_at, endpoint)
    for item in chain:
        if isinstance(item, (bounded_http.TooLargeError, bounded_http.CompressedError)):
            return not_etcd(endpoint, str(item))
        if isinstance(item, bounded_http.UnfinishedError):
            return because("timeout", f"timeout, {item}", "check that it is an etcd, and what slows it down")
    if any(isinstance(item, socket.gaierror) for item in chain) or "NameResolutionError" in text:
        return because(
            "unresolved", f"the name {endpoint.host!r} does not resolve", "correct the host name, or give an IP address"
        )
    if any(isinstance(item, ConnectionRefusedError) for item in chain) or "Connection refused" in text:
        return because(
            "refused", "connection refused, nothing listens there", "start that etcd, or correct host and port"
        )
    if any(name in text for name in ("ConnectTimeout", "ReadTimeout", "TimeoutError")):
        where = "no connection" if "ConnectTimeout" in text else "no answer"
        return because(
            "timeout",
            f"timeout, {where} within {timeout:g} s",
            "check that the address is right, that no firewall drops packets, and that the etcd has a leader",
        )
    if "invalid path" in text:
        return because(
            "bad-file",
            "a given certificate file does not exist",
            "correct --nixl-etcd-cacert, --nixl-etcd-cert or --nixl-etcd-key",
        )
    if any(isinstance(item, ssl.SSLError) for item in chain):
        return _explain_tls(endpoint, chain, text, because, has_certificate)
    if any(isinstance(item, OSError) and item.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) for item in chain):
        return because(
            "unreachable", "no route to that host", "start that host, or check its address and this host's routes"
        )
    if endpoint.scheme == "http" and speaks_tls(endpoint):
        return _speaks_tls_error(endpoint)
    if "BadStatusLine" in text:
        return not_etcd(endpoint, "it does not speak HTTP")
    if endpoint.scheme == "https" and speaks_http(endpoint):
        return _plaintext_error(endpoint)
    return because(
        "closed", "it closed the connection without an answer", "read that server's log: it may have been stopped"
    )


def _explain_tls(
    endpoint: Endpoint,
    chain: list[BaseException],
    text: str,
    because: Callable[[str, str, str], EtcdError],
    has_certificate: bool,
) -> EtcdError:
    verification = next((item for item in chain if isinstance(item, ssl.SSLCertVerificationError)), None)
    if verification is not None:
        reason = verification.verify_message or "it cannot be verified"
        if "mismatch" in reason or "doesn't match" in reason:
            return because(
                "untrusted",
                f"its certificate is for another name ({reason.rstrip('.')})",
                "use a host name that the certificate contains, or a certificate for this name",
            )
        if verification.verify_code in _OF_THE_CLOCK:
            now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
            return because(
                "untrusted",
                f"its certificate is not valid at the time of this host's clock, {now} ({reason})",
                "correct the clock of this host (`date -u`, chrony or ntpd), or renew the certificate",
            )
        return because(
            "untrusted",
            f"its certificate is not trusted ({reason})",
            "give the CA certificate that signed it: --nixl-etcd-cacert FILE",
        )
    if any(name in text for name in _UNREADABLE_FILES):
        return because(
            "bad-file",
            "a given certificate file cannot be used: it is not PEM, or certificate and key do not match",
            "correct --nixl-etcd-cacert, --nixl-etcd-cert and --nixl-etcd-key",
        )
    if any(name in text.replace(" ", "_").upper() for name in _CERTIFICATE_ALERTS):
        remedy = "give a valid certificate, signed by a CA of the etcd's --trusted-ca-file, with clientAuth usage"
        if has_certificate:
            return because("certificate-refused", "it refuses the client certificate", remedy)
        remedy = "give --nixl-etcd-cert FILE and --nixl-etcd-key FILE"
        return because("certificate-required", "it asks for a client certificate", remedy)
    if speaks_http(endpoint):
        return _plaintext_error(endpoint)
    alert = str(next(item for item in chain if isinstance(item, ssl.SSLError)).reason or "").lower().replace("_", " ")
    return because(
        "tls",
        f"the TLS handshake failed ({alert or 'connection ended'})",
        "check that this port is the etcd's TLS port",
    )


def _plaintext_error(endpoint: Endpoint) -> EtcdError:
    remedy = f"write http://{endpoint.host}:{endpoint.port}, or turn on TLS in that server"
    return error_at(endpoint, "plaintext", "the URL says https, but the server speaks plaintext", remedy)


def _speaks_tls_error(endpoint: Endpoint) -> EtcdError:
    remedy = f"write https://{endpoint.host}:{endpoint.port}, and give its CA by --nixl-etcd-cacert FILE"
    return error_at(endpoint, "tls-server", "the URL says http, but the server speaks TLS", remedy)


def not_etcd(endpoint: Endpoint, how: str) -> EtcdError:
    """Return an error: the server at ``endpoint`` is not an etcd. ``how`` says how that was seen."""
    remedy = "correct host and port: an etcd listens for clients on port 2379 by default"
    return error_at(endpoint, "not-etcd", f"the server there is not an etcd: {how}", remedy)


#: What to do about an etcd without a leader.
START_MEMBERS = "start the missing members: more than half of them must be up"
#: Part of etcd's message, cause, meaning, remedy.
_ANSWERS: tuple[tuple[str, str, str, str], ...] = (
    (_CN, "certificate-name",
     "authentication is on, and then its HTTP gateway refuses every client certificate that has a CN",
     "give a client certificate without a CN, and --nixl-etcd-user NAME:PASSWORD"),
    ("user name is empty", "auth-needed", "it asks for a user and password, and none was given",
     "give --nixl-etcd-user NAME:PASSWORD, or set ETCDCTL_USER"),
    ("invalid user ID or password", "password", "it does not accept this user and password",
     "correct --nixl-etcd-user or ETCDCTL_USER"),
    ("permission denied", "denied", "permission denied: the user's role does not allow this request on this key",
     "grant the user's role readwrite on the prefix /pytest-nixl/ and on NIXL's own"),
    ("invalid auth token", "token", "it rejects the token that it issued itself",
     "check that all members have the same clock and the same option --auth-token"),
    ("database space exceeded", "no-space", "its database is full (quota exceeded), so it accepts no more writes",
     "compact and defragment it, then `etcdctl alarm disarm`; or raise --quota-backend-bytes"),
    ("received message larger than max", "too-large", "the value is larger than the etcd accepts",
     "keep a value under 1.5 MB, or raise --max-request-bytes"),
    ("request is too large", "too-large", "the value is larger than the etcd accepts",
     "keep a value under 1.5 MB, or raise --max-request-bytes"),
    ("requested lease not found", "no-lease", "the lease does not exist: it expired or was revoked",
     "refresh a lease before it expires"),
    ("leader changed", "no-leader", "its leader changed during the request", "send the request again"),
    ("no leader", "no-leader", "it has no leader", START_MEMBERS),
    ("request timed out", "no-leader", "its members did not agree in time",
     f"{START_MEMBERS}, on fast enough disks"),
    ("too many requests", "busy", "it has too many requests to do, and refused this one",
     "give it faster disks and more cores, or let fewer ranks start at the same time"),
    ("context deadline exceeded", "timeout", "it did not finish the request in time",
     START_MEMBERS),
)  # fmt: skip


def explain_answer(endpoint: Endpoint, text: str) -> EtcdError | None:
    """Explain an answer with an error status; return None if the answer is not from an etcd's gateway.

    :param text: body of the answer.
    """
    message = _message(text)
    message = None if message is None else printable(message)
    if "HTTP request to an HTTPS server" in text:
        return _speaks_tls_error(endpoint)
    for part, cause, explanation, remedy in _ANSWERS:
        if part in (message or text):
            return error_at(endpoint, cause, explanation, remedy, f"etcd says: {message}" if message else "")
    if message is None:
        return None
    if "tls:" in message and "certificate" in message:
        return error_at(
            endpoint,
            "gateway-certificate",
            "its HTTP gateway cannot connect to its own etcd: the gateway uses the server's certificate, and "
            "--client-cert-auth, which is on, refuses it (no clientAuth in its extended key usage)",
            "issue the server's certificate for both serverAuth and clientAuth; this cannot be fixed on the client",
            f"etcd says: {message}",
        )
    return error_at(endpoint, "other", message, "read that server's log")


def _message(text: str) -> str | None:
    """Return the message of a gateway error; None if ``text`` is not one."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or "code" not in body:
        return None
    return str(body.get("message") or body.get("error") or "")


def printable(text: str, most: int = 300) -> str:
    """Return a server's text as one printable line: without control characters, cut after ``most`` characters."""
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}…"


def speaks_tls(endpoint: Endpoint) -> bool:
    """Whether the port answers a TLS handshake; an alert counts as an answer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=PROBE_TIMEOUT) as plain:
            with context.wrap_socket(plain):
                return True
    except ssl.SSLError as error:
        return "ALERT" in str(error)
    except OSError:
        return False


def speaks_http(endpoint: Endpoint) -> bool:
    """Whether the port answers a plaintext HTTP request with any status but 400."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=PROBE_TIMEOUT) as plain:
            plain.sendall(f"GET /version HTTP/1.0\r\nHost: {endpoint.host}\r\n\r\n".encode())
            status = plain.recv(64).split(b"\r\n")[0]
    except OSError:
        return False
    # A TLS server answers a plaintext request with 400 or not at all.
    return status.startswith(b"HTTP/") and b" 400" not in status
