# SPDX-License-Identifier: Apache-2.0
"""The parts of pytest's hooks that only a run of several ranks needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pytest_nixl.cluster.command_check import Command
from pytest_nixl.cluster.etcd import require_etcd, require_secret
from pytest_nixl.cluster.group import JoinRefusedError
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.cluster.rank_session import RankSession
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import own_version
from pytest_nixl.core.signals import sigterm_ends_in_order
from pytest_nixl.model.conclusion import failed_beside, summary_line, verdict_fields
from pytest_nixl.model.results import Result
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.verdicts import INTERRUPTED, Verdict
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.report.junit import add_early_end, name_by_rank, write_again
from pytest_nixl.report.outputs import rewrite_reports
from pytest_nixl.session.run import Run

#: The largest number of failing results that the peers print.
_MOST_NAMED = 12


def write_without_colours(config: pytest.Config, run: Run) -> None:
    """Write no colours if a launcher started this rank and nothing asks for them.

    Some launchers give each rank a terminal, although what it writes ends in a file: ``mpirun … > log``.
    """
    forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "PY_COLORS"))
    if run.placement.by_launcher is not None and config.option.color == "auto" and not forced:
        config.option.color = "no"


def refuse(config: pytest.Config, run: Run) -> None:
    """Check that the options can be used in a run of several ranks.

    :raises pytest.UsageError: if one of them cannot.
    """
    ranks = f"{run.placement.ranks} ranks ({run.placement.source})"
    if config.getoption("numprocesses", None) or config.getoption("dist", "no") != "no":
        raise pytest.UsageError(f"{ranks} cannot be combined with pytest-xdist: remove -n and --dist")
    if run.settings.compare_image is not None:
        raise pytest.UsageError(
            f"--nixl-compare-image is refused with {ranks}: its command runs on one host only; compare two runs with "
            "--nixl-baseline instead"
        )
    require_etcd(run.settings, run.placement)
    require_secret(run.settings, run.placement)


def take_part(session: pytest.Session, run: Run) -> bool | None:
    """Join the other ranks. Rank 0 then runs its tests; a peer serves rank 0 until the run is over.

    :returns: None on rank 0, which tells pytest to run the tests; True on a peer, which tells pytest not to.
    """
    refuse(session.config, run)
    say = _speaker(session.config)
    with sigterm_ends_in_order():
        try:
            tests = [item.nodeid for item in session.items]
            command = command_of(run.settings, tests, session.testsfailed)
            rank_session = RankSession(run.settings, run.placement, command, supervisor(), say)
            run.join(rank_session)
            if rank_session.drives:
                rank_session.drive(lambda error: setattr(session, "shouldfail", error.reason))
                return None
            name_by_rank(session.config, rank_session.rank)
            say(f"{rank_session.name} serves {rank_session.name_of(0)}")
            ending = rank_session.serve()
        except JoinRefusedError as error:
            raise pytest.UsageError(str(error)) from None
        except NixlPluginError as error:
            if run.rank_session is None:
                name_by_rank(session.config, run.placement.rank or 0)
                pytest.exit(str(error), returncode=1)
            rank_session = run.rank_session
            rank_session.fault = error
            ending = Ending(1, str(error))
            rank_session.ending = ending
            run.record.note(*rank_session.describe_loss())
    _report(session, rank_session, ending)
    return True


def conclude(session: pytest.Session, run: Run) -> None:
    """On rank 0, add a result for each lost rank. On a peer, set the exit code that rank 0 sent."""
    rank_session = run.rank_session
    if rank_session is None:
        return
    run.record.note(*rank_session.ignored())
    if rank_session.ending is not None:
        session.exitstatus = rank_session.ending.code
    elif rank_session.driver is None:
        rank_session.early = True
        rank_session.ending = Ending(
            int(session.exitstatus), f"{rank_session.name} {_ended(int(session.exitstatus))} and left"
        )
        add_early_end(session.config, f"{INTERRUPTED}: {rank_session.ending.verdict}")
    elif rank_session.faults:
        lost = [Result("ranks", "", Verdict.ERROR, error.reason, error.remedy) for error in rank_session.faults]
        run.record.add_run_results(lost)
        run.record.note(*rank_session.describe_loss())
        if session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def leave_group(session: pytest.Session, run: Run) -> list[str]:
    """Leave the group after all reports are written.

    :returns: one sentence for each thing that could not be done.
    """
    rank_session = run.rank_session
    if rank_session is None:
        return []
    code = int(session.exitstatus)
    when = "" if rank_session.faults else " after the last check"
    message = rank_session.finish(
        rank_session.ending or Ending(code, _verdict(run, rank_session, code), verdict_fields=_conclusion(run, code))
    )
    if rank_session.faults and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if rank_session.faults and not run.record.interrupted:
        # A rank was lost after the reports were written, or this peer lost the group: write them again.
        run.record.interrupt(f"{INTERRUPTED}{when}: {rank_session.faults[0].reason}")
        if rank_session.drives:
            rewrite_reports(session.config, run)
        write_again(session.config, run)
    return message


def _ended(code: int) -> str:
    """Say how a rank ended that did not finish its tests."""
    if code == pytest.ExitCode.INTERRUPTED:
        return "was interrupted"
    if code - 128 in signal.valid_signals():
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _whole(code: int) -> bool:
    return code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def _conclusion(run: Run, code: int) -> dict[str, Any]:
    if not run.usable or (not run.record.interrupted and not _whole(code)):
        return {}
    conclusion = verdict_fields(run.record.results, gate=run.settings.gate, interrupted=run.record.interrupted)
    return conclusion if code == pytest.ExitCode.OK else failed_beside(conclusion, code)


def _verdict(run: Run, rank_session: RankSession, code: int) -> str:
    collected, last = run.record, []
    if run.usable and not collected.results and not collected.interrupted:
        last = [f"no NIXL check ran; the tests of rank 0 ended with exit code {code}"]
    elif run.usable:
        last = [
            summary_line(collected.results, gate=run.settings.gate, interrupted=collected.interrupted, code=code).text
        ]
    if not _whole(code):
        ended = f"{rank_session.name_of(0)} {_ended(code)}: every rank ends with exit code {code}"
        return "\n".join([*last, ended])
    bad = [result for result in collected.results if result.verdict.value not in ("PASS", "NOT-APPLICABLE")]
    lines = [f"{result.verdict}: {result.row or result.check}: {result.reason}" for result in bad[:_MOST_NAMED]]
    more = [f"and {len(bad) - _MOST_NAMED} more"] if len(bad) > _MOST_NAMED else []
    return "\n".join([*last, *lines, *more])


def _speaker(config: pytest.Config) -> Callable[[str], None]:
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")

    def say(text: str) -> None:
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(text)
            terminal.flush()

    return say


def _report(session: pytest.Session, rank_session: RankSession, ending: Ending) -> None:
    """Report the run as one test of this peer, so that its terminal and its files show the verdict of rank 0."""
    nodeid = rank_session.name
    location = (nodeid, None, nodeid)
    session.config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
    for when in ("setup", "call", "teardown"):
        bad = when == "call" and ending.code != 0
        description = (
            f"{ending.verdict}\nreported by {rank_session.name_of(0)}" if rank_session.fault is None else ending.verdict
        )
        report = pytest.TestReport(
            nodeid,
            location,
            {},
            "failed" if bad else "passed",
            description if bad else None,
            when,
        )
        session.config.hook.pytest_runtest_logreport(report=report)
    session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)


def command_of(settings: Settings, tests: Sequence[str], errors: int) -> Command:
    """Return what this rank runs."""
    options = {item.flag: item.show(getattr(settings, item.field)) for item in OPTIONS if not item.per_rank}
    return Command(own_version(), options, tests, errors)
