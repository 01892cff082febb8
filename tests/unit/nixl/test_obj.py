# SPDX-License-Identifier: Apache-2.0
"""Rows between memory and objects, on the real NIXL and an S3 server (moto), checked with another client (boto3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from helpers.cli_run import run
from helpers.http_double import HttpDouble, answering
from helpers.s3 import S3Server, use_s3

from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.agent_options import BackendParameter
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.nixl.worker.object_stores import BY_CODE, BY_STATUS, UNKNOWN, ObjectStoreError
from pytest_nixl.nixl.worker.s3 import ObjectClient, ObjectStore
from pytest_nixl.processes.worker_errors import WorkerError

OBJ = MemoryPair("DRAM", "OBJ")
BLOCK = 65536
MakePairs = Callable[..., Launches]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    started = S3Server()
    yield started
    started.kill()


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server that AWS's variables name. No object may be left on it."""
    use_s3(monkeypatch, shared_server.url)
    yield shared_server
    assert shared_server.keys == []


def link(pairs: Launches, op: str = "WRITE") -> Link:
    return pairs.link("OBJ", op, OBJ)


@pytest.mark.long
def test_blocks_of_a_kv_cache_move_to_objects(server: S3Server) -> None:
    """Requests of both operations are those to a file, of which test_kv_cache_suite.py has both."""
    small = (
        "--nixl-kv-tokens=16", "--nixl-op=WRITE", "--nixl-warmup=1", "--nixl-iterations=2", "--nixl-duration=10ms",
    )  # fmt: skip
    done = run("suites/kv_cache/test_storage.py", "--nixl-backend=OBJ", "--nixl-level=extended", *small)
    assert "KV blocks in storage: OBJ WRITE DRAM:OBJ over http/" in done.output, done.output
    assert done.output.count(" GB/s in 64 objects of 32KiB") == 1
    assert "NIXL verdict: PASS (1 PASS; 0 rows measured)" in done.output
    assert done.code == 0


@pytest.mark.long
@pytest.mark.parametrize("block", [4096, BLOCK, 3 << 20])
def test_another_client_reads_what_nixl_wrote(server: S3Server, make_pairs: MakePairs, block: int) -> None:
    written = link(make_pairs(blocks=(block,), batch=(2,)))
    with written._transfers(block, 2, 1) as transfers:
        written._fill(2 * block, poison=True)
        written._run("move", transfers, 60)
        source = written.source.read(0, 2 * block)
        bodies = [server.client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in sorted(server.keys)]
    assert b"".join(bodies) == source
    assert len(set(bodies)) == 2


@pytest.mark.long
def test_nixl_reads_what_another_client_wrote(server: S3Server, make_pairs: MakePairs) -> None:
    reading = link(make_pairs(), "READ")
    with reading._transfers(BLOCK, 1, 1) as transfers:
        reading._fill(BLOCK, poison=True)
        [key] = server.keys
        content = os.urandom(BLOCK)
        server.client.put_object(Bucket="bucket", Key=key, Body=content)
        reading._run("move", transfers, 60)
        assert reading.destination.read(0, BLOCK) == content


def test_parameters_say_where_the_objects_are_without_a_variant(
    server: S3Server, make_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_DEFAULT_BUCKET")
    options = {"bucket": "bucket", "endpoint_override": server.url.partition("//")[2], "scheme": "http"}
    expected = tuple(BackendParameter("OBJ", *pair) for pair in sorted({**options, "req_checksum": "required"}.items()))
    moved = link(make_pairs(backend_params=expected))
    assert str(moved.key(BLOCK)) == "OBJ/WRITE/DRAM:OBJ/64KiB/batch1/depth1/0-0/req_checksum=required"
    assert moved.move(BLOCK) is None


def test_object_that_another_program_deletes_is_named(server: S3Server, make_pairs: MakePairs) -> None:
    reading = link(make_pairs(), "READ")
    with pytest.raises(WorkerError) as caught, reading._transfers(BLOCK, 1, 1) as transfers:
        reading._fill(BLOCK, poison=True)
        [key] = server.keys
        server.client.delete_object(Bucket="bucket", Key=key)
        reading._run("move", transfers, 60)
    assert "answered NoSuchKey to GET of an object in bucket bucket" in caught.value.reason
    assert "NIXL_ERR_BACKEND" in caught.value.reason
    assert "write the object before it is read" in caught.value.remedy


def test_a_worker_names_what_is_wrong_with_its_server(
    server: S3Server, make_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pytest's process, ``test_object_store.py`` has this and other faults."""
    monkeypatch.setenv("AWS_DEFAULT_BUCKET", "no-bucket")
    with pytest.raises(WorkerError) as caught:
        link(make_pairs())
    assert "answered NoSuchBucket" in caught.value.reason
    assert "AWS_DEFAULT_BUCKET" in caught.value.remedy


class _Refusing(HttpDouble):
    """A double: moto accepts every key and clock, so this answers with the error code that the path names."""

    def reply(self) -> None:
        code = self.path.partition("?")[0].rpartition("/")[2]
        status, text = (int(code), "") if code.isdigit() else (403, f"<Error><Code>{code}</Code></Error>")
        self.answer(status, text.encode())


def test_each_answer_of_a_server_has_its_own_remedy() -> None:
    faults = {code: (code, fault) for code, fault in BY_CODE.items()}
    faults |= {"503": ("HTTP 503 Service Unavailable", BY_STATUS[503]), "599": ("HTTP 599", UNKNOWN)}
    with answering(_Refusing) as port:
        client = ObjectClient(ObjectStore("http", f"127.0.0.1:{port}", "b", "r"), ("key", "secret"))
        for code, (answer, fault) in faults.items():
            with pytest.raises(ObjectStoreError) as caught:
                client.put(code, b"x")
            reason = f"the S3 server http://127.0.0.1:{port} answered {answer} to PUT of an object in bucket b"
            assert (caught.value.reason, caught.value.remedy, caught.value.kind) == (reason, fault.remedy, fault.kind)
