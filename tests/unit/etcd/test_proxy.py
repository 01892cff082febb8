# SPDX-License-Identifier: Apache-2.0
"""The proxy to an etcd, with a real etcd behind it and real clients of both protocols in front of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path

import pytest
from helpers.etcd import Etcd, running_etcd, wait_until
from helpers.http_double import HttpDouble, answering

from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.proxy import Access, EtcdProxy, ProxyClient, ProxyError, Request, State
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.etcd_servers.embedded import etcd_binary

#: Seconds for each step on a busy machine.
SECONDS = 60.0


class Scene:
    """A proxy before a real etcd, a client that goes past it, and clients of the gateway through it."""

    def __init__(self, etcd: Etcd, stack: ExitStack) -> None:
        self._stack = stack
        self.direct = stack.enter_context(connect([etcd.endpoint], timeout=SECONDS))
        self.path = stack.enter_context(EtcdProxy(etcd.url))

    def through(self, proxied: ProxyClient, timeout: float = SECONDS) -> EtcdClient:
        return self._stack.enter_context(connect(parse_endpoints(proxied.endpoint), timeout=timeout))

    def wait(self, condition: Callable[[], object], label: str) -> None:
        self.path.wait(condition, label, seconds=SECONDS)

    def held(self, proxied: ProxyClient) -> Request:
        """Wait until a request is held, and return it."""
        self.wait(lambda: proxied.held, f"a request of {proxied.name} to be held")
        [request] = proxied.held
        return request

    def comes_to(self, request: Request, state: State) -> None:
        self.wait(lambda: request.state is state, f"{request} to be {state}")


@pytest.fixture
def scene(etcd: Etcd) -> Iterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(etcd, stack)
        yield scene
        scene.direct.delete_prefix("/t/")


class Failing:
    """A request of another thread, and how it failed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: EtcdError | None = None
        self._work = work
        self._thread = started(self._run)

    def _run(self) -> None:
        try:
            self._work()
        except EtcdError as error:
            self.error = error

    def cause(self) -> str:
        self._thread.join(SECONDS)
        return "" if self.error is None else self.error.cause


def etcdctl(client: ProxyClient, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real etcdctl, which uses gRPC, through the proxy."""
    program = str(Path(etcd_binary()).with_name("etcdctl"))
    command = [program, f"--endpoints={client.endpoint}", "--command-timeout=60s", *arguments]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=180, check=False, input=input
    )


def start_etcdctl(proxied: ProxyClient, *arguments: str) -> subprocess.Popen[bytes]:
    program = str(Path(etcd_binary()).with_name("etcdctl"))
    return subprocess.Popen([program, f"--endpoints={proxied.endpoint}", *arguments], stdout=subprocess.PIPE)


def connected(proxied: ProxyClient) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(proxied.endpoint.rsplit(":", 1)[1])), SECONDS)


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_write(request: Request) -> bool:
    return request.writes


class TestSeen:
    def test_requests_of_the_gateway(self, scene: Scene) -> None:
        proxied = scene.path.client("g")
        client = scene.through(proxied)
        lease = client.lease(60)
        client.put("/t/a", b"1", lease)
        assert client.get("/t/a") == b"1"
        assert client.get_prefix("/t/") == {"/t/a": b"1"}
        assert client.create("/t/b", b"2")
        assert lease.refresh() == 60
        assert client.delete("/t/b")
        lease.revoke()
        assert [(request.method, request.key, request.writes) for request in proxied.requests] == [
            ("LeaseGrant", "", False), ("Put", "/t/a", True), ("Range", "/t/a", False), ("Range", "/t/", False),
            ("Txn", "/t/b", True), ("LeaseKeepAliveOnce", "", False), ("DeleteRange", "/t/b", True),
            ("LeaseRevoke", "", True),
        ]  # fmt: skip
        assert proxied.requests[0].granted() == lease.id
        assert {request.state for request in proxied.requests} == {State.ANSWERED}
        assert proxied.requests[1].label({"/t": "<here>"}) == "Put(<here>/a)"
        assert proxied.requests[3].accesses == (Access(b"/t/", b"/t0", False),)

    def test_requests_of_grpc(self, scene: Scene) -> None:
        proxied = scene.path.client("c")
        large = "v" * 300_000
        assert etcdctl(proxied, "put", "/t/large", input=large).returncode == 0
        assert etcdctl(proxied, "get", "/t/large").stdout == f"/t/large\n{large}\n"
        granted = etcdctl(proxied, "lease", "grant", "30").stdout.split()[1]
        transaction = 'mod("/t/x") = "0"\n\nput /t/x 1\n\nget /t/large\n\n'
        assert "SUCCESS" in etcdctl(proxied, "txn", input=transaction).stdout
        assert etcdctl(proxied, "lease", "keep-alive", "--once", granted).returncode == 0
        assert etcdctl(proxied, "lease", "revoke", granted).returncode == 0
        assert etcdctl(proxied, "del", "--prefix", "/t/").stdout == "2\n"
        assert [(request.method, request.key) for request in proxied.requests] == [
            ("Put", "/t/large"), ("Range", "/t/large"), ("LeaseGrant", ""), ("Txn", "/t/x"), ("LeaseKeepAlive", ""),
            ("LeaseRevoke", ""), ("DeleteRange", "/t/"),
        ]  # fmt: skip
        assert f"{proxied.requests[2].granted():016x}" == granted
        assert proxied.requests[6].accesses[0].end == b"/t0"
        assert scene.direct.count_prefix("/t/") == 0

    def test_watches_are_never_held_and_are_confirmed_when_etcd_says_so(self) -> None:
        with running_etcd() as stopped, ExitStack() as stack:
            scene = Scene(stopped, stack)
            proxies = [scene.path.client("gateway"), scene.path.client("etcdctl")]
            for proxied in proxies:
                proxied.hold()
            os.kill(stopped.pid, signal.SIGSTOP)
            events = list[bytes]()
            watch = scene.through(proxies[0]).watch(Watched("/t/w", 1), seconds=SECONDS)
            started(lambda: events.extend(event.item.value for event in islice(watch, 2)))
            process = start_etcdctl(proxies[1], "watch", "--rev=1", "/t/w")
            try:
                scene.wait(lambda: all(proxied.requests for proxied in proxies), "both watches")
                watches = [proxied.requests[0] for proxied in proxies]
                assert not any(watch.confirmed for watch in watches)
                os.kill(stopped.pid, signal.SIGCONT)
                scene.wait(lambda: all(watch.confirmed for watch in watches), "both confirmations")
                for value in (b"first", b"second"):
                    scene.direct.put("/t/w", value)
                    assert process.stdout is not None
                    assert [*islice(process.stdout, 3)] == [b"PUT\n", b"/t/w\n", value + b"\n"]
                wait_until(lambda: events == [b"first", b"second"], SECONDS, "both events")
                assert [request.label() for request in scene.path.requests] == ["Watch(/t/w)"] * 2
            finally:
                process.kill()
                process.communicate()

    def test_a_watch_that_the_server_ends_has_ended_for_the_client_which_goes_on(self) -> None:
        """The server is a double, because an etcd ends a watch only with its connection."""

        class Server(HttpDouble):
            protocol_version = "HTTP/1.1"

            def reply(self) -> None:
                self.body()
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"3\r\n{}\n\r\n0\r\n\r\n")

        with answering(Server) as port, EtcdProxy(f"http://127.0.0.1:{port}") as path:
            proxied = path.client("w")
            connection = HTTPConnection(proxied.endpoint.removeprefix("http://"), timeout=SECONDS)
            sockets = []
            for _ in range(2):
                connection.request("POST", "/v3/watch", b"{}")
                sockets.append(connection.sock)
                assert connection.getresponse().read() == b"{}\n"
            connection.close()
        assert sockets[0] is sockets[1]
        assert [request.method for request in proxied.requests] == ["Watch", "Watch"]

    def test_clients_are_distinguished_and_requests_that_are_not_of_etcd_are_seen(self, scene: Scene) -> None:
        first, second = scene.path.client("first"), scene.path.client("second")
        assert scene.path.describe() == "the etcd proxy saw no request"
        scene.through(first).put("/t/1", b"")
        scene.through(second).get("/t/1")
        with connected(second) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: etcd\r\nconnection: close\r\n\r\n")
            answer = b"".join(iter(partial(connection.recv, 1000), b""))
        assert b"\r\nConnection: close\r\n" in answer
        assert b"etcdserver" in answer
        lines = [
            "first 1: Put(/t/1), answered", "second 1: Range(/t/1), answered", "second 2: GET /version(), answered",
        ]  # fmt: skip
        assert [str(request) for request in scene.path.requests] == lines
        with pytest.raises(ProxyError) as caught:
            scene.path.wait(lambda: False, "nothing", seconds=0.1)
        assert str(caught.value).splitlines() == [
            "waited 0.1 s for nothing", "the last requests through the etcd proxy:", *lines,
        ]  # fmt: skip
        for _ in range(8):
            scene.through(second).get("/t/1")
        last = [f"second {number}: Range(/t/1), answered" for number in range(3, 11)]
        assert scene.path.describe().splitlines()[1:] == [lines[0], *last], "the last eight of each"


class TestHeld:
    def test_held_requests_are_released_in_another_order(self, scene: Scene) -> None:
        proxies = [scene.path.client("a"), scene.path.client("b")]
        threads = []
        for proxied in proxies:
            proxied.hold(is_write)
            client = scene.through(proxied)
            assert client.get("/t/k") is None  # reads pass
            threads.append(started(partial(client.put, "/t/k", proxied.name.encode())))
        first, second = map(scene.held, proxies)
        assert scene.direct.get("/t/k") is None
        proxies[1].release()
        scene.comes_to(second, State.ANSWERED)
        scene.through(proxies[1]).put("/t/k", b"it holds no request any more")
        assert proxies[0].release_if_held(first)
        scene.comes_to(first, State.ANSWERED)
        assert scene.direct.get("/t/k") == b"a"
        for thread in threads:
            thread.join(SECONDS)
        with pytest.raises(ProxyError, match="a 2: Put"):
            proxies[0].release(first)

    @pytest.mark.parametrize("end", ["drop", "cut"])
    def test_a_held_request_that_is_dropped_or_cut_off_never_arrives(self, scene: Scene, end: str) -> None:
        proxied = scene.path.client("d")
        proxied.hold()
        failing = Failing(lambda: scene.through(proxied).create("/t/d", b"1"))
        request = scene.held(proxied)
        if end == "drop":
            proxied.drop(request)
        else:
            proxied.cut()
        assert failing.cause() == "closed"
        assert (request.state, request.sent, proxied.held) == (State.DROPPED, 0, ())
        assert not proxied.release_if_held(request)
        assert scene.direct.get("/t/d") is None

    def test_a_held_request_of_a_killed_client_never_arrives(self, scene: Scene) -> None:
        proxied = scene.path.client("k")
        proxied.hold()
        process = start_etcdctl(proxied, "put", "/t/k", "1")
        request = scene.held(proxied)
        process.kill()
        process.communicate()
        scene.comes_to(request, State.DROPPED)
        assert proxied.held == ()
        assert scene.direct.get("/t/k") is None

    def test_a_delayed_request_times_out(self, scene: Scene) -> None:
        proxied = scene.path.client("s")
        proxied.delay(10)
        with pytest.raises(EtcdError, match="timeout"):
            scene.through(proxied, timeout=0.3).put("/t/s", b"")


class TestLost:
    def test_the_answer_of_a_gateway_request(self, scene: Scene) -> None:
        proxied = scene.path.client("l")
        proxied.lose_answer(is_write, nth=2)
        client = scene.through(proxied)
        client.put("/t/1", b"")
        client.get("/t/1")
        assert Failing(lambda: client.create("/t/2", b"")).cause() == "closed"
        assert [request.state for request in proxied.requests] == [State.ANSWERED, State.ANSWERED, State.ANSWER_LOST]
        assert scene.direct.get("/t/2") == b"", "the write was applied"
        assert not client.create("/t/2", b""), "the next one finds it, over a new connection"


class TestCut:
    def test_a_cut_client_is_refused_until_restored(self, scene: Scene) -> None:
        proxied, other = scene.path.client("cut"), scene.path.client("whole")
        client, spared = scene.through(proxied), scene.through(other)
        client.put("/t/c", b"1")
        endpoint = proxied.endpoint
        for _ in range(20):
            proxied.cut()
            assert (proxied.is_cut, proxied.connections) == (True, 0)
            with pytest.raises(EtcdError) as caught:
                client.get("/t/c")
            assert caught.value.cause == "refused"
            spared.put("/t/c", b"2")
            proxied.restore()
            assert client.get("/t/c") == b"2"
        assert (proxied.endpoint, proxied.is_cut) == (endpoint, False)

    @pytest.mark.parametrize("end", ["cut", "kill"])
    def test_a_request_that_etcd_has_gets_no_answer_after_a_cut_or_the_death_of_etcd(self, end: str) -> None:
        with running_etcd() as stopped, ExitStack() as stack:
            scene = Scene(stopped, stack)
            proxied = scene.path.client("f")
            client = scene.through(proxied)
            client.put("/t/f", b"")
            os.kill(stopped.pid, signal.SIGSTOP)
            failing = Failing(lambda: client.put("/t/f", b""))
            scene.wait(lambda: len(proxied.requests) == 2, "the second put")
            first, second = proxied.requests
            assert (first.state, second.state) == (State.ANSWERED, State.SENT)
            if end == "cut":
                proxied.cut()
            else:
                os.kill(stopped.pid, signal.SIGKILL)
            assert failing.cause() == "closed"
            assert second.state is State.UNANSWERED
            assert 0 < first.sent < second.sent
            scene.wait(lambda: proxied.connections == 0, "the connections to end")
            if end == "cut":
                os.kill(stopped.pid, signal.SIGCONT)
            else:
                assert Failing(lambda: client.get("/t/f")).cause() == "closed"


class TestPath:
    def test_closing_frees_its_ports(self, etcd: Etcd) -> None:
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            port = int(proxied.endpoint.rsplit(":", 1)[1])
            assert threading.active_count() > 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))
        with pytest.raises(ProxyError, match="is closed"):
            path.client()
        path.close()

    def test_a_client_that_breaks_the_protocol_is_cut_off(self, scene: Scene) -> None:
        proxied = scene.path.client()
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for wild in (b"\0\r\n\r\n", preface + b"\0" * 9):
            with connected(proxied) as connection:
                connection.sendall(wild)
                while connection.recv(1000):
                    pass
        assert len(proxied.broken) == 2
        assert proxied.broken[0].startswith("illegal request line")

    def test_an_error_of_the_proxy_is_reported(self, etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(method: str, body: bytes) -> tuple[Access, ...]:
            raise RuntimeError("made by a test")

        monkeypatch.setattr("pytest_nixl.etcd.proxy.connection.gateway_accesses", fail)
        reason = r"the proxy to etcd at 127\.0\.0\.1:\d+ failed: RuntimeError\('made by a test'\)"
        with pytest.raises(ProxyError, match=reason), EtcdProxy(etcd.url) as path:
            with connect(parse_endpoints(path.client().endpoint)) as client, pytest.raises(EtcdError):
                client.put("/t/x", b"")

    def test_a_thread_that_waits_is_woken_by_an_error_of_the_proxy(self, etcd: Etcd) -> None:
        began = time.monotonic()
        with pytest.raises(ProxyError, match="made by a test"), EtcdProxy(etcd.url) as path:

            def never() -> bool:
                path.loop.call_soon_threadsafe(path.failed, RuntimeError("made by a test"))
                return False

            path.wait(never, "nothing", seconds=SECONDS)
        assert time.monotonic() - began < SECONDS

    def test_an_https_etcd_is_refused(self) -> None:
        with pytest.raises(ValueError, match="not https://h:1: expected http://HOST:PORT"):
            EtcdProxy("https://h:1")
