# SPDX-License-Identifier: Apache-2.0
"""A failed test of a user ends with its agents, and with the last lines of their workers."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

TESTS = """
import os
import pytest
from pytest_nixl import WorkerError, wait_until

def speak(agent):
    os.write(2, b"something went wrong in here\\n")

def test_assert(nixl_agent):
    other = nixl_agent.another("other")
    other.run(f"{__name__}:speak")
    assert other.check_remote_metadata("nobody"), "the agent is not known"

def test_wait(nixl_agent):
    nixl_agent.run(f"{__name__}:speak")
    wait_until(lambda: nixl_agent.check_remote_metadata("nobody"), "an agent", seconds=0.1)

def test_link(nixl_link):
    nixl_link.target.run(f"{__name__}:speak")
    assert nixl_link.move(4096) is not None

def test_worker(nixl_agent):
    nixl_agent.worker.kill()
    nixl_agent.get_plugin_list()

def test_passes(nixl_agent):
    nixl_agent.run(f"{__name__}:speak")
"""
SECTION = "*NIXL agents, and the last lines of their workers*"
SPOKEN = "  | something went wrong in here"


@pytest.mark.parametrize(
    ("test", "lines"),
    [
        ("assert", ["*the agent is not known*", SECTION, "'rank0-agent-*' in rank 0 (agent worker, pid *): *",
                    "'other' in rank 0 (agent worker, pid *): ", SPOKEN]),
        ("wait", ["*waited 0.1 s for an agent*", SECTION, "'rank0-agent-*' in rank 0 (agent worker, pid *): ", SPOKEN]),
        ("link", [SECTION, "'rank0-initiator-*' in rank 0 (initiator worker, pid *): *",
                  "'rank1-target-*' in rank 1 (target worker, pid *): ", SPOKEN]),
    ],
)  # fmt: skip
def test_a_failed_test_ends_with_its_agents(pytester: pytest.Pytester, test: str, lines: list[str]) -> None:
    pytester.makepyfile(test_mine=TESTS)
    result = run_pytest(pytester, "-k", test, "--nixl-backend=UCX", "--nixl-op=WRITE")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(lines)


@pytest.mark.parametrize("test", ["worker", "passes"])
def test_a_test_whose_error_names_the_worker_or_that_passes_shows_no_more(pytester: pytest.Pytester, test: str) -> None:
    pytester.makepyfile(test_mine=TESTS)
    result = run_pytest(pytester, "-k", test, "--nixl-backend=UCX")
    result.stdout.no_fnmatch_line(SECTION)
