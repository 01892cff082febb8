# SPDX-License-Identifier: Apache-2.0
"""When the transfers of two agents in one worker have ended, and how many of their bytes are wrong.

The agents are doubles, because real ones end a transfer and its notification at nearly the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.peer_scene import MOVED, SIZE, PeerScene
from pytest_nixl.nixl.worker.transfer import StepTimeoutError


class PolledAgent:
    """An agent of which each call is accepted.

    :param states: the answers to looks at a transfer; the last one is repeated.
    :param polls: the notifications of each poll, and then none.
    """

    def __init__(self, states: Sequence[str] = (), polls: Sequence[Sequence[bytes]] = ()) -> None:
        self.states, self.polls = list(states), list(polls)
        self.backends: list[str] = []

    def __getattr__(self, method: str) -> Any:
        return lambda *values: values

    def create_backend(self, backend: str) -> None:
        self.backends.append(backend)

    def check_xfer_state(self, _: object) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"agent": list(self.polls.pop(0)) if self.polls else [], "another": [b"x"]}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(nixl_api, "make_agent", lambda name, progress_thread: PolledAgent())
    return PeerScene(PolledAgent(), "LIBFABRIC", 60.0)


@pytest.mark.parametrize(
    ("states", "polls"), [(["DONE", "PROC"], [[], [b"x"], [b"x", MOVED]]), (["PROC", "PROC", "DONE"], [[MOVED]])]
)
def test_a_transfer_has_ended_when_it_is_done_and_its_peer_was_told(
    scene: Any, states: list[str], polls: list[list[bytes]]
) -> None:
    scene.agent.states, scene.peer.polls = states, polls
    scene.finish("handle")
    assert scene.peer.backends == ["LIBFABRIC"]
    assert (scene.agent.states[1:], scene.peer.polls) == ([], [])


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


@pytest.mark.parametrize(("wrong", "count"), [([0, -1], 2), (None, SIZE)])
def test_wrong_bytes_are_counted_after_the_notification_of_their_own_transfer(
    scene: Any, wrong: list[int] | None, count: int
) -> None:
    """The bytes arrive with the notification, and some of them wrong, at the offsets ``wrong``; None: none arrives."""
    places: list[Any] = []
    scene.agent.states = ["DONE"]
    scene.agent.initialize_xfer = lambda *values: places.extend(values)
    polls = iter([[MOVED], [b"compared"]])

    def get_new_notifs() -> dict[str, list[bytes]]:
        messages = next(polls)
        op, ([(source, size, _)], _), ([(target, _, _)], _), *_ = places
        assert op == "WRITE"
        if b"compared" in messages and wrong is not None:
            data = bytearray(ctypes.string_at(source, size))
            for offset in wrong:
                data[offset] ^= 0xFF
            ctypes.memmove(target, bytes(data), size)
        return {"agent": messages}

    scene.peer.get_new_notifs = get_new_notifs
    assert scene.wrong_bytes() == count
