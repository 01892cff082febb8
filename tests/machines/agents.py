# SPDX-License-Identifier: Apache-2.0
"""Runs in a machine that has rxe0 over v0: make faults, and print what NIXL's agents and our errors say of each.

``python agents.py NAME…`` prints a line for each fault: its name, a tab, and JSON of what was said, a remedy, and the
number of wrong bytes of a transfer (-1: there was none).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from causes import FAULTS, sh, variables

from pytest_nixl.checks.faults.outcome import FaultOutcome
from pytest_nixl.checks.faults.scene import FaultScene
from pytest_nixl.checks.faults.transfers import FAULTS as IN_FLIGHT
from pytest_nixl.checks.faults.transfers import lost_with
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: A machine without KVM on a busy host is slow: a step may take minutes.
SETTINGS = replace(
    Settings(**{item.field: item.usual for item in OPTIONS}), backend=("UCX",), timeout=240.0, start_timeout=600.0
)
Said = tuple[str, str, int]

#: Faults that an agent meets when it is created: those of the doctor's, and more.
BEFORE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **{name: FAULTS[name] for name in ("healthy", "no provider", "port down", "no address", "GID index", "no nodes")},
    "another device": variables(UCX_NET_DEVICES="mlx5_0:1"),
    "another port": variables(UCX_NET_DEVICES="rxe0:2"),
    "as it is": contextlib.nullcontext,
}


def _down(scene: FaultScene) -> FaultOutcome:
    """Pull the cable of rxe0 during transfers."""
    return lost_with(scene, lambda: sh("ip link set v0-peer down"))


def _known(scene: FaultScene) -> FaultOutcome:
    """Kill the target, start one of its name, and add it while the initiator still knows the old one."""
    scene.move(scene.initiator, scene.target)
    scene.target.worker.kill()
    (again,) = scene.start(scene.target.name)
    began = time.monotonic()
    wrong, said = None, "added"
    try:
        wrong = scene.move(scene.initiator, again)
    except NixlPluginError as error:
        said = error.reason
    alive = "" if scene.initiator.worker.alive else "has ended"
    return replace(scene.outcome, said=said, seconds=time.monotonic() - began, survivor=alive, wrong_bytes=wrong)


#: Faults during transfers, each with WRITE.
DURING: dict[str, Callable[[FaultScene], FaultOutcome]] = {
    "port down in flight": _down,
    "old agent still known": _known,
    **{name: IN_FLIGHT[name] for name in ("target-killed", "target-stopped", "target-restarted", "initiator-killed")},
}


def create() -> Said:
    """Create an agent, in which NIXL opens the devices; return why it cannot, or two empty texts."""
    with Agents(LocalHost(supervisor()), SETTINGS) as agents:
        try:
            agents.start(environment=ucx())
        except NixlPluginError as error:
            return error.reason, error.remedy, -1
        return "", "", -1


def disturb(fault: Callable[[FaultScene], FaultOutcome]) -> Said:
    """Make a fault during transfers, and return the outcome in words."""
    with Agents(LocalHost(supervisor()), SETTINGS) as agents:
        found = fault(FaultScene(agents, "UCX", "WRITE", ucx()))
        told = "; ".join([str(found), *found.defects])
        return told, "", -1 if found.wrong_bytes is None else found.wrong_bytes


def ucx() -> dict[str, str | None]:
    """Return the variables of UCX for workers."""
    return {name: value for name, value in os.environ.items() if name.startswith("UCX_")}


def main(names: list[str]) -> None:
    """Make each fault and print what was said."""
    for name in names:
        if name in BEFORE:
            with BEFORE[name]():
                told = create()
        else:
            try:
                told = disturb(DURING[name])
            finally:
                sh("ip link set v0-peer up")
        print(f"{name}\t{json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in BEFORE if name != "as it is"])
