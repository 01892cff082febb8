# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of one peer: which answer belongs to which request, and what ends when the peer is lost.

The peer, the mailbox and the watch of the members are doubles, because only these can answer late, twice or nonsense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import eventually

from pytest_nixl.cluster import driver as driver_module
from pytest_nixl.cluster import peer_client as peer_client_module
from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.group import Member, MemberLeftError
from pytest_nixl.cluster.messages import (
    Message,
    PeerAnswer,
    PeerLeft,
    PeerRequest,
    WorkerEnded,
    WorkerLine,
    read_message,
)
from pytest_nixl.cluster.peer_client import PeerClient, PeerError, PeerLateError, RemoteProcess
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError

Answer = Callable[[dict[str, Any]], "Message | None"]
GONE = NixlPluginError("it is gone")


class DoublePeer:
    """A peer that answers each message at once, as it is told to.

    :param answer: makes the answer; None: there is none.
    """

    def __init__(self, answer: Answer = lambda _: None, timeout: float = 60) -> None:
        self.sent: list[dict[str, Any]] = []
        self.answer = answer
        self.client = PeerClient(1, "rank 1 on there", self._receive, timeout)
        #: The workers that were started, by number.
        self.workers: dict[int, RemoteProcess] = {}

    def _receive(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        answer = self.answer(message)
        if answer is not None:
            self.client.receive(answer)


def answering(*results: Any) -> Answer:
    remaining = iter(results)
    return lambda message: PeerAnswer(message["number"], next(remaining)) if "number" in message else None


def test_an_answer_belongs_to_the_request_of_its_number() -> None:
    peer = DoublePeer(answering("one", "two"))
    assert [peer.client.ask("command"), peer.client.ask("command")] == ["one", "two"]
    first, other = (message["number"] for message in peer.sent)
    assert first != other
    # The answer to a request that nobody waits for is dropped, and none is an answer to another request.
    peer.answer = lambda message: PeerAnswer(first, "late")
    with pytest.raises(PeerLateError) as caught:
        peer.client.ask("command", within=0.01)
    assert caught.value.reason == "rank 1 on there did not answer 'command' within 0.01 s"
    assert caught.value.remedy == "check that its process still runs, and read its last output"


def test_an_answer_that_is_there_is_returned_even_if_no_time_is_left() -> None:
    peer = DoublePeer()
    message = peer.client.request("command")
    peer.client.receive(PeerAnswer(message["number"], "there"))
    assert peer.client.answer(message, within=5, since=time.monotonic() - 60) == "there"
    late = peer.client.request("command")
    with pytest.raises(PeerLateError):
        peer.client.answer(late, within=500, since=time.monotonic() - 501)
    for reply in (message, late):
        peer.client.forget(reply)


@pytest.mark.parametrize("ends", ["answer", "lost"])
def test_a_wait_ends_with_the_answer_or_the_loss_and_not_with_its_time(ends: str) -> None:
    peer = DoublePeer()
    message = peer.client.request("command")

    def end() -> None:
        if ends == "answer":
            peer.client.receive(PeerAnswer(message["number"], "there"))
        else:
            peer.client.mark_lost(GONE)

    began = time.monotonic()
    timer = threading.Timer(0.2, end)
    timer.start()
    if ends == "answer":
        assert peer.client.answer(message, within=60) == "there"
    else:
        with pytest.raises(NixlPluginError, match="it is gone"):
            peer.client.answer(message, within=60)
    timer.join()
    assert time.monotonic() - began < 60


def test_a_refusal_is_passed_on_without_what_a_terminal_obeys() -> None:
    peer = DoublePeer(lambda message: PeerAnswer(message["number"], None, "no \x1b[2J", "do \x1b this"))
    with pytest.raises(PeerError) as caught:
        peer.client.ask("command")
    assert caught.value.reason == "rank 1 on there refused 'command': no \\x1b[2J"
    assert caught.value.remedy == "do \\x1b this"


@pytest.mark.parametrize(
    ("request_name", "answer", "fault"),
    [
        ("start", "x", "it is 'x'"), ("start", [1], "it is a list of 1"), ("start", -1, "it is -1"),
        ("start", None, "it is None"), ("start", True, "it is True"), ("address", "a b", "it is 'a b'"),
        ("kill", 256, "it is 256"), ("output", None, "it is None"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_refused(request_name: str, answer: object, fault: str) -> None:
    with pytest.raises(PeerError) as caught:
        DoublePeer(answering(answer)).client.ask(request_name)
    assert caught.value.reason.startswith(f"rank 1 on there sent an invalid answer to '{request_name}': {fault}")
    assert caught.value.remedy == (
        "install the same version of pytest-nixl on every rank; and give every rank a --nixl-group-token, because "
        "without one any client of the etcd can write an answer"
    )


def test_a_text_that_cannot_be_unpacked_is_refused() -> None:
    with pytest.raises(PeerError, match="rank 1 on there sent an invalid answer to 'output'"):
        DoublePeer().client.unpack("output", "x", 10)


def test_a_lost_peer_has_the_first_error_and_gets_no_request() -> None:
    peer = DoublePeer()
    assert (peer.client.gone, peer.client.error) == (False, None)
    peer.client.mark_lost(GONE)
    peer.client.mark_lost(NixlPluginError("later"))
    assert (peer.client.gone, peer.client.error) == (True, GONE)
    with pytest.raises(NixlPluginError, match="it is gone"):
        peer.client.ask("command")
    assert peer.sent == []


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoublePeer]:
    """A peer whose first worker has the pid 7."""
    double = DoublePeer(answering(7))

    class Listed(RemoteProcess):
        def __init__(self, peer: PeerClient, number: int) -> None:
            super().__init__(peer, number)
            double.workers[number] = self

    monkeypatch.setattr(peer_client_module, "RemoteProcess", Listed)
    before = set(threading.enumerate())
    yield double
    for process in double.workers.values():
        process.ended(None)
        process.channel.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)


def start(peer: DoublePeer, **environment: str | None) -> tuple[int, RemoteProcess]:
    """Start a worker, and return it as rank 0 sees it, with its number."""
    assert peer.client.start("initiator", environment, 60).pid == 7
    [worker] = peer.workers.items()
    return worker


def test_lines_go_to_the_worker_of_their_number_and_back(peer: DoublePeer) -> None:
    number, process = start(peer, A="1", B=None)
    assert peer.sent[0] == {
        "ask": "start", "number": peer.sent[0]["number"], "worker": number, "role": "initiator",
        "environment": {"A": "1", "B": None},
    }  # fmt: skip
    peer.answer = lambda _: None
    process.channel.sendall(b"a line\n")
    assert eventually(lambda: peer.sent[-1] == {"worker": number, "line": "a line"})
    peer.client.receive(WorkerLine(number + 1, "of another"))
    peer.client.receive(WorkerLine(number, "its answer"))
    assert process.channel.recv(100) == b"its answer\n"


def test_a_worker_ends_as_its_peer_says_and_only_once(peer: DoublePeer) -> None:
    number, process = start(peer)
    peer.client.receive(WorkerEnded(number + 1, 1))
    assert (process.alive, process.wait(0.01)) == (True, None)
    threading.Timer(0.1, peer.client.receive, (WorkerEnded(number, -9),)).start()
    assert process.wait(60) == -9
    peer.client.receive(WorkerEnded(number, 3))
    assert (process.alive, process.wait(60)) == (False, -9)
    assert process.channel.recv(100) == b"", "nothing more can be read from it"


def test_the_workers_of_a_lost_peer_have_ended(peer: DoublePeer) -> None:
    _, process = start(peer)
    peer.client.mark_lost(GONE)
    assert (process.alive, process.wait(60), process.output()) == (False, None, "")
    process.kill()
    assert process.channel.fileno() == -1


def test_a_worker_that_is_killed_has_the_code_that_its_peer_says(peer: DoublePeer) -> None:
    number, process = start(peer)
    peer.answer = answering("T (stopped)", None, -9)
    assert process.state() == "T (stopped)"
    process.signal(18)
    process.kill()
    assert (process.alive, process.wait(60)) == (False, -9)
    process.kill()
    # The line of the command "hello" comes from another thread.
    requests = [message for message in peer.sent[1:] if "ask" in message]
    assert [{name: value for name, value in message.items() if name != "number"} for message in requests] == [
        {"ask": "state", "worker": number}, {"ask": "signal", "worker": number, "signal": 18},
        {"ask": "kill", "worker": number},
    ]  # fmt: skip


def test_a_worker_whose_peer_takes_no_line_has_ended(peer: DoublePeer) -> None:
    def refuse(message: dict[str, Any]) -> None:
        raise NixlPluginError("the lease has ended")

    _, process = start(peer)
    peer.answer = refuse
    process.channel.sendall(b"a line\n")
    more = b""
    with suppress(ConnectionResetError):  # which a worker's reader takes for the end, too
        more = process.channel.recv(100)
    assert more == b"", "nothing more can be read from it"
    assert (process.wait(60), process.alive) == (None, False)


def test_a_worker_that_cannot_be_started_has_ended(peer: DoublePeer) -> None:
    peer.answer = lambda message: PeerAnswer(message["number"], None, "no room")
    with pytest.raises(PeerError, match="refused 'start': no room"):
        peer.client.start("initiator", {}, 60)
    [process] = peer.workers.values()
    assert (process.alive, process.channel.fileno()) == (False, -1)


class Parts:
    """The mailbox and the watch of the members of rank 0 or of a peer: they keep what is done, and reach no etcd."""

    def __init__(self) -> None:
        #: What was sent and closed, in order.
        self.log: list[object] = []
        self.on_watch: Callable[[], None] = lambda: None
        self.on_send: Callable[[], None] = lambda: None
        #: The answers of the peers by rank: a result, an error, or none (``...``); and the error of the mailbox.
        self.answers: dict[int, Any] = {}
        self.mail_error: NixlPluginError | None = None
        self.members = [Member(rank, f"t{rank}", f"node-{rank}", 9) for rank in range(5)]

    def mailbox(self, _: object, membership: Any, *, handle: Any, failed: Any) -> Any:
        self.handle, self.failed = handle, failed
        return SimpleNamespace(
            open=lambda: self.log.append("open"),
            send=self.send,
            send_each=self.send_each,
            close=self.closing("mailbox"),
        )

    def guard(self, _: object, membership: Any, lost: Any, ranks: Any = None) -> Any:
        self.lost, self.ranks = lost, ranks
        self.on_watch()
        return SimpleNamespace(close=self.closing("guard"))

    def closing(self, part: str) -> Callable[[], None]:
        return lambda: self.log.append(f"close {part}")

    def connect(self) -> Any:
        client = ExitStack()
        client.callback(self.closing("client"))
        return client

    def send(self, rank: int, message: dict[str, Any]) -> None:
        read_message(message)  # a message of another form would be ignored
        self.log.append((rank, message))
        self.on_send()

    def send_each(self, messages: dict[int, dict[str, Any]]) -> None:
        self.log.append({rank: {**message, "number": 0} for rank, message in messages.items()})
        if self.mail_error is not None:
            raise self.mail_error
        for rank, message in messages.items():
            answer = self.answers[rank]
            if answer is not ...:
                error = str(answer) if isinstance(answer, Exception) else None
                self.handle(rank, PeerAnswer(message["number"], None if error else answer, error))

    def drive(self, count: int, on_lease_lost: Any = lambda _: None) -> RankDriver:
        """Return the driver of this many peers."""
        membership: Any = SimpleNamespace(rank=0, members=self.members[: count + 1], group="g")
        return RankDriver(membership, self.connect, timeout=60, on_lease_lost=on_lease_lost)

    def serve(self) -> Ending:
        """Serve as rank 1."""
        membership: Any = SimpleNamespace(rank=1, members=self.members[:3], group="g")
        return serve(membership, self.connect, cast(Any, None), own={})


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    doubles = Parts()
    monkeypatch.setattr(driver_module, "Mailbox", doubles.mailbox)
    monkeypatch.setattr(driver_module, "MembershipWatch", doubles.guard)
    monkeypatch.setattr(driver_module, "LAST_MESSAGE_SECONDS", 0.0)
    return doubles


def test_a_mailbox_that_fails_loses_every_peer(parts: Parts) -> None:
    stopped: list[NixlPluginError] = []
    driver = parts.drive(2, stopped.append)
    assert {rank: (peer.rank, peer.name) for rank, peer in driver.peers.items()} == {
        1: (1, "rank 1 on node-1"), 2: (2, "rank 2 on node-2"),
    }  # fmt: skip
    parts.failed(GONE)
    assert (driver.gone, stopped) == ([GONE, GONE], [])


def test_rank_0s_own_lease_ends_the_run_and_a_peers_only_its_waits(parts: Parts) -> None:
    stopped: list[NixlPluginError] = []
    driver = parts.drive(2, stopped.append)
    parts.lost(parts.members[2], GONE)
    assert eventually(lambda: driver.gone == [GONE])
    assert (driver.peers[1].gone, stopped) == (False, [])
    lost_lease = NixlPluginError("its lease ended")
    parts.lost(parts.members[0], lost_lease)
    assert (driver.gone, stopped) == ([lost_lease, GONE], [lost_lease])


def test_a_peer_that_says_why_it_leaves_is_lost_and_ended_and_others_go_on(parts: Parts) -> None:
    driver = parts.drive(2)
    parts.handle(2, PeerLeft("Ctrl-C \x1b"))
    reason = "rank 2 on node-2 (pid 9) of group 'g' left: Ctrl-C \\x1b"
    [error] = driver.gone
    assert (type(error), error.reason) == (MemberLeftError, reason)
    assert error.remedy == "start the run again on every rank"
    assert parts.log == ["open", (2, {"ask": "end", "number": 0, **Ending(1, reason).plain()})]
    message = driver.peers[1].request("command")
    for sender in (7, 1):  # a rank that is no peer is not heard
        parts.handle(sender, PeerAnswer(message["number"], f"of rank {sender}"))
    assert driver.peers[1].answer(message) == "of rank 1"


def test_rank_0_sends_to_each_peer_and_closes_what_it_opened(parts: Parts) -> None:
    driver = parts.drive(2)
    driver.peers[2].line(4, "text")
    parts.answers = {1: None, 2: None}
    driver.end(Ending(5, "bad"))
    end = {"ask": "end", "number": 0, **Ending(5, "bad").plain()}
    closed = ["close guard", "close mailbox", "close client", "close client"]
    assert parts.log == ["open", (2, {"worker": 4, "line": "text"}), {1: end, 2: end}, *closed]


def test_all_peers_are_asked_with_one_request_to_etcd_and_no_answer_is_kept(parts: Parts) -> None:
    driver = parts.drive(3)
    parts.answers = {1: "a", 2: "b", 3: "c"}
    assert driver.ask_all("command", name="x") == parts.answers
    assert parts.log[1:] == [{rank: {"ask": "command", "number": 0, "name": "x"} for rank in (1, 2, 3)}]
    for peer in driver.peers.values():
        with pytest.raises(KeyError):
            peer.answer({"ask": "command", "number": 1})
    # The error is that of the lowest rank, whichever came first.
    parts.answers = {1: "a", 2: ValueError("no b"), 3: ValueError("no c")}
    with pytest.raises(PeerError, match="rank 2 on node-2 refused 'command': no b"):
        driver.ask_all("command")
    driver.peers[1].mark_lost(GONE)
    with pytest.raises(NixlPluginError, match="it is gone"):
        driver.ask_all("command")
    assert list(cast("dict[int, Any]", parts.log[-1])) == [2, 3]


def test_an_error_of_the_mailbox_is_that_of_every_peer(parts: Parts) -> None:
    driver = parts.drive(2)
    parts.mail_error = NixlPluginError("etcd is gone")
    with pytest.raises(NixlPluginError, match="etcd is gone"):
        driver.ask_all("command")
    assert driver.ask_living_peers("command", 60) == {}


def test_peers_that_are_lost_or_late_or_refuse_or_say_nothing_are_left_out(parts: Parts) -> None:
    driver = parts.drive(4)
    parts.answers = {1: "a", 2: ..., 3: ValueError("no"), 4: "d"}
    driver.peers[4].mark_lost(GONE)
    assert driver.ask_living_peers("command", 0.01) == {1: "a"}
    assert list(cast("dict[int, Any]", parts.log[-1])) == [1, 2, 3]
    parts.answers = dict.fromkeys((1, 2, 3))
    assert driver.ask_living_peers("signal", 60) == {}


CLOSED = ["close guard", "close client", "close mailbox", "close client"]


def test_a_peer_ends_as_rank_0_says_and_closes_what_it_opened(parts: Parts) -> None:
    def watched() -> None:
        assert parts.ranks == {0, 1}, "it watches itself and rank 0"
        for sender, code in ((2, 9), (0, 5)):
            parts.handle(sender, PeerRequest("end", code, Ending(code, "bad").plain()))

    parts.on_watch = watched
    assert parts.serve() == Ending(5, "bad")
    assert parts.log == ["open", (0, {"answer": 5, "result": None}), *CLOSED]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_ends_if_rank_0_or_itself_is_lost_and_not_with_another(parts: Parts, rank: int) -> None:
    def watched() -> None:
        for lost in (2, rank):
            parts.lost(parts.members[lost], NixlPluginError(f"rank {lost} is gone"))

    parts.on_watch = watched
    with pytest.raises(NixlPluginError, match=f"rank {rank} is gone"):
        parts.serve()
    assert parts.log == ["open", *CLOSED]


def test_a_peer_that_cannot_be_reached_ends_with_the_error_of_its_mailbox(parts: Parts) -> None:
    parts.on_watch = lambda: parts.failed(GONE)
    with pytest.raises(NixlPluginError, match="it is gone"):
        parts.serve()


def test_a_peer_that_is_interrupted_says_why_and_closes_what_it_opened(parts: Parts) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    parts.on_watch = interrupt
    parts.on_send = lambda: parts.handle(0, PeerRequest("end", 3, Ending(1).plain())) if len(parts.log) == 2 else None
    with pytest.raises(KeyboardInterrupt):
        parts.serve()
    farewell = [(0, {"left": "Ctrl-C (SIGINT)"}), (0, {"answer": 3, "result": None})]
    assert parts.log == ["open", *farewell, *CLOSED[1:]]
