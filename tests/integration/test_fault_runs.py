# SPDX-License-Identifier: Apache-2.0
"""The page of faults by release is made from records of real runs, which a script adds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, environment

from pytest_nixl.checks.faults.misuse import KINDS, MisuseEnding, MisuseOutcome
from pytest_nixl.checks.faults.scene import FaultOutcome
from pytest_nixl.checks.faults.transfers import FAULTS

DATE, MACHINE = "2026-11-22", "Debian, x86_64, 2 processors"
OUTCOME = FaultOutcome("target-killed", "UCX", "WRITE", "1.5.1", "nixlRemoteDisconnectError", 0.021, wrong_bytes=0)
UCX = ("UCX", "")


@pytest.fixture(scope="module")
def fault_runs() -> Iterator[Any]:
    """The module that reads and words the records."""
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("fault_runs")
    sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "told in 0.02 s, `nixlRemoteDisconnectError`"),
        ({"answer": "PROC"}, "**not told**, `PROC`"),
        ({"answer": "DONE"}, "transfers go on"),
        ({"answer": "the target is not told"}, "target not told, memory unchanged"),
        ({"answer": "send_notif returned 3 times and then raised nixlBackendError"}, "told, `nixlBackendError`"),
        ({"answer": "send_notif returned 200 times"}, "lost without an error"),
        ({"answer": "send_notif returned 1 times and then not", "survivor": "did not answer"}, "**never returns**"),
        (
            {"answer": "deregister_memory returned with 4 of 4 transfers in flight, which end as 1 PROC, 3 DONE"},
            "returns, transfers end as `PROC` or `DONE`",
        ),
        (
            {
                "answer": "release_xfer_handle returned with 4 of 4 transfers in flight, "
                "which end as none is asked for",
                "changed": 9,
            },
            "returns, **bytes are written after that**",
        ),
        ({"unended": 2}, "told in 0.02 s, `nixlRemoteDisconnectError`, **2 transfers do not end**"),
        ({"lost_requests": 1}, "told in 0.02 s, `nixlRemoteDisconnectError`, **the first fetch is lost**"),
        (
            {"answer": "no answer", "survivor": "was ended by SIGSEGV", "wrong_bytes": None},
            "**the survivor was ended by SIGSEGV**",
        ),
        ({"wrong_bytes": 3}, "told in 0.02 s, `nixlRemoteDisconnectError`, **the next transfer has wrong bytes**"),
    ],
)
def test_each_outcome_of_a_fault_has_its_words(fault_runs: Any, changed: dict[str, Any], message: str) -> None:
    assert fault_runs.FaultRun.of_fault(DATE, MACHINE, replace(OUTCOME, **changed)).cell == message


@pytest.mark.parametrize(
    ("kind", "ending", "error", "wrong", "after", "message"),
    [
        ("empty-region", MisuseEnding.ACCEPTED, "", 0, "", "accepted"),
        ("unknown-agent", MisuseEnding.ACCEPTED, "", 0, "", "**accepted**"),
        ("unknown-agent", MisuseEnding.REFUSED, "nixlNotFoundError", 0, "", "refused, `nixlNotFoundError`"),
        ("released-handle", MisuseEnding.CRASHED, "was ended by SIGSEGV", None, "", "**SIGSEGV**"),
        ("empty-region", MisuseEnding.ACCEPTED, "", 3, "", "accepted, **the next transfer has wrong bytes**"),
        ("cut-metadata", MisuseEnding.REFUSED, "nixlNotFoundError", 0, "nixlInvalidParamError",
         "refused, `nixlNotFoundError`, **a transfer to the peer is refused after that, `nixlInvalidParamError`**"),
        ("released-in-flight", MisuseEnding.ACCEPTED, "", 0, "PROC",
         "accepted, **the next transfer to the peer stays `PROC`**"),
    ],
)  # fmt: skip
def test_each_outcome_of_a_misuse_has_its_words(
    fault_runs: Any, kind: str, ending: MisuseEnding, error: str, wrong: int | None, after: str, message: str
) -> None:
    outcome = MisuseOutcome(KINDS[kind], "UCX", "1.5.1", ending, error, wrong, after)
    assert fault_runs.FaultRun.of_misuse(DATE, MACHINE, outcome).cell == message


def cells(fault_runs: Any, *outcomes: FaultOutcome) -> list[str]:
    """Return the cells of the fault of :data:`TOLD` for each release."""
    runs = [fault_runs.FaultRun.of_fault(DATE, MACHINE, outcome) for outcome in outcomes]
    ((id, results),) = fault_runs.rows_of(runs, UCX, misuse=False, ids=["target-killed"])
    assert id == "target-killed"
    return list(results)


def test_a_fault_that_was_not_run_says_so(fault_runs: Any) -> None:
    other = replace(OUTCOME, transports="tcp"), replace(OUTCOME, fault="target-paused")
    assert cells(fault_runs, *other) == ["not run"] * 4


def test_operations_that_differ_only_in_time_have_one_text(fault_runs: Any) -> None:
    slower = replace(OUTCOME, op="READ", seconds=0.5)
    assert cells(fault_runs, OUTCOME, slower)[-1] == "told in 0.50 s, `nixlRemoteDisconnectError`"
    silent = replace(OUTCOME, op="READ", answer="PROC")
    assert cells(fault_runs, OUTCOME, silent)[-1] == (
        "WRITE: told in 0.02 s, `nixlRemoteDisconnectError`; READ: **not told**, `PROC`"
    )
    assert cells(fault_runs, slower)[-1] == "READ: told in 0.50 s, `nixlRemoteDisconnectError`"


def test_a_record_replaces_the_earlier_one_of_the_same_fault(fault_runs: Any, tmp_path: Path) -> None:
    path, read = tmp_path / "runs.jsonl", replace(OUTCOME, op="READ")
    fault_runs.add_runs([fault_runs.FaultRun.of_fault("2026-01-01", MACHINE, fault) for fault in (OUTCOME, read)], path)
    fault_runs.add_runs([fault_runs.FaultRun.of_fault(DATE, MACHINE, replace(OUTCOME, answer="PROC"))], path)
    assert [(run.date, run.op, run.found["said"]) for run in fault_runs.read_runs(path)] == [
        (DATE, "WRITE", "PROC"),
        ("2026-01-01", "READ", "nixlRemoteDisconnectError"),
    ]


@pytest.mark.parametrize("line", ["{", "{}", '{"date": 1}'])
def test_a_line_of_another_form_is_named(fault_runs: Any, tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1: "):
        fault_runs.read_runs(path)


def test_the_records_are_of_known_faults(fault_runs: Any) -> None:
    for run in fault_runs.read_runs():
        assert run.id in (KINDS if run.misuse else FAULTS)
        assert run.nixl in fault_runs.RELEASES


def test_every_fault_is_recorded_with_every_release(fault_runs: Any) -> None:
    runs = fault_runs.read_runs()
    # LIBFABRIC of 1.5.1 needs a libfabric that is built from source, which was not done again for this one.
    missing = ["1.5.1 LIBFABRIC  True released-in-flight 2"]
    assert fault_runs.missing_runs(runs, FAULTS) == missing
    remainder = [
        run
        for run in runs
        if (run.id, run.op, run.backend, run.nixl) != ("target-killed", "READ", "LIBFABRIC", "1.5.1")
    ]
    assert fault_runs.missing_runs(remainder, FAULTS) == ["1.5.1 LIBFABRIC  False target-killed 1", *missing]


def test_rows_that_differ_only_in_backend_and_times_are_one(fault_runs: Any) -> None:
    quick, slow, silent = ["told in 0.02 s"] * 4, ["told in 0.50 s"] * 4, ["**not told**"] * 4
    first, second, third = fault_runs.BACKENDS.values()
    merged = fault_runs.merged_rows([(first, quick, "retry"), (second, slow, "retry"), (third, silent, "wait")])
    assert merged == [[f"{first}, {second}", *slow, "retry"], [third, *silent, "wait"]]
    merged = fault_runs.merged_rows((name, quick, "retry") for name in (first, second, third))
    assert merged == [["all", *quick, "retry"]]
    assert len(fault_runs.merged_rows([(first, quick, "retry"), (second, quick, "wait")])) == 2


@pytest.mark.long
def test_the_script_records_what_the_suite_sees(fault_runs: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    script = [sys.executable, "docs/record_faults.py", "--records", str(path), "--nixl-backend=UCX"]
    done = subprocess.run(
        [*script, "--nixl-op=WRITE", "-k", "twice or target_died"], cwd=ROOT, env=environment(), capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = fault_runs.read_runs(path)
    assert done.stdout.splitlines()[-1] == f"{len(results)} records were added to {path}"
    killed = {(run.transports, run.op): run.cell for run in results if run.id == "target-killed"}
    assert set(killed) == {("", "WRITE"), ("tcp", "WRITE")}
    assert all("told in" in cell and "nixlRemoteDisconnectError" in cell for cell in killed.values())
    assert {run.cell for run in results if run.id == "duplicate-descriptor"} == {"**SIGSEGV**"}
