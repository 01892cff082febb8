# SPDX-License-Identifier: Apache-2.0
"""Each script that reproduces a finding is run alone, with the real NIXL, and shows what the finding says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import environment

from pytest_nixl.cli import COULD_NOT_RUN, PASSED, main
from pytest_nixl.model.findings import FINDINGS, reproduction

SCRIPTS = {id for id in FINDINGS if reproduction(id) is not None}
#: The findings whose defect UCX has; the others are run in tests/libfabric.
ON_UCX = ("NIXL-DUPLICATE-DESCRIPTOR", "NIXL-RELEASED-HANDLE")


def script_lines(id: str, folder: Path, *arguments: str) -> list[str]:
    """Run a finding's script to its normal end, and return the lines that it prints."""
    how: dict[str, Any] = {"cwd": folder, "env": environment(), "timeout": 600, "text": True, "capture_output": True}
    done = subprocess.run([sys.executable, "-", *arguments], input=reproduction(id), check=False, **how)
    assert done.returncode == 0, done.stderr
    output: str = done.stdout
    return output.splitlines()


@pytest.mark.parametrize("id", ON_UCX)
def test_a_script_ends_as_its_finding_says(id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", id, "--reproduce"]) == PASSED
    script = tmp_path / "script.py"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "healthy" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("id", ["NIXL-RELEASED-IN-FLIGHT", "NIXL-REMOVED-IN-FLIGHT"])
def test_a_script_counts_the_bytes_that_are_written_too_late(id: str, tmp_path: Path) -> None:
    counted = ""
    # A machine that was busy at that moment may have carried the whole READ before it was cancelled.
    for _ in range(5):
        sentence, counted = script_lines(id, tmp_path)[-2:]
        assert "has returned" in sentence
        if "healthy: 0 bytes" not in counted:
            break
    assert counted == "DEFECT: 65536 bytes were overwritten after that"


#: The arguments of each script that ends by itself, and how its output ends.
ENDS = {
    "NIXL-CUT-METADATA": (
        "",
        "metadata without its last byte was refused with nixlNotFoundError\n"
        "DEFECT: the whole metadata was refused after that with nixlInvalidParamError",
    ),
    "NIXL-DEREGISTERED-SOURCE": ("UCX", "healthy: the transfer is DONE"),
    "NIXL-STOPPED-TARGET-SILENT": ("UCX 3", r"DEFECT: the target was stopped, and for 3 s \d transfers were PROC"),
    "LIBFABRIC-NOTIFICATION-HANGS": (
        "UCX 120",
        r"healthy: the target was killed, and send_notif\(\) returned \d+ times and then raised nixl\w+",
    ),
    "NIXL-TELEMETRY-DISCONNECT-UNCOUNTED": ("", "DEFECT: no error is counted"),
    "NIXL-TELEMETRY-REFUSAL-UNCOUNTED": ("", "DEFECT: no error is counted"),
    "LIBFABRIC-RELEASE-STALLS": (
        "UCX 60",
        r"healthy: a WRITE was \w+ and released; then one to another agent was DONE after [\d.]+ s, and one to the "
        r"same agent DONE after [\d.]+ s",
    ),
    "LIBFABRIC-NO-RECONNECT": (
        "UCX",
        r"healthy: a WRITE after remove_remote_agent\(\) and add_remote_agent\(\): DONE after [\d.]+ s",
    ),
    "LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY": (
        "UCX",
        r"healthy: each deleted agent left -?\d+ B in use, and -?\d+ B if it had notified another one",
    ),
    "NIXL-REMOVED-AGENT-KEEPS-SOCKETS": ("", "DEFECT: 100 sockets are open after 50 removals"),
    "NIXL-RESTARTED-LISTENER-LOSES-FETCH": ("", "DEFECT: the first had no answer in 10 s"),
}
#: The first two take a second; the last six take long, or other tests see the same.
MARKS = [(), (), *[(pytest.mark.long,)] * 3, *[(pytest.mark.long, pytest.mark.whole)] * 6]


@pytest.mark.parametrize("id", [pytest.param(id, marks=marks) for id, marks in zip(ENDS, MARKS, strict=True)])
def test_a_script_says_at_its_end_whether_the_defect_is_there(id: str, tmp_path: Path) -> None:
    arguments, end = ENDS[id]
    output = "\n".join(script_lines(id, tmp_path, *arguments.split()))
    assert re.search(rf"^{end}\Z", output, re.MULTILINE), output


@pytest.mark.long
@pytest.mark.parametrize(
    ("id", "line", "end", "counted"),
    [
        (
            "NIXL-DEAD-TARGET-CRASHES", r"round \d, (WRITE|READ): the target was killed: ", "SIGSEGV",
            "{0} of 2 initiators were ended by SIGSEGV",
        ),
        pytest.param(
            "NIXL-DEAD-INITIATOR-ABORTS", r"round \d: the initiator was killed: the target ", "SIGABRT",
            "in {0} of 2 rounds the target was ended by SIGABRT",
            marks=pytest.mark.whole,
        ),
    ],
)  # fmt: skip
def test_a_script_counts_the_processes_that_end_with_a_dead_peer(
    id: str, line: str, end: str, counted: str, tmp_path: Path
) -> None:
    lines = script_lines(id, tmp_path, "UCX", "2")
    rounds = [output_line for output_line in lines if re.match(line, output_line)]
    assert len(rounds) == 2
    ended = sum(end in output_line for output_line in rounds)
    assert ended == 0 or id == "NIXL-DEAD-INITIATOR-ABORTS"
    assert lines[-1] == f"{'DEFECT' if ended else 'healthy'}: {counted.format(ended)}"


def test_the_scripts_use_nothing_of_this_project() -> None:
    folder = Path(__file__).parents[3] / "docs" / "reproductions"
    assert {path.stem.upper().replace("_", "-") for path in folder.glob("*.py")} == SCRIPTS
    for id in SCRIPTS:
        assert "pytest_nixl" not in str(reproduction(id))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--reproduce prints the script of one finding: name one of LIBFABRIC-NO-RECONNECT, "),
        (("NIXL-ETCD-STALE-KEY",), "there is no script for NIXL-ETCD-STALE-KEY: findings with a script are LIBFABRIC-"),
        (("NIXL-OTHER",), "there is no finding 'NIXL-OTHER'"),
    ],
)
def test_a_finding_without_a_script_is_refused_in_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments, "--reproduce"]) == COULD_NOT_RUN
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pytest-nixl: {message}")
    assert len(err.splitlines()) == 1
