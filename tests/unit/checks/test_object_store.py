# SPDX-License-Identifier: Apache-2.0
"""The check ``object-store`` on the real NIXL and moto, and with each fault that it is for."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from helpers.s3 import KEYS, S3Server, use_s3
from helpers.s3_faults import faulty_s3

from pytest_nixl.checks.storage import check as object_store
from pytest_nixl.checks.storage.check import judge_object_store
from pytest_nixl.core.extras import pip_install
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.worker.s3 import ObjectClient
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError

Ask = Callable[..., Judgement]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    s3_server = S3Server()
    yield s3_server
    assert s3_server.keys == []
    s3_server.kill()


@pytest.fixture
def ask(make_settings: Callable[..., Settings], server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that makes the check with parameters of OBJ, after it set variables."""

    def ask(url: str = "", parameters: tuple[BackendParameter, ...] = (), **variables: str) -> Judgement:
        use_s3(monkeypatch, url or server.url)
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        settings = make_settings(backend=("OBJ",), backend_params=parameters)
        with Agents(LocalHost(supervisor()), settings) as agents:
            return judge_object_store(agents, settings)

    return ask


@pytest.mark.long
def test_good_server_passes_and_keeps_nothing(ask: Ask, server: S3Server) -> None:
    judged = ask()
    assert judged.verdict is Verdict.PASS, judged.reason
    assert f"the S3 server {server.url} stores, returns and deletes objects of bucket bucket" in judged.reason
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
    unchunked = BackendParameter("OBJ", "req_checksum", "required")  # moto reads no checksums of an unsigned request
    with recorded(server) as (url, signed):
        judged = ask(url, (unchunked,), AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", **pod)
    assert judged.verdict is Verdict.PASS, judged.reason
    assert "Botocore ASIA us-east-1" in signed, "signed with the temporary key of the role"
    assert "Botocore" not in signed


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "no AWS credentials: the variables"),
        ({"AWS_PROFILE": "absent"}, "AWS credentials cannot be read: The config profile (absent) could not be found"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/absent", "AWS_ROLE_ARN": "arn:aws:iam::1:role/pod"}, "directory: '/absent'"),
    ],
    ids=["none", "profile", "token"],
)
def test_missing_credentials_are_named(ask: Ask, variables: dict[str, str], reason: str) -> None:
    judged = ask(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", **variables)
    assert judged.verdict is Verdict.FAIL
    assert reason in judged.reason
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in judged.remedy


def test_proxy_of_the_variables_is_not_asked(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, server.url)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with contextlib.closing(ObjectClient.of({})) as client:
        client.probe("key")


def test_missing_client_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    judged = ask()
    assert judged.verdict is Verdict.FAIL
    assert judged.reason.startswith("objects are compared with AWS's client for Python, but botocore")
    assert judged.remedy == f"run {pip_install('s3')} in the environment of every rank"


def test_bucket_of_another_region_is_not_followed(ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agents, "start", _never)
    with faulty_s3(server.url, lambda *_: "PermanentRedirect") as (url, requests):
        judged = ask(url)
    assert "answered PermanentRedirect" in judged.reason
    assert [request.partition(" ")[0] for request in requests] == ["PUT"]


def test_run_without_objects_is_not_asked(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    with Agents(LocalHost(supervisor()), settings) as agents:
        assert judge_object_store(agents, settings).verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("variables", "reason", "remedy"),
    [
        ({"AWS_DEFAULT_BUCKET": "no-bucket"}, "answered NoSuchBucket", "AWS_DEFAULT_BUCKET"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1 cannot be reached", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://no-host.invalid:80"}, "does not resolve", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "https"}, "does not speak TLS", "write http://"),
        ({"AWS_DEFAULT_BUCKET": ""}, "no bucket is named", "AWS_DEFAULT_BUCKET="),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "missing: AWS_SECRET_ACCESS_KEY", "set AWS_ACCESS_KEY_ID"),
    ],
    ids=["bucket", "closed-port", "host", "tls", "no-bucket", "no-key"],
)
def test_fault_is_named_before_nixl_is_loaded(
    ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str, remedy: str
) -> None:
    monkeypatch.setattr(Agents, "start", _never)
    judged = ask(**{n: server.url.replace("http", "https") if v == "https" else v for n, v in variables.items()})
    assert judged.verdict is Verdict.FAIL
    assert reason in judged.reason
    assert remedy in judged.remedy


def _never(*_: Any, **__: Any) -> NixlAgent:
    raise AssertionError("NIXL is not needed to find this fault")


def test_credentials_that_a_real_server_refuses_are_named(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = S3Server(INITIAL_NO_AUTH_ACTION_COUNT="1")  # the first action creates the bucket
    try:
        use_s3(monkeypatch, strict.url)
        settings = make_settings(backend=("OBJ",))
        with Agents(LocalHost(supervisor()), settings) as agents:
            judged = judge_object_store(agents, settings)
    finally:
        strict.kill()
    assert judged.verdict is Verdict.FAIL
    assert "answered InvalidAccessKeyId to PUT of an object in bucket bucket" in judged.reason
    assert "AWS_ACCESS_KEY_ID" in judged.remedy


def region_of(headers: Message) -> str:
    return str(headers["authorization"]).split("/")[2]


@pytest.mark.parametrize(
    ("refuse", "skew", "reason", "remedy"),
    [
        # A bucket of another region, as AWS refuses the region of a signature.
        (lambda *args: "" if region_of(args[2]) == "eu-west-1" else "AuthorizationHeaderMalformed", 0,
         "answered AuthorizationHeaderMalformed", "AWS_DEFAULT_REGION"),
        (lambda *_: "SlowDown", 0, "answered SlowDown", "limits requests"),
        (lambda *_: "RequestTimeTooSkewed", 4000, "clock is 4000 s ahead of this host's, and such", "chronyc"),
        # As servers that find the time by the signature.
        (lambda *_: "SignatureDoesNotMatch", -4000, "clock is 4000 s behind this host's, and such", "chronyc"),
        (lambda *_: "SignatureDoesNotMatch", 0, "answered SignatureDoesNotMatch", "correct AWS_SECRET_ACCESS_KEY"),
    ],
    ids=["region", "busy", "clock", "clock-by-signature", "secret"],
)  # fmt: skip
def test_fault_of_other_servers_is_named_before_nixl_is_loaded(
    ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch, refuse: Any, skew: float, reason: str, remedy: str
) -> None:
    monkeypatch.setattr(Agents, "start", _never)
    monkeypatch.setattr(object_store, "_skew", _rounded(object_store._skew))
    with faulty_s3(server.url, refuse, skew=skew) as (url, _):
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert reason in judged.reason
    assert remedy in judged.remedy


def _rounded(real: Callable[[float], str]) -> Callable[[float], str]:
    """Round the skew, because the answer took time."""
    return lambda ahead: real(round(ahead, -3))


def test_clock_that_runs_away_is_a_warning(ask: Ask, server: S3Server) -> None:
    with faulty_s3(server.url, skew=-500) as (url, _):
        judged = ask(url)
    assert judged.verdict is Verdict.WARN
    assert "behind this host's; such servers refuse more than 900 s" in judged.reason


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
        assert ask(url, (BackendParameter("OBJ", "req_checksum", "required"),)).verdict is Verdict.PASS


@pytest.mark.long
def test_server_that_fails_nixl_alone_says_so(ask: Ask, server: S3Server) -> None:
    def refuse(method: str, path: str, headers: Message) -> str:
        return "InvalidArgument" if "aws-sdk" in headers.get("user-agent", "") and method == "PUT" else ""

    with faulty_s3(server.url, refuse) as (url, _):
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert "NIXL_ERR_BACKEND" in judged.reason
    assert "another client stores, reads and deletes objects" in judged.reason
    assert "NIXL_LOG_LEVEL=debug" in judged.remedy


@pytest.mark.long
def test_server_that_fails_after_nixl_began_is_the_cause(ask: Ask, server: S3Server) -> None:
    began: list[str] = []

    def refuse(method: str, path: str, headers: Message) -> str:
        began.extend([path] if "x-amz-trailer" in headers else [])
        return "InternalError" if began else ""

    with faulty_s3(server.url, refuse) as (url, _):
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert "answered InternalError to PUT" in judged.reason
    server.client.delete_object(Bucket="bucket", Key=began[0].removeprefix("/bucket/"))


@pytest.mark.long
def test_query_memory_that_finds_nothing_is_named(ask: Ask, server: S3Server) -> None:
    # A key that may not make HEAD requests.
    with faulty_s3(server.url, lambda method, *_: "AccessDenied" if method == "HEAD" else "") as (url, _):
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert "query_memory" in judged.reason


@pytest.mark.long
def test_wrong_bytes_are_corruption(ask: Ask, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ObjectClient.get
    monkeypatch.setattr(
        ObjectClient, "get", lambda *args: bytes(args[3]) if args[3] == object_store.SIZE else get(*args)
    )
    judged = ask()
    assert judged.verdict is Verdict.CORRUPT
    assert "NIXL's WRITE of object pytest-nixl/" in judged.reason


def test_object_that_is_missing_fails_a_read_quickly_and_query_memory_knows_it(
    make_settings: Callable[..., Settings], server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, server.url)
    with Agents(LocalHost(supervisor()), make_settings(backend=("OBJ",))) as agents:
        agent = agents.start(backends=["OBJ"], progress_thread=False)
        buffer = agent.allocate(object_store.SIZE)
        agent.register(buffer)
        agent.register_memory([(0, object_store.SIZE, 1, "absent")], "OBJ")
        assert agent.query_memory([(0, 1, 0, "absent")], "OBJ", "OBJ") == [None]
        began = time.monotonic()
        with pytest.raises(NixlError, match="NIXL_ERR_BACKEND"):
            object_store._transfer(agent, "OBJ", "READ", buffer.descriptor(), lambda _: None)
        assert time.monotonic() - began < object_store.SECONDS + 30
        agent.worker.kill()
    assert os.environ["AWS_ACCESS_KEY_ID"] == KEYS["AWS_ACCESS_KEY_ID"]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short deadlines, none of which a working server or NIXL must keep."""
    monkeypatch.setattr(object_store, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(object_store, "SECONDS", 8.0)


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
    ask: Ask, server: S3Server, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.long
def test_parameter_that_helps_nixl_is_found_while_nixl_still_waits(ask: Ask, server: S3Server, soon: None) -> None:
    with stalling(server, lambda headers: "x-amz-trailer" in headers) as url:
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert "NIXL's WRITE of an object of 65536 bytes is not done after " in judged.reason
    assert "so does NIXL with req_checksum=required" in judged.reason
    assert judged.remedy.startswith("use --nixl-backend-params=OBJ:req_checksum=required")


@pytest.mark.long
def test_server_that_only_nixl_waits_for_is_told_at_the_deadline(
    ask: Ask, server: S3Server, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "TRIAL_SECONDS", 1.0)
    with stalling(server, lambda headers: "aws-sdk" in headers.get("user-agent", "")) as url:
        judged = ask(url)
    assert judged.verdict is Verdict.FAIL
    assert "NIXL's WRITE of an object of 65536 bytes is not done after " in judged.reason
    assert "another client stores, reads and deletes objects" in judged.reason
    assert "NIXL_LOG_LEVEL=debug" in judged.remedy
