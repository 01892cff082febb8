# SPDX-License-Identifier: Apache-2.0
"""Faults in runs of several ranks: every surviving rank ends in time, reports the fault, and leaves no key in etcd.

Several runs go on at the same time, because most of their time is a wait for leases to end.
docs/reference/group-faults.md shows what the ranks print.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.cli_run import ROOT, Finished, command, eventually
from helpers.namespaces import Host, Network
from ranks import Ranks, hosts
from servers import ETCD_PORT, etcd, keys

from pytest_nixl.cluster.group import TTL

NODES = ("node-0", "node-1", "node-2")
#: Two hosts that are cut off from the others, and two hosts whose etcd is ended.
CUT, DYING = ("cut-0", "cut-1"), ("dying-0", "dying-1")
MOVING = "tests/cluster/moving.py"
#: The number of runs at the same time, beside other tests: each has three ranks, with a lease to keep.
AT_ONCE = 4
#: Limits in seconds on a busy machine: for all ranks to begin; for the surviving ranks to end; for leases to end and
#: keys to be removed.
BEGIN, END, LEASES = 240.0, 240.0, 10.0 * TTL
#: Seconds of a lease that a busy machine does not miss.
LONG_LEASE = 120
#: For runs in which no lease and no wait is to end.
NEVER_LATE = (f"--nixl-lease={LONG_LEASE}s", f"--nixl-timeout={LONG_LEASE}s")


class FaultyRun:
    """A run of several ranks in its own group, to which a test function does one thing.

    :param name: the name of the group.
    :param hosts: the name of the host of each rank.
    :param head: the name of the host of the etcd.
    """

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
        """Start the command of one rank on its host.

        :param options: those of this rank, such as :data:`NEVER_LATE`, if no lease or timeout is to end.
        :param tree: the directory that holds its plugin and its test.
        """
        common = [f"--nixl-ranks={len(self.hosts)}", f"--nixl-group={self.name}", *self.etcd, "--nixl-timeout=20s"]
        arguments = [f"--nixl-rank={rank}", f"--nixl-log-dir={self.folder / 'logs'}", "--nixl-blocks=4KiB"]
        started = command(test, *common, *arguments, *options)
        if tree == ROOT:
            self.pids.append(self.ranks.start_run(self.hosts[rank], *started, **(env or {})))
        else:
            self.pids.append(self.ranks.start(self.hosts[rank], "env", f"--chdir={tree}", *started, **(env or {})))

    def begin(self, *options: str, env: Mapping[str, str] | None = None) -> None:
        """Start all ranks, and wait until bytes move between the first and the last."""
        for rank in range(len(self.hosts)):
            self.start(rank, *options, env=env)
        self.wait_for_bytes()

    def wait_for_bytes(self) -> None:
        begun = self.folder / "begun"
        begun.unlink(missing_ok=True)
        assert eventually(begun.exists, BEGIN), "\n".join(
            self.ranks.output(rank)[-1500:] for rank in range(len(self.pids))
        )

    def enough(self) -> None:
        """Stop the transfers, so that rank 0 goes on to the next test."""
        (self.folder / "enough").touch()

    def end(self, *codes: int) -> list[Finished]:
        """Wait for all ranks to end with these exit codes, and for their keys to be removed."""
        done = self.ranks.finish(END)
        assert [ended.code for ended in done] == list(codes), "\n".join(ended.output[-1500:] for ended in done)
        self.leaves_no_key()
        return done

    def leaves_no_key(self) -> None:
        def left() -> list[str]:
            return [key for key in keys(self.head) if f"/{self.name}/" in key]

        assert eventually(lambda: not left(), LEASES), left()

    def gone(self, rank: int) -> str:
        """The message of the other ranks about a rank that is gone."""
        return f"rank {rank} on {self.hosts[rank].name} (pid {self.pids[rank]}) of group '{self.name}' is gone: "

    def left(self, rank: int, why: str) -> str:
        """The message of the other ranks about a rank that has said why it leaves."""
        return f"rank {rank} on {self.hosts[rank].name} (pid {self.pids[rank]}) of group '{self.name}' left: {why}"

    def lease_lost(self, rank: int) -> str:
        """The message of a rank that lost its own lease."""
        member = f"rank {rank}, {self.hosts[rank].name}, pid {self.pids[rank]}"
        return f"this member of group '{self.name}' ({member}) lost its etcd lease: "

    def verdict(self, rank: int) -> dict[str, str]:
        """Return the ``verdict.json`` of a rank."""
        document: dict[str, str] = json.loads((self.folder / "logs" / f"rank-{rank}" / "verdict.json").read_text())
        return document


Fault = Callable[[Network, Path], None]
FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    """Register a function that makes one fault, under its name."""
    FAULTS[make.__name__] = make
    return make


@fault
def a_peer_never_comes(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "never")
    with run.ranks:
        for rank in (0, 2):
            # Long enough for both to be there at the same time, although other runs start beside them.
            run.start(rank, "--nixl-join-timeout=20s")
        done = run.end(1, 1)
    assert all("waiting for rank 1 of group 'never' (2 of 3 " in ended.output for ended in done)
    # The rank that gives up last may find that the other one has left.
    assert any("waited 20 s for rank 1 of group 'never' (2 of 3 " in ended.output for ended in done)
    assert all(re.search(r"waited 20 s for ranks? (0, )?1(, 2)? of group 'never'", ended.output) for ended in done)


@fault
def rank_0_never_comes_to_serve_the_etcd(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "nobody")
    run.etcd = ["--nixl-etcd-listen=0.0.0.0:2401"]
    with run.ranks:
        for rank in (1, 2):
            # It says every five seconds for what it waits.
            run.start(rank, "--nixl-join-timeout=20s", env={"MASTER_ADDR": run.hosts[0].address})
        for ended in run.end(1, 1):
            assert "waiting for the etcd that rank 0 serves at http://10.98.0.1:2401" in ended.output
            assert "no etcd answered at http://10.98.0.1:2401 within 20 s: rank 0 serves it" in ended.output


@fault
def a_peer_is_killed(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "killed")
    with run.ranks:
        run.begin()
        os.kill(run.pids[2], signal.SIGKILL)
        first, second, _ = run.end(1, 1, -signal.SIGKILL)
    for rank, ended in enumerate((first, second)):
        assert run.gone(2) in ended.output
        assert run.gone(2) in run.verdict(rank)["text"]
    assert "rank 2 (target worker, pid " in first.output
    assert "has gone with its rank during " in first.output
    dump = (folder / "logs" / "rank-0" / "group.txt").read_text()
    assert f"rank 2 on node-2 (pid {run.pids[2]}): its key is missing: " in dump
    assert f"rank 1 on node-1 (pid {run.pids[1]}): its key is present, " in dump
    assert re.search(r"\bbarrier 1\b.*\bbarrier 2: no rank\n", dump)
    assert re.search(r"^\d+ keys", dump, re.MULTILINE)
    assert "rank0-initiator-0.log" in dump
    assert all(line in first.output for line in dump.splitlines())


@fault
def a_peer_that_no_row_needs_is_killed_at_the_end(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "late")
    with run.ranks:
        run.begin()
        os.kill(run.pids[1], signal.SIGKILL)
        run.enough()
        for ended, rank in zip(run.end(1, -signal.SIGKILL, 1), range(3), strict=True):
            if rank != 1:
                assert f"rank 1 on node-1 (pid {run.pids[1]})" in ended.output
                assert f"rank 1 on node-1 (pid {run.pids[1]})" in run.verdict(rank)["fault"]


@fault
def a_peer_is_stopped_for_longer_than_its_lease(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "stopped")
    with run.ranks:
        run.begin()
        os.kill(run.pids[2], signal.SIGSTOP)
        assert eventually(lambda: (folder / "logs" / "rank-1" / "verdict.json").exists(), END)
        os.kill(run.pids[2], signal.SIGCONT)
        *survivors, stopped = run.end(1, 1, 1)
    assert all(run.gone(2) in ended.output for ended in survivors)
    assert run.lease_lost(2) in stopped.output
    longer = f"is busy with other work, give every rank --nixl-lease={10 * TTL}s; then start the run again"
    assert all(f"if its host {longer}" in ended.output for ended in survivors)
    assert f"if this host {longer}" in stopped.output


@fault
def a_peer_with_a_longer_lease_is_stopped_for_longer_than_the_usual_one(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "patient", NODES[:2])
    with run.ranks:
        for rank in range(2):
            run.start(rank, *NEVER_LATE)
        run.wait_for_bytes()
        os.kill(run.pids[1], signal.SIGSTOP)
        time.sleep(2 * TTL)
        os.kill(run.pids[1], signal.SIGCONT)
        run.wait_for_bytes()
        run.enough()
        done = run.end(0, 0)
    assert not any("lost its etcd lease" in ended.output for ended in done)
    assert run.verdict(0)["verdict"] == "PASS", run.verdict(0)


@fault
def a_peer_has_another_lease(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "unlike", NODES[:2])
    with run.ranks:
        for rank, lease in enumerate((LONG_LEASE, LONG_LEASE + 1)):
            run.start(rank, f"--nixl-lease={lease}s")
        done = run.end(4, 4)
    refusal = f"was started with --nixl-lease={LONG_LEASE + 1}s, rank 0 with --nixl-lease={LONG_LEASE}s"
    assert all(f"rank 1 on node-1 {refusal}" in ended.output for ended in done)


def cut_off(host: Host, *others: Host) -> None:
    """Drop everything that a host sends to some others, without an error."""
    for other in others:
        nobody = ["lladdr", "02:00:00:00:00:01", "dev", "veth0", "nud", "permanent"]
        host.run("ip", "neighbour", "replace", other.address, *nobody)


def heal(host: Host, *others: Host) -> None:
    """Undo :func:`cut_off`."""
    for other in others:
        host.run("ip", "neighbour", "delete", other.address, "dev", "veth0")


@fault
def a_peer_is_cut_off_and_the_network_heals(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "cut", ("node-0", "node-1", CUT[0]))
    with run.ranks:
        run.begin()
        survivors = (*run.hosts[:2], run.head)
        cut_off(run.hosts[2], *survivors)
        assert eventually(lambda: (folder / "logs" / "rank-1" / "verdict.json").exists(), END)
        heal(run.hosts[2], *survivors)
        *others_said, cut = run.end(1, 1, 1)
    assert all(run.gone(2) in ended.output for ended in others_said)
    assert run.lease_lost(2) in cut.output


@fault
def rank_0_is_cut_off(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "first-cut", (CUT[1], "node-1"))
    with run.ranks:
        run.begin()
        cut_off(run.hosts[0], *run.hosts[1:], run.head)
        first, other = run.end(1, 1)
        heal(run.hosts[0], *run.hosts[1:], run.head)
    assert run.lease_lost(0) in first.output
    assert run.gone(0) in other.output


@fault
def a_peer_is_killed_and_started_again(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "again")
    with run.ranks:
        run.begin()
        os.kill(run.pids[1], signal.SIGKILL)
        run.start(1)
        reason = r"group 'again' .*already started.*rank 0 on node-0 \(pid \d+\), rank 1 on node-1 \(pid \d+\)"
        assert eventually(lambda: re.search(reason, run.ranks.output(3)) is not None, END), run.ranks.output(3)
        run.enough()
        first, _, last, _ = run.end(1, -signal.SIGKILL, 1, 4)
    assert run.gone(1) in first.output
    assert run.gone(1) in last.output


def pretend(folder: Path, name: str, version: str) -> None:
    """Write the metadata of an installed package, so that it seems to have another version."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@fault
def a_peer_has_another_nixl(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "nixl")
    pretend(folder / "other", "nixl-cu12", "1.4.1")
    other = {"PYTHONPATH": str(folder / "other")}
    with run.ranks:
        for rank in range(3):
            run.start(rank, *NEVER_LATE, test="suites/infrastructure/test_ranks.py", env=other if rank == 1 else None)
        for ended in run.end(1, 1, 1):
            assert "ranks-agree" in ended.output
            assert "NIXL differs: rank 1 (node-1) has 1.4.1; the other 2 have " in ended.output


@fault
def a_peer_has_another_pytest_nixl(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "plugin")
    tree = folder / "tree"
    # With its bytecode, but without that which another process is about to write.
    shutil.copytree(ROOT / "pytest_nixl", tree / "pytest_nixl", ignore=shutil.ignore_patterns("*.pyc.*"))
    pretend(tree, "pytest-nixl", "99.1")
    (tree / MOVING).parent.mkdir(parents=True)
    shutil.copy(ROOT / MOVING, tree / MOVING)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    with run.ranks:
        for rank in range(3):
            run.start(rank, *NEVER_LATE, tree=tree if rank == 2 else ROOT)
        for ended in run.end(4, 4, 4):
            assert "rank 2 on node-2 has pytest-nixl 99.1, " in ended.output


@fault
def the_etcd_restarts_within_the_lease(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "restarts", NODES[:2], head=DYING[0])
    with run.ranks:
        with etcd(run.head, folder):
            run.begin(*NEVER_LATE)
        with etcd(run.head, folder):
            run.wait_for_bytes()
            run.enough()
            run.end(0, 0)


@fault
def the_etcd_is_gone_for_good(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "lost", NODES[:2], head=DYING[1])
    with run.ranks:
        with etcd(run.head, folder):
            run.begin()
        done = run.ranks.finish(END)
    for rank, ended in enumerate(done):
        assert ended.code == 1
        assert run.lease_lost(rank) in ended.output
        assert "connection refused, nothing listens there" in ended.output


@fault
def rank_0_is_killed(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "first")
    with run.ranks:
        run.begin()
        os.kill(run.pids[0], signal.SIGKILL)
        _, *survivors = run.end(-signal.SIGKILL, 1, 1)
    for rank, ended in enumerate(survivors, 1):
        assert run.gone(0) in ended.output
        assert run.gone(0) in run.verdict(rank)["fault"]
        dump = (folder / "logs" / f"rank-{rank}" / "group.txt").read_text()
        assert f"rank 0 on node-0 (pid {run.pids[0]}): its key is missing: " in dump
        assert all(line in ended.output for line in dump.splitlines())
    assert "rank2-target-0.log" in survivors[1].output
    assert {path.name for path in (folder / "logs").iterdir()} == {"rank-1", "rank-2"}


@fault
def rank_0_is_killed_and_its_etcd_with_it(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "served")
    run.etcd = ["--nixl-etcd-listen=0.0.0.0:2400"]
    with run.ranks:
        run.begin(env={"MASTER_ADDR": run.hosts[0].address})
        os.kill(run.pids[0], signal.SIGKILL)
        _, *survivors = run.end(-signal.SIGKILL, 1, 1)
    for ended in survivors:
        assert (
            "INTERRUPTED: rank 0 on node-0 is gone, this rank is cut off from the etcd that rank 0 serves, or this "
            "host was suspended: "
        ) in ended.output
    assert not run.hosts[0].listens(2400)


@fault
def a_peer_is_interrupted(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "peer-int")
    with run.ranks:
        run.begin(*NEVER_LATE, f"--junitxml={folder / 'run.xml'}")
        os.kill(run.pids[2], signal.SIGINT)
        *survivors, interrupted = run.end(1, 1, 2)
    for ended in survivors:
        assert run.left(2, "Ctrl-C (SIGINT)") in ended.output
    assert "keys under" not in survivors[0].output, "nothing is left to be looked for"
    assert "expired" not in survivors[0].output
    assert "rank 2 of 3 on node-2 was interrupted" in interrupted.output
    assert "NIXL verdict: PASS" not in interrupted.output
    suite = ElementTree.parse(folder / "run.rank2.xml").getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("1", "1")
    [failure] = suite.iter("failure")
    assert failure.attrib["message"] == "INTERRUPTED: rank 2 of 3 on node-2 was interrupted and left"


@fault
def a_peer_is_terminated(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "peer-term")
    with run.ranks:
        run.begin(*NEVER_LATE)
        os.kill(run.pids[2], signal.SIGTERM)
        *survivors, _ = run.end(1, 1, 128 + signal.SIGTERM)
    assert all(run.left(2, "ended by SIGTERM") in ended.output for ended in survivors)
    assert run.verdict(2)["text"].startswith("rank 2 of 3 on node-2 was ended by SIGTERM")


@fault
def rank_0_is_interrupted(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "first-int")
    with run.ranks:
        run.begin(*NEVER_LATE)
        os.kill(run.pids[0], signal.SIGINT)
        for ended in run.end(2, 2, 2)[1:]:
            assert "rank 0 on node-0 was interrupted: every rank ends with exit code 2" in ended.output


@fault
def rank_0_is_terminated(net: Network, folder: Path) -> None:
    run = FaultyRun(net, folder, "first-term")
    with run.ranks:
        run.begin(*NEVER_LATE)
        os.kill(run.pids[0], signal.SIGTERM)
        for ended in run.end(*[128 + signal.SIGTERM] * 3)[1:]:
            assert "rank 0 on node-0 was ended by SIGTERM: every rank ends with exit code 143" in ended.output


#: Hosts for the ranks and for etcd.
net = hosts(*NODES, *CUT, *DYING, "head")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, net: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The outcome of each selected run; a few run at a time."""
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_every_rank_ends_and_reports_the_fault.__name__
    ]
    folder = tmp_path_factory.mktemp("faults")
    with etcd(net["head"], folder), ThreadPoolExecutor(AT_ONCE) as pool:
        # The runs start in the order of the tests.
        yield {name: pool.submit(FAULTS[name], net, folder / name) for name in names}
    # No rank is left: a rank ends with the thread that started it, and all threads have ended.


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_ends_and_reports_the_fault(outcomes: dict[str, Future[None]], name: str) -> None:
    outcomes[name].result()
