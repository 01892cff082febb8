# SPDX-License-Identifier: Apache-2.0
"""Group membership on a real etcd: ranks, barriers, leaving, refusals, and the end of a lease."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.etcd import Etcd

from pytest_nixl.cluster import membership
from pytest_nixl.cluster.group import (
    MOST_LEASE,
    PREFIX,
    Candidate,
    JoinRefusedError,
    LeaseLostError,
    Member,
    MemberLostError,
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
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, Lease, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.proxy import EtcdProxy
from pytest_nixl.etcd.transaction import KeyValue
from pytest_nixl.etcd.watch import Watched, WatchEvent
from pytest_nixl.model.settings import OPTIONS

#: Seconds: a lease that does not expire on a busy machine; for each step there; and a wait that times out.
TTL, SECONDS, SOON = 20, 60, 0.5
PID = os.getpid()


class Meeting:
    """Processes that meet in a real etcd: threads, each with its own client. They leave their groups with the test."""

    def __init__(self, etcd: Etcd, pool: ThreadPoolExecutor, stack: ExitStack) -> None:
        self.etcd, self.pool, self.stack = etcd, pool, stack
        self.client = self.connect()
        self.path = stack.enter_context(EtcdProxy(etcd.url))

    def connect(self, url: str = "", timeout: float = SECONDS) -> EtcdClient:
        """Return a client of the etcd, or of a proxy to it."""
        return self.stack.enter_context(connect(parse_endpoints(url or self.etcd.url), timeout=timeout))

    def claim(
        self, name: str, *requested: int | None, urls: Sequence[str] = (), **options: Any
    ) -> list[Future[Membership]]:
        """Let one process join for each requested rank, each from its own host unless the options say otherwise."""
        joining = []
        for number, rank in enumerate(requested):
            more = {"host": f"host-{number}", "size": len(requested), "ttl": TTL, "timeout": SECONDS, **options}
            client = self.connect(urls[number] if urls else "")
            joining.append(self.pool.submit(join, client, name, wanted=rank, **more))
        self.stack.callback(self.leave, joining)
        return joining

    def group(self, name: str, size: int) -> list[Membership]:
        """Return the members of a complete group, by rank."""
        members = [future.result(SECONDS) for future in self.claim(name, *[None] * size)]
        return sorted(members, key=lambda member: member.rank)

    def barrier(self, members: Sequence[Membership]) -> None:
        """Let all members pass a barrier."""
        for future in [self.pool.submit(member.barrier, SECONDS) for member in members]:
            future.result(90)

    def has(self, prefix: str, count: int) -> None:
        """Wait until this number of keys below the groups' prefix starts so."""
        keys = f"{PREFIX}/{prefix}"
        wait_until(lambda: self.client.count_prefix(keys) == count, f"{count} keys under {keys}", seconds=60)

    @staticmethod
    def leave(joining: Sequence[Future[Membership]]) -> None:
        for registration in joining:
            if registration.exception(90) is None:
                registration.result().leave()


@pytest.fixture
def meeting(etcd: Etcd) -> Iterator[Meeting]:
    with ThreadPoolExecutor(32) as pool, connect([etcd.endpoint], timeout=SECONDS) as client:
        with ExitStack() as stack:
            yield Meeting(etcd, pool, stack)
        assert client.get_prefix("/pytest-nixl/") == {}, "every group cleans up after itself"


def refusal(registration: Future[Membership]) -> JoinRefusedError:
    """Return the error with which a process was refused."""
    error = registration.exception(SECONDS)
    assert isinstance(error, JoinRefusedError)
    return error


def test_requested_ranks_are_given_and_the_free_ones_in_order_of_arrival(meeting: Meeting) -> None:
    requested = [None, 2, None, 0, None]
    members = [registration.result(SECONDS) for registration in meeting.claim("g", *requested)]
    created = [item.key.rsplit("/", 1)[1] for item in meeting.client.by_creation(f"{PREFIX}/g/members/")]
    by_rank = {rank: number for number, rank in enumerate(requested) if rank is not None}
    others = [number for number, rank in enumerate(requested) if rank is None]
    others.sort(key=lambda number: created.index(members[number].token))
    free = [rank for rank in range(len(requested)) if rank not in by_rank]
    by_rank |= dict(zip(free, others, strict=True))
    roster = tuple(
        Member(rank, members[number].token, f"host-{number}", PID) for rank, number in sorted(by_rank.items())
    )
    assert [member.members for member in members] == [roster] * len(members)
    assert {member.rank: number for number, member in enumerate(members)} == by_rank
    assert {(member.group, member.size) for member in members} == {("g", len(requested))}
    meeting.barrier(members)


def test_a_barrier_that_times_out_names_the_missing_ranks(meeting: Meeting) -> None:
    members = meeting.group("vain", 3)
    first, _, last = members[1].members
    remedy = "read the last output of these ranks"
    missing = f"waited 0.5 s at barrier 1 of group 'vain' for {first}, {last}"
    for more in ("", f"; the lease of {last} expired, and no process took that rank"):
        with pytest.raises(MissingRanksError) as caught:
            members[1].barrier(SOON)
        assert (caught.value.reason, caught.value.remedy) == (f"{missing}{more}", remedy)
        members[2].lease.revoke()  # as etcd does when a lease expires


def test_every_member_learns_of_a_member_that_dies_after_the_start(meeting: Meeting) -> None:
    members = meeting.group("lost", 3)
    meeting.barrier(members)
    waiting = [meeting.pool.submit(member.barrier, SECONDS) for member in members[:2]]
    members[2].lease.revoke()
    remedy = "if its host is busy with other work, give every rank --nixl-lease=200s; then start the run again"
    for future in waiting:
        error = future.exception(SECONDS)
        assert isinstance(error, MemberLostError)
        assert error.reason == f"group 'lost' has lost {members[2].members[2]}: its lease expired, or it left"
        assert error.remedy == f"read the last output of each lost rank; {remedy}"
    with pytest.raises(LeaseLostError, match=rf"group 'lost' \(rank 2, {members[2].host}, pid {PID}\) lost its "):
        members[2].barrier(SECONDS)


@pytest.mark.long
def test_a_member_that_leaves_after_a_barrier_is_not_lost(meeting: Meeting) -> None:
    def meet_and_leave(member: Membership) -> None:
        member.barrier(SECONDS)
        member.barrier(SECONDS)
        member.leave()

    for _ in range(5):
        for future in [meeting.pool.submit(meet_and_leave, member) for member in meeting.group("leave", 8)]:
            future.result(90)


def test_rank_of_a_member_that_died_before_the_start_is_reassigned(meeting: Meeting) -> None:
    members = meeting.group("again", 2)
    [taking] = meeting.claim("again", None, size=2, host="new-host")
    wait([taking], SOON)
    assert not taking.done(), "a rank may become free for as long as a lease lasts"
    waiting = meeting.pool.submit(members[0].barrier, SECONDS)
    meeting.has("again/arrived/000001/", 1)
    members[1].lease.revoke()
    replacement = taking.result(SECONDS)
    replacement.barrier(SECONDS)
    waiting.result(SECONDS)
    assert replacement.rank == 1
    assert members[0].members == replacement.members
    assert members[0].members[1] == Member(1, replacement.token, "new-host", PID)


def test_the_member_that_opens_the_barrier_learns_of_a_rank_that_is_reassigned_at_that_moment(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = meeting.group("moment", 2)
    waiting = meeting.pool.submit(members[1].barrier, SECONDS)
    meeting.has("moment/arrived/000001/", 1)
    transact, calls = members[0].transact, list[Any]()

    def opening(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:  # the member has seen that all have arrived, and opens the barrier
            members[1].lease.revoke()
            meeting.claim("moment", None, size=2, host="new-host")[0].result(SECONDS)
        return transact(*arguments)

    monkeypatch.setattr(members[0], "transact", opening)
    members[0].barrier(SECONDS)
    assert len(calls) == 2
    assert members[0].members[1].host == "new-host"
    wait([waiting], SECONDS)


@pytest.mark.parametrize(
    ("name", "size", "rank", "reason"),
    [
        *(
            (name, 2, None, f"{name!r} is not a valid group name: expected 1 to 128 letters, digits, . _ and -")
            for name in ("", "a/b", "x" * 129)
        ),
        ("g", 0, None, "a group cannot have 0 ranks: expected 1 or more"),
        ("g", 2, -1, "-1 is not a valid rank: ranks are counted from 0"),
    ],
)
def test_an_invalid_name_size_or_rank_is_refused(
    meeting: Meeting, name: str, size: int, rank: int | None, reason: str
) -> None:
    with pytest.raises(ValueError) as caught:
        join(meeting.client, name, size, wanted=rank)
    assert str(caught.value) == reason


class TestRefused:
    def test_a_late_process_with_the_names_of_the_members(self, meeting: Meeting) -> None:
        members = meeting.group("full", 2)
        meeting.barrier(members)
        for size, reason in (
            (2, "the run has already started"),
            (3, "it has 2 ranks, but this process has --nixl-ranks=3"),
        ):
            [late] = meeting.claim("full", None, size=size, timeout=SOON)
            names = ", ".join(map(str, members[0].members))
            assert refusal(late).reason == f"group 'full' is closed: {reason}; its members are {names}"
            remedy = "give each job its own --nixl-group; or, to replace that group, end its processes first"
            assert refusal(late).remedy == remedy
        meeting.barrier(members)

    def test_requests_in_conflict_are_refused_and_the_next_start_succeeds(self, meeting: Meeting) -> None:
        errors = [refusal(registration) for registration in meeting.claim("twice", 0, 5)]
        range_error = f"rank 5, requested by host-1 (pid {PID}), is not in the range 0 to 1"
        assert {error.reason for error in errors} == {f"group 'twice' cannot start: {range_error}"}
        assert {error.remedy for error in errors} == {
            "give each process a different --nixl-rank (or check what the launcher sets, such as SLURM_PROCID), and "
            "give each job its own --nixl-group"
        }
        assert meeting.client.get_prefix("/pytest-nixl/") == {}
        meeting.group("twice", 2)

    def test_two_requests_from_one_host_not_while_a_lease_may_end(self, meeting: Meeting) -> None:
        """The first process was killed, and its lease has not ended when its successor completes the group."""
        lease = meeting.client.lease(SECONDS)
        meeting.client.put(f"{PREFIX}/killed/members/killed", Candidate("killed", "same", 1, 2, 0).value, lease)
        [again] = meeting.claim("killed", 0, size=2, host="same")
        wait([again], SOON)
        assert not again.done()
        lease.revoke()
        [other] = meeting.claim("killed", 1, size=2, host="same")
        assert [registration.result(SECONDS).rank for registration in (again, other)] == [0, 1]

    @pytest.mark.parametrize("nth", [1, 2, 3])
    def test_although_an_answer_is_lost(self, meeting: Meeting, nth: int) -> None:
        """The lost answer is that to the registration, to the read, or to the write of the refusal."""
        [other] = meeting.claim("answer", 1, size=2)
        meeting.has("answer/members/", 1)
        proxied = meeting.path.client()
        proxied.lose_answer(lambda request: request.method == "Txn", nth=nth)
        [losing] = meeting.claim("answer", 1, size=2, host="host-1", urls=[proxied.endpoint])
        hosts = f"host-0 (pid {PID}) and host-1 (pid {PID})"
        reason = f"group 'answer' cannot start: rank 1 is requested twice, by {hosts}"
        assert [refusal(registration).reason for registration in (losing, other)] == [reason, reason]

    def test_a_process_that_finds_an_earlier_refusal_waits_for_that_group_to_end(self, meeting: Meeting) -> None:
        root, client = group_root(PREFIX, "earlier"), meeting.client
        refused = {"ttl": TTL, "members": [], "refusal": "group 'earlier' cannot start: why"}
        client.put(f"{root}run/frozen", json.dumps(refused).encode())
        client.put(f"{root}members/slow", b'{"host": "slow", "pid": 1, "size": 1}')
        [early] = meeting.claim("earlier", None, timeout=SOON)
        assert refusal(early).reason == "group 'earlier' cannot start: why"
        proxied = meeting.path.client()
        [late] = meeting.claim("earlier", None, urls=[proxied.endpoint])
        meeting.path.wait(
            lambda: any(request.method == "Watch" for request in proxied.requests), "it waits", seconds=SECONDS
        )
        client.delete(f"{root}members/slow")
        assert late.result(SECONDS).rank == 0


class Watches:
    """What memberships watch from now on, and the event that each watch yields, made from the membership.

    A real etcd yields none at a known moment. The clock of processes that join stands still.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.events: list[Callable[[Membership], WatchEvent]] = []
        now = time.monotonic()

        def watch(
            membership: Membership, *watched: Watched, deadline: float, known: Sequence[str] = (), tick: object = None
        ) -> Iterator[WatchEvent]:
            keys = [
                (span.key.removeprefix(membership.root), span.since, span.prefix, span.deletions) for span in watched
            ]
            known = sorted(key.rpartition("/")[2] for key in known)
            self.calls.append((keys, round(deadline - now, 6), known, tick is not None))
            if self.events:
                yield self.events.pop(0)(membership)

        monkeypatch.setattr("pytest_nixl.cluster.joining.time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(Membership, "watch", watch)


def event(key: str, value: bytes = b"", *, deleted: bool) -> Callable[[Membership], WatchEvent]:
    """Return an event of a key of the group."""
    return lambda membership: WatchEvent(KeyValue(f"{membership.root}{key}", value, 1, 9, 1), deleted=deleted)


@pytest.mark.parametrize(
    ("happens", "timeout", "seconds", "times"),
    [
        ([], SECONDS, TTL + 2.0, 1),
        ([], 7, 7.0, 1),
        ([event("members/killed", deleted=True)], SECONDS, TTL + 2.0, 2),
        ([event("members/stranger", deleted=True)], SECONDS, TTL + 2.0, 1),
        ([event("run/frozen", deleted=True)], SECONDS, TTL + 2.0, 1),
    ],
)
def test_a_conflict_may_settle_for_a_lease_and_no_longer_than_there_is_time(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, happens: list[Any], timeout: float, seconds: float, times: int
) -> None:
    """The other process has not really left, so that the conflict is the same when it is looked at again."""
    members, lease = f"{PREFIX}/c/members/", meeting.client.lease(SECONDS)
    meeting.client.put(f"{members}killed", Candidate("killed", "same", 1, 2, 0).value, lease)
    [killed] = meeting.client.by_creation(members)
    watches = Watches(monkeypatch)
    watches.events += happens
    [again] = meeting.claim("c", 0, size=2, host="same", timeout=timeout, waiting=print)
    twice = f"rank 0 is requested twice, by same (pid 1) and same (pid {PID})"
    assert refusal(again).reason == f"group 'c' cannot start: {twice}"
    after = killed.create_revision + 2  # what was written before this process registered is known
    keys = [("run/frozen", after, False, False), ("members/", after, True, True)]
    [(_, _, known, _), *_] = watches.calls
    assert "killed" in cast("list[str]", known)
    assert watches.calls == [(keys, seconds, known, True)] * times
    lease.revoke()
    meeting.client.delete_prefix(f"{PREFIX}/c/")


@pytest.mark.parametrize(("timeout", "seconds"), [(SECONDS, TTL + 2.0), (7, 7.0)])
def test_a_process_without_a_rank_waits_for_a_lease_of_the_group_and_no_longer_than_it_has_time(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, timeout: float, seconds: float
) -> None:
    members, watches = meeting.group("full", 2), Watches(monkeypatch)
    after = int(meeting.client.status()["header"]["revision"]) + 1
    [late] = meeting.claim("full", None, size=2, ttl=5, timeout=timeout)
    names = ", ".join(map(str, members[0].members))
    assert refusal(late).reason == f"group 'full' is closed: all its ranks are taken; its members are {names}"
    keys = [("run/", after, True, False), ("members/", after, True, True)]
    assert watches.calls == [(keys, seconds, sorted(member.token for member in members), False)]
    members[1].lease.revoke()
    [late] = meeting.claim("full", 0, size=2, timeout=timeout)
    taken = "rank 0, which this process requests, is taken"
    assert refusal(late).reason == f"group 'full' is closed: {taken}; its members are {names}"


@pytest.mark.parametrize("token", ["", "t"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_refusal_is_for_the_processes_that_it_lists_and_without_a_token_for_all(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, token: str, listed: bool
) -> None:
    """With a token a process that is not listed may take the rank of one that leaves."""

    def refuse(membership: Membership) -> WatchEvent:
        ours = membership.token if listed else "other"
        key, listing = membership.roster_key, [(ours, "h", 1), ("second", "h", 2)]
        value = membership.values.frozen(key, TTL, listing, refusal="rank 0 is requested twice")
        return event("run/frozen", value, deleted=False)(membership)

    Watches(monkeypatch).events.append(refuse)
    [joining] = meeting.claim("refused", None, size=2, token=token, timeout=SOON)
    if listed or not token:
        assert refusal(joining).reason == "rank 0 is requested twice"
    else:
        assert isinstance(joining.exception(SECONDS), MissingRanksError), "the group is not complete yet"


START = "start the missing ranks with the same --nixl-etcd and --nixl-group; if they run, read their output"


class TestTimeout:
    def test_names_who_is_missing(self, meeting: Meeting) -> None:
        with pytest.raises(MissingRanksError) as caught:
            join(meeting.client, "lone", 4, timeout=SOON, wanted=2)
        missing = "ranks 0, 1, 3 of group 'lone' (1 of 4 arrived)"
        assert (caught.value.reason, caught.value.remedy) == (f"waited 0.5 s for {missing}", START)

    @pytest.mark.parametrize(("token", "count", "waiting"), [("", 1, "1 process waits"), ("a", 2, "2 processes wait")])
    def test_counts_processes_with_another_token(self, meeting: Meeting, token: str, count: int, waiting: str) -> None:
        # Not counted: a group of another name, and a group that has started.
        for name, other, size, ranks in (("near", "b", count + 1, count), ("nearby", "b", 2, 1), ("near", "c", 1, 1)):
            meeting.claim(name, *[None] * ranks, token=other, size=size)
            meeting.has(f"{group_root('', name, other)[1:]}members/", ranks)
        meeting.has(f"{group_root('', 'near', 'c')[1:]}run/frozen", 1)
        with pytest.raises(MissingRanksError) as caught:
            join(meeting.client, "near", 2, timeout=SOON, host="h", token=token)
        assert caught.value.reason == (
            f"waited 0.5 s for 1 of 2 ranks of group 'near'; arrived: h (pid {PID}); {waiting} in a group of the same "
            "name with another --nixl-group-token"
        )
        assert caught.value.remedy == (
            "give every rank the same --nixl-group-token; or, if these are different runs, give each its own "
            "--nixl-group"
        )
        for name, size in (("near", count + 1), ("nearby", 2)):  # complete the groups that still wait
            meeting.claim(name, None, token="b", size=size)


class TestToken:
    def test_the_prefix_of_the_keys_depends_on_the_token(self) -> None:
        assert group_root("/p/", "g") == group_root("/p", "g", "") == "/p/g/"
        # echo -n g | openssl dgst -sha256 -hmac secret
        assert group_root("/p", "g", "secret") == "/p/g.03a68c3caefc7833/"
        assert group_name(group_root("", "g", "secret").strip("/")) == ("g", True)
        assert group_name("g.b") == ("g.b", False)


class TestWaiting:
    """The sentences during the wait."""

    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "MESSAGE_SECONDS", 0.1)

    @pytest.mark.parametrize(("requested", "named"), [(0, "rank 0"), (None, "a rank")])
    def test_a_rank_that_is_killed_before_the_start_is_named(
        self, meeting: Meeting, requested: int | None, named: str
    ) -> None:
        messages: list[str] = []
        killed = f"{PREFIX}/say/members/killed"
        late = meeting.claim("say", None, size=3, waiting=messages.append, host="b")
        us, it = f"b (pid {PID})", "node-0 (pid 7131)"
        _wait_for(messages, f"waiting for 2 of 3 ranks of group 'say'; arrived: {us}")
        # What a rank leaves that was killed: a key whose lease ends later.
        meeting.client.put(killed, Candidate("killed", "node-0", 7131, 3, requested).value)
        _wait_for(messages, f"waiting for 1 of 3 ranks of group 'say'; arrived: {us}, {it}")
        meeting.client.delete(killed)
        gone = f"; registered, and is gone again: {named} on {it}"
        _wait_for(messages, f"waiting for 2 of 3 ranks of group 'say'; arrived: {us}{gone}")
        late += meeting.claim("say", None, None, size=3)
        assert sorted(future.result(SECONDS).rank for future in late) == [0, 1, 2]

    def test_missing_ranks_at_a_barrier_are_named(self, meeting: Meeting) -> None:
        messages: list[str] = []
        members = meeting.group("say", 2)
        waiting = meeting.pool.submit(members[0].barrier, SECONDS, messages.append)
        _wait_for(messages, f"waiting at barrier 1 of group 'say' for {members[0].members[1]}")
        members[1].barrier(SECONDS)
        waiting.result(SECONDS)

    def test_the_wait_survives_an_etcd_that_does_not_answer(self, meeting: Meeting) -> None:
        messages: list[str] = []
        proxied = meeting.path.client()
        [first] = meeting.claim("say", None, size=2, ttl=30, waiting=messages.append, urls=[proxied.endpoint])
        wait_until(lambda: messages, "a sentence", seconds=60)
        proxied.cut()
        before = len(messages)
        assert wait([first], timeout=0.5).not_done, "a sentence that cannot be built does not end the wait"
        proxied.restore()
        wait_until(lambda: len(messages) > before + 1, "another one", seconds=60)
        [other] = meeting.claim("say", None, size=2)
        assert {first.result(SECONDS).rank, other.result(SECONDS).rank} == {0, 1}


def candidates(*requested: int | None, size: int, hosts: str = "") -> list[Candidate]:
    """Return processes h0, h1, … or of these hosts, that request these ranks."""
    names = hosts or [f"h{number}" for number in range(len(requested))]
    return [Candidate("t", host, 1, size, rank) for host, rank in zip(names, requested, strict=True)]


class TestWords:
    @pytest.mark.parametrize(
        ("arrived", "size", "sentence"),
        [
            (candidates(0, 1, size=3), 3, "rank 2 of group 'g' (2 of 3 arrived)"),
            (candidates(0, size=99), 99, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 90 more of group 'g' (1 of 99 arrived)"),
            (candidates(None, None, size=2), 2, "the start of group 'g' (2 of 2 arrived)"),
            (candidates(*[None] * 10, size=99), 99, "89 of 99 ranks of group 'g'; arrived: "
             f"{', '.join(f'h{number} (pid 1)' for number in range(8))} and 2 more"),
            (candidates(1, 1, size=3), 3, "ranks 0, 2 of group 'g' (2 of 3 arrived); rank 1 is requested twice, by "
             "h0 (pid 1) and h1 (pid 1)"),
            ([*candidates(0, size=3), *candidates(1, size=4)], 3, "rank 2 of group 'g' (2 of 3 arrived); the processes "
             "expect different numbers of ranks: 3, 4"),
        ],
    )  # fmt: skip
    def test_who_is_missing(self, arrived: list[Candidate], size: int, sentence: str) -> None:
        assert who_is_missing(arrived, "g", size) == sentence

    @pytest.mark.parametrize(
        ("requests", "size", "sentences"),
        [
            (candidates(0, 1, None, size=3), 3, []),
            ([*candidates(0, 0, 0, size=4), *candidates(7, size=8)], 4, [
                "rank 0 is requested 3 times, by h0 (pid 1), h1 (pid 1) and h2 (pid 1)",
                "rank 7, requested by h0 (pid 1), is not in the range 0 to 3",
                "the processes expect different numbers of ranks: 4, 8",
            ]),
            # As many are named as there are, up to four conflicts and eight processes of each.
            (candidates(*[5, 5, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4], size=12, hosts="abcdefghijkl"), 12, [
                *(f"rank {rank} is requested twice, by {pair[0]} (pid 1) and {pair[1]} (pid 1)"
                  for rank, pair in enumerate(("cd", "ef", "gh", "ij"))),
                "2 more conflicts",
            ]),
            (candidates(*[0] * 10, size=10), 10, ["rank 0 is requested 10 times, by "
             f"{', '.join(f'h{number} (pid 1)' for number in range(8))} and 2 more"]),
        ],
    )  # fmt: skip
    def test_conflicts_name_ranks_and_processes(
        self, requests: list[Candidate], size: int, sentences: list[str]
    ) -> None:
        assert rank_conflicts(requests, size) == "; ".join(sentences)

    @pytest.mark.parametrize(
        ("requested", "hosts", "may"),
        [
            ((0, 0, None), "aaa", True),
            ((0, 0, 1), "aab", True),
            ((0, 0, None), "aba", False),
            ((0, 0, 0), "aab", False),
            ((0, 0, 3), "aaa", False),
            ((0, None, None), "aaa", False),
            ((0, 0, 1, 1), "aaab", False),  # one of these ranks is requested by one host, and one by two
        ],
    )
    def test_only_conflicts_within_one_host_may_settle(
        self, requested: tuple[int | None, ...], hosts: str, may: bool
    ) -> None:
        assert may_settle(candidates(*requested, size=3, hosts=hosts), max(3, len(hosts))) is may


class TestLeases:
    @pytest.mark.parametrize(
        ("ttl", "longer"), [(2, 20), (6, 60), (359, 3590), (361, 3600), (MOST_LEASE, None), (MOST_LEASE - 1, 3600)]
    )
    def test_a_lost_lease_names_one_ten_times_as_long_if_there_is_one(self, ttl: int, longer: int | None) -> None:
        [option] = [item for item in OPTIONS if item.field == "lease"]
        assert option.default == f"{USUAL}s"
        remedy = f"if its host is busy with other work, give every rank --nixl-lease={longer}s; " if longer else ""
        assert longer_lease(ttl, "its host") == remedy
        assert longer is None or option.parse(f"{longer}s") == longer

    def test_etcd_may_be_too_busy_to_end_a_lease_at_once(
        self, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1,024 ranks that left at the same time were told that etcd is too busy."""
        monkeypatch.setattr(membership, "LATE", 0.0)
        member, answers = join(meeting.client, "leaving", 1, ttl=TTL), [EtcdError("busy", cause="busy")]
        lease = member.lease

        def revoke() -> None:
            if answers:
                raise answers.pop()
            Lease.revoke(lease)

        monkeypatch.setattr(lease, "revoke", revoke)
        member.leave()
        assert meeting.client.time_to_live(lease.id) is None

    def test_a_member_leaves_while_a_refresh_is_slow_and_leaves_no_thread(
        self, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        member = join(meeting.client, "slow", 1, ttl=2)
        [thread] = set(threading.enumerate()) - before
        assert requested.wait(SECONDS)
        member.leave()
        answered.set()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert not failed

    def test_no_thread_is_left(self, meeting: Meeting) -> None:
        before = set(threading.enumerate())
        with join(meeting.client, "threads", 1, ttl=TTL):
            assert len(set(threading.enumerate()) - before) == 1
        assert set(threading.enumerate()) <= before


def _wait_for(messages: list[str], expected: str) -> None:
    def has_line() -> bool:
        # Each sentence ends with the time so far and its limit.
        return any(re.fullmatch(rf"{re.escape(expected)}; \d+ s of {SECONDS} s", text) for text in messages)

    wait_until(has_line, repr(expected), seconds=60, remedy=lambda: f"said was {messages[-3:]}")
