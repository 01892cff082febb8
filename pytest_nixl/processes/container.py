# SPDX-License-Identifier: Apache-2.0
"""A server in a container, by testcontainers. The supervisor removes the container, so Ryuk is not needed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.lazy_module import lazy_module, load
from pytest_nixl.processes.supervisor import SupervisorClient

if TYPE_CHECKING:
    import docker
    from testcontainers.core import config, wait_strategies
    from testcontainers.core import container as testcontainers_container
else:  # only the extra container installs them
    docker = lazy_module("docker")
    config = lazy_module("testcontainers.core.config")
    wait_strategies = lazy_module("testcontainers.core.wait_strategies")
    testcontainers_container = lazy_module("testcontainers.core.container")

#: Timeouts in seconds: from start to ready, and for one request to the container engine.
READY_SECONDS = 30.0
ENGINE_SECONDS = 15.0
#: Number of log lines that an error shows.
LOG_LINES = 12

LABEL = "pytest-nixl"
_SOCKET = Path("/var/run/docker.sock")
_LOOPBACK = "127.0.0.1"
#: Attempts to find a port that nobody takes until the engine publishes it.
_ATTEMPTS = 5


class ContainerError(NixlPluginError):
    """A container cannot be started or used.

    :param cause: short word for programs: ``no-testcontainers``, ``no-engine``, ``no-image``, ``port-taken``,
        ``not-started`` or ``no-container``.
    """

    def __init__(self, reason: str, remedy: str = "", detail: str = "", *, cause: str) -> None:
        super().__init__(reason, remedy, detail)
        self.cause = cause


@dataclass(frozen=True)
class ContainerProgram:
    """The server that a container runs.

    :param name: its name in messages, labels and the names of containers, such as ``etcd``.
    :param port: the TCP port on which it listens in the container.
    :param ready_path: the path that it answers with status 200 when it is ready.
    :param command: its command line; empty for that of the image.
    """

    name: str
    port: int
    ready_path: str
    command: tuple[str, ...] = ()


@dataclass
class Container:
    """A container whose server is published on loopback, or on the host of a remote engine."""

    program: ContainerProgram
    supervisor: SupervisorClient
    image: str
    name: str
    host: str
    port: int
    id: str = ""

    @classmethod
    def start(cls, program: ContainerProgram, image: str, supervisor: SupervisorClient, *, pull: bool) -> Container:
        """Start a container and wait until its server is ready.

        :param pull: whether the image may be pulled.
        :raises ContainerError: if it does not start, with the last lines of its log.
        """
        ensure_image(image, pull=pull)
        for attempt in range(_ATTEMPTS):
            name = f"pytest-nixl-{program.name}-{secrets.token_hex(6)}"
            container = cls(program, supervisor, image, name, _published_host(), free_ports(1)[0])
            try:
                container._run()
            except ContainerError as error:
                container.remove()
                if error.cause != "port-taken" or attempt == _ATTEMPTS - 1:
                    raise
            else:
                return container
        raise AssertionError("the last attempt returns or raises")

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the server."""
        return f"{self.host}:{self.port}"

    @contextlib.contextmanager
    def docker_container(self) -> Iterator[Any]:
        """Yield the container as the package docker knows it.

        :raises ContainerError: if it does not exist any more (``no-container``), or no engine answers.
        """
        with container_engine() as engine:
            try:
                yield engine.containers.get(self.name)
            except docker.errors.NotFound:
                raise ContainerError(
                    f"the container {self.name} was removed by somebody else", cause="no-container"
                ) from None

    def death_reason(self) -> str | None:
        """Return None while the container runs; otherwise its state and the last lines of its log."""
        try:
            with self.docker_container() as container:
                state = container.attrs["State"]
                if state["Status"] == "running":
                    return None
                how = f"{state['Status']} with exit code {state.get('ExitCode')}"
                if state.get("OOMKilled"):
                    how += ", killed because it ran out of memory"
                return f"{how}\n{last_lines(container)}"
        except ContainerError as error:
            if error.cause != "no-container":
                raise
            return "was removed by somebody else"

    def remove(self) -> None:
        """Remove the container and its data."""
        with container_engine() as engine:
            # 409: another process is removing it.
            with contextlib.suppress(docker.errors.NotFound, docker.errors.APIError):
                engine.containers.get(self.name).remove(force=True, v=True)
        self.supervisor.unwatch_container(self.name)

    def not_ready(self, lines: str) -> ContainerError:
        """Return the error of a server that was not ready in time.

        :param lines: the last lines of its log.
        """
        return ContainerError(
            f"the {self.program.name} container from {self.image} was not ready at {self.address} within "
            f"{READY_SECONDS:g} s",
            f"read its log, and check that published ports are reachable at {self.host} "
            "(set TESTCONTAINERS_HOST_OVERRIDE for another host)",
            lines,
            cause="not-started",
        )

    def _run(self) -> None:
        program = self.program
        wait = wait_strategies.HttpWaitStrategy(program.port, program.ready_path)
        wait.with_poll_interval(0.05).with_startup_timeout(int(READY_SECONDS))
        with _without_ryuk(self.host):
            # Register the name before the container exists, so that it is removed even if pytest is killed here.
            self.supervisor.watch_container(self.name, expected=True)
            container = testcontainers_container.DockerContainer(
                self.image, docker_client_kw={"timeout": ENGINE_SECONDS}
            )
            container.with_name(self.name).waiting_for(wait)
            if program.command:
                container.with_command(list(program.command))
            container.with_kwargs(labels={LABEL: program.name, f"{LABEL}.run": self.supervisor.directory.name})
            published = (_LOOPBACK, self.port) if self.host == _LOOPBACK else self.port
            container.ports[f"{program.port}/tcp"] = published
            try:
                container.start()
            except docker.errors.APIError as error:
                reason = str(error.explanation or error).strip()
                taken = "port is already allocated" in reason or "address already in use" in reason
                raise ContainerError(
                    f"the container engine did not start {program.name} from {self.image}: {reason}",
                    "read the engine's log",
                    cause="port-taken" if taken else "not-started",
                ) from None
            except (TimeoutError, RuntimeError, OSError) as error:
                with self.docker_container() as created:
                    lines = last_lines(created)
                raise self.not_ready(lines) from error
        self.id = str(container.get_wrapped_container().id)
        self.supervisor.watch_container(self.name)


def engine_may_answer() -> bool:
    """Whether DOCKER_HOST or the Docker socket suggests a container engine. Imports nothing."""
    return bool(os.environ.get("DOCKER_HOST")) or _SOCKET.exists()


def testcontainers_installed() -> bool:
    """Whether the packages testcontainers and docker are installed. Imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("testcontainers", "docker"))


# Otherwise pytest collects it as a test because of its name.
testcontainers_installed.__test__ = False  # type: ignore[attr-defined]


def image_present(image: str) -> bool:
    """Whether a container engine answers and already has ``image``."""
    try:
        with container_engine() as engine:
            return _has(engine, image)
    except ContainerError:
        return False


def ensure_image(image: str, *, pull: bool = True) -> None:
    """Make sure that the container engine has ``image``.

    :param pull: whether the image may be pulled.
    :raises ContainerError: if testcontainers is not installed, if no engine answers, or if the image is not on this
        host and cannot be pulled.
    """
    if not testcontainers_installed():
        raise ContainerError(
            "a container needs the Python package testcontainers, which is not installed",
            f"`{pip_install('container')}`",
            cause="no-testcontainers",
        )
    with container_engine() as engine:
        if _has(engine, image):
            return
        if pull:
            try:
                engine.images.pull(image)
                return
            except docker.errors.APIError as error:
                reason = str(error.explanation or error).strip()
            except docker.errors.DockerException as error:
                reason = str(error)
        else:
            reason = "pulling is off"
    raise ContainerError(
        f"the image {image} is not on this host and cannot be pulled: {reason}",
        "load the image (`docker load`, `docker import`) and give its name",
        cause="no-image",
    )


@contextlib.contextmanager
def container_engine() -> Iterator[Any]:
    """Yield a client of the container engine.

    :raises ContainerError: if no engine answers, or the package docker is not installed.
    """
    try:
        load(docker)
    except ImportError as error:
        raise ContainerError(
            f"the Python package docker, which talks to the container engine, cannot be imported: {error}",
            f"`{pip_install('container')}`",
            cause="no-testcontainers",
        ) from None
    where = os.environ.get("DOCKER_HOST") or f"unix://{_SOCKET}"
    try:
        if where.startswith("unix://") and not Path(where.removeprefix("unix://")).exists():
            # Check before docker does, because docker would leave its socket open.
            raise docker.errors.DockerException("No such file")
        engine = docker.from_env(timeout=ENGINE_SECONDS, use_ssh_client=where.startswith("ssh://"))
        engine.ping()
    except docker.errors.DockerException as error:
        expected = ("Permission denied", "Connection refused", "No such file")
        reason = next((part for part in expected if part in str(error)), str(error))
        raise ContainerError(
            f"no container engine answers at {where}: {reason}",
            "start one, or set DOCKER_HOST to its address",
            cause="no-engine",
        ) from None
    try:
        yield engine
    finally:
        engine.close()


def last_lines(container: Any) -> str:
    """Return the last lines of a container's log in words, for an error."""
    text = container.logs(tail=LOG_LINES).decode(errors="replace").strip()
    return f"the last lines of its log:\n{text}" if text else "its log is empty"


def _has(engine: Any, image: str) -> bool:
    try:
        engine.images.get(image)
    except docker.errors.ImageNotFound:
        return False
    return True


def _published_host() -> str:
    """Return the host of published ports: loopback, unless a variable or a remote engine names another."""
    for name in ("TESTCONTAINERS_HOST_OVERRIDE", "TC_HOST"):
        if os.environ.get(name):
            return os.environ[name]
    where = os.environ.get("DOCKER_HOST", "")
    if where.startswith(("tcp://", "ssh://", "http://", "https://")):
        host = urlsplit(where).hostname or _LOOPBACK
        return _LOOPBACK if host in ("localhost", "::1") else host
    return _LOOPBACK


@contextlib.contextmanager
def _without_ryuk(host: str) -> Iterator[None]:
    """Configure testcontainers for one start, and restore the user's settings afterwards."""
    settings = config.testcontainers_config
    names = ("ryuk_disabled", "connection_mode_override", "tc_host_override")
    before = {name: getattr(settings, name) for name in names}
    settings.ryuk_disabled = True
    settings.connection_mode_override = config.ConnectionMode.docker_host
    settings.tc_host_override = host
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
