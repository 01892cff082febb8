# SPDX-License-Identifier: Apache-2.0
"""Every way in which a conftest.py, a plugin, a test or a signal can end or falsify a run, and what must come of it.

A run has two checks. ``good`` passes. ``mine`` passes where a hook ends the run, and fails where a plugin falsifies it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT, environment, execute
from helpers.pytester_run import PLUGIN, run_pytest

from pytest_nixl.session.ending import ENDING, read_ending

#: What ends a run, as a statement.
ENDS = {
    "exit-0": "pytest.exit('planted', returncode=0)",
    "exit": "pytest.exit('planted')",
    "exit-7": "pytest.exit('planted', returncode=7)",
    "SystemExit-0": "raise SystemExit(0)",
    "SystemExit-7": "raise SystemExit(7)",
    "error": "raise RuntimeError('planted')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "skip": "pytest.skip('planted', allow_module_level=True)",
    "xfail": "pytest.xfail('planted')",
    "fail": "pytest.fail('planted')",
    "os._exit-0": "os._exit(0)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
}
#: Where it ends: hooks of a conftest.py, in the order in which pytest calls them, and parts of a test.
HOOKS = {
    "import": "",
    "configure": "def pytest_configure():",
    "sessionstart": "def pytest_sessionstart():",
    "itemcollected": "def pytest_itemcollected(item):",
    "modifyitems": "def pytest_collection_modifyitems(items):",
    "collection_finish": "def pytest_collection_finish():",
    "runtestloop": "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop():",
    "runtest_protocol": "def pytest_runtest_protocol(item):",
    "runtest_setup": "def pytest_runtest_setup(item):",
    "fixture": "@pytest.fixture\ndef planted():",
    "pyfunc_call": "def pytest_pyfunc_call(pyfuncitem):",
    "body": "def planted():",
    "makereport": "def pytest_runtest_makereport(item):",
    "logreport": "def pytest_runtest_logreport(report):",
    "teardown": "@pytest.fixture\ndef planted():\n    yield",
    "runtest_teardown": "def pytest_runtest_teardown(item):",
    "sessionfinish": "def pytest_sessionfinish(session):",
    "terminal_summary": "def pytest_terminal_summary(terminalreporter):",
    "unconfigure": "def pytest_unconfigure():",
}
#: Where a skip is the test's own: its check is NOT-APPLICABLE, or has passed, and the run as good as its other checks.
_SKIPS = {"runtest_setup", "fixture", "pyfunc_call", "body", "teardown", "runtest_teardown"}
#: Where a run has been judged already, and its reports are written.
_JUDGED = {"sessionfinish", "terminal_summary", "unconfigure"}
#: Where our part of pytest does not run yet, or not any more.
_OUTSIDE = {"import", "configure", "sessionstart", "unconfigure"}
#: What leaves no process that could write a file, and what leaves none while reports are written.
_AT_ONCE = {"os._exit-0", "SIGKILL"}
_AT_ONCE_WHEN_JUDGED = _AT_ONCE | {"SIGTERM", "SIGHUP"}
#: Ends for which pytest itself prints no INTERNALERROR.
_IN_ORDER = {"exit-0", "exit", "exit-7", "Ctrl-C", "SIGTERM", "SIGHUP", "SIGINT"}

#: Options with which pytest runs no test, or without a part of itself or of us.
OPTIONS = (
    "--setup-only", "--setup-plan", "--collect-only", "--help", "--version", "--fixtures", "--markers",
    "-k no_such_test", "-m no_such_mark", "--ignore=test_checks.py", "--runxfail", "--maxfail=1", "--exitfirst",
    "--stepwise", "--last-failed", "-p no:terminal", "-p no:skipping", "-p no:nixl-results", "-p no:nixl-completeness",
    "-p no:nixl-levels", "-p no:nixl-preconditions", "-p no:junitxml", "--continue-on-collection-errors", "-p no:nixl",
)  # fmt: skip
#: Where and how a run of pytest-xdist ends: in the controller, in a worker, or in both.
PARALLEL = tuple(
    itertools.product(
        ("sessionstart", "modifyitems", "runtest_setup", "body", "logreport", "sessionfinish"),
        ("exit-0", "SystemExit-0", "error", "skip", "os._exit-0", "SIGTERM"),
    )
)
#: Plugins that make a failed check or its run look good, as the text of a conftest.py. With ``True``: an own skip.
FALSE = {
    "pyfunc_call": "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem): return True",
    "runtest": "def pytest_collection_modifyitems(items):\n    for item in items: item.runtest = lambda: None",
    "obj": "def pytest_collection_modifyitems(items):\n    for item in items: item.obj = lambda: None",
    "obj-late": "def pytest_runtest_setup(item): item.obj = lambda: None",
    "protocol": "def pytest_runtest_protocol(item): return True",
    "loop": "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop(): return True",
    "no-items": "def pytest_collection_modifyitems(items): items.clear()",
    "no-item": "@pytest.hookimpl(trylast=True)\ndef pytest_collection_modifyitems(items): items[:] = items[:1]",
    "report-inner": """
        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome, report.longrepr = "passed", None
            return report
        """,
    "report-outer": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome, report.longrepr = "passed", None
            return report
        """,
    "report-skipped": """
        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome, report.longrepr = "skipped", ("a.py", 1, "Skipped: planted")
            return report
        """,
    "report-xfailed": """
        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome, report.wasxfail = "skipped", "planted"
            return report
        """,
    "logreport": "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_logreport(report): report.outcome = 'passed'",
    "xfail-mark": """
        def pytest_collection_modifyitems(items):
            for item in items: item.add_marker(pytest.mark.xfail)
        """,
    "xfail-late": "def pytest_runtest_setup(item): item.add_marker(pytest.mark.xfail(run=False))",
    "teardown-skip": "def pytest_runtest_teardown(item): pytest.skip('planted')",
    "exitstatus": "def pytest_sessionfinish(session): session.exitstatus = 0",
    "exitstatus-last": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_sessionfinish(session):
            yield
            session.exitstatus = 0
        """,
    "testsfailed": "def pytest_runtest_logfinish(nodeid, location): SESSION[0].testsfailed = 0\n"
    "SESSION = []\ndef pytest_sessionstart(session): SESSION.append(session)",
    "cmdline_main": "@pytest.hookimpl(tryfirst=True)\ndef pytest_cmdline_main(): return 0",
    "cmdline_main-outer": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_cmdline_main():
            yield
            return 0
        """,
    "unregistered": "def pytest_sessionstart(session):\n"
    "    manager = session.config.pluginmanager\n    manager.unregister(manager.get_plugin('nixl-results'))",
}

_CHECKS = """
import pytest

@pytest.mark.nixl_check("good")
def test_good():
    pass

@pytest.mark.nixl_check("mine")
def test_mine({fixture}):
    {body}
"""


@dataclass(frozen=True)
class Ending:
    """One run.

    :param where: a key of :data:`HOOKS`; empty: a plugin falsifies the run.
    :param end: a key of :data:`ENDS`, or of :data:`FALSE`.
    :param gate: whether ``--nixl-gate`` is given.
    :param parallel: whether pytest-xdist runs the tests.
    """

    where: str
    end: str
    gate: bool
    parallel: bool = False

    def __str__(self) -> str:
        options = f"{'gate' if self.gate else 'no-gate'}{'-xdist' if self.parallel else ''}"
        return f"{self.where or 'false'}-{self.end}-{options}"

    @property
    def may_pass(self) -> bool:
        """Whether exit code 0 is right: a test skipped itself, or all was judged before."""
        if self.where in _SKIPS:
            return self.end == "skip"
        if not self.where:
            return self.end == "no-item"  # as by -k: the last line names what was deselected
        return self.where == "unconfigure" and self.end in ("exit-0", "SystemExit-0", "os._exit-0")

    @property
    def leaves_verdict(self) -> bool:
        """Whether the run must leave a verdict file: it ended within our part of pytest, and not at once."""
        at_once = _AT_ONCE_WHEN_JUDGED if self.where in _JUDGED else _AT_ONCE
        return self.where in HOOKS.keys() - _OUTSIDE and self.end not in at_once

    def conftest(self) -> str:
        """Return the text of the conftest.py."""
        imports = "import os, pytest, signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it\n"
        if self.where == "option":
            return ""
        if not self.where:
            return imports + textwrap.dedent(FALSE[self.end])
        body = HOOKS[self.where]
        if not body:
            return imports + ENDS[self.end]
        item = re.search(r"\((\w*item)\)", body)
        mine = f"    if {item[1]}.name != 'test_mine': return\n" if item else ""
        return f"{imports}{body}\n{mine}    {ENDS[self.end]}\n"


def endings() -> list[Ending]:
    """Return every run: hooks, ends and false plugins with the gate, without it and in parallel; and options."""
    ended = itertools.product(HOOKS, ENDS)
    false = itertools.product([""], FALSE)
    return [
        *(Ending(where, end, gate) for where, end in (*ended, *false) for gate in (True, False)),
        *(Ending("option", option, gate=True) for option in OPTIONS),
        *(Ending(where, end, gate=False, parallel=True) for where, end in PARALLEL),
        *(Ending("", false, gate=False, parallel=True) for false in FALSE),
    ]


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    :param code: pytest's exit code, negative for a signal.
    :param accepted: the code that ``pytest-nixl run`` gives for it.
    :param verdict: its verdict file; None: it left none.
    """

    code: int
    accepted: int
    verdict: dict[str, Any] | None
    output: str


def run_ending(ending: Ending, folder: Path, pytester: pytest.Pytester | None = None) -> Ended:
    """Make a run in an empty folder.

    :param pytester: of this folder; None: in a process of its own, which the run may end.
    """
    (folder / "conftest.py").write_text(ending.conftest())
    body = "import conftest; conftest.planted()" if ending.where == "body" else "pass"
    fixture = "planted" if ending.where in ("fixture", "teardown") else ""
    fails = ending.where in ("", "option")
    (folder / "test_checks.py").write_text(_CHECKS.format(fixture=fixture, body="assert 0" if fails else body))
    options = [
        *(ending.end.split() if ending.where == "option" else []),
        *(["--nixl-gate"] if ending.gate else []),
        *(["-n", "1"] if ending.parallel else []),
    ]
    note, report = folder / "ending.json", folder / "verdict.json"
    arguments = [f"--basetemp={folder}/t", f"--nixl-report={report}", *options]
    if pytester is not None:
        done = run_pytest(pytester, *arguments, env={ENDING: str(note)}, in_process=True)
        code, text = int(done.ret), "\n".join([*done.outlines, *done.errlines])
    else:
        variables = environment(**{ENDING: str(note)}, PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
        with tempfile.TemporaryFile("w+") as output:
            argv = ["python", "-m", "pytest", *PLUGIN, *arguments]
            code = execute(argv, cwd=folder, env=variables, output=output, errors=output, timeout=300)
            output.seek(0)
            text = output.read()
    accepted = 1 if code == 0 and read_ending(note) != 0 else code
    return Ended(code, accepted, json.loads(report.read_text()) if report.exists() else None, text)


def violations(ending: Ending, ended: Ended) -> Iterator[str]:
    """Yield what is wrong with the end of a run."""
    if ended.accepted == 0 and not ending.may_pass:
        yield "exit code 0"
    if ended.code == 0 and ending.leaves_verdict and not ending.may_pass:
        yield "pytest's own exit code 0"
    if ended.accepted != 0 and ending.may_pass and ending.where != "unconfigure":
        yield f"exit code {ended.accepted}"
    if ended.verdict is None:
        if ending.leaves_verdict or ended.accepted == 0:
            yield "no verdict file"
        return
    verdict, noted = ended.verdict["verdict"], ended.verdict["exit_code"]
    if ended.accepted == 0 and (verdict != "PASS" or noted != 0):
        yield f"exit code 0, and the file says {verdict}, {noted}"
    if verdict == "PASS" and not ending.may_pass and (ending.leaves_verdict or ending.where not in _JUDGED):
        yield "the file says PASS"
    code = 128 - ended.code if ended.code < 0 else ended.code
    if ending.leaves_verdict and noted != code:
        yield f"exit code {ended.code}, and the file says {noted}"
    mine = [result["verdict"] for result in ended.verdict["results"] if result["check"] == "mine"]
    if not ending.where and not {"FAIL", "MISSING"}.issuperset(mine):
        yield f"the file says {mine} of the failed check"
    # pytest-xdist itself fails if a worker ends before its test.
    if "INTERNALERROR" in ended.output and ending.end in _IN_ORDER and not ending.parallel:
        yield "INTERNALERROR"
