# SPDX-License-Identifier: Apache-2.0
"""Servers in containers, with the real client libraries. The engine is a double, because this host may have none."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from pytest_nixl.core.extras import pip_install
from pytest_nixl.processes import container as container_module
from pytest_nixl.processes.container import (
    Container,
    ContainerError,
    ContainerProgram,
    container_engine,
    engine_may_answer,
    ensure_image,
    image_present,
)

pytest.importorskip("testcontainers")

PROGRAM = ContainerProgram("store", 80, "/ready", ("serve", "--all"))
IMAGE = "mine/store:1"
SOCKET = Path("/var/run/docker.sock")


class Handler(BaseHTTPRequestHandler):
    """Answers as an engine, and as the server in each of its containers."""

    server: Engine

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        engine, path = self.server, urlsplit(self.path).path
        if path == "/ready":
            self.answer(engine.ready, {})
        elif "/images/" in path:
            self.answer(200 if engine.has_image else 404, {"Id": "sha256:1", "message": "no such image"})
        elif path.endswith("/logs"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(engine.log)
        elif "/containers/" in path:
            engine.requests.append(("inspect", {"name": path.split("/")[-2]}))
            ports = {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(engine.server_address[1])}]}
            document = {"Id": "c" * 64, "State": engine.state, "Config": {"Tty": True},
                        "NetworkSettings": {"Ports": ports}, "message": "no such container"}  # fmt: skip
            self.answer(200 if engine.state else 404, document)
        else:
            self.answer(200, {"ApiVersion": "1.44"})

    def do_POST(self) -> None:
        engine, url = self.server, urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        step = url.path.rpartition("/")[2]
        if "/images/" in url.path:
            engine.requests.append(("pull", parse_qs(url.query)))
            engine.has_image = engine.may_pull
            self.answer(200 if engine.may_pull else 404, {"message": "no such registry "})
        elif step == "create":
            engine.requests.append((step, {"name": parse_qs(url.query)["name"][0], **body}))
            self.answer(201, {"Id": "c" * 64})
        else:
            fault = engine.faults.pop(0) if engine.faults else ""
            self.answer(500 if fault else 204, {"message": fault})

    def do_DELETE(self) -> None:
        self.server.requests.append(("remove", parse_qs(urlsplit(self.path).query)))
        self.answer(self.server.removal, {"message": "being removed"})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if status != 204:
            self.wfile.write(json.dumps(document).encode())


class Engine(ThreadingHTTPServer):
    """A container engine that starts nothing.

    :ivar faults: the message of each start that fails; the others succeed.
    :ivar state: of each container; None: there is none.
    """

    def __init__(self, address: Any = ("127.0.0.1", 0)) -> None:
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        super().__init__(address, Handler)
        self.has_image, self.may_pull, self.ready, self.removal = True, True, 200, 204
        self.faults: list[str] = []
        self.state: dict[str, Any] | None = {"Status": "running"}
        self.log = b"first\nlast\n"
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def server_bind(self) -> None:
        """Bind the address without a search for its name."""
        TCPServer.server_bind(self)

    def bodies(self, request: str) -> list[dict[str, Any]]:
        """Return what the requests of a kind had."""
        return [body for name, body in self.requests if name == request]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for name in ("TESTCONTAINERS_HOST_OVERRIDE", "TC_HOST"):
        monkeypatch.delenv(name, raising=False)
    with Engine() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{running.server_address[1]}")
        yield running
        running.shutdown()


def test_an_engine_is_reached_by_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "docker.sock"
    with Engine(str(path)) as engine:
        threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        assert image_present(IMAGE)
        engine.has_image = False
        assert not image_present(IMAGE)
        engine.shutdown()


class Watcher:
    """A supervisor that keeps what it is to watch."""

    directory = Path("/tmp/pytest-nixl-run")

    def __init__(self) -> None:
        self.log: list[tuple[str, bool | None]] = []

    def watch_container(self, name: str, *, expected: bool = False) -> None:
        self.log.append((name, expected))

    def unwatch_container(self, name: str) -> None:
        self.log.append((name, None))


Start = Callable[..., Container]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def start(watcher: Watcher) -> Start:
    """Return a function that starts a container of the program."""
    return lambda program=PROGRAM, *, pull=False: Container.start(program, IMAGE, cast(Any, watcher), pull=pull)


def test_a_container_is_watched_before_it_exists_and_published_on_loopback(
    engine: Engine, watcher: Watcher, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from testcontainers.core.config import testcontainers_config as settings

    user_settings = {"ryuk_disabled": False, "connection_mode_override": None, "tc_host_override": "mine"}
    for name, value in user_settings.items():
        monkeypatch.setattr(settings, name, value)
    container = start()
    assert {name: getattr(settings, name) for name in user_settings} == user_settings
    [created] = engine.bodies("create")
    assert (created["name"], created["Image"], created["Cmd"]) == (container.name, IMAGE, ["serve", "--all"])
    assert container.name.startswith("pytest-nixl-store-")
    labels = {name: value for name, value in created["Labels"].items() if name.startswith("pytest-nixl")}
    assert labels == {"pytest-nixl": "store", "pytest-nixl.run": "pytest-nixl-run"}
    published = {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(container.port)}]}
    assert created["HostConfig"]["PortBindings"] == published
    assert (container.address, container.id) == (f"127.0.0.1:{container.port}", "c" * 64)
    assert watcher.log == [(container.name, True), (container.name, False)]
    container.remove()
    assert engine.bodies("inspect")[-1] == {"name": container.name}
    assert engine.bodies("remove") == [{"v": ["True"], "link": ["False"], "force": ["True"]}]
    assert watcher.log[2:] == [(container.name, None)]
    assert not start(ContainerProgram("bare", 80, "/ready")).program.command
    assert not engine.bodies("create")[1].get("Cmd"), "the image has a command line"


@pytest.mark.parametrize(
    ("variables", "host", "published"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"TC_HOST": "there"}, "there", ""),
        ({"TESTCONTAINERS_HOST_OVERRIDE": "there", "TC_HOST": "elsewhere"}, "there", ""),
        ({"DOCKER_HOST": "tcp://localhost:{port}"}, "127.0.0.1", "127.0.0.1"),
        ({"DOCKER_HOST": "http://127.1:{port}"}, "127.1", ""),
    ],
)
def test_the_published_port_is_on_the_host_of_the_engine(
    engine: Engine, start: Start, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str, published: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(port=engine.server_address[1]))
    if host == "there":  # nothing answers there
        engine.faults.append("no room")
        with pytest.raises(ContainerError, match="no room"):
            start()
    else:
        assert start().host == host
    [[binding]] = engine.bodies("create")[0]["HostConfig"]["PortBindings"].values()
    assert binding["HostIp"] == published


@pytest.mark.parametrize(
    "fault", ["driver failed: port is already allocated", "listen tcp 127.0.0.1:1: bind: address already in use"]
)
def test_another_port_is_tried_if_a_process_takes_it_first(
    engine: Engine, watcher: Watcher, start: Start, fault: str
) -> None:
    engine.faults[:] = [fault] * 2
    container = start()
    names = [body["name"] for body in engine.bodies("create")]
    assert len(set(names)) == 3
    assert container.name == names[2]
    steps = [(name, watched) for name in names[:2] for watched in (True, None)]
    assert watcher.log == [*steps, (names[2], True), (names[2], False)]
    assert len(engine.bodies("remove")) == 2
    engine.faults[:] = [fault] * 9
    with pytest.raises(ContainerError) as caught:
        start()
    assert (caught.value.cause, len(engine.faults)) == ("port-taken", 4)


def test_a_container_that_does_not_start_is_removed(engine: Engine, watcher: Watcher, start: Start) -> None:
    engine.faults.append("no room ")
    with pytest.raises(ContainerError) as caught:
        start()
    error = caught.value
    assert (error.reason, error.remedy, error.cause) == (
        f"the container engine did not start store from {IMAGE}: no room", "read the engine's log", "not-started"
    )  # fmt: skip
    assert [watched for _, watched in watcher.log] == [True, None]
    assert len(engine.bodies("remove")) == 1


@pytest.mark.parametrize(
    ("log", "lines"), [(b"", "its log is empty"), (b" a\nb \n", "the last lines of its log:\na\nb")]
)
def test_a_server_that_is_not_ready_in_time_shows_its_log(
    engine: Engine, start: Start, monkeypatch: pytest.MonkeyPatch, log: bytes, lines: str
) -> None:
    monkeypatch.setattr(container_module, "READY_SECONDS", 0.5)
    engine.ready, engine.log = 503, log
    with pytest.raises(ContainerError) as caught:
        start()
    error = caught.value
    assert error.reason.startswith(f"the store container from {IMAGE} was not ready at 127.0.0.1:")
    assert error.reason.endswith(" within 0.5 s")
    assert error.remedy == (
        "read its log, and check that published ports are reachable at 127.0.0.1 (set TESTCONTAINERS_HOST_OVERRIDE for "
        "another host)"
    )
    assert (error.detail, error.cause, len(engine.bodies("remove"))) == (lines, "not-started", 1)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"Status": "running"}, None),
        ({"Status": "exited", "ExitCode": 3}, "exited with exit code 3\nthe last lines of its log:\nfirst\nlast"),
        (
            {"Status": "exited", "ExitCode": 137, "OOMKilled": True},
            "exited with exit code 137, killed because it ran out of memory\nthe last lines of its log:\nfirst\nlast",
        ),
        (None, "was removed by somebody else"),
    ],
)
def test_the_end_of_a_container_has_a_reason(
    engine: Engine, start: Start, state: dict[str, Any] | None, reason: str | None
) -> None:
    container = start()
    engine.state, engine.removal = state, 409  # another process is removing it
    assert container.death_reason() == reason
    container.remove()
    if state is None:
        with pytest.raises(ContainerError) as caught, container.docker_container():
            pass
        assert caught.value.reason == f"the container {container.name} was removed by somebody else"
        assert caught.value.cause == "no-container"


@pytest.mark.parametrize(
    ("pull", "may_pull", "reason"),
    [(True, True, None), (True, False, "no such registry"), (False, True, "pulling is off")],
)
def test_an_image_that_is_not_there_is_pulled_if_that_is_allowed(
    engine: Engine, start: Start, pull: bool, may_pull: bool, reason: str | None
) -> None:
    assert image_present(IMAGE)
    ensure_image(IMAGE, pull=True)
    assert engine.requests == [], "it is there"
    engine.has_image, engine.may_pull = False, may_pull
    assert not image_present(IMAGE)
    if reason is None:
        assert start(pull=pull).image == IMAGE
    else:
        with pytest.raises(ContainerError) as caught:
            start(pull=pull)
        assert caught.value.reason == f"the image {IMAGE} is not on this host and cannot be pulled: {reason}"
        assert caught.value.remedy == "load the image (`docker load`, `docker import`) and give its name"
        assert caught.value.cause == "no-image"
    assert [(body["fromImage"], body["tag"]) for body in engine.bodies("pull")] == [(["mine/store"], ["1"])] * pull


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("unix:///nowhere/docker.sock", "No such file"),
        ("tcp://127.0.0.1:1", "Connection refused"),
        pytest.param("", "No such file", marks=pytest.mark.skipif(SOCKET.exists(), reason="this host has an engine")),
    ],
)
def test_an_engine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, host: str, reason: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    for attempt in (lambda: ensure_image(IMAGE), lambda: container_engine().__enter__()):
        with pytest.raises(ContainerError) as caught:
            attempt()
        assert caught.value.reason == f"no container engine answers at {host or f'unix://{SOCKET}'}: {reason}"
        assert caught.value.remedy == "start one, or set DOCKER_HOST to its address"
        assert caught.value.cause == "no-engine"
    assert not image_present(IMAGE)
    assert engine_may_answer() is (bool(host) or SOCKET.exists())


@pytest.mark.parametrize("package", ["testcontainers", "docker"])
def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ContainerError) as caught:
        ensure_image(IMAGE)
    assert caught.value.reason == "a container needs the Python package testcontainers, which is not installed"
    assert (caught.value.remedy, caught.value.cause) == (f"`{pip_install('container')}`", "no-testcontainers")
