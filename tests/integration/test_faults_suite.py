# SPDX-License-Identifier: Apache-2.0
"""The suite ``faults`` with the real NIXL and UCX: as it is, and with a NIXL that has other defects or none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, Finished, run

pytestmark = pytest.mark.long

MISUSE = "suites/faults/test_misuse.py"
#: Calls a function in each worker after its agent is made, to replace a call of NIXL.
REPLACE = """
from pytest_nixl.nixl.agent import NixlAgent

make = NixlAgent.within_each.__func__
def replaced(cls, *arguments, **named):
    agents = make(cls, *arguments, **named)
    for agent in agents:
        for function, given in {functions!r}:
            agent.run("helpers.misuse_functions:" + function, **given)
    return agents
NixlAgent.within_each = classmethod(replaced)
"""


def replaced(
    tmp_path: Path,
    *functions: tuple[str, dict[str, str]],
    suite: tuple[str, ...] = (MISUSE, "--nixl-level=extended"),
    **variables: str,
) -> Finished:
    """Run checks with some calls of NIXL replaced, and with variables of their environment."""
    (tmp_path / "replace.py").write_text(REPLACE.format(functions=functions))
    path = f"{tmp_path}:{ROOT / 'tests'}"
    return run(*suite, "-p", "replace", env={"PYTHONPATH": path, **variables})


@pytest.mark.whole
def test_the_whole_suite_ends_in_findings_and_no_failure() -> None:
    done = run("suites/faults", "--nixl-level=extended", timeout=1500)
    assert done.code == 0, done.output
    assert re.search(r"[3-8] known limits of NIXL", done.output), done.output  # some depend on timing
    assert "SIGSEGV" not in done.output


def test_a_nixl_that_does_not_tell_of_a_death_fails(tmp_path: Path) -> None:
    suite = ("suites/faults/test_transfers.py", "-k", "target_died", "--nixl-op=WRITE", "--nixl-timeout=20s")
    done = replaced(tmp_path, ("never_fail", {}), suite=suite)
    assert done.code == 1
    assert "FAIL transfer-target-killed: target-killed (WRITE, UCX of NIXL " in done.output
    # Half of the deadline passes without a change, and a busy machine adds to it.
    assert re.search(r"NIXL did not tell the initiator of the target's death in [1-9]\d", done.output), done.output


@pytest.mark.parametrize(
    ("op", "code", "message"),
    [
        ("READ", 0, "1 known limit of NIXL "),
        ("WRITE", 1, "FAIL transfer-initiator-killed: initiator-killed (WRITE, UCX of NIXL "),
    ],
)
def test_a_target_that_aborts_after_a_read_is_a_known_limit_and_after_a_write_a_failure(
    op: str, code: int, message: str, tmp_path: Path
) -> None:
    suite = ("suites/faults/test_transfers.py", "-k", "death_of_its_initiator", "--nixl-level=extended",
             f"--nixl-op={op}")  # fmt: skip
    # Over one transport: tests/unit/checks/test_transfer_faults.py has those that are tried.
    # A run without a known limit does not count one.
    done = replaced(tmp_path, ("abort_in_fill", {}), suite=suite, UCX_TLS="tcp")
    assert done.code == code, done.output
    assert message in done.output
    assert ("the surviving agent was ended by SIGABRT" in done.output) is (op == "WRITE"), done.output


def test_a_nixl_without_the_defects_has_no_known_limits(tmp_path: Path) -> None:
    names = ("refuse_deregistered_source", "refuse_duplicates", "refuse_released_handles", "refuse_cut_metadata")
    done = replaced(tmp_path, *((name, {}) for name in names))
    assert done.code == 0, done.output
    assert "known limit" not in done.output
    assert "(6 PASS; 0 rows measured)" in done.output


#: In pytest: of what NIXL survives, one misuse that crashes here and one that does not. The test above has all of them.
TWO_MISUSES = """
def pytest_collection_finish():
    from suites.faults import test_misuse
    named = ("deregistered-twice", "notification-to-unknown-agent")
    test_misuse.SURVIVED = tuple(kind for kind in test_misuse.SURVIVED if kind.id in named)
"""


def test_new_crashes_fail_and_name_the_misuse(tmp_path: Path) -> None:
    (tmp_path / "two_misuses.py").write_text(TWO_MISUSES)
    suite = (MISUSE, "-k", "every_other", "--nixl-level=extended", "-p", "two_misuses")
    done = replaced(tmp_path, ("crash", {"method": "send_notif"}), suite=suite)
    assert done.code == 1
    assert "FAIL misuse-survived: NIXL " in done.output
    assert "a notification is sent to an unknown agent: crashed (was ended by SIGSEGV)" in done.output
