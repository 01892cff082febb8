# SPDX-License-Identifier: Apache-2.0
"""A failed test of a user ends with its agents, and with the last lines of their workers."""

from __future__ import annotations

import re

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


#: The lines at the end of each test that fails, or None.
ENDS = {
    "test_assert": ["*the agent is not known*", SECTION, "'rank0-agent-*' in rank 0 (agent worker, pid *): *",
                    "'other' in rank 0 (agent worker, pid *): ", SPOKEN],
    "test_wait": ["*waited 0.1 s for an agent*", SECTION, "'rank0-agent-*' in rank 0 (agent worker, pid *): ", SPOKEN],
    "test_link": [SECTION, "'rank0-initiator-*' in rank 0 (initiator worker, pid *): *",
                  "'rank1-target-*' in rank 1 (target worker, pid *): ", SPOKEN],
    "test_worker": None,  # its error names the worker
}  # fmt: skip


def test_a_failed_test_ends_with_its_agents_unless_its_error_names_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=TESTS)
    result = run_pytest(pytester, "--nixl-backend=UCX", "--nixl-op=WRITE")
    result.assert_outcomes(failed=4, passed=1)
    text = result.stdout.str().partition("= FAILURES =")[2].partition("short test summary")[0]
    titles = re.split(r"^_+ (test_\w+)\S* _+$", text, flags=re.MULTILINE)
    ended = dict(zip(titles[1::2], titles[2::2], strict=True))
    assert ended.keys() == ENDS.keys(), result.stdout.str()
    for test, lines in ENDS.items():
        matcher = pytest.LineMatcher(ended[test].splitlines())
        if lines is None:
            matcher.no_fnmatch_line(SECTION)
        else:
            matcher.fnmatch_lines(lines)
