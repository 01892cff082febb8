# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the etcd package and the supervisor: servers, certificates, a container image, waiting."""

from __future__ import annotations

import base64
import datetime
import io
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import trustme

from helpers.cli_run import WITHOUT
from helpers.needs import lack
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd_servers.embedded import etcd_binary
from pytest_nixl.processes.container import LABEL, ContainerError, container_engine
from pytest_nixl.processes.supervisor import SupervisorClient, close_supervisor, supervisor

REPOSITORY = Path(__file__).parents[2]
IMAGE = "localhost/etcd:v3.5.1"

#: A conftest for inner runs of pytest that load only the etcd fixtures and the settings of the plugin.
CONFTEST = """
import pytest
from pytest_nixl.session.options import add_options
from pytest_nixl.session.settings import read_settings

def pytest_addoption(parser):
    add_options(parser)

@pytest.fixture(scope="session")
def nixl_settings(pytestconfig):
    return read_settings(pytestconfig)
"""
ARGUMENTS = ("-p", "no:nixl", "-p", "pytest_nixl.fixtures.etcd", *WITHOUT)


def wait_until(condition: Callable[[], object], seconds: float, description: str) -> None:
    """Poll until ``condition()`` is true. :raises AssertionError: after ``seconds``, saying ``what`` did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {description}"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def mentioning(text: str) -> list[int]:
    """Return the pids of the processes with ``text`` in their command line."""
    results = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    results.append(int(entry.name))
            except OSError:
                continue
    return results


def environment(**more: str | None) -> dict[str, str]:
    """Return the environment for a subprocess: this repository importable, no variables of an outer xdist run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NIXL_", "ETCD"))}
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [env.get("PYTHONPATH", "")])])
    for name, value in more.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def start_pytest(folder: Path, test: str, *arguments: str, **more: str | None) -> subprocess.Popen[str]:
    """Start pytest on one test file in ``folder``, in a new session."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_inner.py").write_text(test)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", *ARGUMENTS, *arguments, "test_inner.py"],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@dataclass
class Etcd:
    """A running real etcd."""

    endpoint: Endpoint
    pid: int

    @property
    def url(self) -> str:
        return str(self.endpoint)


@contextmanager
def running_etcd(*options: str, scheme: str = "http") -> Iterator[Etcd]:
    """Run an etcd with the given options on loopback until the block ends."""
    port, peer = free_ports(2)
    endpoint = Endpoint(scheme, "127.0.0.1", port)
    peer_url = f"http://127.0.0.1:{peer}"
    client = supervisor()
    argv = [
        etcd_binary(),
        f"--data-dir={client.directory / f'test-{port}.data'}",
        f"--listen-client-urls={endpoint}",
        f"--advertise-client-urls={endpoint}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
        "--heartbeat-interval=10",
        "--election-timeout=100",
        "--log-level=warn",
        "--unsafe-no-fsync",
        *options,
    ]
    pid = client.spawn(argv, log=f"test-{port}.log")

    def listens() -> bool:
        assert client.alive(pid), (client.directory / f"test-{port}.log").read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    try:
        wait_until(listens, 60, f"an etcd with {options} is ready")
        yield Etcd(endpoint, pid)
    finally:
        client.stop(pid)


@contextmanager
def separate_supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisorClient]:
    """Let ``supervisor()`` return a separate supervisor within the block, as others use the process's own."""
    with monkeypatch.context() as patch:
        patch.setattr("pytest_nixl.processes.supervisor._current", None)
        try:
            yield supervisor()
        finally:
            close_supervisor()


class Certificates:
    """A CA, and certificates of every kind that matters to an etcd, as PEM files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = self._write("ca", self._authority.cert_pem.bytes())
        self.other_ca = self._write("other-ca", trustme.CA().cert_pem.bytes())
        self.server = self.issue("server", "127.0.0.1", "localhost")
        self.other_name = self.issue("other-name", "elsewhere.example")
        self.client = self.issue("client", "client.example")
        self.client_with_cn = self.issue("client-cn", "client.example", common_name="root")
        self.server_only = self._write("server-only", self._server_auth_only())
        stranger = trustme.CA().issue_cert("client.example")
        self.stranger = self._write("stranger", stranger.private_key_and_cert_chain_pem.bytes())
        self.junk = self._write("junk", b"this is no PEM file\n")

    def tls(self, server: str) -> list[str]:
        """Return the options of an etcd with TLS."""
        return [f"--cert-file={server}", f"--key-file={server}"]

    def mutual(self, server: str) -> list[str]:
        """Return the options of an etcd with TLS that also requires a client certificate."""
        return [*self.tls(server), "--client-cert-auth", f"--trusted-ca-file={self.ca}"]

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / f"{name}.pem"
        path.write_bytes(data)
        return str(path)

    def issue(self, name: str, *identities: str, **options: Any) -> str:
        """Issue a certificate with the options of trustme's ``issue_cert``, and return its file."""
        issued = self._authority.issue_cert(*identities, **options)
        return self._write(name, issued.private_key_and_cert_chain_pem.bytes())

    def _server_auth_only(self) -> bytes:
        """Make a certificate for servers only; those of trustme are always valid for clients too."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority_key = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        key = ec.generate_private_key(ec.SECP256R1())
        now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(names, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM) + private


def turn_authentication_on(url: str, **tls: Any) -> None:
    """Create the users root (password ``pw``) and bob (``b``; only keys under ``/bob/``); turn authentication on."""
    key, end = (base64.b64encode(text).decode() for text in (b"/bob/", b"/bob0"))
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("user/add", {"name": "root", "password": "pw"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": "bob", "password": "b"}),
        ("role/add", {"name": "bobs"}),
        ("role/grant", {"name": "bobs", "perm": {"permType": "READWRITE", "key": key, "range_end": end}}),
        ("user/grant", {"user": "bob", "role": "bobs"}),
        ("enable", {}),
    )
    for path, payload in steps:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.post(f"{url}/v3/auth/{path}", json=payload, timeout=60, **tls)
            assert answer.status_code == 200, (path, answer.text)


def engine_image() -> str:
    """Return an etcd image in a real engine; make it from the etcd program if it does not exist."""
    docker = pytest.importorskip("docker")
    pytest.importorskip("testcontainers")
    try:
        with container_engine() as engine:
            try:
                engine.images.get(IMAGE)
            except docker.errors.ImageNotFound:
                _import_image(engine)
    except ContainerError as error:
        lack(f"a container engine: {error.reason}")
    return IMAGE


def _import_image(engine: Any) -> None:
    repository, tag = IMAGE.rsplit(":", 1)
    changes = ["ENV PATH=/usr/local/bin", "EXPOSE 2379 2380"]
    archive = supervisor().directory / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(etcd_binary(), "usr/local/bin/etcd")
    answer = engine.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=changes)
    archive.unlink()
    assert "sha256" in str(json.loads(answer.splitlines()[-1])), answer


@contextmanager
def empty_image() -> Iterator[str]:
    """Yield an image without any program, and remove it afterwards."""
    data, image = io.BytesIO(), f"localhost/empty:{secrets.token_hex(4)}"
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("nothing"))
    repository, tag = image.rsplit(":", 1)
    with container_engine() as engine:
        engine.api.import_image_from_data(data.getvalue(), repository=repository, tag=tag)
        try:
            yield image
        finally:
            engine.images.remove(image, force=True)


def container_names(run: str = "") -> list[str]:
    """Return the names of all containers of the engine; with the name of a run directory, only those of that run."""
    import docker

    engine = docker.from_env(timeout=30)
    filters = {"label": f"{LABEL}.run={run}" if run else LABEL}
    try:
        return [
            str(container.name) for container in engine.containers.list(all=True, filters=filters, ignore_removed=True)
        ]
    finally:
        engine.close()
