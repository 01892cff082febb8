# SPDX-License-Identifier: Apache-2.0
"""Runs in a machine that has rxe0 over v0: make faults, and print what the creation of an agent says of each.

``python agents.py NAME…`` prints a line for each fault: its name, a tab, and JSON of what was said, and a remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from causes import FAULTS, variables

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: A machine without KVM on a busy host is slow: a step may take minutes.
SETTINGS = replace(
    Settings(**{item.field: item.usual for item in OPTIONS}), backend=("UCX",), timeout=240.0, start_timeout=600.0
)
Answer = tuple[str, str]

#: Faults that an agent meets when it is created: those of the doctor's, and more.
BEFORE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **{name: FAULTS[name] for name in ("healthy", "no provider", "port down", "no address", "GID index", "no nodes")},
    "another device": variables(UCX_NET_DEVICES="mlx5_0:1"),
    "another port": variables(UCX_NET_DEVICES="rxe0:2"),
    "as it is": contextlib.nullcontext,
}


def create() -> Answer:
    """Create an agent, in which NIXL opens the devices; return why it cannot, or two empty texts."""
    with Agents(LocalHost(supervisor()), SETTINGS) as agents:
        try:
            agents.start(environment=ucx())
        except NixlPluginError as error:
            return error.reason, error.remedy
        return "", ""


def ucx() -> dict[str, str | None]:
    """Return the variables of UCX for workers."""
    return {name: value for name, value in os.environ.items() if name.startswith("UCX_")}


def main(names: list[str]) -> None:
    """Make each fault and print what was said."""
    for name in names:
        with BEFORE[name]():
            report = create()
        print(f"{name}\t{json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in BEFORE if name != "as it is"])
