# SPDX-License-Identifier: Apache-2.0
"""Keep a run from passing by accident: refuse useless options at its start, and report at its end what is missing.

With ``--nixl-gate``, a profile that expects nothing of any row is refused if a test measures one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.conclusion import UNMEASURED, WHOLE_RUN
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Outcome, Verdict, outcome
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.default_profile import ONE_HOST, OVER_TCP
from pytest_nixl.session.outcome import accidents
from pytest_nixl.session.requested_links import NOT_IN_PARALLEL, requested_rows, row_of
from pytest_nixl.session.run import Run
from pytest_nixl.session.selection import BANDWIDTH, FORMER_CHECKS, check_expected, check_ids_by_suite, left_out_of

_NAME_A_SUITE = "name a suite, or no suite to run all of them"
#: The most reasons in one sentence.
_MOST_NAMED = 3
#: How pytest's reason for the skip of a test whose ``parametrize`` has no value begins.
_NO_PARAMETERS = "got empty parameter set"
#: The options with which pytest only prints a list, by their names in its configuration.
_LISTINGS = {
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "markers": "--markers",
    "cacheshow": "--cache-show",
}


def silent_profile(profile: Profile) -> str:
    """Return a sentence if a profile expects nothing of any row, with the remedy; empty: it expects something."""
    if profile.expectations:
        return ""
    return (
        f"the profile {profile.name!r} has no [[expect]]: it describes the machine but expects nothing of a row, so "
        f"every row is NO-EXPECTATION; {how_to_learn(profile.name)}"
    )


def how_to_learn(name: str) -> str:
    """Return the remedy: the commands that create a profile from runs on machines that are known to be good.

    :param name: the name of the present profile.
    """
    file = f"{name}-learned"
    return (
        "learn one from three runs on machines that are known to be good, each with --benchmark-json=runN.json and "
        f"without --nixl-gate: `pytest-nixl profile learn run1.json run2.json run3.json --name {file} "
        f"--output {file}.toml`, then give --nixl-profile={file}.toml"
    )


def profile_between_hosts(profile: Profile, run: Run, cluster: Cluster) -> Profile:
    """Return what judges this run: between hosts, a default profile for one host expects nothing of a row."""
    chosen = not run.settings.sources["profile"].startswith("default")
    if len(cluster.host_names) < 2 or chosen or profile.name not in (ONE_HOST, OVER_TCP):
        return profile
    run.record.note(
        f"the default profile, {profile.name}, is for one host, and the ranks are on {len(cluster.host_names)}: rows "
        f"are measured and not judged; {how_to_learn('this-cluster')}"
    )
    return replace(profile, expectations=())


def refuse_silence(profile: Profile, items: Iterable[pytest.Item]) -> None:
    """Refuse to gate rows by a profile that expects nothing of any row.

    :param items: the collected tests.
    :raises pytest.UsageError: if a test measures a row and the profile has no expectation.
    """
    if not profile.expectations and any(row_of(item) is not None for item in items):
        raise pytest.UsageError(f"--nixl-gate is refused: {silent_profile(profile)}")


def refuse_accidents(config: pytest.Config, settings: Settings) -> None:
    """Refuse to judge a run that would measure nothing. :raises pytest.UsageError: with the option that prevents it."""
    option = settings.judged_by
    for fault in _accidents(config, settings.ranks):
        raise pytest.UsageError(f"{option} is refused with {fault}")


def _accidents(config: pytest.Config, ranks: int | None) -> Iterator[str]:
    if config.getoption("collectonly", False):
        yield "--collect-only: nothing would be measured; leave one of the two options out"
    for name, flag in _LISTINGS.items():
        if config.getoption(name, None):
            yield f"{flag}: pytest would print a list and run no test; leave one of the two options out"
    if config.getoption("numprocesses", None) or config.getoption("dist", "no") != "no" or config.getoption("tx", None):
        yield "pytest-xdist (-n, --dist, --tx): bandwidth is not measured in parallel; leave one of the two out"
    if not config.pluginmanager.has_plugin("benchmark"):
        yield "-p no:benchmark: no row would be recorded; leave `-p no:benchmark` out"
    if config.getoption("benchmark_disable", False):
        yield "--benchmark-disable: no row would be recorded; leave one of the two options out"
    if config.getoption("benchmark_skip", False):
        yield "--benchmark-skip: no row would be measured; leave one of the two options out"
    yield from accidents(config)
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1 and ranks is None and not os.environ.get("SLURM_STEP_NUM_TASKS"):
        yield (
            f"SLURM_NTASKS={tasks} in the environment: the job has {tasks} tasks, but this process is not in a job "
            "step; start it with srun, or give --nixl-ranks=1"
        )


def missing_results(profile: Profile, run: Run) -> list[Result]:
    """Return a MISSING result for every required check, requested row and requested memory type without a result.

    A required check that pytest-nixl no longer has is a WARN.
    """
    if run.record.ended:
        remedy = "repair what failed first, or give --nixl-keep-going to run the remaining tests anyway"
        return [Result(WHOLE_RUN, "", Verdict.MISSING, run.record.ended, remedy)]
    if all(result.verdict is Verdict.NOT_APPLICABLE for result in run.record.results) and not _measures_rows(run):
        if run.record.results:
            reason, remedy = "all checks were skipped: there is nothing to accept", _NAME_A_SUITE
        else:
            reason = (
                "no check ran, so there is nothing to accept: a test is a check only if it has the marker nixl_check"
            )
            remedy = f"mark your tests with @pytest.mark.nixl_check('my-check'); to run ours, {_NAME_A_SUITE}"
        return [Result(WHOLE_RUN, "", Verdict.MISSING, reason, remedy)]
    return [*_missed_checks(profile, run), *_empty_checks(profile, run), *_missed_memory(run), *_missed_rows(run)]


def unchecked_requests(run: Run) -> list[Result]:
    """Return a MISSING result for what a run without ``--nixl-gate`` was asked for by name, and did not check.

    That is each suite that would have measured rows in a parallel run, GPU memory in ``--nixl-memory`` of which no row
    ran, and the suites if all of their checks were skipped.
    A user's own tests that were skipped are none of it: pytest passes those.
    """
    if unmeasured := list(_unmeasured_suites(run)):
        return unmeasured
    named = list(_missed_memory(run)) if run.settings.sources["memory"] == "option" else []
    results = run.record.results
    ours = [result for result in results if any(result.check in checks for checks in check_ids_by_suite().values())]
    if named or not ours or any(result.verdict is not Verdict.NOT_APPLICABLE for result in results):
        return named
    reasons, remedies = (list(dict.fromkeys(getattr(skipped, of) for skipped in ours)) for of in ("reason", "remedy"))
    more = [f"and {len(reasons) - _MOST_NAMED} more reasons: -rs shows them"] if len(reasons) > _MOST_NAMED else []
    count = "the only check was" if len(ours) == 1 else f"all {len(ours)} checks were"
    reason = f"nothing was checked, because {count} skipped: {'; '.join([*reasons[:_MOST_NAMED], *more])}"
    [remedy] = remedies if len(remedies) == 1 else [""]
    otherwise = "run it where these checks apply, or run all suites"
    return [Result(WHOLE_RUN, "", Verdict.MISSING, reason, remedy or otherwise)]


def _unmeasured_suites(run: Run) -> Iterator[Result]:
    """Yield a MISSING result for each suite whose rows were skipped because pytest-xdist runs tests in parallel."""
    skipped = {result.check for result in run.record.results if result.reason == NOT_IN_PARALLEL}
    reason, remedy = NOT_IN_PARALLEL.split(": ")
    for suite, checks in check_ids_by_suite().items():
        if skipped & checks:
            yield Result(UNMEASURED, "", Verdict.MISSING, f"the suite {suite} measured nothing: {reason}", remedy)


def _missed_checks(profile: Profile, run: Run) -> Iterator[Result]:
    results, left_out = run.record.results, left_out_of(run.config)
    for check in (name for name in profile.required if check_expected(name, run.collected.suites)):
        results_of_check = [result for result in results if result.check == check]
        skipped = [result for result in results_of_check if result.verdict is Verdict.NOT_APPLICABLE]
        if check in FORMER_CHECKS:
            reason = f"the profile {profile.name!r} requires the check {check!r}, which pytest-nixl no longer has"
            yield Result(check, "", Verdict.WARN, reason, "remove the check from [required] of the profile")
        elif not results_of_check and check in left_out:
            reason = (
                f"the profile {profile.name!r} requires the check {check!r}, which is of level {left_out[check]}, and "
                f"this run is of level {run.settings.level}"
            )
            remedy = f"give --nixl-level={left_out[check]}, or remove the check from [required] of the profile"
            yield Result(check, "", Verdict.MISSING, reason, remedy)
        elif not results_of_check:
            reason = f"the profile {profile.name!r} requires the check {check!r}, which did not run"
            remedy = "run its whole suite, without -k, -m, --deselect or a node id"
            yield Result(check, "", Verdict.MISSING, reason, remedy)
        elif skipped:
            tests = (
                "" if len(skipped) == len(results_of_check) else f" in {len(skipped)} of {len(results_of_check)} tests"
            )
            text = f"skipped{tests}: {skipped[0].reason}"
            reason = f"the profile {profile.name!r} requires the check {check!r}, which was {text}"
            first = skipped[0].remedy or "remove the reason for the skip"
            remedy = f"{first}; if this kind of machine cannot have it, remove the check from [required] of the profile"
            yield Result(check, skipped[0].nodeid, Verdict.MISSING, reason, remedy)


def _empty_checks(profile: Profile, run: Run) -> Iterator[Result]:
    """Yield a MISSING result for each check that pytest skipped because its ``parametrize`` is empty."""
    for result in run.record.results:
        required = result.check in profile.required
        if result.verdict is Verdict.NOT_APPLICABLE and result.reason.startswith(_NO_PARAMETERS) and not required:
            remedy = "give its parametrize at least one value, or deselect the test"
            yield Result(result.check, result.nodeid, Verdict.MISSING, f"no test of it ran: {result.reason}", remedy)


def _measures_rows(run: Run) -> bool:
    """Whether the run selected the bandwidth suite, or a user's test that measures rows."""
    return BANDWIDTH in run.collected.suites or any(_of_blocks(result) for result in run.record.results)


def _of_blocks(result: Result) -> bool:
    """Whether a result is of a row of whole blocks. Nobody requests rows of KV requests and patterns by block sizes."""
    row = result.row
    return row is not None and not (isinstance(row, RowKey) and (row.kv or row.pattern))


def _missed_rows(run: Run) -> Iterator[Result]:
    if not _measures_rows(run):
        return
    if not any(result.summary for result in run.record.results if _of_blocks(result)):
        reason = "no row was measured, so there is nothing to accept"
        yield Result("bandwidth", "", Verdict.MISSING, reason, "run the whole bandwidth suite")
        return
    judged = {result.row for result in run.record.results}
    for row in requested_rows(run.settings, run.placement):
        if row not in judged:
            reason = f"the requested row {row} was not measured: its test was not selected or did not run"
            remedy = "run the whole suite, without -k, -m, -x, --deselect or a node id"
            yield Result("bandwidth", "", Verdict.MISSING, reason, remedy, row=row)


def _missed_memory(run: Run) -> Iterator[Result]:
    """Yield a MISSING result for requested GPU memory of which no row ran: a machine without GPUs must not pass."""
    if not _measures_rows(run):
        return
    by_row = {result.row: result for result in run.record.results if result.row is not None}
    memories = dict.fromkeys(link.memory for link in run.links)
    for memory in (pair for pair in memories if pair.on_gpu):
        rows = [by_row.get(row) for row in requested_rows(run.settings, run.placement, memory)]
        skipped = [row for row in rows if row is not None and row.verdict is Verdict.NOT_APPLICABLE]
        if skipped and len(skipped) == len(rows):
            count = "its only row did not run" if len(rows) == 1 else f"none of its {len(rows)} rows ran"
            source = run.settings.sources["memory"].removeprefix("environment ")
            asked_by = "--nixl-memory" if source == "option" else source
            reason = f"{memory} was requested ({asked_by}), but {count}: {skipped[0].reason}"
            remedy = skipped[0].remedy or "run it on a machine with such memory, or leave it out of --nixl-memory"
            yield Result("bandwidth", skipped[0].nodeid, Verdict.MISSING, reason, remedy)


def failing_results(results: Sequence[Result], profile: Profile, *, gate: bool) -> list[Result]:
    """Return the results that fail the run.

    :param gate: whether ``--nixl-gate`` is given.
    """
    return [
        result
        for result in results
        if outcome(result.verdict, gate=gate, required=result.check in profile.required) is Outcome.FAIL
    ]
