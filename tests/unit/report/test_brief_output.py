# SPDX-License-Identifier: Apache-2.0
"""Which of pytest's and pytest-benchmark's lines a run leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.brief_output import BriefOutput, quiet_benchmarks, status_word, without_benchmark_header
from pytest_nixl.session.run import LiveRecord

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
    config = config_of("suites")
    config.getoption = lambda name, default=None: "x" if name == option else default
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


FAILED = Result("c", "t", Verdict.FAIL, "it is wrong", "Mend it.", repeat="pytest t.py")
TOLD = SimpleNamespace(nixl_result=FAILED, longrepr="FAIL: it is wrong\nremedy: Mend it.", sections=[])
UNTOLD = [
    SimpleNamespace(**{**vars(TOLD), **other})
    for other in ({"sections": ["log"]}, {"longrepr": "it is wrong\nmore"}, {"longrepr": ()}, {"nixl_result": None})
]  # fmt: skip
WARNINGS = [SimpleNamespace(message=text) for text in ("t.py:1: NixlWarning: it warns", "t.py:1: UserWarning: other")]


@pytest.mark.parametrize(
    ("verbosity", "path", "warnings", "failed"),
    [(0, ROOT / "suites/bandwidth/test_bandwidth.py", WARNINGS[1:], UNTOLD), (0, ROOT / "t.py", WARNINGS, UNTOLD),
     (1, ROOT / "suites/bandwidth/test_bandwidth.py", WARNINGS, [TOLD, *UNTOLD])],
    ids=["suites", "tests of a user", "-v"],
)  # fmt: skip
def test_pytest_does_not_tell_what_the_report_tells_and_counts_it_again(
    verbosity: int, path: Any, warnings: list[object], failed: list[object]
) -> None:
    stats: dict[str, list[Any]] = {"warnings": WARNINGS, "failed": [TOLD, *UNTOLD], "error": [], "passed": [1]}
    run: Any = SimpleNamespace(usable=True, serves=False, parallel=False, record=LiveRecord())
    terminal: Any = SimpleNamespace(verbosity=verbosity, stats=dict(stats))
    plugin = BriefOutput(run)
    option = SimpleNamespace(option=SimpleNamespace(collectonly=False))
    plugin.pytest_collection_finish(cast(Any, SimpleNamespace(config=option, items=[SimpleNamespace(path=path)])))
    summary = plugin.pytest_terminal_summary(terminal)
    next(summary)
    assert terminal.stats == {**stats, "warnings": warnings, "failed": failed}
    with pytest.raises(StopIteration):
        next(summary)
    assert terminal.stats == {**stats, "warnings": warnings}
