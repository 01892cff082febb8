# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: the page in a real browser, metrics with Prometheus' parser, JUnit with a schema, and CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import scipy.stats  # noqa: F401 - its import takes seconds: let no test wait for it
from helpers.browser import open_page
from helpers.records import key, record
from helpers.report_schemas import read_verdict_file
from helpers.small_report import BARE_ROW, DIGEST, IMAGE, READ_ROW, WRITE_ROW, small_report
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.units import format_size
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey, read_key
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import FORMATS, write_report
from pytest_nixl.report.github import add_summary, summary, workflow_commands
from pytest_nixl.report.matrix import matrices
from pytest_nixl.report.page import page as html_page
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.table import lines
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

pytest_plugins = ["frame_fixtures"]

InFrame = Callable[..., str]

HOSTILE = "<script>alert('x')</script>&\"'|`*"
SLOW = (2, 3)


def rows(factor: float) -> dict[str, list[float]]:
    """Return rows of two operations and eight sizes, READ times ``factor``, and all links of four ranks, one slow."""
    shares = {"WRITE": 1.0, "READ": 0.9 * factor}
    rates = {key(format_size(1 << power), op): power / 2 * shares[op] for op in shares for power in range(12, 27, 2)}
    for pair in permutations(range(4), 2):
        if pair != (0, 1):
            rates[key("64MiB", "WRITE", f"{pair[0]}-{pair[1]}")] = 7.1 if pair == SLOW else 11.9
    return {name: [rate * (1 + 0.002 * launch) for launch in range(-2, 3)] for name, rate in rates.items()}


def week(number: int, results: tuple[Result, ...] = ()) -> RecordedRun:
    """Return a run of a history in which UCX was changed in the eighth week and READ lost 14 %."""
    lost = number >= 7
    data = record(
        f"registry.example/nixl:1.{number}.0", rows(0.86 if lost else 1.0), digest=f"sha256:{number:064x}", week=number,
        versions={"nixl": "1.5.1", "ucx": "1.20.0" if lost else "1.19.0"}, environment={"UCX_TLS": f"rc,{HOSTILE}"},
        results=results, nics={"eth0": "100000 Mb/s"}, extra={"floor": 0.9e9, "ceiling": 13e9},
    )  # fmt: skip
    return parse_recorded(data, f"{number}.json")


@pytest.fixture(scope="module")
def report() -> RunReport:
    """Return the report of a regressed run with a failed row and a warning, and a history of nine weeks."""
    results = (
        Result("bandwidth", "x", Verdict.FAIL, f"UCX READ is too slow {HOSTILE}", "Look at it.", repeat="pytest x"),
        Result("etcd-uri", "y", Verdict.WARN, "the endpoint ends with a slash", "Write it without."),
        Result("nixl-loads", "z", Verdict.PASS),
    )
    run = week(9, results)
    compared = compare_runs(week(6), run, 0.05)
    run = replace(run, results=(*results, *compared.results))
    return RunReport(run, compared, (*(week(number) for number in range(9)), run))


@pytest.fixture(scope="module")
def page(report: RunReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(report, path)
    return path


def test_the_page_in_a_browser_has_no_error_loads_nothing_and_shows_its_charts(page: Path, tmp_path: Path) -> None:
    opened = open_page(page, tmp_path)
    assert opened.console == ()
    assert opened.requests == ()
    text = opened.document
    charts = ["Bandwidth over block size", "Latency of single transfers", "History by image"]
    assert re.findall(r"<h2>([^<]*)</h2>", text)[-4:-1] == charts
    labels = re.findall(r'aria-label="((?:bandwidth|latency|history) of [^"]*)"', text)
    assert [label.partition(" ")[0] for label in labels] == ["bandwidth"] + ["latency"] * 2 + ["history"] * 27
    assert text.count("<script") == 1
    assert HOSTILE not in text


def test_a_heading_sorts_the_table_of_rows(page: Path, tmp_path: Path) -> None:
    """Press the headings by a script beside the page's own, and let it say what the first column then has."""
    presses = """
    const press = (name) => [...document.querySelectorAll("table.sortable th button")]
      .find((button) => button.textContent === name).click();
    const rates = () => [...document.querySelectorAll("table.sortable tbody tr")]
      .map((row) => Number(row.cells[2].dataset.value));
    press("GB/s"); document.title = String(rates().every((rate, n, all) => !n || all[n - 1] <= rate));
    press("GB/s"); document.title += String(rates().every((rate, n, all) => !n || all[n - 1] >= rate));
    """
    text = re.sub(r'<meta http-equiv="Content.*', "", page.read_text())
    pressed = tmp_path / "pressed.html"
    pressed.write_text(text.replace("</body>", f"<script>{presses}</script></body>"))
    opened = open_page(pressed, tmp_path)
    assert opened.console == ()
    assert "<title>truetrue</title>" in opened.document


def test_neither_the_comparison_nor_the_page_is_wider_than_the_screen(page: Path, in_frame: InFrame) -> None:
    text = page.read_text()
    cut = "[...document.querySelectorAll('#against .scroll')].map((each) => each.scrollWidth - each.clientWidth)"
    wide = "document.documentElement.scrollWidth"
    small, _ = json.loads(in_frame(text, f"send(JSON.stringify([Math.max(...{cut}), {wide}]));", 1000, 700))
    assert small == 0
    for width in (360, 1200):
        assert 0 < int(in_frame(text, f"send(String({wide}));", width, 700)) <= width


def test_an_error_or_a_request_in_the_browser_is_noticed(page: Path, tmp_path: Path) -> None:
    """Show that both checks of the previous test can fail, with a page that has a fault for each."""
    bad = tmp_path / "bad.html"
    fault = '<img src="http://127.0.0.1:9/x.png"><script>console.error("said by the page")</script>'
    bad.write_text(re.sub(r"<meta http-equiv.*", fault, page.read_text()))
    opened = open_page(bad, tmp_path)
    assert any("said by the page" in line for line in opened.console)
    assert "http://127.0.0.1:9/x.png" in opened.requests


def test_the_page_of_a_run_without_rows_reports_that(tmp_path: Path) -> None:
    passed = Result("nixl-loads", "x", Verdict.PASS)
    run = parse_recorded(record("nixl:1", {}, results=[passed]), "x")
    write_report(RunReport(run), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<strong>PASS</strong>" in text
    assert "<dd>0 measured</dd>" in text
    assert "<svg" not in text
    filtered = '<form class="filter"'
    assert filtered in text
    run = parse_recorded(record("nixl:1", {}, results=[Result("gpus", "x", Verdict.NOT_APPLICABLE, "none")]), "x")
    assert filtered not in html_page(RunReport(run)), "nothing is there to be filtered"


def test_a_run_of_which_no_check_is_recorded_is_not_green() -> None:
    """A comparison of records without results has its verdict above rows that may have REGRESSED."""
    run = parse_recorded(record("nixl:1", {key("64KiB"): [9.0]}), "x")
    report = RunReport(run, gate=True)
    assert '<div class="verdict warn"><strong>NO CHECK IS RECORDED</strong>' in html_page(report)
    first, _, counts, _, _, heads, *_ = summary(report)
    assert (first, counts.rpartition(": ")[2]) == ("## NIXL gate: NO CHECK IS RECORDED", "no check ran")
    assert heads.startswith("| row | verdict |"), "no next step: nothing says that the run is to be accepted"


def test_a_run_of_which_no_row_can_be_compared_says_so() -> None:
    before = parse_recorded(record("nixl:1", {key("64KiB"): [9.0] * 5}), "x")
    wrong = Result("bandwidth", "x", Verdict.WRONG_TRANSPORT, "tcp", row=next(iter(before.rows)))
    run = parse_recorded(record("nixl:2", {key("64KiB"): [1.0] * 5}, results=[wrong]), "y")
    shown = html_page(RunReport(run, compare_runs(before, run, 0.05)))
    assert "No row can be compared: each failed in this run" in shown
    assert "The band shows" not in shown


@pytest.fixture(scope="module")
def small() -> RunReport:
    return small_report()


def test_the_parser_of_prometheus_reads_every_metric_of_a_run(small: RunReport, tmp_path: Path) -> None:
    write_report(small, tmp_path / "m.prom")
    families = list(text_string_to_metric_families((tmp_path / "m.prom").read_text()))
    assert {family.name: family.type for family in families if family.type != "gauge"} == {
        "nixl_latency_seconds": "summary"
    }
    fast = {"backend": "UCX", "op": "WRITE", "memory": "DRAM:DRAM", "block_bytes": "4096", "batch": "1", "depth": "1",
            "pair": "0-1"}  # fmt: skip
    slow = {"backend": "UCX", "op": "READ", "memory": "DRAM:VRAM", "block_bytes": "65536", "batch": "8", "depth": "4",
            "pair": "2-5", "variant": "notify=each"}  # fmt: skip
    bare = {**fast, "backend": "LIBFABRIC", "block_bytes": "1048576"}
    counts = {"PASS": 2.0, "FAIL": 2.0, "WARN": 1.0, "INCONCLUSIVE": 1.0, "NOT-APPLICABLE": 1.0}
    percentiles = {"0.5": 1.5e-6, "0.9": 2e-6, "0.99": 4e-6, "0.999": 8e-6}
    figure = {"figure": "registration", "backend": "UCX", "count": "1"}
    about = {"image": IMAGE, "digest": DIGEST, "host": "n-a", "nixl_version": "1.5.1", "ucx_version": "1.20.0",
             "libfabric_version": ""}  # fmt: skip
    assert {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families} == {
        "nixl_run_timestamp_seconds": [({}, small.run.when.timestamp())],
        "nixl_run_info": [(about, 1.0)],
        "nixl_checks": [({"verdict": str(verdict)}, counts.get(str(verdict), 0.0)) for verdict in Verdict],
        "nixl_run_passed": [({}, 0.0)],
        "nixl_run_interrupted": [({}, 0.0)],
        "nixl_bandwidth_bytes_per_second": [(fast, 2e9), (bare, 4e9), (slow, 1e9)],
        "nixl_latency_seconds": [
            ({**row, "quantile": name}, pytest.approx(value))
            for row, values in (
                (fast, percentiles), (bare, {"0.5": 5e-7, "0.9": 0.0, "0.999": 3e-6}), (slow, percentiles)
            )
            for name, value in values.items()
        ],
        "nixl_bandwidth_floor_bytes_per_second": [(fast, 5e8), (slow, 5e8)],
        "nixl_bandwidth_ceiling_bytes_per_second": [(fast, 9e9), (slow, 9e9)],
        "nixl_figure_seconds": [({**figure, "size": "4096"}, 3e-3), ({**figure, "size": "8192"}, 2e-3)],
        "nixl_bandwidth_change_ratio": [(fast, 1.0), (slow, 0.5)],
        "nixl_regressed": [({}, 1.0)],
    }  # fmt: skip


def test_the_metrics_of_a_good_run_without_a_baseline_name_no_regression(small: RunReport) -> None:
    good = replace(small.run, results=(Result("x", "x", Verdict.PASS),), interrupted="INTERRUPTED")
    for interrupted, passed in (("", 1.0), ("INTERRUPTED", 0.0)):
        text = FORMATS[".prom"](RunReport(replace(good, interrupted=interrupted)))
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        assert families["nixl_run_passed"][0].value == passed == 1.0 - families["nixl_run_interrupted"][0].value
        assert not {"nixl_regressed", "nixl_bandwidth_change_ratio", "nixl_figure_seconds"} & set(families)


def test_the_table_has_each_row_with_each_column(small: RunReport, tmp_path: Path) -> None:
    write_report(replace(small, run=replace(small.run, interrupted="Ctrl-C")), tmp_path / "t.csv")
    of_run = {"time": "2026-03-09T03:00:00+00:00", "image": IMAGE, "digest": DIGEST, "host": "n-a",
              "interrupted": "Ctrl-C"}  # fmt: skip
    fast = {
        **of_run, "row": WRITE_ROW, "backend": "UCX", "op": "WRITE", "memory": "DRAM:DRAM", "block_bytes": "4096",
        "batch": "1", "depth": "1", "pair": "0-1", "gigabytes_per_second": "2", "launches": "2 2.02 1.98 2.04 1.96",
        "p50_us": "1.5", "p90_us": "2", "p99_us": "4", "p99.9_us": "8", "floor_gigabytes_per_second": "0.5",
        "ceiling_gigabytes_per_second": "9", "transports": "rc/mlx5_0:1+tcp/eth0", "verdict": "FAIL", "change": "0",
        "regression": "UNCHANGED",
    }  # fmt: skip
    slow = {
        **fast, "row": READ_ROW, "op": "READ", "memory": "DRAM:VRAM", "block_bytes": "65536", "batch": "8",
        "depth": "4", "pair": "2-5", "gigabytes_per_second": "1", "launches": "1 1.01 0.99 1.02 0.98", "change": "-0.5",
        "regression": "REGRESSED",
    }  # fmt: skip
    bare = {
        **fast, "row": BARE_ROW, "backend": "LIBFABRIC", "block_bytes": "1048576", "gigabytes_per_second": "4",
        "launches": "4", "p50_us": "0.5", "p90_us": "0", "p99_us": "", "p99.9_us": "3", "transports": "",
        "floor_gigabytes_per_second": "", "ceiling_gigabytes_per_second": "", "verdict": "", "change": "",
        "regression": "",
    }  # fmt: skip
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [fast, bare, slow]
    [alone, *_] = csv.DictReader(io.StringIO(FORMATS[".csv"](RunReport(small.run))))
    assert (alone["change"], alone["regression"], alone["interrupted"]) == ("", "", "")


def test_the_verdict_for_programs_has_every_result_and_row(small: RunReport, tmp_path: Path) -> None:
    write_report(small, tmp_path / "verdict.json")
    verdict = read_verdict_file(tmp_path)
    empty = {"remedy": "", "row": "", "finding": "", "known_limit": False, "repeat": "", "seconds": 0.0}
    row = {"floor": 5e8, "ceiling": 9e9, "transports": ["rc/mlx5_0:1", "tcp/eth0"],
           "latencies": pytest.approx({"p50": 1.5e-6, "p90": 2e-6, "p99": 4e-6, "p99.9": 8e-6})}  # fmt: skip
    expected: dict[str, object] = {
        "format": 1, "verdict": "FAIL", "next": "reject", "text": "", "exit_code": 1, "seconds": 9.877, "rows": 2,
        "when": "2026-03-09T03:00:00+00:00", "host": "n-a", "hosts": [], "failed_tests": [],
        "image": {"reference": IMAGE, "digest": DIGEST}, "versions": {"nixl": "1.5.1", "ucx": "1.20.0"},
        "findings": ["NIXL-ETCD-STALE-KEY", "NIXL-ETCD-HTTPS-PLAINTEXT"], "known_limits": ["NIXL-ETCD-STALE-KEY"],
        "results": [
            {**empty, "check": "etcd-uri", "test": "u", "verdict": "WARN", "outcome": "WARN",
             "reason": "a | and <b>\n*_`[end]\\", "remedy": "Leave it out."},
            {**empty, "check": "a,b:c", "test": "r", "verdict": "FAIL", "outcome": "FAIL", "reason": "too slow",
             "remedy": "Look at 100 %.", "row": READ_ROW, "repeat": "pytest r"},
            {**empty, "check": "bandwidth", "test": "w", "verdict": "FAIL", "outcome": "FAIL", "reason": "slow, too",
             "remedy": "Look at 100 %.", "row": WRITE_ROW, "seconds": 1.235},
            {**empty, "check": "gpus", "test": "g", "verdict": "NOT-APPLICABLE", "outcome": "SKIP",
             "reason": "no GPU"},
            {**empty, "check": "limit", "test": "l", "verdict": "PASS", "outcome": "PASS", "reason": "no lease",
             "finding": "NIXL-ETCD-STALE-KEY", "known_limit": True},
            {**empty, "check": "registration", "test": "r", "verdict": "PASS", "outcome": "PASS", "reason": ""},
            {**empty, "check": "stale", "test": "s", "verdict": "INCONCLUSIVE", "outcome": "WARN",
             "reason": "no lease", "finding": "NIXL-ETCD-HTTPS-PLAINTEXT"},
        ],
        "measured_rows": [
            {**row, "row": WRITE_ROW, "bandwidth": 2e9, "launches": [2e9, 2.02e9, 1.98e9, 2.04e9, 1.96e9]},
            {"row": BARE_ROW, "bandwidth": 4e9, "launches": [4e9], "floor": None, "ceiling": None, "transports": [],
             "latencies": pytest.approx({"p50": 5e-7, "p90": 0.0, "p99.9": 3e-6})},
            {**row, "row": READ_ROW, "bandwidth": 1e9, "launches": [1e9, 1.01e9, 0.99e9, 1.02e9, 0.98e9]},
        ],
    }  # fmt: skip
    assert {name: verdict[name] for name in expected} == expected
    write_report(replace(small, gate=True), tmp_path / "verdict.json")
    outcomes = ["WARN", "FAIL", "FAIL", "SKIP", "PASS", "PASS", "FAIL"]
    assert [result["outcome"] for result in read_verdict_file(tmp_path)["results"]] == outcomes
    for refused, interrupted, text in (("no etcd", "", "no etcd"), ("", "Ctrl-C", "Ctrl-C")):
        ended = replace(small, refused=refused, run=replace(small.run, interrupted=interrupted))
        assert json.loads(FORMATS[".json"](ended))["text"] == text
    provenance = replace(small.run.provenance, host={"ranks": ["a", "b"]})
    ranks = RunReport(replace(small.run, provenance=provenance))
    assert json.loads(FORMATS[".json"](ranks))["hosts"] == ["a", "b"]


def test_the_summary_of_a_step_is_markdown_with_each_remedy_once(small: RunReport) -> None:
    image, transports = 'reg/"a"\\|\\\\nb\\* c:2', "rc/mlx5\\_0:1+tcp/eth0"
    assert list(summary(small)) == [
        "## NIXL verdict: FAIL",
        "",
        f"{image} (121212121212) on n-a: 2 PASS, 2 FAIL, 1 INCONCLUSIVE, 1 WARN, 1 NOT-APPLICABLE",
        "",
        "Next: **reject**: do what the first remedy says, then repeat its command.",
        "",
        "- **FAIL** too slow",
        "- **FAIL** slow, too",
        "  - for these 2: Look at 100 %.",
        "- **WARN** a \\| and &lt;b> \\*\\_\\`\\[end\\]\\\\",
        "  - Leave it out.",
        "- **INCONCLUSIVE** no lease",
        "",
        "1 more known limit of NIXL 1.5.1, seen only under conditions that the checks made: `pytest-nixl explain "
        "--findings`",
        "",
        "| row | verdict | GB/s | floor | p50 | p99 | transport | change |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
        f"| UCX WRITE DRAM:DRAM 4KiB | FAIL | 2 | 0.5 | 1.5 µs | 4 µs | {transports} | "
        "+0.0 % \\[-2.0, +2.0\\] UNCHANGED |",
        "| LIBFABRIC WRITE DRAM:DRAM 1MiB |  | 4 |  | 500 ns |  |  |  |",
        "| UCX READ DRAM:VRAM 64KiB batch8 depth4 ranks 2-5 notify=each | FAIL | 1 | 0.5 | 1.5 µs | 4 µs | "
        f"{transports} | -50.0 % \\[-51.0, -49.0\\] REGRESSED |",
        "",
        "| row | NIXL : raw | raw GB/s | by | over |",
        "| --- | ---: | ---: | --- | --- |",
        "| UCX READ DRAM:VRAM 64KiB batch8 depth4 ranks 2-5 notify=each | 0.47 | 4 | "
        f"ucx\\_perftest (ucp\\_get\\_bw, UCX 1.18) | {transports} |",
        "",
        "Changed since reg/nixl:1 (121212121212):",
        "",
        f"- image: reg/nixl:1 -> {image}",
        "- versions ucx: 1.19.0 -> 1.20.0",
    ]
    alone = list(summary(RunReport(replace(small.run, results=(Result("x", "x", Verdict.PASS),)), gate=True)))
    assert (alone[0], alone[2].partition(": ")[2]) == ("## NIXL gate: PASS", "1 PASS")
    assert alone[7:9] == [
        "| row | verdict | GB/s | floor | p50 | p99 | transport |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    assert len(alone) == 12


def test_annotations_are_one_line_each_and_limited_in_number(small: RunReport) -> None:
    assert list(workflow_commands(small)) == [
        "::error title=NIXL FAIL a%2Cb%3Ac::too slow%0ALook at 100 %25.",
        "::error title=NIXL FAIL bandwidth::slow, too%0ALook at 100 %25.",
        "::warning title=NIXL WARN etcd-uri::a | and <b>%0A*_`[end]\\%0ALeave it out.",
        "::warning title=NIXL INCONCLUSIVE stale::no lease",
    ]
    many = [Result("c", "x", verdict, f"{number}") for number in range(30) for verdict in (Verdict.FAIL, Verdict.WARN)]
    lines = list(workflow_commands(replace(small, run=replace(small.run, results=tuple(many)))))
    assert lines == [f"::{kind} title=NIXL {verdict} c::{number}"
                     for kind, verdict in (("error", "FAIL"), ("warning", "WARN")) for number in range(10)]  # fmt: skip
    healthy = replace(small, run=replace(small.run, results=(Result("x", "x", Verdict.PASS),)), exit_code=4)
    assert list(workflow_commands(replace(healthy, refused="no etcd, 1"))) == ["::error title=NIXL REFUSED::no etcd, 1"]
    [line] = workflow_commands(replace(healthy, exit_code=1))
    assert line.startswith("::error title=NIXL FAIL::")
    interrupted = replace(healthy, run=replace(healthy.run, interrupted="INTERRUPTED by\r1"), exit_code=None)
    assert list(workflow_commands(interrupted)) == ["::error title=NIXL INTERRUPTED::INTERRUPTED by\\r1"]


def test_a_result_of_a_row_that_a_later_version_wrote_is_shown_as_it_is(tmp_path: Path) -> None:
    later = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1/threads4"
    raw = RawMeasurement("ucx_perftest", "ucp_put_bw", 2e9, "UCX 1.18", ("tcp/eth0",))
    figures = RowSummary(1e9, 1e-5, 2e-5, 10, 1e8, 1e10, ("tcp/eth0",))
    result = Result("bandwidth", "t", Verdict.WARN, "", row=read_key(later), summary=figures,
                    ratios=(RawRatio(read_key(later), 1e9, raw),))  # fmt: skip
    run = parse_recorded(record("image:1", {key("4KiB"): [1.0]}, results=[result]), "x")
    assert run.results == (result,)
    for name in ("r.html", "r.csv", "r.prom"):
        write_report(RunReport(run), tmp_path / name)
    assert later in (tmp_path / "r.html").read_text()
    assert later in "\n".join(summary(RunReport(run)))
    shown = [line.text for line in lines([result], gate=False)]
    assert sum(later in line for line in shown) == 2
    assert f"{later} : ucx_perftest  0.50  of 2 GB/s by" in "\n".join(shown)


def test_a_summary_that_is_a_fifo_is_reported_and_not_waited_for(
    report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "fifo"))
    with pytest.raises(NixlPluginError, match="is a FIFO"):
        add_summary(report)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    add_summary(report)
    once = (tmp_path / "summary.md").read_text()
    add_summary(report)
    assert (tmp_path / "summary.md").read_text() == 2 * once


def test_the_changes_of_a_table_are_drawn_over_one_axis_that_holds_them(tmp_path: Path) -> None:
    """Losses of 70 % and of 77 % lie apart, and a row that REGRESSED is not green among the rows."""
    sizes = ("64KiB", "1MiB", "16MiB")
    pass_of = [Result("bandwidth", size, Verdict.PASS, row=RowKey.parse(key(size))) for size in sizes]
    before, now = (
        parse_recorded(
            record("registry.example/nixl:1", {key(size): [rate * f for f in (1.0, 1.01, 0.99, 1.02, 0.98)]
                                               for size, rate in zip(sizes, rates, strict=True)}, results=classes),
            "run.json")
        for rates, classes in (((10.0, 10.0, 10.0), ()), ((10.0, 3.0, 2.3), pass_of))
    )  # fmt: skip
    path = tmp_path / "report.html"
    write_report(RunReport(now, compare_runs(before, now, 0.05)), path)
    text = path.read_text()
    drawn = re.findall(r'<td class="bar">.*?<circle class="point \w+" cx="([\d.]+)"', text)
    assert len(set(drawn)) == 3
    scale = re.search(r'<th scope="col"><svg[^>]*aria-label="axis from -(\d+) % to \+(\d+) %"', text)
    assert scale is not None
    assert int(scale[1]) >= 77
    [rows_table] = re.findall(r'<table class="sortable">.*?</table>', text, re.DOTALL)
    assert re.findall(r'><td class="text (\w+)">(\S+)</td>', rows_table) == [
        ("fail", "REGRESSED"), ("fail", "REGRESSED"), ("soft", "–"),
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "slow"), [("WRITE", (0, 1)), ("READ", (1, 0))])
def test_the_flows_of_a_pattern_stand_from_source_to_target_whatever_reads_or_writes(
    op: str, slow: tuple[int, int]
) -> None:
    rates = {"0-1": 1.0, "0-2": 2.0, "3-1": 4.0}
    rows = {f"{key('1MiB', op, pair)}/pattern=pairs:4": [rate] for pair, rate in rates.items()}
    [card] = matrices(parse_recorded(record("image:1", rows), "r.json"))
    sources, targets = ([0, 3], [1, 2]) if op == "WRITE" else ([1, 2], [0, 3])
    assert ([rank for rank, _ in card.rows], list(card.targets)) == (sources, targets)
    shown = {
        (rank, target): (cell.text, cell.slowest, cell.devices)
        for rank, cells in card.rows for target, cell in zip(card.targets, cells, strict=True) if cell is not None
    }  # fmt: skip
    assert shown == {
        (int(pair[0]), int(pair[2]))[:: 1 if op == "WRITE" else -1]: (f"{rate:g}", rate == 1.0, "eth0")
        for pair, rate in rates.items()
    }
    assert card.summary == f"slowest: rank {slow[0]} to rank {slow[1]}, 1 GB/s, 25 % of the fastest"


def test_a_cell_has_the_colour_of_its_share_of_the_fastest_and_its_devices() -> None:
    """Full colour for the fastest, none for half of it or less. Transports without a device name none."""
    rows = {f"{key('1MiB', pair=pair)}/threads=2": [rate] for pair, rate in (("0-1", 2.0), ("0-2", 1.5), ("1-2", 0.5))}
    small = {name.replace("1MiB", "4KiB"): [9.0] for name in rows}
    data = record("image:1", {**rows, **small}, extra={"transports": ["cma", "tcp/eth0", "rc/eth0"]})
    [card] = matrices(parse_recorded(data, "r.json"))
    assert card.title == "UCX WRITE DRAM:DRAM of 1MiB, threads=2"
    cells = [cell for _, of_rank in card.rows for cell in of_rank if cell is not None]
    assert [re.findall(r"(\d+)%", cell.style) for cell in cells] == [["35"], ["18"], ["0"]]
    assert [(cell.text, cell.devices, cell.slowest) for cell in cells] == [
        ("2", "eth0", False), ("1.5", "eth0", False), ("0.5", "eth0", True),
    ]  # fmt: skip


def test_ranks_are_in_order_whatever_the_record_has() -> None:
    pairs = [(16, 3), (8, 1), (3, 16), (1, 8)]
    for order in (pairs, pairs[::-1]):
        rows = {key("1MiB", "WRITE", f"{first}-{second}"): [1.0 + first] for first, second in order}
        [card] = matrices(parse_recorded(record("image:1", rows), "r.json"))
        assert ([rank for rank, _ in card.rows], list(card.targets)) == ([1, 3, 8, 16], [1, 3, 8, 16])
        measured = {
            (rank, target)
            for rank, cells in card.rows
            for target, cell in zip(card.targets, cells, strict=True)
            if cell
        }
        assert measured == set(pairs)
