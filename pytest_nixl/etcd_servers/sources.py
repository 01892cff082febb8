# SPDX-License-Identifier: Apache-2.0
"""Where the etcd of a run comes from: one that is there already, a container, or a process of our own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import ENDPOINTS_FORM, Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.binary import find_binary
from pytest_nixl.etcd_servers.container import (
    ContainerServer,
    engine_may_answer,
    ensure_image,
    image_present,
    testcontainers_installed,
)
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError, locked

_log = logging.getLogger(__name__)

__all__ = ["ContainerServer", "EmbeddedServer", "EtcdServer", "ExternalServer", "OwnServer", "SessionEtcd",
           "choose_server", "ensure_image", "start_private"]  # fmt: skip

_LOCK, _DESCRIPTION = "etcd.lock", "etcd.json"


class EtcdServer(Protocol):
    """An etcd that a run uses."""

    @property
    def kind(self) -> str:
        """``external``, ``container`` or ``embedded``."""

    @property
    def endpoint(self) -> str:
        """Its URLs, separated by commas, as ``NIXL_ETCD_ENDPOINTS`` wants them: no trailing slash, no credentials."""

    def describe(self) -> str:
        """Say what it is, in a few words."""

    def why_dead(self) -> str | None:
        """Return None while it is up, else what became of it, with the last lines of its log where we have it."""

    def why_silent(self) -> str | None:
        """Return None while nothing keeps it from answering, else :meth:`why_dead`, or that somebody has stopped it."""

    def client(self) -> EtcdClient:
        """Return a new client of it."""

    def stop(self) -> None:
        """End it, where it is ours."""

    def discard(self) -> None:
        """End it and remove what it stored, where it is ours."""


class OwnServer(EtcdServer, Protocol):
    """An etcd that we started, and may disturb."""

    @property
    def stopped(self) -> bool:
        """Whether we ended it ourselves."""

    def kill(self) -> None:
        """End it at once by SIGKILL."""

    def restart(self) -> None:
        """Start it again on the same port and with the same data."""

    def attachment(self) -> dict[str, Any]:
        """Return what another process of this run needs to use it."""


class ExternalServer:
    """An etcd that was there before us, and stays."""

    kind = "external"

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        cacert: str = "",
        cert: str = "",
        key: str = "",
        user: str = "",
        password: str = "",
    ) -> None:
        self.endpoints = tuple(endpoints)
        #: What :func:`~pytest_nixl.etcd.client.connect` takes beside the endpoints. Never print it.
        self.credentials: dict[str, Any] = {
            "cacert": cacert,
            "cert": cert,
            "key": key,
            "user": user,
            "password": password,
        }

    @classmethod
    def of(cls, settings: Settings) -> ExternalServer:
        """Return the one that the settings name.

        :raises EtcdError: where the address, which may be the deployment's own, is malformed.
        """
        try:
            endpoints = parse_endpoints(settings.etcd)
        except ValueError as error:
            source = settings.sources.get("etcd", "")
            name = source.removeprefix("environment ") if source.startswith("environment") else "--nixl-etcd"
            raise EtcdError(
                f"{name} does not name an etcd: {error}",
                f"set {name} to {ENDPOINTS_FORM}",
                cause="malformed",
            ) from None
        user, _, password = settings.etcd_user.partition(":")
        return cls(
            endpoints,
            cacert=settings.etcd_cacert,
            cert=settings.etcd_cert,
            key=settings.etcd_key,
            user=user,
            password=password,
        )

    @property
    def endpoint(self) -> str:
        return ",".join(str(endpoint) for endpoint in self.endpoints)

    def describe(self) -> str:
        return f"external etcd at {self.endpoint}"

    def why_dead(self) -> str | None:
        try:
            with self.client() as client:
                client.status()
        except EtcdError as error:
            return error.reason
        return None

    def why_silent(self) -> str | None:
        return self.why_dead()

    def client(self) -> EtcdClient:
        return connect(self.endpoints, **self.credentials)

    def stop(self) -> None:
        """Nothing: it is not ours."""

    def discard(self) -> None:
        """Nothing: it is not ours."""


def choose_kind(settings: Settings) -> str:
    """Return ``external``, ``container`` or ``embedded``.

    ``auto`` is external if an address is given; a container if an engine answers and the image is there already; else
    embedded. Nothing of Docker is loaded where there is no sign of an engine.
    """
    if settings.etcd_server != "auto":
        return settings.etcd_server
    if settings.etcd:
        return "external"
    if engine_may_answer() and testcontainers_installed() and image_present(settings.etcd_image):
        return "container"
    return "embedded"


def choose_server(settings: Settings, supervisor: SupervisorClient) -> EtcdServer:
    """Return the run's etcd, started where it is ours. The workers of pytest-xdist share one.

    :raises EtcdError: in one sentence, where it cannot be had.
    """
    kind = choose_kind(settings)
    if kind == "external":
        return ExternalServer.of(settings)

    def start() -> OwnServer:
        if kind == "container":
            pull = settings.etcd_server == "container"
            return ContainerServer.start(settings.etcd_image, supervisor, pull, shared=supervisor.shared)
        return _start_embedded(settings, supervisor, shared=supervisor.shared)

    return _shared(supervisor, start) if supervisor.shared else start()


def start_private(settings: Settings, supervisor: SupervisorClient) -> OwnServer:
    """Start an etcd that nobody else uses: embedded where the program is there, else a container."""
    if find_binary() is None and engine_may_answer() and testcontainers_installed():
        return ContainerServer.start(settings.etcd_image, supervisor, pull=settings.etcd_server == "container")
    return _start_embedded(settings, supervisor, shared=False)


def _start_embedded(settings: Settings, supervisor: SupervisorClient, *, shared: bool) -> EmbeddedServer:
    more = "; or --nixl-etcd-server=container, which pulls an image" if engine_may_answer() else ""
    return EmbeddedServer.start(supervisor, shared, more_remedies=more)


def _shared(supervisor: SupervisorClient, start: Callable[[], OwnServer]) -> OwnServer:
    """Attach to what another worker has started, or start it for all."""
    with locked(supervisor, _LOCK):
        description = supervisor.directory / _DESCRIPTION
        if description.exists():
            server = _attach(supervisor, json.loads(description.read_text()))
            if server.why_dead() is None:
                return server
        server = start()
        description.write_text(json.dumps(server.attachment()))
        return server


def _attach(supervisor: SupervisorClient, attachment: dict[str, Any]) -> OwnServer:
    if attachment["kind"] == "container":
        return ContainerServer.attach(supervisor, attachment)
    return EmbeddedServer.attach(supervisor, attachment)


class SessionEtcd:
    """The etcd of one pytest session: started when first needed, and started afresh after it has died.

    :param supervisor: returns the supervisor; called when a server is started.
    :param given: one that is to be used, and that somebody else ends.
    """

    def __init__(
        self, settings: Settings, supervisor: Callable[[], SupervisorClient], given: EtcdServer | None = None
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._given = given
        self._server: EtcdServer | None = None

    def server(self) -> EtcdServer:
        """Return the server. :raises EtcdError: where it cannot be had, or has died since it was last used."""
        self.check()
        if self._server is None:
            self._server = self._given or choose_server(self._settings, self._supervisor())
            _log.info("etcd of this run: %s, %s", self._server.kind, redact(self._server.endpoint))
        return self._server

    def check(self) -> None:
        """Do nothing where it is up, or none was needed yet.

        :raises EtcdError: where one of ours has died; it is then forgotten, and the next use starts another.
        """
        server = self._server
        if server is None or server.kind == "external":
            return
        try:
            why = server.why_dead()
        except (EtcdError, SupervisorError):
            # Neither it nor its state can be had: the next use starts afresh.
            self._server = None
            raise
        if why is None:
            return
        self._server = None
        how, _, lines = why.partition("\n")
        raise EtcdError(
            f"the etcd of this run has died: {how}",
            "see its log; the next test gets a new one",
            lines,
            cause="died",
            endpoint=server.endpoint,
        )

    def close(self) -> None:
        """End the server, unless other workers use it: then the last one to leave ends it."""
        server, self._server = self._server, None
        if server is None or server is self._given or server.kind == "external" or self._supervisor().shared:
            return
        server.discard()
