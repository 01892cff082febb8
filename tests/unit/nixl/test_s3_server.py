# SPDX-License-Identifier: Apache-2.0
"""The fixture ``nixl_s3`` in real runs of pytest, and its bucket on an embedded, an external and no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path

import boto3
import pytest
from helpers.etcd import container_names
from helpers.moto_image import moto_image
from helpers.pytester_run import run_pytest
from helpers.s3 import KEYS, S3Server, use_s3
from helpers.s3_faults import faulty_s3

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.nixl import s3_server
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore
from pytest_nixl.processes.container import Container, ContainerError
from pytest_nixl.processes.supervisor import supervisor

#: A test that writes what it got to ``told-N``.
TEST = """
    import json, pathlib, pytest
    @pytest.mark.parametrize("number", range(2))
    def test_it(nixl_s3, number):
        nixl_s3.client.put(f"a & b/{number}", b"content")
        told = [nixl_s3.kind, nixl_s3.endpoint, nixl_s3.bucket, list(nixl_s3.client.keys())]
        pathlib.Path(f"told-{number}").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    started = S3Server()
    yield started
    started.kill()


def run(pytester: pytest.Pytester, *arguments: str) -> tuple[pytest.RunResult, Sequence[Path]]:
    pytester.makepyfile(test_inner=TEST)
    done = run_pytest(pytester, *arguments, env={"AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": ""})
    return done, sorted(pytester.path.glob("told-*"))


def buckets(server: S3Server) -> list[str]:
    return [bucket["Name"] for bucket in server.client.list_buckets()["Buckets"]]


@pytest.mark.long
def test_embedded_server_is_one_for_the_session_and_ends_with_it(pytester: pytest.Pytester) -> None:
    done, listing = run(pytester)
    done.assert_outcomes(passed=2)
    first, second = (json.loads(path.read_text()) for path in listing)
    assert first[0] == "embedded"
    assert first[:3] == second[:3]
    store = ObjectStore("http", first[1].removeprefix("http://"), first[2], "us-east-1")
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        ObjectClient(store, ("any", "key")).keys()


def test_bucket_of_another_region_is_created_there(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
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
        bucket.client.put("a & b", b"content")
        assert bucket.client.get("a & b", 2, 3) == b"nte"
        assert bucket.client.keys() == ["a & b"]
    assert "x-amz-content-sha256" in names
    assert not [name for name in names if "checksum" in name]


def test_more_objects_than_one_list_names_are_removed(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "http://127.0.0.1:1")
    listed = ObjectClient.keys
    monkeypatch.setattr(ObjectClient, "keys", lambda client: listed(client)[:2])
    with s3_server.open_bucket(server.url, supervisor) as bucket:
        assert (bucket.kind, bucket.endpoint) == ("external", server.url)
        assert bucket.bucket.startswith("pytest-nixl-")
        for number in range(5):
            bucket.client.put(str(number), b"x")
    assert buckets(server) == ["bucket"]


def test_server_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, "http://127.0.0.1:1")
    message = "the S3 server http://127.0.0.1:1 cannot be reached"
    with pytest.raises(ObjectStoreError, match=message) as caught, s3_server.open_bucket("", supervisor):
        pass
    assert caught.value.remedy


@pytest.mark.parametrize("missing_package", ["moto", "flask"])
def test_moto_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, missing_package: str) -> None:
    use_s3(monkeypatch, "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing_package else object())
    with pytest.raises(NotApplicableError, match="moto is not installed") as missing:
        s3_server.open_bucket("", supervisor).__enter__()
    assert pip_install("s3") in missing.value.remedy
    with pytest.raises(ObjectStoreError, match="--nixl-s3=embedded needs moto"):
        s3_server.open_bucket("embedded", supervisor).__enter__()


class Moto:
    """A container or a process with a server that a test controls."""

    address = "127.0.0.1:1"

    def __init__(self, directory: Path, output: str) -> None:
        self.directory, self.output = directory, output
        self.log: list[object] = []

    def spawn(self, argv: Sequence[str], *, log: str) -> int:
        self.log.append(tuple(argv))
        self.path = self.directory / log
        self.path.write_text(self.output)
        return 7

    def alive(self, pid: int) -> bool:
        return pid == 7 and "Running" in self.output

    def how_ended(self, pid: int) -> str:
        return f"ended {pid}"

    def stop(self, pid: int) -> None:
        self.log.append(f"stop {pid}")

    def remove(self) -> None:
        self.log.append("remove")


STARTED = "Running on http://127.0.0.1:\nRunning on http://127.0.0.1:70/\n * Running on http://127.0.0.1:5001\nPress\n"
COMMAND = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0")


@pytest.mark.parametrize("kind", ["embedded", "container", "container:mine/moto:1"])
def test_a_server_of_the_run_has_a_bucket_and_a_key_of_its_own_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_s3(monkeypatch, "")
    moto = Moto(tmp_path, STARTED)
    monkeypatch.setattr(ObjectClient, "create_bucket", lambda client: moto.log.append(client.store.bucket))
    monkeypatch.setattr(ObjectClient, "remove_bucket", lambda client: pytest.fail("it ends with its server"))

    def start(program: object, image: str, client: object, *, pull: bool) -> Moto:
        moto.log.append((program, image, client is moto, pull))
        return moto

    monkeypatch.setattr(Container, "start", start)
    opened = s3_server.open_bucket(kind, lambda: moto)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError), opened as bucket:
        address = "127.0.0.1:5001" if kind == "embedded" else moto.address
        assert (bucket.kind, bucket.endpoint) == (kind.partition(":")[0], f"http://{address}")
        variables = bucket.environment
        same = {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}
        assert {variables[name] for name in same} == {bucket.endpoint}
        assert variables["AWS_REGION"] == variables["AWS_DEFAULT_REGION"] == "us-east-1"
        assert variables["AWS_DEFAULT_BUCKET"] == bucket.bucket == bucket.parameters["bucket"]
        keys = [variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        assert [bucket.parameters[name] for name in ("access_key", "secret_key")] == keys
        assert [len(key) for key in keys] == [16, 32]
        assert "ca_bundle" not in bucket.parameters
        raise ZeroDivisionError  # it ends with a test that fails too
    if kind == "embedded":
        assert moto.log == [COMMAND, bucket.bucket, "stop 7"]
        assert not moto.path.exists()
    else:
        image = kind.partition(":")[2] or s3_server.IMAGE
        assert moto.log == [(s3_server.MOTO, image, True, True), bucket.bucket, "remove"]


def test_a_server_of_the_run_that_does_not_start_is_named_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, pull: bool) -> None:
        raise ContainerError("no engine", "start one", "lines", cause="no-engine")

    monkeypatch.setattr(Container, "start", refuse)
    moto = Moto(tmp_path, "\n".join(map(str, range(12))))
    for kind, whole in (
        ("container", ("--nixl-s3=container: no engine", "start one; or use --nixl-s3=embedded", "lines")),
        ("embedded", ("the embedded S3 server (moto) did not start: ended 7",
                      f"read its log, and run {pip_install('s3')}", "\n".join(map(str, range(2, 12))))),
    ):  # fmt: skip
        with pytest.raises(ObjectStoreError) as caught, s3_server.open_bucket(kind, lambda: moto):  # type: ignore[arg-type, return-value]
            pass
        assert (caught.value.reason, caught.value.remedy, caught.value.detail) == whole
    assert moto.log == [COMMAND, "stop 7"]


@pytest.mark.parametrize(
    ("parameters", "variables", "url", "region"),
    [
        ({}, {}, "https://s3.us-east-1.amazonaws.com", "us-east-1"),
        ({}, {"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", "eu-west-1"),
        ({"region": "us-west-2"}, {"AWS_REGION": "eu-west-1"}, "https://s3.us-west-2.amazonaws.com", "us-west-2"),
        ({}, {"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:2"}, "http://b:2", "us-east-1"),
        ({"endpoint_override": "c:3"}, {"AWS_ENDPOINT_URL": "http://a:1"}, "https://c:3", "us-east-1"),
        ({"endpoint_override": "c:3", "scheme": "http"}, {}, "http://c:3", "us-east-1"),
        ({"endpoint_override": "http://d:4/"}, {"AWS_ENDPOINT_URL": "http://a:1"}, "http://d:4", "us-east-1"),
    ],
)
def test_a_bucket_is_where_parameters_or_else_variables_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: dict[str, str], variables: dict[str, str], url: str,
    region: str,
) -> None:  # fmt: skip
    use_s3(monkeypatch, "")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = ObjectClient.of({"bucket": "b", **parameters})
    assert (client.store.url, client.store.region, client.store.bucket, client.space) == (url, region, "b", "bucket b")
    assert (client.server, client.transport) == (f"the S3 server {url}", url.replace("://", "/"))
    client.close()


@pytest.mark.long
def test_server_in_a_container_is_removed_after_a_test_that_fails(pytester: pytest.Pytester) -> None:
    image = moto_image()
    before = set(container_names())
    pytester.makepyfile(test_also="def test_it(nixl_s3):\n    assert False")
    done, listing = run(pytester, f"--nixl-s3=container:{image}")
    done.assert_outcomes(passed=2, failed=1)
    first, second = (json.loads(path.read_text()) for path in listing)
    assert first[0] == "container"
    assert first[:3] == second[:3]
    assert second[3] == ["a & b/0", "a & b/1"]
    assert set(container_names()) <= before
