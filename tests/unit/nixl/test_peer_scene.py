# SPDX-License-Identifier: Apache-2.0
"""What a scene of two agents in one worker asks of them, when its transfers have ended, and how many bytes are wrong.

The agents are doubles, because real ones end a transfer and its notification at nearly the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.peer_scene import MOVED, PEER, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError


class LoggedAgent:
    """An agent that writes to a log what it is asked.

    :param states: the answers to looks at a transfer; the last one is repeated.
    :param polls: the notifications of each poll, and then none.
    """

    def __init__(self, log: list[Any], states: Sequence[str] = (), polls: Sequence[Sequence[bytes]] = ()) -> None:
        self.log, self.states, self.polls = log, list(states), list(polls)

    def __getattr__(self, method: str) -> Any:
        def note(*values: object) -> tuple[object, ...]:
            self.log.append((method, *values))
            return method, *values

        return note

    def check_xfer_state(self, _: object) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"agent": list(self.polls.pop(0)) if self.polls else [], "another": [b"x"]}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scene whose agent and peer share a log, in ``scene.agent.log``."""
    log: list[Any] = []

    def make_agent(name: str, *, progress_thread: bool) -> LoggedAgent:
        log.append((name, progress_thread))
        return LoggedAgent(log)

    monkeypatch.setattr(nixl_api, "make_agent", make_agent)
    return PeerScene(LoggedAgent(log), "LIBFABRIC", 60.0)


def test_an_agent_knows_its_peer_and_moves_all_bytes_to_it(scene: Any) -> None:
    rows = [[(buffer.address, SIZE, 0)] for buffer in (scene.source, scene.target)]
    of_target = ("get_reg_descs", [(scene.target.address, SIZE, 0, "")], "DRAM")
    metadata = ("get_agent_metadata",)
    # A backend whose agents wait for each other's progress needs a thread.
    assert scene.agent.log == [
        *[(PEER, True), ("create_backend", "LIBFABRIC"), of_target, ("register_memory", of_target)],
        *[metadata, ("add_remote_agent", metadata)],
    ]
    scene.agent.log.clear()
    source, target = (("get_xfer_descs", row, "DRAM") for row in rows)
    write = ("initialize_xfer", "WRITE", source, target, PEER, MOVED)
    assert scene.transfer_all() == write
    assert scene.agent.log == [source, target, write]


@pytest.mark.parametrize(
    ("states", "polls"),
    [(["DONE"], [[MOVED]]), (["DONE", "PROC"], [[], [b"x"], [b"x", MOVED]]), (["PROC", "PROC", "DONE"], [[MOVED]])],
)
def test_a_transfer_has_ended_when_it_is_done_and_its_peer_was_told(
    scene: Any, states: list[str], polls: list[list[bytes]]
) -> None:
    scene.agent.states, scene.peer.polls = states, polls
    scene.agent.log.clear()
    scene.finish("handle")
    assert scene.agent.log == [("transfer", "handle")]


@pytest.mark.parametrize(
    ("states", "polls", "message"),
    [
        (["DONE"], [[b"of another"]], "done: True, notified: False"),
        (["PROC"], [[MOVED]], "done: False, notified: True"),
    ],
)
def test_a_transfer_that_is_only_done_or_only_told_is_late(
    scene: Any, states: list[str], polls: list[list[bytes]], message: str
) -> None:
    scene.agent.states, scene.peer.polls, scene.seconds = states, polls, 0.01
    with pytest.raises(StepTimeoutError) as caught:
        scene.wait_for(None)
    assert str(caught.value) == f"not finished after 0.01 s ({message})"


@pytest.mark.parametrize(("wrong", "count"), [([], 0), ([0], 1), ([0, 7, SIZE - 1], 3), (None, SIZE)])
def test_wrong_bytes_are_counted_after_the_notification_of_their_own_transfer(
    scene: Any, wrong: Sequence[int] | None, count: int
) -> None:
    """The bytes arrive with the notification, and some of them wrong, at the offsets ``wrong``; None: none arrives."""
    log = scene.agent.log
    log.clear()
    scene.agent.states = ["DONE"]
    polls = iter([[MOVED], [b"compared"]])

    def get_new_notifs() -> dict[str, list[bytes]]:
        messages = next(polls)
        [(_, handle)] = [entry for entry in log if entry[0] == "transfer"]
        (_, [(source, size, _)], _), (_, [(target, _, _)], _) = handle[2:4]
        if b"compared" in messages and wrong is not None:
            data = bytearray(ctypes.string_at(source, size))
            for offset in wrong:
                data[offset] ^= 0xFF
            ctypes.memmove(target, bytes(data), size)
        return {"agent": messages}

    scene.peer.get_new_notifs = get_new_notifs
    assert scene.wrong_bytes() == count
    names = ["get_reg_descs", "register_memory"] * 2 + ["get_agent_metadata", "add_remote_agent"]
    assert [entry[0] for entry in log] == [*names, "get_xfer_descs", "get_xfer_descs", "initialize_xfer", "transfer"]
    source, target, write = log[6:9]
    assert write == ("initialize_xfer", "WRITE", source, target, PEER, b"compared")
    registered = [("get_reg_descs", [(*row, "") for row in places[1]], "DRAM") for places in (source, target)]
    assert [log[1], log[3]] == [("register_memory", rows) for rows in registered]
    assert {row[0][0] for _, row, _ in (source, target)}.isdisjoint({scene.source.address, scene.target.address})
