# SPDX-License-Identifier: Apache-2.0
"""The S3 server of the fixture ``nixl_s3``: an existing one, or moto in a container or a process of this run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.core.errors import LateError, NotApplicableError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.polling import wait_until
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore
from pytest_nixl.processes.container import Container, ContainerError, ContainerProgram
from pytest_nixl.processes.supervisor import SupervisorClient

#: The value that asks for an embedded server whatever AWS's variables say.
EMBEDDED = "embedded"
#: The value that asks for a server in a container, also followed by a colon and its image.
CONTAINER = "container"
#: The image of moto's own releases. Its server listens on port 5000.
IMAGE = "motoserver/moto:5.2.5"
#: What runs in it. The path is answered by moto itself, and by no bucket.
MOTO = ContainerProgram("s3", 5000, "/moto-api/data.json")
#: How long an embedded server may take to start, in seconds.
READY_SECONDS = 120.0
_READY = re.compile(r"Running on http://127\.0\.0\.1:([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True)
class S3Bucket:
    """A bucket of an S3 server, with all that NIXL and other clients need to use it."""

    #: ``external``, ``container`` or ``embedded``.
    kind: str
    #: A client that shares nothing with NIXL: ``put``, ``get``, ``delete``, ``keys``.
    client: ObjectClient

    @property
    def endpoint(self) -> str:
        """URL of the server, such as ``http://127.0.0.1:9000``."""
        return self.client.store.url

    @property
    def bucket(self) -> str:
        """Name of the bucket, which only this session uses."""
        return self.client.store.bucket

    @property
    def environment(self) -> dict[str, str]:
        """AWS's variables for a worker or another client: the server, its region, the key and the bucket."""
        store = self.client.store
        values = {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ENDPOINT_URL_S3": store.url,
            "AWS_DEFAULT_BUCKET": store.bucket,
            "AWS_REGION": store.region,
            "AWS_DEFAULT_REGION": store.region,
            **self.client.environment,
        }
        return {**values, "AWS_CA_BUNDLE": store.authority} if store.authority else values

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters for ``create_backend("OBJ", …)`` in an agent whose worker lacks these variables."""
        store, key = self.client.store, self.client.environment
        values = {
            "endpoint_override": store.address,
            "scheme": store.scheme,
            "bucket": store.bucket,
            "region": store.region,
            "access_key": key["AWS_ACCESS_KEY_ID"],
            "secret_key": key["AWS_SECRET_ACCESS_KEY"],
            "use_virtual_addressing": "false",
        }
        # NIXL reads no variable that names certificates.
        optional = {
            "session_token": key["AWS_SESSION_TOKEN"],
            "ca_bundle": store.bundle if store.scheme == "https" else "",
        }
        return values | {name: value for name, value in optional.items() if value}


@contextlib.contextmanager
def open_bucket(server_text: str, supervisor: Callable[[], SupervisorClient]) -> Iterator[S3Bucket]:
    """Create a bucket on the S3 server of a run; delete it with all its objects at the end.

    :param server_text: the URL of an existing server; ``embedded``; ``container`` or ``container:IMAGE``; or empty for
        the server that AWS's variables name, or else an embedded one.
    :param supervisor: returns the client of the supervisor, which ends the run's own server even if pytest is killed.
    :raises ObjectStoreError: the server cannot be used, with the reason and a remedy.
    :raises NotApplicableError: no server is named, and none can be embedded.
    """
    name = f"pytest-nixl-{secrets.token_hex(8)}"
    endpoint_text = (
        server_text or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or EMBEDDED
    )
    kind, _, image = endpoint_text.partition(":")
    if kind in (EMBEDDED, CONTAINER):
        with (
            _embedded(supervisor(), required=server_text == EMBEDDED)
            if kind == EMBEDDED
            else _container(supervisor(), image or IMAGE)
        ) as address:
            key = secrets.token_hex(8), secrets.token_hex(16)
            client = ObjectClient(ObjectStore("http", address, name, "us-east-1"), key)
            with contextlib.closing(client):
                client.create_bucket()
                yield S3Bucket(kind, client)  # the bucket ends with its server
        return
    client = ObjectClient.of({"endpoint_override": endpoint_text, "bucket": name})
    with contextlib.closing(client):
        client.create_bucket()
        try:
            yield S3Bucket("external", client)
        finally:
            client.remove_bucket()


@contextlib.contextmanager
def _container(supervisor: SupervisorClient, image: str) -> Iterator[str]:
    """Start moto in a container, and yield its address."""
    try:
        container = Container.start(MOTO, image, supervisor, pull=True)
    except ContainerError as error:
        raise ObjectStoreError(
            f"--nixl-s3=container: {error.reason}", f"{error.remedy}; or use --nixl-s3=embedded", error.detail
        ) from None
    try:
        yield container.address
    finally:
        container.remove()


@contextlib.contextmanager
def _embedded(supervisor: SupervisorClient, *, required: bool) -> Iterator[str]:
    """Start moto on a port that the kernel chooses, and yield its address."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        reason = "there is no S3 server: AWS_ENDPOINT_URL is not set, and moto is not installed"
        if required:
            raise ObjectStoreError("--nixl-s3=embedded needs moto, which is not installed", f"run {pip_install('s3')}")
        raise NotApplicableError(reason, f"run {pip_install('s3')}, or set AWS_ENDPOINT_URL")
    log = f"s3-{secrets.token_hex(4)}.log"
    path = supervisor.directory / log
    pid = supervisor.spawn([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], log=log)
    try:
        try:
            port = wait_until(lambda: _port(path) or not supervisor.alive(pid), "moto to start", seconds=READY_SECONDS)
        except LateError as error:
            raise ObjectStoreError(
                f"the embedded S3 server: {error.reason}", "read its log", _last_lines(path)
            ) from None
        if port is True:
            raise ObjectStoreError(
                f"the embedded S3 server (moto) did not start: {supervisor.how_ended(pid)}",
                f"read its log, and run {pip_install('s3')}",
                _last_lines(path),
            )
        yield f"127.0.0.1:{port}"
    finally:
        supervisor.stop(pid)
        path.unlink(missing_ok=True)


def _port(log: Path) -> str:
    """Return the port that the server has bound and printed; empty: not yet."""
    with contextlib.suppress(FileNotFoundError):
        if match := _READY.search(log.read_text(errors="replace")):
            return match[1]
    return ""


def _last_lines(log: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    return ""
