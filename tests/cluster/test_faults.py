# SPDX-License-Identifier: Apache-2.0
"""Faults of a run of several ranks, each made once: every rank that is left ends in time, says why, and leaves no key.

They run beside each other, as most of their time is waiting for leases to end. What each says is in
docs/reference/group-faults.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, command, eventually
from helpers.namespaces import Host, Network, network, require_tools
from ranks import Ranks
from servers import ETCD_PORT, etcd, keys

from pytest_nixl.cluster.group import TTL

NODES = ("node-0", "node-1", "node-2")
#: Two hosts that are cut off from others, and two that have an etcd which dies.
CUT, DYING = ("cut-0", "cut-1"), ("dying-0", "dying-1")
MOVING = "tests/cluster/moving.py"
#: How many stories are told at the same time.
AT_ONCE = 4
#: Seconds for all ranks to have begun; for those that are left to end; and for leases to end, and keys with them.
BEGIN, END, LEASES = 60.0, 60.0, 2.0 * TTL


class Story:
    """A run in a group of its own, and what is done to it."""

    def __init__(self, net: Network, folder: Path, name: str, hosts: Sequence[str] = NODES, head: str = "head") -> None:
        self.name = name
        self.net = net
        self.hosts = [net[host] for host in hosts]
        self.head = net[head]
        self.folder = folder
        self.etcd = [f"--nixl-etcd=http://{self.head.address}:{ETCD_PORT}"]
        self.pids: list[int] = []
        folder.mkdir()
        self.ranks = Ranks(folder / "ranks", {"UCX_TLS": "tcp", "MOVING": str(folder)})

    def start(
        self, rank: int, *options: str, test: str = MOVING, tree: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        """Start the command of one rank, on its host; ``tree`` is where its plugin and its test are."""
        common = [f"--nixl-ranks={len(self.hosts)}", f"--nixl-group={self.name}", *self.etcd, "--nixl-timeout=20s"]
        own = [f"--nixl-rank={rank}", f"--nixl-log-dir={self.folder / 'logs'}", "--nixl-blocks=4KiB"]
        started = ["env", f"--chdir={tree}", *command(test, *common, *own, *options)]
        self.pids.append(self.ranks.start(self.hosts[rank], *started, **(env or {})))

    def begin(self, env: Mapping[str, str] | None = None) -> None:
        """Start all ranks, and wait until bytes move between the first and the last."""
        for rank in range(len(self.hosts)):
            self.start(rank, env=env)
        self.wait_for_bytes()

    def wait_for_bytes(self) -> None:
        begun = self.folder / "begun"
        begun.unlink(missing_ok=True)
        assert eventually(begun.exists, BEGIN), "\n".join(
            self.ranks.output(rank)[-1500:] for rank in range(len(self.pids))
        )

    def enough(self) -> None:
        """Let the bytes move no more: rank 0 goes on to what comes after that."""
        (self.folder / "enough").touch()

    def end(self, *codes: int) -> list[Finished]:
        """Wait for all ranks to end with these exit codes, and for their keys to go."""
        done = self.ranks.finish(END)
        assert [one.code for one in done] == list(codes), "\n".join(one.output[-1500:] for one in done)
        self.leaves_no_key()
        return done

    def leaves_no_key(self) -> None:
        def left() -> list[str]:
            return [key for key in keys(self.head) if f"/{self.name}/" in key]

        assert eventually(lambda: not left(), LEASES), left()

    def gone(self, rank: int) -> str:
        """The sentence on a rank that has gone."""
        who = f"rank {rank} on {self.hosts[rank].name} (pid {self.pids[rank]})"
        return f"{who} of group '{self.name}' has gone: its process ended, or etcd heard nothing from it"

    def fenced(self, rank: int) -> str:
        """What a rank says that has lost its own place."""
        who = f"rank {rank}, {self.hosts[rank].name}, pid {self.pids[rank]}"
        return f"this member of group '{self.name}' ({who}) has no lease any more: etcd heard nothing from it"

    def verdict(self, rank: int) -> dict[str, str]:
        """The ``verdict.json`` that a rank has left."""
        found: dict[str, str] = json.loads((self.folder / "logs" / f"rank-{rank}" / "verdict.json").read_text())
        return found


Tell = Callable[[Network, Path], None]
STORIES: dict[str, Tell] = {}


def told(tell: Tell) -> Tell:
    """Name a story by its function."""
    STORIES[tell.__name__] = tell
    return tell


@told
def a_peer_never_comes(net: Network, folder: Path) -> None:
    story = Story(net, folder, "never")
    with story.ranks:
        for rank in (0, 2):
            story.start(rank, "--nixl-join-timeout=8s")
        done = story.end(1, 1)
    assert all("waiting for rank 1 of group 'never' (2 of 3 are here)" in one.output for one in done)
    # Whoever gives up last is alone by then, and says that too.
    assert any("waited 8 s for rank 1 of group 'never' (2 of 3 are here)" in one.output for one in done)
    assert all(re.search(r"waited 8 s for ranks? (0, )?1(, 2)? of group 'never'", one.output) for one in done)


@told
def rank_0_never_comes_to_serve_the_etcd(net: Network, folder: Path) -> None:
    story = Story(net, folder, "nobody")
    story.etcd = ["--nixl-etcd-listen=0.0.0.0:2401"]
    with story.ranks:
        for rank in (1, 2):
            story.start(rank, "--nixl-join-timeout=8s", env={"MASTER_ADDR": story.hosts[0].address})
        for one in story.end(1, 1):
            assert "waiting for the etcd that rank 0 serves at http://10.98.0.1:2401" in one.output
            assert "no etcd answered at http://10.98.0.1:2401 within 8 s: rank 0 serves it" in one.output


@told
def a_peer_is_killed(net: Network, folder: Path) -> None:
    story = Story(net, folder, "killed")
    with story.ranks:
        story.begin()
        os.kill(story.pids[2], signal.SIGKILL)
        first, second, _ = story.end(1, 1, -signal.SIGKILL)
    for rank, one in enumerate((first, second)):
        assert story.gone(2) in one.output
        assert story.gone(2) in story.verdict(rank)["text"]
    assert "rank 2 (target worker, pid " in first.output
    assert "has gone with its rank during " in first.output
    dump = (folder / "logs" / "rank-0" / "group.txt").read_text()
    assert f"rank 2 on node-2 (pid {story.pids[2]}): its key is gone: its lease ended, or it left" in dump
    assert f"rank 1 on node-1 (pid {story.pids[1]}): its key is there, its lease has " in dump
    assert "barrier 1 was the last one passed; at barrier 2: nobody" in dump
    assert " keys in all\n" in dump
    assert "rank0-initiator-0.log" in dump
    assert all(line in first.output for line in dump.splitlines())


@told
def a_peer_that_no_row_needs_is_killed_at_the_end(net: Network, folder: Path) -> None:
    story = Story(net, folder, "late")
    with story.ranks:
        story.begin()
        os.kill(story.pids[1], signal.SIGKILL)
        story.enough()
        for one, rank in zip(story.end(1, -signal.SIGKILL, 1), range(3), strict=True):
            if rank != 1:
                assert f"rank 1 on node-1 (pid {story.pids[1]})" in one.output
                assert f"rank 1 on node-1 (pid {story.pids[1]})" in story.verdict(rank)["fault"]


@told
def a_peer_is_stopped_for_longer_than_its_lease(net: Network, folder: Path) -> None:
    story = Story(net, folder, "stopped")
    with story.ranks:
        story.begin()
        os.kill(story.pids[2], signal.SIGSTOP)
        assert eventually(lambda: (folder / "logs" / "rank-1" / "verdict.json").exists(), END)
        os.kill(story.pids[2], signal.SIGCONT)
        *others, stopped = story.end(1, 1, 1)
    assert all(story.gone(2) in one.output for one in others)
    assert story.fenced(2) in stopped.output


def cut_off(host: Host, *others: Host) -> None:
    """Let all that a host sends to some others get lost on the way, with no word."""
    for other in others:
        nobody = ["lladdr", "02:00:00:00:00:01", "dev", "veth0", "nud", "permanent"]
        host.run("ip", "neighbour", "replace", other.address, *nobody)


def heal(host: Host, *others: Host) -> None:
    """Let it get there again."""
    for other in others:
        host.run("ip", "neighbour", "delete", other.address, "dev", "veth0")


@told
def a_peer_is_cut_off_and_the_network_heals(net: Network, folder: Path) -> None:
    story = Story(net, folder, "cut", ("node-0", "node-1", CUT[0]))
    with story.ranks:
        story.begin()
        others = (*story.hosts[:2], story.head)
        cut_off(story.hosts[2], *others)
        assert eventually(lambda: (folder / "logs" / "rank-1" / "verdict.json").exists(), END)
        heal(story.hosts[2], *others)
        *others_said, cut = story.end(1, 1, 1)
    assert all(story.gone(2) in one.output for one in others_said)
    assert story.fenced(2) in cut.output


@told
def rank_0_is_cut_off(net: Network, folder: Path) -> None:
    story = Story(net, folder, "first-cut", (CUT[1], "node-1"))
    with story.ranks:
        story.begin()
        cut_off(story.hosts[0], *story.hosts[1:], story.head)
        first, other = story.end(1, 1)
        heal(story.hosts[0], *story.hosts[1:], story.head)
    assert story.fenced(0) in first.output
    assert story.gone(0) in other.output


@told
def a_peer_is_killed_and_started_again(net: Network, folder: Path) -> None:
    story = Story(net, folder, "again")
    with story.ranks:
        story.begin()
        os.kill(story.pids[1], signal.SIGKILL)
        story.start(1)
        why = "group 'again' takes nobody in: it has started: rank 0 on node-0 (pid "
        assert eventually(lambda: why in story.ranks.output(3), END), story.ranks.output(3)
        story.enough()
        first, _, last, _ = story.end(1, -signal.SIGKILL, 1, 4)
    assert story.gone(1) in first.output
    assert story.gone(1) in last.output


def pretend(folder: Path, name: str, version: str) -> None:
    """Let the package in a folder be of another version, as far as what its installer wrote beside it tells."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@told
def a_peer_has_another_nixl(net: Network, folder: Path) -> None:
    story = Story(net, folder, "nixl")
    pretend(folder / "other", "nixl-cu12", "1.4.1")
    other = {"PYTHONPATH": str(folder / "other")}
    with story.ranks:
        for rank in range(3):
            story.start(rank, test="suites/infrastructure/test_ranks.py", env=other if rank == 1 else None)
        for one in story.end(1, 1, 1):
            assert "ranks-agree" in one.output
            assert "NIXL differs: rank 1 (node-1) has 1.4.1, the other 2 " in one.output


@told
def a_peer_has_another_pytest_nixl(net: Network, folder: Path) -> None:
    story = Story(net, folder, "plugin")
    tree = folder / "tree"
    shutil.copytree(ROOT / "pytest_nixl", tree / "pytest_nixl", ignore=shutil.ignore_patterns("__pycache__"))
    pretend(tree, "pytest-nixl", "99.1")
    (tree / MOVING).parent.mkdir(parents=True)
    shutil.copy(ROOT / MOVING, tree / MOVING)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    with story.ranks:
        for rank in range(3):
            story.start(rank, tree=tree if rank == 2 else ROOT)
        for one in story.end(4, 4, 4):
            assert "rank 2 on node-2 has pytest-nixl 99.1, and rank 0 " in one.output


@told
def the_etcd_restarts_within_the_lease(net: Network, folder: Path) -> None:
    story = Story(net, folder, "restarts", NODES[:2], head=DYING[0])
    with story.ranks:
        with etcd(story.head, folder):
            story.begin()
        with etcd(story.head, folder):
            story.wait_for_bytes()
            story.enough()
            story.end(0, 0)


@told
def the_etcd_is_gone_for_good(net: Network, folder: Path) -> None:
    story = Story(net, folder, "lost", NODES[:2], head=DYING[1])
    with story.ranks:
        with etcd(story.head, folder):
            story.begin()
        done = story.ranks.finish(END)
    for rank, one in enumerate(done):
        assert one.code == 1
        assert story.fenced(rank) in one.output
        assert "connection refused, nothing listens there" in one.output


@told
def rank_0_is_killed(net: Network, folder: Path) -> None:
    story = Story(net, folder, "first")
    with story.ranks:
        story.begin()
        os.kill(story.pids[0], signal.SIGKILL)
        _, *others = story.end(-signal.SIGKILL, 1, 1)
    for rank, one in enumerate(others, 1):
        assert story.gone(0) in one.output
        assert story.gone(0) in story.verdict(rank)["fault"]
        dump = (folder / "logs" / f"rank-{rank}" / "group.txt").read_text()
        assert f"rank 0 on node-0 (pid {story.pids[0]}): its key is gone" in dump
        assert all(line in one.output for line in dump.splitlines())
    assert "rank2-target-0.log" in others[1].output
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank-1", "rank-2"}


@told
def rank_0_is_killed_and_its_etcd_with_it(net: Network, folder: Path) -> None:
    story = Story(net, folder, "served")
    story.etcd = ["--nixl-etcd-listen=0.0.0.0:2400"]
    with story.ranks:
        story.begin({"MASTER_ADDR": story.hosts[0].address})
        os.kill(story.pids[0], signal.SIGKILL)
        _, *others = story.end(-signal.SIGKILL, 1, 1)
    for one in others:
        assert "rank 0 on node-0 has gone, or this rank is cut off from the etcd that it serves: " in one.output
    assert not story.hosts[0].listens(2400)


@told
def a_peer_is_interrupted(net: Network, folder: Path) -> None:
    story = Story(net, folder, "peer-int")
    with story.ranks:
        story.begin()
        os.kill(story.pids[2], signal.SIGINT)
        *others, interrupted = story.end(1, 1, 2)
    assert all(story.gone(2) in one.output for one in others)
    assert "rank 2 of 3 on node-2 was interrupted, and has left" in interrupted.output
    assert "NIXL verdict: PASS" not in interrupted.output


@told
def a_peer_is_terminated(net: Network, folder: Path) -> None:
    story = Story(net, folder, "peer-term")
    with story.ranks:
        story.begin()
        os.kill(story.pids[2], signal.SIGTERM)
        *others, _ = story.end(1, 1, 128 + signal.SIGTERM)
    assert all(story.gone(2) in one.output for one in others)
    assert story.verdict(2)["text"] == "rank 2 of 3 on node-2 was ended by SIGTERM, and has left"


@told
def rank_0_is_interrupted(net: Network, folder: Path) -> None:
    story = Story(net, folder, "first-int")
    with story.ranks:
        story.begin()
        os.kill(story.pids[0], signal.SIGINT)
        for one in story.end(2, 2, 2)[1:]:
            assert "rank 0 on node-0 was interrupted: every rank ends with exit code 2" in one.output


@told
def rank_0_is_terminated(net: Network, folder: Path) -> None:
    story = Story(net, folder, "first-term")
    with story.ranks:
        story.begin()
        os.kill(story.pids[0], signal.SIGTERM)
        for one in story.end(*[128 + signal.SIGTERM] * 3)[1:]:
            assert "rank 0 on node-0 was ended by SIGTERM: every rank ends with exit code 143" in one.output


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts for ranks and for etcds; that of the site runs."""
    require_tools()
    with network(tmp_path_factory.mktemp("network"), *NODES, *CUT, *DYING, "head") as made:
        yield made


@pytest.fixture(scope="module")
def telling(
    request: pytest.FixtureRequest, net: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The stories that were asked for, told a few at a time."""
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_every_rank_ends_and_says_why.__name__
    ]
    folder = tmp_path_factory.mktemp("stories")
    with etcd(net["head"], folder), ThreadPoolExecutor(AT_ONCE) as pool:
        # In the order of the tests.
        yield {name: pool.submit(STORIES[name], net, folder / name) for name in names}
    # A rank dies with the thread that has started it, and that has ended with its story.


@pytest.mark.parametrize("name", STORIES)
def test_every_rank_ends_and_says_why(telling: dict[str, Future[None]], name: str) -> None:
    telling[name].result()
