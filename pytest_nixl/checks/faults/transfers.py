# SPDX-License-Identifier: Apache-2.0
"""Make faults while NIXL transfers are in flight, and observe what NIXL answers and whether the other agents go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_nixl.checks.faults.scene import (
    COUNT,
    MOVED,
    OUTCOME,
    REGIONS,
    SECONDS,
    EarlyEndError,
    FaultOutcome,
    FaultScene,
    seeds,
)
from pytest_nixl.checks.faults.worker.traffic import FINISH, NOT_CALLED
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.core.rdma_fault import TCP_ALONE, over_tcp, wants_rdma
from pytest_nixl.core.strict import Every, Text, check
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import NixlError, WorkerDiedError, WorkerError
from pytest_nixl.processes.worker_process import Pending

#: How a process ends that uses memory which it has freed.
_UNMAPPED = ("was ended by SIGSEGV", "was ended by SIGBUS")
_INTERRUPTED = {"act": Text(256), "seconds": SECONDS, "in_flight": COUNT, "states": Every(COUNT, keys=True)}
#: The number of notifications that are sent to a dead agent, and the deadline of each in seconds.
NOTIFICATIONS, NOTIFIED = 200, 20.0
#: The time in seconds for which a target is stopped before it goes on, and after which it counts as silent.
PAUSE, SILENCE = 1.0, 3.0


def _killed(scene: FaultScene) -> FaultOutcome:
    """Kill the target, and return what the initiator is told."""
    with scene.traffic(quiet=scene.initiator.worker.timeout / 2, limit=scene.initiator.worker.timeout) as pending:
        began = time.monotonic()
        scene.target.worker.signal(signal.SIGKILL)
        return _await_traffic(scene, pending, began)


def _initiator_killed(scene: FaultScene) -> FaultOutcome:
    seed = next(seeds)
    with scene.traffic(quiet=scene.initiator.worker.timeout, limit=scene.initiator.worker.timeout):
        began = time.monotonic()
        scene.initiator.worker.kill()
    outcome = replace(scene.outcome, answer="the target is not told", seconds=time.monotonic() - began)

    def moved() -> int:
        scene.mark(scene.destination, seed)
        return scene.move(scene.target, scene.third)

    outcome = _survivor(outcome, scene, moved)
    return outcome if outcome.survivor else replace(outcome, changed=scene.changed(scene.destination, seed))


def kept_while(scene: FaultScene, passing: Callable[[], None]) -> FaultOutcome:
    """Keep transfers in flight during a fault that passes, and then move bytes to the same target.

    :param passing: makes the fault, and ends it.
    """
    with scene.traffic(quiet=scene.initiator.worker.timeout / 2, limit=scene.initiator.worker.timeout) as pending:
        began = time.monotonic()
        passing()
        scene.initiator.worker.signal(FINISH)
        outcome = _await_traffic(scene, pending, began)
    return _survivor(outcome, scene, lambda: scene.move(scene.initiator, scene.target))


def _pause(agent: NixlAgent) -> None:
    """Stop the process of an agent for a time, which is the fault itself."""
    agent.worker.signal(signal.SIGSTOP)
    time.sleep(PAUSE)
    agent.worker.signal(signal.SIGCONT)


def _target_paused(scene: FaultScene) -> FaultOutcome:
    def pause() -> None:
        _pause(scene.target)
        scene.target.get_plugin_list()

    return kept_while(scene, pause)


def lost_with(scene: FaultScene, lasting: Callable[[], None]) -> FaultOutcome:
    """Keep transfers in flight when a fault silences the target for ever, and then move bytes to the third agent.

    :param lasting: makes the fault.
    """
    with scene.traffic(quiet=SILENCE, limit=2 * SILENCE) as pending:
        began = time.monotonic()
        lasting()
        outcome = _await_traffic(scene, pending, began)
    return _survivor(outcome, scene, lambda: scene.move(scene.initiator, scene.third))


def _target_unmapped(scene: FaultScene) -> FaultOutcome:
    """Free the memory of the target. The target itself may then crash, because bytes that arrive are written to it."""

    def unmap() -> None:
        try:
            scene.target.worker.call("unmap", buffer=scene.destination.ref)
        except WorkerDiedError as error:
            if error.ending not in _UNMAPPED:
                raise

    return lost_with(scene, unmap)


def _target_restarted(scene: FaultScene) -> FaultOutcome:
    outcome = _killed(scene)
    (again,) = scene.start(scene.target.name)

    def moved() -> int:
        scene.initiator.remove_remote_agent(again.name)
        return scene.move(scene.initiator, again)

    return _survivor(outcome, scene, moved)


def _listener_restarted(scene: FaultScene) -> FaultOutcome:
    """Kill a target that listens, and start it again with its name, address and port."""
    outcome = _killed(scene)
    scene.target.worker.kill()  # returns when the process has ended, so that its port is free
    (again,) = scene.start(scene.target.name)
    lost = 0

    def moved() -> int:
        nonlocal lost
        scene.initiator.remove_remote_agent(again.name)
        memory = scene.allocate(again, MOVED)
        lost = scene.fetch(again)
        return scene.move(scene.initiator, again, memory)

    outcome = _survivor(outcome, scene, moved)
    return replace(outcome, lost_requests=lost)


def _notified_after_death(scene: FaultScene) -> FaultOutcome:
    scene.move(scene.initiator, scene.target)
    scene.target.worker.kill()
    usual, scene.initiator.worker.timeout = scene.initiator.worker.timeout, NOTIFIED
    began = time.monotonic()
    try:
        reports, survivor = _notify(scene)
    finally:
        scene.initiator.worker.timeout = usual
    outcome = replace(scene.outcome, answer=reports, survivor=survivor, seconds=time.monotonic() - began)
    return _survivor(outcome, scene, lambda: scene.move(scene.initiator, scene.third))


def _notify(scene: FaultScene) -> tuple[str, str]:
    """Send notifications to a dead target; return what NIXL answered, and how the initiator ended if it did."""
    for number in range(NOTIFICATIONS):
        try:
            scene.initiator.send_notif(scene.target.name, b"lost")
        except NixlError as error:
            return f"send_notif returned {number} times and then raised {error.type_name}", ""
        except WorkerError as error:
            return f"send_notif returned {number} times and then not", _ended(error)
    return f"send_notif returned {NOTIFICATIONS} times", ""


def _interrupt(scene: FaultScene, action: str, **arguments: Any) -> FaultOutcome:
    """Let the initiator do something to its own transfers in flight, and return what followed, without the bytes."""
    region = [scene.source.address, scene.source.size, 0]
    quiet = scene.initiator.worker.timeout / 2
    pending = scene.request("interrupt", action=action, regions=[region], quiet=quiet, **arguments)
    try:
        answer = pending.result()
    except WorkerDiedError as error:
        return replace(scene.outcome, answer=action, survivor=_ended(error))
    check(_INTERRUPTED, answer)
    if answer["act"] == NOT_CALLED:
        raise EarlyEndError(" ".join(answer["states"]), answer["seconds"])
    ends = ", ".join(f"{count} {state}" for state, count in sorted(answer["states"].items())) or "none is asked for"
    description = (
        f"{action} {answer['act']} with {answer['in_flight']} of {REGIONS} transfers in flight, which end as {ends}"
    )
    return replace(scene.outcome, answer=description, seconds=answer["seconds"])


def _interrupted(action: str) -> Callable[[FaultScene], FaultOutcome]:
    def fault(scene: FaultScene) -> FaultOutcome:
        arrives = scene.destination if scene.op == "WRITE" else scene.source
        seed = next(seeds)
        outcome = _interrupt(scene, action)
        if outcome.survivor:
            return outcome
        scene.mark(arrives, seed)
        outcome = _survivor(outcome, scene, lambda: scene.move(scene.initiator, scene.third))
        return outcome if outcome.survivor else replace(outcome, changed=scene.changed(arrives, seed))

    return fault


def _target_replaced(scene: FaultScene) -> FaultOutcome:
    (again,) = scene.start(scene.target.name)
    outcome = _interrupt(scene, "replace", metadata=again.get_agent_metadata())
    return _survivor(outcome, scene, lambda: scene.move(scene.initiator, again))


#: The faults by their id.
FAULTS: dict[str, Callable[[FaultScene], FaultOutcome]] = {
    "target-killed": lambda scene: _survivor(_killed(scene), scene, lambda: scene.move(scene.initiator, scene.third)),
    "initiator-killed": _initiator_killed,
    "target-paused": _target_paused,
    "target-stopped": lambda scene: lost_with(scene, lambda: scene.target.worker.signal(signal.SIGSTOP)),
    "target-restarted": _target_restarted,
    "listener-restarted": _listener_restarted,
    "target-replaced": _target_replaced,
    "initiator-paused": lambda scene: kept_while(scene, lambda: _pause(scene.initiator)),
    "target-unmapped": _target_unmapped,
    "notified-after-death": _notified_after_death,
    "target-removed": _interrupted("remove_remote_agent"),
    "transfer-released": _interrupted("release_xfer_handle"),
    "source-deregistered": _interrupted("deregister_memory"),
}

#: The faults of a target from whose listener the initiator fetches its metadata.
LISTENING = ("listener-restarted",)
#: The faults without transfers in flight, which are the same for WRITE and READ.
WITHOUT_TRANSFERS = ("notified-after-death",)


def make_fault(
    fault: str,
    agents: Agents,
    backend: str,
    op: str,
    environment: dict[str, str | None],
    hosts: Sequence[Host] = (),
) -> FaultOutcome:
    """Start agents with transfers in flight, make a fault, and return what followed.

    :param fault: one of :data:`FAULTS`.
    :param environment: variables of the workers, such as ``UCX_TLS``.
    :param hosts: the hosts of initiator and target; empty for this host. A target that listens is on this host.
    :raises WorkerError: the agents cannot be started.
    :raises LateError: no transfer was completed before the fault, or the metadata of a target that listens did not
        arrive.
    """
    port = 0
    if fault in LISTENING:
        (port,), hosts = free_ports(1), ()
    scene = FaultScene(agents, backend, op, environment, hosts, port)
    try:
        outcome = FAULTS[fault](scene)
    except EarlyEndError as error:
        outcome = replace(scene.outcome, answer=error.answer, seconds=error.seconds, early=True)
    return replace(outcome, fault=fault)


def environments(
    backend: str, environ: Mapping[str, str] = os.environ, root: str = "/", *, other_hosts: bool = False
) -> list[dict[str, str | None]]:
    """Return variables for workers, one set for each way in which a backend of this host is tried.

    :param environ: the environment of this process, which workers inherit.
    :param root: where /sys is.
    :param other_hosts: whether workers may be on other hosts, which may have GPUs.
    """
    tcp: dict[str, str | None] = {"UCX_TLS": TCP_ALONE[-1] if other_hosts else over_tcp(root)}
    if all(":" in device for device in environ.get("UCX_NET_DEVICES", "all").split(",")):
        tcp["UCX_NET_DEVICES"] = None  # it names ports of RDMA devices alone, and TCP would have none
    if backend != "UCX":
        return [{}]
    if wants_rdma(environ):
        return [{"UCX_TLS": environ["UCX_TLS"]}]  # a network is tried, which is what TCP is for
    return [tcp] if environ.get("UCX_TLS") in TCP_ALONE else [{}, tcp]


def _await_traffic(scene: FaultScene, pending: Pending, began: float) -> FaultOutcome:
    """Return what the traffic of the initiator ended with."""
    try:
        answer = pending.result()
        check(OUTCOME, answer)
    except WorkerDiedError as error:
        return replace(scene.outcome, answer="no answer", seconds=time.monotonic() - began, survivor=_ended(error))
    return replace(scene.outcome, answer=answer["said"], unended=answer["unended"], seconds=time.monotonic() - began)


def _survivor(outcome: FaultOutcome, scene: FaultScene, move: Callable[[], int]) -> FaultOutcome:
    """Add whether the survivor lives and moves bytes.

    :raises WorkerHungError: it does not answer; on a busy machine that proves nothing.
    """
    if outcome.survivor:
        return outcome
    try:
        return replace(outcome, wrong_bytes=move())
    except (WorkerDiedError, NixlError) as error:
        return replace(outcome, survivor=_ended(error))


def _ended(error: WorkerError) -> str:
    """Return how a worker ended, or what NIXL reported in it, without its name."""
    if isinstance(error, NixlError):
        return f"gets {error.type_name} from NIXL"
    return error.ending
