# SPDX-License-Identifier: Apache-2.0
"""The membership of a group, on a real etcd: ranks, barriers, leaving, what is refused, and what a lease's end does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from etcd_helpers import Etcd, running_etcd

from pytest_nixl.cluster.membership import (
    FencedError,
    MemberLostError,
    Membership,
    MissingRanksError,
    RefusedError,
    join,
)
from pytest_nixl.etcd.client import EtcdClient, Watched, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.path import EtcdPath
from pytest_nixl.waiting import wait_until

#: Seconds: a lease that no busy machine lets end by chance, and a wait that is in vain.
TTL, SOON = 5, 0.5


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint]) as opened:
        yield opened
        assert opened.get_prefix("/pytest-nixl/") == {}, "every group cleans up after itself"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as started:
        yield started


@contextmanager
def group(etcd: Etcd, pool: ThreadPoolExecutor, name: str, size: int) -> Iterator[list[Membership]]:
    """A group that has met, in the order of ranks."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect([etcd.endpoint])) for _ in range(size)]
        joining = [
            pool.submit(join, one, name, size, ttl=TTL, timeout=20, host=f"host-{n}") for n, one in enumerate(clients)
        ]
        members = sorted((stack.enter_context(one.result()) for one in joining), key=lambda member: member.rank)
        yield members


def all_done(work: list[Future[None]]) -> None:
    for one in work:
        one.result(20)


def test_ranks_and_what_all_know_of_each_other(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with group(etcd, pool, "g", 5) as members:
        assert [member.rank for member in members] == [0, 1, 2, 3, 4]
        [known] = {member.members for member in members}
        assert [member.rank for member in known] == [0, 1, 2, 3, 4]
        assert {member.host for member in known} == {f"host-{number}" for number in range(5)}
        assert {member.size for member in members} == {5}
        created = [item.key.rsplit("/", 1)[1] for item in client.by_creation("/pytest-nixl/groups/g/members/")]
        assert created == [member.token for member in known], "a rank is its place by create revision"


def test_one_rank_alone(client: EtcdClient) -> None:
    with join(client, "alone", 1, ttl=TTL) as member:
        member.barrier(5)
        assert (member.rank, member.size) == (0, 1)


@pytest.mark.parametrize("size", [2, 12])
def test_requests_do_not_grow_with_the_group(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor, size: int
) -> None:
    with EtcdPath(etcd.url) as path, ExitStack() as stack:
        ways = [path.client() for _ in range(size)]
        clients = [stack.enter_context(connect(parse_endpoints(way.endpoint))) for way in ways]
        joining = [pool.submit(join, one, "few", size, ttl=30, timeout=20) for one in clients]
        members = [stack.enter_context(one.result()) for one in joining]
        assert all(len(way.requests) <= 4 for way in ways), path.describe()
        for _ in range(3):
            before = [len(way.requests) for way in ways]
            all_done([pool.submit(member.barrier, 20) for member in members])
            assert all(len(way.requests) - count <= 2 for way, count in zip(ways, before, strict=True))


def test_a_barrier_waits_for_the_last(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with group(etcd, pool, "wait", 3) as members:
        for turn in range(4):
            late = members[turn % 3]
            early = [pool.submit(member.barrier, 20) for member in members if member is not late]
            arrived = f"/pytest-nixl/groups/wait/arrived/{turn + 1:06d}/"
            wait_until(partial(_has, client, arrived, 2), "two at the barrier", seconds=10)
            assert not any(one.done() for one in early)
            late.barrier(20)
            all_done(early)


def test_a_barrier_in_vain_names_who_is_missing(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with group(etcd, pool, "vain", 3) as members:
        with pytest.raises(MissingRanksError) as caught:
            members[1].barrier(SOON)
        missing = [str(member) for member in members[1].members if member.rank != 1]
        assert str(caught.value).startswith(
            f"waited 0.5 s at barrier 1 of group 'vain' for {', '.join(missing)}\nremedy: "
        )


def test_a_member_that_dies_ends_a_group_that_has_started(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "lost", 3) as members:
        all_done([pool.submit(member.barrier, 20) for member in members])
        waiting = [pool.submit(member.barrier, 20) for member in members[:2]]
        members[2].lease.revoke()  # as etcd does when it hears nothing any more
        for one in waiting:
            with pytest.raises(MemberLostError, match=f"group 'lost' has lost {_pattern(members[2])}: the lease ended"):
                one.result(10)
        with pytest.raises(FencedError, match="has no lease any more"):
            members[2].barrier(5)


def test_who_leaves_behind_a_barrier_is_not_lost(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    def meet_and_leave(member: Membership) -> None:
        member.barrier(20)
        member.barrier(20)
        member.leave()

    for _ in range(5):
        with group(etcd, pool, "leave", 8) as members:
            all_done([pool.submit(meet_and_leave, member) for member in members])


def test_the_place_of_one_that_died_before_the_start_is_claimed_again(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "again", 2) as members, connect([etcd.endpoint]) as other:
        waiting = pool.submit(members[0].barrier, 20)
        taking = pool.submit(join, other, "again", 2, ttl=TTL, timeout=20, host="new-host")
        members[1].lease.revoke()
        with taking.result(10) as replacement:
            assert replacement.rank == 1
            replacement.barrier(10)
            waiting.result(10)
            assert members[0].members == replacement.members
            assert members[0].members[1].host == "new-host"


def test_who_is_last_at_the_first_barrier_knows_who_took_a_place_over(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "last", 2) as members, connect([etcd.endpoint]) as other:
        taking = pool.submit(join, other, "last", 2, ttl=TTL, timeout=20, host="new-host")
        members[1].lease.revoke()
        with taking.result(10) as replacement:
            waiting = pool.submit(replacement.barrier, 20)
            wait_until(partial(_has, client, "/pytest-nixl/groups/last/arrived/000001/", 1), "one at the barrier", seconds=10)
            members[0].barrier(10)
            waiting.result(10)
            assert members[0].members == replacement.members
            assert members[0].members[1].host == "new-host"


class TestRefused:
    def test_a_late_claimant_by_the_names_of_who_is_there(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with group(etcd, pool, "full", 2) as members, connect([etcd.endpoint]) as other:
            all_done([pool.submit(member.barrier, 20) for member in members])
            with pytest.raises(RefusedError) as caught:
                join(other, "full", 2, timeout=SOON)
            there = ", ".join(map(str, members[0].members))
            assert caught.value.reason == f"group 'full' takes nobody in: it has started: {there}"
            with pytest.raises(RefusedError, match="it has 2 ranks, and this claimant was told 3"):
                join(other, "full", 3, timeout=SOON)
            all_done([pool.submit(member.barrier, 20) for member in members])

    def test_one_too_many_at_the_same_time(self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(connect([etcd.endpoint])) for _ in range(4)]
            joining = [pool.submit(join, one, "many", 3, ttl=1, timeout=20) for one in clients]
            errors = [error for one in joining if (error := one.exception(20)) is not None]
            members = [stack.enter_context(one.result()) for one in joining if one.exception() is None]
            assert [type(error) for error in errors] == [RefusedError]
            assert "all its members are there" in str(errors[0])
            assert sorted(member.rank for member in members) == [0, 1, 2]

    @pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 200])
    def test_a_name(self, client: EtcdClient, name: str) -> None:
        with pytest.raises(ValueError, match=r"expected letters, digits, \. _ and -"):
            join(client, name, 2)

    def test_a_size(self, client: EtcdClient) -> None:
        with pytest.raises(ValueError, match="a group of 0 ranks cannot be joined: expected 1 or more"):
            join(client, "g", 0)


def test_a_lone_rank_says_who_came(client: EtcdClient) -> None:
    with pytest.raises(MissingRanksError) as caught:
        join(client, "lone", 2, timeout=SOON, host="here")
    assert caught.value.reason.startswith("waited 0.5 s for 2 ranks of group 'lone': 1 came: here (pid ")


def test_ranks_that_expect_different_numbers_are_told(etcd: Etcd, client: EtcdClient, pool: ThreadPoolExecutor) -> None:
    with connect([etcd.endpoint]) as other:
        three = pool.submit(join, other, "sizes", 3, timeout=2)
        wait_until(lambda: client.count_prefix("/pytest-nixl/groups/sizes/members/"), "the first", seconds=5)
        with pytest.raises(MissingRanksError, match="they expect different numbers of ranks: 3, 5"):
            join(client, "sizes", 5, timeout=SOON)
        assert isinstance(three.exception(10), MissingRanksError)


class TestLeases:
    def test_it_is_kept_up(self, client: EtcdClient) -> None:
        with join(client, "kept", 1, ttl=1) as member:
            over = time.monotonic() + 2.5
            while time.monotonic() < over:
                assert _lives(client, member)
                member.check()

    def test_who_cannot_keep_it_up_fences_itself_before_etcd_ends_it(self, client: EtcdClient, etcd: Etcd) -> None:
        """By its own clock, which starts when the request is sent: it is over here before it is over there."""
        with EtcdPath(etcd.url) as path:
            way = path.client()
            with connect(parse_endpoints(way.endpoint), timeout=1) as cut_off:
                member = join(cut_off, "fenced", 1, ttl=2)
                way.cut()
                alive_at_fence: list[bool] = []

                def fenced() -> bool:
                    try:
                        member.check()
                    except FencedError:
                        alive_at_fence.append(_lives(client, member))
                        return True
                    return False

                wait_until(fenced, "the fence", seconds=10)
                assert alive_at_fence == [True]
                with pytest.raises(FencedError, match="nothing from it for 2 s, so its place may be another's"):
                    member.barrier(1)
                with pytest.raises(EtcdError):
                    member.leave()
        wait_until(lambda: client.count_prefix("/pytest-nixl/groups/fenced/members/") == 0, "its end", seconds=10)
        with join(client, "fenced", 1, ttl=TTL):  # sweeps what it left
            pass

    def test_no_thread_stays(self, client: EtcdClient) -> None:
        before = threading.active_count()
        with join(client, "threads", 1, ttl=TTL):
            assert threading.active_count() == before + 1
        assert threading.active_count() == before


class TestWatch:
    def test_nothing_is_missed_when_the_connection_breaks(self, client: EtcdClient, etcd: Etcd) -> None:
        with EtcdPath(etcd.url) as path:
            way = path.client()
            with connect(parse_endpoints(way.endpoint)) as watching:
                revision = int(client.status()["header"]["revision"])
                client.put("/w/0", b"")
                seen = []
                for event in watching.watch(Watched("/w/", revision + 1, prefix=True), seconds=20):
                    seen.append((event.item.key, event.deleted))
                    if len(seen) == 5:
                        break
                    way.cut()
                    client.put(f"/w/{len(seen)}", b"")
                    way.restore()
        assert seen == [(f"/w/{number}", False) for number in range(5)]
        client.delete_prefix("/w/")

    def test_only_deletions(self, client: EtcdClient) -> None:
        revision = int(client.status()["header"]["revision"])
        client.put("/d/1", b"")
        client.delete("/d/1")
        events = list(client.watch(Watched("/d/", revision + 1, prefix=True, deletions=True), seconds=SOON))
        assert [(event.item.key, event.deleted) for event in events] == [("/d/1", True)]

    def test_compacted(self, client: EtcdClient) -> None:
        client.put("/c", b"")
        revision = int(client.status()["header"]["revision"])
        client.raw.post(client.raw.get_url("/kv/compaction"), json={"revision": revision, "physical": True})
        with pytest.raises(EtcdError) as caught:
            list(client.watch(Watched("/c", 1), seconds=SOON))
        assert caught.value.cause == "compacted"
        client.delete("/c")


def _has(client: EtcdClient, prefix: str, count: int) -> bool:
    return client.count_prefix(prefix) == count


def _lives(client: EtcdClient, member: Membership) -> bool:
    return client.count_prefix(f"/pytest-nixl/groups/{member.group}/members/") == 1


def _pattern(member: Membership) -> str:
    import re

    return re.escape(str(member.members[member.rank]))
