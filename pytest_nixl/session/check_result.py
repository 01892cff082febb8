# SPDX-License-Identifier: Apache-2.0
"""The result of a check, from pytest's report of its test."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.core.cpu_contention import HostLoad
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.strict import printable
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.measure.transfer_proof import Prover, provable, steering_names
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import HOST
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.model.transfer_proof import TransferProof
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.given_options import given_options
from pytest_nixl.session.outcome import JUDGEMENT, check_of, is_own
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run
from pytest_nixl.session.selection import suite_of

#: Options that judge or write a whole run.
_LEFT_OUT = {"--nixl-gate", "--nixl-baseline", "--nixl-store", "--nixl-report", "--nixl-log-dir"}
#: The variable by which ranks that are started by hand find the etcd of rank 0.
_ADDRESS = "MASTER_ADDR"


def repeat_command(item: pytest.Item, row: RowKey | None) -> str:
    """Return the command that runs this test, or this row, again. Secrets are left out."""
    options = {flag: value for flag, value in given_options(item.config).items() if flag not in _LEFT_OUT}
    if row is None or row.kv or row.pattern or (row.walks and Run.of(item.config).settings.footprint is None):
        where = _suite(item)
        where[-1] += "".join(f"::{part}" for part in item.nodeid.split("::", 1)[1:])
    else:
        where = _suite(item)
        options |= {
            "--nixl-backend": row.plain_backend,
            "--nixl-op": row.op,
            "--nixl-memory": str(row.memory),
            "--nixl-blocks": str(row.block),
            "--nixl-batch": str(row.batch),
            "--nixl-depth": str(row.depth),
        }
        progress = Run.of(item.config).settings.progress_thread
        if len(progress) > 1 and not row.program:
            options["--nixl-progress-thread"] = "on" if ("progress-thread", "on") in row.variant else "off"
        if Run.of(item.config).in_cluster and row.pair[0] != row.pair[1]:
            options["--nixl-pairs"] = f"{row.pair[0]}:{row.pair[1]}"
    for option in OPTIONS:
        if option.secret:
            options.pop(option.flag, None)
    command = shlex.join(["pytest", *where, *(f"{flag}={value}" for flag, value in options.items())])
    return _on_every_rank(command, Run.of(item.config))


def _on_every_rank(command: str, run: Run) -> str:
    """Return a command for the ranks of this run: with what rank 0 needs, and in a comment how to start the others."""
    if not run.in_cluster:
        return command
    placement = run.placement
    if placement.by_launcher is not None:
        return f"{command}  # on all {placement.ranks} ranks, by {placement.by_launcher.launcher}"
    address = os.environ.get(_ADDRESS)
    if address and run.settings.etcd_listen:
        command = f"{_ADDRESS}={shlex.quote(address)} {command}"
    suffix = "the other rank" if placement.ranks == 2 else f"the other {placement.ranks - 1} ranks"
    numbered = "" if placement.rank is None else ", with its --nixl-rank"
    return f"{command}  # at the same time on {suffix}{numbered}, and with the same NIXL_GROUP_TOKEN on all"


def _suite(item: pytest.Item) -> list[str]:
    """Return the command-line arguments that select the suite of a test: its module if importable, else its file."""
    if item.config.getoption("pyargs"):
        module = getattr(item, "module", None)
        if module is not None and module.__name__.startswith("pytest_nixl."):
            return ["--pyargs", module.__name__]
    try:
        return [str(item.path.relative_to(item.config.invocation_params.dir))]
    except ValueError:
        return [str(item.path)]


#: What to do about a missed deadline on a busy host.
LESS_TO_DO = "stop other processes on this host, and run it again"

#: How pytest-timeout ends a test, and what to do then.
_BY_TIMEOUT = re.compile(r"Timeout \(?>.*pytest-timeout")
MORE_TIME = (
    "Give the test more time: --timeout=SECONDS of pytest-timeout, or its marker. If it then waits as long, see where "
    "in its traceback, and let --nixl-timeout end the calls of NIXL that wait."
)

#: A test may share the reading of one that began so many seconds before: a deadline is much longer.
_SHARED_SECONDS = 0.5
_LOAD = pytest.StashKey[HostLoad]()
_BUSY = pytest.StashKey[str]()


def watch_load(item: pytest.Item) -> None:
    """Begin to measure the CPU time that other processes use while a test runs."""
    latest = item.session.stash.get(_LOAD, None)
    if latest is None or latest.seconds > _SHARED_SECONDS:
        with contextlib.suppress(OSError):
            latest = item.session.stash[_LOAD] = HostLoad()
    if latest is not None:
        item.stash[_LOAD] = latest


def late_because(item: pytest.Item, error: BaseException | None) -> str:
    """Return which deadline was missed and what kept the host busy, if that is the whole error; else nothing."""
    if not isinstance(error, NixlPluginError) or not error.late or _LOAD not in item.stash:
        return ""
    if _BUSY not in item.stash:
        item.stash[_BUSY] = item.stash[_LOAD].words()
    busy = item.stash[_BUSY]
    return f"{error.reason}; {busy}" if busy else ""


#: Whether the function of a check was called, on its item; missing: nothing can tell.
_CALLED = pytest.StashKey[bool]()
_NOT_CALLED = Judgement(
    Verdict.MISSING,
    "the check did not run: another plugin or a conftest.py let it pass without calling its function",
    "start pytest without it (-p no:NAME): it has a hook such as pytest_pyfunc_call or pytest_runtest_call",
)


def watch_call(item: pytest.Item) -> None:
    """Note when the function of a check is called, so that a check that did not run does not pass."""
    if not isinstance(item, pytest.Function) or inspect.isasyncgenfunction(item.obj):
        return
    item.stash[_CALLED] = False
    function = item.obj

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def watched(*positional: Any, **named: Any) -> Any:
            item.stash[_CALLED] = True
            return await function(*positional, **named)
    else:

        @functools.wraps(function)
        def watched(*positional: Any, **named: Any) -> Any:
            item.stash[_CALLED] = True
            return function(*positional, **named)

    item.obj = watched


#: How pytest's own text of a check that passed although ``xfail(strict=True)`` expected a failure begins.
_STRICT_XPASS = "[XPASS(strict)]"


def restore_outcome(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Report a check as it ended, whatever ``xfail`` or another plugin made of it; a plugin may add a failure.

    :param report: the report of setup, call or teardown, which is changed in place.
    """
    vars(report).pop("wasxfail", None)
    if call.excinfo is None:
        if report.skipped or (report.failed and str(report.longrepr).startswith(_STRICT_XPASS)):
            report.outcome, report.longrepr = "passed", None
    elif isinstance(call.excinfo.value, pytest.skip.Exception):
        if report.passed:
            path, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, f"Skipped: {call.excinfo.value}")
    elif report.passed or report.skipped:
        report.outcome, report.longrepr = "failed", item.repr_failure(call.excinfo)
    if report.when == "call" and report.passed and not item.stash.get(_CALLED, True):
        report.outcome, report.longrepr = "failed", str(_NOT_CALLED)
        item.stash[JUDGEMENT] = _NOT_CALLED


def add_result(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Shorten the failure in a report, and add the result of the check to the report and to the test's properties.

    :param report: the report of setup, call or teardown, which is changed in place.
    """
    run = Run.of(item.config)
    if (suite := suite_of(item.path)) is not None:
        vars(report)["nixl_module"] = f"pytest_nixl.suites.{suite}.{item.path.stem}"
    if check_of(item) is not None:
        restore_outcome(item, call, report)
    if call.excinfo is not None:
        gate = run.usable and run.settings.gate
        required = run.usable and check_of(item) in load_profile(run.settings.profile).required
        name_steering_fault(item, call.excinfo.value)
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
        return type(value)(_hidden(element, hide) for element in value)
    if isinstance(value, dict):
        return {name: _hidden(element, hide) for name, element in value.items()}
    return value


def _result_of(run: Run, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Result | None:
    """Return the result of a check after its call, a failure or skip in its setup, or a failure in its teardown."""
    check = check_of(item)
    if check is None or (report.when == "setup" and report.passed) or (report.when == "teardown" and not report.failed):
        return None
    judgement = _judgement(item, call, report)
    row = row_of(item)
    return replace(
        run.record.begun(item.nodeid),
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
    if late := late_because(item, error):
        return Judgement(Verdict.WARN if is_own(item) else Verdict.INCONCLUSIVE, late, LESS_TO_DO)
    if report.skipped:
        return Judgement(Verdict.NOT_APPLICABLE, _skip_reason(report))
    if report.passed:
        return Judgement(Verdict.PASS, "")
    if isinstance(error, FindingError):
        return Judgement(Verdict.FAIL, error.reason, error.remedy, error.finding)
    if isinstance(error, NixlPluginError):
        return Judgement(Verdict.ERROR, error.reason, error.remedy)
    kind = Verdict.FAIL if isinstance(error, (AssertionError, pytest.fail.Exception)) else Verdict.ERROR
    reason = _first_line(error)
    return Judgement(kind, reason, MORE_TIME if _BY_TIMEOUT.match(reason) else "")


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
    late = late_because(item, error)
    if isinstance(error, NotApplicableError) and not (gate and required):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {error.reason}")
    elif late and (is_own(item) or not gate):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {late}")
    elif isinstance(error, NixlPluginError) and suite_of(item.path) is None and report.when == "call":
        report.longrepr = _own_lines(item, excinfo, error)
    elif isinstance(error, NixlPluginError) or (isinstance(error, pytest.fail.Exception) and JUDGEMENT in item.stash):
        report.longrepr = str(error)


def _own_lines(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException], error: NixlPluginError) -> Any:
    """Return the failure of a user's test as pytest shows it with ``--tb``, without the lines of this package."""
    package = Path(__file__).parents[1]

    def is_ours(caught: pytest.ExceptionInfo[BaseException]) -> Any:
        whole = caught.traceback.cut(path=item.path)
        outside = whole.filter(lambda entry: package not in Path(entry.path).parents)
        return outside or whole

    style = item.config.getoption("tbstyle", "auto")
    shown = excinfo.getrepr(style="short" if style in ("auto", "line", "no") else style, tbfilter=is_ours, chain=False)
    crash = getattr(shown, "reprcrash", None)
    if crash is not None:  # the line and the sentence in pytest's summary and in JUnit XML
        last = is_ours(excinfo)[-1]
        crash.path, crash.lineno, crash.message = str(last.path), last.lineno + 1, error.reason
    return shown


#: The proofs of this run by backend, each made once.
_PROOFS = pytest.StashKey[dict[str, "TransferProof | None"]]()


def name_steering_fault(item: pytest.Item, error: BaseException) -> None:
    """Add to the error of a worker that nothing can be moved with a variable, and that bytes arrive without it.

    The variable is searched once for each backend, by transfers between two workers of this host. No search is made
    after a row was measured, or if no variable steers NIXL.

    :param error: the error, whose reason and remedy are changed in place.
    """
    if not isinstance(error, WorkerError) or error.late or check_of(item) is None:
        return
    run, names = Run.of(item.config), steering_names(os.environ)
    if not names or any(name in error.reason for name in names) or not run.usable:
        return
    if any(result.summary is not None for result in run.record.results):
        return
    row = row_of(item)
    backend = row.plain_backend if row is not None else run.settings.backend[0]
    proof = _proof(run, backend)
    if proof is not None and proof.culprits:
        error.reason = f"{error.reason}; {proof.steering_fault}"
        error.remedy = proof.steering_remedy


def _proof(run: Run, backend: str) -> TransferProof | None:
    proofs = run.config.stash.setdefault(_PROOFS, {})
    if backend not in proofs:
        proofs[backend] = Prover(run.settings).prove(backend, HOST) if provable([backend]) else None
    return proofs[backend]
