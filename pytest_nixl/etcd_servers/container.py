# SPDX-License-Identifier: Apache-2.0
"""Run an etcd in a container by testcontainers. The supervisor removes the container, so Ryuk is not needed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.embedded import healthy
from pytest_nixl.processes.supervisor import SupervisorClient

#: Timeouts in seconds: from start to ready, and for one request to the container engine.
READY_SECONDS = 30.0
ENGINE_SECONDS = 15.0
#: Number of log lines that an error shows.
LOG_LINES = 12

LABEL = "pytest-nixl"
_SOCKET = Path("/var/run/docker.sock")
_LOOPBACK = "127.0.0.1"
_PORT = 2379
_ELSE = "or use another etcd: --nixl-etcd-server=embedded, or --nixl-etcd URL"


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
    except EtcdError:
        return False


def ensure_image(image: str, *, pull: bool = True) -> None:
    """Make sure that the container engine has ``image``.

    :param pull: whether the image may be pulled.
    :raises EtcdError: if testcontainers is not installed, if no engine answers, or if the image is not on this host
        and cannot be pulled.
    """
    if not testcontainers_installed():
        raise EtcdError(
            "an etcd container needs the Python package testcontainers, which is not installed",
            f"`pip install 'pytest-nixl[container]'`; {_ELSE}",
            cause="no-testcontainers",
        )
    import docker

    with container_engine() as engine:
        if _has(engine, image):
            return
        if pull:
            try:
                engine.images.pull(image)
                return
            except docker.errors.APIError as error:
                why = str(error.explanation or error).strip()
            except docker.errors.DockerException as error:
                why = str(error)
        else:
            why = "pulling is off"
    raise EtcdError(
        f"the etcd image {image} is not on this host and cannot be pulled: {why}",
        f"load the image (`docker load`, `docker import`) and name it with --nixl-etcd-image; {_ELSE}",
        cause="no-image",
    )


@dataclass
class ContainerServer:
    """An etcd container, published on loopback. The supervisor removes it, even if pytest is killed."""

    supervisor: SupervisorClient
    image: str
    name: str
    host: str
    port: int
    version: str = "unknown"
    id: str = ""
    shared: bool = False
    kind: str = "container"
    #: Whether this run stopped it on purpose.
    stopped: bool = False

    @classmethod
    def start(
        cls, image: str, supervisor: SupervisorClient, pull: bool = False, *, shared: bool = False
    ) -> ContainerServer:
        """Start an etcd container and wait until it is ready.

        :raises EtcdError: if it does not start, with the last lines of its log.
        """
        ensure_image(image, pull=pull)
        for attempt in range(5):
            host = _published_host()
            server = cls(supervisor, image, f"pytest-nixl-etcd-{secrets.token_hex(6)}", host, free_ports(1)[0])
            server.shared = shared
            try:
                server._run()
            except EtcdError as error:
                server.discard()
                if error.cause != "port-taken" or attempt == 4:
                    raise
            else:
                return server
        raise AssertionError("the last attempt returns or raises")

    @property
    def endpoint(self) -> str:
        """URL of the etcd, in the form of ``NIXL_ETCD_ENDPOINTS``."""
        return str(Endpoint("http", self.host, self.port))

    def describe(self) -> str:
        """Return a short description for messages."""
        return f"etcd {self.version} in container {self.id[:12]} ({self.image}), at {self.endpoint}"

    def why_silent(self) -> str | None:
        """Return the same as :meth:`why_dead`, because the engine reports a paused container too."""
        return self.why_dead()

    def why_dead(self) -> str | None:
        """Return None while the container runs; otherwise its state and the last lines of its log."""
        import docker

        with container_engine() as engine:
            try:
                container = engine.containers.get(self.name)
            except docker.errors.NotFound:
                return f"{self.describe()}, was removed by somebody else"
            state = container.attrs["State"]
            if state["Status"] == "running":
                return None
            how = f"{state['Status']} with exit code {state.get('ExitCode')}"
            if state.get("OOMKilled"):
                how += ", killed because it ran out of memory"
            return f"{self.describe()}, {how}\n{_last_lines(container)}"

    def client(self) -> EtcdClient:
        """Return a new client of this etcd."""
        return connect([Endpoint("http", self.host, self.port)])

    def attachment(self) -> dict[str, Any]:
        """Return the values with which another process of this run can :meth:`attach`."""
        return {key: getattr(self, key) for key in ("kind", "image", "name", "host", "port", "version", "id")}

    @classmethod
    def attach(cls, supervisor: SupervisorClient, attachment: dict[str, Any]) -> ContainerServer:
        """Return the server that another process of this run started."""
        values = {name: value for name, value in attachment.items() if name != "kind"}
        return cls(supervisor, **values, shared=True)

    def stop(self) -> None:
        """Stop it (SIGTERM, after 2 s SIGKILL). Its data is kept until the run ends, for :meth:`restart`."""
        self.stopped = True
        with self._container() as container:
            container.stop(timeout=2)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""
        import docker

        self.stopped = True
        with self._container() as container:
            # 409: the container is not running.
            with contextlib.suppress(docker.errors.APIError):
                container.kill()
            container.wait(timeout=ENGINE_SECONDS)

    def restart(self) -> None:
        """Restart it on the same port with the same data; stop it first if it is running."""
        with self._container() as container:
            container.stop(timeout=2)
            container.start()
            deadline = time.monotonic() + READY_SECONDS
            while not healthy(self.endpoint):
                if time.monotonic() > deadline:
                    raise self._not_ready(_last_lines(container))
                time.sleep(0.02)
        self.stopped = False

    def discard(self) -> None:
        """Remove the container and its data."""
        import docker

        self.stopped = True
        with container_engine() as engine:
            # 409: another process is removing it.
            with contextlib.suppress(docker.errors.NotFound, docker.errors.APIError):
                engine.containers.get(self.name).remove(force=True, v=True)
        self.supervisor.unwatch_container(self.name)

    @contextlib.contextmanager
    def _container(self) -> Iterator[Any]:
        import docker

        with container_engine() as engine:
            try:
                yield engine.containers.get(self.name)
            except docker.errors.NotFound:
                raise EtcdError(
                    f"{self.describe()}, was removed by somebody else", "", cause="no-container", endpoint=self.endpoint
                ) from None

    def _run(self) -> None:
        import docker
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import HttpWaitStrategy

        url = f"http://0.0.0.0:{_PORT}"
        command = [
            "etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls=http://127.0.0.1:{_PORT}",
            "--heartbeat-interval=10",
            "--election-timeout=100",
            "--log-level=warn",
        ]
        wait = HttpWaitStrategy(_PORT, "/health").with_poll_interval(0.05).with_startup_timeout(int(READY_SECONDS))
        with _without_ryuk(self.host):
            # Register the name before the container exists, so that it is removed even if pytest is killed here.
            self.supervisor.watch_container(self.name, shared=self.shared, expected=True)
            container = DockerContainer(self.image, docker_client_kw={"timeout": ENGINE_SECONDS})
            container.with_name(self.name).with_command(command).waiting_for(wait)
            container.with_kwargs(labels={LABEL: "etcd", f"{LABEL}.run": self.supervisor.directory.name})
            container.ports[f"{_PORT}/tcp"] = (_LOOPBACK, self.port) if self.host == _LOOPBACK else self.port
            try:
                container.start()
            except docker.errors.APIError as error:
                why = str(error.explanation or error).strip()
                taken = "port is already allocated" in why or "address already in use" in why
                raise EtcdError(
                    f"the container engine did not start an etcd from {self.image}: {why}",
                    f"read the engine's log; {_ELSE}",
                    cause="port-taken" if taken else "not-started",
                ) from None
            except (TimeoutError, RuntimeError, OSError) as error:
                with self._container() as found:
                    lines = _last_lines(found)
                raise self._not_ready(lines) from error
        self.id = str(container.get_wrapped_container().id)
        self.supervisor.watch_container(self.name, shared=self.shared)
        with self.client() as client:
            self.version = client.version()

    def _not_ready(self, lines: str) -> EtcdError:
        return EtcdError(
            f"the etcd container from {self.image} was not ready at {self.endpoint} within {READY_SECONDS:g} s",
            f"read its log, and check that published ports are reachable at {self.host} "
            f"(set TESTCONTAINERS_HOST_OVERRIDE for another host); {_ELSE}",
            lines,
            cause="not-started",
            endpoint=self.endpoint,
        )


@contextlib.contextmanager
def container_engine() -> Iterator[Any]:
    """Yield a client of the container engine.

    :raises EtcdError: if no engine answers, or the package docker is not installed.
    """
    try:
        import docker
    except ImportError as error:
        raise EtcdError(
            f"the Python package docker, which talks to the container engine, cannot be imported: {error}",
            f"`pip install 'pytest-nixl[container]'`; {_ELSE}",
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
        why = next((part for part in ("Permission denied", "Connection refused", "No such file") if part in str(error)),
                   str(error))  # fmt: skip
        raise EtcdError(
            f"no container engine answers at {where}: {why}",
            f"start one, or set DOCKER_HOST to its address; {_ELSE}",
            cause="no-engine",
        ) from None
    try:
        yield engine
    finally:
        engine.close()


def _has(engine: Any, image: str) -> bool:
    import docker

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
        from urllib.parse import urlsplit

        host = urlsplit(where).hostname or _LOOPBACK
        return _LOOPBACK if host in ("localhost", "::1") else host
    return _LOOPBACK


@contextlib.contextmanager
def _without_ryuk(host: str) -> Iterator[None]:
    """Configure testcontainers for one start, and restore the user's settings afterwards."""
    from testcontainers.core.config import ConnectionMode, testcontainers_config

    names = ("ryuk_disabled", "connection_mode_override", "tc_host_override")
    before = {name: getattr(testcontainers_config, name) for name in names}
    testcontainers_config.ryuk_disabled = True
    testcontainers_config.connection_mode_override = ConnectionMode.docker_host
    testcontainers_config.tc_host_override = host
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(testcontainers_config, name, value)


def _last_lines(container: Any) -> str:
    text = container.logs(tail=LOG_LINES).decode(errors="replace").strip()
    return f"the last lines of its log:\n{text}" if text else "its log is empty"
