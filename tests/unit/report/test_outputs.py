# SPDX-License-Identifier: Apache-2.0
"""A run that fails although no test failed also fails in JUnit and in the verdict.json of every rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.cli_run import eventually, junit_suite
from helpers.cli_run import start as start_run

from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.report.files import VERDICT_SCHEMA

pytestmark = pytest.mark.long

CHECKS = """
import os, pathlib, signal, time
import pytest
from pytest_nixl.session.run import RUN

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it

HERE = pathlib.Path(__file__).parent

@pytest.mark.nixl_check("passes")
def test_passes():
    pass

@pytest.mark.nixl_check("fails")
def test_fails():
    assert "fails" not in os.environ["HOW"], "the planted fault"

@pytest.mark.nixl_check("waits")
def test_waits(request):
    if os.environ["HOW"] == "waits":
        (HERE / "waiting").touch()
        for _ in range(3000):  # a signal that arrives before a sleep begins does not end it
            time.sleep(0.1)
    if os.environ["HOW"] == "lost":
        ranks = request.config.stash[RUN].rank_session
        (HERE / "waiting").touch()
        deadline = time.monotonic() + 240
        while not ranks.faults and time.monotonic() < deadline:
            time.sleep(0.05)
"""


#: The options of runs of which no rank is to be lost.
LONG_LEASES = ("--nixl-lease=120s",)


class Ranks:
    """Two ranks on this host that run the checks above."""

    def __init__(self, folder: Path, how: str, *arguments: str) -> None:
        self.folder = folder
        (folder / "test_checks.py").write_text(CHECKS)
        etcd = EmbeddedServer.start(supervisor())
        self.etcd = etcd
        options = [
            f"--nixl-etcd={etcd.endpoint}", "--nixl-ranks=2", "--nixl-group=verdicts", f"--nixl-log-dir={folder}/logs",
            f"--nixl-report={folder}/r.html", f"--junit-xml={folder}/r.xml", *arguments,
        ]  # fmt: skip
        self.logs = [folder / f"rank-{rank}.log" for rank in range(2)]
        self.processes = [
            start_run(str(folder / "test_checks.py"), f"--nixl-rank={rank}", *options, log=log, env={"HOW": how})
            for rank, log in enumerate(self.logs)
        ]

    def end(self) -> tuple[list[int], list[str], list[dict[str, Any]]]:
        """Wait until both have ended; return their exit codes, outputs and verdict files."""
        codes = [process.wait(400) for process in self.processes]
        outputs = [log.read_text() for log in self.logs]
        paths = [self.folder / "logs" / f"rank-{rank}" / "verdict.json" for rank in range(2)]
        documents = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        return codes, outputs, documents

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.etcd.discard()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Ranks] = []

    def start(how: str, *arguments: str) -> Ranks:
        started.append(Ranks(tmp_path, how, *arguments))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def test_every_rank_writes_the_same_verdict(start: Any) -> None:
    codes, outputs, (first, second) = start("fails", *LONG_LEASES).end()
    assert codes == [1, 1], outputs
    for document in (first, second):
        jsonschema.validate(document, json.loads(VERDICT_SCHEMA.read_text()), jsonschema.Draft202012Validator)
    for name in ("verdict", "gate", "warnings", "interrupted", "checks", "rows", "failing", "exit_code", "text"):
        assert first[name] == second[name]
    assert (first["verdict"], first["exit_code"], first["interrupted"]) == ("FAIL", 1, "")
    assert (first["rank"], second["rank"], first["ranks"]) == (0, 1, 2)
    assert first["checks"] == {"PASS": 2, "FAIL": 1}
    [failing] = first["failing"]
    assert (failing["check"], failing["verdict"], "the planted fault" in failing["reason"]) == ("fails", "FAIL", True)
    # The last line of every rank is the same.
    assert all("NIXL verdict: FAIL (" in output for output in outputs), outputs


def test_every_rank_reports_that_rank_0_was_interrupted(start: Any) -> None:
    """tests/cluster/test_faults.py has this of SIGTERM, too."""
    ranks = start("waits", *LONG_LEASES)
    assert eventually((ranks.folder / "waiting").exists, 240)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    codes, outputs, reports = ranks.end()
    assert codes == [2, 2], outputs
    for output, report in zip(outputs, reports, strict=True):
        assert "NIXL verdict: INTERRUPTED after 2 of 3 checks: " in output
        assert "NIXL verdict: PASS" not in output
        assert (report["verdict"], report["exit_code"]) == ("INTERRUPTED", 2)
        assert report["interrupted"].startswith("INTERRUPTED after 2 of 3 checks: ")
    assert "<strong>INTERRUPTED after 2 of 3 checks: " in (ranks.folder / "r.html").read_text()


def test_a_lost_rank_interrupts_the_run(start: Any) -> None:
    ranks = start("lost")
    assert eventually((ranks.folder / "waiting").exists, 240)
    ranks.processes[1].kill()  # the check ends when rank 0 knows of it
    codes, outputs, reports = ranks.end()
    assert codes[0] == 1
    expected = "INTERRUPTED after 3 of 3 checks: rank 1 on "
    assert f"NIXL verdict: FAIL, {expected}" in outputs[0]
    assert reports[0]["interrupted"].startswith(expected)
    assert [failure["check"] for failure in reports[0]["failing"]] == ["ranks"]
    assert f"<strong>FAIL, {expected}" in (ranks.folder / "r.html").read_text()
    assert junit_suite(ranks.folder / "r.xml").attrib["failures"] == "2"
