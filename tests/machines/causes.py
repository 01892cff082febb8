# SPDX-License-Identifier: Apache-2.0
"""Runs in a machine that has rxe0 over the interface v0: make faults one after another, and print what checks say.

``python causes.py NAME…`` prints a line for each fault: its name, a tab, and JSON of check to verdict, reason, remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.host import image
from pytest_nixl.host.facts import gather
from pytest_nixl.host.plugin_files import PluginsInAdvance
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile

ASKED = ("ucx-uses-rdma", "verbs-providers", "transports-allowed", "uverbs-open", "rdma-ports")
PROVIDER = Path("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so")
STATE = Path("/sys/class/infiniband/rxe0/ports/1/state")


def sh(command: str) -> None:
    """Run a command of the shell that has to succeed."""
    subprocess.run(command, shell=True, check=True)


def between(make: str, mend: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a fault that a command makes, and another one mends."""

    @contextlib.contextmanager
    def fault() -> Iterator[None]:
        sh(make)
        try:
            yield
        finally:
            sh(mend)

    return fault


@contextlib.contextmanager
def port_down() -> Iterator[None]:
    """Pull the cable: the interface's peer goes down, and the port follows."""
    sh("ip link set v0-peer down")
    while "ACTIVE" in STATE.read_text():
        time.sleep(0.1)
    try:
        yield
    finally:
        sh("ip link set v0-peer up")
        while "ACTIVE" not in STATE.read_text():
            time.sleep(0.1)


def variables(**values: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a fault of environment variables; an empty text unsets one."""

    @contextlib.contextmanager
    def fault() -> Iterator[None]:
        before = dict(os.environ)
        for name, value in values.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value else {})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    return fault


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "healthy": contextlib.nullcontext,
    "another copy": variables(LD_LIBRARY_PATH="", UCX_TLS="rc,ud"),
    "no provider": between(f"mv {PROVIDER} /tmp", f"mv /tmp/{PROVIDER.name} {PROVIDER}"),
    "provider of another interface": between(
        f"mv {PROVIDER} {PROVIDER.with_name('librxe-rdmav59.so')}",
        f"mv {PROVIDER.with_name('librxe-rdmav59.so')} {PROVIDER}",
    ),
    "no module": variables(UCX_MODULES="^ib"),
    "port down": port_down,
    "no address": between(
        "ip address flush dev v0", "ip address add 10.99.0.1/24 dev v0; ip link set v0 down; ip link set v0 up"
    ),
    "GID index": variables(UCX_IB_GID_INDEX="7"),
    "no nodes": between("mv /dev/infiniband /dev/elsewhere", "mv /dev/elsewhere /dev/infiniband"),
    "other device chosen": variables(UCX_NET_DEVICES="v0"),
    "as it is": contextlib.nullcontext,
}


@contextlib.contextmanager
def without_other_plugins() -> Iterator[None]:
    """Look at no plugin of NIXL but UCX's, which a worker loads: the others take half of the time here."""
    with (
        mock.patch.object(PluginsInAdvance, "start"),
        mock.patch.object(PluginsInAdvance, "load", return_value=[]),
        mock.patch.object(image, "_device_code", return_value=[]),
    ):
        yield


def main(names: list[str]) -> None:
    """Make each fault and print what the checks say."""
    requirements = Requirements(load_profile("loopback"), ("UCX",))
    for name in names:
        with FAULTS[name](), without_other_plugins():
            facts = gather(FactsRoot(), etcd="")
            results = {id: judge_by_id(id, facts, requirements) for id in ASKED}
        report = {id: [result.verdict.value, result.reason, result.remedy] for id, result in results.items()}
        print(f"{name}\t{json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
