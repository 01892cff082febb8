# SPDX-License-Identifier: Apache-2.0
"""An etcd of three members, one stopped with SIGSTOP: it accepts connections, but answers nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.cli_run import command, environment, eventually
from helpers.etcd import wait_until
from helpers.three_node import ThreeNodeEtcd

from pytest_nixl.cluster.group import TTL
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.transaction import TransactionResult, absent, delete, get, put, txn
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.long

#: A test that moves bytes between the ranks until the file ``enough`` exists.
MOVING = Path(__file__).parents[2] / "cluster" / "moving.py"


@pytest.fixture
def trio() -> Iterator[ThreeNodeEtcd]:
    with ThreeNodeEtcd(supervisor()) as started:
        yield started


@pytest.fixture
def client(trio: ThreeNodeEtcd) -> Iterator[EtcdClient]:
    with trio.client() as connected:
        yield connected


def in_use(trio: ThreeNodeEtcd, client: EtcdClient) -> int:
    """Return the index of the member that a client uses."""
    return [str(member) for member in trio.members].index(client.endpoint)


def test_every_request_goes_to_a_member_that_answers(trio: ThreeNodeEtcd, client: EtcdClient) -> None:
    client.put("/a", b"1")
    lease = client.lease(60)
    stopped = in_use(trio, client)
    trio.stop(stopped)
    start = time.monotonic()
    # One request of each kind. The client does not know yet that the member is stopped.
    assert lease.refresh() == 60
    assert client.endpoint != str(trio.members[stopped])
    client.put("/a", b"2", lease)
    assert client.get("/a") == b"2"
    done = TransactionResult.of(client.transaction(txn([absent("/b")], [put("/b", b"3"), get("/b")])))
    assert done.succeeded
    assert client.delete("/b")
    # The client waits for the stopped member only once, not once per request.
    assert client.transaction(txn([], [delete("/a")]))
    # This includes the election of a new leader on a busy machine, if the leader was stopped.
    assert time.monotonic() - start < 60


def test_a_watch_continues_at_another_member_without_loss(trio: ThreeNodeEtcd, client: EtcdClient) -> None:
    client.put("/w/0", b"")
    since = TransactionResult.of(client.transaction(txn([], [get("/w/0")]))).revision + 1
    healthy_members = [member for place, member in enumerate(trio.members) if place != in_use(trio, client)]

    events: list[str] = []

    def write() -> None:
        with connect(healthy_members) as writer:
            writer.put("/w/1", b"")
            wait_until(lambda: events == ["/w/1"], 60, "the watch has an event of the member in use")
            trio.stop(in_use(trio, client))
            for number in range(2, 11):
                writer.put(f"/w/{number}", b"")

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for event in client.watch(Watched("/w/", since, prefix=True), seconds=60):
            events.append(event.item.key)
            if len(events) == 10:
                break
        writing.result()
    assert events == [f"/w/{number}" for number in range(1, 11)]


@pytest.mark.whole
def test_a_run_of_two_ranks_survives_a_stopped_etcd_member(trio: ThreeNodeEtcd, tmp_path: Path) -> None:
    """Bytes move before the stop, while the member is stopped for longer than two lease times, and afterwards."""
    with trio.client() as ended, ExitStack() as stack:
        runs = []
        for rank in range(2):
            log = stack.enter_context(open(tmp_path / f"rank-{rank}.log", "wb"))
            argv = command(
                str(MOVING), f"--nixl-etcd={trio.endpoint}", "--nixl-ranks=2", f"--nixl-rank={rank}",
                "--nixl-blocks=4KiB", "--nixl-timeout=60s",
            )  # fmt: skip
            env = environment(MOVING=str(tmp_path), UCX_TLS="tcp")
            runs.append(subprocess.Popen(argv, cwd=MOVING.parents[2], env=env, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(runs[-1].wait)
            stack.callback(runs[-1].kill)

        def output() -> str:
            return "\n".join((tmp_path / f"rank-{rank}.log").read_text()[-3000:] for rank in range(2))

        def bytes_move() -> None:
            (tmp_path / "begun").unlink(missing_ok=True)
            started = eventually((tmp_path / "begun").exists, 120)
            assert started, output()

        bytes_move()
        trio.stop(0)
        until = time.monotonic() + 2 * TTL + 1
        while time.monotonic() < until:
            bytes_move()
            time.sleep(0.5)
        (tmp_path / "enough").touch()
        for run in runs:
            run.wait(240)
        assert [run.returncode for run in runs] == [0, 0], output()
        assert ended.get_prefix("/pytest-nixl/") == {}
