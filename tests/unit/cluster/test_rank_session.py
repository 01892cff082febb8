# SPDX-License-Identifier: Apache-2.0
"""How a rank joins and leaves: together with the others unless something is lost, without raising whatever fails.

The group is a double, because only it can fail at one step of the end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
from pytest_nixl.cluster.placement import Placement
from pytest_nixl.cluster.rank_session import RankSession, RequestHandlers
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import KeyValue, encode
from pytest_nixl.etcd.watch import Watched, WatchEvent
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.host.devices import HostDevices
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient

GONE = NixlPluginError("rank 1 is gone")
LEFT = MemberLeftError("rank 2 left: it is full")
PASSED = Ending(0, "NIXL gate: PASS")
COMMAND = Command("1", {"--nixl-timeout": "60s"}, ["t.py::t"], 0)
MEMBERS = tuple(Member(rank, f"t{rank}", f"node-{rank}", 9) for rank in range(3))


LEAVING = ["leave", "close client", "discard etcd"]


class Scene:
    """The group of a rank, the driver of rank 0 and their etcd: they keep what is done, in order.

    :ivar log: what was done since the rank joined.
    """

    def __init__(self, make_settings: Callable[..., Settings], folder: Path) -> None:
        self.make_settings, self.folder = make_settings, folder
        self.log: list[object] = []
        self.joined: tuple[object, ...] = ()
        #: The error of a join, and of a barrier.
        self.join_fault: NixlPluginError | None = None
        self.fault: NixlPluginError | None = None
        self.commands = {1: COMMAND.packed()}
        self.gone: list[NixlPluginError] = []
        self.ignored: dict[str, str] = {}
        self.described: list[object] = []
        self.membership = SimpleNamespace(
            rank=0, size=2, group="g", root="/g/", members=MEMBERS[:2], values=SimpleNamespace(ignored=self.ignored),
            barrier=self.barrier, leave=lambda: self.log.append("leave"),
        )  # fmt: skip
        logs = {2: {"b.log": "of rank 2"}, 1: {"a.log": "of rank 1"}}
        self.driver = SimpleNamespace(
            gone=self.gone, end=self.log.append, close=lambda: self.log.append("close driver"),
            ask_all=lambda request: {"command": self.commands}[request],
            ask_living_peers=lambda request, seconds: {("last_words", 5.0): logs}[request, seconds],
        )  # fmt: skip
        self.members = iter([3, 2, 1])
        self.etcd = SimpleNamespace(
            kind="external", client=self.client, discard=lambda: self.log.append("discard etcd"), endpoint="http://e:1"
        )

    def barrier(self, timeout: float, waiting: object = None) -> None:
        self.log.append(("barrier", timeout))
        if self.fault is not None:
            raise self.fault

    def client(self) -> Any:
        client: Any = ExitStack()
        client.callback(self.log.append, "close client")
        client.count_prefix = self.count_prefix
        return client

    def count_prefix(self, prefix: str) -> int:
        self.log.append(prefix)
        return next(self.members)

    def join(self, client: object, group: str, size: int, *, waiting: Callable[[str], None], **options: object) -> Any:
        self.joined = group, size, options
        if self.join_fault is not None:
            waiting("waiting for rank 1")
            raise self.join_fault
        return self.membership

    def forensics(
        self, client: object, root: str, members: object, *, worker_logs: object, values: object
    ) -> list[str]:
        self.described.append((root, members, worker_logs, values))
        return ["the group's keys"]

    def session(self, rank: int = 0, *, drives: bool = True, **settings: object) -> RankSession:
        """Return a session of this rank, which has joined; it drives if it is rank 0, unless told otherwise."""
        self.membership.rank = rank
        placement = Placement(2, rank, "g", "--nixl-ranks", None, ())
        supervisor = cast(SupervisorClient, SimpleNamespace(directory=self.folder / "workers"))
        own_settings = self.make_settings(**{"log_dir": str(self.folder), **settings})
        session = RankSession(own_settings, placement, COMMAND, supervisor, self.log.append)
        self.log.clear()
        if rank == 0 and drives:
            session.drive(lambda _: None)
        return session

    def verdict(self, rank: int = 0) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.folder / f"rank-{rank}" / "verdict.json").read_text())
        return document

    @property
    def has_description(self) -> bool:
        return (self.folder / "rank-0" / "group.txt").exists()


@pytest.fixture
def scene(make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(make_settings, tmp_path)
    for name, double in {
        "meeting_etcd": lambda *_: scene.etcd, "require_closed": lambda *_: None, "join": scene.join,
        "RankDriver": lambda *_, **__: scene.driver, "forensics": scene.forensics, "EmbeddedServer": SimpleNamespace,
        "last_words": lambda *_: {"own.log": "of this rank"}, "refusals": lambda _: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(rank_session, name, double)
    return scene


def test_a_rank_joins_as_its_options_say_and_leaves_once(scene: Scene) -> None:
    session = scene.session(1, join_timeout=7.0, lease=9, group_token="t")
    assert scene.joined == ("g", 2, {"ttl": 9, "wanted": 1, "token": "t", "timeout": 7.0})
    assert (session.fault, session.early, session.ending, session.drives) == (None, False, None, False)
    assert (session.name, session.name_of(0)) == ("rank 1 of 2 on node-1", "rank 0 on node-0")
    for _ in range(2):
        session.close()
    assert scene.log == LEAVING
    assert scene.session().drives


def test_a_rank_waits_at_its_first_barrier_as_long_as_for_the_group(scene: Scene) -> None:
    scene.fault = GONE
    with pytest.raises(NixlPluginError, match="rank 1 is gone"):
        scene.session(join_timeout=7.0)
    assert scene.log == [("barrier", 7.0), *LEAVING]


@pytest.mark.parametrize("fails", ["require_closed", "RequestHandlers", "join"])
def test_a_rank_that_cannot_join_discards_the_etcd_that_it_started(
    scene: Scene, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise GONE

    monkeypatch.setattr(rank_session, fails, refused)
    with pytest.raises(NixlPluginError, match="rank 1 is gone"):
        scene.session()
    assert scene.log == (LEAVING[1:] if fails == "join" else ["discard etcd"])


@pytest.mark.parametrize(
    ("count", "more"), [(0, ""), (3, "; its etcd refused 3 connections for another --nixl-group-token, or none")]
)
def test_a_rank_that_misses_others_says_how_many_connections_its_etcd_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, count: int, more: str
) -> None:
    monkeypatch.setattr(rank_session, "refusals", lambda _: count)
    scene.join_fault = MissingRanksError("waited for rank 1", "start it")
    with pytest.raises(MissingRanksError) as caught:
        scene.session()
    assert (caught.value.reason, caught.value.remedy) == (f"waited for rank 1{more}", "start it")
    assert scene.log[0] == f"waiting for rank 1{more}"
    # The etcd of another host has no such log.
    monkeypatch.setattr(rank_session, "EmbeddedServer", EmbeddedServer)
    with pytest.raises(MissingRanksError, match=r"^waited for rank 1\n"):
        scene.session()


def test_rank_0_says_how_the_run_ends_and_leaves_with_the_others(scene: Scene) -> None:
    session = scene.session()
    assert session.finish(PASSED) == []
    assert scene.log == [PASSED, ("barrier", 60.0), "close driver", *LEAVING]
    assert (scene.verdict()["fault"], scene.verdict()["exit_code"]) == ("", 0)
    assert session.finish(PASSED) == []
    assert len(scene.log) == 6, "it leaves once"
    assert scene.session(1).finish(PASSED) == []
    assert scene.log == [("barrier", 60.0), *LEAVING]


def test_the_etcd_of_a_rank_is_kept_until_the_others_have_left(scene: Scene) -> None:
    scene.etcd.kind = "embedded"
    assert scene.session(1).finish(PASSED) == []
    assert scene.log == [("barrier", 60.0), *["/g/members/"] * 3, *LEAVING]


@pytest.mark.parametrize(
    ("gone", "early", "fault", "described"),
    [
        ([], True, "", False),
        ([GONE, GONE], False, str(GONE), True),
        ([LEFT], False, str(LEFT), False),
        ([LEFT, GONE], False, f"{LEFT}\n{GONE}", True),
        ([GONE, LEFT], False, f"{GONE}\n{LEFT}", True),
    ],
)
def test_a_rank_does_not_wait_for_a_group_that_is_not_complete_and_describes_it_unless_each_lost_rank_said_why(
    scene: Scene, gone: list[NixlPluginError], early: bool, fault: str, described: bool
) -> None:
    session = scene.session()
    session.early = early
    scene.gone += gone
    assert session.finish(PASSED) == []
    assert scene.log == [PASSED, "close driver", *LEAVING]
    assert scene.verdict()["fault"] == fault, "each error is named once"
    assert scene.has_description is described


def test_a_description_of_the_group_has_the_logs_of_all_living_ranks_and_is_made_once(scene: Scene) -> None:
    session = scene.session()
    scene.gone.append(GONE)
    assert session.describe_loss() == session.describe_loss() == ["the group's keys"]
    logs = {"own.log": "of this rank", "a.log": "of rank 1", "b.log": "of rank 2"}
    [(root, members, worker_logs, values)] = cast("list[tuple[object, ...]]", scene.described)
    assert (root, members, values) == ("/g/", MEMBERS[:2], scene.membership.values)
    assert list(cast("dict[str, str]", worker_logs).items()) == list(logs.items())


@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (3, 3)])
def test_a_rank_that_is_lost_at_the_end_fails_the_run(scene: Scene, code: int, exit_code: int) -> None:
    session = scene.session()
    scene.fault = GONE
    assert session.finish(Ending(code, "NIXL gate: PASS", verdict_fields={"verdict": "PASS"})) == [str(GONE)]
    assert session.faults == [GONE]
    verdict = scene.verdict()
    assert (verdict["exit_code"], verdict["fault"]) == (exit_code, str(GONE)), (
        "the exit code of a run that failed stays"
    )
    assert verdict["interrupted"] == "INTERRUPTED: rank 1 is gone"
    assert scene.log[-4:] == ["close driver", *LEAVING]


def test_a_directory_that_cannot_be_written_does_not_keep_a_rank_from_leaving(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [message] = scene.session(log_dir=str(tmp_path / "file")).finish(PASSED)
    assert "could not be written" in message
    assert scene.log == ["close driver", *LEAVING]


@pytest.mark.parametrize(("count", "more"), [(0, []), (4, []), (6, ["and 2 more keys were ignored"])])
def test_a_few_ignored_keys_are_named(scene: Scene, count: int, more: list[str]) -> None:
    scene.ignored.update({f"key {number}": f"reason {number}" for number in range(count)})
    named = [f"the key 'key {number}' was ignored: reason {number}" for number in range(min(count, 4))]
    assert scene.session().ignored() == [*named, *more]


@pytest.mark.parametrize("timeout", ["60s", "30s", ""])
def test_rank_0_refuses_to_start_if_another_rank_was_started_otherwise(scene: Scene, timeout: str) -> None:
    session = scene.session(drives=False)
    scene.commands[1] = Command("1", {"--nixl-timeout": timeout}, ["t.py::t"], 0).packed() if timeout else "x"
    if timeout == "60s":
        session.drive(lambda _: None)
        assert scene.log == []
    elif timeout == "30s":
        with pytest.raises(pytest.UsageError) as refused:
            session.drive(lambda _: None)
        assert str(refused.value) == (
            "rank 1 on node-1 was started with --nixl-timeout=30s, rank 0 with --nixl-timeout=60s: start every rank "
            "with the same command on the same tests"
        )
        assert scene.log[0] == Ending(pytest.ExitCode.USAGE_ERROR, refusal=str(refused.value))
    else:
        with pytest.raises(NixlPluginError, match=r"^rank 1 on node-1 sent an invalid answer to 'command': ") as caught:
            session.drive(lambda _: None)
        assert caught.value.remedy == "install the same version of pytest-nixl on every rank"


@pytest.mark.parametrize("refusal", ["", "rank 1 was started with another command"])
def test_a_peer_ends_as_rank_0_says_and_with_its_refusal(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    session, ending = scene.session(1), Ending(4, refusal=refusal)
    monkeypatch.setattr(rank_session, "serve", lambda *_, **__: ending)
    if refusal:
        with pytest.raises(pytest.UsageError, match=refusal):
            session.serve()
        assert scene.verdict(1)["text"] == refusal
    else:
        assert session.serve() is session.ending is ending
    assert scene.log == ([("barrier", 60.0), *LEAVING] if refusal else [])


def test_a_peer_that_no_longer_hears_the_etcd_of_rank_0_names_every_cause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object, **__: object) -> None:
        raise LeaseLostError("the lease is over", "start again")

    monkeypatch.setattr(rank_session, "serve", serve)
    with pytest.raises(LeaseLostError, match="the lease is over"):
        scene.session(1).serve()
    with pytest.raises(MemberLostError) as lost:
        scene.session(1, etcd_listen="0.0.0.0:2379").serve()
    assert lost.value.reason == (
        "rank 0 on node-0 is gone, this rank is cut off from the etcd that rank 0 serves, or this host was suspended: "
        "the lease is over"
    )
    assert lost.value.remedy == "read the last output of rank 0, and check that its host still runs; start again"


def test_agents_get_the_etcd_of_the_group_if_they_can_use_it(scene: Scene) -> None:
    assert scene.session(etcd="http://e:1").agents_etcd() is cast(EtcdServer, scene.etcd)
    assert scene.session(etcd="https://e:1").agents_etcd() is None


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_address_of_a_rank_is_the_one_from_which_it_reaches_the_etcd(host: str) -> None:
    etcd = cast(EtcdServer, SimpleNamespace(endpoint=f"http://{host}:2379,http://192.0.2.7:2379"))
    handlers = RequestHandlers(COMMAND, cast(Settings, None), etcd, cast(SupervisorClient, None)).by_name()
    assert list(handlers) == ["command", "address", "facts", "devices", "claim", "last_words"]
    assert handlers["address"]() == host.strip("[]")
    assert Command.unpacked(handlers["command"]()) == COMMAND
    assert HostDevices.of(json.loads(json.dumps(handlers["devices"]()))) == HostDevices.here()


@pytest.mark.parametrize("noticed_by", ["the clock", "the watch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_lease_is_over_is_lost_although_the_etcd_is_silent(rank: int, noticed_by: str) -> None:
    lost, silent = SimpleQueue[tuple[int, NixlPluginError]](), threading.Event()
    over = LeaseLostError("the lease is over")

    def follow(*_: object, **__: object) -> None:
        if noticed_by == "the clock":
            silent.wait(60)
        raise over

    def check() -> None:
        if noticed_by == "the clock":
            raise over

    membership: Any = SimpleNamespace(member_keys="/g/members/", rank=rank, follow=follow, check=check, members=MEMBERS)
    watch = MembershipWatch(cast(Any, None), membership, lambda member, error: lost.put((member.rank, error)))
    assert lost.get(timeout=60) == (rank, over)
    watch.close()
    silent.set()


@pytest.mark.parametrize("ranks", [None, (0, 1)])
def test_members_that_are_gone_are_told_and_a_watch_goes_on_after_its_last_event(
    ranks: tuple[int, ...] | None,
) -> None:
    """The client is a double, because no etcd ends a watch when a test says so."""
    lost: list[tuple[int, str]] = []
    opened: list[dict[str, int]] = []
    constructed, watched_twice = threading.Event(), threading.Event()

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
            assert constructed.wait(60)
            guard.close()
            watched_twice.set()
        for key in ("t0", "stranger"):
            yield WatchEvent(KeyValue(f"/g/members/{key}", b"", 0, 15, 0), deleted=True)

    client = cast(EtcdClient, SimpleNamespace(transaction=read, watch=watch))
    membership = Membership(client, "g", 3, ttl=6, root="/g/", host="h", wanted=None)
    membership.accept(Roster(KeyValue("/g/run/frozen", b"", 9, 9, 1), 6, MEMBERS, ""), 0, 10)
    guard = MembershipWatch(client, membership, lambda member, error: lost.append((member.rank, error.reason)), ranks)
    constructed.set()
    assert watched_twice.wait(60)
    reason = "its process ended, or its lease expired because etcd heard nothing from it"
    assert lost == [
        (1, f"{MEMBERS[1]} of group 'g' is gone: {reason}"), (0, membership.lease_lost().reason),
    ]  # fmt: skip
    assert opened == ([{"": 11}, {"": 16}] if ranks is None else [{"t0": 11, "t1": 11}, {"t0": 16, "t1": 11}])
