# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side of one peer: which answer belongs to which request, and what ends when the peer is lost.

The peer is a double, because only it can answer late, twice or nonsense.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import eventually

from pytest_nixl.cluster import driver as driver_module
from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.group import Member
from pytest_nixl.cluster.messages import Message, PeerAnswer, PeerLeft, WorkerEnded, WorkerLine, read_message
from pytest_nixl.cluster.peer_client import PeerClient, PeerError, PeerLateError
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError

Answer = Callable[[dict[str, Any]], "Message | None"]


class DoublePeer:
    """A peer that answers each message at once, as it is told to.

    :param answer: makes the answer; None: there is none.
    """

    def __init__(self, answer: Answer = lambda _: None, timeout: float = 60) -> None:
        self.sent: list[dict[str, Any]] = []
        self.answer = answer
        self.client = PeerClient(1, "rank 1 on there", self._receive, timeout)

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
    with pytest.raises(PeerLateError, match=r"rank 1 on there did not answer 'command' within 0\.01 s"):
        peer.client.ask("command", within=0.01)


def test_an_answer_that_is_there_is_returned_even_if_no_time_is_left() -> None:
    peer = DoublePeer()
    message = peer.client.request("command")
    peer.client.receive(PeerAnswer(message["number"], "there"))
    assert peer.client.answer(message, within=5, since=time.monotonic() - 60) == "there"
    late = peer.client.request("command")
    begin = time.monotonic()
    with pytest.raises(PeerLateError):
        peer.client.answer(late, within=500, since=begin - 501)
    for reply in (message, late):
        peer.client.forget(reply)


def test_a_refusal_is_passed_on_without_what_a_terminal_obeys() -> None:
    peer = DoublePeer(lambda message: PeerAnswer(message["number"], None, "no \x1b[2J", "do this"))
    with pytest.raises(PeerError, match=r"rank 1 on there refused 'command': no \\x1b") as caught:
        peer.client.ask("command")
    assert caught.value.remedy == "do this"


@pytest.mark.parametrize(("form", "answer"), [("start", "x"), ("address", "a b"), ("kill", 256), ("output", None)])
def test_an_answer_of_another_form_is_refused(form: str, answer: object) -> None:
    with pytest.raises(PeerError, match=f"rank 1 on there sent an invalid answer to '{form}': "):
        DoublePeer(answering(answer)).client.ask(form)


def test_a_text_that_cannot_be_unpacked_is_refused() -> None:
    with pytest.raises(PeerError, match="an invalid answer to 'output'"):
        DoublePeer().client.unpack("output", "x", 10)


def test_a_lost_peer_ends_every_wait_with_the_first_error() -> None:
    peer, first = DoublePeer(), NixlPluginError("it is gone")
    threading.Timer(0.05, peer.client.mark_lost, (first,)).start()
    with pytest.raises(NixlPluginError, match="it is gone"):
        peer.client.ask("command")
    assert peer.client.gone
    peer.client.mark_lost(NixlPluginError("later"))
    assert peer.client.error is first
    sent = len(peer.sent)
    with pytest.raises(NixlPluginError, match="it is gone"):
        peer.client.ask("command")
    assert len(peer.sent) == sent


@pytest.fixture
def peer() -> Iterator[DoublePeer]:
    """A peer whose first worker has the pid 7."""
    double = DoublePeer(answering(7))
    yield double
    for process in double.client._processes.values():
        process.ended(None)
        process.channel.close()
        process._feeder.join(60)


def test_lines_go_to_the_worker_of_their_number_and_back(peer: DoublePeer) -> None:
    worker = peer.client.start("initiator", {"A": "1", "B": None}, 60)
    assert worker.pid == 7
    assert peer.sent[0] == {
        "ask": "start", "number": peer.sent[0]["number"], "worker": peer.sent[0]["worker"],
        "role": "initiator", "environment": {"A": "1", "B": None},
    }  # fmt: skip
    [(number, process)] = peer.client._processes.items()
    peer.answer = lambda _: None
    process.channel.sendall(b"a line\n")
    assert eventually(lambda: peer.sent[-1] == {"worker": number, "line": "a line"})
    peer.client.receive(WorkerLine(number + 1, "of another"))
    peer.client.receive(WorkerLine(number, "its answer"))
    assert process.channel.recv(100) == b"its answer\n"


def test_a_worker_ends_as_its_peer_says_and_only_once(peer: DoublePeer) -> None:
    peer.client.start("initiator", {}, 60)
    [(number, process)] = peer.client._processes.items()
    assert process.alive
    assert process.wait(0.01) is None
    peer.client.receive(WorkerEnded(number + 1, 1))
    assert process.alive
    threading.Timer(0.1, peer.client.receive, (WorkerEnded(number, -9),)).start()
    assert process.wait(60) == -9
    peer.client.receive(WorkerEnded(number, 3))
    assert not process.alive
    assert process.wait(60) == -9
    assert process.channel.recv(100) == b"", "nothing more can be read from it"


def test_the_workers_of_a_lost_peer_have_ended(peer: DoublePeer) -> None:
    peer.client.start("initiator", {}, 60)
    [process] = peer.client._processes.values()
    peer.client.mark_lost(NixlPluginError("it is gone"))
    assert not process.alive
    assert process.wait(60) is None
    assert process.output() == ""
    process.kill()


def test_a_worker_that_is_killed_has_the_code_that_its_peer_says(peer: DoublePeer) -> None:
    peer.client.start("initiator", {}, 60)
    [(number, process)] = peer.client._processes.items()
    peer.answer = answering("T (stopped)", None, -9)
    assert process.state() == "T (stopped)"
    process.signal(18)
    process.kill()
    assert not process.alive
    assert process.wait(60) == -9
    process.kill()
    # The line of the command "hello" comes from another thread.
    requests = [message for message in peer.sent[1:] if "ask" in message]
    sent_messages = [{name: value for name, value in message.items() if name != "number"} for message in requests]
    assert sent_messages == [
        {"ask": "state", "worker": number}, {"ask": "signal", "worker": number, "signal": 18},
        {"ask": "kill", "worker": number},
    ]  # fmt: skip


def test_a_worker_whose_peer_takes_no_line_has_ended(peer: DoublePeer) -> None:
    def refuse(message: dict[str, Any]) -> None:
        raise NixlPluginError("the lease has ended")

    peer.client.start("initiator", {}, 60)
    [process] = peer.client._processes.values()
    peer.answer = refuse
    process.channel.sendall(b"a line\n")
    more = b""
    with suppress(ConnectionResetError):  # which a worker's reader takes for the end, too
        more = process.channel.recv(100)
    assert more == b"", "nothing more can be read from it"
    assert process.wait(60) is None
    assert not process.alive


def test_a_worker_that_cannot_be_started_has_ended() -> None:
    peer = DoublePeer(lambda message: PeerAnswer(message["number"], None, "no room"))
    with pytest.raises(PeerError, match="refused 'start': no room"):
        peer.client.start("initiator", {}, 60)
    [process] = peer.client._processes.values()
    assert not process.alive
    assert process.channel.fileno() == -1


def driver() -> tuple[RankDriver, list[tuple[int, str]], list[str]]:
    """Return a driver of two peers, what was told to them, and to the run; nothing watches or reads mail."""
    losses: list[tuple[int, str]] = []
    stopped: list[str] = []
    rank_driver = RankDriver.__new__(RankDriver)

    def peer(rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            mark_lost=lambda error: losses.append((rank, error.reason)),
            receive=lambda message: losses.append((rank, type(message).__name__)),
        )

    def send(rank: int, message: dict[str, Any]) -> None:
        read_message(message)  # a message of another form would be ignored
        losses.append((rank, message["ask"]))

    vars(rank_driver).update(
        peers={rank: peer(rank) for rank in (1, 2)},
        membership=SimpleNamespace(
            members=[Member(rank, f"t{rank}", f"node-{rank}", 9) for rank in range(3)], group="g"
        ),
        _mailbox=SimpleNamespace(send=send),
        _on_lease_lost=lambda error: stopped.append(error.reason),
    )
    return rank_driver, losses, stopped


def test_a_mailbox_that_fails_loses_every_peer() -> None:
    rank_driver, losses, stopped = driver()
    rank_driver._failed(NixlPluginError("etcd is gone"))
    assert (losses, stopped) == ([(1, "etcd is gone"), (2, "etcd is gone")], [])


def test_rank_0s_own_lease_ends_the_run_and_a_peers_only_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "LAST_MESSAGE_SECONDS", 0.0)
    rank_driver, losses, stopped = driver()
    members = rank_driver.membership.members
    rank_driver._lost(members[2], NixlPluginError("rank 2 is gone"))
    assert eventually(lambda: losses == [(2, "rank 2 is gone")])
    rank_driver._lost(members[0], NixlPluginError("its lease ended"))
    assert losses[1:] == [(1, "its lease ended"), (2, "its lease ended")]
    assert stopped == ["its lease ended"]


def test_a_peer_that_says_why_it_leaves_is_lost_and_ended_and_others_go_on() -> None:
    rank_driver, losses, _ = driver()
    rank_driver._receive(2, PeerLeft("Ctrl-C \x1b"))
    [(lost, reason), (ended, ask)] = losses
    assert (lost, ended, ask) == (2, 2, "end")
    assert reason == "rank 2 on node-2 (pid 9) of group 'g' left: Ctrl-C \\x1b"
    rank_driver._receive(1, PeerAnswer(4, "x"))
    rank_driver._receive(7, PeerAnswer(4, "x"))
    assert losses[2:] == [(1, "PeerAnswer")], "a rank that is no peer is not heard"


@pytest.mark.parametrize("ends", ["answer", "lost"])
def test_a_wait_ends_with_the_answer_or_the_loss_and_not_with_its_time(ends: str) -> None:
    within = 60.0
    peer = DoublePeer()
    message = peer.client.request("command")

    def end() -> None:
        if ends == "answer":
            peer.client.receive(PeerAnswer(message["number"], "there"))
        else:
            peer.client.mark_lost(NixlPluginError("it is gone"))

    began = time.monotonic()
    timer = threading.Timer(0.2, end)
    timer.start()
    if ends == "answer":
        assert peer.client.answer(message, within=within) == "there"
    else:
        with pytest.raises(NixlPluginError, match="it is gone"):
            peer.client.answer(message, within=within)
    timer.join()
    assert time.monotonic() - began < within


@dataclass
class DoubleOfPeer:
    """What :func:`serve` makes for a peer of rank 1: each part keeps what it is asked, and nothing reaches an etcd."""

    log: list[object]
    parts: dict[str, Any]
    ending: Ending | None = None

    def made(self, name: str, *given: Any, **named: Any) -> Any:
        self.parts[name] = (given, named)
        return SimpleNamespace(
            close=lambda: self.log.append(f"close {name}"),
            open=lambda: self.log.append("open"),
            send=self.send,
            receive=lambda message: self.log.append(message),
            ending=self.ending,
        )

    def connected(self) -> ExitStack:
        client = ExitStack()
        client.callback(self.log.append, "close client")
        return client

    def send(self, rank: int, message: object) -> None:
        self.log.append((rank, message))
        self.over()

    def over(self) -> None:
        self.parts["server"][0][3]()

    def serve(self) -> Ending:
        members = [Member(rank, f"t{rank}", "h", 9) for rank in range(3)]
        membership: Any = SimpleNamespace(rank=1, members=members, group="g")
        callback: Any = None
        return serve(membership, cast(Any, self.connected), callback, own={})


@pytest.fixture
def peer_double(monkeypatch: pytest.MonkeyPatch) -> DoubleOfPeer:
    double = DoubleOfPeer([], {})
    for name, part in (("PeerServer", "server"), ("Mailbox", "mailbox"), ("MembershipWatch", "guard")):
        monkeypatch.setattr(driver_module, name, partial(double.made, part))
    return double


CLOSED = ["close guard", "close client", "close mailbox", "close client", "close server"]


def test_a_peer_ends_as_rank_0_says_and_closes_what_it_opened(
    peer_double: DoubleOfPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_double.ending = Ending(5, "bad")

    def watched(*given: Any) -> Any:
        assert given[3] == {0, 1}, "it watches itself and rank 0"
        handle = peer_double.parts["mailbox"][1]["handle"]
        for sender in (2, 0):
            handle(sender, f"of rank {sender}")
        peer_double.over()
        return peer_double.made("guard")

    monkeypatch.setattr(driver_module, "MembershipWatch", watched)
    assert peer_double.serve() == Ending(5, "bad")
    assert peer_double.log == ["open", "of rank 0", *CLOSED]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_ends_if_rank_0_or_itself_is_lost_and_not_with_another(
    peer_double: DoubleOfPeer, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def watched(client: object, membership: Any, lost: Any, ranks: object) -> Any:
        for lost_rank in (2, rank):
            lost(membership.members[lost_rank], NixlPluginError(f"rank {lost_rank} is gone"))
        return peer_double.made("guard")

    monkeypatch.setattr(driver_module, "MembershipWatch", watched)
    with pytest.raises(NixlPluginError, match=f"rank {rank} is gone"):
        peer_double.serve()
    assert peer_double.log == ["open", *CLOSED]


def test_a_peer_that_is_interrupted_says_why_and_closes_what_it_opened(
    peer_double: DoubleOfPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver_module, "MembershipWatch", watched)
    with pytest.raises(KeyboardInterrupt):
        peer_double.serve()
    assert peer_double.log == ["open", (0, {"left": "Ctrl-C (SIGINT)"}), *CLOSED[1:]]


def asked_driver(*answers: Any, mail: NixlPluginError | None = None) -> tuple[RankDriver, list[dict[int, Any]]]:
    """Return a driver whose peers answer so: with a result, an error text, or not at all (``...``).

    :param mail: the error of the mailbox.
    """
    rank_driver = RankDriver.__new__(RankDriver)
    sent: list[dict[int, Any]] = []

    def send_each(messages: dict[int, dict[str, Any]]) -> None:
        sent.append({rank: {**message, "number": 0} for rank, message in messages.items()})
        if mail is not None:
            raise mail
        for rank, message in messages.items():
            answer = answers[rank - 1]
            if isinstance(answer, Exception):
                rank_driver.peers[rank].receive(PeerAnswer(message["number"], None, str(answer)))
            elif answer is not ...:
                rank_driver.peers[rank].receive(PeerAnswer(message["number"], answer))

    ranks = range(1, len(answers) + 1)

    vars(rank_driver).update(
        peers={rank: PeerClient(rank, f"rank {rank}", lambda _: None, 60) for rank in ranks},
        _mailbox=SimpleNamespace(send_each=send_each),
    )
    return rank_driver, sent


def waiting(rank_driver: RankDriver) -> list[int]:
    """Return how many answers each peer is expected to send."""
    return [len(peer._answers) for peer in rank_driver.peers.values()]


def test_all_peers_are_asked_with_one_request_to_etcd() -> None:
    rank_driver, sent = asked_driver("a", "b")
    assert rank_driver.ask_all("command", name="x") == {1: "a", 2: "b"}
    assert sent == [{rank: {"ask": "command", "number": 0, "name": "x"} for rank in (1, 2)}]
    assert waiting(rank_driver) == [0, 0]


def test_the_error_of_the_lowest_rank_is_raised_when_all_have_answered() -> None:
    rank_driver, _ = asked_driver("a", ValueError("no b"), ValueError("no c"))
    with pytest.raises(PeerError, match="rank 2 refused 'command': no b"):
        rank_driver.ask_all("command")
    rank_driver.peers[1].mark_lost(NixlPluginError("rank 1 is gone"))
    with pytest.raises(NixlPluginError, match="rank 1 is gone"):
        rank_driver.ask_all("command")
    assert waiting(rank_driver) == [0, 0, 0]


def test_an_error_of_the_mailbox_is_that_of_every_peer() -> None:
    rank_driver, _ = asked_driver("a", "b", mail=NixlPluginError("etcd is gone"))
    with pytest.raises(NixlPluginError, match="etcd is gone"):
        rank_driver.ask_all("command")
    assert rank_driver.ask_living_peers("command", 60) == {}
    assert waiting(rank_driver) == [0, 0]


def test_peers_that_are_lost_or_late_or_refuse_are_left_out() -> None:
    rank_driver, sent = asked_driver("a", ..., ValueError("no"), "d")
    rank_driver.peers[4].mark_lost(NixlPluginError("rank 4 is gone"))
    assert rank_driver.ask_living_peers("command", 0.01) == {1: "a"}
    assert list(sent[0]) == [1, 2, 3]
    assert asked_driver(None)[0].ask_living_peers("signal", 60) == {}, "an answer without a result says nothing"
