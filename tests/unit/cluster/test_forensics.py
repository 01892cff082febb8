# SPDX-License-Identifier: Apache-2.0
"""The description of a group that lost a rank, with a real etcd that answers, is gone, or hangs."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from helpers.etcd import Etcd
from helpers.stopped import stopped

from pytest_nixl.cluster.forensics import forensics
from pytest_nixl.cluster.group import Member
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints

#: Seconds of a lease, of which no thread has to refresh one during a test; for each step; and for etcd's answers.
TTL, SECONDS = 120, 60


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=SECONDS) as opened:
        yield opened
        assert opened.get_prefix("/pytest-nixl/") == {}


@contextmanager
def group(etcd: Etcd, size: int) -> Iterator[list[Membership]]:
    """Yield the members of a group that has passed a barrier, by rank."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(size))
        clients = [stack.enter_context(connect([etcd.endpoint], timeout=SECONDS)) for _ in range(size)]
        joining = [
            pool.submit(join, future, "broken", size, ttl=TTL, timeout=SECONDS, host=f"host-{rank}", wanted=rank)
            for rank, future in enumerate(clients)
        ]
        members = [stack.enter_context(future.result(SECONDS)) for future in joining]
        for waiting in [pool.submit(member.barrier, SECONDS) for member in members]:
            waiting.result(SECONDS)
        yield members


def test_a_lost_member_is_named(client: EtcdClient, etcd: Etcd) -> None:
    with group(etcd, 3) as members:
        with ThreadPoolExecutor() as pool:
            lost = pool.submit(members[0].barrier, SECONDS)
            arrived = f"{members[0].root}arrived/000002/"
            wait_until(lambda: client.count_prefix(arrived) == 1, "rank 0 at the barrier", seconds=60)
            client.put(f"{members[0].root}mail/000000/000001/000000000000", b"x" * 1234, members[1].lease)
            members[1].lease.revoke()
            assert lost.exception(SECONDS) is not None
        client.put(f"{members[0].root}kept", b"x" * 77)
        log = "".join(f"line {number}\n" for number in range(9))
        logs = {"worker a": log, "worker b": "\n"}
        lines = forensics(client, members[0].root, members[0].members, worker_logs=logs, seconds=SECONDS)
    pid = os.getpid()
    assert lines[0].startswith("keys under /pytest-nixl/groups/broken/: 2 of 3 members ")
    assert lines[1].startswith(f"  rank 1 on host-1 (pid {pid}): its key is missing: ")
    for line, rank in zip(lines[2:4], (0, 2), strict=True):
        expected = rf"  rank {rank} on host-{rank} \(pid {pid}\): its key is present, .* (\d+) s left of {TTL} s"
        match = re.fullmatch(expected, line)
        assert match is not None, line
        assert SECONDS <= int(match[1]) <= TTL
    assert re.fullmatch("the group passed barrier 1 .*; waiting at barrier 2: rank 0", lines[4])
    assert lines[5].startswith("7 keys")
    assert "  kept: 77 bytes" in lines
    assert "  run/gate: 13 bytes" in lines
    assert len(lines[6:-7]) == 7
    assert lines[-7:] == [
        "the last lines of worker a:", "  line 4", "  line 5", "  line 6", "  line 7", "  line 8",
        "worker b has no unusual lines",
    ]  # fmt: skip


def test_processes_without_a_rank_and_invalid_keys_are_listed(client: EtcdClient, etcd: Etcd) -> None:
    with group(etcd, 1) as [member]:
        client.put(f"{member.root}members/late", b'{"host": "late", "pid": 7, "size": 1}')
        lines = forensics(client, member.root, member.members, worker_logs={}, seconds=SECONDS)
        assert "  late (pid 7): has no rank, without a lease" in lines
        client.put(f"{member.root}members/late", b"no JSON")
        lines = forensics(client, member.root, member.members, worker_logs={}, seconds=SECONDS)
        key = f"{member.root}members/late"
        assert f": the key '{key}' " in lines[0]
        assert any(line.startswith("the group passed barrier 1 ") for line in lines)
        assert any(line.endswith("at barrier 2: no rank") for line in lines)
        client.delete(f"{member.root}members/late")


def test_at_most_50_keys_are_listed(client: EtcdClient) -> None:
    for numbers, more in ((range(50), []), (range(50, 60), ["  … and 10 more"])):
        for number in numbers:
            client.put(f"/pytest-nixl/groups/g/{number:03d}", b"1")
        lines = forensics(client, "/pytest-nixl/groups/g/", [], worker_logs={}, seconds=SECONDS)
        assert lines[2].startswith(f"{numbers.stop} keys")
        assert lines[52:] == ["  049: 1 byte", *more]
    client.delete_prefix("/pytest-nixl/groups/g/")


def test_an_error_of_any_kind_hides_no_other_key(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: GroupValues) -> list[object]:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(GroupValues, "ask_members", broken)
    lines = forensics(client, "/pytest-nixl/groups/g/", [], worker_logs={}, seconds=SECONDS)
    assert lines[0] == "one of the group's keys cannot be read: ZeroDivisionError('a defect')"
    assert lines[1].startswith("the group passed no barrier")
    assert lines[2:] == ["0 keys in all"]


MEMBERS = (Member(0, "token", "node-a", 12),)


def test_an_etcd_that_is_gone_is_one_line() -> None:
    [port] = free_ports(1)
    with connect(parse_endpoints(f"http://127.0.0.1:{port}")) as gone:
        [line, *logs] = forensics(gone, "/g/", MEMBERS, worker_logs={"w": "last"})
    assert f": etcd at http://127.0.0.1:{port}: " in line
    assert logs == ["the last lines of w:", "  last"]


def test_an_etcd_that_hangs_is_not_waited_for(etcd: Etcd) -> None:
    with stopped(etcd.pid), connect([etcd.endpoint], timeout=100) as hanging:
        start = time.monotonic()
        lines = forensics(hanging, "/g/", MEMBERS, worker_logs={"w": "last"}, seconds=0.5)
        assert time.monotonic() - start < 60, "no request ends before 100 s"
        asking = [thread.daemon for thread in threading.enumerate() if thread.name == "forensics"]
        assert asking == [True], "a request that goes on does not keep the process"
    assert lines[0].endswith(": etcd took more than 0.5 s")
    assert lines[1:] == ["the last lines of w:", "  last"]
