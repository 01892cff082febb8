# SPDX-License-Identifier: Apache-2.0
"""An etcd that compacts its history every few minutes ends no wait of a group, and neither its mail nor its watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import requests
from helpers.etcd import Etcd, wait_until
from helpers.rank_group import RankGroup, rank_group

from pytest_nixl.cluster import membership
from pytest_nixl.cluster.group import MemberLostError
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.messages import Mailbox, Message, WorkerLine
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient

#: Seconds after which each watch is replaced by a new one.
SOON = 0.2


@pytest.fixture(autouse=True)
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_SECONDS", "MESSAGE_SECONDS"):
        monkeypatch.setattr(membership, name, SOON)


@pytest.fixture
def group(etcd: Etcd) -> Iterator[RankGroup]:
    with rank_group(etcd.url, 2) as members:
        members.join()
        members.barrier()
        yield members
        members.leave()


@contextmanager
def counted(etcd: Etcd) -> Iterator[tuple[EtcdClient, ProxyClient]]:
    """Yield a client, and the requests that it sends."""
    with EtcdProxy(etcd.url) as path:
        proxy_client = path.client()
        with connect(parse_endpoints(proxy_client.endpoint), timeout=60) as client:
            yield client, proxy_client


def compact(etcd: Etcd) -> None:
    """Compact away everything that happened so far."""
    with connect([etcd.endpoint], timeout=60) as other:
        for number in range(5):
            other.put("/other/key", str(number).encode())
        [last] = other.by_creation("/other/key")
        compaction = {"revision": last.mod_revision, "physical": True}
        requests.post(f"{etcd.url}/v3/kv/compaction", json=compaction, timeout=60).raise_for_status()
        other.delete("/other/key")


def compact_while_watched(etcd: Etcd, proxy_client: ProxyClient) -> None:
    """Compact away everything that the watches of this client have seen, and wait until they have been opened anew."""

    def watches() -> int:
        return sum(request.method == "Watch" for request in proxy_client.requests)

    before = watches()
    wait_until(lambda: watches() > before, 60, "a watch")
    compact(etcd)
    before = watches()
    wait_until(lambda: watches() >= before + 3, 60, "watches after the compaction")


def test_mail_arrives_once_after_a_compaction(etcd: Etcd, group: RankGroup) -> None:
    read: list[Message] = []
    failures: list[NixlPluginError] = []
    with counted(etcd) as (client, proxy_client), connect([etcd.endpoint], timeout=60) as of_rank_0:
        receiver = Mailbox(
            client, group.members[1], handle=lambda _, message: read.append(message), failed=failures.append
        )
        sender = Mailbox(of_rank_0, group.members[0], handle=lambda *_: None, failed=failures.append)
        receiver.open()
        sender.send(1, {"worker": 0, "line": "before"})
        wait_until(lambda: len(read) == 1, 60, "the first message")
        compact_while_watched(etcd, proxy_client)
        sender.send(1, {"worker": 1, "line": "after"})
        wait_until(lambda: len(read) == 2, 60, f"the message after a compaction: {failures}")
        receiver.close()
        sender.close()
    assert [message.worker for message in read if isinstance(message, WorkerLine)] == [0, 1]
    assert not failures


def join_of(client: EtcdClient, group: str, waiting: Callable[[str], None] | None = None) -> Membership:
    """Join a group of two ranks, whose leases no thread has to refresh in time."""
    return join(client, group, 2, ttl=120, timeout=120, waiting=waiting)


def test_ranks_that_wait_meet_after_a_compaction(etcd: Etcd) -> None:
    """One waits for the other to join, then at a barrier, and each time its watch has fallen behind."""
    messages: list[str] = []
    with (
        counted(etcd) as (client, proxy_client),
        connect([etcd.endpoint], timeout=60) as of_other,
        ThreadPoolExecutor(1) as pool,
    ):
        joining = pool.submit(join_of, client, "waiting", messages.append)
        compact_while_watched(etcd, proxy_client)
        other = join_of(of_other, "waiting")
        member = joining.result(120)
        at_barrier = pool.submit(member.barrier, 120, messages.append)
        compact_while_watched(etcd, proxy_client)
        other.barrier(120)
        at_barrier.result(120)
        assert {member.rank, other.rank} == {0, 1}
        other.leave()
        member.leave()
    assert any("waiting for" in message for message in messages)


def test_a_member_that_leaves_while_the_history_is_compacted_is_missed_at_a_barrier(etcd: Etcd) -> None:
    """The event of its end is compacted away between two watches."""
    with rank_group(etcd.url, 2) as members:
        members.join()
        members.barrier()
        members.members[1].lease.revoke()
        compact(etcd)
        with pytest.raises(MemberLostError, match="rank 1"):
            members.members[0].barrier(120)
        members.members[0].leave()
