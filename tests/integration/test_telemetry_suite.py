# SPDX-License-Identifier: Apache-2.0
"""The suite ``telemetry`` with the real NIXL: healthy, with altered counts, without an exporter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cli_run import environment, run
from helpers.metrics_server import altered, metrics_server

from pytest_nixl import Agents, NotApplicableError, Settings
from pytest_nixl.checks.telemetry.accounting import judge_counts
from pytest_nixl.checks.telemetry.exporters import BUFFER, PROMETHEUS, PROMETHEUS_MP
from pytest_nixl.checks.telemetry.measured_agents import INITIATOR, MeasuredAgents
from pytest_nixl.checks.telemetry.shared_port import share_port
from pytest_nixl.cli import FAILED, PASSED, main
from pytest_nixl.core.free_ports import free_ports
from pytest_nixl.host.network import port_holder
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_parent import starts_workers

pytestmark = pytest.mark.long

PORTS = "suites/telemetry/test_ports.py"


@pytest.fixture
def started(make_settings: Callable[..., Settings]) -> Iterator[Agents]:
    """Agents whose counts must be right within a few seconds, so that wrong ones are judged soon."""
    with Agents(LocalHost(supervisor()), make_settings(timeout=60.0)) as agents:
        yield agents


#: In pytest: transfers fail with one exporter only, because the agents of all of them are busy until the check ends.
#: The whole run lets them fail with all.
ONE_EXPORTER = """
def pytest_collection_finish():
    from suites.telemetry import test_counts
    test_counts.EXPORTERS = (test_counts.PROMETHEUS,)
"""


@pytest.mark.parametrize(
    ("suites", "fault"),
    [
        pytest.param(("suites/telemetry",), "", id="all", marks=pytest.mark.whole),
        # The overhead is measured below.
        pytest.param(("suites/telemetry/test_counts.py", PORTS), ONE_EXPORTER, id="counts"),
    ],
)
def test_a_healthy_nixl_passes_but_does_not_count_dead_agents(suites: tuple[str, ...], fault: str) -> None:
    run(*suites, "--nixl-level=extended", fault=fault).expect(0, "3 known limits of NIXL 1.5")


def alter(text: str) -> str:
    """Change one count of the metrics, and leave out another."""
    lines = text.replace("} 131072\n", "} 131073\n").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("agent_rx_requests_num"))


@pytest.mark.parametrize("exporter", [PROMETHEUS, PROMETHEUS_MP])
def test_a_count_that_is_altered_or_missing_fails_with_its_name(started: Agents, tmp_path: Path, exporter: str) -> None:
    pair = MeasuredAgents(started, exporter, tmp_path)
    pair.move("WRITE", count=2, size=16 << 10)
    pair.move("READ", count=1, size=4 << 10)
    with metrics_server(altered(pair.sink.place(INITIATOR), alter)) as port:
        pair.sink = replace(pair.sink, ports={**pair.sink.ports, INITIATOR: port})
        judgement = judge_counts(pair)
    assert judgement.verdict is Verdict.FAIL
    agent = "of agent telemetry-initiator is"
    assert set(judgement.reason.removeprefix(f"{exporter} of NIXL {pair.nixl}: ").split("; ")) == {
        f"agent_tx_bytes_total {agent} 131073, expected 131072",
        f"agent_rx_requests_num_total {agent} missing, expected 1",
    }


def test_a_transfer_that_nobody_knows_of_fails(started: Agents, tmp_path: Path) -> None:
    pair = MeasuredAgents(started, BUFFER, tmp_path)
    counts = pair.known[INITIATOR].counts.copy()
    pair.move("WRITE", count=1, size=16 << 10)
    assert judge_counts(pair).verdict is Verdict.PASS
    counts["agent_memory_registered"] = pair.known[INITIATOR].counts["agent_memory_registered"]
    pair.known[INITIATOR].counts = counts
    judgement = judge_counts(pair)
    assert judgement.verdict is Verdict.FAIL
    assert "agent_tx_bytes of agent telemetry-initiator is 65536, expected 0" in judgement.reason
    assert "agent_tx_requests_num of agent telemetry-initiator is 1, expected 0" in judgement.reason


def test_an_image_without_the_exporter_is_not_applicable(
    started: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = next(Path(sys.prefix).glob("lib/python3*/site-packages/nixl_cu1*.libs"))
    plugins = tmp_path / "libs" / "nixl"
    plugins.mkdir(parents=True)
    for file in [*libraries.glob("*"), libraries / "nixl" / "libplugin_UCX.so"]:
        if file.name != "nixl":
            (tmp_path / "libs" / file.relative_to(libraries)).symlink_to(file)
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    with pytest.raises(NotApplicableError, match="has no exporter prometheus_mp: there is no libtelemetry_exporter_"):
        MeasuredAgents(started, PROMETHEUS_MP, tmp_path)


#: Programs that hold a port until they are ended. They print a line with the port alone.
HTTP_SERVER = """
import sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""
NIXL_PROGRAM = """
import os, sys
from nixl._api import nixl_agent, nixl_agent_config
engine = nixl_agent("engine", nixl_agent_config(backends=[]))
print(os.environ["NIXL_TELEMETRY_PROMETHEUS_PORT"], flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(program: str, **variables: str) -> Iterator[tuple[int, int]]:
    """Start a program that is no worker of pytest-nixl; yield its pid and the port that it holds."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "a-stranger"], env=environment(**variables), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            yield process.pid, next(int(line) for line in process.stdout if line.strip().isdecimal())  # NIXL logs, too
        finally:
            process.kill()


@pytest.mark.parametrize(
    "program",
    [HTTP_SERVER, pytest.param(NIXL_PROGRAM, marks=pytest.mark.whole)],
    ids=["http-server", "nixl-program"],
)
def test_a_port_that_a_stranger_holds_fails_with_its_process(program: str) -> None:
    variables = {
        "NIXL_TELEMETRY_ENABLE": "y",
        "NIXL_TELEMETRY_EXPORTER": PROMETHEUS,
        "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y",
        "NIXL_TELEMETRY_PROMETHEUS_PORT": str(free_ports(1)[0]),
    }
    with holder(program, **variables) as (pid, port):
        variables["NIXL_TELEMETRY_PROMETHEUS_PORT"] = str(port)
        done = run(PORTS, "--nixl-level=extended", env=variables)
        port_owner = port_holder(port)
        assert port_owner is not None
        assert port_owner.pid == pid
    assert f"{sys.executable} -c" in port_owner.command
    done.expect(
        1,
        f"FAIL telemetry-port: agent telemetry-first (pid ...) is not measured: port {port} is held by pid {pid} "
        f"({port_owner.command}); NIXL wrote: ...could not be bound",
        f"`ss -ltnp 'sport = :{port}'` shows who has it",
    )


def test_the_second_process_of_a_port_is_not_measured(started: Agents) -> None:
    (unmeasured,) = share_port(started, None)
    assert unmeasured.agent == "telemetry-second"
    assert unmeasured.holder is not None
    assert starts_workers(unmeasured.holder.parent)
    assert unmeasured.pid not in (0, unmeasured.holder.pid)
    assert "will run without a telemetry sink" in unmeasured.wrote


#: In pytest: fewer transfers and launches. The agents are busy as long as they live.
#: tests/unit/checks/test_telemetry_overhead.py has the five launches of each side and their interval.
FEWER = """
from pytest_nixl.checks.telemetry import measured_agents, overhead

overhead.TRANSFERS = 5
overhead.LAUNCHES, overhead._END = 2, 0
"""
#: In a worker with telemetry each transfer takes 0.2 s longer. A double of an exporter that holds up transfers. Its
#: bound is a ratio of 10: the median of healthy transfers is below 20 ms on a busy machine, too.
SLOWER = """
import os
import time
from pytest_nixl.checks.telemetry import worker as telemetry
from pytest_nixl.checks.telemetry.worker import *

measured_agents._IN_WORKER = "fault"

class Slower:
    def __init__(self, agent):
        self.agent = agent

    def __getattr__(self, name):
        return getattr(self.agent, name)

    def transfer(self, handle):
        if "NIXL_TELEMETRY_ENABLE" in os.environ:
            time.sleep(0.2)
        return self.agent.transfer(handle)

def time_transfers(agent, **arguments):
    return telemetry.time_transfers(Slower(agent), **arguments)
"""


def test_the_overhead_of_telemetry_is_recorded_and_judged_by_a_bound(tmp_path: Path) -> None:
    profile, record = tmp_path / "p.toml", tmp_path / "run.json"
    profile.write_text(
        '[profile]\nname = "test"\n[[bound]]\nfigure = "telemetry-overhead-least"\nexporter = ["prometheus"]\n'
        'at_most = "10"\nsource = "a test"\n'
    )
    done = run(
        "suites/telemetry/test_overhead.py", "--nixl-level=extended", f"--nixl-profile={profile}",
        f"--benchmark-json={record}", fault=FEWER + SLOWER,
    )  # fmt: skip
    assert done.code == 1, done.output
    results = {load["fullname"]: load for load in json.loads(record.read_text())["benchmarks"]}
    assert set(results) == {"telemetry-transfer/UCX/none", "telemetry-transfer/UCX/prometheus"}
    for result in results.values():
        assert result["stats"]["rounds"] == 2
        ratio, least, most = (figure["value"] for figure in result["extra_info"]["figures"])
        assert 10 < least <= ratio <= most
    pattern = (
        r"^FAIL telemetry-overhead: telemetry-overhead-least \(UCX prometheus\): [\d.e+]+, above its bound of 10 \("
    )
    assert re.search(pattern, done.output, re.M), done.output


def test_a_live_endpoint_of_nixl_is_judged(started: Agents, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = MeasuredAgents(started, PROMETHEUS, tmp_path)
    pair.move("WRITE", count=2, size=4 << 10)
    pair.ask_an_unknown_agent()
    pair.counts(pair.initiator)
    assert main(["telemetry", pair.sink.place(INITIATOR), "--max-failed=1", "--max-post-us=1e9"]) == PASSED
    output = capsys.readouterr().out
    assert "PASS: failed transfers: 1 (agent_errors_total), at most 1\n" in output
    assert "us (agent_xfer_post_time_us, 2 transfers), at most 1000000000 us\n" in output
    assert main(["telemetry", pair.sink.place(INITIATOR), "--max-failed=0"]) == FAILED
    assert "FAIL: failed transfers: 1 (agent_errors_total), above its bound of 0\n" in capsys.readouterr().out
