# SPDX-License-Identifier: Apache-2.0
"""The client against real etcds: its functions, and its errors if an etcd fails or refuses."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.etcd import Certificates, Etcd, running_etcd, turn_authentication_on, wait_until
from helpers.stopped import stopped

from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_answer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


#: The options of each etcd, its scheme, and whether it has users and passwords, whose tokens live for a second.
KINDS: dict[str, tuple[Callable[[Certificates], list[str]], str, bool]] = {
    "plain": (lambda _: [], "http", False),
    "guarded": (lambda _: ["--auth-token-ttl=1"], "http", True),
    "without gateway": (lambda _: ["--enable-grpc-gateway=false"], "http", False),
    "tls": (lambda certificates: certificates.tls(certificates.server), "https", False),
    "of another name": (lambda certificates: certificates.tls(certificates.other_name), "https", False),
    "mutual": (lambda certificates: certificates.mutual(certificates.server), "https", False),
    "mutual, no client": (lambda certificates: certificates.mutual(certificates.server_only), "https", False),
    "guarded, mutual": (lambda certificates: certificates.mutual(certificates.server), "https", True),
}


@pytest.fixture(scope="module")
def servers(certificates: Certificates) -> Iterator[Callable[[str], Etcd]]:
    """Return a function that starts an etcd of a kind at its first use."""
    with ExitStack() as stack:

        @cache
        def start(kind: str) -> Etcd:
            options, scheme, guarded = KINDS[kind]
            etcd = stack.enter_context(running_etcd(*options(certificates), scheme=scheme))
            if guarded:
                turn_authentication_on(etcd.url, verify=certificates.ca, cert=certificates.client)
            return etcd

        yield start


@pytest.fixture
def plain(servers: Callable[[str], Etcd]) -> Etcd:
    return servers("plain")


@pytest.fixture
def client(plain: Etcd) -> Iterator[EtcdClient]:
    with connect([plain.endpoint], timeout=60) as connected:
        yield connected
        for key in connected.get_prefix(""):
            connected.delete(key)


def failure(endpoint: Endpoint, timeout: float = 60.0, **options: Any) -> EtcdError:
    """Request a key and return the error, checked for form."""
    with connect([endpoint], timeout=timeout, **options) as client, pytest.raises(EtcdError) as caught:
        client.get("/x")
    assert caught.value.remedy
    assert caught.value.endpoint == str(endpoint)
    assert str(endpoint) in caught.value.reason
    assert "\n" not in caught.value.reason
    return caught.value


def nowhere() -> Endpoint:
    """Return an address where nothing listens."""
    return Endpoint("http", "127.0.0.1", free_ports(1)[0])


class TestKeys:
    def test_prefix(self, client: EtcdClient) -> None:
        for key in ("/p/2", "/p/1", "/p/ü", "/q/1", "/p"):
            client.put(key, key.encode())
        assert client.get_prefix("/p/") == {key: key.encode() for key in ("/p/1", "/p/2", "/p/ü")}
        assert list(client.get_prefix("/p/")) == ["/p/1", "/p/2", "/p/ü"]
        assert client.count_prefix("/p/") == 3
        assert client.count_prefix("") == 5
        assert [client.delete("/p/1"), client.delete("/p/1"), client.get("/p/1")] == [True, False, None]
        assert client.delete_prefix("/p/") == 2
        assert client.delete_prefix("/p/") == 0
        assert set(client.get_prefix("")) == {"/p", "/q/1"}

    @pytest.mark.parametrize("prefix", ["", "/", "//"])
    def test_deleting_all_keys_is_refused(self, client: EtcdClient, prefix: str) -> None:
        client.put("/a", b"")
        with pytest.raises(ValueError, match="refused to delete all keys"):
            client.delete_prefix(prefix)
        assert client.count_prefix("") == 1

    def test_only_one_of_concurrent_creates_succeeds(self, client: EtcdClient) -> None:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: client.create("/c", b"%d" % number), range(8)))
        assert won.count(True) == 1
        assert client.get("/c") == b"%d" % won.index(True)

    def test_lease(self, client: EtcdClient) -> None:
        lease = client.lease(30)
        client.put("/l/1", b"", lease)
        assert client.create("/l/2", b"", lease)
        assert [client.lease_of(key) for key in ("/l/1", "/l/none")] == [lease.id, None]
        client.put("/no/lease", b"")
        assert client.lease_of("/no/lease") == 0
        assert lease.ttl == 30
        assert lease.refresh() == 30
        remaining, granted = client.time_to_live(lease.id) or (0, 0)
        assert (granted, 0 < remaining <= 30) == (30, True)
        lease.revoke()
        assert client.time_to_live(lease.id) is None
        assert client.count_prefix("/l/") == 0
        lease.revoke()
        with pytest.raises(EtcdError) as caught:
            lease.refresh()
        assert caught.value.cause == "no-lease"
        with pytest.raises(EtcdError) as caught:
            client.put("/l/1", b"", lease)
        assert caught.value.cause == "no-lease"


def test_a_dead_member_is_replaced(plain: Etcd) -> None:
    unresolved = Endpoint("http", "no-such-host.invalid", 2379)
    with running_etcd() as dying, connect([unresolved, dying.endpoint, plain.endpoint]) as client:
        assert client.endpoint == str(unresolved)
        assert client.create("/d", b"")
        assert client.endpoint == dying.url
        os.kill(dying.pid, signal.SIGKILL)
        wait_until(lambda: client.get("/d") is None and client.endpoint == plain.url, 60, "the other one is asked")


def test_a_stopped_etcd_is_late() -> None:
    with running_etcd() as etcd, stopped(etcd.pid):
        assert failure(etcd.endpoint, timeout=0.3).reason.endswith(": timeout, no answer within 0.3 s")


def test_variables_of_proxies_and_certificates_are_ignored(
    servers: Callable[[str], Etcd], certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Path(certificates.client).read_text()
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.write_text(text[: text.index("-----BEGIN CERTIFICATE")])
    cert.write_text(text[text.index("-----BEGIN CERTIFICATE") :])
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, str(nowhere()))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificates.other_ca)
    accepted: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}), ("tls", {"cacert": certificates.ca}),
        ("mutual", {"cacert": certificates.ca, "cert": certificates.client}),
        ("mutual", {"cacert": certificates.ca, "cert": str(cert), "key": str(key)}),
        ("guarded, mutual",
         {"cacert": certificates.ca, "cert": certificates.client, "user": "root", "password": "pw"}),
        ("plain", {"user": "root", "password": "pw"}),  # where none is needed
    ]  # fmt: skip
    for kind, options in accepted:
        with connect([servers(kind).endpoint], **options) as client:
            client.put("/t", b"1")
            assert client.get("/t") == b"1"


UNUSABLE = "a given certificate file cannot be used: it is not PEM, or certificate and key do not match"
FILES = "correct --nixl-etcd-cacert, --nixl-etcd-cert and --nixl-etcd-key"


@pytest.mark.parametrize(
    ("kind", "scheme", "options", "cause", "fault", "remedy"),
    [
        ("plain", "https", {}, "plaintext", "the URL says https, but the server speaks plaintext",
         "write http://127.0.0.1:{port}, or turn on TLS in that server"),
        ("tls", "http", {}, "tls-server", "the URL says http, but the server speaks TLS",
         "write https://127.0.0.1:{port}, and give its CA by --nixl-etcd-cacert FILE"),
        ("tls", "", {}, "untrusted", "its certificate is not trusted (unable to get local issuer certificate)",
         "give the CA certificate that signed it: --nixl-etcd-cacert FILE"),
        ("of another name", "", {"cacert": "ca"}, "untrusted", "its certificate is for another name (IP address "
         "mismatch, certificate is not valid for '127.0.0.1')",
         "use a host name that the certificate contains, or a certificate for this name"),
        ("mutual", "", {"cacert": "ca"}, "certificate-required", "it asks for a client certificate",
         "give --nixl-etcd-cert FILE and --nixl-etcd-key FILE"),
        ("mutual", "", {"cacert": "ca", "cert": "stranger"}, "certificate-refused", "it refuses the client certificate",
         "give a valid certificate, signed by a CA of the etcd's --trusted-ca-file, with clientAuth usage"),
        ("mutual", "", {"cacert": "junk"}, "bad-file", UNUSABLE, FILES),
        ("mutual", "", {"cacert": "ca", "cert": "junk"}, "bad-file", UNUSABLE, FILES),
        ("mutual", "", {"cacert": "ca", "cert": "client", "key": "server_only"}, "bad-file", UNUSABLE, FILES),
        ("mutual", "", {"cacert": "ca", "cert": "/missing"}, "bad-file", "a given certificate file does not exist",
         "correct --nixl-etcd-cacert, --nixl-etcd-cert or --nixl-etcd-key"),
        ("mutual, no client", "", {"cacert": "ca", "cert": "client"}, "gateway-certificate",
         "its HTTP gateway cannot connect to its own etcd: the gateway uses the server's certificate, and "
         "--client-cert-auth, which is on, refuses it (no clientAuth in its extended key usage)",
         "issue the server's certificate for both serverAuth and clientAuth; this cannot be fixed on the client"),
        ("guarded", "", {}, "auth-needed", "it asks for a user and password, and none was given",
         "give --nixl-etcd-user NAME:PASSWORD, or set ETCDCTL_USER"),
        ("guarded", "", {"user": "root", "password": "s3cret"}, "password",
         "it does not accept this user and password", "correct --nixl-etcd-user or ETCDCTL_USER"),
        ("guarded", "", {"user": "bob", "password": "b"}, "denied",
         "permission denied: the user's role does not allow this request on this key",
         "grant the user's role readwrite on the prefix /pytest-nixl/ and on NIXL's own"),
        ("guarded, mutual", "", {"cacert": "ca", "cert": "client_with_cn", "user": "root", "password": "pw"},
         "certificate-name", "authentication is on, and then its HTTP gateway refuses every client certificate that "
         "has a CN", "give a client certificate without a CN, and --nixl-etcd-user NAME:PASSWORD"),
        *(("without gateway", "", user, "gateway-off", "etcd 3 runs with --enable-grpc-gateway=false, so /v3 "
           "answers 404", "start that etcd without --enable-grpc-gateway=false: NIXL does not need the gateway, but "
           "pytest-nixl does") for user in ({}, {"user": "root", "password": "pw"})),
    ],
)  # fmt: skip
def test_a_request_that_an_etcd_refuses_says_why_and_what_to_do(
    servers: Callable[[str], Etcd], certificates: Certificates, kind: str, scheme: str, options: dict[str, str],
    cause: str, fault: str, remedy: str,
) -> None:  # fmt: skip
    etcd = servers(kind).endpoint
    endpoint = Endpoint(scheme or etcd.scheme, etcd.host, etcd.port)
    files: dict[str, Any] = {name: getattr(certificates, value, value) for name, value in options.items()}
    error = failure(endpoint, **files)
    assert (error.cause, error.remedy) == (cause, remedy.format(port=etcd.port))
    assert re.sub(r"(?<=: etcd )3\.\d+\.\d+", "3", error.reason) == f"etcd at {endpoint}: {fault}"
    assert "s3cret" not in str(error)


def test_a_clock_before_the_beginning_of_the_certificate(certificates: Certificates) -> None:
    later = datetime.now(timezone.utc) + timedelta(days=1)
    server = certificates.issue("later", "127.0.0.1", not_before=later)
    with running_etcd(*certificates.tls(server), scheme="https") as etcd:
        error = failure(etcd.endpoint, cacert=certificates.ca)
    assert error.cause == "untrusted"
    assert re.fullmatch(
        rf"etcd at {etcd.url}: its certificate is not valid at the time of this host's clock, "
        rf"{datetime.now(timezone.utc):%Y-%m-%d} \d\d:\d\d UTC \(certificate is not yet valid\)", error.reason
    )  # fmt: skip
    assert error.remedy == ("correct the clock of this host (`date -u`, chrony or ntpd), or renew the certificate")


@pytest.mark.parametrize(
    ("message", "cause", "fault"),
    [
        ("etcdserver: leader changed", "no-leader", "its leader changed during the request"),
        ("etcdserver: no leader", "no-leader", "it has no leader"),
        ("etcdserver: request timed out", "no-leader", "its members did not agree in time"),
        ("etcdserver: too many requests", "busy", "it has too many requests to do, and refused this one"),
        ("context deadline exceeded", "timeout", "it did not finish the request in time"),
        ("etcdserver: invalid auth token", "token", "it rejects the token that it issued itself"),
        ("etcdserver: request is too large", "too-large", "the value is larger than the etcd accepts"),
        ("something\x1b else", "other", "something\\x1b else"),
    ],
)
@pytest.mark.parametrize("field", ["message", "error"])
def test_a_refusal_of_an_etcd_is_known_by_a_part_of_it(field: str, message: str, cause: str, fault: str) -> None:
    endpoint = parse_endpoint("http://127.0.0.1:2379")
    error = explain_answer(endpoint, json.dumps({"code": 14, field: message}))
    assert error is not None
    assert (error.cause, error.reason) == (cause, f"etcd at {endpoint}: {fault}")
    assert error.detail == ("" if cause == "other" else f"etcd says: {message}")
    assert explain_answer(endpoint, json.dumps({field: "something else"})) is None, "it has no code"


def test_user_and_password_are_sent_if_they_are_given_or_in_the_url(servers: Callable[[str], Etcd]) -> None:
    guarded = servers("guarded")
    with connect([guarded.endpoint], user="bob", password="b") as client:
        client.put("/bob/1", b"1")
        assert client.get_prefix("/bob/") == {"/bob/1": b"1"}
        assert client.delete_prefix("/bob/") == 1
    with connect([parse_endpoint(f"http://bob:b@127.0.0.1:{guarded.endpoint.port}")]) as client:
        assert client.get("/bob/1") is None
        assert client.endpoints == (guarded.url,)
        assert "bob" not in repr(client)


def test_values_that_are_too_large_and_a_full_database() -> None:
    with running_etcd("--quota-backend-bytes=200000") as etcd, connect([etcd.endpoint]) as client:
        for size, cause, fault, remedy in (
            (3_000_000, "too-large", "the value is larger than the etcd accepts",
             "keep a value under 1.5 MB, or raise --max-request-bytes"),
            (20_000, "no-space", "its database is full (quota exceeded), so it accepts no more writes",
             "compact and defragment it, then `etcdctl alarm disarm`; or raise --quota-backend-bytes"),
        ):  # fmt: skip
            with pytest.raises(EtcdError) as caught:
                for number in range(100):
                    client.put(f"/f/{number}", os.urandom(size))
            assert (caught.value.cause, caught.value.remedy) == (cause, remedy)
            assert caught.value.reason == f"etcd at {etcd.url}: {fault}"
