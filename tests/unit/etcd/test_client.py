# SPDX-License-Identifier: Apache-2.0
"""The client against real etcds: its functions, and its errors if an etcd fails or refuses."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import requests
from helpers.etcd import Certificates, Etcd, running_etcd, turn_authentication_on, wait_until
from helpers.stopped import stopped

from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoint
from pytest_nixl.etcd.errors import EtcdError, explain_answer
from pytest_nixl.etcd.members import _TokenAuth


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def plain() -> Iterator[Etcd]:
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> Iterator[Etcd]:
    with running_etcd(*certificates.tls(certificates.server), scheme="https") as etcd:
        yield etcd


@pytest.fixture(scope="module")
def mutual(certificates: Certificates) -> Iterator[Etcd]:
    with running_etcd(*certificates.mutual(certificates.server), scheme="https") as etcd:
        yield etcd


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """An etcd with users and passwords, whose tokens live for a second."""
    with running_etcd("--auth-token-ttl=1") as etcd:
        turn_authentication_on(etcd.url)
        yield etcd


@pytest.fixture(scope="module")
def guarded_mutual(certificates: Certificates) -> Iterator[Etcd]:
    with running_etcd(*certificates.mutual(certificates.server), scheme="https") as etcd:
        turn_authentication_on(etcd.url, verify=certificates.ca, cert=certificates.client)
        yield etcd


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


@contextmanager
def silent() -> Iterator[Endpoint]:
    """A server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield Endpoint("http", "127.0.0.1", listener.getsockname()[1])


class TestKeys:
    def test_put_get_delete(self, client: EtcdClient) -> None:
        assert client.get("/a") is None
        client.put("/a", b"\x00\xff")
        assert client.get("/a") == b"\x00\xff"
        client.put("/a", b"")
        assert client.get("/a") == b""
        assert client.delete("/a")
        assert not client.delete("/a")

    def test_prefix(self, client: EtcdClient) -> None:
        for key in ("/p/2", "/p/1", "/p/ü", "/q/1", "/p"):
            client.put(key, key.encode())
        assert client.get_prefix("/p/") == {key: key.encode() for key in ("/p/1", "/p/2", "/p/ü")}
        assert list(client.get_prefix("/p/")) == ["/p/1", "/p/2", "/p/ü"]
        assert client.count_prefix("/p/") == 3
        assert client.count_prefix("") == 5
        assert client.delete_prefix("/p/") == 3
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
        lease.revoke()
        assert client.count_prefix("/l/") == 0
        lease.revoke()
        with pytest.raises(EtcdError) as caught:
            lease.refresh()
        assert caught.value.cause == "no-lease"
        with pytest.raises(EtcdError) as caught:
            client.put("/l/1", b"", lease)
        assert caught.value.cause == "no-lease"

    def test_a_key_ends_with_its_lease(self, client: EtcdClient) -> None:
        client.put("/l", b"", client.lease(1))
        wait_until(lambda: client.get("/l") is None, 60, "the key has gone")

    def test_status(self, client: EtcdClient, plain: Etcd) -> None:
        status = client.status()
        assert status["version"] == client.version()
        assert client.version().startswith("3.")
        assert int(status["leader"]) > 0
        assert client.endpoint == plain.url

    def test_too_large(self, client: EtcdClient) -> None:
        with pytest.raises(EtcdError) as caught:
            client.put("/big", b"x" * 3_000_000)
        assert caught.value.cause == "too-large"


def test_a_change_of_the_leader_during_a_request_is_passing() -> None:
    text = '{"error":"etcdserver: leader changed","code":14,"message":"etcdserver: leader changed"}'
    error = explain_answer(parse_endpoint("http://127.0.0.1:2379"), text)
    assert error is not None
    assert error.cause == "no-leader"
    assert "its leader changed during the request" in error.reason


class TestMembers:
    def test_the_next_member_is_asked_if_one_fails(self, plain: Etcd) -> None:
        dead = nowhere()
        with connect([dead, Endpoint("http", "no-such-host.invalid", 2379), plain.endpoint]) as client:
            assert client.endpoint == str(dead)
            assert client.create("/m", b"1")
            assert client.endpoint == plain.url
            assert client.delete("/m")

    def test_a_dead_member_is_replaced(self, plain: Etcd) -> None:
        with running_etcd() as dying, connect([dying.endpoint, plain.endpoint]) as client:
            client.put("/d", b"")
            assert client.endpoint == dying.url
            os.kill(dying.pid, signal.SIGKILL)
            wait_until(lambda: client.get("/d") is None and client.endpoint == plain.url, 60, "the other one is asked")

    def test_all_members_dead(self) -> None:
        first, second = nowhere(), nowhere()
        with connect([first, second]) as client, pytest.raises(EtcdError) as caught:
            client.get("/x")
        assert f"{first}: connection refused" in caught.value.reason
        assert f"{second}: connection refused" in caught.value.reason
        assert caught.value.cause == "refused"

    @pytest.mark.long
    def test_a_transaction_is_not_sent_twice(self, plain: Etcd) -> None:
        """If the answer is lost, it is unknown whether it was executed, so no other member is asked."""
        with silent() as lost, connect([lost, plain.endpoint], timeout=3.0) as client:
            with pytest.raises(EtcdError) as caught:
                client.create("/once", b"")
            assert caught.value.cause == "timeout"
            assert client.get("/once") is None
            assert client.endpoint == plain.url


class TestUnreachable:
    def test_refused(self) -> None:
        error = failure(nowhere())
        assert error.cause == "refused"
        assert "connection refused" in error.reason

    def test_name(self) -> None:
        error = failure(Endpoint("http", "no-such-host.invalid", 2379))
        assert error.cause == "unresolved"
        assert "the name 'no-such-host.invalid' does not resolve" in error.reason

    def test_timeout(self) -> None:
        with silent() as endpoint:
            start = time.monotonic()
            error = failure(endpoint, timeout=0.3)
            assert time.monotonic() - start < 60
        assert error.cause == "timeout"
        assert "no answer within 0.3 s" in error.reason

    def test_a_stopped_etcd(self) -> None:
        with running_etcd() as etcd, stopped(etcd.pid):
            assert failure(etcd.endpoint, timeout=0.3).cause == "timeout"

    def test_proxy_variables_are_ignored(self, plain: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", str(nowhere()))
        monkeypatch.setenv("http_proxy", str(nowhere()))
        monkeypatch.setenv("ALL_PROXY", str(nowhere()))
        with connect([plain.endpoint]) as client:
            assert client.get("/x") is None


class TestTls:
    def test_trusted(self, tls: Etcd, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificates.other_ca)
        with connect([tls.endpoint], cacert=certificates.ca) as client:
            client.put("/t", b"1")
            assert client.get("/t") == b"1"

    def test_not_trusted(self, tls: Etcd, certificates: Certificates) -> None:
        without: dict[str, Any] = {}
        for options in (without, {"cacert": certificates.other_ca}):
            error = failure(tls.endpoint, **options)
            assert error.cause == "untrusted"
            assert "its certificate is not trusted (unable to get local issuer certificate)" in error.reason
            assert "--nixl-etcd-cacert" in error.remedy

    def test_a_clock_before_the_beginning_of_the_certificate(self, certificates: Certificates) -> None:
        later = datetime.now(timezone.utc) + timedelta(days=1)
        server = certificates.issue("later", "127.0.0.1", not_before=later)
        with running_etcd(*certificates.tls(server), scheme="https") as etcd:
            error = failure(etcd.endpoint, cacert=certificates.ca)
        assert error.cause == "untrusted"
        assert f"this host's clock, {datetime.now(timezone.utc):%Y-%m-%d} " in error.reason
        assert "(certificate is not yet valid)" in error.reason
        assert error.remedy.startswith("correct the clock of this host (`date -u`")

    def test_another_name(self, certificates: Certificates) -> None:
        with running_etcd(*certificates.tls(certificates.other_name), scheme="https") as etcd:
            error = failure(etcd.endpoint, cacert=certificates.ca)
        assert error.cause == "untrusted"
        assert "its certificate is for another name" in error.reason

    def test_plaintext_server(self, plain: Etcd) -> None:
        endpoint = Endpoint("https", plain.endpoint.host, plain.endpoint.port)
        error = failure(endpoint)
        assert error.cause == "plaintext"
        assert plain.url in error.remedy

    def test_tls_server(self, tls: Etcd) -> None:
        error = failure(Endpoint("http", tls.endpoint.host, tls.endpoint.port))
        assert error.cause == "tls-server"
        assert tls.url in error.remedy

    def test_tls_server_that_requires_a_client_certificate(self, mutual: Etcd) -> None:
        assert failure(Endpoint("http", mutual.endpoint.host, mutual.endpoint.port)).cause == "tls-server"

    def test_client_certificate(self, mutual: Etcd, certificates: Certificates) -> None:
        with connect([mutual.endpoint], cacert=certificates.ca, cert=certificates.client) as client:
            client.put("/t", b"1")
            assert client.get("/t") == b"1"

    def test_client_certificate_needed(self, mutual: Etcd, certificates: Certificates) -> None:
        error = failure(mutual.endpoint, cacert=certificates.ca)
        assert error.cause == "certificate-required"
        assert "--nixl-etcd-cert FILE" in error.remedy

    def test_client_certificate_refused(self, mutual: Etcd, certificates: Certificates) -> None:
        error = failure(mutual.endpoint, cacert=certificates.ca, cert=certificates.stranger)
        assert error.cause == "certificate-refused"
        assert "--trusted-ca-file" in error.remedy

    def test_files_that_cannot_be_used(self, mutual: Etcd, certificates: Certificates, tmp_path: Path) -> None:
        ca = certificates.ca
        unusable: tuple[dict[str, Any], ...] = (
            {"cacert": certificates.junk},
            {"cacert": ca, "cert": certificates.junk},
            {"cacert": ca, "cert": certificates.client, "key": certificates.server_only},
            {"cacert": ca, "cert": str(tmp_path / "missing.pem")},
            {"cacert": str(tmp_path / "missing.pem")},
        )
        for options in unusable:
            assert failure(mutual.endpoint, **options).cause == "bad-file", options

    def test_the_gateway_has_no_client_certificate(self, certificates: Certificates) -> None:
        options = certificates.mutual(certificates.server_only)
        with running_etcd(*options, scheme="https") as etcd:
            error = failure(etcd.endpoint, cacert=certificates.ca, cert=certificates.client)
        assert error.cause == "gateway-certificate"
        assert "--client-cert-auth" in error.reason
        assert "clientAuth" in error.remedy
        assert "bad certificate" in error.detail


class TestPasswords:
    def test_user(self, guarded: Etcd) -> None:
        with connect([guarded.endpoint], user="bob", password="b") as client:
            client.put("/bob/1", b"1")
            assert client.get_prefix("/bob/") == {"/bob/1": b"1"}
            assert client.delete_prefix("/bob/") == 1

    def test_user_in_the_url(self, guarded: Etcd) -> None:
        endpoint = parse_endpoint(f"http://bob:b@127.0.0.1:{guarded.endpoint.port}")
        with connect([endpoint]) as client:
            assert client.get("/bob/1") is None
            assert client.endpoints == (guarded.url,)
            assert "bob" not in repr(client)

    @pytest.mark.long
    def test_a_token_is_renewed(self, guarded: Etcd) -> None:
        with connect([guarded.endpoint], user="bob", password="b") as client:
            client.put("/bob/t", b"1")
            session = client._session
            assert isinstance(session.auth, _TokenAuth)
            token = session.auth._token
            assert token is not None
            with connect([guarded.endpoint], user="root", password="pw") as root:
                # etcd removes expired tokens once per second.
                wait_until(
                    lambda: self.refused(guarded, token) and root.count_prefix("/") > 0, 60, "the token has expired"
                )
            assert client.get("/bob/t") == b"1"
            assert session.auth._token != token
            assert client.delete("/bob/t")

    @staticmethod
    def refused(etcd: Etcd, token: str) -> bool:
        # Unlike a permitted request, a forbidden request does not extend the life of the token.
        time.sleep(1.2)
        headers = {"Authorization": token}
        return (
            requests.post(f"{etcd.url}/v3/kv/range", json={"key": "YQ=="}, headers=headers, timeout=60).status_code
            == 401
        )

    def test_no_user(self, guarded: Etcd) -> None:
        error = failure(guarded.endpoint)
        assert error.cause == "auth-needed"
        assert "--nixl-etcd-user NAME:PASSWORD" in error.remedy
        assert "user name is empty" in error.detail

    @pytest.mark.parametrize("user", ["root", "nobody"])
    def test_wrong_password(self, guarded: Etcd, user: str) -> None:
        error = failure(guarded.endpoint, user=user, password="s3cret")
        assert error.cause == "password"
        assert "--nixl-etcd-user" in error.remedy
        assert "s3cret" not in str(error)

    def test_denied(self, guarded: Etcd) -> None:
        error = failure(guarded.endpoint, user="bob", password="b")
        assert error.cause == "denied"
        assert "permission denied" in error.reason

    def test_a_user_where_none_is_needed(self, plain: Etcd) -> None:
        with connect([plain.endpoint], user="root", password="pw") as client:
            assert client.get("/x") is None

    def test_a_dead_etcd_with_a_user(self) -> None:
        assert failure(nowhere(), user="root", password="pw").cause == "refused"

    def test_with_a_client_certificate(self, guarded_mutual: Etcd, certificates: Certificates) -> None:
        options: dict[str, Any] = {"cacert": certificates.ca, "user": "root", "password": "pw"}
        with connect([guarded_mutual.endpoint], cert=certificates.client, **options) as client:
            assert client.get("/x") is None
        for without in (options, {"cacert": certificates.ca}):
            error = failure(guarded_mutual.endpoint, cert=certificates.client_with_cn, **without)
            assert error.cause == "certificate-name"
            assert "client certificate without a CN" in error.remedy


class TestOtherServers:
    def test_no_gateway(self) -> None:
        with running_etcd("--enable-grpc-gateway=false") as etcd:
            error = failure(etcd.endpoint)
            with_user = failure(etcd.endpoint, user="root", password="pw")
        assert error.cause == with_user.cause == "gateway-off"
        assert "--enable-grpc-gateway=false" in error.reason

    @pytest.mark.long
    def test_some_web_server(self) -> None:
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

        class Polite(Quiet):
            body, kind = b"<html>welcome</html>", "text/html"

            def do_POST(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", self.kind)
                self.send_header("Content-Length", str(len(self.body)))
                self.end_headers()
                self.wfile.write(self.body)

        class Json(Polite):
            body, kind = b"[]", "application/json"

        for handler in (Quiet, Polite, Json):
            with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                error = failure(Endpoint("http", "127.0.0.1", server.server_port))
                server.shutdown()
            assert error.cause == "not-etcd", handler

    def test_no_web_server(self) -> None:
        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    connection.recv(1000)

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            threading.Thread(target=greet, daemon=True).start()
            error = failure(Endpoint("http", "127.0.0.1", listener.getsockname()[1]))
            listener.shutdown(socket.SHUT_RDWR)
        assert error.cause == "not-etcd"

    def test_full(self) -> None:
        with running_etcd("--quota-backend-bytes=200000") as etcd, connect([etcd.endpoint]) as client:
            with pytest.raises(EtcdError) as caught:
                for number in range(100):
                    client.put(f"/f/{number}", os.urandom(20_000))
        assert caught.value.cause == "no-space"
        assert "--quota-backend-bytes" in caught.value.remedy
