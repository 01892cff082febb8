# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite uri_validation detects its fault, with real agents and real etcds."""

from __future__ import annotations

import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import run
from helpers.etcd import Certificates, Etcd, running_etcd, turn_authentication_on

from pytest_nixl.checks.endpoints import deployment
from pytest_nixl.checks.endpoints.client_library import judge_library
from pytest_nixl.checks.endpoints.deployment import (
    Deployment,
    judge_connection,
    judge_form,
    judge_health,
    judge_publication,
    judge_resolution,
)
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd_servers.embedded import etcd_binary
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary, loaded_etcd_client
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.settings import read_settings

pytestmark = pytest.mark.long

SUITE = "suites/uri_validation"
DEPLOYMENT = f"{SUITE}/test_deployment.py"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


Judge = Callable[..., dict[str, Judgement]]


@pytest.fixture
def judge(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judge a deployment with these variables, as the suite's tests do; return the judgements by check."""
    monkeypatch.setattr(deployment, "SILENCE", 60.0)  # what NIXL writes may come late on a busy machine

    def judge(**variables: str) -> dict[str, Judgement]:
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", variables["NIXL_ETCD_ENDPOINTS"])
        settings = replace(read_settings(pytestconfig, environ=variables), timeout=60.0)
        judged = Deployment.of(settings, "")
        return {
            "form": judge_form(judged),
            "resolve": judge_resolution(judged),
            "connect": judge_connection(judged),
            "healthy": judge_health(judged),
            "publish": judge_publication(judged, settings, supervisor()),
        }

    return judge


def _keys(etcd: Etcd) -> int:
    with connect([etcd.endpoint]) as client:
        return client.count_prefix("/")


def test_a_healthy_deployment_passes_and_leaves_no_keys(etcd: Etcd) -> None:
    before = _keys(etcd)
    # HTTPS-PLAINTEXT, SILENT-FAILURE, CREDENTIALS-DROPPED and MEMBER-DROPPED.
    limits = "4 known limits of NIXL ..., seen only under conditions that the checks made: "
    done = run(SUITE, env={"NIXL_ETCD_ENDPOINTS": etcd.url})
    done.expect(0, "NIXL verdict: PASS (16 PASS; 0 rows measured)", limits, never=["WARN"])
    assert _keys(etcd) == before


@pytest.mark.parametrize(
    ("form", "verdicts"),
    [
        ("http://{}/", {"form": ("FAIL", "ends with a slash", "in the deployment, write http://{}"),
                        "publish": ("FAIL", "NIXL wrote 'the target uri is not valid'")}),
        ("http://user:secret@{}", {"form": ("FAIL", "has a user or password, which NIXL cannot send"),
                                   "publish": ("FAIL", "NIXL_ETCD_ENDPOINTS=http://***@{}")}),
        ("http://nowhere.invalid:2379", {"resolve": ("FAIL", "does not resolve to an IPv4 address", "getent ahostsv4"),
                                         "healthy": ("FAIL", "1 of 1: "),
                                         "publish": ("FAIL", "nothing is in etcd")}),
        ("http://127.0.0.1:1", {"connect": ("FAIL", "127.0.0.1:1: connection refused"), "healthy": ("FAIL", ""),
                                "publish": ("FAIL", "Connection refused")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_deployment_with_a_broken_form_fails(
    form: str, verdicts: dict[str, tuple[str, ...]], etcd: Etcd, judge: Judge
) -> None:
    bare = str(etcd.endpoint).removeprefix("http://")
    judgements = judge(NIXL_ETCD_ENDPOINTS=form.replace("{}", bare))
    for check, judgement in judgements.items():
        verdict, *parts = verdicts.get(check, ("PASS",))
        text = f"{judgement.reason}; remedy: {judgement.remedy}"
        assert judgement.verdict.value == verdict or (verdict == "PASS" and judgement.verdict is Verdict.NOT_APPLICABLE)
        assert all(part.replace("{}", bare) in text for part in parts), text
        assert "secret" not in text


def test_the_suite_names_each_fault_of_a_deployment_and_its_findings(etcd: Etcd, tmp_path: Path) -> None:
    """Of the findings one is accepted, one no longer, and one not."""
    profile = tmp_path / "mine.toml"
    accepts = (("NIXL-ETCD-HTTPS-PLAINTEXT", 2999), ("NIXL-ETCD-MEMBER-DROPPED", 2020))
    accept = '[[accept]]\nid = "{}"\nreason = "on one rack"\nexpires = {}-12-31\n'
    profile.write_text('[profile]\nname = "mine"\n' + "".join(accept.format(*values) for values in accepts))
    bare = etcd.url.removeprefix("http://")
    endpoints = f"http://127.0.0.1:1,http://user:secret@{bare},https://{bare}"
    done = run(DEPLOYMENT, f"--nixl-profile={profile}", "--nixl-timeout=60s", env={"NIXL_ETCD_ENDPOINTS": endpoints})
    done.expect(
        1,
        "WARN endpoints-connect: NIXL_ETCD_ENDPOINTS=",
        "WARN endpoints-healthy: NIXL_ETCD_ENDPOINTS=",
        "WARN NIXL-ETCD-HTTPS-PLAINTEXT: ... 2999-12-31 (on one rack): ",
        "FAIL NIXL-ETCD-MEMBER-DROPPED: ... 2020-12-31 (on one rack): ... without a message",
        "FAIL NIXL-ETCD-CREDENTIALS-DROPPED: NIXL",
        never=["Traceback", "secret"],
    )


@pytest.fixture(scope="module")
def mutual(certificates: Certificates) -> Iterator[Etcd]:
    """An etcd that wants a certificate of its clients."""
    with running_etcd(*certificates.mutual(certificates.server), scheme="https") as started:
        yield started


def assert_secured(judgements: dict[str, Judgement], reason: str, remedy: str) -> None:
    assert judgements["healthy"].verdict is Verdict.PASS, "pytest-nixl's own client has access"
    assert judgements["publish"].verdict is Verdict.FAIL
    assert reason in judgements["publish"].reason
    assert remedy in judgements["publish"].remedy
    assert "pw" not in str(judgements)


def test_an_etcd_with_tls_is_reported_with_a_remedy(mutual: Etcd, certificates: Certificates, judge: Judge) -> None:
    client = {"ETCDCTL_CERT": certificates.client, "ETCDCTL_KEY": certificates.client}
    judgements = judge(NIXL_ETCD_ENDPOINTS=mutual.url, ETCDCTL_CACERT=certificates.ca, **client)
    assert_secured(judgements, "that etcd speaks TLS", "run `etcd grpc-proxy start --endpoints https://")


def test_an_etcd_with_a_password_is_reported_with_a_remedy(judge: Judge) -> None:
    with running_etcd() as etcd:
        turn_authentication_on(etcd.url)
        judgements = judge(NIXL_ETCD_ENDPOINTS=etcd.url, ETCDCTL_USER="root:pw")
    assert_secured(judgements, "that etcd asks for a user and password", "a grpc-proxy does not help here")


def test_an_etcd_with_mutual_tls_is_reachable_through_a_grpc_proxy(
    mutual: Etcd, certificates: Certificates, agents: Agents, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    # The proxy reads the first block of the file, which must not be the key.
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(_certificate_alone(certificates.client))
    proxy = supervisor().spawn(
        [etcd_binary(), "grpc-proxy", "start", f"--endpoints={mutual.url}", f"--cacert={certificates.ca}",
         f"--cert={certificate}", f"--key={certificates.client}", f"--listen-addr=127.0.0.1:{port}"],
        log=f"proxy-{port}.log",
    )  # fmt: skip
    try:
        environment = {"NIXL_ETCD_ENDPOINTS": f"http://127.0.0.1:{port}", "NIXL_ETCD_NAMESPACE": "/proxied"}
        _wait_for_port(port)
        first, second = (
            agents.start(name, environment=environment, listen_thread=True) for name in ("first", "second")
        )
        key = certificates.client
        with connect([mutual.endpoint], cacert=certificates.ca, cert=key, key=key) as client:
            _meet(first, second, client)
            _meet(second, first, client)
    finally:
        supervisor().stop(proxy)


def _certificate_alone(file: str) -> str:
    text = Path(file).read_text()
    return text[text.index("-----BEGIN CERTIFICATE-----") :]


def _wait_for_port(port: int) -> None:
    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    wait_until(listens, "the grpc-proxy to listen", seconds=60)


def _meet(publisher: NixlAgent, finder: NixlAgent, client: EtcdClient) -> None:
    publisher.register(publisher.allocate(4096))
    publisher.send_local_metadata()
    key = f"/proxied/{publisher.name}/metadata"
    wait_until(lambda: client.get(key), f"{publisher.name} to publish through the proxy", seconds=60)
    finder.fetch_remote_metadata(publisher.name)
    wait_until(
        lambda: finder.check_remote_metadata(publisher.name), f"{finder.name} to find {publisher.name}", seconds=60
    )


#: There is no NIXL that reads a text differently, and no suggestion that is wrong: both are made.
WRONG = """
import pytest_nixl.checks.endpoints.trial as trial
import pytest_nixl.nixl.endpoint_reading as reading

read_port = reading.read_port
reading.read_port = lambda text: 0 if text == "99999" else read_port(text)
trial.SILENCE = 60.0  # NIXL writes a message about this text, which on a busy machine may come late
trial.judge_readings = lambda texts, *more, judge=trial.judge_readings: judge(
    [text for text in texts if text.endswith(":99999")], *more)
trial.suggestions = lambda texts, port: ["http://127.0.0.1:1"]
"""


def test_a_wrong_prediction_and_a_rewrite_that_does_not_work_fail_the_suite() -> None:
    done = run(f"{SUITE}/test_conformance.py", "--nixl-timeout=60s", "--nixl-etcd-server=embedded", fault=WRONG)
    done.expect(
        1,
        "FAIL endpoints-conform: 2 of ... texts are not read as predicted: 'http://127.0.0.1:99999': predicted: "
        "reads an address where nothing answers; NIXL ...: reads no address (...the target uri is not valid",
        "remedy: report this output with the version of NIXL",
        "FAIL endpoint-rewrites-work: suggested values that do not work: http://127.0.0.1:1: ",
    )


@pytest.fixture(scope="module")
def library(make_settings: Callable[..., Settings]) -> EtcdLibrary:
    """The etcd client library that the real NIXL loads."""
    with Agents(LocalHost(supervisor()), make_settings()) as agents:
        results = loaded_etcd_client(agents.start(backends=[]).worker.pid)
    assert results is not None
    return results


def _patched(library: EtcdLibrary, folder: Path) -> Path:
    """Return a copy with the patch's string appended, which has no effect. The real patch is not available."""
    copy = folder / Path(library.path).name
    copy.write_bytes(Path(library.path).read_bytes() + URI_PATCH.encode() + b"\0")
    return copy


def test_a_variable_without_the_patch_warns(library: EtcdLibrary) -> None:
    done = run(f"{SUITE}/test_library.py", "-k", "patch", "--nixl-etcd-server=embedded", env={URI_PATCH: "1"})
    done.expect(
        0,
        f"WARN uri-validation-patch: {URI_PATCH} is not in {library.path}; {URI_PATCH} is set to '1'; tried"
        "... it has no effect",
        f"remedy: unset {URI_PATCH}: ",
    )


def test_a_library_with_the_patch_is_found_by_its_path(library: EtcdLibrary, agents: Agents, tmp_path: Path) -> None:
    copy = _patched(library, tmp_path)
    variables = {"LD_PRELOAD": str(copy), "LD_LIBRARY_PATH": str(Path(library.path).parent)}
    loaded = loaded_etcd_client(agents.start("patched", backends=[], environment=variables).worker.pid)
    assert loaded is not None
    assert (loaded.path, loaded.patched, library.patched) == (str(copy), True, False)


def test_a_nixlbench_with_another_library_is_reported(
    library: EtcdLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of NIXL that links the same etcd client stands in for nixlbench."""
    program = tmp_path / "bin" / "nixlbench"
    program.parent.mkdir()
    shutil.copy(_linked_to(library), program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    other, loaded = _patched(library, tmp_path), Path(library.path)
    # Only ldd uses these paths. NIXL's own files contain the path of their library.
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{loaded.parent}")
    same = judge_library(library)
    assert same == Judgement(Verdict.PASS, f"NIXL loads {loaded}, and {program} loads the same from {loaded}")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{other.parent}:{loaded.parent}")
    differs = judge_library(library)
    assert differs.verdict is Verdict.WARN
    assert differs.reason == (
        f"NIXL loads {loaded}, but {program} loads another one, {other} (only that of nixlbench has {URI_PATCH})"
    )


def _linked_to(library: EtcdLibrary) -> Path:
    """Return a file of the wheel that needs the etcd client library."""
    name = Path(library.path).name.encode()
    for path in sorted(Path(library.path).parents[1].rglob("*.so*")):
        if path.is_file() and path != Path(library.path) and name in path.read_bytes():
            return path
    raise AssertionError("no file of the wheel links the etcd client library")
