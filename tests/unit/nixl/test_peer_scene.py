# SPDX-License-Identifier: Apache-2.0
"""When a transfer between two agents of one worker has ended, and how many of its bytes are wrong.

The agents are doubles, because real ones end a transfer and its notification at nearly the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.nixl.worker.peer_scene import MOVED, PEER, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError


def scene(states: Sequence[str] = (), polls: Sequence[Sequence[bytes]] = (), seconds: float = 60.0) -> Any:
    """Return a scene whose transfers have these states, the last one for ever, and whose peer finds these messages."""
    remaining, polled = list(states), iter(polls)

    def state(_: object) -> str:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    peer_scene = PeerScene.__new__(PeerScene)
    vars(peer_scene).update(
        agent=SimpleNamespace(check_xfer_state=state), seconds=seconds, _buffers=[],
        peer=SimpleNamespace(get_new_notifs=lambda: {"agent": list(next(polled, ())), "another": [b"x"]}),
    )  # fmt: skip
    return peer_scene


@pytest.mark.parametrize(
    ("states", "polls"),
    [(["DONE"], [[MOVED]]), (["DONE", "PROC"], [[], [b"x"], [b"x", MOVED]]), (["PROC", "PROC", "DONE"], [[MOVED]])],
)
def test_a_transfer_has_ended_when_it_is_done_and_its_peer_was_told(
    states: list[str], polls: list[list[bytes]]
) -> None:
    scene(states, polls).wait_for(None)


@pytest.mark.parametrize(
    ("states", "polls", "message"),
    [
        (["DONE"], [[b"of another"]], "done: True, notified: False"),
        (["PROC"], [[MOVED]], "done: False, notified: True"),
    ],
)
def test_a_transfer_that_is_only_done_or_only_told_is_late(
    states: list[str], polls: list[list[bytes]], message: str
) -> None:
    with pytest.raises(StepTimeoutError, match=rf"not finished after 0\.01 s \({message}\)"):
        scene(states, polls, 0.01).wait_for(None)


def test_a_transfer_is_posted_and_waited_for() -> None:
    posted: list[str] = []
    peer_scene = scene(["PROC"], seconds=0.01)
    peer_scene.agent.transfer = posted.append
    with pytest.raises(StepTimeoutError):
        peer_scene.finish("handle")
    assert posted == ["handle"]


@pytest.mark.parametrize(("wrong", "count"), [([], 0), ([0], 1), ([0, 7, SIZE - 1], 3), (None, SIZE)])
def test_wrong_bytes_are_counted_after_the_notification_of_their_own_transfer(
    wrong: Sequence[int] | None, count: int
) -> None:
    """The bytes arrive with the notification, and some of them wrong, at the offsets ``wrong``; None: none arrives."""
    peer_scene = scene(["DONE"])
    registered: list[Any] = []
    requests: list[bytes] = []
    posted: list[Any] = []
    polls = iter([[MOVED], [b"compared"]])

    def transfer_of(local: list[tuple[int, int]], remote: list[tuple[int, int]], notification: bytes) -> Any:
        requests.append(notification)
        return local[0], remote[0]

    def get_new_notifs() -> dict[str, list[bytes]]:
        messages = next(polls, [])
        if b"compared" in messages and wrong is not None:
            [((local_address, size), (remote_address, _))] = posted
            data = bytearray(ctypes.string_at(local_address, size))
            for offset in wrong:
                data[offset] ^= 0xFF
            ctypes.memmove(remote_address, bytes(data), size)
        return {"agent": messages}

    peer_scene.transfer_of = transfer_of
    peer_scene.agent.transfer = posted.append
    peer_scene.peer.get_new_notifs = get_new_notifs
    peer_scene.agent.add_remote_agent = registered.append
    for agent in (peer_scene.agent, peer_scene.peer):
        agent.register_memory = registered.append
    peer_scene.agent.get_reg_descs = lambda regions, memory: regions
    peer_scene.peer.get_agent_metadata = lambda: "metadata"
    assert peer_scene.wrong_bytes() == count
    assert requests == [b"compared"]
    (source, target) = ([(buffer.address, SIZE, 0, "")] for buffer in peer_scene._buffers)
    assert registered == [source, target, "metadata"]


def test_all_bytes_move_from_this_agent_to_its_peer() -> None:
    peer_scene = scene()
    peer_scene.agent = SimpleNamespace(
        get_xfer_descs=lambda rows, memory: (memory, rows), initialize_xfer=lambda *arguments: arguments
    )
    peer_scene.source, peer_scene.target = SimpleNamespace(address=100), SimpleNamespace(address=200)
    local, remote = ("DRAM", [(100, SIZE, 0)]), ("DRAM", [(200, SIZE, 0)])
    assert peer_scene.transfer_all() == ("WRITE", local, remote, PEER, MOVED)
