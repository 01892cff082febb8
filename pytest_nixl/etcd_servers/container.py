# SPDX-License-Identifier: Apache-2.0
"""An etcd of our own in a container, by testcontainers; the supervisor removes it, so Ryuk is not needed."""

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

from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.embedded import free_ports, healthy
from pytest_nixl.processes.supervisor import SupervisorClient

#: Seconds from the start to ready, and for one request to the engine.
READY_SECONDS = 30.0
ENGINE_SECONDS = 15.0
#: Lines of its log that an error shows.
LOG_LINES = 12

LABEL = "pytest-nixl"
_SOCKET = Path("/var/run/docker.sock")
_LOOPBACK = "127.0.0.1"
_PORT = 2379
_ELSE = "or use another etcd: --nixl-etcd-server=embedded, or --nixl-etcd URL"


def engine_may_answer() -> bool:
    """Whether there is a reason to ask for a container engine; loads nothing."""
    return bool(os.environ.get("DOCKER_HOST")) or _SOCKET.exists()


def testcontainers_installed() -> bool:
    """Whether the packages for containers are there; loads nothing."""
    return all(importlib.util.find_spec(name) is not None for name in ("testcontainers", "docker"))


# pytest would take the name for a test wherever it is imported.
testcontainers_installed.__test__ = False  # type: ignore[attr-defined]


def image_present(image: str) -> bool:
    """Whether an engine answers and has ``image`` already; False too where none answers."""
    try:
        with container_engine() as engine:
            return _has(engine, image)
    except EtcdError:
        return False


def ensure_image(image: str, *, pull: bool = True) -> None:
    """Make sure that the engine has ``image``.

    :raises EtcdError: in one sentence: testcontainers is not installed, no engine answers, or the image is neither
        there nor can be pulled.
    """
    if not testcontainers_installed():
        raise EtcdError(
            "an etcd container needs the Python package testcontainers, which is not installed",
            f"`pip install 'pytest-nixl[container]'`, {_ELSE}",
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
            why = "pulling was not asked for"
    raise EtcdError(
        f"the etcd image {image} is not on this machine and cannot be pulled: {why}",
        f"load it (`docker load`, `docker import`) and name it by --nixl-etcd-image, {_ELSE}",
        cause="no-image",
    )


@dataclass
class ContainerServer:
    """A container of our own, published on loopback; it ends with the test run, whatever becomes of that."""

    supervisor: SupervisorClient
    image: str
    name: str
    host: str
    port: int
    version: str = "unknown"
    id: str = ""
    shared: bool = False
    kind: str = "container"
    #: Whether we ended it ourselves, and so it is no defect that it is not there.
    stopped: bool = False

    @classmethod
    def start(
        cls, image: str, supervisor: SupervisorClient, pull: bool = False, *, shared: bool = False
    ) -> ContainerServer:
        """Start one and wait until it is ready. :raises EtcdError: in one sentence, with the last lines of its log."""
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
        """Its URL, as ``NIXL_ETCD_ENDPOINTS`` wants it."""
        return str(Endpoint("http", self.host, self.port))

    def describe(self) -> str:
        """Say what it is, in a few words."""
        return f"etcd {self.version} in container {self.id[:12]} ({self.image}), at {self.endpoint}"

    def why_silent(self) -> str | None:
        """As :meth:`why_dead`: an engine tells of a container that is paused, too."""
        return self.why_dead()

    def why_dead(self) -> str | None:
        """Return None while it is up, else how it ended, with the last lines of its log."""
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
                how += ", killed for want of memory"
            return f"{self.describe()}, {how}\n{_last_lines(container)}"

    def client(self) -> EtcdClient:
        """Return a new client of it."""
        return connect([Endpoint("http", self.host, self.port)])

    def attachment(self) -> dict[str, Any]:
        """Return what another process of this run needs to :meth:`attach`."""
        return {key: getattr(self, key) for key in ("kind", "image", "name", "host", "port", "version", "id")}

    @classmethod
    def attach(cls, supervisor: SupervisorClient, attachment: dict[str, Any]) -> ContainerServer:
        """Return the server that another process of this run has started."""
        values = {name: value for name, value in attachment.items() if name != "kind"}
        return cls(supervisor, **values, shared=True)

    def stop(self) -> None:
        """End it (SIGTERM, after 2 s SIGKILL). Its data stays until the end of the run: see :meth:`restart`."""
        self.stopped = True
        with self._container() as container:
            container.stop(timeout=2)

    def kill(self) -> None:
        """End it at once by SIGKILL, and wait until it has ended."""
        import docker

        self.stopped = True
        with self._container() as container:
            # 409: it does not run.
            with contextlib.suppress(docker.errors.APIError):
                container.kill()
            container.wait(timeout=ENGINE_SECONDS)

    def restart(self) -> None:
        """Start it again, on the same port and with the same data; stop it first where it is up."""
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
            # 409: somebody removes it just now.
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
            # Before it is there: a kill between its creation and our next line leaves nothing behind.
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
                    f"the engine does not start an etcd from {self.image}: {why}",
                    f"see the engine's log, {_ELSE}",
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
            f"see its log, and whether published ports of the engine are reached at {self.host} "
            f"(TESTCONTAINERS_HOST_OVERRIDE names another host), {_ELSE}",
            lines,
            cause="not-started",
            endpoint=self.endpoint,
        )


@contextlib.contextmanager
def container_engine() -> Iterator[Any]:
    """Yield a client of the engine. :raises EtcdError: where none answers, or the package docker is not installed."""
    try:
        import docker
    except ImportError as error:
        raise EtcdError(
            f"a container engine is asked by the Python package docker, which cannot be imported: {error}",
            f"`pip install 'pytest-nixl[container]'`, {_ELSE}",
            cause="no-testcontainers",
        ) from None
    where = os.environ.get("DOCKER_HOST") or f"unix://{_SOCKET}"
    try:
        if where.startswith("unix://") and not Path(where.removeprefix("unix://")).exists():
            # Asked before docker does: it would leave its own socket open.
            raise docker.errors.DockerException("No such file")
        engine = docker.from_env(timeout=ENGINE_SECONDS, use_ssh_client=where.startswith("ssh://"))
        engine.ping()
    except docker.errors.DockerException as error:
        why = next((part for part in ("Permission denied", "Connection refused", "No such file") if part in str(error)),
                   str(error))  # fmt: skip
        raise EtcdError(
            f"no container engine answers at {where}: {why}",
            f"start one, or name it by DOCKER_HOST, {_ELSE}",
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
    """Return where published ports are reached: loopback, unless the user or a remote engine says otherwise."""
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
    """Set testcontainers up for one start, and put its settings back: they are the user's own."""
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
