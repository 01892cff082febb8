# SPDX-License-Identifier: Apache-2.0
"""Which of pytest's and pytest-benchmark's lines a run leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.brief_output import quiet_benchmarks, status_word, without_benchmark_header

OF_BENCHMARK = "benchmark: 5.3.1 (defaults: timer=time.perf_counter disable_gc=False)"
HEADERS = [OF_BENCHMARK, [OF_BENCHMARK], "rootdir: /x", "my benchmark: 5.3.1 (defaults: x)", "benchmark: 5.3.1"]


def config_of(arguments: str, verbosity: int = 0, **options: Any) -> Any:
    """Return a configuration with these arguments, which was called in the folder of a clone."""
    return SimpleNamespace(
        args=arguments.split(), invocation_params=SimpleNamespace(dir=ROOT), option=SimpleNamespace(),
        get_verbosity=lambda: verbosity, getoption=lambda name, default=None: options.get(name, default),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "only_suites"),
    [
        (config_of("suites"), True),
        (config_of("suites/bandwidth/test_bandwidth.py::test_row[a::b] suites/faults"), True),
        (config_of("tests/../suites/faults", verbosity=-1), True),
        (config_of("pytest_nixl.suites.bandwidth pytest_nixl.suites", pyargs=True), True),
        (config_of("pytest_nixl.suites.bandwidth"), False),
        (config_of("tests suites", pyargs=True), False),
        (config_of("suites tests"), False),
        (config_of(""), False),
        (config_of("suites", verbosity=1), False),
    ],
)
def test_a_run_of_the_suites_alone_has_no_line_of_pytest_benchmark(config: Any, only_suites: bool) -> None:
    assert without_benchmark_header(config, HEADERS) == HEADERS[only_suites:]
    quiet_benchmarks(config)
    assert vars(config.option) == ({"benchmark_quiet": True} if only_suites else {})


@pytest.mark.parametrize("option", ["benchmark_compare", "benchmark_histogram", "benchmark_cprofile"])
def test_the_table_of_pytest_benchmark_stays_if_an_option_asks_for_more(option: str) -> None:
    config = config_of("suites", **{option: "x"})
    quiet_benchmarks(config)
    assert vars(config.option) == {}


ROW = Result("bandwidth", "t", Verdict.IMPLAUSIBLE, summary=RowSummary(1.234e9, 1e-6, 1e-6, 1, 0.0, 0.0, ()))


@pytest.mark.parametrize(
    ("when", "outcome", "result", "word"),
    [
        *(("call", outcome, ROW, (outcome, letter, "IMPLAUSIBLE 1.23 GB/s"))
          for outcome, letter in (("passed", "."), ("failed", "F"), ("skipped", "s"))),
        ("call", "rerun", ROW, None),
        ("setup", "passed", ROW, None),
        ("call", "passed", Result("bandwidth", "t", Verdict.ERROR), None),
        ("call", "passed", None, None),
    ],
)  # fmt: skip
def test_the_word_of_a_measured_row_is_its_verdict_and_bandwidth(
    when: str, outcome: str, result: Result | None, word: tuple[str, str, str] | None
) -> None:
    report = SimpleNamespace(when=when, outcome=outcome, nixl_result=result)
    assert status_word(cast(pytest.TestReport, report)) == word
