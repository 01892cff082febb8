# SPDX-License-Identifier: Apache-2.0
"""The doctor names why UCX cannot use an RDMA device: each cause is made in a machine with soft-RoCE."""

from __future__ import annotations

import json
import shlex

import pytest
from machine import Machine

pytest_plugins = ["machine_fixtures"]
#: The commands in a machine have deadlines; the test's own is for what hangs outside of it.
pytestmark = pytest.mark.timeout(3600)

Verdicts = dict[str, tuple[str, str, str]]

#: Each fault of causes.py: the verdict of ucx-uses-rdma, and what its reason contains.
CAUSES = {
    "healthy": ("PASS", "UCX can use 1 RDMA device: rxe0 (rc_verbs, ud_verbs)"),
    "another copy": ("FAIL", "librxe-rdmav34.so registers in /lib/x86_64-linux-gnu/libibverbs.so.1, another copy than"),
    "no provider": ("FAIL", "rxe0: no provider of libibverbs is installed for it"),
    "provider of another interface": ("FAIL", "needs a provider of interface 34, and the installed one is"),
    "no module": ("FAIL", "UCX_MODULES=^ib keeps UCX from loading its RDMA module"),
    "no address": ("FAIL", "because v0 has no address; UCX says: Address not valid"),
}
#: The same of faults that only variables and the kernel's files show: tests/unit/checks/test_doctor.py has them in
#: recorded trees, and test_rdma_faults.py reads such files in a machine.
SHOWN_BY_FILES = {
    "port down": ("FAIL", "rxe0: its port is DOWN"),
    "GID index": ("FAIL", "UCX_IB_GID_INDEX=7 names no GID of it: it has 0, 1"),
    "no nodes": ("FAIL", "/dev/infiniband/uverbs0 cannot be opened: No such file or directory"),
    "other device chosen": ("WARN", "UCX_NET_DEVICES=v0 leaves out every RDMA device: rxe0"),
}


def verdicts(machine: Machine, arguments: str, before: str = "") -> dict[str, Verdicts]:
    """Make the faults of causes.py in a machine, and return what each check said."""
    output = machine.check(
        f'cd "$PROJECT" && {before} "$PYTHON" tests/machines/causes.py {arguments} 2> /out/causes.log'
    )
    return {name: json.loads(document) for name, _, document in (line.partition("\t") for line in output.splitlines())}


@pytest.fixture(scope="module")
def verdicts_by_cause(rxe_machine: Machine) -> dict[str, Verdicts]:
    """What the checks say of each cause."""
    return verdicts(rxe_machine, shlex.join(CAUSES))


@pytest.fixture(scope="module")
def made_of_files(rxe_machine: Machine) -> dict[str, Verdicts]:
    """What the checks say of each fault that files show."""
    return verdicts(rxe_machine, shlex.join(SHOWN_BY_FILES))


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_is_named(verdicts_by_cause: dict[str, Verdicts], cause: str) -> None:
    assert_named(verdicts_by_cause[cause], *CAUSES[cause])


@pytest.mark.soak
@pytest.mark.parametrize("cause", SHOWN_BY_FILES)
def test_cause_that_files_show_is_named(made_of_files: dict[str, Verdicts], cause: str) -> None:
    assert_named(made_of_files[cause], *SHOWN_BY_FILES[cause])


def assert_named(reported: Verdicts, verdict: str, message: str) -> None:
    """Assert that ucx-uses-rdma has this verdict with these words, and a remedy unless it passes."""
    actual, reason, remedy = reported["ucx-uses-rdma"]
    assert (actual, message in reason) == (verdict, True), reason
    assert bool(remedy) == (verdict != "PASS")


def test_providers_are_judged_for_soft_roce_too(verdicts_by_cause: dict[str, Verdicts]) -> None:
    assert verdicts_by_cause["healthy"]["verbs-providers"][0] == "PASS"
    for cause, expected in (
        ("another copy", "needs librxe-rdmav34.so linked to it"),
        ("no provider", "the rxe providers are: none"),
        ("provider of another interface", "the rxe providers are: "),
    ):
        verdict, reason, _ = verdicts_by_cause[cause]["verbs-providers"]
        assert (verdict, expected in reason) == ("FAIL", True), reason


def test_transports_of_devices_that_ucx_does_not_use_are_not_said_to_have_no_device(
    verdicts_by_cause: dict[str, Verdicts],
) -> None:
    # The host has a device with an active port, whose node can be opened.
    assert {verdicts_by_cause["another copy"][id][0] for id in ("uverbs-open", "rdma-ports")} == {"PASS"}
    verdict, reason, _ = verdicts_by_cause["another copy"]["transports-allowed"]
    assert verdict == "FAIL"
    assert "UCX uses none of this host's RDMA devices (rxe0), and ucx-uses-rdma says why" in reason
    assert "no device for" not in reason


@pytest.mark.soak
def test_limit_of_locked_memory_is_named(rxe_machine: Machine) -> None:
    # As in a container without IPC_LOCK, whose limit is 64 KiB.
    results = verdicts(
        rxe_machine, "'as it is'", "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock prlimit --memlock=65536:65536"
    )
    verdict, reason, remedy = results["as it is"]["ucx-uses-rdma"]
    assert verdict == "FAIL"
    assert "1 MiB of memory cannot be registered with it: Cannot allocate memory (a process may lock 64 KiB)" in reason
    assert "ulimit -l unlimited" in remedy


@pytest.mark.soak
def test_other_network_namespace_is_named(rxe_machine: Machine) -> None:
    results = verdicts(rxe_machine, "'as it is'", "ip netns add other && ip netns exec other")
    verdict, reason, _ = results["as it is"]["ucx-uses-rdma"]
    assert verdict == "FAIL"
    assert "its network interface v0 is in another network namespace" in reason
