# SPDX-License-Identifier: Apache-2.0
"""Rows between memory and blobs, on the real NIXL and Azurite, and what is wrong with an account."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.azurite import KEY, Azurite, connection_string, use_azure
from helpers.cli_run import BANDWIDTH, profile, run
from helpers.http_double import HttpDouble, answering
from helpers.s3_faults import faulty_s3

from pytest_nixl.checks.storage.check import judge_object_store
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.nixl.worker.azure_blob import BY_CODE, BlobClient
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError

OBJECTS = MemoryPair("DRAM", "OBJ")
BLOCK = 65536
#: Seconds for a step with much data, in which the server may be slow on a busy machine.
LATE = 300.0
MakePairs = Callable[..., Launches]
#: A service on a port on which nobody listens.
CLOSED = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def shared_account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    server = Azurite(tmp_path_factory.mktemp("azurite"))
    yield server
    server.kill()


@pytest.fixture
def account(shared_account: Azurite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Azurite]:
    """An account that Azure's variables name. No blob may be left in it."""
    use_azure(monkeypatch, shared_account.url)
    yield shared_account
    assert shared_account.keys == []


def link(pairs: Launches, op: str = "WRITE") -> Link:
    return pairs.link("AZURE_BLOB", op, OBJECTS)


@pytest.fixture
def judge(make_settings: Callable[..., Settings]) -> Callable[[], Judgement]:
    """Return a function that makes the check ``object-store``."""

    def check() -> Judgement:
        settings = make_settings(backend=("AZURE_BLOB",))
        with Agents(LocalHost(supervisor()), settings) as agents:
            return judge_object_store(agents, settings)

    return check


@pytest.mark.long
def test_bandwidth_suite_passes_with_the_gate(account: Azurite, tmp_path: Path) -> None:
    accepted = profile(tmp_path / "p.toml", "backend = ['AZURE_BLOB']\ntransports = ['http']")
    done = run(
        BANDWIDTH, "--nixl-backend=azure_blob", "--nixl-blocks=4KiB,64KiB", "--nixl-batch=2", "--nixl-depth=3",
        f"--nixl-profile={accepted}", "--nixl-gate",
        env={name: value for name, value in os.environ.items() if name.startswith("AZURE_")},
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.verdicts == dict.fromkeys(("WRITE 64KiB", "WRITE 4KiB", "READ 64KiB", "READ 4KiB"), "PASS")
    assert KEY not in done.output


@pytest.mark.parametrize("block", [BLOCK, 3 << 20, pytest.param(20 << 20, marks=pytest.mark.long)])
def test_another_client_reads_what_nixl_wrote(account: Azurite, make_pairs: MakePairs, block: int) -> None:
    written = link(make_pairs(blocks=(block,), batch=(2,), timeout=LATE))
    assert str(written.key(block)).startswith("AZURE_BLOB/WRITE/DRAM:OBJ/")
    with written._transfers(block, 2, 1) as transfers:
        written._fill(2 * block, poison=True)
        written._run("move", transfers, LATE)
        source = written.source.read(0, 2 * block)
        bodies = [account.client.download_blob(key).readall() for key in account.keys]
    assert b"".join(bodies) == source
    assert len(set(bodies)) == 2


def test_nixl_reads_what_another_client_wrote(account: Azurite, make_pairs: MakePairs) -> None:
    reading = link(make_pairs(), "READ")
    with reading._transfers(BLOCK, 1, 1) as transfers:
        reading._fill(BLOCK, poison=True)
        [key] = account.keys
        content = os.urandom(BLOCK)
        account.client.upload_blob(key, content, overwrite=True)
        reading._run("move", transfers, 60)
        assert reading.destination.read(0, BLOCK) == content


def test_a_parameter_names_the_container_without_a_variant(
    account: Azurite, make_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_CONTAINER_NAME")
    moved = link(make_pairs(backend_params=(BackendParameter("AZURE_BLOB", "container_name", "container"),)))
    assert str(moved.key(BLOCK)) == "AZURE_BLOB/WRITE/DRAM:OBJ/64KiB/batch1/depth1/0-0"
    assert moved.move(BLOCK) is None


def test_the_check_passes_with_a_healthy_account(account: Azurite, judge: Callable[[], Judgement]) -> None:
    judged = judge()
    assert judged.verdict is Verdict.PASS, judged
    assert f"account {account.url} stores, returns and deletes objects of container container" in judged.reason


@pytest.mark.parametrize(
    ("variable", "value", "reason", "remedy"),
    [
        ("CONTAINER_NAME", "absent", "answered ContainerNotFound", "AZURE_STORAGE_CONTAINER_NAME"),
        ("CONTAINER_NAME", "", "no container is named", "AZURE_STORAGE_CONTAINER_NAME="),
        ("CONNECTION_STRING", connection_string(CLOSED), f"account {CLOSED} cannot be reached", "BlobEndpoint"),
        ("CONNECTION_STRING", "nonsense", "is malformed", "correct AZURE_STORAGE_CONNECTION_STRING"),
        ("CONNECTION_STRING", "", "neither AZURE_STORAGE_CONNECTION_STRING", "set AZURE_STORAGE_CONNECTION_STRING"),
        ("CONNECTION_STRING", "wrong key", "answered AuthorizationFailure", "firewall"),
        ("CONNECTION_STRING", "cut key", "the key for the Azure storage account", "correct the account and its key"),
        ("CONNECTION_STRING", "https", "does not speak TLS", "write http://"),
    ],
    ids=["container", "no-container", "closed-port", "malformed", "no-account", "key", "cut-key", "tls"],
)
def test_what_is_wrong_with_the_account_is_named_with_a_remedy(
    account: Azurite, make_pairs: MakePairs, judge: Callable[[], Judgement], monkeypatch: pytest.MonkeyPatch,
    variable: str, value: str, reason: str, remedy: str,
) -> None:  # fmt: skip
    wrong = {"wrong key": connection_string(account.url, "d3Jvbmc="), 
             "cut key": connection_string(account.url, KEY[:-3]),
             "https": connection_string(account.url.replace("http", "https"))}  # fmt: skip
    monkeypatch.setenv(f"AZURE_STORAGE_{variable}", wrong.get(value, value))
    judged = judge()
    assert judged.verdict is Verdict.FAIL
    assert reason in judged.reason
    assert remedy in judged.remedy
    with pytest.raises(WorkerError) as caught:
        link(make_pairs())
    assert caught.value.reason.startswith(judged.reason)
    assert caught.value.remedy == judged.remedy


def refusal(environ: dict[str, str]) -> ObjectStoreError:
    """Return the error of a PUT with these variables, and the container ``c``."""
    with pytest.raises(ObjectStoreError) as caught:
        BlobClient.of({}, {"AZURE_STORAGE_CONTAINER_NAME": "c", **environ}).put("key", b"content")
    return caught.value


def test_an_account_without_credentials_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # azure-identity runs the programs that may know credentials
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    error = refusal({"AZURE_STORAGE_ACCOUNT_URL": "https://127.0.0.1:1/a"})
    assert error.kind == "credentials"
    assert "no credentials for the Azure storage account https://127.0.0.1:1 were found" in error.reason


def test_a_wrong_setting_of_the_identity_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "Nothing")
    error = refusal({"AZURE_STORAGE_ACCOUNT_URL": "https://127.0.0.1:1/a"})
    assert error.kind == "credentials"
    assert "AZURE_TOKEN_CREDENTIALS" in error.reason
    assert "correct the variable" in error.remedy


def test_a_missing_file_of_certificates_is_named() -> None:
    variables = {"AZURE_STORAGE_CONNECTION_STRING": connection_string(CLOSED), "AZURE_CA_BUNDLE": "/nowhere/ca.pem"}
    error = refusal(variables)
    assert (error.kind, error.reason) == ("tls", "AZURE_CA_BUNDLE names no file: /nowhere/ca.pem")
    assert "set AZURE_CA_BUNDLE" in error.remedy


def test_no_secret_of_a_url_is_shown() -> None:
    connection = connection_string(CLOSED.replace("//", "//user:hunter22@"))
    store = BlobClient.of({}, {"AZURE_STORAGE_CONTAINER_NAME": "c", "AZURE_STORAGE_CONNECTION_STRING": connection})
    assert (store.server, store.transport) == (f"the Azure storage account {CLOSED}", CLOSED.replace("://", "/"))
    store.close()
    assert "hunter22" not in str(refusal({"AZURE_STORAGE_CONNECTION_STRING": connection}))
    assert "hunter22" not in str(refusal({"AZURE_STORAGE_ACCOUNT_URL": "https:///?sv=1&sig=hunter22"}))


class _Breaking(HttpDouble):
    """A double: it ends the connection within the content of a blob."""

    def reply(self) -> None:
        self.send_response(206)
        for name, value in (("content-length", "7"), ("content-range", "bytes 0-6/7"), ("etag", "e")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"con")


def client_of(port: int) -> BlobClient:
    """Return a client of a double."""
    connection = connection_string(f"http://127.0.0.1:{port}")
    return BlobClient.of({}, {"AZURE_STORAGE_CONNECTION_STRING": connection, "AZURE_STORAGE_CONTAINER_NAME": "c"})


def test_a_connection_that_breaks_is_no_lack_of_credentials() -> None:
    with answering(_Breaking) as port, closing(client_of(port)) as client:
        with pytest.raises(ObjectStoreError) as caught:
            client.get("key", 0, 7)
    assert caught.value.kind == "endpoint"
    assert "closed the connection" in caught.value.reason


@pytest.mark.parametrize(
    ("code", "skew", "verdict", "reason"),
    [
        # Azure refuses a wrong time as a wrong signature.
        ("AuthenticationFailed", 4000, Verdict.FAIL, "s ahead of this host's, and such servers refuse more than 900 s"),
        ("", -500, Verdict.WARN, "s behind this host's; such servers refuse more than 900 s"),
    ],
    ids=["refused", "runs away"],
)
def test_a_wrong_clock_is_named(
    account: Azurite, judge: Callable[[], Judgement], monkeypatch: pytest.MonkeyPatch, code: str, skew: float,
    verdict: Verdict, reason: str,
) -> None:  # fmt: skip
    with faulty_s3(account.url, lambda *_: code, skew=skew) as (url, _):
        use_azure(monkeypatch, url)
        judged = judge()
    assert judged.verdict is verdict
    assert reason in judged.reason
    assert judged.remedy == "set this host's clock: run `chronyc makestep`"


class _Refusing(HttpDouble):
    """A double: Azurite knows few faults, so this answers with the error code that the path names."""

    def reply(self) -> None:
        if self.command == "PUT":
            self.body()
        self.send_response(503 if "Busy" in self.path else 403)
        self.send_header("x-ms-error-code", self.path.partition("?")[0].rpartition("/")[2])
        self.send_header("content-length", "0")
        self.end_headers()


def test_each_answer_of_an_account_has_its_own_remedy() -> None:
    assert BY_CODE["BlobNotFound"].kind == "key", "it makes a WRITE that stores nothing CORRUPT"
    with answering(_Refusing) as port, closing(client_of(port)) as client:
        for code, fault in BY_CODE.items():
            for request, work in (
                ("PUT", lambda key: client.put(key, b"x")),
                ("GET", lambda key: client.get(key, 0, 7)),
            ):
                with pytest.raises(ObjectStoreError) as caught:
                    work(code)
                assert f"answered {code} to {request} of a blob in container c" in caught.value.reason
                assert (caught.value.remedy, caught.value.kind) == (fault.remedy, fault.kind)
                assert KEY not in str(caught.value)
