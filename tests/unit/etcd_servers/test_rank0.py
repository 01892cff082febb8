# SPDX-License-Identifier: Apache-2.0
"""The etcd that rank 0 serves: who may use it, from where, and the errors if it cannot be served or reached."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import requests
from helpers.cli_run import eventually
from helpers.etcd import separate_supervisor
from helpers.namespaces import one_host, require_tools
from helpers.raw_server import serving

from pytest_nixl.cluster.etcd import find_etcd
from pytest_nixl.cluster.placement import LauncherPlacement
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers import rank0 as module
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.etcd_servers.rank0 import (
    ListenAddress,
    credentials,
    own_address,
    refusals,
    serve_etcd,
    wait_for_etcd,
)
from pytest_nixl.processes.supervisor import SupervisorClient

TOKEN = "a token of this test"
Serve = Callable[..., EmbeddedServer]


@pytest.fixture
def own_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorClient]:
    """A supervisor that ends with the test."""
    with separate_supervisor(monkeypatch) as separate:
        yield separate


@pytest.fixture
def serve(own_client: SupervisorClient) -> Iterator[Serve]:
    """Return a function that serves an etcd on loopback, by default on a free port, until the test ends."""
    with ExitStack() as stack:

        def start(token: str = "", port: int = 0) -> EmbeddedServer:
            server = serve_etcd(own_client, ListenAddress("127.0.0.1", port or free_ports(1)[0]), token)
            stack.callback(server.discard)
            return server

        yield start


class TestListen:
    @pytest.mark.parametrize(
        ("text", "expected", "everywhere"),
        [
            (" 10.0.0.5:2379 ", ListenAddress("10.0.0.5", 2379), False),
            (":1", ListenAddress("0.0.0.0", 1), True),
            ("node-a.cluster:65535", ListenAddress("node-a.cluster", 65535), False),
        ],
    )
    def test_an_address_or_name_with_a_port_is_read(self, text: str, expected: ListenAddress, everywhere: bool) -> None:
        listen = ListenAddress.parse(text)
        assert (listen, listen.everywhere) == (expected, everywhere)
        assert listen.endpoint_at("node-a") == f"http://node-a:{expected.port}"

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("", "'' names no port"),
            ("node-a:", "'node-a:' names no port"),
            ("node-a:x", "'node-a:x' has the port 'x', which is not a number"),
            ("0.0.0.0:0", "'0.0.0.0:0' has the port 0, which is not between 1 and 65535"),
            ("0.0.0.0:65536", "'0.0.0.0:65536' has the port 65536, which is not between 1 and 65535"),
            ("10.0.0.256:1", "'10.0.0.256:1' has the host '10.0.0.256', which is not an IPv4 address"),
            ("a b:1", "'a b:1' has the host 'a b', which is neither a name nor an IPv4 address"),
            ("[::]:2379", "'[::]:2379' has an IPv6 address, which is not supported"),
            ("http://a:2379", "'http://a:2379' is a URL"),
        ],
    )
    def test_other_texts_are_refused_and_the_form_is_named(self, text: str, fault: str) -> None:
        with pytest.raises(ValueError) as caught:
            ListenAddress.parse(text)
        assert str(caught.value) == f"{fault}: expected ADDR:PORT, such as 0.0.0.0:23790"

    def test_the_certificate_is_that_of_the_token_and_private(self, tmp_path: Path) -> None:
        texts = []
        for folder, token in (("a", TOKEN), ("b", TOKEN), ("c", f"{TOKEN}x")):
            (tmp_path / folder).mkdir()
            paths = credentials(token, tmp_path / folder)
            assert paths["cacert"] == paths["cert"]
            assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / folder).iterdir()} == {0o600}
            texts.append([Path(paths["cert"]).read_text(), Path(paths["key"]).read_text()])
        assert texts[0] == texts[1]
        assert not set(texts[0]) & set(texts[2])
        assert credentials("", tmp_path) == {}

    def test_a_token_needs_the_package_that_makes_certificates(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(_: object) -> None:
            raise ImportError("no cryptography\nat all")

        monkeypatch.setattr(module, "load", load)
        with pytest.raises(NixlPluginError) as caught:
            credentials(TOKEN, tmp_path)
        assert caught.value.reason == (
            "--nixl-etcd-listen with a group token needs certificates, and the package cryptography cannot be "
            "imported: no cryptography"
        )
        assert caught.value.remedy == ("on every rank run `pip install cryptography`, or give --nixl-etcd URL instead")


class TestServe:
    def test_without_a_token_any_client_may_use_it(self, own_client: SupervisorClient) -> None:
        [port] = free_ports(1)
        server = serve_etcd(own_client, ListenAddress("localhost", port))
        try:
            wait_for_etcd(server.endpoint, 60, {})
            assert server.endpoint == f"http://localhost:{port}"
            assert server.describe().endswith(f"at http://localhost:{port}")
            with connect(parse_endpoints(server.endpoint)) as client:
                client.put("/x", b"1")
        finally:
            server.discard()
        assert not list(own_client.directory.glob(f"{server.name}*"))

    def test_with_a_token_the_ranks_may_use_it_also_after_a_restart(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(TOKEN)
        endpoint = server.endpoint
        with server.client() as client:
            client.put("/x", b"1")
            server.kill()
            server.restart()
            assert client.get("/x") == b"1"
        assert server.endpoint == endpoint
        files = credentials(TOKEN, tmp_path)
        with connect(parse_endpoints(endpoint), **files) as client:
            assert client.get("/x") == b"1"
        context = ssl.create_default_context(cafile=files["cacert"])
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
        context.load_cert_chain(files["cert"], files["key"])
        with context.wrap_socket(socket.socket(), server_hostname=files["server_name"]) as strict:
            strict.connect(("127.0.0.1", server.client_port))

    def test_a_stranger_gets_no_answer_to_anything(self, serve: Serve, tmp_path: Path) -> None:
        server, other = serve(TOKEN), credentials("another", tmp_path)
        body = {"action": "ACTIVATE", "alarm": "NOSPACE", "TTL": 60, "revision": 1, "key": "eA==", "name": "root"}
        paths = (
            "/v3/maintenance/alarm", "/v3/kv/compaction", "/v3/lease/grant", "/v3/lease/leases",
            "/v3/cluster/member/list", "/v3/kv/range", "/v3/auth/authenticate", "/metrics", "/debug/vars", "/health",
            "/version",
        )  # fmt: skip
        for path, scheme, certificate in product(paths, ("http", "https"), (None, (other["cert"], other["key"]))):
            url = f"{scheme}://127.0.0.1:{server.client_port}{path}"
            verb = "post" if path.startswith("/v3/") else "get"
            status = 0
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.request(verb, url, json=body, cert=certificate, verify=False, timeout=60)
                status = answer.status_code
            assert status in (0, 400), f"{url}: {status}"
        with server.client() as client:
            assert client.maintenance.alarms() == ()

    def test_no_request_is_answered_without_a_certificate_while_it_starts(self, serve: Serve) -> None:
        """From before its start until it is ready, requests to its address are refused or not answered."""
        (port,) = free_ports(1)
        answers, ready = set[int](), threading.Event()

        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE

        def ask(encrypted: bool) -> None:
            while not ready.is_set():
                # CPython leaks a socket that is wrapped when its peer has already reset it: wrap first, then connect.
                plain = socket.socket()
                with contextlib.suppress(OSError), tls.wrap_socket(plain) if encrypted else plain as stream:
                    stream.settimeout(5)
                    stream.connect(("127.0.0.1", port))
                    stream.sendall(b'POST /v3/kv/range HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"key": "eA=="}')
                    if status := stream.recv(1024).split()[1:2]:
                        answers.add(int(status[0]))

        strangers = [threading.Thread(target=ask, args=(encrypted,)) for encrypted in (False, True)]
        for stranger in strangers:
            stranger.start()
        try:
            serve(TOKEN, port)
        finally:
            ready.set()
            for stranger in strangers:
                stranger.join()
        assert answers <= {400}, answers

    def test_an_address_that_cannot_be_used_is_refused_with_the_option(
        self, own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other_port = (
            "give every rank another port; if that process is an etcd for this group, give --nixl-etcd URL instead"
        )
        address = "give an address of rank 0's host and a free port above 1023; 0.0.0.0:PORT stands for all addresses"
        monkeypatch.setattr(socket, "gethostbyname", partial(_resolve, socket.gethostbyname))
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            for host, port, reason, remedy in (
                ("127.0.0.1", taken, "another process uses the port", other_port),
                ("0.0.0.0", taken, "another process uses the port", other_port),
                ("192.0.2.7", 12379, "192.0.2.7 is not an address of this host", address),
                ("of-another", 12379, "of-another (192.0.2.7) is not an address of this host", address),
                *((name, 12379, f"the name {name!r} does not resolve to an IPv4 address", address)
                  for name in ("no-such-host.invalid", "x" * 70)),
            ):  # fmt: skip
                with pytest.raises(EtcdError) as caught:
                    serve_etcd(own_client, ListenAddress(host, port))
                assert caught.value.reason == f"--nixl-etcd-listen={host}:{port}: {reason}"
                assert (caught.value.remedy, caught.value.cause) == (remedy, "listen")
        assert not list(own_client.directory.glob("etcd-*"))

    def test_an_address_that_this_process_may_not_use_is_refused(
        self, own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The socket is a double, because root may use any port."""

        class Forbidden(socket.socket):
            def bind(self, address: object) -> None:
                raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(socket, "socket", Forbidden)
        with pytest.raises(EtcdError, match=r"=127\.0\.0\.1:1: this process cannot listen there: Permission denied\n"):
            serve_etcd(own_client, ListenAddress("127.0.0.1", 1))

    @pytest.mark.parametrize("tokens", [("", ""), ("one", "other")])
    def test_a_port_that_another_etcd_takes_meanwhile_is_refused(
        self, serve: Serve, own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, str]
    ) -> None:
        first = serve(tokens[0])
        files = set(own_client.directory.glob("etcd-*"))
        monkeypatch.setattr(module, "claim_address", lambda wanted: wanted.host)
        with pytest.raises(EtcdError, match=f"{first.client_port}: another process uses the port"):
            serve_etcd(own_client, ListenAddress("127.0.0.1", first.client_port), tokens[1])
        assert set(own_client.directory.glob("etcd-*")) == files
        assert first.death_reason() is None


class TestWait:
    def test_a_rank_waits_for_a_late_rank_0(self, serve: Serve, own_client: SupervisorClient) -> None:
        (port,) = free_ports(1)
        certificates = credentials(TOKEN, own_client.directory)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait_for_etcd, f"https://127.0.0.1:{port}", 120, certificates)
            wait([waiting], 0.2)
            assert not waiting.done()
            serve(TOKEN, port)
            waiting.result(180)

    def test_an_etcd_that_never_starts_is_reported_after_the_timeout(self) -> None:
        [port] = free_ports(1)
        endpoint, start = f"http://127.0.0.1:{port}", time.monotonic()
        with pytest.raises(EtcdError) as caught:
            wait_for_etcd(endpoint, 0.5, {})
        assert time.monotonic() - start >= 0.5
        error = caught.value
        assert error.reason == (
            f"no etcd answered at {endpoint} within 0.5 s: rank 0 serves it (--nixl-etcd-listen), and has not started "
            "or cannot be reached there"
        )
        assert error.remedy == (
            "check that rank 0 runs, read its output, and check that no firewall blocks that port; if rank 0 has "
            "another address, name it with --nixl-etcd http://HOST:PORT"
        )
        assert (error.cause, error.endpoint) == ("refused", endpoint)
        assert error.detail == f"the last attempt: etcd at {endpoint}: connection refused, nothing listens there"

    @pytest.mark.parametrize(
        ("theirs", "ours", "reason"),
        [
            (TOKEN, "another", "rank 0 has another group token than this rank"),
            (TOKEN, "", "rank 0 has a group token, and this rank has none"),
            ("", TOKEN, "rank 0 has no group token, and this rank has one"),
        ],
    )
    def test_a_different_token_is_reported_at_once(
        self, serve: Serve, tmp_path: Path, theirs: str, ours: str, reason: str
    ) -> None:
        server = serve(theirs)
        endpoint = f"{'https' if ours else 'http'}://127.0.0.1:{server.client_port}"
        start = time.monotonic()
        with pytest.raises(EtcdError) as caught:
            wait_for_etcd(endpoint, 300, credentials(ours, tmp_path))
        assert time.monotonic() - start < 100
        assert caught.value.reason == f"etcd at {endpoint}: {reason}"
        assert caught.value.remedy == "give every rank the same --nixl-group-token or NIXL_GROUP_TOKEN"

    def test_a_server_that_is_not_an_etcd_is_reported_at_once(self) -> None:
        with serving(lambda: [b"220 mail.example ready\r\n"]) as endpoint, pytest.raises(EtcdError) as caught:
            wait_for_etcd(str(endpoint), 300, {})
        assert caught.value.cause == "not-etcd"

    def test_a_rank_says_why_it_waits_and_how_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MESSAGE_SECONDS", 0.05)
        lines, url = list[str](), "http://no-such-host.invalid:2379"
        with pytest.raises(EtcdError) as caught:
            wait_for_etcd(url, 1, {}, waiting=lines.append)
        last = f"etcd at {url}: the name 'no-such-host.invalid' does not resolve"
        sentence = f"waiting for the etcd that rank 0 serves at {url}; [01] s of 1 s; last attempt: {last}"
        assert re.fullmatch(sentence, lines[0])
        assert caught.value.reason == (
            f"the host in {url}, where rank 0 serves the etcd (--nixl-etcd-listen), did not resolve within 1 s"
        )
        assert caught.value.remedy == (
            "set MASTER_ADDR on this rank to a name or an IPv4 address of rank 0's host that resolves here, or give "
            "--nixl-etcd http://HOST:PORT"
        )
        assert (caught.value.detail, caught.value.cause) == (f"the last attempt: {last}", "unresolved")

    def test_rank_0_counts_the_connections_that_its_etcd_refused(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(TOKEN)
        wait_for_etcd(server.endpoint, 60, credentials(TOKEN, tmp_path))
        assert refusals(server) == 0
        for wrong in ("another", ""):
            endpoint = server.endpoint if wrong else server.endpoint.replace("https", "http")
            with pytest.raises(EtcdError, match="group token"):
                wait_for_etcd(endpoint, 60, credentials(wrong, tmp_path))
        assert eventually(lambda: refusals(server) >= 2)
        server.discard()
        assert refusals(server) == 0, "an etcd that is gone says nothing"


def test_the_address_of_the_default_route_comes_first() -> None:
    require_tools()
    interface = "ip link add veth2 type veth peer name veth3 && ip link set veth2 up && ip link set veth3 up"
    more = f"{interface} && ip address add 10.97.0.1/24 dev veth2"
    script = "from pytest_nixl.etcd_servers.rank0 import own_address; print(own_address())"
    with one_host() as host:
        for setup, expected in ((more, "10.99.0.1"), ("ip route add default via 10.97.0.2", "10.97.0.1")):
            host.run("sh", "-c", setup)
            assert host.run(sys.executable, "-c", script) == f"{expected}\n"


def _resolve(really: Callable[[str], str], name: str) -> str:
    return "192.0.2.7" if name == "of-another" else really(name)


def test_this_host_can_listen_on_its_own_address() -> None:
    with socket.create_server((own_address(), 0)):
        pass


@pytest.mark.parametrize(
    ("addresses", "address"),
    [
        ({"lo": ["127.0.0.1/8"], "eth0": ["fe80::1/64", "10.0.0.5/24"], "eth1": ["10.0.1.5/24"]}, "10.0.0.5"),
        ({"lo": ["127.0.0.1/8"]}, "127.0.0.1"),
    ],
)
def test_a_host_without_a_route_has_the_address_of_its_first_interface(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], address: str
) -> None:
    """The socket is a double that has no route."""

    class NoRoute(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", NoRoute)
    monkeypatch.setattr(module, "ask_addresses", lambda: addresses)
    assert own_address() == address


SLURM = LauncherPlacement("Slurm", "SLURM_PROCID", 3, 4, "17-0", "n07")
INDEXED = LauncherPlacement("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", 3)
ALL = ListenAddress("0.0.0.0", 12379)
MASTER = {"MASTER_ADDR": "10.0.0.1"}


class TestFind:
    @pytest.mark.parametrize(
        ("etcd", "listen", "placement", "environ", "expected"),
        [
            ("http://e:2379", ALL, SLURM, MASTER, "http://e:2379"),
            ("", ALL, SLURM, MASTER, "http://10.0.0.1:12379"),
            ("", ALL, SLURM, {}, "http://n07:12379"),
            ("", ListenAddress("node-a", 2379), SLURM, MASTER, "http://node-a:2379"),
        ],
    )
    def test_a_given_address_wins_over_the_address_of_rank_0(
        self,
        etcd: str,
        listen: ListenAddress | None,
        placement: LauncherPlacement | None,
        environ: dict[str, str],
        expected: str,
    ) -> None:
        assert find_etcd(etcd, listen, 3, placement, environ) == expected

    @pytest.mark.parametrize(
        ("listen", "rank", "placement", "reason"),
        [
            (ALL, 3, INDEXED, "rank 3 cannot tell where the group's etcd is: --nixl-etcd-listen=0.0.0.0:12379 names no "
             "host, MASTER_ADDR is not set, and an Indexed Job of Kubernetes does not say where rank 0 is"),
            (ListenAddress("", 12379), 1, None, "rank 1 cannot tell where the group's etcd is: "
             "--nixl-etcd-listen=:12379 names no host, MASTER_ADDR is not set, and no launcher says where rank 0 is"),
            (None, None, SLURM, "this process cannot tell where the group's etcd is: neither --nixl-etcd nor "
             "--nixl-etcd-listen is given"),
        ],
    )  # fmt: skip
    def test_without_any_address_three_remedies_are_named(
        self, listen: ListenAddress | None, rank: int | None, placement: LauncherPlacement | None, reason: str
    ) -> None:
        with pytest.raises(NixlPluginError) as caught:
            find_etcd("", listen, rank, placement, {})
        assert caught.value.reason == reason
        for remedy in ("--nixl-etcd http://HOST:PORT", "MASTER_ADDR=HOST", "--nixl-etcd-listen HOST:PORT"):
            assert remedy in caught.value.remedy
