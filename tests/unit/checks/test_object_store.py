# SPDX-License-Identifier: Apache-2.0
"""The check ``object-store`` on the real NIXL and moto, and with each fault that it is for."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.s3 import S3Server, use_s3
from helpers.s3_faults import faulty_s3

from pytest_nixl.checks.storage import check as object_store
from pytest_nixl.checks.storage.check import judge_object_store
from pytest_nixl.core.extras import pip_install
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.nixl.worker.object_stores import CHECKSUM
from pytest_nixl.nixl.worker.s3 import ObjectClient
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError

Ask = Callable[..., Judgement]
#: What NIXL sends no checksums with that some servers refuse.
UNCHUNKED = BackendParameter("OBJ", "req_checksum", "required")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    s3_server = S3Server()
    yield s3_server
    assert s3_server.keys == []
    s3_server.kill()


@pytest.fixture
def ask(make_settings: Callable[..., Settings], server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that makes the check with parameters of OBJ, after it set variables.

    Its argument ``agents`` replaces those of the real NIXL.
    """

    def ask(
        url: str = "", parameters: tuple[BackendParameter, ...] = (), agents: Any = None, **variables: str
    ) -> Judgement:
        use_s3(monkeypatch, url or server.url)
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        settings = make_settings(backend=("UCX", "OBJ"), backend_params=parameters)
        if agents is not None:
            return judge_object_store(agents, settings)
        with Agents(LocalHost(supervisor()), settings) as real:
            return judge_object_store(real, settings)

    return ask


def passes(url: str, mode: str = "supported") -> Judgement:
    return Judgement(
        Verdict.PASS,
        f"the S3 server {url} stores, returns and deletes objects of bucket bucket, and NIXL writes, finds and reads "
        f"them (req_checksum={mode})",
    )


@pytest.mark.long
def test_good_server_passes_and_keeps_nothing(ask: Ask, server: S3Server) -> None:
    assert ask() == passes(server.url)
    assert server.keys == []


@pytest.fixture
def open_to_all(server: S3Server) -> Iterator[None]:
    """The bucket lets everyone in: NIXL's plugin asks AWS's own STS for a role's key, which no test reaches."""
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": "arn:aws:s3:::bucket/*"}
    server.client.put_bucket_policy(
        Bucket="bucket", Policy=json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    )
    yield
    server.client.delete_bucket_policy(Bucket="bucket")


@contextmanager
def recorded(server: S3Server) -> Iterator[tuple[str, set[str]]]:
    """Serve a proxy; yield its URL, and each client with the kind of key and the region that signed its requests."""
    signed: set[str] = set()

    def record(method: str, path: str, headers: Message) -> str:
        client = headers["user-agent"].partition("/")[0]
        key, _, region = (headers.get("authorization", "").partition("Credential=")[2].split("/") + [""] * 3)[:3]
        signed.add(" ".join(filter(None, (client, key[:4], region))))
        return ""

    with faulty_s3(server.url, record) as (url, _):
        yield url, signed


@pytest.mark.long
def test_pod_with_a_profile_passes(ask: Ask, server: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[pod]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = thing\n")
    config = tmp_path / "config"
    config.write_text("[profile pod]\nregion = eu-west-1\n")
    pod = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "pod"}
    with recorded(server) as (url, signed):
        judged = ask(url, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_DEFAULT_REGION="", **pod)
    assert judged.verdict is Verdict.PASS, judged.reason
    assert signed == {"Botocore AKIA eu-west-1", "aws-sdk-cpp AKIA eu-west-1"}


@pytest.mark.long
def test_pod_with_a_role_passes(ask: Ask, server: S3Server, tmp_path: Path, open_to_all: None) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-cluster")
    pod = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/pod",
        "AWS_ENDPOINT_URL_STS": server.url,
    }
    with recorded(server) as (url, signed):  # moto reads no checksums of an unsigned request
        judged = ask(url, (UNCHUNKED,), AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", **pod)
    assert judged.verdict is Verdict.PASS, judged.reason
    assert "Botocore ASIA us-east-1" in signed, "signed with the temporary key of the role"
    assert "Botocore" not in signed


def test_proxy_of_the_variables_is_not_asked(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, server.url)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with contextlib.closing(ObjectClient.of({})) as client:
        client.probe("key")


def region_of(headers: Message) -> str:
    return str(headers["authorization"]).split("/")[2]


def refuses(code: str) -> Any:
    return lambda *_: code


NOTHING = refuses("")
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
SET_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


@pytest.mark.parametrize(
    ("variables", "refuse", "skew", "reason", "remedy"),
    [
        ({"AWS_DEFAULT_BUCKET": "no-bucket"}, NOTHING, 0, "answered NoSuchBucket", "AWS_DEFAULT_BUCKET"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, NOTHING, 0, "127.0.0.1:1 cannot be reached", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://no-host.invalid:80"}, NOTHING, 0, "does not resolve", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "https"}, NOTHING, 0, "does not speak TLS", "write http://"),
        ({"AWS_DEFAULT_BUCKET": ""}, NOTHING, 0, "no bucket is named", "AWS_DEFAULT_BUCKET="),
        ({"AWS_SECRET_ACCESS_KEY": ""}, NOTHING, 0, "missing: AWS_SECRET_ACCESS_KEY", "set AWS_ACCESS_KEY_ID"),
        (NO_KEYS, NOTHING, 0, "no AWS credentials: the variables", SET_KEYS),
        ({**NO_KEYS, "AWS_PROFILE": "absent"}, NOTHING, 0, r"cannot be read: The config profile \(absent\)", SET_KEYS),
        ({**NO_KEYS, "AWS_WEB_IDENTITY_TOKEN_FILE": "/absent", "AWS_ROLE_ARN": "arn:aws:iam::1:role/pod"}, NOTHING, 0,
         "directory: '/absent'", SET_KEYS),
        # A bucket of another region, as AWS refuses the region of a signature.
        ({}, lambda *args: "" if region_of(args[2]) == "eu-west-1" else "AuthorizationHeaderMalformed", 0,
         "answered AuthorizationHeaderMalformed", "AWS_DEFAULT_REGION"),
        ({}, refuses("PermanentRedirect"), 0, "answered PermanentRedirect", ""),
        ({}, refuses("SlowDown"), 4000, "answered SlowDown to PUT of an object in bucket bucket$", "limits requests"),
        # As servers that find the time by the signature; the answer took a little time.
        *(({}, refuses(code), skew, rf"answered {code} .*: its clock is (39|40)\d\d s {side} this host's, and such "
           "servers refuse more than 900 s$", "chronyc") for code, skew, side in (
               ("RequestTimeTooSkewed", 4000, "ahead of"), ("SignatureDoesNotMatch", -4000, "behind"),
               ("AccessDenied", -4000, "behind"))),
        ({}, refuses("SignatureDoesNotMatch"), 0, "answered SignatureDoesNotMatch", "correct AWS_SECRET_ACCESS_KEY"),
        ({}, refuses("SignatureDoesNotMatch"), 800, "answered SignatureDoesNotMatch to PUT of an object in bucket "
         "bucket$", "correct AWS_SECRET_ACCESS_KEY"),
        ({}, refuses("InvalidAccessKeyId"), 0, "answered InvalidAccessKeyId to PUT of", "AWS_ACCESS_KEY_ID"),
    ],
)  # fmt: skip
def test_fault_is_named_before_nixl_is_loaded(
    ask: Ask, server: S3Server, variables: dict[str, str], refuse: Any, skew: float, reason: str, remedy: str
) -> None:
    https = server.url.replace("http", "https")
    variables = {name: https if value == "https" else value for name, value in variables.items()}
    with faulty_s3(server.url, refuse, skew=skew) as (url, requests):
        judged = ask(url, agents=SimpleNamespace(), **variables)
    assert judged.verdict is Verdict.FAIL
    assert re.search(reason, judged.reason), judged.reason
    assert remedy in judged.remedy
    assert {request.partition(" ")[0] for request in requests} <= {"PUT"}, "a bucket of another region is not followed"


def test_missing_client_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    judged = ask()
    assert judged.verdict is Verdict.FAIL
    assert judged.reason.startswith("objects are compared with AWS's client for Python, but botocore")
    assert judged.remedy == f"run {pip_install('s3')} in the environment of every rank"


def test_run_without_objects_is_not_asked(make_settings: Callable[..., Settings]) -> None:
    assert judge_object_store(cast(Any, None), make_settings(backend=("UCX", "POSIX"))) == Judgement(
        Verdict.NOT_APPLICABLE, "--nixl-backend=UCX,POSIX uses no object store: only OBJ and AZURE_BLOB do"
    )


class DoubledNixl:
    """Agents of a NIXL that moves objects by AWS's own client, and makes mistakes that the real one cannot be made to.

    :param mistakes: what a step does instead, by its name: an error; ``PROC`` for ever; ``lost`` or ``other`` bytes; or
        the answers of a query.
    :param trial: the same, when a parameter is tried.
    """

    name = "agent"

    def __init__(self, server: S3Server, mistakes: Mapping[str, Any], trial: Mapping[str, Any] | None = None) -> None:
        self.server, self.mistakes, self.trial = server, mistakes, mistakes if trial is None else trial
        self.started: list[tuple[Sequence[str], dict[str, str]]] = []
        self.moved: list[tuple[str, Any, Any, str, Sequence[str]]] = []
        self.killed = 0

    def start(self, *, backends: Sequence[str], agent_options: Any, progress_thread: bool) -> Any:
        assert not progress_thread
        self.started.append((backends, agent_options.parameters_of("OBJ")))
        self.worker = SimpleNamespace(timeout=60.0, kill=self._kill)
        self.content = b""
        return self

    def _kill(self) -> None:
        self.killed += 1

    def allocate(self, size: int) -> Any:
        return SimpleNamespace(
            write=lambda content: setattr(self, "content", content), read=lambda: self.content,
            descriptor=lambda: (4096, size, 0),
        )  # fmt: skip

    def register(self, buffer: Any) -> None:
        pass

    def register_memory(self, regions: Any, kind: str) -> None:
        assert kind == "OBJ"
        [(_, self.size, _, self.key)] = regions

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        return (*regions, kind)

    def initialize_xfer(self, op: str, local: Any, remote: Any, owner: str, text: bytes, *, backends: Any) -> str:
        self.moved.append((op, local, remote, owner, backends))
        return op

    def transfer(self, op: str) -> str:
        mistake = (self.trial if self.key.endswith("-trial") else self.mistakes).get(op)
        if isinstance(mistake, Exception):
            raise mistake
        if mistake == "PROC":
            return "PROC"
        bucket: dict[str, Any] = {"Bucket": "bucket", "Key": self.key}
        if op == "WRITE" and mistake != "lost":
            self.server.client.put_object(**bucket, Body=bytes(self.size) if mistake == "other" else self.content)
        elif op == "READ" and mistake != "other":
            self.content = self.server.client.get_object(**bucket)["Body"].read()
        return "DONE"

    def check_xfer_state(self, op: str) -> str:
        return "PROC"

    def release_xfer_handle(self, op: str) -> None:
        pass

    def query_memory(self, queries: Any, plugin: str, kind: str) -> Any:
        assert (queries, plugin, kind) == (
            [(0, self.size, 0, self.key), (0, self.size, 0, f"{self.key}-absent")], "OBJ", "OBJ"
        )  # fmt: skip
        answer = self.mistakes.get("query", [{}, None])
        if isinstance(answer, Exception):
            raise answer
        return answer


BROKEN = NixlError("agent reported NIXL_ERR_BACKEND", "", "", "nixlBackendError")
STALLED = "NIXL's {} of an object of 65536 bytes is not done after \\d s"
ALONE = "; another client stores, reads and deletes objects of the S3 server URL"
HELPS = (
    ", and so does NIXL with req_checksum=required: this server does not accept the checksums that NIXL sends with "
    "req_checksum=supported"
)
DEBUG = "set NIXL_LOG_LEVEL=debug, run it again, and read the worker's log and the server's"
KEEP = "use another release of NIXL or of the server, and keep the worker's log"
RIGHTS = "give this key the rights to read and list objects: query_memory sends HEAD requests"
TRIED: list[dict[str, str]] = [{}, {"req_checksum": "required"}]


@pytest.mark.parametrize(
    ("mistakes", "trial", "verdict", "reason", "remedy", "started"),
    [
        ({"WRITE": BROKEN}, None, Verdict.FAIL, f"agent reported NIXL_ERR_BACKEND{ALONE}", DEBUG, TRIED),
        ({"WRITE": BROKEN}, {}, Verdict.FAIL, f"agent reported NIXL_ERR_BACKEND{ALONE}{HELPS}", CHECKSUM.remedy, TRIED),
        ({"WRITE": BROKEN}, {"WRITE": "lost"}, Verdict.FAIL, f"agent reported NIXL_ERR_BACKEND{ALONE}", DEBUG, TRIED),
        ({"WRITE": "PROC"}, {}, Verdict.FAIL, STALLED.format("WRITE") + ALONE + HELPS, CHECKSUM.remedy, TRIED),
        ({"READ": "PROC"}, {"WRITE": BROKEN}, Verdict.FAIL, STALLED.format("READ") + ALONE, DEBUG, TRIED),
        ({"WRITE": "lost"}, None, Verdict.CORRUPT, "NIXL's WRITE of object KEY on the S3 server URL is DONE, but the "
         "object does not exist", KEEP, TRIED[:1]),
        ({"WRITE": "other"}, None, Verdict.CORRUPT, "NIXL's WRITE of object KEY on the S3 server URL is DONE, but its "
         "bytes are not those that were written", KEEP, TRIED[:1]),
        ({"READ": "other"}, None, Verdict.CORRUPT, "NIXL's READ of object KEY on the S3 server URL is DONE, but its "
         "bytes are not those that were written", KEEP, TRIED[:1]),
        ({"query": [None, None]}, None, Verdict.FAIL, "query_memory of NIXL answers None for an object that exists and "
         "None for one that does not", RIGHTS, TRIED[:1]),
        ({"query": [{}, {}]}, None, Verdict.FAIL, "query_memory of NIXL answers {} for an object that exists and {} "
         "for one that does not", RIGHTS, TRIED[:1]),
        ({"query": BROKEN}, None, Verdict.FAIL, "query_memory of NIXL fails for objects, although NIXL can write them: "
         "agent reported NIXL_ERR_BACKEND", RIGHTS, TRIED[:1]),
    ],
)  # fmt: skip
def test_each_mistake_of_nixl_is_named(
    ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch, mistakes: Mapping[str, Any],
    trial: Mapping[str, Any] | None, verdict: Verdict, reason: str, remedy: str, started: list[dict[str, str]],
) -> None:  # fmt: skip
    for name, seconds in (("ASK_SECONDS", 0.1), ("SECONDS", 0.5), ("LEAST_SECONDS", 0.5), ("TRIAL_SECONDS", 0.3)):
        monkeypatch.setattr(object_store, name, seconds)
    nixl = DoubledNixl(server, mistakes, trial)
    judged = ask(agents=nixl)
    text = re.sub(r"pytest-nixl/[0-9a-f]{16}/check", "KEY", judged.reason).replace(server.url, "URL")
    assert (judged.verdict, judged.remedy) == (verdict, remedy)
    assert text == reason or re.fullmatch(reason, text), text
    assert nixl.started == [(["OBJ"], parameters) for parameters in started]
    assert nixl.killed == len(started)
    assert server.keys == []


def test_nixl_reads_what_it_wrote_with_the_parameters_of_the_run(ask: Ask, server: S3Server) -> None:
    nixl = DoubledNixl(server, {})
    assert ask(agents=nixl, parameters=(UNCHUNKED,)) == passes(server.url, "required")
    assert nixl.started == [(["OBJ"], {"req_checksum": "required"})]
    sides = ((4096, 65536, 0), "DRAM"), ((0, 65536, 1), "OBJ"), "agent", ["OBJ"]
    assert nixl.moved == [("WRITE", *sides), ("READ", *sides)]
    nixl = DoubledNixl(server, {"WRITE": BROKEN}, {})
    judged = ask(agents=nixl, parameters=(UNCHUNKED,))
    assert (len(nixl.started), judged.remedy) == (1, DEBUG), "a parameter that the run has is not tried"
    nixl = DoubledNixl(server, {"WRITE": BROKEN}, {})
    ask(agents=nixl, parameters=(BackendParameter("OBJ", "scheme", "http"),))
    assert nixl.started[1] == (["OBJ"], {"req_checksum": "required", "scheme": "http"})


@pytest.mark.parametrize(("skew", "verdict"), [(-500, Verdict.WARN), (500, Verdict.WARN), (50, Verdict.PASS)])
def test_clock_that_runs_away_is_a_warning(ask: Ask, server: S3Server, skew: float, verdict: Verdict) -> None:
    with faulty_s3(server.url, skew=skew) as (url, _):
        judged = ask(url, agents=DoubledNixl(server, {}))
    assert judged.verdict is verdict
    side = "behind" if skew < 0 else "ahead of"
    warning = (
        rf"the S3 server {url}: its clock is (49\d|50\d) s {side} this host's; such servers refuse more than 900 s"
    )
    assert re.fullmatch(warning, judged.reason) if verdict is Verdict.WARN else judged == passes(url)


@pytest.mark.parametrize("mistake", [BROKEN, "PROC"])
def test_server_that_fails_after_nixl_began_is_the_cause(
    ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch, mistake: object
) -> None:
    monkeypatch.setattr(object_store, "ASK_SECONDS", 0.1)
    nixl = DoubledNixl(server, {"WRITE": mistake})
    with faulty_s3(server.url, lambda *_: "InternalError" if nixl.started else "") as (url, _):
        judged = ask(url, agents=nixl)
    assert judged.verdict is Verdict.FAIL
    assert "answered InternalError to PUT" in judged.reason


@pytest.mark.long
def test_server_that_refuses_the_checksums_of_nixl_is_told_from_others(ask: Ask, server: S3Server) -> None:
    def refuse(method: str, path: str, headers: Message) -> str:
        return "InvalidArgument" if "x-amz-trailer" in headers else ""

    with faulty_s3(server.url, refuse) as (url, requests):
        judged = ask(url)
        assert judged.verdict is Verdict.FAIL
        assert "so does NIXL with req_checksum=required" in judged.reason
        assert judged.remedy.startswith("use --nixl-backend-params=OBJ:req_checksum=required")
        assert any(request.startswith("HEAD") for request in requests)  # query_memory
        # The remedy helps.
        assert ask(url, (UNCHUNKED,)).verdict is Verdict.PASS


@pytest.mark.long
def test_query_memory_that_finds_nothing_is_named(ask: Ask, server: S3Server) -> None:
    # A key that may not make HEAD requests.
    with faulty_s3(server.url, lambda method, *_: "AccessDenied" if method == "HEAD" else "") as (url, _):
        judged = ask(url)
    assert (judged.verdict, judged.remedy) == (Verdict.FAIL, RIGHTS)


@contextmanager
def stalling(server: S3Server, stalls: Callable[[Message], bool]) -> Iterator[str]:
    """Serve a proxy that does not answer some requests, and yield its URL."""
    ended = threading.Event()

    def refuse(method: str, path: str, headers: Message) -> str:
        if stalls(headers):
            ended.wait()
            return "InternalError"
        return ""

    with faulty_s3(server.url, refuse) as (url, _):
        try:
            yield url
        finally:
            ended.set()


@pytest.mark.long
def test_server_that_stops_while_nixl_waits_is_named(
    ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ASK_SECONDS", 0.5)
    stopped: list[bool] = []

    def stalls(headers: Message) -> bool:
        if "x-amz-trailer" in headers:
            monkeypatch.setattr(object_store, "CLIENT_SECONDS", 1.0)
            stopped.append(True)
        return bool(stopped)

    with stalling(server, stalls) as url:
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert judged.reason == f"the S3 server {url} did not answer within 1 s"
    assert "check that the server runs" in judged.remedy
