# SPDX-License-Identifier: Apache-2.0
"""The fixture ``nixl_s3`` in real runs of pytest: embedded, external, with xdist, and with bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path

import boto3
import pytest
from helpers.cli_run import eventually
from helpers.etcd import container_names, empty_image
from helpers.moto_image import moto_image
from helpers.pytester_run import run_pytest
from helpers.s3 import KEYS, S3Server, use_s3
from helpers.s3_faults import faulty_s3

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.nixl import s3_server
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore, parse_server
from pytest_nixl.processes.supervisor import supervisor

#: A test that writes what it got to ``told-N``, and moves an object by boto3 and by the fixture's own client.
TEST = """
    import json, pathlib, boto3, pytest
    @pytest.mark.parametrize("number", range(2))
    def test_it(nixl_s3, number):
        told = nixl_s3.environment
        client = boto3.client(
            "s3", endpoint_url=told["AWS_ENDPOINT_URL"], region_name=told["AWS_REGION"],
            aws_access_key_id=told["AWS_ACCESS_KEY_ID"], aws_secret_access_key=told["AWS_SECRET_ACCESS_KEY"],
        )
        client.put_object(Bucket=nixl_s3.bucket, Key=f"a & b/{number}", Body=b"content")
        assert nixl_s3.client.get(f"a & b/{number}", 0, 7) == b"content"
        assert f"a & b/{number}" in nixl_s3.client.keys()
        told = [nixl_s3.kind, nixl_s3.endpoint, nixl_s3.bucket, list(nixl_s3.client.keys())]
        pathlib.Path(f"told-{number}").write_text(json.dumps(told))
"""
#: What no test may inherit from the machine.
NO_AWS = {"AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": ""}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    started = S3Server()
    yield started
    started.kill()


def run(
    pytester: pytest.Pytester, *arguments: str, env: dict[str, str] | None = None, in_process: bool = True
) -> tuple[pytest.RunResult, Sequence[Path]]:
    pytester.makepyfile(test_inner=TEST)
    done = run_pytest(pytester, *arguments, env={**NO_AWS, **(env or {})}, in_process=in_process)
    return done, sorted(pytester.path.glob("told-*"))


def buckets(server: S3Server) -> list[str]:
    return [bucket["Name"] for bucket in server.client.list_buckets()["Buckets"]]


@pytest.mark.long
def test_embedded_server_is_one_for_the_session_and_ends_with_it(pytester: pytest.Pytester) -> None:
    done, listing = run(pytester, in_process=False)
    done.assert_outcomes(passed=2)
    first, second = (json.loads(path.read_text()) for path in listing)
    assert first[0] == "embedded"
    assert first[:3] == second[:3]
    store = ObjectStore("http", first[1].removeprefix("http://"), first[2], "us-east-1")
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        ObjectClient(store, ("any", "key")).keys()


@pytest.mark.long
def test_each_worker_of_xdist_has_its_own_server(pytester: pytest.Pytester) -> None:
    done, listing = run(pytester, "-n2", "--dist=load", in_process=False)
    done.assert_outcomes(passed=2)
    first, other = (json.loads(path.read_text()) for path in listing)
    assert first[1] != other[1]


@pytest.mark.long
@pytest.mark.parametrize("how", ["option", "ini", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_bucket_of_an_existing_server_is_removed_with_its_objects(
    pytester: pytest.Pytester, server: S3Server, how: str
) -> None:
    arguments = [f"--nixl-s3={server.url}"] if how == "option" else []
    if how == "ini":
        pytester.makeini(f"[pytest]\nnixl_s3 = {server.url}")
    done, listing = run(pytester, *arguments, env={**KEYS, **({how: server.url} if how.startswith("AWS") else {})})
    done.assert_outcomes(passed=2)
    kind, url, bucket, keys = json.loads(listing[1].read_text())
    assert (kind, url, keys) == ("external", server.url, ["a & b/0", "a & b/1"])
    assert bucket.startswith("pytest-nixl-")
    assert buckets(server) == ["bucket"]


def test_bucket_of_another_region_is_created_there(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, server.url)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with s3_server.open_bucket("", supervisor) as bucket:
        where = boto3.client("s3", endpoint_url=server.url, aws_access_key_id="a", aws_secret_access_key="b")
        assert where.get_bucket_location(Bucket=bucket.bucket)["LocationConstraint"] == "eu-west-1"
        assert bucket.parameters == {
            "endpoint_override": server.url.removeprefix("http://"),
            "scheme": "http",
            "bucket": bucket.bucket,
            "region": "eu-west-1",
            "access_key": KEYS["AWS_ACCESS_KEY_ID"],
            "secret_key": KEYS["AWS_SECRET_ACCESS_KEY"],
            "use_virtual_addressing": "false",
        }
    assert buckets(server) == ["bucket"]


def test_no_checksum_is_sent_or_asked_for(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "")
    names: set[str] = set()

    def read_names(method: str, path: str, headers: Message) -> str:
        names.update(map(str.lower, headers))
        return ""

    with faulty_s3(server.url, read_names) as (url, _), s3_server.open_bucket(url, supervisor) as bucket:
        bucket.client.put("x", b"1")
        assert bucket.client.get("x", 0, 1) == b"1"
    assert "x-amz-content-sha256" in names
    assert not [name for name in names if "checksum" in name]


def test_part_of_an_object_is_read(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "")
    with s3_server.open_bucket(server.url, supervisor) as bucket:
        bucket.client.put("x", b"0123456789")
        assert bucket.client.get("x", 2, 3) == b"234"


def test_more_objects_than_one_list_names_are_removed(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "")
    listed = ObjectClient.keys
    monkeypatch.setattr(ObjectClient, "keys", lambda client: listed(client)[:2])
    with s3_server.open_bucket(server.url, supervisor) as bucket:
        for number in range(5):
            bucket.client.put(str(number), b"x")
    assert buckets(server) == ["bucket"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ftp://host", "'ftp://host' is not the URL of an S3 server"),
        ("http://host/path", "'http://host/path' is not the URL of an S3 server"),
        ("minio", "'minio' is not the URL of an S3 server"),
        ("http://user:secret@host", "the URL has a user (not shown)"),
        ("container:", "'' is not an image reference"),
        ("container:an image", "'an image' is not an image reference"),
    ],
)
def test_bad_option_is_one_sentence(pytester: pytest.Pytester, value: str, message: str) -> None:
    done, _ = run(pytester, f"--nixl-s3={value}")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    [line] = [text for text in done.errlines if text]
    assert message in line
    assert "expected http://HOST[:PORT], https://HOST[:PORT], embedded, container, or container:IMAGE" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "the S3 server http://127.0.0.1:1 cannot be reached"),
        ({"AWS_ENDPOINT_URL": "host:1/x"}, "the endpoint 'https://host:1/x' is not http"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": ""}, "no AWS credentials"),
    ],
)
def test_server_that_cannot_be_used_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError) as caught, s3_server.open_bucket("", supervisor):
        pass
    assert message in caught.value.reason
    assert caught.value.remedy


def test_moto_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotApplicableError, match="moto is not installed") as missing:
        s3_server.open_bucket("", supervisor).__enter__()
    assert pip_install("s3") in missing.value.remedy
    with pytest.raises(ObjectStoreError, match="--nixl-s3=embedded needs moto"):
        s3_server.open_bucket("embedded", supervisor).__enter__()


def test_embedded_server_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ObjectStoreError, match="did not start: ended with exit code 1"):
        s3_server.open_bucket("embedded", supervisor).__enter__()


@pytest.mark.long
def test_embedded_server_ends_although_its_test_fails() -> None:
    with pytest.raises(ZeroDivisionError), s3_server.open_bucket("embedded", supervisor) as bucket:
        raise ZeroDivisionError
    client = bucket.client

    def gone() -> bool:
        try:
            client.keys()
        except ObjectStoreError:
            return True
        return False

    assert eventually(gone)


def test_url_may_end_with_a_slash() -> None:
    assert parse_server("https://s3.example:9000/") == ("https", "s3.example:9000")


@pytest.mark.long
@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.whole), True], ids=["healthy", "test fails"])
def test_server_in_a_container_is_removed_at_the_end(pytester: pytest.Pytester, dies: bool) -> None:
    image = moto_image()
    before = set(container_names())
    pytester.makepyfile(test_also=f"def test_it(nixl_s3):\n    assert not {dies}")
    done, listing = run(pytester, f"--nixl-s3=container:{image}", in_process=False)
    done.assert_outcomes(passed=2 if dies else 3, failed=int(dies))
    first, second = (json.loads(path.read_text()) for path in listing)
    assert first[0] == "container"
    assert first[:3] == second[:3]
    assert second[3] == ["a & b/0", "a & b/1"]
    assert set(container_names()) <= before


@pytest.mark.long
def test_container_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("testcontainers")
    with monkeypatch.context() as without:
        without.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        with pytest.raises(ObjectStoreError, match="--nixl-s3=container: no container engine answers") as missing:
            s3_server.open_bucket("container", supervisor).__enter__()
        assert "--nixl-s3=embedded" in missing.value.remedy
    moto_image()
    with pytest.raises(ObjectStoreError, match=r"the image registry\.invalid/moto:v0 is not on this host"):
        s3_server.open_bucket("container:registry.invalid/moto:v0", supervisor).__enter__()
    with empty_image() as image, pytest.raises(ObjectStoreError, match=f"did not start s3 from {image}: "):
        s3_server.open_bucket(f"container:{image}", supervisor).__enter__()
    assert not container_names(supervisor().directory.name)
