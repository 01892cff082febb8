# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves early, or cannot join: what the other ranks read, and that nothing breaks on the way."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.cli_run import eventually
from helpers.etcd import separate_supervisor
from helpers.pytester_run import run_pytest

from pytest_nixl.cluster import peer_server
from pytest_nixl.cluster.command_check import Command
from pytest_nixl.cluster.driver import serve
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.messages import PeerRequest, WorkerLine
from pytest_nixl.cluster.peer_server import LARGEST_OUTPUT, PeerServer
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import own_version
from pytest_nixl.core.strict import unpack
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.processes.supervisor import supervisor

#: Reports of rank 0 in each format that CI reads.
REPORTS = ("r.html", "r.json", "r.xml")
TEST = "def test_mine(nixl_settings): pass"


def test_the_reason_of_a_differing_option_is_in_every_report_of_rank_0(
    pytester: pytest.Pytester, nixl_private_etcd: PrivateEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reports said "INTERRUPTED after 0 of 1 tests: the remaining tests did not run", and nothing of the option."""
    etcd = nixl_private_etcd.server
    pytester.makepyfile(test_mine=TEST)

    def peer() -> int:
        """A rank with another lease. A double, because it serves in a thread, which takes no time to start."""
        with etcd.client() as client:
            membership = join(client, "unlike", 2, wanted=1, ttl=60, timeout=60)
            other = Command(own_version(), {"--nixl-lease": "60s"}, ["test_mine.py::test_mine"], 0)
            try:
                membership.barrier(60)
                ending = serve(membership, etcd.client, supervisor(), services={"command": other.packed})
                membership.barrier(60)
                return ending.code
            finally:
                membership.leave()

    # The run in this process closes its supervisor at its end.
    with separate_supervisor(monkeypatch), ThreadPoolExecutor() as pool:
        serving = pool.submit(peer)
        done = run_pytest(
            pytester, "--nixl-ranks=2", "--nixl-rank=0", "--nixl-group=unlike", "--nixl-join-timeout=60s",
            f"--nixl-etcd={etcd.endpoint}", f"--nixl-report={','.join(REPORTS[:-1])}", f"--junitxml={REPORTS[-1]}",
            in_process=True,
        )  # fmt: skip
    assert int(done.ret) == serving.result() == 4
    reason = "was started with --nixl-lease=60s, rank 0 with --nixl-lease=6s"
    for name in REPORTS:
        text = (pytester.path / name).read_text()
        assert reason in text, name
        assert "REFUSED" in text, name
        assert "INTERRUPTED" not in text, name
    assert json.loads((pytester.path / "r.json").read_text())["verdict"] == "REFUSED"
    assert "NIXL verdict" not in done.stdout.str(), "the run was refused, and has no other verdict"


def test_a_rank_whose_rank_0_does_not_resolve_says_so_and_keeps_the_reports_of_rank_0(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_mine=TEST)
    for name in REPORTS:
        (pytester.path / name).write_text("of rank 0")
    done = run_pytest(
        pytester, "--nixl-ranks=2", "--nixl-rank=1", "--nixl-etcd-listen=0.0.0.0:2379", "--nixl-join-timeout=1s",
        f"--nixl-report={','.join(REPORTS[:-1])}", f"--junitxml={REPORTS[-1]}",
        env={"MASTER_ADDR": "no-such-host.invalid"}, in_process=True,
    )  # fmt: skip
    assert int(done.ret) == 1
    output = done.stdout.str()
    assert (
        "the host in http://no-such-host.invalid:2379, where rank 0 serves the etcd (--nixl-etcd-listen), did not "
        "resolve within 1 s\nremedy: set MASTER_ADDR on this rank to a name or an IPv4 address of rank 0's host"
        in output
    )
    assert {name: (pytester.path / name).read_text() for name in REPORTS} == dict.fromkeys(REPORTS, "of rank 0")
    assert "did not resolve" in (pytester.path / "r.rank1.xml").read_text()


class DoubleProcess:
    """A worker's process, at whose end something else happens."""

    pid, killed = 7, False
    at_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, supervisor: object, rank: int, role: str, environment: dict[str, str | None]) -> None:
        self.started_as = rank, role, environment
        self.channel, self.far = socket.socketpair()

    def kill(self) -> None:
        self.killed = True
        self.at_end()
        self.far.close()

    def wait(self, seconds: float | None = None) -> int:
        return -9

    def output(self) -> str:
        return "first" + "x" * LARGEST_OUTPUT


class Peer:
    """The server of rank 1, what it sends, and the processes of its workers, which are doubles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self.faults: list[Exception] = []
        self.workers: list[DoubleProcess] = []
        variables: dict[str, str | None] = {"PATH": "/of/this/rank"}
        self.server = PeerServer(supervisor(), 1, self.send, lambda: None, {}, variables)
        monkeypatch.setattr(peer_server, "LocalProcess", self.process)

    def process(self, *arguments: Any) -> DoubleProcess:
        self.workers.append(DoubleProcess(*arguments))
        return self.workers[-1]

    def send(self, message: dict[str, Any]) -> None:
        if self.faults:
            raise self.faults.pop()
        self.sent.append(message)

    def ask(self, request: str, number: int = 7, **arguments: Any) -> Any:
        """Ask for something, and return the answer."""
        self.server.receive(PeerRequest(request, number, arguments))
        answer = self.sent.pop()
        assert answer.pop("answer") == number
        return answer


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    before = set(threading.enumerate())
    peer = Peer(monkeypatch)
    yield peer
    for worker in peer.workers:
        worker.far.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    for worker in peer.workers:
        worker.channel.close()


START: dict[str, Any] = {"worker": 3, "role": "agent", "environment": {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": None}}


@pytest.mark.parametrize(
    ("fault", "error", "remedy"),
    [(NixlPluginError("too large", "less"), "too large", "less"), (TypeError("no JSON"), "TypeError: no JSON", "")],
)
def test_instead_of_an_answer_that_cannot_be_sent_is_the_reason(
    peer: Peer, fault: Exception, error: str, remedy: str
) -> None:
    peer.faults.append(fault)
    assert peer.ask("odd") == {"error": error, "remedy": remedy}
    assert peer.ask("odd") == {"error": "a peer has no request 'odd'", "remedy": ""}
    assert peer.ask("state")["error"].startswith("invalid arguments of 'state': ")
    assert peer.ask("state", worker=9) == {"error": "KeyError: 9"}


def test_a_worker_has_variables_of_this_rank_and_its_output_is_sent_from_the_end(peer: Peer) -> None:
    assert peer.ask("start", **START) == {"result": 7}
    [worker] = peer.workers
    assert worker.started_as == (1, "agent", {**START["environment"], "PATH": "/of/this/rank"})
    assert unpack(peer.ask("output", worker=3)["result"], most=LARGEST_OUTPUT) == b"x" * LARGEST_OUTPUT
    assert peer.ask("kill", worker=3) == {"result": -9}
    assert worker.killed
    assert eventually(lambda: peer.sent == [{"worker": 3, "ended": -9}])


def test_lines_to_a_worker_are_those_of_a_closed_list_and_lines_of_it_are_passed_on(peer: Peer) -> None:
    peer.ask("start", **START)
    worker, reader = peer.workers[0], peer.workers[0].far.makefile("r")
    hello = {"command": "hello", "number": 1, "arguments": {"path": ["/of/rank/0"], "loads": False}}
    for line in ("junk", json.dumps({**hello, "more": 1}), json.dumps(hello)):
        peer.server.receive(WorkerLine(3, line))
        peer.server.receive(WorkerLine(4, line))  # there is no such worker
    assert json.loads(reader.readline()) == {**hello, "arguments": {"path": sys.path, "loads": False}}
    assert peer.sent == []
    for command in ("run", "unknown"):
        peer.server.receive(WorkerLine(3, json.dumps({"command": command, "number": 2, "arguments": {}})))
        answer = peer.sent.pop()
        reason = f"rank 0 may not send {command!r} to a worker of another rank"
        error = {"kind": "refused", "type": "refused", "message": reason, "traceback": ""}
        line = answer.pop("line")
        assert (answer, json.loads(line), "\n" in line) == ({"worker": 3}, {"number": 2, "error": error}, False)
    worker.far.sendall(b"its answer\n")
    assert eventually(lambda: peer.sent == [{"worker": 3, "line": "its answer"}])
    reader.close()


def test_a_peer_that_leaves_starts_no_worker_and_ends_all(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asked for a worker while rank 1 left: once in seven, RuntimeError (dictionary changed size …)."""
    answers: list[Any] = []

    def ask_meanwhile() -> None:
        thread = threading.Thread(target=lambda: answers.append(peer.ask("start", **{**START, "worker": 4})))
        thread.start()
        thread.join(60)

    peer.ask("start", **START)
    monkeypatch.setattr(DoubleProcess, "at_end", staticmethod(ask_meanwhile))
    peer.server.close()
    assert [worker.killed for worker in peer.workers] == [True]
    assert answers == [{"error": "rank 1 is leaving, and starts no worker", "remedy": ""}]
    assert peer.server.started == 1
