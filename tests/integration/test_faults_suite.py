# SPDX-License-Identifier: Apache-2.0
"""The suite ``faults`` with the real NIXL and UCX: as it is, and with a NIXL that has other defects or none."""

from __future__ import annotations

import re

import pytest
from helpers.cli_run import Finished, in_workers, run

pytestmark = pytest.mark.long

MISUSE = "suites/faults/test_misuse.py"


def replaced(
    *functions: tuple[str, dict[str, str]],
    suite: tuple[str, ...] = (MISUSE, "--nixl-level=extended"),
    fault: str = "",
    **variables: str,
) -> Finished:
    """Run checks with some calls of NIXL replaced, and with variables of their environment."""
    calls = [(f"helpers.misuse_functions:{function}", given) for function, given in functions]
    return run(*suite, fault=in_workers(*calls) + fault, env=variables)


@pytest.mark.whole
def test_the_whole_suite_ends_in_findings_and_no_failure() -> None:
    done = run("suites/faults", "--nixl-level=extended", timeout=1500)
    done.expect(0, never=["SIGSEGV"])
    assert re.search(r"[3-8] known limits of NIXL", done.output), done.output  # some depend on timing


@pytest.mark.parametrize(
    ("op", "code", "line"),
    [
        ("READ", 0, "1 known limit of NIXL "),
        (
            "WRITE",
            1,
            "FAIL transfer-initiator-killed: initiator-killed (WRITE, UCX of NIXL "
            "... the surviving agent was ended by SIGABRT",
        ),
    ],
)
def test_a_target_that_aborts_after_a_read_is_a_known_limit_and_after_a_write_a_failure(
    op: str, code: int, line: str
) -> None:
    suite = ("suites/faults/test_transfers.py", "-k", "death_of_its_initiator", "--nixl-level=extended")
    # Over one transport: tests/unit/checks/test_transfer_faults.py has those that are tried.
    replaced(("abort_in_fill", {}), suite=(*suite, f"--nixl-op={op}"), UCX_TLS="tcp").expect(code, line)


def test_a_nixl_without_the_defects_has_no_known_limits() -> None:
    names = ("refuse_deregistered_source", "refuse_duplicates", "refuse_released_handles", "refuse_cut_metadata")
    done = replaced(*((name, {}) for name in names))
    done.expect(0, "(6 PASS; 0 rows measured)", never=["known limit"])


#: In pytest: of what NIXL survives, one misuse that crashes here and one that does not. The test above has all of them.
TWO_MISUSES = """
def pytest_collection_finish():
    from suites.faults import test_misuse
    named = ("deregistered-twice", "notification-to-unknown-agent")
    test_misuse.SURVIVED = tuple(kind for kind in test_misuse.SURVIVED if kind.id in named)
"""


def test_new_crashes_fail_and_name_the_misuse() -> None:
    suite = (MISUSE, "-k", "every_other", "--nixl-level=extended")
    replaced(("crash", {"method": "send_notif"}), suite=suite, fault=TWO_MISUSES).expect(
        1,
        "FAIL misuse-survived: NIXL ... a notification is sent to an unknown agent: crashed (was ended by SIGSEGV)",
    )
