# SPDX-License-Identifier: Apache-2.0
"""If a worker crashes, aborts, hangs or refuses a command, pytest survives and reports it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerDiedError, WorkerError, WorkerHungError

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def survivor(make_settings: Callable[..., Settings]) -> Iterator[NixlAgent]:
    """An agent for the tests after which its worker still serves; they share it."""
    with Agents(LocalHost(supervisor()), make_settings(timeout=60.0)) as started:
        yield started.start("alpha", progress_thread=False)  # it would use most of a core


def test_pytest_process_does_not_load_nixl(survivor: NixlAgent) -> None:
    assert survivor.get_plugin_list()
    assert not [name for name in sys.modules if name == "nixl" or name.startswith("nixl_cu")]
    assert "libucp" not in Path("/proc/self/maps").read_text()


def test_function_runs_with_the_raw_agent(survivor: NixlAgent) -> None:
    answer = survivor.run("helpers.agent_functions:describe", word="hello")
    assert answer == {"name": "alpha", "word": "hello", "pid": survivor.worker.pid, "type": "nixl_agent"}
    assert answer["pid"] != os.getpid()
    assert survivor.worker.versions["ucx"].count(".") == 2
    assert survivor.run("helpers.agent_functions:give_bytes") == b"\x00\xff"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("helpers.agent_functions:raise_error", "ValueError in {name} during 'run': the user's own"),
        ("no_such_module:f", "ModuleNotFoundError in {name} during 'run': No module named 'no_such_module'"),
        ("helpers.agent_functions:give_object", "a value of type object cannot be sent"),
    ],
)
def test_function_that_fails_is_an_error_and_the_worker_survives(
    survivor: NixlAgent, function: str, message: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        survivor.run(function)
    assert message.format(name=survivor.worker.name) in caught.value.reason
    assert "NIXL" not in f"{caught.value.reason} {caught.value.remedy}", "NIXL is not at fault"
    assert survivor.run("helpers.agent_functions:give_bytes") == b"\x00\xff"


@pytest.mark.parametrize(
    ("function", "arguments", "how", "line"),
    [
        ("crash", {}, "was ended by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("ucx_fatal", {}, "was ended by SIGABRT during 'run'", "a fatal error made by a test"),
        ("leave", {"code": 3}, "ended with exit code 3", "it wrote nothing to stderr"),
    ],
)
def test_worker_that_dies_is_named_with_its_last_lines(
    agents: Agents, function: str, arguments: dict[str, object], how: str, line: str
) -> None:
    agent = agents.start()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        agent.run(f"helpers.agent_functions:{function}", **arguments)
    assert time.monotonic() - started < agent.worker.timeout
    for value in (f"rank 0 (agent worker, pid {agent.worker.pid})", how, "'run'"):
        assert value in caught.value.reason
    assert line in caught.value.detail
    assert not agent.worker.alive


@pytest.mark.long
def test_worker_that_hangs_is_ended_at_its_deadline_with_its_stack(agents: Agents) -> None:
    agent = agents.start()
    agent.run("helpers.agent_functions:give_bytes")  # imports the module, so that the next function hangs at once
    agent.worker.timeout = 2.0
    with pytest.raises(WorkerHungError) as caught:
        agent.run("helpers.agent_functions:hang")
    for value in ("sleeping", "'run'", "2 s"):
        assert value in caught.value.reason
    assert "in hang" in caught.value.detail.removeprefix("its last lines:\n") != caught.value.detail
    assert not agent.worker.alive


def test_a_module_on_pythonpath_comes_before_one_beside_the_package(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for any program: an installed package stands beside the NIXL of site-packages."""
    (tmp_path / "suites.py").write_text("def place(agent):\n    return __file__\n")
    monkeypatch.delitem(sys.modules, "suites", raising=False)  # a worker takes the file that pytest has
    agent = agents.start(environment={"PYTHONPATH": str(tmp_path)})
    assert agent.run("suites:place") == str(tmp_path / "suites.py")


def test_worker_that_ends_during_its_start_is_reported_immediately(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    with pytest.raises(WorkerDiedError, match="was ended by SIGABRT during 'hello'") as caught:
        agents.start(environment={"PYTHONPATH": str(tmp_path)})
    assert not caught.value.late


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_worker_that_was_killed_between_requests_is_named(agents: Agents, number: signal.Signals) -> None:
    agent = agents.start()
    os.kill(agent.worker.pid, number)
    with pytest.raises(WorkerDiedError, match=f"was ended by {number.name}") as caught:
        agent.get_plugin_list()
    assert "Traceback" not in str(caught.value)


def test_ucx_that_nixl_refuses_because_of_its_transports_is_reported_with_the_variable(agents: Agents) -> None:
    with pytest.raises(WorkerError) as caught:
        agents.start(environment={"UCX_TLS": "posix,self"})
    reason = "UCX_TLS=posix,self is set here, and allows no transport that NIXL can use between processes: NIXL refuses"
    assert caught.value.reason.startswith(f"{reason} UCX (NIXL_ERR_BACKEND) (in rank 0 (")
    assert caught.value.remedy == "`unset UCX_TLS`"


def test_backend_that_ucx_refuses_is_reported_with_the_message_of_nixl(agents: Agents) -> None:
    with pytest.raises(NixlError) as caught:
        agents.start(environment={"UCX_NET_DEVICES": "banana", "UCX_TLS": "tcp"})
    assert "nixlBackendError" in caught.value.reason
    assert "banana" in caught.value.detail


@pytest.mark.long
def test_worker_with_a_ucx_backend_ends_without_an_error() -> None:
    worker = LocalHost(supervisor()).start("agent", {}, 60)
    NixlAgent.within(worker, backends=["UCX"])
    # As close() does, which kills a worker that takes longer than two seconds, as one may on a busy machine.
    worker._send("exit")
    assert worker._process.wait(60) == 0
    worker.close()


def test_second_agent_in_a_worker_shares_its_options(agents: Agents) -> None:
    first = agents.start("first", progress_thread=False)
    second = first.beside("second")
    assert second.worker is first.worker
    assert second.name == second.run("helpers.agent_functions:describe", word="")["name"] == "second"
    second.add_remote_agent(first.get_agent_metadata())
    assert second.check_remote_metadata("first")
    second.delete()
    with pytest.raises(WorkerError, match="this agent is no longer there"):
        second.get_agent_metadata()
    assert first.get_agent_metadata(), "the first agent still exists"


def test_empty_descriptor_list_gives_metadata_with_only_connections(agents: Agents) -> None:
    agent, other = agents.start_each(["agent", "other"])
    agent.register(agent.allocate(4096))
    connections = agent.get_partial_agent_metadata(agent.get_reg_descs([], "DRAM"), True)
    assert other.add_remote_agent(connections) == "agent"
    assert len(connections) < len(agent.get_agent_metadata())
    with pytest.raises(WorkerError, match="list index out of range"):
        agent.run("helpers.agent_functions:empty_list")
