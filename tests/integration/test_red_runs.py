# SPDX-License-Identifier: Apache-2.0
"""Every run that fails is red in everything that people and programs read, whatever it was that failed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, Finished, junit_suite, profile, run, undisturbed
from helpers.records import record
from helpers.report_schemas import read_verdict_file
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.store.provenance import host

pytestmark = pytest.mark.long

CHECKS = """
import os, signal, time
import pytest

@pytest.mark.nixl_check("passes")
def test_passes():
    pass

@pytest.mark.nixl_check("ends")
def test_ends():
    how = os.environ["HOW"]
    if how in ("SIGINT", "SIGTERM"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(30)

def test_of_a_user():
    assert os.environ["HOW"] != "user"
"""
#: A latency bound instead of a floor, because contention keeps a row below its floor from failing.
IMPOSSIBLE = "p99 = '1 ns'"
ONE_ROW = (BANDWIDTH, "--nixl-blocks=64KiB", "--nixl-op=WRITE", "--nixl-duration=20ms")


@dataclass(frozen=True)
class RedRun:
    """A kind of run that fails, and what its outputs say.

    :param start: makes the arguments of the run from a folder for its files.
    :param code: pytest's exit code.
    :param verdict: the first word of the verdict.
    :param named: words that verdict.json and the JUnit file have, and ``shown`` those of page and summary.
    :param how: the value of the variable HOW of the checks above.
    """

    start: Callable[[Path], Sequence[str]]
    code: int
    verdict: str
    named: str
    shown: str
    how: str = ""


def checks(*arguments: str) -> Callable[[Path], Sequence[str]]:
    """Return what makes a run of the checks above."""
    return lambda folder: (str(folder / "test_checks.py"), *arguments)


def slow_row(folder: Path) -> Sequence[str]:
    return (*ONE_ROW, f"--nixl-profile={profile(folder / 'p.toml', IMPOSSIBLE)}")


def slower_row(folder: Path) -> Sequence[str]:
    before = record("image:0", {"UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1": [1e5] * 7})
    before["nixl"]["provenance"]["host"] = host({})
    (folder / "before.json").write_text(json.dumps(before))
    return (*ONE_ROW, f"--nixl-baseline={folder}/before.json")


def file_with_an_error(folder: Path) -> Sequence[str]:
    (folder / "test_broken.py").write_text("import a_module_that_is_missing\n")
    both = (str(folder / "test_checks.py"), str(folder / "test_broken.py"))
    return (*both, "--nixl-op=WRITE", "--continue-on-collection-errors")


UNRELATED = "a test failed that is not a NIXL check"
RED: dict[str, RedRun] = {
    "a row fails": RedRun(slow_row, 1, "FAIL", "bandwidth", "p99 latency"),
    "a check is missing": RedRun(
        checks(BANDWIDTH, "-k", "test_checks", "--nixl-gate"), 1, "FAIL", "MISSING", "MISSING"
    ),
    "a row is slower than before": RedRun(slower_row, 1, "FAIL", "REGRESSED", "REGRESSED"),
    "Ctrl-C": RedRun(checks("--nixl-op=WRITE"), 2, "INTERRUPTED", "INTERRUPTED", "Ctrl-C", "SIGINT"),
    "SIGTERM": RedRun(checks("--nixl-op=WRITE"), 143, "INTERRUPTED", "INTERRUPTED", "SIGTERM", "SIGTERM"),
    "the gate is refused": RedRun(
        checks("--nixl-gate", "-p", "no:benchmark"), 4, "REFUSED", "no:benchmark", "no:benchmark"
    ),
    "an option is refused": RedRun(checks("--nixl-op=SIDEWAYS"), 4, "REFUSED", "SIDEWAYS", "SIDEWAYS"),
    "an agent cannot be made": RedRun(
        checks("--nixl-backend-params=UCX:nosuchoption=1"), 4, "REFUSED", "nosuchoption", "nosuchoption"
    ),
    "pytest refuses": RedRun(
        lambda folder: (str(folder / "absent.py"), "--nixl-gate"), 4, "REFUSED", "absent.py", "absent.py"
    ),
    "no test is selected": RedRun(
        checks("-k", "nothing", "--nixl-op=WRITE"), 5, "FAIL", "no test was collected", "no test was collected"
    ),
    "a test of the user fails": RedRun(checks("--nixl-op=WRITE"), 1, "FAIL", "test_of_a_user", UNRELATED, "user"),
    "a file has an error": RedRun(file_with_an_error, 1, "FAIL", "test_broken", UNRELATED),
}


def options(folder: Path) -> list[str]:
    """Return the options for every report."""
    names = ("verdict.json", "page.html", "metrics.prom")
    return [f"--nixl-report={','.join(str(folder / name) for name in names)}", f"--junit-xml={folder}/junit.xml"]


def variables(folder: Path, how: str) -> Mapping[str, str]:
    summary = str(folder / "summary.md")
    return {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": summary, "HOW": how}


def assert_red(folder: Path, done: Finished, kind: RedRun) -> None:
    """Read every output of a run."""
    assert done.code == kind.code, done.output
    verdicts = re.findall(r"^NIXL (?:verdict|gate): (\w+)", done.output, re.MULTILINE)
    if kind.verdict == "REFUSED":
        assert done.output.strip().splitlines()[-1].startswith("ERROR: "), done.output
        assert kind.shown in done.output
    elif kind.code != pytest.ExitCode.NO_TESTS_COLLECTED:
        assert set(verdicts) == {kind.verdict}, done.output
    results = read_verdict_file(folder)
    assert (results["verdict"], results["exit_code"]) == (kind.verdict, kind.code)
    assert kind.named in json.dumps(results)
    suite = junit_suite(folder / "junit.xml")
    assert int(suite.attrib["failures"]) + int(suite.attrib["errors"]) >= 1
    assert kind.named in (folder / "junit.xml").read_text()
    page = (folder / "page.html").read_text()
    assert '<div class="verdict fail"><strong>' in page
    assert f"<strong>{kind.verdict}" in page
    assert kind.shown in page
    summary = (folder / "summary.md").read_text()
    assert re.match(rf"## NIXL (verdict|gate): {kind.verdict}\b", summary)
    families = text_string_to_metric_families((folder / "metrics.prom").read_text())
    assert [sample.value for family in families for sample in family.samples if sample.name == "nixl_run_passed"] == [0]


@pytest.mark.parametrize("name", RED)
def test_a_red_run_is_red_everywhere(tmp_path: Path, name: str) -> None:
    kind = RED[name]
    (tmp_path / "test_checks.py").write_text(CHECKS)
    loud = "no:benchmark" in kind.named
    done = run(*kind.start(tmp_path), *options(tmp_path), quiet=not loud, **undisturbed(variables(tmp_path, kind.how)))
    assert_red(tmp_path, done, kind)
