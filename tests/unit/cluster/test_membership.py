# SPDX-License-Identifier: Apache-2.0
"""Group membership on a real etcd: ranks, barriers, leaving, refusals, and the end of a lease."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from helpers.etcd import Etcd, running_etcd

from pytest_nixl.cluster import membership
from pytest_nixl.cluster.group import (
    MOST_LEASE,
    PREFIX,
    Candidate,
    JoinRefusedError,
    LeaseLostError,
    MemberLostError,
    MembershipError,
    MissingRanksError,
    group_name,
    group_root,
    longer_lease,
    may_settle,
    rank_conflicts,
    who_is_missing,
)
from pytest_nixl.cluster.group import TTL as USUAL
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.placement import ALONE
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, Lease, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError, explain_answer
from pytest_nixl.etcd.proxy import EtcdProxy
from pytest_nixl.etcd.watch import Watched
from pytest_nixl.model.settings import OPTIONS

#: Seconds: a lease that does not expire on a busy machine; for each step there; a wait that times out; and a lease
#: for whose end a process waits that comes too late.
TTL, SECONDS, SOON, SHORT = 20, 60, 0.5, 6


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with running_etcd() as started:
        yield started


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    with connect([etcd.endpoint], timeout=SECONDS) as opened:
        yield opened
        assert opened.get_prefix("/pytest-nixl/") == {}, "every group cleans up after itself"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as started:
        yield started


@contextmanager
def group(etcd: Etcd, pool: ThreadPoolExecutor, name: str, size: int) -> Iterator[list[Membership]]:
    """Yield the members of a complete group, by rank."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect([etcd.endpoint], timeout=SECONDS)) for _ in range(size)]
        joining = [
            pool.submit(join, client, name, size, ttl=TTL, timeout=SECONDS, host=f"host-{n}")
            for n, client in enumerate(clients)
        ]
        members = sorted((stack.enter_context(client.result()) for client in joining), key=lambda member: member.rank)
        yield members


@contextmanager
def claiming(
    etcd: Etcd, pool: ThreadPoolExecutor, name: str, requested: list[int | None], **options: Any
) -> Iterator[list[Future[Membership]]]:
    """Let one process join for each rank in ``wanted``, each from its own host unless the options say otherwise."""
    options = {"size": len(requested), "ttl": TTL, "timeout": SECONDS, **options}
    with ExitStack() as stack:
        joining = []
        for number, rank in enumerate(requested):
            client = stack.enter_context(connect([etcd.endpoint], timeout=SECONDS))
            joining.append(pool.submit(join, client, name, wanted=rank, **{"host": f"host-{number}", **options}))
        try:
            yield joining
        finally:
            for registration in joining:
                if registration.exception(90) is None:
                    registration.result().leave()


def all_done(work: list[Future[None]]) -> None:
    for future in work:
        future.result(90)


def test_every_member_gets_a_rank_and_the_same_roster(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with group(etcd, pool, "g", 5) as members:
        assert [member.rank for member in members] == [0, 1, 2, 3, 4]
        [roster] = {member.members for member in members}
        assert [member.rank for member in roster] == [0, 1, 2, 3, 4]
        assert {member.host for member in roster} == {f"host-{number}" for number in range(5)}
        assert {member.size for member in members} == {5}
        created = [item.key.rsplit("/", 1)[1] for item in client.by_creation("/pytest-nixl/groups/g/members/")]
        assert created == [member.token for member in roster], "ranks are in order of create revision"


def test_a_group_of_one_rank(client: EtcdClient) -> None:
    with join(client, "alone", 1, ttl=TTL) as member:
        member.barrier(SECONDS)
        assert (member.rank, member.size) == (0, 1)


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize(("token", "of_joining", "of_a_barrier"), [("", 4, 2), ("t", 5, 3)])
def test_number_of_requests_does_not_grow_with_the_group(
    client: EtcdClient,
    etcd: Etcd,
    pool: ThreadPoolExecutor,
    size: int,
    token: str,
    of_joining: int,
    of_a_barrier: int,
) -> None:
    with EtcdProxy(etcd.url) as path, ExitStack() as stack:
        proxies = [path.client() for _ in range(size)]
        clients = [
            stack.enter_context(connect(parse_endpoints(proxied.endpoint), timeout=SECONDS)) for proxied in proxies
        ]
        ranks = [None if number % 2 else number for number in range(size)]
        joining = [
            pool.submit(join, future, "few", size, ttl=300, timeout=60, wanted=rank, token=token)
            for future, rank in zip(clients, ranks, strict=True)
        ]
        members = [stack.enter_context(future.result()) for future in joining]
        assert all(len(proxied.requests) <= of_joining for proxied in proxies), path.describe()
        for _ in range(3):
            before = [len(proxied.requests) for proxied in proxies]
            all_done([pool.submit(member.barrier, 60) for member in members])
            assert all(
                len(proxied.requests) - count <= of_a_barrier for proxied, count in zip(proxies, before, strict=True)
            )


def test_a_barrier_waits_for_the_last_rank(client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
    with group(etcd, pool, "wait", 3) as members:
        for turn in range(4):
            late = members[turn % 3]
            early = [pool.submit(member.barrier, SECONDS) for member in members if member is not late]
            arrived = f"/pytest-nixl/groups/wait/arrived/{turn + 1:06d}/"
            wait_until(partial(_has, client, arrived, 2), "two at the barrier", seconds=60)
            assert not any(future.done() for future in early)
            late.barrier(SECONDS)
            all_done(early)


def test_a_barrier_that_times_out_names_the_missing_ranks(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "vain", 3) as members:
        with pytest.raises(MissingRanksError) as caught:
            members[1].barrier(SOON)
        missing = [str(member) for member in members[1].members if member.rank != 1]
        assert f" 0.5 s at barrier 1 of group 'vain' for {', '.join(missing)}\nremedy: " in str(caught.value)


def test_every_member_learns_of_a_member_that_dies_after_the_start(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "lost", 3) as members:
        all_done([pool.submit(member.barrier, 60) for member in members])
        waiting = [pool.submit(member.barrier, SECONDS) for member in members[:2]]
        members[2].lease.revoke()  # as etcd does when a lease expires
        for future in waiting:
            with pytest.raises(MemberLostError, match=f"group 'lost' .*{_pattern(members[2])}: "):
                future.result(SECONDS)
        with pytest.raises(LeaseLostError, match=rf"group 'lost' \(rank 2, host-\d, pid {os.getpid()}\)"):
            members[2].barrier(SECONDS)


@pytest.mark.long
def test_a_member_that_leaves_after_a_barrier_is_not_lost(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    def meet_and_leave(member: Membership) -> None:
        member.barrier(SECONDS)
        member.barrier(SECONDS)
        member.leave()

    for _ in range(5):
        with group(etcd, pool, "leave", 8) as members:
            all_done([pool.submit(meet_and_leave, member) for member in members])


def test_rank_of_a_member_that_died_before_the_start_is_reassigned(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "again", 2) as members, connect([etcd.endpoint], timeout=SECONDS) as other:
        waiting = pool.submit(members[0].barrier, SECONDS)
        taking = pool.submit(join, other, "again", 2, ttl=TTL, timeout=SECONDS, host="new-host")
        wait([taking], SOON)
        assert not taking.done(), "a rank may become free for as long as a lease lasts"
        members[1].lease.revoke()
        with taking.result(SECONDS) as replacement:
            assert replacement.rank == 1
            replacement.barrier(SECONDS)
            waiting.result(SECONDS)
            assert members[0].members == replacement.members
            assert members[0].members[1].host == "new-host"


def test_the_last_member_at_the_first_barrier_learns_of_a_reassigned_rank(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
) -> None:
    with group(etcd, pool, "last", 2) as members, connect([etcd.endpoint], timeout=SECONDS) as other:
        taking = pool.submit(join, other, "last", 2, ttl=TTL, timeout=SECONDS, host="new-host")
        members[1].lease.revoke()
        with taking.result(SECONDS) as replacement:
            waiting = pool.submit(replacement.barrier, SECONDS)
            arrived = "/pytest-nixl/groups/last/arrived/000001/"
            wait_until(partial(_has, client, arrived, 1), "one at the barrier", seconds=60)
            members[0].barrier(SECONDS)
            waiting.result(SECONDS)
            assert members[0].members == replacement.members
            assert members[0].members[1].host == "new-host"


def test_the_member_that_opens_the_barrier_learns_of_a_rank_that_is_reassigned_at_that_moment(
    client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        group(etcd, pool, "moment", 2) as members, connect([etcd.endpoint], timeout=SECONDS) as other,
        ExitStack() as stack,
    ):  # fmt: skip
        waiting = pool.submit(members[1].barrier, SECONDS)
        wait_until(partial(_has, client, "/pytest-nixl/groups/moment/arrived/000001/", 1), "one to arrive", seconds=60)
        transact, calls = members[0].transact, list[Any]()

        def opening(*given: Any) -> Any:
            calls.append(given)
            if len(calls) == 2:  # the member has seen that all have arrived, and opens the barrier
                members[1].lease.revoke()
                stack.enter_context(join(other, "moment", 2, ttl=TTL, timeout=SECONDS, host="new-host"))
            return transact(*given)

        monkeypatch.setattr(members[0], "transact", opening)
        members[0].barrier(SECONDS)
        assert len(calls) == 2
        assert members[0].members[1].host == "new-host"
        wait([waiting], SECONDS)


class TestRefused:
    def test_a_late_process_with_the_names_of_the_members(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with group(etcd, pool, "full", 2) as members, connect([etcd.endpoint], timeout=SECONDS) as other:
            all_done([pool.submit(member.barrier, 60) for member in members])
            with pytest.raises(JoinRefusedError) as caught:
                join(other, "full", 2, timeout=SOON)
            names = ", ".join(map(str, members[0].members))
            assert caught.value.reason.startswith("group 'full' ")
            assert "already started" in caught.value.reason
            assert caught.value.reason.endswith(names)
            with pytest.raises(JoinRefusedError, match=r"group 'full' .* 2 ranks, .*=3"):
                join(other, "full", 3, timeout=SOON)
            all_done([pool.submit(member.barrier, 60) for member in members])

    @pytest.mark.long
    def test_one_process_too_many(self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(connect([etcd.endpoint], timeout=SECONDS)) for _ in range(4)]
            joining = [pool.submit(join, joiner, "many", 3, ttl=SHORT, timeout=60) for joiner in clients]
            errors = [error for joiner in joining if (error := joiner.exception(60)) is not None]
            members = [stack.enter_context(joiner.result()) for joiner in joining if joiner.exception() is None]
            assert [type(error) for error in errors] == [JoinRefusedError]
            assert sorted(member.rank for member in members) == [0, 1, 2]
            assert str(errors[0]).startswith("group 'many' ")
            assert all(str(member) in str(errors[0]) for member in members[0].members)

    @pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 200])
    def test_an_invalid_group_name(self, client: EtcdClient, name: str) -> None:
        with pytest.raises(ValueError, match=r"letters, digits, \. _ and -"):
            join(client, name, 2)

    def test_a_group_without_ranks(self, client: EtcdClient) -> None:
        with pytest.raises(ValueError, match=" 0 ranks: expected 1 or more"):
            join(client, "g", 0)


def test_a_timeout_names_the_processes_that_arrived(client: EtcdClient) -> None:
    with pytest.raises(MissingRanksError) as caught:
        join(client, "lone", 2, timeout=SOON, host="here")
    assert " 0.5 s for 1 of 2 ranks of group 'lone'" in caught.value.reason
    assert caught.value.reason.endswith(f" here (pid {os.getpid()})")


def test_a_timeout_names_the_missing_ranks(client: EtcdClient) -> None:
    with pytest.raises(MissingRanksError) as caught:
        join(client, "lone", 4, timeout=SOON, wanted=2)
    assert " 0.5 s for ranks 0, 1, 3 of group 'lone' (1 of 4 " in caught.value.reason


@pytest.mark.long
def test_a_timeout_names_different_numbers_of_ranks(etcd: Etcd, client: EtcdClient, pool: ThreadPoolExecutor) -> None:
    with connect([etcd.endpoint], timeout=SECONDS) as other:
        three = pool.submit(join, other, "sizes", 3, timeout=6)
        wait_until(lambda: client.count_prefix("/pytest-nixl/groups/sizes/members/"), "the first", seconds=60)
        with pytest.raises(MissingRanksError, match=r"group 'sizes'.* numbers of ranks: 3, 5\n"):
            join(client, "sizes", 5, timeout=SOON)
        assert isinstance(three.exception(SECONDS), MissingRanksError)


class TestRequestedRanks:
    """Ranks that a launcher or the user requests."""

    def test_requested_ranks_are_given(self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
        with claiming(etcd, pool, "kept", [2, 0, 3, 1]) as claims:
            members = [registration.result(SECONDS) for registration in claims]
            assert [member.rank for member in members] == [2, 0, 3, 1]
            [roster] = {member.members for member in members}
            assert [(member.rank, member.host) for member in roster] == [
                (0, "host-1"), (1, "host-3"), (2, "host-0"), (3, "host-2"),
            ]  # fmt: skip
            all_done([pool.submit(member.barrier, 60) for member in members])

    def test_the_other_members_get_the_free_ranks_in_order_of_arrival(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with claiming(etcd, pool, "mixed", [None, 2, None, 0, None]) as claims:
            members = [registration.result(SECONDS) for registration in claims]
            assert (members[1].rank, members[3].rank) == (2, 0)
            created = [item.key.rsplit("/", 1)[1] for item in client.by_creation(f"{members[0].root}members/")]
            free_ranks = {
                member.members[member.rank].token: member.rank for member in (members[0], members[2], members[4])
            }
            assert [free_ranks[token] for token in created if token in free_ranks] == [1, 3, 4]

    def test_a_rank_requested_twice_is_refused_and_the_next_start_succeeds(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with claiming(etcd, pool, "twice", [0, 0, 1]) as claims:
            errors = [registration.exception(SECONDS) for registration in claims]
        assert [type(error) for error in errors] == [JoinRefusedError] * 3
        [sentence] = {error.reason for error in errors if isinstance(error, JoinRefusedError)}
        first, other = (f"host-{number} (pid {os.getpid()})" for number in (0, 1))
        assert sentence.startswith("group 'twice' cannot start: rank 0 ")
        assert sentence.endswith((f"twice, by {first} and {other}", f"twice, by {other} and {first}"))
        assert "--nixl-rank" in str(errors[0])
        assert client.get_prefix("/pytest-nixl/") == {}
        with claiming(etcd, pool, "twice", [0, 2, 1]) as claims:
            assert [registration.result(SECONDS).rank for registration in claims] == [0, 2, 1]

    def test_a_rank_outside_the_group_is_refused(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with claiming(etcd, pool, "large", [0, 5]) as claims:
            for registration in claims:
                error = registration.exception(SECONDS)
                assert isinstance(error, JoinRefusedError)
                assert error.reason.startswith("group 'large' cannot start: rank 5")
                assert f"host-1 (pid {os.getpid()})" in error.reason
                assert error.reason.endswith("0 to 1")

    def test_a_negative_rank_is_refused(self, client: EtcdClient) -> None:
        with pytest.raises(ValueError, match=r"^-1 .*: ranks are counted from 0"):
            join(client, "g", 2, wanted=-1)

    @pytest.mark.long
    def test_two_requests_from_one_host_are_refused_if_no_lease_ends(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with claiming(etcd, pool, "host", [0, 0], ttl=SHORT, host="same") as claims:
            for registration in claims:
                error = registration.exception(SECONDS)
                assert isinstance(error, JoinRefusedError)
                assert "rank 0 " in error.reason
                assert error.reason.count(f"same (pid {os.getpid()})") == 2

    def test_two_requests_from_one_host_are_not_refused_while_a_lease_may_end(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        """The first process was killed, and its lease has not ended when its successor completes the group."""
        members = "/pytest-nixl/groups/killed/members/"
        lease = client.lease(SECONDS)
        client.put(f"{members}killed", Candidate("killed", "same", 1, 2, 0).value, lease)
        with claiming(etcd, pool, "killed", [0], size=2, host="same") as [again]:
            wait([again], SOON)
            assert not again.done()
            lease.revoke()
            with claiming(etcd, pool, "killed", [1], size=2, host="same") as [other]:
                assert [registration.result(SECONDS).rank for registration in (again, other)] == [0, 1]

    @pytest.mark.long
    def test_a_process_restarted_before_the_others_arrive_gets_its_rank(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        """The lease of the killed process has not ended yet, so that two processes request the rank for a while."""
        members = "/pytest-nixl/groups/started-again/members/"
        options: dict[str, Any] = {"size": 3, "host": "same"}
        with ExitStack() as stack:
            [killed] = stack.enter_context(claiming(etcd, pool, "started-again", [1], **options))
            wait_until(partial(_has, client, members, 1), "the first", seconds=60)
            [first] = client.by_creation(members)
            [again] = stack.enter_context(claiming(etcd, pool, "started-again", [1], **options))
            wait_until(partial(_has, client, members, 2), "its successor", seconds=60)
            [other] = stack.enter_context(claiming(etcd, pool, "started-again", [0], **options))
            wait_until(partial(_has, client, members, 3), "one more", seconds=60)
            client.revoke(first.lease)
            [last] = stack.enter_context(claiming(etcd, pool, "started-again", [2], **options))
            assert [registration.result(SECONDS).rank for registration in (other, again, last)] == [0, 1, 2]
            assert isinstance(killed.exception(SECONDS), LeaseLostError)

    @pytest.mark.parametrize("nth", [1, 2, 3])
    def test_a_refusal_survives_a_lost_answer(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor, nth: int
    ) -> None:
        """The lost answer is that to the registration, to the read, or to the write of the refusal."""
        with EtcdProxy(etcd.url) as path, claiming(etcd, pool, "answer", [1], size=2) as [other]:
            wait_until(partial(_has, client, "/pytest-nixl/groups/answer/members/", 1), "the other", seconds=60)
            proxied = path.client()
            proxied.lose_answer(lambda request: request.method == "Txn", nth=nth)
            with connect(parse_endpoints(proxied.endpoint), timeout=SECONDS) as losing:
                with pytest.raises(JoinRefusedError, match=r"group 'answer' cannot start: rank 1 .* host-0") as caught:
                    join(losing, "answer", 2, ttl=TTL, timeout=SECONDS, wanted=1, host="host-1")
            error = other.exception(SECONDS)
            assert isinstance(error, JoinRefusedError)
            assert error.reason == caught.value.reason

    @pytest.mark.long
    def test_a_free_rank_is_given_only_to_a_process_that_requests_it_or_any(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with (
            claiming(etcd, pool, "place", [0, 1], ttl=SHORT) as claims,
            connect([etcd.endpoint], timeout=SECONDS) as other,
        ):
            members = [registration.result(SECONDS) for registration in claims]
            members[1].lease.revoke()
            with pytest.raises(JoinRefusedError, match=f"group 'place' .* rank 0.* {_pattern(members[0])}"):
                join(other, "place", 2, ttl=TTL, timeout=SECONDS, wanted=0)
            with join(other, "place", 2, ttl=TTL, timeout=SECONDS, wanted=1, host="new-host") as replacement:
                assert replacement.rank == 1
                waiting = pool.submit(members[0].barrier, SECONDS)
                replacement.barrier(SECONDS)
                waiting.result(SECONDS)
                assert members[0].members[1].host == "new-host"

    def test_a_key_that_no_rank_wrote_is_named(self, client: EtcdClient) -> None:
        key = f"{group_root(PREFIX, 'strange')}members/stranger"
        client.put(key, b"hello")
        with pytest.raises(MembershipError, match=f"the key '{key}' "):
            join(client, "strange", 2, ttl=TTL, timeout=SECONDS)
        assert list(client.get_prefix(group_root(PREFIX, "strange"))) == [key], "the own registration is removed"
        client.delete(key)

    def test_a_process_that_finds_an_earlier_refusal_waits_for_that_group_to_end(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        root = group_root(PREFIX, "earlier")
        refusal = {"ttl": TTL, "members": [], "refusal": "group 'earlier' cannot start: why"}
        client.put(f"{root}run/frozen", json.dumps(refusal).encode())
        client.put(f"{root}members/slow", b'{"host": "slow", "pid": 1, "size": 1}')
        with pytest.raises(JoinRefusedError) as caught:
            join(client, "earlier", 1, ttl=TTL, timeout=SOON)
        assert caught.value.reason == "group 'earlier' cannot start: why"
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            with connect(parse_endpoints(proxied.endpoint), timeout=SECONDS) as late:
                registration = pool.submit(join, late, "earlier", 1, ttl=TTL, timeout=SECONDS)
                path.wait(
                    lambda: any(request.method == "Watch" for request in proxied.requests), "it waits", seconds=SECONDS
                )
                client.delete(f"{root}members/slow")
                with registration.result(SECONDS) as member:
                    assert member.rank == 0


class TestToken:
    def test_processes_with_different_tokens_never_meet(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        with ExitStack() as stack:
            groups = [
                stack.enter_context(claiming(etcd, pool, "same", [None, None], token=token)) for token in ("", "a", "b")
            ]
            members = [[registration.result(SECONDS) for registration in claims] for claims in groups]
            roots = [{member.root for member in group_members} for group_members in members]
            assert [len(root) for root in roots] == [1, 1, 1]
            assert len(set.union(*roots)) == 3
            assert {member.group for group_members in members for member in group_members} == {"same"}
            for group_members in members:
                assert sorted(member.rank for member in group_members) == [0, 1]
                assert {peer.token for member in group_members for peer in member.members} == {
                    key.rsplit("/", 1)[1] for key in client.get_prefix(f"{group_members[0].root}members/")
                }

    def test_the_prefix_of_the_keys_depends_on_the_token(self) -> None:
        assert group_root("/p/", "g") == group_root("/p", "g", "") == "/p/g/"
        # echo -n g | openssl dgst -sha256 -hmac secret
        assert group_root("/p", "g", "secret") == "/p/g.03a68c3caefc7833/"
        assert group_name(group_root("", "g", "secret").strip("/")) == ("g", True)
        assert group_name("g.b") == ("g.b", False)

    @pytest.mark.parametrize("token", ["", "a"])
    def test_a_timeout_counts_processes_with_another_token(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor, token: str
    ) -> None:
        with ExitStack() as stack:
            # Not counted: a group of another name, and a group that has started.
            late_groups = (("near", [None, None], "b"), ("nearby", [None], "b"), ("near", [None], "c"))
            for name, ranks, other in late_groups:
                size = 1 if other == "c" else len(ranks) + 1
                stack.enter_context(claiming(etcd, pool, name, [*ranks], token=other, size=size))
                members = f"{group_root(PREFIX, name, other)}members/"
                wait_until(partial(_has, client, members, len(ranks)), f"those of {name}", seconds=60)
            frozen = f"{group_root(PREFIX, 'near', 'c')}run/frozen"
            wait_until(partial(_has, client, frozen, 1), "the group that starts", seconds=60)
            with pytest.raises(MissingRanksError) as caught:
                join(client, "near", 2, timeout=SOON, host="h", token=token)
            assert " 1 of 2 ranks of group 'near'" in caught.value.reason
            assert f"h (pid {os.getpid()}); 2 processes " in caught.value.reason
            assert "--nixl-group-token" in caught.value.reason
            assert "--nixl-group-token" in caught.value.remedy
            for name in ("near", "nearby"):  # complete the groups that still wait
                stack.enter_context(claiming(etcd, pool, name, [None], token="b", size=3 if name == "near" else 2))

    def test_a_timeout_mentions_no_token_without_such_processes(self, client: EtcdClient) -> None:
        with pytest.raises(MissingRanksError) as caught:
            join(client, "near", 2, timeout=SOON, token="a")
        assert "token" not in str(caught.value)


class TestWaiting:
    """The sentences during the wait."""

    @pytest.fixture
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "MESSAGE_SECONDS", 0.1)

    @pytest.mark.usefixtures("often")
    def test_missing_ranks_are_named(self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor) -> None:
        messages: list[str] = []
        with ExitStack() as stack:
            claims = stack.enter_context(claiming(etcd, pool, "say", [0], size=3, waiting=messages.append))
            _wait_for(messages, "waiting for ranks 1, 2 of group 'say' (1 of 3 ")
            claims += stack.enter_context(claiming(etcd, pool, "say", [1], size=3))
            _wait_for(messages, "waiting for rank 2 of group 'say' (2 of 3 ")
            claims += stack.enter_context(claiming(etcd, pool, "say", [2], size=3))
            assert [registration.result(SECONDS).rank for registration in claims] == [0, 1, 2]

    @pytest.mark.usefixtures("often")
    @pytest.mark.parametrize(("requested", "named", "first"), [(0, "rank 0", True), (None, "a rank", False)])
    def test_a_rank_that_is_killed_before_the_start_is_named(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor, requested: int | None, named: str, first: bool
    ) -> None:
        messages: list[str] = []
        killed = f"{group_root(PREFIX, 'say')}members/killed"
        with ExitStack() as stack:
            # What a rank leaves that was killed: a key whose lease ends later.
            left = Candidate("killed", "node-0", 7131, 3, requested).value
            if first:
                client.put(killed, left)
            late = stack.enter_context(claiming(etcd, pool, "say", [None], size=3, waiting=messages.append))
            if not first:
                _wait_for(messages, "waiting for 2 of 3 ranks of group 'say'; arrived: ")
                client.put(killed, left)
            _wait_for(messages, "waiting for 1 of 3 ranks of group 'say'; arrived: ")
            client.delete(killed)
            _wait_for(messages, "waiting for 2 of 3 ", f"; registered, and is gone again: {named} on node-0 (pid 7131)")
            assert not late[0].done()
            late += stack.enter_context(claiming(etcd, pool, "say", [None, None], size=3))
            assert sorted(future.result(SECONDS).rank for future in late) == [0, 1, 2]

    @pytest.mark.usefixtures("often")
    def test_processes_are_named_if_their_ranks_are_not_known(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        messages: list[str] = []
        with ExitStack() as stack:
            claims = stack.enter_context(claiming(etcd, pool, "say", [1], size=3, waiting=messages.append, host="a"))
            _wait_for(messages, "waiting for ranks 0, 2 of group 'say' (1 of 3 ")
            claims += stack.enter_context(claiming(etcd, pool, "say", [None], size=3, host="b"))
            pid = os.getpid()
            _wait_for(messages, "waiting for 1 of 3 ranks of group 'say'", f": a (pid {pid}), b (pid {pid})")
            claims += stack.enter_context(claiming(etcd, pool, "say", [2], size=3))
            assert [registration.result(SECONDS).rank for registration in claims] == [1, 0, 2]

    @pytest.mark.usefixtures("often")
    def test_missing_ranks_at_a_barrier_are_named(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        messages: list[str] = []
        with group(etcd, pool, "say", 2) as members:
            waiting = pool.submit(members[0].barrier, SECONDS, messages.append)
            _wait_for(messages, f"waiting at barrier 1 of group 'say' for {members[0].members[1]}")
            members[1].barrier(SECONDS)
            waiting.result(SECONDS)

    @pytest.mark.usefixtures("often")
    def test_the_wait_survives_an_etcd_that_does_not_answer(
        self, client: EtcdClient, etcd: Etcd, pool: ThreadPoolExecutor
    ) -> None:
        messages: list[str] = []
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            with connect(parse_endpoints(proxied.endpoint), timeout=SECONDS) as through:
                registration = pool.submit(join, through, "say", 2, ttl=30, timeout=SECONDS, waiting=messages.append)
                wait_until(lambda: messages, "a sentence", seconds=60)
                proxied.cut()
                before = len(messages)
                assert wait([registration], timeout=0.5).not_done, (
                    "a sentence that cannot be built does not end the wait"
                )
                proxied.restore()
                wait_until(lambda: len(messages) > before + 1, "another one", seconds=60)
                with claiming(etcd, pool, "say", [None], size=2) as [other], registration.result(SECONDS) as member:
                    assert {member.rank, other.result(SECONDS).rank} == {0, 1}

    @pytest.mark.long
    def test_no_sentence_and_no_request_in_the_first_seconds(self, client: EtcdClient, etcd: Etcd) -> None:
        messages: list[str] = []
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            with (
                connect(parse_endpoints(proxied.endpoint), timeout=SECONDS) as through,
                pytest.raises(MissingRanksError),
            ):
                join(through, "say", 2, ttl=TTL, timeout=2, waiting=messages.append)
            methods = [request.method for request in proxied.requests]
        assert messages == []
        # After the timeout: who arrived, which groups have the same name, and the end of the registration.
        assert methods[:3] == ["LeaseGrant", "Txn", "Watch"]
        assert methods[3:] == ["Txn", "Txn", "LeaseRevoke", "Txn"]


class TestWords:
    def test_long_lists_are_shortened(self) -> None:
        candidates = [Candidate("t", f"h{number}", number, 99) for number in range(10)]
        names = ", ".join(f"h{number} (pid {number})" for number in range(8))
        assert who_is_missing(candidates, "g", 99) == f"89 of 99 ranks of group 'g'; arrived: {names} and 2 more"
        assert who_is_missing([Candidate("t", "h", 1, 99, 0)], "g", 99) == (
            "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 90 more of group 'g' (1 of 99 arrived)"
        )
        assert who_is_missing([], "g", 2) == "2 of 2 ranks of group 'g'; arrived: none"

    def test_conflicts_are_named_before_all_ranks_arrive(self) -> None:
        candidates = [Candidate("t", f"h{number}", 1, 3, 1) for number in range(2)]
        assert who_is_missing(candidates, "g", 3) == (
            "ranks 0, 2 of group 'g' (2 of 3 arrived); rank 1 is requested twice, by h0 (pid 1) and h1 (pid 1)"
        )

    def test_all_ranks_arrived_but_there_is_no_roster_yet(self) -> None:
        candidates = [Candidate("t", "h", number, 2) for number in range(2)]
        assert who_is_missing(candidates, "g", 2) == "the start of group 'g' (2 of 2 arrived)"

    def test_conflicts_name_ranks_and_processes(self) -> None:
        three = [Candidate("t", f"h{number}", 1, 4, 0) for number in range(3)]
        told_otherwise = Candidate("t", "h", 1, 8, 7)
        conflicts = rank_conflicts([*three, told_otherwise], 4).split("; ")
        assert len(conflicts) == 3
        assert conflicts[0].startswith("rank 0 ")
        assert conflicts[0].endswith(" 3 times, by h0 (pid 1), h1 (pid 1) and h2 (pid 1)")
        assert "rank 7" in conflicts[1]
        assert "h (pid 1)" in conflicts[1]
        assert conflicts[1].endswith(" 0 to 3")
        assert conflicts[2].endswith(": 4, 8")
        pairs = [Candidate("t", "h", 1, 12, number // 2) for number in range(12)]
        *_, last, more = rank_conflicts(pairs, 12).split("; ")
        assert last.startswith("rank 3 ")
        assert more.startswith("2 more")

    def test_only_conflicts_within_one_host_may_settle(self) -> None:
        first, same, other = (Candidate("t", host, 1, 3, 0) for host in ("a", "a", "b"))
        free, large = Candidate("t", "a", 1, 3), Candidate("t", "a", 1, 3, 3)
        assert may_settle([first, same, free], 3)
        # Of these ranks in conflict one is requested by processes of one host, and one by those of two.
        two = [first, same, *(Candidate("t", host, 1, 4, 1) for host in ("a", "b"))]
        for candidates in ([first, other, free], [first, same, other], [first, same, large], [first, free, free], two):
            assert not may_settle(candidates, 3)

    def test_a_run_of_one_rank_measures_between_itself_and_a_second_process(self) -> None:
        assert (ALONE.ranks, ALONE.rank, ALONE.pairs, ALONE.several) == (1, None, ((0, 1),), False)


class TestLeases:
    def test_the_usual_lease_is_the_default_of_the_option(self) -> None:
        [lease] = [item for item in OPTIONS if item.field == "lease"]
        assert lease.default == f"{USUAL}s"

    @pytest.mark.parametrize(("ttl", "longer"), [(2, 20), (6, 60), (359, 3590), (361, 3600)])
    def test_a_lost_lease_names_one_ten_times_as_long(self, ttl: int, longer: int) -> None:
        remedy = f"if its host is busy with other work, give every rank --nixl-lease={longer}s; "
        assert longer_lease(ttl, "its host") == remedy
        assert next(item for item in OPTIONS if item.field == "lease").parse(f"{longer}s") == longer

    def test_the_longest_lease_has_no_longer_one(self) -> None:
        assert longer_lease(MOST_LEASE, "its host") == ""

    @pytest.mark.long
    def test_a_lease_is_refreshed(self, client: EtcdClient) -> None:
        with join(client, "kept", 1, ttl=12) as member:
            seconds_left: list[int] = []

            def refreshed() -> bool:
                seconds = client.time_to_live(member.lease.id)
                assert seconds is not None
                seconds_left.append(seconds[0])
                return seconds[0] > min(seconds_left)

            wait_until(refreshed, "more time than was left before", seconds=60)
            assert _lives(client, member)
            member.check()

    @pytest.mark.long
    def test_a_member_stops_before_etcd_ends_its_lease(self, client: EtcdClient, etcd: Etcd) -> None:
        """The member's clock starts when the request is sent, so that its lease expires there first."""
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            with connect(parse_endpoints(proxied.endpoint), timeout=1) as cut_off:
                member = join(cut_off, "lost", 1, ttl=2)
                proxied.cut()

                def lost() -> bool:
                    # Asked first: on a busy machine the lease may end between the two.
                    lives = _lives(client, member)
                    try:
                        member.check()
                    except LeaseLostError:
                        return True
                    assert lives, "etcd has ended the lease, and the member has not noticed"
                    return False

                wait_until(lost, "the loss of its lease", seconds=60)
                with pytest.raises(LeaseLostError, match=r"group 'lost' .* 2 s.*\n.* --nixl-lease=20s; then start"):
                    member.barrier(1)
                with pytest.raises(EtcdError):
                    member.leave()
        wait_until(lambda: client.count_prefix("/pytest-nixl/groups/lost/members/") == 0, "its end", seconds=60)
        with join(client, "lost", 1, ttl=TTL):  # removes the keys that the first member left
            pass

    @pytest.mark.long
    def test_a_lease_that_etcd_makes_longer_is_named_by_its_real_length(self) -> None:
        """Etcd grants at least one and a half times its election timeout: 30 s, which a busy machine does not miss."""
        options = ("--election-timeout=20000", "--heartbeat-interval=2000")
        with running_etcd(*options) as slow, connect([slow.endpoint], timeout=SECONDS) as client:
            with join(client, "granted", 1, ttl=2) as member:
                granted = member.lease.ttl
                assert granted > 2
                assert member.ttl == granted
                stored = client.get("/pytest-nixl/groups/granted/run/frozen")
                assert stored is not None
                assert json.loads(stored)["ttl"] == granted
                assert f"heard nothing from it for {granted} s" in str(member.lease_lost())

    def test_etcd_may_be_too_busy_to_end_a_lease_at_once(
        self, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1,024 ranks that left at the same time were told so."""
        monkeypatch.setattr(membership, "LATE", 0.0)
        member = join(client, "busy", 1, ttl=TTL)
        lease = member.lease
        text = '{"error":"etcdserver: too many requests","code":8,"message":"etcdserver: too many requests"}'
        answers = [explain_answer(parse_endpoints(client.endpoints[0])[0], text), None]

        def revoke() -> None:
            if answer := answers.pop(0):
                raise answer
            Lease.revoke(lease)

        monkeypatch.setattr(lease, "revoke", revoke)
        member.leave()
        assert not answers
        assert client.time_to_live(lease.id) is None

    def test_a_member_that_leaves_does_not_wait_for_an_etcd_that_has_ended(
        self, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(membership, "LATE", 0.0)
        member = join(client, "ended", 1, ttl=TTL)
        revoke, answers = member.lease.revoke, [EtcdError("it has ended", cause="refused")]

        def refused() -> None:
            raise answers.pop()

        monkeypatch.setattr(member.lease, "revoke", refused)
        with pytest.raises(EtcdError, match="it has ended"):
            member.leave()
        revoke()
        with join(client, "ended", 1, ttl=TTL):  # removes the keys that the first member left
            pass

    def test_a_member_leaves_while_a_refresh_is_slow(self, client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "LATE", 0.0)
        failed: list[object] = []
        monkeypatch.setattr(threading, "excepthook", failed.append)
        requested, answered = threading.Event(), threading.Event()

        def refresh(lease: Lease) -> int:
            requested.set()
            answered.wait(SECONDS)
            return lease.ttl

        monkeypatch.setattr(Lease, "refresh", refresh)
        before = set(threading.enumerate())
        member = join(client, "slow", 1, ttl=2)
        [thread] = set(threading.enumerate()) - before
        assert requested.wait(SECONDS)
        member.leave()
        answered.set()
        thread.join(SECONDS)
        assert not failed

    def test_no_thread_is_left(self, client: EtcdClient) -> None:
        before = set(threading.enumerate())
        with join(client, "threads", 1, ttl=TTL):
            assert len(set(threading.enumerate()) - before) == 1
        assert set(threading.enumerate()) <= before


class TestWatch:
    def test_nothing_is_missed_when_the_connection_breaks(self, client: EtcdClient, etcd: Etcd) -> None:
        with EtcdProxy(etcd.url) as path:
            proxied = path.client()
            with connect(parse_endpoints(proxied.endpoint), timeout=SECONDS) as watching:
                revision = int(client.status()["header"]["revision"])
                client.put("/w/0", b"")
                events = []
                for event in watching.watch(Watched("/w/", revision + 1, prefix=True), seconds=SECONDS):
                    events.append((event.item.key, event.deleted))
                    if len(events) == 5:
                        break
                    proxied.cut()
                    client.put(f"/w/{len(events)}", b"")
                    proxied.restore()
        assert events == [(f"/w/{number}", False) for number in range(5)]
        client.delete_prefix("/w/")

    def test_a_watch_for_deletions_reports_nothing_else(self, client: EtcdClient) -> None:
        revision = int(client.status()["header"]["revision"])
        client.put("/d/1", b"")
        client.delete("/d/1")
        events = list(client.watch(Watched("/d/", revision + 1, prefix=True, deletions=True), seconds=SOON))
        assert [(event.item.key, event.deleted) for event in events] == [("/d/1", True)]

    def test_a_compacted_revision_is_an_error(self, client: EtcdClient) -> None:
        client.put("/c", b"")
        revision = int(client.status()["header"]["revision"])
        client._members.post("/kv/compaction", {"revision": revision, "physical": True}, dict)
        with pytest.raises(EtcdError) as caught:
            list(client.watch(Watched("/c", 1), seconds=SOON))
        assert caught.value.cause == "compacted"
        client.delete("/c")


def _wait_for(messages: list[str], start: str, end: str = "") -> None:
    def has_line() -> bool:
        # Each sentence ends with the time so far and its limit.
        whole = [re.fullmatch(r"(.*); \d+ s of \d+ s", sentence) for sentence in messages]
        return any(line is not None and line[1].startswith(start) and line[1].endswith(end) for line in whole)

    wait_until(has_line, f"{start!r} … {end!r}", seconds=60, remedy=lambda: f"said was {messages[-3:]}")


def _has(client: EtcdClient, prefix: str, count: int) -> bool:
    return client.count_prefix(prefix) == count


def _lives(client: EtcdClient, member: Membership) -> bool:
    return client.count_prefix(f"/pytest-nixl/groups/{member.group}/members/") == 1


def _pattern(member: Membership) -> str:
    return re.escape(str(member.members[member.rank]))
