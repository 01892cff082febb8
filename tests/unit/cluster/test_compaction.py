# SPDX-License-Identifier: Apache-2.0
"""An etcd that compacts its history every few minutes ends neither the mail of a group nor the watch of its members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.etcd import Etcd, running_etcd, wait_until
from helpers.rank_group import RankGroup, rank_group

from pytest_nixl.cluster import mailbox, session
from pytest_nixl.cluster.mailbox import Mailbox
from pytest_nixl.cluster.messages import Message, WorkerLine
from pytest_nixl.cluster.session import MembershipWatch
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient

#: Seconds after which each watch is replaced by a new one.
SOON = 0.2


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture(autouse=True)
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mailbox, session):
        monkeypatch.setattr(module, "WATCH_SECONDS", SOON)


@pytest.fixture
def group(etcd: Etcd) -> Iterator[RankGroup]:
    with rank_group(etcd.url, 2) as made:
        made.join()
        made.barrier()
        yield made
        made.leave()


@contextmanager
def counted(etcd: Etcd) -> Iterator[tuple[EtcdClient, ProxyClient]]:
    """Yield a client, and the requests that it sends."""
    with EtcdProxy(etcd.url) as path:
        way = path.client()
        with connect(parse_endpoints(way.endpoint)) as client:
            yield client, way


def compact(etcd: Etcd, way: ProxyClient) -> None:
    """Compact away everything that the watches of this client have seen, and wait until they have been opened anew."""

    def watches() -> int:
        return sum(request.method == "Watch" for request in way.requests)

    wait_until(lambda: watches() > 0, 60, "the first watch")
    with connect([etcd.endpoint]) as other:
        for number in range(5):
            other.put("/other/key", str(number).encode())
        [last] = other.by_creation("/other/key")
        other.raw.post(other.raw.get_url("/kv/compaction"), json={"revision": last.mod_revision, "physical": True})
        other.delete("/other/key")
    before = watches()
    wait_until(lambda: watches() >= before + 3, 60, "watches after the compaction")


def test_mail_arrives_once_after_a_compaction(etcd: Etcd, group: RankGroup) -> None:
    read: list[Message] = []
    failures: list[NixlPluginError] = []
    with counted(etcd) as (client, way), connect([etcd.endpoint]) as of_rank_0:
        receiver = Mailbox(
            client, group.members[1], handle=lambda _, message: read.append(message), failed=failures.append
        )
        sender = Mailbox(of_rank_0, group.members[0], handle=lambda *_: None, failed=failures.append)
        receiver.open()
        sender.send(1, {"worker": 0, "line": "before"})
        wait_until(lambda: len(read) == 1, 60, "the first message")
        compact(etcd, way)
        sender.send(1, {"worker": 1, "line": "after"})
        wait_until(lambda: len(read) == 2, 60, f"the message after a compaction: {failures}")
        receiver.close()
        sender.close()
    assert [message.worker for message in read if isinstance(message, WorkerLine)] == [0, 1]
    assert not failures


def test_a_member_that_leaves_after_a_compaction_is_named(etcd: Etcd, group: RankGroup) -> None:
    lost: list[int] = []
    with counted(etcd) as (client, way):
        guard = MembershipWatch(client, group.members[0], lambda member, _: lost.append(member.rank))
        compact(etcd, way)
        assert lost == []
        group.members[1].lease.revoke()
        wait_until(lambda: 1 in lost, 60, "the lost rank")
        guard.close()
    assert set(lost) == {1}
