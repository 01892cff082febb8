# SPDX-License-Identifier: Apache-2.0
"""What a gate finds missing, from results that are given. The runs themselves are in ``test_gate.py``."""

from __future__ import annotations

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
from pytest_nixl.session.requested_links import requested_links, requested_rows
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


def messages(profile: Profile, run: Run) -> list[str]:
    """Return the check and the reason of everything that is missing."""
    missing = missing_results(profile, run)
    assert {lack.verdict for lack in missing} <= {Verdict.MISSING}
    assert all(lack.remedy for lack in missing)
    return [f"{lack.check}: {lack.reason}" for lack in missing]


def test_nothing_is_missing_if_each_row_and_required_check_has_a_result(settings: Settings) -> None:
    rows = [row(key, verdict) for key, verdict in zip(keys(settings), (Verdict.PASS, Verdict.FAIL), strict=True)]
    assert messages(profile("bandwidth", "nixl-loads"), a_run(settings, *rows, result("nixl-loads"))) == [], (
        "what failed is not missing"
    )


def test_a_requested_row_without_a_result_is_missing(settings: Settings) -> None:
    first, other = keys(settings)
    missing = missing_results(profile(), a_run(settings, row(first)))
    assert [(lack.check, lack.row) for lack in missing] == [("bandwidth", other)]
    assert missing[0].reason.startswith(f"the requested row {other} was not measured")


def test_a_row_that_did_not_run_is_not_measured(settings: Settings) -> None:
    skipped = [row(key, Verdict.NOT_APPLICABLE, "no such memory") for key in keys(settings)]
    assert messages(profile(), a_run(settings, *skipped)) == [
        "bandwidth: no row was measured, so there is nothing to accept"
    ]


def test_rows_of_requests_and_patterns_are_not_those_that_were_requested(settings: Settings) -> None:
    first, other = keys(settings)
    of_requests = replace(first, variant=(*first.variant, ("kv", "scattered")))
    assert of_requests.kv
    assert messages(profile(), a_run(settings, row(of_requests), suites=("kv_cache",))) == []
    assert messages(profile(), a_run(settings, row(of_requests))) == [
        "bandwidth: no row was measured, so there is nothing to accept"
    ]
    # A user's test that measures a row asks for all rows, whatever suites were selected.
    assert messages(profile(), a_run(settings, row(first), suites=())) == [
        f"bandwidth: the requested row {other} was not measured: its test was not selected or did not run"
    ]


def test_a_run_that_ended_early_is_missing_as_a_whole(settings: Settings) -> None:
    run = a_run(settings, row(keys(settings)[0]), ended="the run ended because nixl-loads failed")
    assert messages(profile("nixl-loads"), run) == ["whole-run: the run ended because nixl-loads failed"]


def test_a_run_without_any_check_is_missing_as_a_whole(settings: Settings) -> None:
    skipped = result("nixl-loads", Verdict.NOT_APPLICABLE)
    for results, fragment in (((), "no check ran"), ((skipped,), "all checks were skipped")):
        [sentence] = messages(profile(), a_run(settings, *results, suites=("infrastructure",)))
        assert sentence.startswith(f"whole-run: {fragment}")
    assert messages(profile(), a_run(settings, skipped, result("etcd-answers"), suites=("infrastructure",))) == []


@pytest.mark.parametrize("required", [(), ("mine",)])
def test_a_check_without_parameters_is_missing_once(settings: Settings, required: tuple[str, ...]) -> None:
    empty = result("mine", Verdict.NOT_APPLICABLE, "got empty parameter set ['number']")
    [missing] = missing_results(profile(*required), a_run(settings, result("etcd-answers"), empty, suites=()))
    assert (missing.check, missing.nodeid) == ("mine", "test_mine")


def test_a_required_check_of_a_selected_suite_is_missing_if_it_did_not_run(settings: Settings) -> None:
    run = a_run(settings, result("etcd-answers"), suites=("infrastructure",))
    assert messages(profile("nixl-loads", "etcd-answers", "bandwidth", "of-a-user"), run) == [
        f"{check}: the profile 'mine' requires the check {check!r}, which did not run"
        for check in ("nixl-loads", "of-a-user")
    ], "the suite of the third was not selected"
    [former] = missing_results(profile("etcd-answers", "ranks-in-every-order"), run)
    assert (former.check, former.verdict) == ("ranks-in-every-order", Verdict.WARN)
    assert former.reason.endswith("which pytest-nixl no longer has")


def test_a_required_check_above_the_level_of_the_run_is_missing(settings: Settings) -> None:
    run = a_run(settings, result("etcd-answers"), suites=("infrastructure",), **{"nixl-loads": "extended"})
    [missing] = missing_results(profile("nixl-loads"), run)
    assert missing.reason.endswith(f"which is of level extended, and this run is of level {settings.level}")
    assert missing.remedy.startswith("give --nixl-level=extended")
    # It ran all the same: as a user's test.
    run = a_run(settings, result("nixl-loads"), suites=("infrastructure",), **{"nixl-loads": "extended"})
    assert messages(profile("nixl-loads"), run) == []


def test_a_required_check_is_missing_if_tests_of_it_were_skipped(settings: Settings) -> None:
    skipped = result("nixl-loads", Verdict.NOT_APPLICABLE, "no NIXL here")
    other_results = [result("etcd-answers"), skipped, replace(skipped, nodeid="test_other", reason="nor here")]
    run = a_run(settings, *other_results, suites=("infrastructure",))
    [missing] = missing_results(profile("nixl-loads"), run)
    assert missing.reason.endswith("which was skipped: no NIXL here")
    assert missing.nodeid == "test_nixl-loads"
    assert missing.remedy.startswith("remove the reason for the skip; if this kind of machine")
    with_remedy = replace(skipped, remedy="give the container its GPUs")
    [other] = missing_results(
        profile("nixl-loads"), a_run(settings, other_results[0], with_remedy, suites=("infrastructure",))
    )
    assert other.remedy.startswith("give the container its GPUs; if this kind of machine")
    [partly] = missing_results(
        profile("nixl-loads"), a_run(settings, *other_results, result("nixl-loads"), suites=("infrastructure",))
    )
    assert partly.reason.endswith("which was skipped in 2 of 3 tests: no NIXL here")


@pytest.mark.parametrize(
    ("source", "requested"),
    [("option", "--nixl-memory"), ("environment NIXL_MEMORY", "NIXL_MEMORY"), ("nixl_memory in the ini file",) * 2],
)
def test_requested_gpu_memory_of_which_no_row_ran_is_missing(settings: Settings, source: str, requested: str) -> None:
    both = replace(settings, memory=(HOST, GPU), sources={**settings.sources, "memory": source})
    host, skipped = (
        [row(key) for key in keys(both, HOST)],
        [row(key, Verdict.NOT_APPLICABLE, "VRAM needs a GPU", "get one") for key in keys(both, GPU)],
    )
    skipped[1] = replace(skipped[1], reason="no more memory", nodeid="test_other")
    [missing] = missing_results(profile(), a_run(both, *host, *skipped))
    # Without a gate, only an option asks for it by name.
    assert unchecked_requests(a_run(both, *host, *skipped)) == ([missing] if source == "option" else [])
    assert missing.reason == f"VRAM:VRAM was requested ({requested}), but none of its 2 rows ran: VRAM needs a GPU"
    assert (missing.check, missing.remedy, missing.nodeid) == ("bandwidth", "get one", "test_bandwidth")
    ran = row(keys(both, GPU)[0])
    assert messages(profile(), a_run(both, *host, ran, skipped[1])) == []
    single_size = replace(both, blocks=(4096,))
    reason = "bandwidth: VRAM:VRAM was requested ({}), but its only row did not run: VRAM needs a GPU"
    alone_skipped = replace(skipped[1], reason="VRAM needs a GPU")
    assert messages(profile(), a_run(single_size, row(keys(single_size, HOST)[0]), alone_skipped)) == [
        reason.format(requested)
    ]
    # Host memory is not such memory, and no row of it needs to be there.
    alone = replace(settings, sources={**settings.sources, "memory": source})
    assert len(messages(profile(), a_run(alone, row(keys(alone)[0]), row(keys(alone)[1], Verdict.NOT_APPLICABLE)))) == 0


def test_a_gate_fails_by_what_is_missing_or_failed(settings: Settings) -> None:
    every = [result(verdict.name, verdict) for verdict in Verdict]
    plain = {failure.verdict for failure in failing_results(every, profile(), gate=False)}
    gate = {failure.verdict for failure in failing_results(every, profile(), gate=True)}
    assert {Verdict.FAIL, Verdict.CORRUPT, Verdict.ERROR} <= plain < gate
    assert Verdict.MISSING in gate
    assert Verdict.PASS not in gate


class GivenConfig:
    """The options of a run, as pytest's configuration has them."""

    def __init__(self, plugin: bool = True, **options: object) -> None:
        self._options = options
        self.pluginmanager = SimpleNamespace(has_plugin=lambda _: plugin)

    def getoption(self, name: str, default: object = None) -> object:
        return self._options.get(name, default)

    def getini(self, name: str) -> object:
        raise KeyError(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GivenConfig(collectonly=True), "--collect-only"),
        (GivenConfig(numprocesses=2), "pytest-xdist"),
        (GivenConfig(dist="load"), "pytest-xdist"),
        (GivenConfig(tx=["popen"]), "pytest-xdist"),
        (GivenConfig(plugin=False), "-p no:benchmark"),
        (GivenConfig(benchmark_disable=True), "--benchmark-disable"),
        (GivenConfig(benchmark_skip=True), "--benchmark-skip"),
        (GivenConfig(reruns=2), "--reruns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_by_which_nothing_is_measured_is_refused(settings: Settings, config: object, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"is refused with {message}"):
        refuse_accidents(cast(pytest.Config, config), settings)


def test_a_job_of_several_tasks_is_refused_outside_a_step(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cast(pytest.Config, GivenConfig(dist="no"))
    alone = replace(settings, ranks=None)
    for variables, refused in (
        ({}, False), ({"SLURM_NTASKS": "1"}, False), ({"SLURM_NTASKS": "2"}, True), ({"SLURM_NTASKS": "many"}, False),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            if refused:
                with pytest.raises(pytest.UsageError, match="SLURM_NTASKS=2 in the environment: the job has 2 tasks"):
                    refuse_accidents(plain, alone)
                refuse_accidents(plain, replace(settings, ranks=1))
            else:
                refuse_accidents(plain, alone)


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
    [missing] = unchecked_requests(a_run(settings, *results))
    assert (missing.verdict, missing.reason) == (Verdict.MISSING, f"nothing was checked, because {reason}")
    assert missing.remedy == remedy
    assert unchecked_requests(a_run(settings, *results, result("bandwidth"))) == []
    assert unchecked_requests(a_run(settings, result("their-own", Verdict.NOT_APPLICABLE, "no GPU"))) == [], (
        "a user's own test"
    )
