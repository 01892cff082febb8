# SPDX-License-Identifier: Apache-2.0
"""Machines for tests: one that all test files share, with a soft-RoCE device, and others of a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import PROJECT, PYTHON, Machine, MakeMachine, prepared


def environment(base: Path) -> dict[str, str]:
    """Return the variables that commands in a machine need."""
    (wheel,) = Path(PYTHON).parent.parent.glob("lib/python3*/site-packages/nixl_cu12.libs/libibverbs-*")
    return {
        "BASE": str(base), "PROJECT": str(PROJECT), "PYTHON": PYTHON, "WHEEL_VERBS": str(wheel),
        "PATH": f"{Path(PYTHON).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }  # fmt: skip


@pytest.fixture(scope="module")
def make_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeMachine]:
    """Start machines, which end with the file; the keywords are those of :class:`Machine`."""
    base, machines = prepared(), []

    def make(name: str = "guest", **keywords: object) -> Machine:
        out = tmp_path_factory.mktemp(name)
        machine = Machine(base, out, name=name, **keywords)  # type: ignore[arg-type]
        machines.append(machine)
        machine.set_environment(environment(base))
        return machine

    try:
        yield make
    finally:
        for machine in machines:
            machine.power_off()


@pytest.fixture(scope="session")
def rxe_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the RDMA device rxe0 over the interface v0, and one copy of libibverbs for NIXL's wheel.

    All files share it, because a boot takes as long as some of their tests: a test mends what it has broken.
    """
    base = prepared()
    machine = Machine(base, tmp_path_factory.mktemp("rxe"), name="rxe", processors=1)
    try:
        machine.set_environment(environment(base))
        machine.booted().check("install_rdma && add_rxe rxe0 10.99.0.1 v0 && one_libibverbs")
        yield machine
    finally:
        machine.power_off()
