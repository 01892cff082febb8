# SPDX-License-Identifier: Apache-2.0
"""Run an etcd in a container, published on loopback. The supervisor removes it, even if pytest is killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.embedded import healthy
from pytest_nixl.processes.container import (
    ENGINE_SECONDS,
    READY_SECONDS,
    Container,
    ContainerError,
    ContainerProgram,
    last_lines,
)
from pytest_nixl.processes.container import ensure_image as ensure_any_image
from pytest_nixl.processes.supervisor import SupervisorClient

if TYPE_CHECKING:
    import docker
else:  # only the extra container installs it
    docker = lazy_module("docker")

_ELSE = "or use another etcd: --nixl-etcd-server=embedded, or --nixl-etcd URL"
_PORT = 2379
ETCD = ContainerProgram(
    "etcd",
    _PORT,
    "/health",
    (
        "etcd",
        f"--listen-client-urls=http://0.0.0.0:{_PORT}",
        f"--advertise-client-urls=http://127.0.0.1:{_PORT}",
        "--heartbeat-interval=10",
        "--election-timeout=100",
        "--log-level=warn",
    ),
)


def ensure_image(image: str) -> None:
    """Make sure that the container engine has an image of etcd; pull it if it has not.

    :raises EtcdError: if testcontainers is not installed, if no engine answers, or if the image is not on this host
        and cannot be pulled.
    """
    with _as_etcd_errors():
        ensure_any_image(image)


@dataclass
class ContainerServer:
    """An etcd in a container."""

    container: Container
    version: str = "unknown"
    kind: str = "container"
    #: Whether this run stopped it on purpose.
    stopped: bool = False

    @classmethod
    def start(cls, image: str, supervisor: SupervisorClient, pull: bool = False) -> ContainerServer:
        """Start an etcd container and wait until it is ready.

        :raises EtcdError: if it does not start, with the last lines of its log.
        """
        with _as_etcd_errors():
            server = cls(Container.start(ETCD, image, supervisor, pull=pull))
        try:
            with server.client() as client:
                server.version = client.version()
        except EtcdError:
            server.discard()
            raise
        return server

    @property
    def name(self) -> str:
        return self.container.name

    @property
    def endpoint(self) -> str:
        return str(self._endpoint)

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint("http", self.container.host, self.container.port)

    def describe(self) -> str:
        container = self.container
        return f"etcd {self.version} in container {container.id[:12]} ({container.image}), at {self.endpoint}"

    def silence_reason(self) -> str | None:
        """Return the same as :meth:`death_reason`, because the engine reports a paused container too."""
        return self.death_reason()

    def death_reason(self) -> str | None:
        """Return None while the container runs; otherwise its state and the last lines of its log."""
        with _as_etcd_errors():
            reason = self.container.death_reason()
        return reason and f"{self.describe()}, {reason}"

    def client(self) -> EtcdClient:
        return connect([self._endpoint])

    def stop(self) -> None:
        self.stopped = True
        with self._found() as container:
            container.stop(timeout=2)

    def kill(self) -> None:
        self.stopped = True
        with self._found() as container:
            # 409: the container is not running.
            with contextlib.suppress(docker.errors.APIError):
                container.kill()
            container.wait(timeout=ENGINE_SECONDS)

    def restart(self) -> None:
        with self._found() as container:
            container.stop(timeout=2)
            container.start()
            deadline = time.monotonic() + READY_SECONDS
            while not healthy(self.endpoint):
                if time.monotonic() > deadline:
                    raise self.container.not_ready(last_lines(container))
                time.sleep(0.02)
        self.stopped = False

    def discard(self) -> None:
        """Remove the container and its data."""
        self.stopped = True
        with _as_etcd_errors():
            self.container.remove()

    @contextlib.contextmanager
    def _found(self) -> Iterator[Any]:
        with _as_etcd_errors(self.endpoint), self.container.docker_container() as container:
            yield container


@contextlib.contextmanager
def _as_etcd_errors(endpoint: str = "") -> Iterator[None]:
    """Raise each :class:`ContainerError` as an error of etcd, whose remedy names the other sources of an etcd."""
    try:
        yield
    except ContainerError as error:
        named = " with --nixl-etcd-image" if error.cause == "no-image" else ""
        remedy = f"{error.remedy}{named}; {_ELSE}" if error.remedy else _ELSE
        raise EtcdError(error.reason, remedy, error.detail, cause=error.cause, endpoint=endpoint) from error
