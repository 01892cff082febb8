# SPDX-License-Identifier: Apache-2.0
"""The way from an object to a file by agents with several backends each, on the real NIXL and moto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
from helpers.cli_run import Finished, run

from pytest_nixl.checks.metadata import hierarchy
from pytest_nixl.checks.metadata.hierarchy import SIZE, Leg, add_storage, judge_legs, move_through
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.wire import Ref
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.nixl.s3_server import S3Bucket, open_bucket
from pytest_nixl.nixl.worker.object_stores import ObjectStoreError
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError

NAMES = ["object to host memory", "host memory to host memory", "host memory to file"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Bucket]:
    with open_bucket("embedded", supervisor) as opened:
        yield opened
        assert opened.client.keys() == []


@pytest.fixture
def pair(make_settings: Callable[..., Settings], bucket: S3Bucket) -> Iterator[tuple[NixlAgent, NixlAgent]]:
    """A reader and a writer with UCX."""
    with Agents(LocalHost(supervisor()), make_settings()) as agents:
        reader, writer = agents.start_each(
            ["initiator", "target"], environment={**bucket.environment}, progress_thread=None
        )
        yield reader, writer


@pytest.mark.long
@pytest.mark.parametrize("same_agent", [False, True], ids=["two agents", "one agent"])
def test_bytes_are_right_after_each_leg(pair: tuple[NixlAgent, NixlAgent], bucket: S3Bucket, same_agent: bool) -> None:
    reader, writer = pair[0], pair[0 if same_agent else 1]
    add_storage(reader, writer, bucket)
    legs = move_through(reader, writer, "UCX", bucket, directory="", seconds=120)
    assert [(leg.name, leg.backend, leg.used, leg.wrong) for leg in legs] == [
        (NAMES[0], "OBJ", "OBJ", None),
        (NAMES[1], "UCX", "UCX", None),
        (NAMES[2], "POSIX", "POSIX", None),
    ]
    assert all(leg.seconds > 0 for leg in legs)
    judged = judge_legs(legs)
    assert judged.verdict is Verdict.PASS
    assert f"{SIZE} bytes are right after each leg: {NAMES[0]} by OBJ in " in judged.reason


@pytest.mark.long
def test_leg_that_delivers_a_wrong_byte_is_named(
    pair: tuple[NixlAgent, NixlAgent], bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Buffer.read

    def flipped(buffer: Buffer, *arguments: Any) -> bytes:
        content = bytearray(read(buffer, *arguments))
        if buffer.memory == "FILE":
            content[77] ^= 1
        return bytes(content)

    monkeypatch.setattr(Buffer, "read", flipped)
    add_storage(*pair, bucket)
    judged = judge_legs(move_through(*pair, "UCX", bucket, directory="", seconds=120))
    assert judged.verdict is Verdict.CORRUPT
    assert f"{NAMES[2]} by POSIX: of {SIZE} bytes the first wrong one is at offset 77" in judged.reason


@pytest.mark.long
@pytest.mark.parametrize(("delivers", "wrong"), [(True, 5), (False, None)], ids=["delivered", "only posted"])
def test_bytes_may_arrive_after_a_transfer_that_was_only_posted(
    delivers: bool,
    wrong: int | None,
    pair: tuple[NixlAgent, NixlAgent],
    bucket: S3Bucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend is a double in that its first bytes arrive late, as those of LIBFABRIC's WRITE do."""
    read, reads = Buffer.read, 0

    def late(buffer: Buffer, *arguments: Any) -> bytes:
        nonlocal reads
        reads += buffer.memory == "DRAM"
        content = bytearray(read(buffer, *arguments))
        content[5] ^= buffer.memory == "DRAM" and reads in (2, 3)
        return bytes(content)

    monkeypatch.setattr(Buffer, "read", late)
    monkeypatch.setattr(type(BACKENDS["UCX"]), "COMPLETION_IMPLIES_DELIVERY", delivers)
    agent = pair[0]
    add_storage(agent, agent, bucket)
    legs = move_through(agent, agent, "UCX", bucket, directory="", seconds=120)
    assert [leg.wrong for leg in legs] == [None, wrong, None]


@pytest.mark.long
def test_the_suite_passes_with_its_own_server() -> None:
    done = run("suites/metadata/test_hierarchy.py", "--nixl-level=extended", "--nixl-s3=embedded", "-v")
    assert done.code == 0, done.output
    assert "2 PASS" in done.output
    for agents in ("2 agents", "1 agent"):
        assert f"{agents}: {SIZE} bytes are right after each leg: {NAMES[0]} by OBJ in " in done.output


@pytest.mark.long
def test_the_suite_passes_on_two_ranks(nixl_private_etcd: PrivateEtcd) -> None:
    def rank(_: int) -> Finished:
        return run(
            "suites/metadata/test_hierarchy.py", "--nixl-level=extended", "--nixl-s3=embedded", "--nixl-ranks=2",
            f"--nixl-etcd={nixl_private_etcd.endpoint}", env={"NIXL_GROUP_TOKEN": "of these two ranks and no other"},
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, range(2)))
    assert [done.code for done in ranks] == [0, 0], ranks[0].output + ranks[1].output
    assert all("NIXL verdict: PASS (2 PASS; 0 rows measured)" in done.output for done in ranks)


def test_leg_that_another_backend_moved_fails() -> None:
    good = [
        Leg(name, backend, backend, 0.1, None) for name, backend in zip(NAMES, ("OBJ", "UCX", "POSIX"), strict=True)
    ]
    assert judge_legs(good).verdict is Verdict.PASS
    judged = judge_legs([good[0], replace(good[1], used="LIBFABRIC"), good[2]])
    assert judged.verdict is Verdict.FAIL
    assert "NIXL uses LIBFABRIC, although UCX was chosen" in judged.reason
    assert judge_legs([replace(good[0], wrong=0), *good[1:]]).verdict is Verdict.CORRUPT


def test_nixl_without_the_plugin_is_not_asked(
    pair: tuple[NixlAgent, NixlAgent], bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NixlAgent, "get_plugin_list", lambda _: ["UCX", "POSIX"])
    with pytest.raises(NotApplicableError, match="no plugin OBJ: it has UCX, POSIX"):
        add_storage(*pair, bucket)


class Stalled:
    """A double of an agent whose transfer never ends, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def transfer(self, handle: Ref) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Ref) -> str:
        if self._error is not None:
            raise self._error
        return "PROC"


@pytest.mark.parametrize("error", [None, NixlError("it failed", "", "", "nixlBackendError")], ids=["stalls", "fails"])
def test_a_server_with_a_fault_is_named_before_the_leg_is_late(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> None:
        raise ObjectStoreError("the server has a fault")

    if error is None:
        monkeypatch.setattr(hierarchy, "ASK_SECONDS", 0.01)
    with pytest.raises(ObjectStoreError, match="the server has a fault"):
        hierarchy._complete(cast(NixlAgent, Stalled(error)), Ref(1, "handle"), None, NAMES[0], 300, ask)
