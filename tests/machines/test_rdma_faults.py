# SPDX-License-Identifier: Apache-2.0
"""What NIXL's agents and our errors say of faults of RDMA, each made in a machine with soft-RoCE."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from machine import Machine

pytest_plugins = ["machine_fixtures"]
#: The commands in a machine have deadlines; the test's own is for what hangs outside of it.
pytestmark = pytest.mark.timeout(3600)

Verdicts = tuple[str, str]

#: Each fault of agents.py that an agent meets when it is created: what the error's reason and its remedy contain.
BEFORE = {
    # Files of the kernel do not show this one.
    "no provider": ("(NIXL_ERR_BACKEND) in rank 0 (agent worker, pid ", "its check ucx-uses-rdma names why UCX cannot"),
    "port down": ("NIXL_ERR_BACKEND: rxe0's port 1 is DOWN) in rank 0", "check the cable, the switch"),
    "no address": ("rxe0's port 1 has only a link-local GID", "give v0 an address (`ip address add"),
    "GID index": ("UCX_IB_GID_INDEX=7 names no GID of rxe0's port 1, which has 0, 1", "unset UCX_IB_GID_INDEX"),
    "no nodes": (
        "/dev/infiniband/uverbs0 of rxe0 cannot be opened: No such file",
        "--device=/dev/infiniband",
    ),
    "another device": (
        "UCX_NET_DEVICES=mlx5_0:1 names no RDMA device of this host, which has rxe0",
        "set it to rxe0:1",
    ),
    "another port": ("UCX_NET_DEVICES=rxe0:2 names no port of this host's RDMA devices", "set it to rxe0:1"),
}

#: A user without capabilities, who may lock 64 KiB, as in a container.
ORDINARY = (
    "let_all_users_in; export HOME=/tmp; setpriv --reuid=65534 --regid=65534 --clear-groups prlimit --memlock={limit}"
)


def doctor(machine: Machine, names: str, before: str = "") -> dict[str, Verdicts]:
    """Make faults of agents.py in a machine, over rc, and return what was said of each."""
    output = machine.check(
        f'cd "$PROJECT" && {before} "$PYTHON" tests/machines/agents.py {names} 2> /out/agents.log || '
        "{ tail -n 20 /out/agents.log; exit 1; }",
        UCX_TLS="rc,self", UCX_NET_DEVICES="rxe0:1",
    )  # fmt: skip
    print(output)
    return {name: json.loads(document) for name, _, document in (line.partition("\t") for line in output.splitlines())}


@pytest.fixture(scope="module")
def verdicts(rxe_machine: Machine) -> dict[str, Verdicts]:
    """What agents say of each fault that they meet when they are created, and of none."""
    return doctor(rxe_machine, "")


def test_agent_is_created_without_a_fault(verdicts: dict[str, Verdicts]) -> None:
    assert verdicts["healthy"][0] == ""


@pytest.mark.parametrize("fault", BEFORE)
def test_fault_of_a_device_is_named(verdicts: dict[str, Verdicts], fault: str) -> None:
    reason, remedy = verdicts[fault]
    assert BEFORE[fault][0] in reason
    assert BEFORE[fault][1] in remedy


def test_device_nodes_that_a_user_may_not_open_are_named(rxe_machine: Machine) -> None:
    rxe_machine.check("chmod 600 /dev/infiniband/uverbs0")
    try:
        reason, remedy = doctor(rxe_machine, "'as it is'", ORDINARY.format(limit="unlimited"))["as it is"]
    finally:
        rxe_machine.check("chmod 666 /dev/infiniband/uverbs0")
    assert "/dev/infiniband/uverbs0 of rxe0 cannot be opened: Permission denied" in reason
    assert "check their permissions" in remedy


def test_agent_that_would_never_be_created_for_want_of_locked_memory_is_named(rxe_machine: Machine) -> None:
    results = doctor(rxe_machine, "'as it is'", ORDINARY.format(limit="65536:65536"))
    reason, remedy = results["as it is"]
    assert "would never end 'create_agent', and was ended: UCX has tried" in reason
    assert "a process may lock 64 kbytes" in reason
    assert "ulimit -l unlimited" in remedy


def use_release(version: str) -> str:
    """Return commands of bash after which a machine uses another release of NIXL; skip if there is none."""
    folder = os.environ.get("PYTEST_NIXL_RELEASES")
    if folder is None:
        pytest.skip("PYTEST_NIXL_RELEASES names no folder with other releases: run tox -e soak")
    release = Path(folder).resolve() / version
    (verbs,) = release.glob("nixl_cu12.libs/libibverbs-*")
    return (
        f"mkdir -p /opt/{version} && ln -sf {verbs} /opt/{version}/libibverbs.so.1 && "
        f"export LD_LIBRARY_PATH=/opt/{version}:${{LD_LIBRARY_PATH#*:}} PYTHONPATH={release}:/opt/torch && "
        '"$PYTHON" tests/helpers/torch_for_nixl.py --stand-in /opt/torch'
    )


@pytest.mark.soak
@pytest.mark.parametrize("release", ["1.0.1", "1.4.1", "installed"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("target-killed", "nixlRemoteDisconnectError"),
        ("target-restarted", "nixlRemoteDisconnectError"),
        ("target-stopped", "PROC"),
        ("target-paused", "DONE"),
    ],
)
def test_initiator_is_told_of_a_dead_peer_and_not_of_one_that_is_stopped(
    rxe_machine: Machine, fault: str, expected: str, release: str
) -> None:
    before = ":" if release == "installed" else use_release(release)
    output = rxe_machine.check(
        f'cd "$PROJECT" && {before} && "$PYTHON" tests/machines/in_flight.py {fault}/WRITE 2> /out/in_flight.log',
        UCX_TLS="rc,self", UCX_NET_DEVICES="rxe0:1",
    )  # fmt: skip
    print(output)
    record = json.loads(output)
    assert release in (record["nixl"], "installed")
    ended = record["found"]
    assert ended["said"] == expected
    # The survivor then moved correct bytes to another agent.
    assert ("survivor" in ended, ended["wrong_bytes"]) == (False, 0)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["rc", "ud"])
def test_memory_that_was_freed_and_registered_again_is_refused_by_an_agent_that_knows_it(
    rxe_machine: Machine, transport: str
) -> None:
    run = '"$PYTHON" tests/machines/registered_again.py'
    output = rxe_machine.check(
        f'cd "$PROJECT" && {{ {run}; {run} unmapped; {run} unmapped removed; }} 2> /out/registered_again.log',
        UCX_TLS=f"{transport},self", UCX_NET_DEVICES="rxe0:1",
    )  # fmt: skip
    # NIXL's own lines have a time before them.
    errors = [line for line in output.splitlines() if line.isalpha()]
    assert errors == ["loaded", "nixlNotAllowedError", "nixlInvalidParamError", "loaded"]
