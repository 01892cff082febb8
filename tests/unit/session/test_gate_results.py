# SPDX-License-Identifier: Apache-2.0
"""What a gate finds missing, from results that are given. The runs themselves are in ``test_gate.py``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.judge.profiles import Profile, parse_profile
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.gate import failing_results, missing_results, refuse_accidents, unchecked_requests
from pytest_nixl.session.requested_links import NOT_IN_PARALLEL, requested_links, requested_rows
from pytest_nixl.session.run import Run
from pytest_nixl.session.selection import _LEFT_OUT

HOST, GPU = MemoryPair("DRAM", "DRAM"), MemoryPair("VRAM", "VRAM")
SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("cma",))
ALONE = SimpleNamespace(ranks=2, pairs=[(0, 1)], several=False)


def profile(*required: str) -> Profile:
    checks = f"[required]\nchecks = {list(required)}\n" if required else ""
    return parse_profile(f'[profile]\nname = "mine"\nsummary = "s"\n{checks}'.encode(), "mine")


@pytest.fixture
def settings(make_settings: Any) -> Settings:
    default: Settings = make_settings(blocks=(65536, 4096), memory=(HOST,), op=("WRITE",))
    return default


def a_run(
    settings: Settings, *results: Result, suites: tuple[str, ...] = ("bandwidth",), ended: str = "", **left_out: str
) -> Run:
    """Return a run with these results; ``left_out`` has the level of each check above that of the run."""
    config = SimpleNamespace(stash={_LEFT_OUT: left_out})
    run_results = SimpleNamespace(results=list(results), ended=ended)
    links = requested_links(settings, cast(Any, ALONE))
    return cast(
        Run,
        SimpleNamespace(
            config=config, record=run_results, settings=settings, placement=ALONE, links=links,
            collected=SimpleNamespace(suites=frozenset(suites)),
        ),
    )  # fmt: skip


def result(check: str, verdict: Verdict = Verdict.PASS, reason: str = "", **more: Any) -> Result:
    return Result(check, f"test_{check}", verdict, reason, **more)


def row(key: RowKey, verdict: Verdict = Verdict.PASS, reason: str = "", remedy: str = "") -> Result:
    figures = None if verdict is Verdict.NOT_APPLICABLE else SUMMARY
    return result("bandwidth", verdict, reason, remedy=remedy, row=key, summary=figures)


def keys(settings: Settings, memory: MemoryPair | None = None) -> list[RowKey]:
    return list(requested_rows(settings, cast(Any, ALONE), memory))


def missing(profile: Profile, run: Run) -> list[str]:
    """Return everything that is missing, each as ``MISSING check (test): reason; remedy``."""
    return [
        f"{lack.verdict} {lack.check} ({lack.nodeid}): {lack.reason}; {lack.remedy}"
        for lack in missing_results(profile, run)
    ]


ROWS_MISSING = "MISSING bandwidth (): no row was measured, so there is nothing to accept; run the whole bandwidth suite"
ROW_MISSING = (
    "MISSING bandwidth (): the requested row {} was not measured: its test was not selected or did not run; "
    "run the whole suite, without -k, -m, -x, --deselect or a node id"
)
REQUIRES = "the profile 'mine' requires the check"
NAME_A_SUITE = "name a suite, or no suite to run all of them"
UNLESS = "if this kind of machine cannot have it, remove the check from [required] of the profile"
EMPTY = "got empty parameter set ['number']"


def test_each_requested_row_needs_a_result(settings: Settings) -> None:
    first, other = keys(settings)
    of_requests = replace(first, variant=(*first.variant, ("kv", "scattered")))
    of_pattern = replace(first, variant=(*first.variant, ("pattern", "incast:4")))
    assert (bool(of_requests.kv), bool(of_pattern.pattern)) == (True, True)
    table: list[tuple[list[Result], tuple[str, ...], list[str]]] = [
        ([row(first), row(other, Verdict.FAIL)], ("bandwidth",), []),
        ([row(first)], ("bandwidth",), [ROW_MISSING.format(other)]),
        ([row(other)], ("bandwidth",), [ROW_MISSING.format(first)]),
        # A user's test that measures a row asks for all rows, whatever suites were selected.
        ([row(first)], (), [ROW_MISSING.format(other)]),
        ([row(first), row(other, Verdict.NOT_APPLICABLE)], ("bandwidth",), []),
        ([row(first, Verdict.NOT_APPLICABLE), row(other, Verdict.NOT_APPLICABLE)], ("bandwidth",), [ROWS_MISSING]),
        # Nobody requests rows of KV requests and patterns by block sizes.
        ([row(of_requests)], ("kv_cache",), []),
        ([row(of_pattern)], ("pattern",), []),
        ([row(of_requests)], ("bandwidth",), [ROWS_MISSING]),
    ]
    for results, suites, expected in table:
        assert missing(profile(), a_run(settings, *results, suites=suites)) == expected
    assert [lack.row for lack in missing_results(profile(), a_run(settings, row(first)))] == [other]


@pytest.mark.parametrize(
    ("required", "results", "more", "expected"),
    [
        (("nixl-loads",), [result("etcd-answers")], {"ended": "the run ended because nixl-loads failed"},
         ["MISSING whole-run (): the run ended because nixl-loads failed; repair what failed first, or give "
          "--nixl-keep-going to run the remaining tests anyway"]),
        ((), [], {},
         ["MISSING whole-run (): no check ran, so there is nothing to accept: a test is a check only if it has the "
          "marker nixl_check; mark your tests with @pytest.mark.nixl_check('my-check'); to run ours, "
          f"{NAME_A_SUITE}"]),
        ((), [result("nixl-loads", Verdict.NOT_APPLICABLE)], {},
         [f"MISSING whole-run (): all checks were skipped: there is nothing to accept; {NAME_A_SUITE}"]),
        ((), [result("nixl-loads", Verdict.NOT_APPLICABLE), result("etcd-answers")], {}, []),
        # The suite of the third was not selected.
        (("nixl-loads", "etcd-answers", "bandwidth", "of-a-user"), [result("etcd-answers")], {},
         [f"MISSING {check} (): {REQUIRES} {check!r}, which did not run; run its whole suite, without -k, -m, "
          "--deselect or a node id" for check in ("nixl-loads", "of-a-user")]),
        (("etcd-answers", "ranks-in-every-order"), [result("etcd-answers")], {},
         [f"WARN ranks-in-every-order (): {REQUIRES} 'ranks-in-every-order', which pytest-nixl no longer has; remove "
          "the check from [required] of the profile"]),
        (("nixl-loads",), [result("etcd-answers")], {"nixl-loads": "extended"},
         [f"MISSING nixl-loads (): {REQUIRES} 'nixl-loads', which is of level extended, and this run is of level "
          "standard; give --nixl-level=extended, or remove the check from [required] of the profile"]),
        # It ran all the same: as a user's test.
        (("nixl-loads",), [result("nixl-loads")], {"nixl-loads": "extended"}, []),
        (("a",), [result("b"), result("a", Verdict.NOT_APPLICABLE, "no NIXL here"),
                  replace(result("a", Verdict.NOT_APPLICABLE, "nor here"), nodeid="other")], {},
         [f"MISSING a (test_a): {REQUIRES} 'a', which was skipped: no NIXL here; remove the reason for the skip; "
          f"{UNLESS}"]),
        (("a",), [result("b"), result("a", Verdict.NOT_APPLICABLE, "no NIXL here", remedy="give it one"), result("a"),
                  result("a", Verdict.NOT_APPLICABLE)], {},
         [f"MISSING a (test_a): {REQUIRES} 'a', which was skipped in 2 of 3 tests: no NIXL here; give it one; "
          f"{UNLESS}"]),
        ((), [result("b"), result("a", Verdict.NOT_APPLICABLE, EMPTY), result("c", Verdict.FAIL, EMPTY)], {},
         [f"MISSING a (test_a): no test of it ran: {EMPTY}; give its parametrize at least one value, or deselect the "
          "test"]),
        (("a",), [result("b"), result("a", Verdict.NOT_APPLICABLE, EMPTY)], {},
         [f"MISSING a (test_a): {REQUIRES} 'a', which was skipped: {EMPTY}; remove the reason for the skip; {UNLESS}"]),
    ],
    ids=["ended-early", "no-check", "all-skipped", "one-skipped", "did-not-run", "a-former-check", "above-the-level",
         "ran-above-the-level", "skipped", "partly-skipped", "no-parameters", "required-without-parameters"],
)  # fmt: skip
def test_each_required_check_needs_a_result(
    settings: Settings, required: tuple[str, ...], results: list[Result], more: dict[str, Any], expected: list[str]
) -> None:
    assert missing(profile(*required), a_run(settings, *results, suites=("infrastructure",), **more)) == expected


@pytest.mark.parametrize(
    ("source", "requested"),
    [("option", "--nixl-memory"), ("environment NIXL_MEMORY", "NIXL_MEMORY"), ("nixl_memory in the ini file",) * 2],
)
def test_requested_gpu_memory_of_which_no_row_ran_is_missing(settings: Settings, source: str, requested: str) -> None:
    sources = {**settings.sources, "memory": source}
    both = replace(settings, memory=(HOST, GPU), sources=sources)
    host = [row(key) for key in keys(both, HOST)]
    first, other = (row(key, Verdict.NOT_APPLICABLE, "VRAM needs a GPU", "get one") for key in keys(both, GPU))
    other = replace(other, reason="no more memory", nodeid="test_other", remedy="")
    lacking = f"VRAM:VRAM was requested ({requested}), but none of its 2 rows ran: VRAM needs a GPU"
    run = a_run(both, *host, first, other)
    assert missing(profile(), run) == [f"MISSING bandwidth (test_bandwidth): {lacking}; get one"]
    # Without a gate, only an option asks for it by name.
    assert unchecked_requests(run) == (missing_results(profile(), run) if source == "option" else [])
    assert missing(profile(), a_run(both, *host, row(keys(both, GPU)[0]), other)) == []
    single = replace(both, blocks=(4096,))
    assert missing(profile(), a_run(single, row(keys(single, HOST)[0]), other)) == [
        f"MISSING bandwidth (test_other): VRAM:VRAM was requested ({requested}), but its only row did not run: no more "
        "memory; run it on a machine with such memory, or leave it out of --nixl-memory"
    ]
    # Host memory is not such memory, and a run that measures no rows lacks none.
    alone = replace(settings, sources=sources)
    assert missing(profile(), a_run(alone, row(keys(alone)[0]), row(keys(alone)[1], Verdict.NOT_APPLICABLE))) == []
    assert missing(profile(), a_run(both, result("nixl-loads"), suites=("infrastructure",))) == []


def test_a_gate_fails_by_what_is_missing_or_failed(settings: Settings) -> None:
    every = [result(verdict.name, verdict) for verdict in Verdict]
    plain = {failure.verdict for failure in failing_results(every, profile(), gate=False)}
    gate = {failure.verdict for failure in failing_results(every, profile(), gate=True)}
    assert {Verdict.FAIL, Verdict.CORRUPT, Verdict.ERROR} <= plain < gate
    assert Verdict.MISSING in gate
    assert Verdict.PASS not in gate


class GivenConfig:
    """The options of a run, as pytest's configuration has them."""

    def __init__(self, plugin: bool = True, ini: Mapping[str, object] | None = None, **options: Any) -> None:
        self._options, self._ini = options, ini or {}
        self.pluginmanager = SimpleNamespace(has_plugin=lambda _: plugin)

    def getoption(self, name: str, default: object = None) -> object:
        return self._options.get(name, default)

    def getini(self, name: str) -> object:
        return self._ini[name]


LIST = "pytest would print a list and run no test; leave one of the two options out"
REPEATED = "a failed check would be repeated until it passes; leave one of the two options out"
XDIST = "pytest-xdist (-n, --dist, --tx): bandwidth is not measured in parallel; leave one of the two out"


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (GivenConfig(collectonly=True),
         "--collect-only: nothing would be measured; leave one of the two options out"),
        (GivenConfig(showfixtures=True), f"--fixtures: {LIST}"),
        (GivenConfig(show_fixtures_per_test=True), f"--fixtures-per-test: {LIST}"),
        (GivenConfig(markers=True), f"--markers: {LIST}"),
        (GivenConfig(cacheshow=["*"]), f"--cache-show: {LIST}"),
        *((GivenConfig(**option), XDIST) for option in ({"numprocesses": 2}, {"dist": "load"}, {"tx": ["popen"]})),
        (GivenConfig(plugin=False), "-p no:benchmark: no row would be recorded; leave `-p no:benchmark` out"),
        (GivenConfig(benchmark_disable=True),
         "--benchmark-disable: no row would be recorded; leave one of the two options out"),
        (GivenConfig(benchmark_skip=True),
         "--benchmark-skip: no row would be measured; leave one of the two options out"),
        (GivenConfig(reruns=2), f"--reruns: {REPEATED}"), (GivenConfig(force_reruns=2), f"--force-reruns: {REPEATED}"),
        (GivenConfig(ini={"reruns": 2}),
         "reruns = 2 in the ini file: a failed check would be repeated until it passes; remove that line"),
        *((GivenConfig(**accepted), "")
          for accepted in ({"dist": "no"}, {"ini": {"reruns": 0}}, {"ini": {"reruns": ""}})),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize(
    ("option", "asked"), [("--nixl-gate", {"gate": True}), ("--nixl-baseline", {"baseline": "b.json"})]
)
def test_an_option_by_which_nothing_is_measured_is_refused(
    settings: Settings, config: Any, refusal: str, option: str, asked: dict[str, Any]
) -> None:
    refused = pytest.raises(pytest.UsageError) if refusal else nullcontext()
    with refused as caught:
        refuse_accidents(config, replace(settings, **asked))
    assert caught is None or str(caught.value) == f"{option} is refused with {refusal}"


@pytest.mark.parametrize(
    ("variables", "ranks", "refused"),
    [
        ({}, None, False),
        ({"SLURM_NTASKS": "1"}, None, False),
        ({"SLURM_NTASKS": "2"}, None, True),
        ({"SLURM_NTASKS": "2"}, 1, False),
        ({"SLURM_NTASKS": "many"}, None, False),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, None, False),
    ],
)
def test_a_job_of_several_tasks_is_refused_outside_a_step(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranks: int | None, refused: bool
) -> None:
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(pytest.UsageError) if refused else nullcontext() as caught:
        refuse_accidents(cast(pytest.Config, GivenConfig()), replace(settings, gate=True, ranks=ranks))
    assert caught is None or str(caught.value) == (
        "--nixl-gate is refused with SLURM_NTASKS=2 in the environment: the job has 2 tasks, but this process is not "
        "in a job step; start it with srun, or give --nixl-ranks=1"
    )


@pytest.mark.parametrize(
    ("skipped", "reason", "remedy"),
    [
        ([("no GPU", "add one")], "the only check was skipped: no GPU", "add one"),
        ([("no GPU", "add one")] * 2, "all 2 checks were skipped: no GPU", "add one"),
        ([("no GPU", "")], "the only check was skipped: no GPU", "run it where these checks apply, or run all suites"),
        (
            [("no GPU", "add one"), ("no file", "name one")],
            "all 2 checks were skipped: no GPU; no file",
            "run it where these checks apply, or run all suites",
        ),
        ([("a", "do"), ("b", "do"), ("c", "do")], "all 3 checks were skipped: a; b; c", "do"),
        (
            [("a", "do"), ("b", "do"), ("c", "do"), ("d", "do"), ("e", "do")],
            "all 5 checks were skipped: a; b; c; and 2 more reasons: -rs shows them",
            "do",
        ),
    ],
)
def test_a_run_whose_checks_were_all_skipped_says_why_and_what_to_do(
    settings: Settings, skipped: list[tuple[str, str]], reason: str, remedy: str
) -> None:
    results = [result("bandwidth", Verdict.NOT_APPLICABLE, cause, remedy=do) for cause, do in skipped]
    lack = Result("whole-run", "", Verdict.MISSING, f"nothing was checked, because {reason}", remedy)
    of_a_user = result("their-own", Verdict.NOT_APPLICABLE, "no GPU")
    assert unchecked_requests(a_run(settings, of_a_user, *results, of_a_user)) == [lack]
    assert unchecked_requests(a_run(settings, *results, result("bandwidth"))) == []
    assert unchecked_requests(a_run(settings, *results, result("their-own"))) == []
    assert unchecked_requests(a_run(settings, of_a_user)) == []


def test_each_suite_that_cannot_measure_in_parallel_is_named(settings: Settings) -> None:
    first, last = (result(check, Verdict.NOT_APPLICABLE, NOT_IN_PARALLEL) for check in ("kv-requests", "bandwidth"))
    assert unchecked_requests(a_run(settings, first, result("memlock"), last)) == [
        Result(
            "unmeasured-suite", "", Verdict.MISSING,
            f"the suite {suite} measured nothing: bandwidth is never measured in parallel",
            "run it without pytest-xdist (-n)",
        )
        for suite in ("bandwidth", "kv_cache")
    ]  # fmt: skip
