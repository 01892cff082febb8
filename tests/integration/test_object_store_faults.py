# SPDX-License-Identifier: Apache-2.0
"""Faults of object stores in the midst of a transfer, and servers with TLS, by the real NIXL, moto and Azurite."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from helpers.azurite import Azurite, use_azure
from helpers.certificates import Certificates, make_certificates
from helpers.cli_run import eventually
from helpers.s3 import S3Server, use_s3

from pytest_nixl.checks.storage.check import judge_object_store
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError

pytestmark = pytest.mark.long

Server: TypeAlias = "S3Server | Azurite"
MakePairs = Callable[..., Launches]
Start = Callable[..., Server]
Judge = Callable[..., Judgement]
BLOCK = 65536
#: A fault is named within this time, in seconds.
NAMED = 30.0


@pytest.fixture(params=["OBJ", "AZURE_BLOB"])
def plugin(request: pytest.FixtureRequest) -> str:
    """The plugin whose server is asked."""
    return str(request.param)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[tuple[str, bool], Server]]:
    """The servers that several tests ask: one of each plugin and with or without TLS."""
    started: dict[tuple[str, bool], Server] = {}
    yield started
    for server in started.values():
        server.kill()


@pytest.fixture
def start(
    plugin: str, servers: dict[tuple[str, bool], Server], certificates: Certificates, monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Start]:  # fmt: skip
    """Return a function that names a server of the plugin by the variables that the plugin reads.

    It is that of other tests, too, unless this one disturbs it.
    """
    disturbed: list[Server] = []

    def start(*, tls: bool = False, disturb: bool = False) -> Server:
        server = servers.get((plugin, tls))
        if server is None or disturb:
            spoken = certificates if tls else None
            server = S3Server(spoken) if plugin == "OBJ" else Azurite(tmp_path_factory.mktemp("azurite"), spoken)
            if disturb:
                disturbed.append(server)
            else:
                servers[plugin, tls] = server
        (use_s3 if plugin == "OBJ" else use_azure)(monkeypatch, server.url)
        return server

    yield start
    for server in disturbed:
        server.kill()


@pytest.fixture
def judge(plugin: str, make_settings: Callable[..., Settings]) -> Judge:
    """Return a function that makes the check ``object-store`` with parameters of the plugin."""

    def judge(*parameters: BackendParameter) -> Judgement:
        settings = make_settings(backend=(plugin,), backend_params=parameters)
        with Agents(LocalHost(supervisor()), settings) as agents:
            return judge_object_store(agents, settings)

    return judge


@contextmanager
def named_in_time() -> Iterator[None]:
    """Fail if it takes longer than a fault may take to be named: most take a second, the longest is 20 s of waiting."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < NAMED


def link(pairs: Launches, plugin: str, op: str) -> Link:
    return pairs.link(plugin, op, MemoryPair("DRAM", "OBJ"))


def unread(url: str) -> bool:
    """Whether bytes wait to be read by the server, which the kernel of this host knows."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[1].split(":")[1], 16) == port and int(row[4].split(":")[1], 16) for row in rows)


@pytest.mark.parametrize("held", [False, pytest.param(True, id="held")])
@pytest.mark.parametrize("op", ["WRITE", pytest.param("READ", marks=pytest.mark.whole)])
def test_a_server_that_dies_with_a_request_in_its_hands_is_named_before_the_row_is_late(
    plugin: str, op: str, held: bool, start: Start, make_pairs: MakePairs
) -> None:
    server = start(disturb=True)
    # NIXL's OBJ tries again for 25 s after a connection ended, and for minutes if no answer comes.
    late = 300.0
    moved = link(make_pairs(timeout=late), plugin, op)
    visited: list[bool] = []

    def die() -> None:
        visited.append(eventually(lambda: unread(server.url)))
        if not held:
            server.kill()

    began = time.monotonic()
    with pytest.raises(WorkerError) as caught, moved._transfers(BLOCK, 1, 1) as transfers:
        moved._fill(BLOCK, poison=True)
        server.hold()
        dying = threading.Thread(target=die)
        dying.start()
        try:
            moved._run("move", transfers, late)
        finally:
            dying.join()
    assert visited == [True]
    assert time.monotonic() - began < late
    text = "did not answer within 20 s" if held else "cannot be reached"
    assert f"{server.url} {text}" in caught.value.reason
    assert "during 'move'" in caught.value.reason
    # NIXL tries for minutes to reach a server that does not answer. It gives up one that ended after a few seconds, so
    # that on a busy machine its error may come first; then the reason has both.
    if held:
        assert "NIXL reported" not in caught.value.reason
    assert "check that the server runs" in caught.value.remedy
    assert not moved.initiator.worker.alive


def test_a_server_whose_certificate_is_trusted_passes(
    plugin: str, start: Start, judge: Judge, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(tls=True)
    parameters: tuple[BackendParameter, ...] = (BackendParameter("OBJ", "ca_bundle", str(certificates.authority)),)
    if plugin == "AZURE_BLOB":
        monkeypatch.setenv("AZURE_CA_BUNDLE", str(certificates.authority))
        parameters = ()
    judged = judge(*parameters)
    assert judged.verdict is Verdict.PASS, judged
    assert f"{server.url} stores, returns and deletes objects" in judged.reason
    assert server.keys == []


@pytest.mark.parametrize("plugin", ["OBJ"], indirect=True)
def test_a_variable_with_certificates_that_nixl_does_not_read_is_named(
    plugin: str, start: Start, judge: Judge, make_pairs: MakePairs, certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = start(tls=True)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    remedy = f"use --nixl-backend-params=OBJ:ca_bundle={certificates.authority}, and give the engine's OBJ"
    judged = judge()
    assert judged.verdict is Verdict.FAIL
    assert (
        f"so does NIXL with ca_bundle={certificates.authority}: without it NIXL's plugin does not trust"
        in judged.reason
    )
    assert judged.remedy.startswith(remedy)
    # A row names it too: a server that answers another client is not the whole answer.
    target = link(make_pairs(), plugin, "WRITE")
    with pytest.raises(WorkerError, match="answers another client, but NIXL's plugin OBJ may not trust") as caught:
        target.target.worker.call("probe_objects", buffer=target.destination.ref)
    assert caught.value.remedy == judged.remedy
    assert server.keys == []


@pytest.mark.parametrize("named", [False, True], ids=["system", "another-authority"])
def test_a_server_whose_certificate_is_not_trusted_is_named(
    plugin: str, named: bool, start: Start, judge: Judge, make_pairs: MakePairs, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = start(tls=True)
    variable = "AWS_CA_BUNDLE" if plugin == "OBJ" else "AZURE_CA_BUNDLE"
    if named:
        monkeypatch.setenv(variable, str(make_certificates(tmp_path).authority))
    with named_in_time():
        judged = judge()
    assert judged.verdict is Verdict.FAIL
    assert f"{server.url} has a certificate that is not trusted" in judged.reason
    assert f"set {variable} to the file of the certificates" in judged.remedy
    with named_in_time(), pytest.raises(WorkerError) as caught:
        link(make_pairs(), plugin, "WRITE")
    assert caught.value.reason.startswith(judged.reason)


def test_a_server_that_never_answers_is_named(plugin: str, start: Start, judge: Judge) -> None:
    server = start(disturb=True)
    server.hold()
    with named_in_time():
        judged = judge()
    assert judged.verdict is Verdict.FAIL
    assert f"{server.url} did not answer within 20 s" in judged.reason
    assert "check that the server runs" in judged.remedy


# Each way and each operation; the soak has them all.
@pytest.mark.parametrize(
    ("plugin", "parts", "op"),
    [
        pytest.param("OBJ", False, "WRITE", marks=pytest.mark.whole),
        ("OBJ", False, "READ"),
        ("OBJ", True, "WRITE"),
        pytest.param("OBJ", True, "READ", marks=pytest.mark.whole),
        ("AZURE_BLOB", False, "WRITE"),
        pytest.param("AZURE_BLOB", False, "READ", marks=pytest.mark.whole),
    ],
    indirect=["plugin"],
)
def test_objects_of_64_mib_arrive(plugin: str, parts: bool, op: str, start: Start, make_pairs: MakePairs) -> None:
    size = 64 << 20
    server = start()
    values = {}
    if plugin == "OBJ":
        values["req_checksum"] = "required"  # moto reads a body in the pieces of a checksum for minutes
    if parts:
        address = server.url.partition("//")[2]
        values |= {"crtMinLimit": str(8 << 20), "endpoint_override": address, "scheme": "http"}
        values["use_virtual_addressing"] = "false"
    parameters = tuple(BackendParameter(plugin, *item) for item in sorted(values.items()))
    moved = link(make_pairs(blocks=(size,), timeout=300.0, backend_params=parameters), plugin, op)
    with moved._transfers(size, 1, 1) as transfers:
        seed = moved._fill(size, poison=True)
        moved._run("move", transfers, 300)
        assert moved._compare("moved", seed, size) is None
        assert len(server.keys) == 1
        if parts and op == "WRITE":
            tag = server.client.head_object(Bucket="bucket", Key=server.keys[0])["ETag"]
            assert tag.endswith('-8"')
    assert server.keys == []
