# SPDX-License-Identifier: Apache-2.0
"""A run that ends early is INTERRUPTED: it never passes, and it writes reports that show this."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.cli_run import BANDWIDTH, environment, junit_suite, profile, run
from helpers.pytester_run import run_pytest
from helpers.records import KEY, record, write
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.cli import main
from pytest_nixl.core.units import KIB
from pytest_nixl.model.conclusion import Conclusion, summary_line, verdict_fields
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Outcome, Verdict
from pytest_nixl.store.store import Store

pytestmark = pytest.mark.long

GATE = "--nixl-gate"

#: A plugin that ends the run when the third test starts.
ENDS = """
import os, signal, time, pytest

HOW = os.environ["HOW"]
if HOW.startswith("SIG"):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
started = []

def pytest_runtest_setup(item):
    started.append(item.nodeid)
    if len(started) != 3:
        return
    if HOW in ("SIGINT", "SIGTERM", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, HOW))
        time.sleep(30)
    if HOW == "exit":
        pytest.exit("that is enough", returncode=0)
    if HOW == "stop":
        item.session.shouldstop = "the operator wants it"
    if HOW == "fail":
        assert False, "planted"

def pytest_runtest_logstart(nodeid, location):
    if HOW == "crash" and len(started) == 2:
        raise RuntimeError("planted")

def pytest_sessionfinish(session):
    if HOW == "late crash":
        raise RuntimeError("planted")
"""

TEN = """
import pytest

@pytest.mark.nixl_check("ten")
@pytest.mark.parametrize("number", range(10))
def test_ten(number):
    pass
"""


@dataclass(frozen=True)
class Ended:
    """A run that was ended, and its outputs."""

    code: int
    output: str
    folder: Path

    @property
    def last_line(self) -> str:
        return self.output.splitlines()[-1]

    @property
    def page_verdict(self) -> str:
        match = re.search(r"<strong>([^<]*)</strong>", (self.folder / "r.html").read_text())
        assert match is not None
        return match[1]

    @property
    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families((self.folder / "r.prom").read_text())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    @property
    def junit(self) -> ElementTree.Element:
        return junit_suite(self.folder / "r.xml")


@pytest.fixture
def end_run(pytester: pytest.Pytester) -> Callable[..., Ended]:
    """Run ten checks, or others, and end the run when the third one starts."""

    def end(how: str, *arguments: str) -> Ended:
        folder = pytester.path
        (folder / "ends_runs.py").write_text(ENDS)
        (folder / "test_ten.py").write_text(TEN)
        tests = [] if any(argument.startswith("suites/") for argument in arguments) else [str(folder / "test_ten.py")]
        options = ("-p", "ends_runs", *tests, f"--nixl-report={folder}/r.html,{folder}/r.prom",
                   f"--junit-xml={folder}/r.xml", *arguments)  # fmt: skip
        if how.startswith("SIG"):
            path = ":".join(filter(None, (str(folder), environment().get("PYTHONPATH", ""))))
            done = run(*options, env={"HOW": how, "PYTHONPATH": path})
            return Ended(done.code, done.output, folder)
        pytester.syspathinsert(folder)
        result = run_pytest(pytester, *options, env={"HOW": how}, in_process=True)
        return Ended(int(result.ret), "\n".join(result.outlines), folder)

    return end


@pytest.mark.parametrize(
    ("how", "arguments", "code", "reason", "failed"),
    [
        ("SIGINT", (GATE,), 2, "Ctrl-C (SIGINT)", False),
        # The last case shows that a run without the gate says so.
        pytest.param("SIGINT", (), 2, "Ctrl-C (SIGINT)", False, marks=pytest.mark.whole),
        # test_red_runs.py has SIGTERM.
        ("SIGHUP", (GATE,), 129, "ended by SIGHUP", False),
        ("exit", (GATE,), 2, "that is enough", False),
        ("crash", (GATE,), 3, "pytest or one of its plugins failed: RuntimeError: planted", False),
        ("fail", (GATE, "-x"), 1, "stopping after 1 failures", True),
        ("fail", ("--maxfail=1",), 1, "stopping after 1 failures", True),
    ],
)
def test_a_run_that_ends_early_is_interrupted_and_writes_its_reports(
    end_run: Callable[..., Ended], how: str, arguments: tuple[str, ...], code: int, reason: str, failed: bool
) -> None:
    ended = end_run(how, *arguments)
    ran = 3 if failed else 2
    text = f"{'FAIL, ' if failed else ''}INTERRUPTED after {ran} of 10 checks: {reason}"
    kind = "gate" if GATE in arguments else "verdict"
    assert ended.code == code, ended.output
    assert ended.last_line.startswith(f"NIXL {kind}: {text} (2 PASS"), ended.output
    assert not re.search(r"^NIXL (gate|verdict): PASS", ended.output, re.M)
    assert ended.page_verdict == text
    assert ended.metrics["nixl_run_passed"] == 0
    assert ended.metrics["nixl_run_interrupted"] == 1
    suite = ended.junit
    # One case for the run, and one for the test that failed in setup or for pytest's internal error.
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("1", "1" if failed or how == "crash" else "0")
    assert suite.find("testcase[@classname='nixl_run'][@name='interrupted']/failure") is not None


def test_a_plugin_that_stops_the_run_interrupts_it(end_run: Callable[..., Ended]) -> None:
    ended = end_run("stop", GATE)
    assert ended.code != 0
    assert "NIXL gate: INTERRUPTED after 3 of 10 checks: the operator wants it" in ended.last_line


def test_a_crash_while_reports_are_written_is_not_a_pass(end_run: Callable[..., Ended]) -> None:
    ended = end_run("late crash")
    assert ended.code != 0
    text = "INTERRUPTED after 10 of 10 checks: pytest or one of its plugins failed: RuntimeError: planted"
    assert ended.page_verdict == text
    assert f"NIXL verdict: {text} (10 PASS; 0 rows measured)" in ended.output


def test_a_failure_of_the_last_check_is_not_an_interruption(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_last=TEN.replace("    pass", "    assert number < 9"))
    done = run_pytest(pytester, "-x", in_process=True)
    assert "NIXL verdict: FAIL (9 PASS, 1 FAIL; 0 rows measured)" in done.outlines
    assert "INTERRUPTED" not in done.stdout.str()
    assert done.ret == 1


@pytest.mark.parametrize("option", ["--fixtures", "--collect-only", "--setup-plan"])
def test_a_command_that_runs_no_test_is_not_interrupted(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile(test_ten=TEN)
    done = run_pytest(pytester, option, in_process=True)
    assert "INTERRUPTED" not in done.stdout.str()
    assert done.ret == 0


def test_the_record_of_an_interrupted_run_is_stored_but_refused_as_a_baseline(
    end_run: Callable[..., Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    any_speed = profile(tmp_path / "p.toml", "floor = '1 KB/s'")
    ended = end_run(
        "SIGINT", BANDWIDTH, GATE, "--nixl-op=WRITE", "--nixl-blocks=4KiB..64KiB", f"--nixl-store={tmp_path}/store",
        f"--nixl-profile={any_speed}",
    )  # fmt: skip
    assert ended.code == 2
    assert "NIXL gate: INTERRUPTED after 2 of 5 checks: Ctrl-C (SIGINT) (2 PASS; 2 rows measured)" in ended.last_line
    (stored,), skipped = Store(tmp_path / "store").runs()
    assert skipped == []
    assert [key.block for key in stored.rows] == [4 * KIB, 8 * KIB]
    assert stored.interrupted == "INTERRUPTED after 2 of 5 checks: Ctrl-C (SIGINT)"

    for baseline, arguments in (
        (
            stored.source,
            "cannot be a baseline (INTERRUPTED after 2 of 5 checks: Ctrl-C (SIGINT)): expected the record",
        ),
        (str(tmp_path / "store"), "has no record; left out: "),
    ):
        refused = run(BANDWIDTH, f"--nixl-baseline={baseline}")
        assert refused.code == pytest.ExitCode.USAGE_ERROR
        assert arguments in refused.output
    assert main(["report", stored.source, str(tmp_path / "again.html")]) == 0
    capsys.readouterr()
    assert f"<strong>{stored.interrupted}</strong>" in (tmp_path / "again.html").read_text()


def test_an_interrupted_run_of_a_store_is_left_out_as_a_baseline_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = record("a:1", {KEY: [1.0] * 6}), record("a:1", {KEY: [0.1] * 6}, week=1)
    broken["nixl"]["interrupted"] = "INTERRUPTED after 1 of 2 checks: Ctrl-C (SIGINT)"
    now = write(tmp_path / "now.json", record("a:2", {KEY: [1.0] * 6}, week=2))
    store = tmp_path / "store"
    store.mkdir()
    write(store / "whole.json", whole)
    path = write(store / "broken.json", broken)
    assert main(["compare", "a:1", str(now), "--store", str(store)]) == 0
    assert f"left out: {path} cannot be a baseline (INTERRUPTED after 1 of 2 checks" in capsys.readouterr().out
    assert main(["compare", str(store / "whole.json"), str(path)]) == 1
    assert "INTERRUPTED after 1 of 2 checks" in capsys.readouterr().out


PASSED, FAILED, DOUBTED = (Result("x", "x", verdict, "r", "m") for verdict in
                           (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE))  # fmt: skip
SKIPPED, MISSED = (Result("x", "x", verdict) for verdict in (Verdict.NOT_APPLICABLE, Verdict.MISSING))
EARLY = "INTERRUPTED after 1 of 2 checks: Ctrl-C"


@pytest.mark.parametrize(
    ("results", "gate", "interrupted", "verdict", "text", "outcome"),
    [
        ((PASSED,), True, "", "PASS", "PASS", Outcome.PASS),
        ((PASSED, DOUBTED), False, "", "PASS", "PASS, with warnings", Outcome.WARN),
        ((PASSED, DOUBTED), True, "", "FAIL", "FAIL", Outcome.FAIL),
        ((SKIPPED, DOUBTED), False, "", "INCONCLUSIVE", "INCONCLUSIVE", Outcome.WARN),
        ((DOUBTED,), True, "", "FAIL", "FAIL", Outcome.FAIL),
        ((DOUBTED,), False, EARLY, "INTERRUPTED", EARLY, Outcome.FAIL),
        ((PASSED, FAILED), False, "", "FAIL", "FAIL", Outcome.FAIL),
        ((PASSED,), True, EARLY, "INTERRUPTED", EARLY, Outcome.FAIL),
        ((PASSED, DOUBTED), False, EARLY, "INTERRUPTED", EARLY, Outcome.FAIL),
        ((PASSED, FAILED), False, EARLY, "FAIL", f"FAIL, {EARLY}", Outcome.FAIL),
        ((), False, EARLY, "INTERRUPTED", EARLY, Outcome.FAIL),
        ((SKIPPED, SKIPPED), False, "", "NOTHING CHECKED", "NOTHING CHECKED", Outcome.WARN),
        ((SKIPPED, MISSED), False, "", "NOTHING CHECKED", "NOTHING CHECKED", Outcome.FAIL),
        ((SKIPPED, MISSED), True, "", "FAIL", "FAIL", Outcome.FAIL),
        ((SKIPPED, PASSED), False, "", "PASS", "PASS", Outcome.PASS),
        ((SKIPPED,), False, EARLY, "INTERRUPTED", EARLY, Outcome.FAIL),
    ],
)
def test_a_run_has_one_verdict(
    results: tuple[Result, ...], gate: bool, interrupted: str, verdict: str, text: str, outcome: Outcome
) -> None:
    conclusion = Conclusion.of(results, gate=gate, interrupted=interrupted)
    assert (conclusion.verdict, str(conclusion), conclusion.outcome) == (verdict, text, outcome)
    assert summary_line(results, gate=gate, interrupted=interrupted).text.startswith(
        f"NIXL {'gate' if gate else 'verdict'}: {text} ("
    )
    document = json.loads(json.dumps(verdict_fields(results, gate=gate, interrupted=interrupted)))
    assert (document["verdict"], document["interrupted"]) == (verdict, interrupted)
    assert len(document["failing"]) == sum(
        result in (FAILED, MISSED) or (gate and result is DOUBTED) for result in results
    )


#: A module of tests at whose import a signal comes, and one that would be collected after it.
SIGNALLED = """
import os, signal, time, pytest

try:
    os.kill(os.getpid(), signal.NAME)
    time.sleep(30)
except SWALLOWED:
    pass

@pytest.mark.nixl_check("mine")
def test_mine():
    pass
"""


GO_ON = ("--continue-on-collection-errors", GATE)


@pytest.mark.parametrize(
    ("name", "more", "swallowed"),  # each two of them together, once
    [("SIGTERM", (), "()"), ("SIGTERM", GO_ON, "BaseException"), ("SIGHUP", (), "BaseException"),
     ("SIGHUP", GO_ON, "()")],
)  # fmt: skip
def test_a_signal_during_collection_ends_the_run_with_its_name(
    tmp_path: Path, name: str, more: tuple[str, ...], swallowed: str
) -> None:
    text = SIGNALLED.replace("NAME", name).replace("SWALLOWED", swallowed)
    (tmp_path / "test_a.py").write_text(text)
    (tmp_path / "test_b.py").write_text(f"open(__file__ + '.imported', 'x').close()\n{TEN}")
    (tmp_path / "ends_runs.py").write_text(ENDS)
    path = ":".join(filter(None, (str(tmp_path), environment().get("PYTHONPATH", ""))))
    done = run("-p", "ends_runs", str(tmp_path), "--nixl-timeout=60s", *more, env={"HOW": "", "PYTHONPATH": path})
    assert done.code == 128 + getattr(signal, name), done.output
    assert f"ended by {name}" in done.output.splitlines()[-1]
    assert not (tmp_path / "test_b.py.imported").exists(), "the files after it are not imported"
    for never in ("error during collection", "INTERNALERROR", "passed"):
        assert never not in done.output


#: A conftest that sends Ctrl-C a second time, at one of the places where a run ends.
AGAIN = """
import os, signal, time, pytest

signal.signal(signal.SIGINT, signal.default_int_handler)

def again(place):
    if os.environ["WHERE"] == place:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

@pytest.fixture(scope="session", autouse=True)
def of_the_session():
    yield
    again("session fixture")

@pytest.fixture
def of_the_test():
    yield
    again("fixture")

def pytest_keyboard_interrupt():
    again("interrupt hook")

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    again("finish")

def pytest_terminal_summary():
    again("summary")

def pytest_unconfigure():
    again("unconfigure")
"""
FIRST = """
import os, signal, time, pytest

@pytest.mark.nixl_check("mine")
def test_mine(of_the_test):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


@pytest.mark.parametrize("where", ["session fixture", "fixture", "interrupt hook", "finish", "summary", "unconfigure"])
def test_a_second_ctrl_c_changes_neither_cause_nor_exit_code(tmp_path: Path, where: str) -> None:
    (tmp_path / "conftest.py").write_text(AGAIN)
    (tmp_path / "test_first.py").write_text(FIRST)
    report = tmp_path / "r.json"
    done = run(str(tmp_path), GATE, f"--nixl-report={report}", env={"WHERE": where})
    cause = "INTERRUPTED after 0 of 1 check: Ctrl-C (SIGINT)"
    assert done.code == 2, done.output
    assert done.output.splitlines()[-1].startswith(f"NIXL gate: {cause}")
    assert done.output.count("NIXL gate: ") == 2, "in the report, and as the last line"
    assert "Traceback" not in done.output
    assert (json.loads(report.read_text())["interrupted"], json.loads(report.read_text())["exit_code"]) == (cause, 2)
