# SPDX-License-Identifier: Apache-2.0
"""Choose the etcd of a run: an existing one, a container, or a child process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pytest_nixl.core.forms import ENDPOINTS_FORM
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.client import Credentials, EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.container import ContainerServer
from pytest_nixl.etcd_servers.embedded import EmbeddedServer, find_binary
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.container import engine_may_answer, image_present, testcontainers_installed
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it

_log = logging.getLogger(__name__)

#: Seconds in which an etcd has to answer, and in which it has to if it did not answer before.
ANSWER_SECONDS, AGAIN_SECONDS = 5.0, 1.0


class EtcdServer(Protocol):
    """An etcd that a run uses."""

    @property
    def kind(self) -> str:
        """``external``, ``container`` or ``embedded``."""

    @property
    def endpoint(self) -> str:
        """Its URLs, separated by commas, in the form of ``NIXL_ETCD_ENDPOINTS``: no trailing slash, no credentials."""

    def describe(self) -> str:
        """Return a short description for messages."""

    def death_reason(self) -> str | None:
        """Return None while it is up; otherwise how it ended, and the last lines of its log if available."""

    def silence_reason(self) -> str | None:
        """Return why it cannot answer: :meth:`death_reason`, or that a signal has stopped it; None if all is well."""

    def client(self) -> EtcdClient:
        """Return a new client of this etcd."""

    def stop(self) -> None:
        """Stop it (SIGTERM, after 2 s SIGKILL) if pytest-nixl started it. Its data is kept until the run ends."""

    def discard(self) -> None:
        """Stop it and delete its data if pytest-nixl started it."""


class OwnServer(EtcdServer, Protocol):
    """An etcd that pytest-nixl started, and that a test may kill."""

    @property
    def stopped(self) -> bool:
        """Whether this run stopped it on purpose."""

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has ended."""

    def restart(self) -> None:
        """Restart it on the same port with the same data; stop it first if it is running."""


class ExternalServer:
    """An existing etcd, which pytest-nixl uses but never stops."""

    kind = "external"

    def __init__(self, endpoints: Sequence[Endpoint], **credentials: Unpack[Credentials]) -> None:
        self.endpoints = tuple(endpoints)
        #: All of them, with empty texts for those that are not needed. Never print them.
        self.credentials: dict[str, Any] = {**dict.fromkeys(Credentials.__annotations__, ""), **credentials}
        #: Why the last request had no answer in time; empty: it had.
        self._unanswered = ""

    @classmethod
    def of(cls, settings: Settings) -> ExternalServer:
        """Return the etcd that the settings name.

        :raises EtcdError: if the address is malformed; it may come from an environment variable of the deployment.
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
        return cls(endpoints, **credentials_of(settings))

    @property
    def endpoint(self) -> str:
        return ",".join(str(endpoint) for endpoint in self.endpoints)

    def describe(self) -> str:
        return f"external etcd at {self.endpoint}"

    def death_reason(self) -> str | None:
        try:
            with self.client() as client:
                client.status()
        except EtcdError as error:
            return error.reason
        return None

    def silence_reason(self) -> str | None:
        return self.death_reason()

    def client(self) -> EtcdClient:
        return connect(self.endpoints, **self.credentials)

    def check_answer(self, prefix: str) -> None:
        """Check that it answers. If it did not the last time, it has one second, so that the run ends soon.

        :param prefix: the prefix of the keys that the caller will use.
        :raises EtcdError: if it does not answer or refuses. A second timeout has the words of the first, so that the
            report names one cause.
        """
        seconds = AGAIN_SECONDS if self._unanswered else ANSWER_SECONDS
        try:
            with connect(self.endpoints, **self.credentials, timeout=seconds) as client:
                client.count_prefix(prefix)
        except EtcdError as error:
            if error.cause != "timeout":
                raise
            self._unanswered = self._unanswered or error.reason
            raise EtcdError(
                self._unanswered, error.remedy, error.detail, cause=error.cause, endpoint=error.endpoint
            ) from None
        self._unanswered = ""

    def stop(self) -> None:
        """Do nothing: pytest-nixl did not start it."""

    def discard(self) -> None:
        """Do nothing: pytest-nixl did not start it."""


def credentials_of(settings: Settings) -> Credentials:
    """Return the credentials that the settings have for an existing etcd."""
    user, _, password = settings.etcd_user.partition(":")
    files = Credentials(cacert=settings.etcd_cacert, cert=settings.etcd_cert, key=settings.etcd_key)
    return {**files, "user": user, "password": password}


def choose_kind(settings: Settings) -> str:
    """Return ``external``, ``container`` or ``embedded``.

    ``auto`` means external if an address is given, container if an engine answers and already has the image, and
    otherwise embedded. Docker packages are imported only if there is a sign of an engine.
    """
    if settings.etcd_server != "auto":
        return settings.etcd_server
    if settings.etcd:
        return "external"
    if engine_may_answer() and testcontainers_installed() and image_present(settings.etcd_image):
        return "container"
    return "embedded"


def choose_server(settings: Settings, supervisor: SupervisorClient) -> EtcdServer:
    """Return the run's etcd; start it unless it is external. Each worker of pytest-xdist has its own.

    :raises EtcdError: if there is no etcd and none can be started.
    """
    kind = choose_kind(settings)
    if kind == "external":
        return ExternalServer.of(settings)
    if kind == "container":
        return ContainerServer.start(settings.etcd_image, supervisor, pull=settings.etcd_server == "container")
    return _start_embedded(settings, supervisor)


def start_private(settings: Settings, supervisor: SupervisorClient) -> OwnServer:
    """Start an etcd for the caller only: embedded if there is an etcd program, else a container."""
    if find_binary() is None and engine_may_answer() and testcontainers_installed():
        return ContainerServer.start(settings.etcd_image, supervisor, pull=settings.etcd_server == "container")
    return _start_embedded(settings, supervisor)


def _start_embedded(settings: Settings, supervisor: SupervisorClient) -> EmbeddedServer:
    more = "; or --nixl-etcd-server=container, which pulls an image" if engine_may_answer() else ""
    return EmbeddedServer.start(supervisor, more_remedies=more)


class SessionEtcd:
    """The etcd of one pytest session. It is started when first needed, and replaced after it has died. Thread-safe.

    :param supervisor: returns the supervisor; called when a server is started.
    :param server: an etcd to use instead; its owner stops it.
    """

    def __init__(
        self, settings: Settings, supervisor: Callable[[], SupervisorClient], server: EtcdServer | None = None
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._given = server
        self._server: EtcdServer | None = None
        self._lock = threading.RLock()

    def server(self) -> EtcdServer:
        """Return the server; start it if needed.

        :raises EtcdError: if it cannot be started, or has died since its last use.
        """
        with self._lock:
            self.check()
            if self._server is None:
                self._server = self._given or choose_server(self._settings, self._supervisor())
                _log.info("etcd of this run: %s, %s", self._server.kind, redact(self._server.endpoint))
            return self._server

    def check(self, *, stopped: bool = False) -> None:
        """Check that the etcd is still running, if it was needed at all.

        :param stopped: whether an etcd that a signal has stopped counts as dead. A debugger stops one briefly.
        :raises EtcdError: if an etcd that pytest-nixl started has died. The next use starts a new one.
        """
        server = self._server
        if server is None or server.kind == "external":
            return
        try:
            dead = server.death_reason()
            reason = server.silence_reason() if stopped else dead
        except (EtcdError, SupervisorError):
            # Its state cannot be read: start a new one at the next use.
            self._server = None
            raise
        if reason is None:
            return
        self._server = None
        how, _, lines = reason.partition("\n")
        raise EtcdError(
            f"the etcd of this run {'has died' if dead is not None else 'does not answer'}: {how}",
            "read its log; the next test gets a new etcd",
            lines,
            cause="died" if dead is not None else "stopped",
            endpoint=server.endpoint,
        )

    def close(self) -> None:
        """Stop the server, if this session started it."""
        server, self._server = self._server, None
        if server is None or server is self._given or server.kind == "external":
            return
        server.discard()
