# SPDX-License-Identifier: Apache-2.0
"""Use NIXL from several threads at once, in a worker: one agent, many agents, and notifications from many peers."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pytest_nixl.model import nixl_releases
from pytest_nixl.nixl.backends import BACKENDS, plugin_of, shake_hands
from pytest_nixl.nixl.worker import nixl_api
from pytest_nixl.nixl.worker.peer_scene import SIZE, PeerScene

#: The message by which a receiver tells the senders that all their notifications have arrived.
_ALL = b"all"
#: How often a receiver polls for further notifications after the last one that it waits for.
_MORE_POLLS = 200
_NAP_SECONDS = 0.0001
_seeds = itertools.count(1000)


def _create_agent(name: str, backend: str, sync_mode: str = "auto") -> Any:
    """Return a new agent with a backend."""
    agent = nixl_api.make_agent(name, progress_thread=shake_hands([backend]), sync_mode=sync_mode)
    with BACKENDS[backend].creating():
        agent.create_backend(plugin_of(backend))
    return agent


class _Collector:
    """A thread that polls an agent for notifications, and counts them.

    :param agent: an agent that no other thread uses.
    """

    def __init__(self, agent: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._agent = agent
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> _Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _poll(self) -> None:
        more = _MORE_POLLS
        while more:
            for messages in self._agent.get_new_notifs().values():
                self.counts.update(message.decode(errors="replace") for message in messages)
            more -= self._end.is_set()
            time.sleep(_NAP_SECONDS)


def _at_once(count: int, act: Callable[[int], None], seconds: float) -> list[str]:
    """Run a function in several threads that begin together; return the errors, and which threads did not end."""
    errors: list[str] = []
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            gate.wait(seconds)
            act(number)
        except Exception as error:
            if not (nixl_releases.is_error(type(error).__module__) or isinstance(error, TimeoutError)):
                errors.append(f"{type(error).__name__}: {error}"[:200])
            else:
                errors.append(type(error).__name__)

    started = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    deadline = time.monotonic() + seconds
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = sum(thread.is_alive() for thread in started)
    return [*errors, *(["a thread did not end before its deadline"] * late)]


def transfer_at_once(
    agent: Any, backend: str, sync_mode: str, threads: int, per_thread: int, seconds: float
) -> dict[str, Any]:
    """Let threads register memory, transfer, poll and release on one agent at the same time; compare every byte.

    :param agent: an agent of this worker, which is not used itself.
    :param sync_mode: the synchronization mode of the agent that the threads use.
    :param per_thread: the transfers of each thread, each with a notification of its own.
    :param seconds: the deadline of all threads.
    :return: ``moved``, ``wrong_bytes``, ``lost`` and ``doubled`` notifications, and ``errors``.
    """
    shared = _create_agent(f"{agent.name}-{sync_mode}", backend, sync_mode)
    scene = PeerScene(shared, backend, seconds)
    buffers = [(scene.buffer(), scene.buffer()) for _ in range(threads)]
    for _, target in buffers:
        scene.peer.register_memory(scene.regions(target))
    shared.add_remote_agent(scene.peer.get_agent_metadata())
    moved, wrong = [0] * threads, [0] * threads
    deadline = time.monotonic() + seconds

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_NAP_SECONDS)

    with _Collector(scene.peer) as arrived:

        def move(thread: int) -> None:
            source, target = buffers[thread]
            registered = shared.register_memory(scene.regions(source))
            for number in range(per_thread):
                seed, message = next(_seeds), f"{thread}-{number}"
                source.fill(seed, 0, SIZE)
                local = shared.get_xfer_descs([(source.address, SIZE, 0)], "DRAM")
                remote = shared.get_xfer_descs([(target.address, SIZE, 0)], "DRAM")
                handle = shared.initialize_xfer("WRITE", local, remote, scene.peer.name, message.encode())
                states = [shared.transfer(handle)]

                def completed(handle: Any = handle, states: list[str] = states) -> bool:
                    if states[-1] != "DONE":
                        states.append(shared.check_xfer_state(handle))
                    return states[-1] == "DONE"

                wait(completed)
                wait(lambda message=message: message in arrived.counts)  # type: ignore[misc]
                shared.release_xfer_handle(handle)
                comparison = target.compare(seed, 0, SIZE)
                wrong[thread] += comparison["wrong_bytes"] if comparison else 0
                moved[thread] += 1
            shared.deregister_memory(registered)

        errors = _at_once(threads, move, seconds)
    counts = arrived.counts
    return {
        "moved": sum(moved),
        "wrong_bytes": sum(wrong),
        "lost": sum(f"{thread}-{number}" not in counts for thread in range(threads) for number in range(moved[thread])),
        "doubled": sum(count - 1 for count in counts.values()),
        "errors": errors,
    }


def create_at_once(agent: Any, backend: str, count: int, seconds: float) -> dict[str, Any]:
    """Create agents in several threads at the same time; then each of them moves bytes, which are compared.

    :param agent: an agent of this worker.
    :param count: the number of agents.
    :param seconds: the deadline of all of them.
    :return: as :func:`transfer_at_once`; ``moved`` is the number of agents that moved bytes.
    """
    new_agents: dict[int, Any] = {}

    def create(number: int) -> None:
        new_agents[number] = _create_agent(f"{agent.name}-at-once-{number}", backend)

    errors = _at_once(count, create, seconds)
    scene, wrong = PeerScene(agent, backend, seconds), 0
    for new_agent in new_agents.values():
        new_agent.add_remote_agent(scene.peer.get_agent_metadata())
        scene.agent = new_agent
        wrong += scene.wrong_bytes()
    return {"moved": len(new_agents), "wrong_bytes": wrong, "lost": 0, "doubled": 0, "errors": errors}


def notify(agent: Any, peer: str, count: int, seconds: float) -> None:
    """Send numbered notifications to a peer that runs :func:`collect`, and poll until it says that all are there.

    :raises TimeoutError: it did not say so before the deadline.
    """
    deadline = time.monotonic() + seconds
    for number in range(count):
        agent.send_notif(peer, f"{agent.name}/{number}".encode())
    while _ALL not in [message for messages in agent.get_new_notifs().values() for message in messages]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{peer} did not answer")
        time.sleep(0)


def collect(agent: Any, senders: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    """Collect the notifications of several peers that run :func:`notify`, and tell them when all have arrived.

    :return: as :func:`transfer_at_once`; ``moved`` is the number of different notifications.
    """
    expected = {f"{sender}/{number}" for sender in senders for number in range(count)}
    counts: Counter[str] = Counter()
    misattributed = 0
    deadline, more = time.monotonic() + seconds, _MORE_POLLS
    while more and time.monotonic() < deadline:
        for sender, messages in agent.get_new_notifs().items():
            texts = [message.decode(errors="replace") for message in messages]
            misattributed += sum(not text.startswith(f"{sender}/") for text in texts)
            counts.update(texts)
        more -= expected <= counts.keys()
        time.sleep(0)
    for sender in senders:
        agent.send_notif(sender, _ALL)
    for _ in range(_MORE_POLLS):  # the answers leave while the agent makes progress
        agent.get_new_notifs()
    errors = [f"{misattributed} notifications have the name of another sender"] if misattributed else []
    return {
        "moved": len(expected & counts.keys()),
        "wrong_bytes": sum(text not in expected for text in counts),
        "lost": len(expected - counts.keys()),
        "doubled": sum(count - 1 for count in counts.values()),
        "errors": errors,
    }
