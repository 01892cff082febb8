# SPDX-License-Identifier: Apache-2.0
"""How a rank leaves: together with the others unless something is lost, and without raising whatever fails.

The group is a double, because only it can fail at one step of the end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl import cluster_hooks
from pytest_nixl.cluster import rank_session
from pytest_nixl.cluster.command_check import Command
from pytest_nixl.cluster.driver import MembershipWatch
from pytest_nixl.cluster.group import (
    LeaseLostError,
    Member,
    MemberLeftError,
    MemberLostError,
    MissingRanksError,
    Roster,
)
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.cluster.rank_session import RankSession, RequestHandlers
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import KeyValue, encode
from pytest_nixl.etcd.watch import Watched, WatchEvent
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.host.devices import HostDevices
from pytest_nixl.model.results import Result
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.supervisor import SupervisorClient

GONE = NixlPluginError("rank 1 is gone")
PASSED = Ending(0, "NIXL gate: PASS")


class DoubleGroup:
    """The membership of a rank, and the driver of rank 0.

    :param barrier: the error of the barrier at the end.
    """

    rank, size, group = 0, 2, "g"

    def __init__(self, barrier: NixlPluginError | None = None) -> None:
        self._barrier = barrier
        self.gone: list[NixlPluginError] = []
        #: What was done, in order.
        self.log: list[object] = []

    def barrier(self, timeout: float) -> None:
        self.log.append(("barrier", timeout))
        if self._barrier is not None:
            raise self._barrier

    def end(self, ending: Ending) -> None:
        self.log.append(ending)

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def leaving(make_settings: Any, tmp_path: Path) -> Any:
    """Make a session of rank 0, or of a peer, that is about to leave."""

    def make(group: DoubleGroup, *, drives: bool = True, log_dir: str = str(tmp_path)) -> RankSession:
        session = RankSession.__new__(RankSession)
        stack = ExitStack()
        stack.callback(group.log.append, "left")
        vars(session).update(
            settings=make_settings(log_dir=log_dir), membership=group, driver=group if drives else None, fault=None,
            early=False, _left=False, _seen=["the group's keys"], _stack=stack, etcd=SimpleNamespace(kind="external"),
            supervisor=SimpleNamespace(directory=tmp_path / "workers"),
        )  # fmt: skip
        return session

    return make


def verdict(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "rank-0" / "verdict.json").read_text())
    return document


def test_rank_0_says_how_the_run_ends_and_leaves_with_the_others(leaving: Any, tmp_path: Path) -> None:
    group = DoubleGroup()
    session = leaving(group)
    assert session.finish(PASSED) == []
    assert group.log == [PASSED, ("barrier", 60.0), "close", "left"]
    assert verdict(tmp_path)["fault"] == ""
    assert session.finish(PASSED) == []
    assert len(group.log) == 4, "it leaves once"
    peer = DoubleGroup()
    assert leaving(peer, drives=False).finish(PASSED) == []
    assert peer.log == [("barrier", 60.0), "left"]


def test_the_etcd_of_a_rank_is_kept_until_the_others_have_left(leaving: Any) -> None:
    group, members = DoubleGroup(), iter([3, 2, 1])
    session = leaving(group, drives=False)

    def count_prefix(prefix: str) -> int:
        group.log.append(prefix)
        return next(members)

    vars(group).update(root="/g/")
    vars(session).update(etcd=SimpleNamespace(kind="embedded"), _client=SimpleNamespace(count_prefix=count_prefix))
    assert session.finish(PASSED) == []
    assert group.log == [("barrier", 60.0), *["/g/members/"] * 3, "left"]


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_does_not_wait_for_a_group_that_is_not_complete(leaving: Any, tmp_path: Path, early: bool) -> None:
    group = DoubleGroup()
    session = leaving(group)
    session.early = early
    group.gone = [] if early else [GONE, GONE]
    assert session.finish(PASSED) == []
    assert group.log == [PASSED, "close", "left"]
    assert verdict(tmp_path)["fault"] == ("" if early else str(GONE)), "each error is named once"
    assert (tmp_path / "rank-0" / "group.txt").exists() is not early


LEFT = MemberLeftError("rank 2 left: it is full")


@pytest.mark.parametrize(("gone", "described"), [([LEFT], False), ([LEFT, GONE], True), ([GONE, LEFT], True)])
def test_a_group_is_described_unless_every_lost_rank_said_why(
    leaving: Any, tmp_path: Path, gone: list[NixlPluginError], described: bool
) -> None:
    group = DoubleGroup()
    session = leaving(group)
    group.gone = gone
    session.finish(PASSED)
    assert (tmp_path / "rank-0" / "group.txt").exists() is described


def test_a_rank_that_is_lost_at_the_end_fails_the_run(leaving: Any, tmp_path: Path) -> None:
    group = DoubleGroup(barrier=GONE)
    session = leaving(group)
    assert session.finish(PASSED) == [str(GONE)]
    assert session.faults == [GONE]
    assert (verdict(tmp_path)["exit_code"], verdict(tmp_path)["fault"]) == (1, str(GONE))
    assert group.log[-2:] == ["close", "left"]
    assert leaving(DoubleGroup(barrier=GONE)).finish(Ending(3)) == [str(GONE)]
    assert verdict(tmp_path)["exit_code"] == 3, "the exit code of a run that failed stays"


def test_a_directory_that_cannot_be_written_does_not_keep_a_rank_from_leaving(leaving: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    group = DoubleGroup()
    [message] = leaving(group, log_dir=str(tmp_path / "file")).finish(PASSED)
    assert "could not be written" in message
    assert group.log == ["close", "left"]


@pytest.mark.parametrize(("count", "lines", "last"), [(0, 0, ""), (4, 4, "key 3"), (6, 5, "and 2 more keys")])
def test_a_few_ignored_keys_are_named(leaving: Any, count: int, lines: int, last: str) -> None:
    group = DoubleGroup()
    ignored = {f"key {number}": "it is forged" for number in range(count)}
    vars(group)["values"] = SimpleNamespace(ignored=ignored)
    description = leaving(group).ignored()
    assert len(description) == lines
    assert last in "".join(description[-1:])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_address_of_a_rank_is_the_one_from_which_it_reaches_the_etcd(host: str) -> None:
    etcd = cast(EtcdServer, SimpleNamespace(endpoint=f"http://{host}:2379"))
    handlers = RequestHandlers(cast(Command, None), cast(Settings, None), etcd, cast(SupervisorClient, None))
    assert handlers.address() == host.strip("[]")
    assert HostDevices.of(json.loads(json.dumps(handlers.by_name()["devices"]()))) == HostDevices.here()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_lease_is_over_is_lost_although_the_etcd_is_silent(rank: int) -> None:
    lost, silent = SimpleQueue[tuple[int, NixlPluginError]](), threading.Event()
    over = LeaseLostError("the lease is over")

    def follow(*_: object, **__: object) -> None:
        silent.wait(60)
        raise over

    def check() -> None:
        raise over

    members = [Member(number, f"t{number}", "h", 1) for number in range(2)]
    membership = cast(
        Any, SimpleNamespace(member_keys="/g/members/", rank=rank, follow=follow, check=check, members=members)
    )
    watch = MembershipWatch(cast(Any, None), membership, lambda member, error: lost.put((member.rank, error)))
    assert lost.get(timeout=60) == (rank, over)
    watch.close()
    silent.set()


@pytest.mark.parametrize("ranks", [None, (0, 1)])
def test_members_that_are_gone_are_told_and_a_watch_goes_on_after_its_last_event(
    ranks: tuple[int, ...] | None,
) -> None:
    """The client is a double, because no etcd ends a watch when a test says so."""
    guard = MembershipWatch.__new__(MembershipWatch)
    lost: list[tuple[int, str]] = []
    opened: list[dict[str, int]] = []

    def read(payload: Any) -> dict[str, Any]:
        """Return that the keys of ranks 0 and 2 are there."""
        places = [[0, 2]] if ranks is None else [[0], []]
        assert len(payload["success"]) == len(places)
        listings = [
            [{"key": encode(f"/g/members/t{rank}"), "create_revision": 1} for rank in place] for place in places
        ]
        responses = [{"response_range": {"kvs": keys, "count": len(keys)}} for keys in listings]
        return {"header": {"revision": "10"}, "succeeded": True, "responses": responses}

    def watch(*watched: Watched, seconds: float) -> Iterator[WatchEvent]:
        opened.append({prefix.key.removeprefix("/g/members/"): prefix.since for prefix in watched})
        assert all(prefix.deletions and prefix.prefix is (ranks is None) for prefix in watched)
        if len(opened) > 1:
            guard.close()
        for key in ("t0", "stranger"):
            yield WatchEvent(KeyValue(f"/g/members/{key}", b"", 0, 15, 0), deleted=True)

    client = cast(EtcdClient, SimpleNamespace(transaction=read, watch=watch))
    membership = Membership(client, "g", 3, ttl=6, root="/g/", host="h", wanted=None)
    members = tuple(Member(number, f"t{number}", "h", 1) for number in range(3))
    membership.accept(Roster(KeyValue("/g/run/frozen", b"", 9, 9, 1), 6, members, ""), 0, 10)
    vars(guard).update(
        _client=client, _membership=membership, _ranks=ranks,
        _lost=lambda member, error: lost.append((member.rank, error.reason)), _closed=threading.Event(),
    )  # fmt: skip
    guard._watch()
    [(first, reason), own_loss] = lost
    assert (first, own_loss) == (1, (0, membership.lease_lost().reason))
    assert reason.startswith("rank 1 on h (pid 1) of group 'g' is gone: ")
    assert opened == ([{"": 11}, {"": 16}] if ranks is None else [{"t0": 11, "t1": 11}, {"t0": 16, "t1": 11}])


def test_a_peer_that_no_longer_hears_the_etcd_of_rank_0_names_every_cause(
    leaving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object, **__: object) -> None:
        raise LeaseLostError("the lease is over", "start again")

    monkeypatch.setattr(rank_session, "serve", serve)
    group = DoubleGroup()
    vars(group)["members"] = [Member(0, "token", "there", 1)]
    session = leaving(group, drives=False)
    session.etcd.client, session.services = ExitStack, SimpleNamespace(by_name=dict)
    with pytest.raises(LeaseLostError, match="the lease is over"):
        session.serve()
    vars(session)["settings"] = replace(session.settings, etcd_listen="0.0.0.0:2379")
    with pytest.raises(MemberLostError) as lost:
        session.serve()
    assert lost.value.reason == (
        "rank 0 on there is gone, this rank is cut off from the etcd that rank 0 serves, or this host was suspended: "
        "the lease is over"
    )
    assert lost.value.remedy == "read the last output of rank 0, and check that its host still runs; start again"


@pytest.mark.parametrize(("early", "when"), [(True, ""), (False, " after the last check")])
def test_only_a_rank_that_loses_the_group_at_its_end_says_that_no_check_was_left(
    monkeypatch: pytest.MonkeyPatch, early: bool, when: str
) -> None:
    faults, messages = [GONE] if early else [], list[str]()

    def finish(_: Ending) -> list[str]:
        faults[:] = [GONE]
        return []

    rank = SimpleNamespace(faults=faults, finish=finish, ending=PASSED, drives=False)
    run = SimpleNamespace(rank_session=rank, record=SimpleNamespace(interrupted="", interrupt=messages.append))
    monkeypatch.setattr(cluster_hooks, "write_again", lambda *_: None)
    session = SimpleNamespace(exitstatus=0, config=None)
    assert cluster_hooks.leave_group(cast(Any, session), cast(Any, run)) == []
    assert messages == [f"INTERRUPTED{when}: rank 1 is gone"]
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(("gate", "name"), [(False, "NIXL verdict"), (True, "NIXL gate")])
@pytest.mark.parametrize(("count", "more"), [(0, []), (1, []), (12, []), (13, ["and 1 more"])])
def test_the_other_ranks_are_told_the_verdict_and_what_is_wrong(
    gate: bool, name: str, count: int, more: list[str]
) -> None:
    endings: list[Ending] = []
    wrong = [Result(f"check-{number}", "t", Verdict.FAIL, f"reason {number}") for number in range(count)]
    results = [Result("first", "t", Verdict.PASS), *wrong, Result("last", "t", Verdict.NOT_APPLICABLE)]
    record = SimpleNamespace(results=results, interrupted="")
    rank = SimpleNamespace(faults=[], finish=endings.append, ending=None)
    run = SimpleNamespace(rank_session=rank, usable=True, settings=SimpleNamespace(gate=gate), record=record)
    cluster_hooks.leave_group(cast(Any, SimpleNamespace(exitstatus=min(count, 1), config=None)), cast(Any, run))
    [ending] = endings
    summary, *lines = ending.verdict.splitlines()
    assert summary.startswith(f"{name}: {'FAIL' if count else 'PASS'} (1 PASS, ")
    assert lines == [*(f"FAIL: check-{number}: reason {number}" for number in range(min(count, 12))), *more]


@pytest.mark.parametrize("fails", ["require_closed", "RequestHandlers", "_join"])
def test_a_rank_that_cannot_join_discards_the_etcd_that_it_started(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[bool] = []

    def refused(*_: object) -> None:
        raise GONE

    for name in ("require_closed", "RequestHandlers"):
        monkeypatch.setattr(rank_session, name, lambda *_: None)
    etcd = SimpleNamespace(discard=lambda: discarded.append(True), client=lambda: ExitStack())
    monkeypatch.setattr(rank_session, "meeting_etcd", lambda *_: etcd)
    monkeypatch.setattr(RankSession if fails == "_join" else rank_session, fails, refused)
    arguments: Any = None
    with pytest.raises(NixlPluginError, match="rank 1 is gone"):
        RankSession(arguments, arguments, arguments, arguments, arguments)
    assert discarded == [True]


@pytest.mark.parametrize(
    ("count", "more"), [(0, ""), (3, "; its etcd refused 3 connections for another --nixl-group-token, or none")]
)
def test_a_rank_that_misses_others_says_how_many_connections_its_etcd_refused(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch, count: int, more: str
) -> None:
    messages: list[str] = []

    def join(*_: object, waiting: Any, **__: object) -> None:
        waiting("waiting for rank 1")
        raise MissingRanksError("waited for rank 1", "start it")

    monkeypatch.setattr(rank_session, "join", join)
    monkeypatch.setattr(rank_session, "refusals", lambda _: count)
    session = RankSession.__new__(RankSession)
    vars(session).update(settings=make_settings(), etcd=EmbeddedServer.__new__(EmbeddedServer), _client=None)
    with pytest.raises(MissingRanksError) as caught:
        session._join(cast(Any, SimpleNamespace(group="g", ranks=2, rank=0)), messages.append)
    assert (caught.value.reason, caught.value.remedy) == (f"waited for rank 1{more}", "start it")
    assert messages == [f"waiting for rank 1{more}"]


def test_a_rank_that_has_joined_leaves_once_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    for name in ("require_closed", "RequestHandlers"):
        monkeypatch.setattr(rank_session, name, lambda *_: None)
    client = ExitStack()
    client.callback(log.append, "client")
    etcd = SimpleNamespace(kind="external", discard=lambda: log.append("etcd"), client=lambda: client)
    membership = SimpleNamespace(
        rank=0, size=1, members=[Member(0, "token", "here", 1)], leave=lambda: log.append("leave"),
        barrier=lambda timeout, waiting: log.append(("barrier", timeout)),
    )  # fmt: skip
    monkeypatch.setattr(rank_session, "meeting_etcd", lambda *_: etcd)
    monkeypatch.setattr(RankSession, "_join", lambda *_: membership)
    arguments: Any = None
    session = RankSession(
        cast(Settings, SimpleNamespace(join_timeout=7.0)),
        cast(Any, SimpleNamespace(group="g")),
        arguments,
        arguments,
        arguments,
    )
    assert log == [("barrier", 7.0)]
    assert (session.fault, session.early, session.ending, session.name) == (None, False, None, "rank 0 of 1 on here")
    assert session.drives
    membership.rank = 1
    assert not session.drives
    for _ in range(2):
        session.close()
    assert log == [("barrier", 7.0), "leave", "client", "etcd"]


def session_of(make_settings: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[RankSession, list[Ending]]:
    """Return a session of a group of two, and the endings that it is told; nothing reaches an etcd."""
    ended: list[Ending] = []
    session = RankSession.__new__(RankSession)
    members = [Member(number, f"t{number}", f"node-{number}", 9) for number in range(2)]
    vars(session).update(
        settings=make_settings(**given), membership=SimpleNamespace(rank=0, size=2, members=members),
        etcd=SimpleNamespace(client=None), supervisor=None, services=SimpleNamespace(by_name=lambda: {}),
        _command=Command("1", {"--nixl-timeout": "60s"}, ["t.py::t"], 0),
    )  # fmt: skip
    monkeypatch.setattr(RankSession, "finish", lambda _, ending: ended.append(ending))
    return session, ended


@pytest.mark.parametrize("timeout", ["60s", "30s"])
def test_rank_0_refuses_to_start_if_another_rank_was_started_otherwise(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch, timeout: str
) -> None:
    session, ended = session_of(make_settings, monkeypatch)
    other = Command("1", {"--nixl-timeout": timeout}, ["t.py::t"], 0).packed()
    monkeypatch.setattr(rank_session, "RankDriver", lambda *_, **__: SimpleNamespace(ask_all=lambda _: {1: other}))
    if timeout == "60s":
        session.drive(lambda _: None)
        assert ended == []
        return
    with pytest.raises(pytest.UsageError, match=r"rank 1 on node-1 .*30s.*: start every rank with the same command"):
        session.drive(lambda _: None)
    [ending] = ended
    assert ending.code == pytest.ExitCode.USAGE_ERROR
    assert "30s" in ending.refusal


def test_a_command_that_cannot_be_read_is_an_error_of_its_rank(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = session_of(make_settings, monkeypatch)
    monkeypatch.setattr(rank_session, "RankDriver", lambda *_, **__: SimpleNamespace(ask_all=lambda _: {1: "x"}))
    with pytest.raises(NixlPluginError, match="rank 1 on node-1 sent an invalid answer to 'command'"):
        session.drive(lambda _: None)


@pytest.mark.parametrize("refusal", ["", "rank 1 was started with another command"])
def test_a_peer_ends_as_rank_0_says_and_with_its_refusal(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    session, ended = session_of(make_settings, monkeypatch)
    ending = Ending(4, refusal=refusal)
    monkeypatch.setattr(rank_session, "serve", lambda *_, **__: ending)
    if refusal:
        with pytest.raises(pytest.UsageError, match=refusal):
            session.serve()
        assert ended == [ending]
    else:
        assert session.serve() is session.ending is ending
        assert ended == []


@pytest.mark.parametrize("usable", [True, False])
def test_agents_get_the_etcd_of_the_group_if_they_can_use_it(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    session, _ = session_of(make_settings, monkeypatch)
    monkeypatch.setattr(rank_session, "for_agents", lambda _: usable)
    assert session.agents_etcd() is (session.etcd if usable else None)
