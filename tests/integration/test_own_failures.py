# SPDX-License-Identifier: Apache-2.0
"""What a user reads if a test of theirs fails in NIXL, in a worker, or by a wrong option."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.worker_errors import NixlError

TESTS = """
import pytest


def connect(agent):
    return agent.add_remote_agent(b"no metadata")


def test_nixl(nixl_agent):
    connect(nixl_agent.another("far"))


@pytest.mark.nixl_check("mine")
def test_worker(nixl_agent):
    nixl_agent.worker.signal(9)
    nixl_agent.get_agent_metadata()


def test_option(nixl_agent):
    nixl_agent.another(nome="far")
"""


@pytest.mark.parametrize("style", ["auto", "line"])
def test_a_failure_shows_the_line_of_the_test_the_method_and_the_agent(pytester: pytest.Pytester, style: str) -> None:
    pytester.makepyfile(TESTS)
    # As in a user's project, whose tests may run in parallel.
    parallel = ("-n", "2") if style == "auto" else ()
    result = run_pytest(pytester, f"--tb={style}", "--nixl-backend=UCX", *parallel)
    result.assert_outcomes(failed=3)
    lines = {"connect": 5, "test_nixl": 9, "test_worker": 15, "test_option": 19}
    text = result.stdout.str()
    for name in () if style == "line" else lines:
        assert f".py:{lines[name]}: " in text, name
    result.stdout.fnmatch_lines_random(
        [
            "*NIXL reported nixlMismatchError (NIXL_ERR_MISMATCH) in rank 0 (agent worker, pid *) during "
            "'add_remote_agent' of agent 'far'*",
            "*rank 0 (agent worker, pid *) was ended by SIGKILL during 'get_agent_metadata' of agent 'rank0-agent-*'*",
            "*TypeError: another() has no option 'nome'; it has name, agent_options, backends, *",
        ]
    )
    if style == "line":
        result.stdout.fnmatch_lines_random(["*test_*.py:5: NIXL reported *", "*test_*.py:15: rank 0 *"])
    assert "worker_process.py" not in text, "a line of the plugin is not the one to mend"


def test_an_unknown_option_blames_the_call_that_has_it(agents: Agents) -> None:
    agent = agents.start("near")
    # With mypy's warn_unused_ignores these two comments test that type checkers see the wrong option.
    with pytest.raises(TypeError, match=r"^another\(\) has no option 'nome'; it has name, agent_options, backends, "):
        agent.another(nome="far")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^beside\(\) has no option 'host'; it has name, agent_options, backends, "):
        agent.beside(host=None)  # type: ignore[call-arg]


def test_a_restarted_agent_that_is_still_known_under_its_name_is_explained(agents: Agents) -> None:
    near, far = agents.start("near"), agents.start("far")
    near.add_remote_agent(far.get_agent_metadata())
    far.worker.kill()
    metadata = agents.start("far").get_agent_metadata()
    with pytest.raises(NixlError, match="nixlNotAllowedError") as caught:
        near.add_remote_agent(metadata)
    assert "this agent still knows an earlier agent of that name, such as one that was restarted" in caught.value.remedy
    assert "call `remove_remote_agent` first" in caught.value.remedy
    near.remove_remote_agent("far")
    assert near.add_remote_agent(metadata) == "far"
