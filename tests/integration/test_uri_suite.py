# SPDX-License-Identifier: Apache-2.0
"""Each check of the suite uri_validation detects its fault, with real agents and real etcds."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, run
from helpers.etcd import Certificates, Etcd, running_etcd, turn_authentication_on

from pytest_nixl.checks.endpoints.deployment import Deployment, judge_form, judge_resolution, notes_about
from pytest_nixl.checks.endpoints.trial import try_texts
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoint
from pytest_nixl.etcd_servers.embedded import etcd_binary
from pytest_nixl.host.loaded_libraries import URI_PATCH, EtcdLibrary, loaded_etcd_client
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import ReadOutcome
from pytest_nixl.processes.supervisor import supervisor
from suites.uri_validation.corpus import load_corpus

pytestmark = pytest.mark.long

SUITE = "suites/uri_validation"
DEPLOYMENT = f"{SUITE}/test_deployment.py"
CORPUS = load_corpus()


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def _deployment(etcd: Etcd, *arguments: str, **variables: str) -> Finished:
    return run(DEPLOYMENT, "--nixl-timeout=20s", *arguments, env=variables)


def _keys(etcd: Etcd) -> int:
    with connect([etcd.endpoint]) as client:
        return client.count_prefix("/")


def test_a_healthy_deployment_passes_and_leaves_no_keys(etcd: Etcd) -> None:
    before = _keys(etcd)
    done = run(SUITE, env={"NIXL_ETCD_ENDPOINTS": etcd.url})
    assert "NIXL verdict: PASS (16 PASS; 0 rows measured)" in done.output
    assert "WARN" not in done.output
    # HTTPS-PLAINTEXT, SILENT-FAILURE, CREDENTIALS-DROPPED and MEMBER-DROPPED.
    assert re.search(
        r"^4 known limits of NIXL \S+, seen only under conditions that the checks made: ", done.output, re.MULTILINE
    )
    assert done.code == 0
    assert _keys(etcd) == before


def test_agents_that_only_use_storage_have_nothing_to_publish(etcd: Etcd) -> None:
    done = _deployment(etcd, "-v", "--nixl-backend=POSIX", NIXL_ETCD_ENDPOINTS=etcd.url)
    reason = "--nixl-backend=POSIX moves bytes only to storage"
    assert re.search(f"^NOT-APPLICABLE endpoints-publish: {reason}", done.output, re.MULTILINE)
    assert "NIXL verdict: PASS (7 PASS, 1 NOT-APPLICABLE; 0 rows measured)" in done.output
    assert done.code == 0


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: entry.text[:60] or "empty")
def test_each_broken_form_is_reported_with_cause_and_rewrite(entry: object, etcd: Etcd) -> None:
    """Test the judgements without an agent for the whole corpus. The next test runs one value of each check."""
    from suites.uri_validation.corpus import Entry

    assert isinstance(entry, Entry)
    (dead,) = free_ports(1)
    filled = entry.at(etcd.endpoint.port, dead)
    deployment = Deployment("NIXL_ETCD_ENDPOINTS", filled.text, explain(filled.text))
    judgements = [judge_form(deployment), judge_resolution(deployment)]
    failed = [judgement for judgement in judgements if judgement.verdict is Verdict.FAIL]
    if entry.nixl in (ReadOutcome.INVALID, ReadOutcome.NO_AGENT):
        assert failed, "a form that NIXL does not read must fail"
    else:
        assert not failed
    for judgement in failed:
        assert judgement.reason.startswith(f"NIXL_ETCD_ENDPOINTS={deployment.explanation.text}: ")
        assert entry.says in judgement.reason
        # Even if a name does not resolve, the text may say what is meant.
        assert f"write {filled.rewrite or 'http://'}" in judgement.remedy
    if "https" in filled.text.lower():
        assert notes_about(deployment, "NIXL-ETCD-HTTPS-PLAINTEXT")
    if "@" in filled.text:
        assert notes_about(deployment, "NIXL-ETCD-CREDENTIALS-DROPPED")


#: A plugin for forms about which NIXL writes a message, which on a busy machine may come late.
PATIENT = "from pytest_nixl.checks.endpoints import deployment\n\ndeployment.SILENCE = 60.0\n"


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("http://{}/", ["FAIL endpoints-well-formed: ", "ends with a slash", "remedy: in the deployment, write http://{}",
                        "FAIL endpoints-publish: ", "NIXL wrote 'the target uri is not valid'"]),
        ("http://user:secret@{}", ["FAIL endpoints-well-formed: ", "has a user or password, which NIXL cannot send",
                                   "FAIL NIXL-ETCD-CREDENTIALS-DROPPED: ", "NIXL_ETCD_ENDPOINTS=http://***@{}"]),
        ("http://nowhere.invalid:2379", ["FAIL endpoints-resolve: ", "does not resolve to an IPv4 address",
                                         "FAIL endpoints-publish: ", "getent ahostsv4 HOST"]),
        ("http://127.0.0.1:1", ["FAIL endpoints-connect: ", "127.0.0.1:1: connection refused",
                                "FAIL endpoints-healthy: ", "FAIL endpoints-publish: ", "Connection refused"]),
        ("http://127.0.0.1:1,http://{}", ["WARN endpoints-connect: ", "1 of 2 do not answer: 127.0.0.1:1: connection"]),
        ("http://{}/,http://{}", ["FAIL NIXL-ETCD-MEMBER-DROPPED: ", "without a message: it ends with"]),
        ("https://{}", ["FAIL NIXL-ETCD-HTTPS-PLAINTEXT: ", "plaintext", "write http://{}"]),
        ("tcp://{}", ["WARN endpoints-well-formed: ", "NIXL reads it, but etcdctl does not", "write http://{}"]),
        ("", ["FAIL endpoints-well-formed: ", "it is empty", "FAIL endpoints-publish: "]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_deployment_with_a_broken_form_fails(form: str, lines: list[str], etcd: Etcd, tmp_path: Path) -> None:
    bare = str(etcd.endpoint).removeprefix("http://")
    (tmp_path / "patient.py").write_text(PATIENT)
    writes = any("NIXL wrote" in line or line == "Connection refused" for line in lines)
    options = ("-p", "patient") if writes else ()
    done = _deployment(etcd, *options, NIXL_ETCD_ENDPOINTS=form.replace("{}", bare), PYTHONPATH=str(tmp_path))
    for line in lines:
        assert line.replace("{}", bare) in done.output
    assert "Traceback" not in done.output
    assert "secret" not in done.output
    assert done.code == (1 if any("FAIL" in line for line in lines) else 0)


SECURED = ("tls", "mutual", "password")


Secured = tuple[str, Etcd, Mapping[str, str]]


@pytest.fixture(params=SECURED)
def secured(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Secured]:
    """A secured etcd, and the variables with the credentials of pytest-nixl's client."""
    kind: str = request.param
    if kind == "password":
        with running_etcd() as etcd:
            turn_authentication_on(etcd.url)
            yield kind, etcd, {"ETCDCTL_USER": "root:pw"}
        return
    options = certificates.tls(certificates.server) if kind == "tls" else certificates.mutual(certificates.server)
    client = {"ETCDCTL_CERT": certificates.client, "ETCDCTL_KEY": certificates.client}
    with running_etcd(*options, scheme="https") as etcd:
        yield kind, etcd, {"ETCDCTL_CACERT": certificates.ca, **(client if kind == "mutual" else {})}


def test_a_secured_etcd_is_reported_with_a_remedy(secured: Secured) -> None:
    kind, etcd, credentials = secured
    done = _deployment(etcd, NIXL_ETCD_ENDPOINTS=etcd.url, **credentials)
    assert "FAIL endpoints-healthy" not in done.output, "pytest-nixl's own client has access"
    assert "FAIL endpoints-publish: " in done.output
    if kind == "password":
        assert "that etcd asks for a user and password" in done.output
        assert "a grpc-proxy does not help here" in done.output
    else:
        assert "that etcd speaks TLS" in done.output
        assert "remedy: run `etcd grpc-proxy start --endpoints https://" in done.output
        assert "FAIL NIXL-ETCD-HTTPS-PLAINTEXT: " in done.output
    assert "pw" not in done.output
    assert done.code == 1


def test_an_etcd_with_mutual_tls_is_reachable_through_a_grpc_proxy(
    certificates: Certificates, agents: Agents, tmp_path: Path
) -> None:
    options = certificates.mutual(certificates.server)
    with running_etcd(*options, scheme="https") as etcd:
        (port,) = free_ports(1)
        # The proxy reads the first block of the file, which must not be the key.
        certificate = tmp_path / "certificate.pem"
        certificate.write_text(_certificate_alone(certificates.client))
        proxy = supervisor().spawn(
            [etcd_binary(), "grpc-proxy", "start", f"--endpoints={etcd.url}", f"--cacert={certificates.ca}",
             f"--cert={certificate}", f"--key={certificates.client}", f"--listen-addr=127.0.0.1:{port}"],
            log=f"proxy-{port}.log",
        )  # fmt: skip
        try:
            environment = {"NIXL_ETCD_ENDPOINTS": f"http://127.0.0.1:{port}", "NIXL_ETCD_NAMESPACE": "/proxied"}
            _wait_for_port(port)
            first, second = (
                agents.start(name, environment=environment, listen_thread=True) for name in ("first", "second")
            )
            client_certificate = certificates.client
            with connect(
                [etcd.endpoint], cacert=certificates.ca, cert=client_certificate, key=client_certificate
            ) as client:
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


def test_a_wrong_prediction_fails_the_suite(tmp_path: Path) -> None:
    """The prediction is made wrong, because there is no NIXL that reads differently."""
    (tmp_path / "bent.py").write_text(
        "import pytest_nixl.nixl.endpoint_reading as explain\n"
        "right = explain.read_port\n"
        "explain.read_port = lambda text: 0 if text == '99999' else right(text)\n"
        # NIXL writes a message about this text, which on a busy machine may come late.
        "from pytest_nixl.checks.endpoints.trial import _Bench\n"
        "begin = _Bench._begin\n"
        "def patient(self):\n"
        "    found = begin(self)\n"
        "    if self._until and self._text == 'http://127.0.0.1:99999':\n"
        "        self._until += 60\n"
        "    return found\n"
        "_Bench._begin = patient\n"
    )
    done = run(f"{SUITE}/test_conformance.py", "-k", "predicted", "-p", "bent", "--nixl-etcd-server=embedded",
               env={"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert re.search(
        r"FAIL endpoints-conform: 2 of \d+ texts are not read as predicted: 'http://127.0.0.1:99999': predicted: "
        r"reads an address where nothing answers; NIXL [0-9.]+: reads no address \(.*the target uri is not valid",
        done.output,
    )
    assert "remedy: report this output with the version of NIXL" in done.output
    assert done.code == 1


def test_a_suggested_rewrite_that_does_not_work_fails_the_suite(tmp_path: Path) -> None:
    """A wrong suggestion stands in for those of the corpus, which all work."""
    (tmp_path / "bent.py").write_text(
        "import pytest_nixl.checks.endpoints.trial as check\n"
        "check.suggestions = lambda texts, port: ['http://127.0.0.1:1']\n"
    )
    (tmp_path / "sitecustomize.py").touch()
    done = run(f"{SUITE}/test_conformance.py", "-k", "rewrites", "-p", "bent", "--nixl-timeout=60s",
               "--nixl-etcd-server=embedded", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})  # fmt: skip
    assert "FAIL endpoint-rewrites-work: suggested values that do not work: http://127.0.0.1:1: " in done.output
    assert done.code == 1


def test_an_accepted_finding_warns_until_it_expires(tmp_path: Path, etcd: Etcd) -> None:
    profile = tmp_path / "mine.toml"
    url = etcd.url.replace("http://", "https://")
    for year, line, code in (
        (2999, r"^WARN NIXL-ETCD-HTTPS-PLAINTEXT: .* 2999-12-31 \(on one rack\): ", 0),
        (2020, r"^FAIL NIXL-ETCD-HTTPS-PLAINTEXT: .* 2020-12-31 \(on one rack\): ", 1),
    ):
        profile.write_text(
            '[profile]\nname = "mine"\n[[accept]]\nid = "NIXL-ETCD-HTTPS-PLAINTEXT"\n'
            f'reason = "on one rack"\nexpires = {year}-12-31\n'
        )
        done = _deployment(etcd, f"--nixl-profile={profile}", NIXL_ETCD_ENDPOINTS=url)
        assert re.search(line, done.output, re.MULTILINE), done.output
        assert "7 PASS" in done.output, "nothing else is wrong with it"
        assert done.code == code


#: A plugin that presents NIXL's plaintext as a TLS handshake, because there is no NIXL that speaks TLS.
ENCRYPTS = """
import suites.uri_validation.test_security as suite
heard = suite._Listener.heard
suite._Listener.heard = lambda self: b"\\x16\\x03\\x01" if heard(self) else b""
"""


def test_an_accepted_finding_that_no_longer_occurs_fails(tmp_path: Path) -> None:
    (tmp_path / "encrypts.py").write_text(ENCRYPTS)
    profile = tmp_path / "mine.toml"
    profile.write_text(
        '[profile]\nname = "mine"\n[[accept]]\nid = "NIXL-ETCD-HTTPS-PLAINTEXT"\nreason = "r"\nexpires = 2999-12-31\n'
    )
    done = run(f"{SUITE}/test_security.py", "-k", "https", "-p", "encrypts", f"--nixl-profile={profile}",
               env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})  # fmt: skip
    assert "FAIL NIXL-ETCD-HTTPS-PLAINTEXT: the profile accepts this finding, but it no longer occurs" in done.output
    assert "remedy: remove the [[accept]] of NIXL-ETCD-HTTPS-PLAINTEXT from the profile" in done.output
    assert done.code == 1


@pytest.fixture
def library(agents: Agents) -> EtcdLibrary:
    """The etcd client library that the real NIXL loads."""
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
    assert (
        f"WARN uri-validation-patch: {URI_PATCH} is not in {library.path}; {URI_PATCH} is set to '1'; tried"
        in done.output
    )
    assert "it has no effect" in done.output
    assert f"remedy: unset {URI_PATCH}: " in done.output
    assert done.code == 0


def test_a_library_with_the_patch_is_reported_with_its_path(library: EtcdLibrary, tmp_path: Path) -> None:
    copy = _patched(library, tmp_path)
    environment = {"LD_PRELOAD": str(copy), "LD_LIBRARY_PATH": str(Path(library.path).parent), URI_PATCH: "1"}
    done = run(f"{SUITE}/test_library.py", "-k", "patch", "--nixl-etcd-server=embedded", env=environment)
    assert f"WARN uri-validation-patch: {URI_PATCH} is in {copy}; {URI_PATCH} is set to '1'; tried with" in done.output
    assert done.code == 0


def test_an_effect_of_the_variable_is_reported(etcd: Etcd, library: EtcdLibrary, tmp_path: Path) -> None:
    """The outcome is faked, because no library with the real patch is available."""
    (tmp_path / "effect.py").write_text(
        "import pytest_nixl.checks.endpoints.client_library as check\n"
        "from pytest_nixl.nixl.endpoint_reading import ReadOutcome\n"
        "check.outcome_with = lambda text, setting, *rest: ReadOutcome.PUBLISHES if setting else ReadOutcome.INVALID\n"
    )
    done = run(f"{SUITE}/test_library.py", "-k", "patch", "-p", "effect", "-rA",
               f"--junit-xml={tmp_path / 'junit.xml'}", "--nixl-etcd-server=embedded",
               env={"PYTHONPATH": f"{tmp_path}:{ROOT}", URI_PATCH: "1"})  # fmt: skip
    assert "with it an agent publishes, without it reads no address" in (tmp_path / "junit.xml").read_text()
    assert done.code == 0


def test_a_nixlbench_with_another_library_is_reported(library: EtcdLibrary, tmp_path: Path) -> None:
    """A library of NIXL that links the same etcd client stands in for nixlbench."""
    program = tmp_path / "bin" / "nixlbench"
    program.parent.mkdir()
    shutil.copy(_linked_to(library), program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    other, loaded = _patched(library, tmp_path), Path(library.path)
    path = f"{program.parent}:{os.environ['PATH']}"
    # Only ldd uses these paths. NIXL's own files contain the path of their library.
    for folders, line in (
        ([loaded.parent], f"NIXL loads {loaded}, and {program} loads the same from {loaded}"),
        (
            [other.parent, loaded.parent],
            f"WARN etcd-library: NIXL loads {loaded}, but {program} loads another one, {other} "
            f"(only that of nixlbench has {URI_PATCH})",
        ),
    ):
        done = run(f"{SUITE}/test_library.py", "-k", "same", f"--junit-xml={tmp_path / 'junit.xml'}",
                   env={"PATH": path, "LD_LIBRARY_PATH": ":".join(map(str, folders))})  # fmt: skip
        assert line in done.output + (tmp_path / "junit.xml").read_text()
        assert done.code == 0


def _linked_to(library: EtcdLibrary) -> Path:
    """Return a file of the wheel that needs the etcd client library."""
    name = Path(library.path).name.encode()
    for path in sorted(Path(library.path).parents[1].rglob("*.so*")):
        if path.is_file() and path != Path(library.path) and name in path.read_bytes():
            return path
    raise AssertionError("no file of the wheel links the etcd client library")


def test_outcomes_are_distinguished_for_each_version_of_nixl(
    etcd: Etcd, make_settings: Callable[..., Settings]
) -> None:
    """A trial distinguishes agents that publish, cannot read their endpoint, or cannot reach it."""
    texts = {
        etcd.url: ReadOutcome.PUBLISHES,
        f"{etcd.url}/": ReadOutcome.INVALID,
        "http://127.0.0.1:1": ReadOutcome.UNREACHED,
        "": ReadOutcome.NO_AGENT,
    }
    with connect([parse_endpoint(etcd.url)]) as client:
        trials = list(try_texts(texts, client, make_settings(timeout=120.0), supervisor(), namespace="/trials"))
        client.delete_prefix("/trials/")
    assert [trial.text for trial in trials] == list(texts)
    assert all(trial.agrees(texts[trial.text]) for trial in trials)
    assert not any(trial.agrees(ReadOutcome.PUBLISHES) for trial in trials[1:])
