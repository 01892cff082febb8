# SPDX-License-Identifier: Apache-2.0
"""The processes of nixlbench: their results and failures are reported at once, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.cli_run import ROOT
from helpers.etcd import mentioning, wait_until
from helpers.nixlbench import standin

from pytest_nixl.checks.nixlbench.command import Meeting, command
from pytest_nixl.checks.nixlbench.driver import NixlbenchError, Ran, run_at, run_in
from pytest_nixl.checks.nixlbench.group import Group
from pytest_nixl.core.units import KIB
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.external_program import Tool
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import _start, supervisor

pytestmark = pytest.mark.long

ROW = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 64 * KIB)
#: Seconds within which a death is reported, even on a busy machine that starts four Pythons: nixlbench takes 181.
AT_ONCE = 150.0
#: Timeout in seconds of a worker's step and of a silent nixlbench, which nothing here should reach.
SECONDS = 60.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start(supervisor())
    yield server
    server.discard()


@pytest.fixture(scope="module")
def client(etcd: EmbeddedServer) -> Iterator[EtcdClient]:
    with etcd.client() as etcd_client:
        etcd_client.put("xferbench/somebody-elses//size", b"1")
        yield etcd_client


Play = Callable[..., Ran]


@pytest.fixture
def play(program: Path, etcd: EmbeddedServer, client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Return a function that runs the stand-in; afterwards assert that no key and no process is left."""
    tools: list[Tool] = []

    def run(play: str, *, endpoint: str = "", timeout: float = SECONDS, more: tuple[str, ...] = (), **env: str) -> Ran:
        for name, value in {"STANDIN_PLAY": play, **env}.items():
            monkeypatch.setenv(name, value)
        variables = own_variables({"nixlbench": str(program)})
        tools.extend(Tool(LocalHost(supervisor(), rank, own=variables), "nixlbench", SECONDS) for rank in (0, 1))

        def arguments(meeting: Meeting) -> list[str]:
            return command(ROW, "UCX", meeting, iterations=None, warmup=10, more=more)

        pair = (tools[0], tools[1])
        if endpoint == "ASIO":
            return run_at(pair, "127.0.0.1", arguments, {}, timeout)
        return run_in(pair, Group(client, endpoint or etcd.endpoint, supervisor()), arguments, {}, timeout)

    yield run
    assert mentioning(str(program)) == []
    for tool in tools:
        tool.close()
    assert set(client.get_prefix("xferbench/")) == {"xferbench/somebody-elses//size"}


@pytest.mark.parametrize("runtime", ["ETCD", "ASIO"])
def test_two_processes_meet_and_their_row_is_parsed(play: Play, runtime: str) -> None:
    ran = play("normal", endpoint="ASIO" if runtime == "ASIO" else "", UCX_PROTO_INFO="y")
    assert [(row.block, row.bandwidth) for row in ran.output.rows] == [(64 * KIB, 3.640889e9)]
    assert ran.output.configuration.values["num_iter"] == "1008"
    assert ran.remarks == ()
    assert ran.inconsistent == ""
    assert "cma/memory" in ran.log


@pytest.mark.parametrize(
    ("runtime", "rank", "role", "other"),
    [("ETCD", 0, "initiator", "target"), ("ASIO", 1, "target", "initiator")],
)
def test_a_killed_rank_is_reported_at_once(play: Play, runtime: str, rank: int, role: str, other: str) -> None:
    start = time.monotonic()
    with pytest.raises(NixlbenchError) as raised:
        play(f"killed:{rank}", endpoint="ASIO" if runtime == "ASIO" else "")
    reason = raised.value.reason
    assert reason.startswith(f"the {role} (nixlbench of rank {rank} on ")
    assert " was ended by SIGKILL during the run" in reason
    assert "dmesg" in raised.value.remedy
    assert f"the last lines of the {role} (" in raised.value.detail
    assert f"the last lines of the {other} (" in raised.value.detail
    assert "  | All processes are ready to proceed" in raised.value.detail
    assert time.monotonic() - start < AT_ONCE


@pytest.mark.parametrize(
    ("endpoint", "text", "remedy"),
    [
        ("http://no-such-host.invalid:2379", "the target uri is not valid", "http://HOST:PORT"),
        ("http://127.0.0.1:9", "connections to all backends failing", "etcdctl --endpoints URL endpoint health"),
    ],
)
def test_an_etcd_that_cannot_be_reached_is_reported_before_the_target_starts(
    play: Play, endpoint: str, text: str, remedy: str
) -> None:
    with pytest.raises(NixlbenchError, match=f"^the initiator .*: Failed to acquire lock: {text}") as raised:
        play("normal", endpoint=endpoint)
    assert "the target (" not in str(raised.value)
    assert remedy in raised.value.remedy


def test_an_etcd_lost_during_a_row_is_reported_and_cleaned_later(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_PLAY", "wait")
    server, cleaner = EmbeddedServer.start(supervisor()), _start()
    tools = [
        Tool(LocalHost(supervisor(), rank, own=own_variables({"nixlbench": str(program)})), "nixlbench", SECONDS)
        for rank in (0, 1)
    ]
    ended_at: list[float] = []

    def end() -> None:
        wait_until(lambda: group.remaining_keys().startswith("3 keys "), 120, "the watch has seen both ranks")
        ended_at.append(time.monotonic())
        supervisor().signal(server.pid, signal.SIGKILL)

    thread = threading.Thread(target=end)
    try:
        with server.client() as client:
            group = Group(client, server.endpoint, cleaner)
            with pytest.raises(NixlbenchError) as raised:
                thread.start()
                run_in((tools[0], tools[1]), group, lambda meeting: command(ROW, "UCX", meeting, iterations=None,
                       warmup=10), {}, 160.0)  # fmt: skip
            assert time.monotonic() - ended_at[0] < AT_ONCE, "nixlbench is silent for 180 s before that is an error"
        assert server.endpoint in raised.value.reason
        assert "connection refused" in raised.value.reason
        assert f"3 keys under {group.prefix} (/rank/0, /rank/1, /size) are still in it" in raised.value.reason
        assert mentioning(str(program)) == []
        server.restart()
        cleaner.close()
        with server.client() as client:
            wait_until(lambda: client.count_prefix("xferbench/") == 0, 120, "the supervisor has deleted the keys")
    finally:
        cleaner.close()
        thread.join()
        for tool in tools:
            tool.close()
        server.discard()


def test_the_keys_of_a_group_are_deleted_after_kill(etcd: EmbeddedServer) -> None:
    script = """
import os, signal, sys
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.checks.nixlbench.group import Group
with connect(parse_endpoints(sys.argv[1])) as client, Group(client, sys.argv[1], supervisor()) as group:
    client.put(f"{group.prefix}/size", b"1")
    assert client.count_prefix("xferbench/pytest-nixl-") == 1
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, etcd.endpoint], check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    with etcd.client() as client:
        wait_until(lambda: not client.count_prefix("xferbench/pytest-nixl-"), 60, "the supervisor has deleted the keys")
