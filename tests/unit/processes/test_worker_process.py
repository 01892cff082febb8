# SPDX-License-Identifier: Apache-2.0
"""A worker may crash, abort, hang or refuse: pytest lives on, and says what happened."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_process import NixlError, WorkerDiedError, WorkerError, WorkerHungError, results

HERE = str(Path(__file__).parent)


def test_nixl_is_not_loaded_in_the_pytest_process(agents: Agents) -> None:
    assert agents.start().get_plugin_list()
    assert not [name for name in sys.modules if name == "nixl" or name.startswith("nixl_cu")]
    assert "libucp" not in Path("/proc/self/maps").read_text()


def test_a_function_runs_beside_the_raw_agent(agents: Agents) -> None:
    agent = agents.start("alpha")
    found = agent.run("helpers.agent_functions:describe", word="hello")
    assert found == {"name": "alpha", "word": "hello", "pid": agent.worker.pid, "type": "nixl_agent"}
    assert found["pid"] != os.getpid()
    assert agent.run("helpers.agent_functions:give_bytes") == b"\x00\xff"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "helpers.agent_functions:raise_error",
            "ValueError in rank 0 (agent worker, pid {pid}) during 'run': the user's own",
        ),
        (
            "helpers.agent_functions:no_such",
            "AttributeError in rank 0 (agent worker, pid {pid}) during 'run': module 'agent_",
        ),
        (
            "no_such_module:f",
            "ModuleNotFoundError in rank 0 (agent worker, pid {pid}) during 'run': No module named 'no_",
        ),
        (
            "helpers.agent_functions:import_missing",
            "ModuleNotFoundError in rank 0 (agent worker, pid {pid}) during 'run': No mo",
        ),
        ("agent_functions", "refused 'run': 'agent_functions' is not module:function"),
        ("helpers.agent_functions:give_object", "a object cannot be sent between pytest and a worker"),
    ],
)
def test_a_function_that_fails_is_an_error_and_the_worker_lives(agents: Agents, function: str, words: str) -> None:
    agent = agents.start()
    with pytest.raises(WorkerError) as caught:
        agent.run(function)
    assert words.format(pid=agent.worker.pid) in caught.value.reason
    assert "NIXL" not in f"{caught.value.reason} {caught.value.remedy}", "NIXL is not at fault"
    assert agent.run("helpers.agent_functions:give_bytes") == b"\x00\xff"


@pytest.mark.parametrize(
    ("function", "arguments", "how", "line"),
    [
        ("abort", {}, "was ended by SIGABRT", "Fatal Python error: Aborted"),
        ("crash", {}, "was ended by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("ucx_fatal", {}, "was ended by SIGABRT", "a fatal error made by a test"),
        ("leave", {"code": 3}, "ended with exit code 3", "it wrote nothing to stderr"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_last_lines(
    agents: Agents, function: str, arguments: dict[str, int], how: str, line: str
) -> None:
    agent = agents.start()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        agent.run(f"helpers.agent_functions:{function}", **arguments)
    assert time.monotonic() - started < agent.worker.timeout
    assert caught.value.reason == f"rank 0 (agent worker, pid {agent.worker.pid}) {how} during 'run'"
    assert line in caught.value.detail
    assert not agent.worker.alive


def test_a_worker_that_hangs_is_ended_at_its_deadline_with_its_stack(agents: Agents) -> None:
    agent = agents.start()
    agent.worker.timeout = 1.0
    with pytest.raises(WorkerHungError) as caught:
        agent.run("helpers.agent_functions:hang")
    assert "which was sleeping, did not answer 'run' before its deadline" in caught.value.reason
    assert "in hang" in caught.value.detail
    assert not agent.worker.alive


#: What Python imports first: a double of a file system that is slow, or of a machine that is busy.
SLOW = "import time\ntime.sleep({seconds})\n"


def test_a_worker_that_starts_slowly_has_a_deadline_of_its_own(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(seconds=3))
    with Agents(LocalHost(supervisor()), make_settings(timeout=2.0)) as started:
        agent = started.start(environment={"PYTHONPATH": str(tmp_path)})
        assert agent.worker.timeout == 2.0
        agent.worker.timeout = 20.0  # the rest is this machine's own load
        assert agent.get_plugin_list()


def test_a_worker_that_never_starts_is_ended_at_that_deadline(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(seconds=600))
    words = r"did not start \(import NIXL\) before its deadline of 2 s"
    with Agents(LocalHost(supervisor()), make_settings(start_timeout=2.0)) as broken:
        with pytest.raises(WorkerHungError, match=words) as caught:
            broken.start(environment={"PYTHONPATH": str(tmp_path)})
    assert "give --nixl-start-timeout more than 2 s" in caught.value.remedy
    assert caught.value.late, "a busy machine could be all that is wrong"
    assert not broken._workers[0].alive


def test_a_worker_that_ends_while_it_starts_is_told_at_once(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    with pytest.raises(WorkerDiedError, match="was ended by SIGABRT during 'hello'") as caught:
        agents.start(environment={"PYTHONPATH": str(tmp_path)})
    assert not caught.value.late


def test_a_worker_that_is_stopped_is_said_to_be(agents: Agents) -> None:
    agent = agents.start()
    agent.worker.timeout = 0.5
    os.kill(agent.worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerHungError, match="which was stopped by a signal, did not answer 'call'"):
        agent.get_plugin_list()


def test_a_partner_that_is_late_does_not_hide_the_error_that_ended_the_step(agents: Agents) -> None:
    failing, late = agents.start_each(["failing", "late"])
    asked = [
        each.worker.request("run", agent=each.ref, function=f"helpers.agent_functions:{function}", arguments={})
        for each, function in ((late, "hang"), (failing, "raise_error"))
    ]
    with pytest.raises(WorkerError, match="ValueError in rank 0"):
        results(asked)
    assert not late.worker.alive


def test_a_worker_that_was_killed_before_it_is_asked_is_named(agents: Agents) -> None:
    agent = agents.start()
    os.kill(agent.worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="was ended by SIGKILL"):
        agent.get_plugin_list()


def test_an_error_of_nixl_is_named_and_the_worker_lives(agents: Agents) -> None:
    agent = agents.start()
    with pytest.raises(NixlError, match=r"NIXL reported nixl\w+Error \(NIXL_ERR_\w+\) in rank 0") as caught:
        agent.add_remote_agent(b"no metadata of any agent, but long enough to be looked at")
    assert caught.value.type_name.startswith("nixl")
    assert agent.get_plugin_list()


def test_a_backend_that_ucx_refuses_is_named_with_nixls_own_words(agents: Agents) -> None:
    with pytest.raises(NixlError) as caught:
        agents.start(environment={"UCX_TLS": "banana"})
    assert "nixlBackendError" in caught.value.reason
    assert "banana" in caught.value.detail


def test_a_backend_that_nixl_does_not_have_is_named_with_those_it_has(agents: Agents) -> None:
    with pytest.raises(WorkerError, match=r"NIXL has no plugin NOSUCH: it has .*UCX"):
        agents.start(backends=["NOSUCH"])


def test_a_nixl_that_cannot_be_loaded_is_explained(agents: Agents, tmp_path: Path) -> None:
    # A double: uninstalling the real one would take it from every other test.
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(WorkerError) as caught:
        agents.start(environment={"PYTHONPATH": str(tmp_path)})
    assert "NIXL cannot be loaded in rank 0" in caught.value.reason
    assert "libcuda.so.1" in caught.value.reason
    assert "pip install --no-deps" in caught.value.remedy


def test_the_package_of_the_nixl_that_is_loaded_is_named_where_another_is_installed_too(
    agents: Agents, tmp_path: Path
) -> None:
    # A double of what `pip install nixl` leaves: records of a second wheel, which is not the one that is loaded.
    loaded = agents.start().worker.versions
    other = {"nixl-cu12": "nixl_cu13", "nixl-cu13": "nixl_cu12"}[loaded["nixl_package"]]
    records = tmp_path / f"{other}-0.0.1.dist-info"
    records.mkdir()
    (records / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other.replace('_', '-')}\nVersion: 0.0.1\n")
    (records / "RECORD").write_text(f"{other}/_api.py,,\n")
    both = agents.start(environment={"PYTHONPATH": str(tmp_path)})
    assert both.run("helpers.agent_functions:has_package", name=other.replace("_", "-"))
    found = {name: both.worker.versions[name] for name in ("nixl", "nixl_package")}
    assert found == {name: loaded[name] for name in ("nixl", "nixl_package")}


def test_only_public_methods_and_known_commands_are_served(agents: Agents) -> None:
    agent = agents.start()
    for method in ("_load_plugin_params", "agent", "__class__", "os.system"):
        with pytest.raises(WorkerError, match="is no public method of NIXL's agent"):
            agent._call(method)
    with pytest.raises(WorkerError, match="there is no command 'system'"):
        agent.worker.call("system", line="true")
    with pytest.raises(WorkerError, match="there is no command '_keep'"):
        agent.worker.call("_keep")


def test_a_worker_ends_by_itself_with_no_error_though_a_ucx_backend_was_made() -> None:
    worker = LocalHost(supervisor()).start("agent", {}, 30)
    NixlAgent.within(worker, backends=["UCX"])
    started = time.monotonic()
    worker.close()
    assert worker._process.wait() == 0
    assert time.monotonic() - started < 5


def test_late_answers_are_not_taken_for_later_ones(agents: Agents) -> None:
    agent = agents.start()
    given_up = agent.worker.request("run", agent=agent.ref, function="helpers.agent_functions:give_bytes", arguments={})
    assert given_up.step == "run"
    assert isinstance(agent.get_plugin_list(), list)


def test_the_proxy_has_every_public_method_of_nixls_agent(agents: Agents) -> None:
    agent = agents.start()
    public = agent.run("helpers.agent_functions:public_methods")
    # Memory views are device-side objects of NIXL 1.5, and remote descriptors a C++ detail: neither can be a reference.
    left_out = {"prep_mem_view", "release_mem_view", "get_remote_descs"}
    assert [name for name in public if name not in left_out and not hasattr(NixlAgent, name)] == []


def test_an_agent_beside_another_shares_its_worker_and_its_options(agents: Agents) -> None:
    first = agents.start("first", progress_thread=False)
    second = first.beside("second")
    assert second.worker is first.worker
    assert second.name == second.run("helpers.agent_functions:describe", word="")["name"] == "second"
    second.add_remote_agent(first.get_agent_metadata())
    assert second.check_remote_metadata("first")
    second.delete()
    with pytest.raises(WorkerError, match="this agent is no longer there"):
        second.get_agent_metadata()
    assert first.get_agent_metadata(), "the other one lives on"


def test_agents_that_are_started_together_end_together_where_one_fails(agents: Agents) -> None:
    one, other = agents.start_each(["one", "other"])
    assert one.worker.pid != other.worker.pid
    with pytest.raises(WorkerError, match="NIXL has no plugin NONE"):
        agents.start_each([None, None], backends=["NONE"])
    assert one.worker.alive
    with agents:
        pass
    assert not any(worker.alive for worker in agents._workers)


def test_metadata_of_connections_alone_wants_an_empty_list_which_nixl_cannot_make(agents: Agents) -> None:
    agent, other = agents.start_each(["agent", "other"])
    agent.register(agent.allocate(4096))
    connections = agent.get_partial_agent_metadata(agent.get_reg_descs([], "DRAM"), True)
    assert other.add_remote_agent(connections) == "agent"
    assert len(connections) < len(agent.get_agent_metadata())
    with pytest.raises(WorkerError, match="list index out of range"):
        agent.run("helpers.agent_functions:empty_list")
