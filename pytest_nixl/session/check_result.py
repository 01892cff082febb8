# SPDX-License-Identifier: Apache-2.0
"""The result of a check, from pytest's report of its test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.strict import printable
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.missed_deadline import LESS_TO_DO, late_because
from pytest_nixl.session.outcome import JUDGEMENT, check_of, is_own
from pytest_nixl.session.repeat_command import repeat_command
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run
from pytest_nixl.session.suites import suite_of


def add_result(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Shorten the failure in a report, and add the result of the check to the report and to the test's properties.

    :param report: the report of setup, call or teardown, which is changed in place.
    """
    run = Run.of(item.config)
    if call.excinfo is not None:
        gate = run.usable and run.settings.gate
        required = run.usable and check_of(item) in load_profile(run.settings.profile).required
        _shorten_failure(report, item, call.excinfo, gate=gate, required=required)
    _hide_secrets(report, item.config, run.hide)
    result = _result_of(run, item, call, report)
    if result is None:
        return
    result = replace(result, reason=printable(run.hide(result.reason)), remedy=printable(run.hide(result.remedy)))
    if report.failed and isinstance(report.longrepr, str):
        report.longrepr += f"\nrepeat: {result.repeat}"
    vars(report)["nixl_result"] = result
    item.user_properties.extend(result.properties())
    if run.usable and run.settings.image:
        item.user_properties.append(("nixl_image", run.settings.image))


def _hide_secrets(report: pytest.TestReport, config: pytest.Config, hide: Callable[[str], str]) -> None:
    """Hide secrets in all texts of a report: a traceback has arguments and variables, and a program may print one.

    The control characters of a failure are escaped. What a test printed keeps its colours.
    """
    if report.longrepr is not None:  # pytest gives its representation of an exception as plain data, and takes it back
        plain = config.hook.pytest_report_to_serializable(config=config, report=report)
        plain["longrepr"] = _hidden(plain["longrepr"], lambda text: printable(hide(text)))
        report.longrepr = config.hook.pytest_report_from_serializable(config=config, data=plain).longrepr
    report.sections = [(name, hide(text)) for name, text in report.sections]


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_hidden(each, hide) for each in value)
    if isinstance(value, dict):
        return {name: _hidden(each, hide) for name, each in value.items()}
    return value


def _result_of(run: Run, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Result | None:
    """Return the result of a check after its call, or after a failure or skip in its setup or teardown; else None."""
    check = check_of(item)
    if check is None or (report.when != "call" and report.passed):
        return None
    judgement = _judgement(item, call, report)
    row = row_of(item)
    return replace(
        run.recorder.begun(item.nodeid),
        check=check,
        verdict=judgement.verdict,
        reason=judgement.reason,
        remedy=judgement.remedy,
        row=row,
        repeat=repeat_command(item, row),
        finding=judgement.finding,
        known_limit=judgement.known_limit,
    )


def _judgement(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Judgement:
    error = call.excinfo.value if call.excinfo is not None else None
    concluded = item.stash.get(JUDGEMENT, None)
    if concluded is not None and (error is None or isinstance(error, (pytest.fail.Exception, pytest.skip.Exception))):
        return concluded
    if isinstance(error, NotApplicableError):
        return Judgement(Verdict.NOT_APPLICABLE, error.reason, error.remedy)
    if isinstance(error, NixlPluginError) and (busy := late_because(item, error)):
        verdict = Verdict.WARN if is_own(item) else Verdict.INCONCLUSIVE
        return Judgement(verdict, f"{error.reason}; {busy}", LESS_TO_DO)
    if report.skipped:
        return Judgement(Verdict.NOT_APPLICABLE, _skip_reason(report))
    if report.passed:
        return Judgement(Verdict.PASS, "")
    if isinstance(error, FindingError):
        return Judgement(Verdict.FAIL, error.reason, error.remedy, error.finding)
    if isinstance(error, NixlPluginError):
        return Judgement(Verdict.ERROR, error.reason, error.remedy)
    kind = Verdict.FAIL if isinstance(error, (AssertionError, pytest.fail.Exception)) else Verdict.ERROR
    return Judgement(kind, _first_line(error))


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, (AssertionError, pytest.fail.Exception)) else f"{type(error).__name__}: "
    return f"{name}{text[0] if text else type(error).__name__}"


def _shorten_failure(
    report: pytest.TestReport,
    item: pytest.Item,
    excinfo: pytest.ExceptionInfo[BaseException],
    *,
    gate: bool,
    required: bool,
) -> None:
    """Replace the traceback in a report by the message if the error or verdict is the plugin's; skip if not applicable.

    The failure of a user's own test keeps the lines of the test.

    A missed deadline on a busy host decides nothing, so the test is skipped. With the gate, only a check of pytest-nixl
    itself is skipped for that.

    :param report: the report, which is changed in place.
    :param gate: whether ``--nixl-gate`` is given.
    :param required: whether the profile requires the check.
    """
    error = excinfo.value
    path, line, _ = item.location
    busy = late_because(item, error)
    if isinstance(error, NotApplicableError) and not (gate and required):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {error.reason}")
    elif busy and (is_own(item) or not gate):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {error}; {busy}")
    elif isinstance(error, NixlPluginError) and suite_of(item.path) is None and report.when == "call":
        report.longrepr = _own_lines(item, excinfo, error)
    elif isinstance(error, NixlPluginError) or (isinstance(error, pytest.fail.Exception) and JUDGEMENT in item.stash):
        report.longrepr = str(error)


def _own_lines(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException], error: NixlPluginError) -> Any:
    """Return the failure of a user's test as pytest shows it with ``--tb``, without the lines of this package."""
    package = Path(__file__).parents[1]

    def own(found: pytest.ExceptionInfo[BaseException]) -> Any:
        whole = found.traceback.cut(path=item.path)
        kept = whole.filter(lambda entry: package not in Path(entry.path).parents)
        return kept or whole

    style = item.config.getoption("tbstyle", "auto")
    shown = excinfo.getrepr(style="short" if style in ("auto", "line", "no") else style, tbfilter=own, chain=False)
    crash = getattr(shown, "reprcrash", None)
    if crash is not None:  # the line and the sentence in pytest's summary and in JUnit XML
        last = own(excinfo)[-1]
        crash.path, crash.lineno, crash.message = str(last.path), last.lineno + 1, error.reason
    return shown
