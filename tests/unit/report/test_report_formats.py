# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: the page in a real browser, metrics with Prometheus' parser, JUnit with a schema, and CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.browser import open_page
from helpers.cli_run import bandwidth, junit_suite, profile
from helpers.records import key, record
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.cli import main
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.units import format_size
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.row_key import RowKey, read_key
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.charts import bandwidth as bandwidth_cards
from pytest_nixl.report.charts import latency as latency_cards
from pytest_nixl.report.charts import nice_step, value_axis
from pytest_nixl.report.files import csv_text, write_report
from pytest_nixl.report.github import add_summary, summary, workflow_commands
from pytest_nixl.report.matrix import matrices
from pytest_nixl.report.page import page as html_page
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.report.table import lines
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

HOSTILE = "<script>alert('x')</script>&\"'|`*"
SLOW = (2, 3)


def rows(factor: float) -> dict[str, list[float]]:
    """Return rows of two operations and eight sizes, READ times ``factor``, and all links of four ranks, one slow."""
    rows_by_key = {}
    for op, share in (("WRITE", 1.0), ("READ", 0.9 * factor)):
        for power in range(12, 27, 2):
            rate = 12.0 * 2**power / (2**power + 300e3) * share
            rows_by_key[key(format_size(1 << power), op)] = [rate * (1 + 0.002 * launch) for launch in range(-2, 3)]
    for number in range(4):
        for other in range(4):
            if number != other and (number, other) != (0, 1):
                rate = 7.1 if (number, other) == SLOW else 11.9
                rows_by_key[key("64MiB", "WRITE", f"{number}-{other}")] = [rate * (1 + 0.002 * n) for n in range(-2, 3)]
    return rows_by_key


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
    # The verdict comes first.
    assert re.search(r"<body>\s*<main>\s*<h1>[^<]*</h1>\s*<div class=\"verdict fail\"><strong>FAIL</strong>", text)
    titles = re.findall(r"<h2>([^<]*)</h2>", text)
    assert titles == [
        "Against registry.example/nixl:1.6.0 (000000000000)",
        "Findings",
        "Ranks and links",
        "Rows",
        "Checks",
        "Bandwidth over block size",
        "Latency of single transfers",
        "History by image",
        "Provenance and what changed",
    ]
    labels = re.findall(r'aria-label="((?:bandwidth|latency|history) of [^"]*)"', text)
    assert [label.partition(" ")[0] for label in labels] == ["bandwidth"] + ["latency"] * 2 + ["history"] * 27
    assert len(re.findall(r'<polyline class="line s\d before"', text)) == 2  # the baseline's, of both operations
    assert 'class="dot s0 before"' in text
    contents = re.findall(r'<li><a href="#([^"]*)">([^<]*)</a></li>', text.partition("<nav")[2].partition("</nav>")[0])
    assert [title for _, title in contents] == titles
    assert len(re.findall(r'class="mark"', text)) == 8  # one for the change of each READ row
    assert re.search(r'<td class="cell slow"[^>]*>7.1<small>eth0</small></td>', text)
    assert "slowest: rank 2 to rank 3, 7.1 GB/s, 59 % of the fastest" in text
    assert re.search(r'<tr class="changed"><td class="wrap">versions ucx</td><td class="wrap">1.19.0</td>', text)
    assert text.count("<script") == 1
    assert HOSTILE not in text
    assert 'id="check-bandwidth" href="#check-bandwidth"' in text
    anchors = re.findall(r' id="([^"]*)"', text)
    assert len(anchors) == len(set(anchors))


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


def test_the_comparison_is_not_cut_on_a_small_window(page: Path, tmp_path: Path) -> None:
    cut = """[...document.querySelectorAll("#against .scroll")].map((each) => each.scrollWidth - each.clientWidth)"""
    assert _in_a_frame(page, tmp_path, 1000, f"Math.max(...{cut})") == 0


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_is_not_wider_than_the_screen(page: Path, tmp_path: Path, width: int) -> None:
    assert _in_a_frame(page, tmp_path, width, "document.documentElement.scrollWidth") <= width


def _in_a_frame(page: Path, tmp_path: Path, width: int, number: str) -> int:
    """Return a number of a page in a frame of that width, because a browser's window cannot be that narrow.

    :param number: an expression of JavaScript.
    """
    measure = f"document.title = String({number});"
    text = re.sub(r'<meta http-equiv="Content.*', "", page.read_text())
    (tmp_path / "inner.html").write_text(
        text.replace("</body>", f"<script>{measure} parent.postMessage(document.title, '*');</script></body>")
    )
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<!doctype html><script>onmessage = (event) => { document.title = event.data; };</script>"
        f'<iframe src="inner.html" style="width: {width}px; height: 700px; border: 0"></iframe>'
    )
    opened = open_page(frame, tmp_path, "--virtual-time-budget=3000")
    [title] = re.findall(r"<title>(\d+)</title>", opened.document)
    return int(title)


def test_an_error_or_a_request_in_the_browser_is_noticed(page: Path, tmp_path: Path) -> None:
    """Show that both checks of the previous test can fail, with a page that has a fault for each."""
    bad = tmp_path / "bad.html"
    fault = '<img src="http://127.0.0.1:9/x.png"><script>console.error("said by the page")</script>'
    bad.write_text(re.sub(r"<meta http-equiv.*", fault, page.read_text()))
    opened = open_page(bad, tmp_path)
    assert any("said by the page" in line for line in opened.console)
    assert "http://127.0.0.1:9/x.png" in opened.requests


STEPS_US = {"prepare": 1500.0, "make": 300.0, "post": 9000.0, "transfer": 1.4, "notify": 120.0, "release": 20.0}


def kv_run() -> RecordedRun:
    """Return a run with five ways to request KV blocks in both operations, beside a row of whole blocks."""
    routes = (
        "contiguous-merged",
        "contiguous-unmerged",
        "scattered-initialized",
        "scattered-prepped",
        "scattered-unmerged",
    )
    rates = {
        f"UCX/{op}/DRAM:DRAM/32KiB/batch4096/depth1/0-1/kv={route},model=generic,tokens=1024": [number + share]
        for number, route in enumerate(routes, 1)
        for op, share in (("WRITE", 0.25), ("READ", 0.5))
    }
    data = record("registry.example/nixl:1", {**rates, key("64KiB"): [9.0]}, extra={"steps_us": STEPS_US})
    return parse_recorded(data, "kv.json")


def test_rows_of_kv_requests_differ_in_every_report() -> None:
    run = kv_run()
    requests = [row for row in run.rows if row.kv]
    assert len({row.short for row in requests}) == 10
    results = [
        Result("kv-requests", str(row), Verdict.PASS, row=row, summary=figures) for row, figures in run.rows.items()
    ]
    texts = [line.text for line in lines(results, gate=False)]
    assert len([text for text in texts if "kv=scattered-prepped,model=generic,tokens=1024" in text]) == 2
    heads = [text.split()[:8] for text in texts if text.startswith("backend ")]
    columns = ["backend", "op", "memory", "block", "batch", "depth"]
    assert [head[:7] for head in heads] == [[*columns, "GB/s"], [*columns, "variant"]]  # a table for each
    assert [text for text in texts if " : " in text] == []
    restored = [Result.from_plain(result.plain()) for result in results]
    assert restored == results
    assert restored[0].summary is not None
    assert restored[0].summary.steps == pytest.approx({name: value / 1e6 for name, value in STEPS_US.items()})


@pytest.mark.parametrize("steps", [{"make": -1.0}, {str(number): 1.0 for number in range(17)}, {"make": float("inf")}])
def test_a_record_with_wrong_steps_is_refused(steps: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="more than 16 steps, or one that is not a number from zero on"):
        parse_recorded(record("x", {key("64KiB"): [9.0]}, extra={"steps_us": steps}), "kv.json")


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
    assert '<div class="verdict warn"><strong>NO CHECK IS RECORDED</strong>' in html_page(RunReport(run))


def test_a_run_of_which_no_row_can_be_compared_says_so() -> None:
    before = parse_recorded(record("nixl:1", {key("64KiB"): [9.0] * 5}), "x")
    wrong = Result("bandwidth", "x", Verdict.WRONG_TRANSPORT, "tcp", row=next(iter(before.rows)))
    run = parse_recorded(record("nixl:2", {key("64KiB"): [1.0] * 5}, results=[wrong]), "y")
    shown = html_page(RunReport(run, compare_runs(before, run, 0.05)))
    assert "No row can be compared: each failed in this run" in shown
    assert "The band shows" not in shown


def test_the_parser_of_prometheus_accepts_the_metrics(report: RunReport, tmp_path: Path) -> None:
    write_report(report, tmp_path / "m.prom")
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "m.prom").read_text())}
    assert {name for name, metric_family in families.items() if metric_family.type != "gauge"} == {
        "nixl_latency_seconds"
    }
    rates = families["nixl_bandwidth_bytes_per_second"].samples
    assert len(rates) == len(report.run.rows)
    rates_by_labels = {
        (rate.labels["op"], rate.labels["block_bytes"], rate.labels["pair"]): rate.value for rate in rates
    }
    assert rates_by_labels["READ", "65536", "0-1"] == pytest.approx(
        report.run.rows[RowKey.parse(key("64KiB", "READ"))].bandwidth
    )
    [about] = families["nixl_run_info"].samples
    assert (about.labels["image"], about.labels["ucx_version"]) == ("registry.example/nixl:1.9.0", "1.20.0")
    assert [sample.value for sample in families["nixl_run_passed"].samples] == [0.0]
    assert [sample.value for sample in families["nixl_regressed"].samples] == [1.0]
    ratios = {sample.labels["op"]: sample.value for sample in families["nixl_bandwidth_change_ratio"].samples}
    assert ratios["READ"] == pytest.approx(0.86, rel=0.01)
    assert {sample.labels["quantile"] for sample in families["nixl_latency_seconds"].samples} == {
        "0.5",
        "0.9",
        "0.99",
        "0.999",
    }


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


def test_labels_of_metrics_are_escaped(tmp_path: Path) -> None:
    image = 'a"b\\nc\nd\\'
    run = parse_recorded(record(image, {key("4KiB"): [1.0]}), "x")
    write_report(RunReport(run), tmp_path / "m.prom")
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "m.prom").read_text())}
    assert families["nixl_run_info"].samples[0].labels["image"] == image


def test_the_table_has_a_line_for_each_row(report: RunReport, tmp_path: Path) -> None:
    write_report(report, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        table_rows = list(csv.DictReader(file))
    assert [line["row"] for line in table_rows] == list(map(str, report.run.rows))
    line = table_rows[list(map(str, report.run.rows)).index(key("64KiB", "READ"))]
    assert (line["block_bytes"], line["op"], line["regression"]) == ("65536", "READ", "REGRESSED")
    assert len(line["launches"].split()) == 5
    assert float(line["change"]) == pytest.approx(-0.14, abs=0.01)


def test_each_column_of_the_table_has_its_value() -> None:
    data = record("image:1", {"UCX/READ/DRAM:VRAM/64KiB/batch8/depth4/2-5": [3.0, 1.0, 2.0]},
                  extra={"floor": 5e8, "ceiling": 9e9, "p50_us": 1.5, "p99_us": 4.0})  # fmt: skip
    [line] = csv.DictReader(io.StringIO(csv_text(RunReport(parse_recorded(data, "r.json")))))
    values = {
        "image": "image:1", "backend": "UCX", "op": "READ", "memory": "DRAM:VRAM", "block_bytes": "65536", "batch": "8",
        "depth": "4", "pair": "2-5", "gigabytes_per_second": "2", "launches": "3 1 2", "p50_us": "1.5", "p99_us": "4",
        "floor_gigabytes_per_second": "0.5", "ceiling_gigabytes_per_second": "9", "transports": "tcp/eth0",
    }  # fmt: skip
    assert {name: line[name] for name in values} == values


def test_the_summary_of_a_step_names_failures_and_escapes_markup(report: RunReport) -> None:
    text = "\n".join(summary(report))
    assert text.startswith("## NIXL verdict: FAIL")
    assert "<script" not in text
    assert "- **REGRESSED** " in text
    assert "  - Look at it." in text
    csv_text = [line for line in text.splitlines() if line.startswith("| UCX")]
    assert len(csv_text) == len(report.run.rows)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in csv_text} == {9}
    assert "- versions ucx: 1.19.0 -&gt; 1.20.0" in text.replace(">", "&gt;")


def test_the_summary_of_a_step_has_each_remedy_once_and_verdict_and_floor_of_each_row() -> None:
    figures = RowSummary(1e9, 1e-5, 2e-5, 10, 2e9, 1e10, ("tcp/eth0",))
    below = [
        Result("bandwidth", block, Verdict.FAIL, f"{block} is slow", "Read the log.", read_key(key(block)), figures)
        for block in ("4KiB", "64KiB")
    ]
    doubted = Result("doctor", "d", Verdict.WARN, "no limit is set", "Set it.")
    run = parse_recorded(record("image:1", {key("4KiB"): [1.0], key("64KiB"): [1.0]}, results=[doubted, *below]), "x")
    text = list(summary(RunReport(run)))
    start = text.index("- **FAIL** 4KiB is slow")
    assert text[start : start + 5] == [
        "- **FAIL** 4KiB is slow",
        "- **FAIL** 64KiB is slow",
        "  - for these 2: Read the log.",
        "- **WARN** no limit is set",
        "  - Set it.",
    ]
    [head, _, row, _] = [line for line in text if line.startswith("|")]
    assert head == "| row | verdict | GB/s | floor | p50 | p99 | transport |"
    assert row.startswith("| UCX WRITE DRAM:DRAM 4KiB | FAIL | ")


def test_annotations_are_one_line_each_and_limited_in_number(report: RunReport) -> None:
    many = tuple(Result("c,d:e", "x", Verdict.FAIL, f"{number} %\nsecond line") for number in range(30))
    lines = list(workflow_commands(replace(report, run=replace(report.run, results=many))))
    assert len(lines) == 10
    assert lines[0] == "::error title=NIXL FAIL c%2Cd%3Ae::0 %25%0Asecond line"


def test_a_refused_run_is_annotated_once_and_a_failed_one_by_what_fails_it(report: RunReport) -> None:
    healthy = replace(report, run=replace(report.run, results=(Result("x", "x", Verdict.PASS),)), exit_code=4)
    assert list(workflow_commands(replace(healthy, refused="no etcd, 1"))) == ["::error title=NIXL REFUSED::no etcd, 1"]
    [line] = workflow_commands(replace(healthy, exit_code=1))
    assert line.startswith("::error title=NIXL FAIL::")


def test_no_sign_of_a_reason_is_markup_in_the_summary(report: RunReport) -> None:
    signs = "\\`*_[]|"
    results = [Result("x", "x", verdict, f"{signs}<b>\n") for verdict in (Verdict.FAIL, Verdict.NOT_APPLICABLE)]
    text = list(summary(replace(report, run=replace(report.run, results=tuple(results)))))
    escaped = "".join(f"\\{sign}" for sign in signs)
    assert [line for line in text if line.startswith("- **")] == [f"- **FAIL** {escaped}&lt;b> "]


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


@pytest.mark.long
def test_only_a_github_job_gets_a_summary_and_annotations(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    arguments = (
        "--nixl-op=WRITE",
        "--nixl-duration=20ms",
        f"--nixl-profile={profile(tmp_path / 'p.toml', IMPOSSIBLE)}",
    )
    env = {"GITHUB_STEP_SUMMARY": str(path), "GITHUB_ACTIONS": ""}
    assert "::error" not in bandwidth(*arguments, env=env).output
    assert not path.exists()
    done = bandwidth(*arguments, "--nixl-image=nixl:7", env={**env, "GITHUB_ACTIONS": "true"})
    [line] = [line for line in done.output.splitlines() if line.startswith("::error ")]
    assert line.startswith("::error title=NIXL FAIL bandwidth::UCX WRITE DRAM%3ADRAM of 64KiB".replace("%3A", ":"))
    text = path.read_text()
    assert text.startswith("## NIXL verdict: FAIL\n\nnixl:7 on ")
    assert "| UCX WRITE DRAM:DRAM 64KiB | " in text


#: A latency bound instead of a floor, because contention keeps a row below its floor from failing.
IMPOSSIBLE = "p99 = '1 ns'"


@pytest.mark.long
def test_a_real_run_writes_every_report_and_a_valid_junit_file(tmp_path: Path) -> None:
    reports = [tmp_path / f"r{ending}" for ending in (".html", ".csv", ".prom")]
    done = bandwidth(
        "suites/infrastructure", "--nixl-op=WRITE", "--nixl-duration=20ms", "--nixl-image=registry/nixl:7",
        f"--nixl-report={','.join(map(str, reports))}", f"--junit-xml={tmp_path / 'junit.xml'}",
        env={"UCX_MODULES": "^ib"},  # without this, a second libibverbs of the host would cause a warning
    )  # fmt: skip
    assert done.code == 0, done.output
    assert all(f"wrote {path}" in done.output for path in reports)
    assert "<strong>PASS</strong>" in reports[0].read_text()
    assert len(reports[1].read_text().splitlines()) == 2
    assert len(list(text_string_to_metric_families(reports[2].read_text()))) >= 6
    junit_suite(tmp_path / "junit.xml")
    junit = (tmp_path / "junit.xml").read_text()
    assert '<property name="nixl_image" value="registry/nixl:7"' in junit
    assert 'classname="pytest_nixl.suites.bandwidth.test_bandwidth"' in junit


def test_the_report_command_writes_reports_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        data = record(f"nixl:{number}", {key("4KiB"): [1.0 - 0.2 * number] * 5}, week=number)
        (tmp_path / f"{number}.json").write_text(json.dumps(data))
    pages = [str(tmp_path / "a.html"), str(tmp_path / "a.prom")]
    assert main(["report", str(tmp_path), *pages, "--baseline", "nixl:0"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {path}" for path in pages]
    text = Path(pages[0]).read_text()
    assert "Against nixl:0" in text
    assert "History by image" in text
    assert main(["report", "nixl:9", *pages, "--store", str(tmp_path)]) == 2
    assert "has no run of the image nixl:9" in capsys.readouterr().err


def test_a_row_that_ended_in_an_error_is_among_the_rows_and_the_worst_stands_first() -> None:
    key = RowKey.parse("UCX/WRITE/DRAM:DRAM/1MiB/batch1/depth1/0-1")
    other = RowKey.parse("UCX/READ/DRAM:DRAM/1MiB/batch1/depth1/0-1")
    failed = Result("bandwidth", "t[READ]", Verdict.ERROR, "worker 1 ended by SIGSEGV", row=other)
    run = parse_recorded(record("image:1", {str(key): [5.0]}, results=(failed,)), "r.json")
    [csv_text] = re.findall(
        r'<table class="sortable">.*?</table>', html_page(RunReport(run, chosen={"level": "quick"})), re.S
    )
    assert re.findall(r'><td class="text (\w+)">(\S+)</td>', csv_text) == [("fail", "ERROR"), ("soft", "–")]
    assert csv_text.index(other.short) < csv_text.index(key.short)


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
    last = re.search(r'<text class="tick" text-anchor="end" x="518.0" y="275.0">16MiB</text>', text)
    assert last is not None  # its end is inside the drawing, which is 520 wide


def test_page_shows_rows_that_ended_in_an_error() -> None:
    """Of three pairs of ranks only one was measured: the page must not look like a run of one good row."""
    good, *lost = (RowKey.parse(key("64MiB", "WRITE", pair)) for pair in ("0-1", "0-2", "1-2"))
    results = (
        Result("bandwidth", "", Verdict.PASS, row=good),
        *(Result("bandwidth", "", Verdict.ERROR, "the worker died", "read its log", row=row) for row in lost),
    )
    run = parse_recorded(record("image", {str(good): [12.0]}, results=results), "r")
    text = html_page(RunReport(run, gate=True))
    for row in lost:
        [line] = re.findall(rf'<tr id="row-{re.escape(str(row))}".*?</tr>', text, re.DOTALL)
        assert re.search(r'<td class="text fail">ERROR</td>', line)
        assert line.count(">–<") == 6
    assert "1 measured, 2 not" in text
    # The matrix of the ranks has them, too.
    matrix = text[text.index("Ranks and links") :]
    assert len(re.findall(r'<td class="cell"[^>]*>ERROR', matrix)) == 2
    healthy = html_page(RunReport(parse_recorded(record("image", {str(good): [12.0]}, results=results[:1]), "r")))
    assert "1 measured<" in healthy
    assert ">ERROR<" not in healthy


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


def test_the_filter_of_the_page_finds_a_row_by_all_its_ranks() -> None:
    good, lost = (RowKey.parse(key("64MiB", "WRITE", pair)) for pair in ("2-7", "7-3"))
    results = (
        Result("bandwidth", "", Verdict.PASS, row=good),
        Result("bandwidth", "", Verdict.ERROR, "rank 9 died, and rank 3 waited", row=lost),
        Result("etcd-answers", "", Verdict.WARN, "rank 4 on node-a and rank 11 have another one"),
    )
    text = html_page(RunReport(parse_recorded(record("image", {str(good): [12.0]}, results=results), "r")))
    for row, ranks in ((good, "2 7"), (lost, "7 3")):
        assert re.search(rf'<tr id="row-{re.escape(str(row))}"[^>]* data-rank="{ranks}"', text)
    assert 'data-rank="7 3 9"' in text
    assert 'data-rank="4 11"' in text


def test_ranks_and_sizes_are_in_order_whatever_the_record_has() -> None:
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
    sizes = {key(size): [float(number)] for number, size in enumerate(("4KiB", "64KiB", "1MiB"), 1)}
    for draw in (bandwidth_cards, latency_cards):
        first, second = (
            draw(parse_recorded(record("image:1", dict(items)), "r.json"))
            for items in (sizes.items(), reversed(sizes.items()))
        )
        assert first == second != []


@pytest.mark.parametrize("value", [1.0, 1.01, 2.0, 2.3, 2.6, 4.9, 5.1, 9.9, 0.03, 7e9])
def test_a_step_of_an_axis_is_the_least_round_number_that_is_large_enough(value: float) -> None:
    rounds = [factor * 10.0**power for power in range(-3, 11) for factor in (1, 2, 2.5, 5)]
    assert nice_step(value) == pytest.approx(min(step for step in rounds if step >= value))


@pytest.mark.parametrize(
    ("values", "ticks"), [((2.0, 900.0), (1, 10, 100, 1000)), ((10.0, 1e4), (10, 100, 1e3, 1e4, 1e5))]
)
def test_a_logarithmic_axis_has_a_name_at_each_power_of_ten(
    values: tuple[float, ...], ticks: tuple[float, ...]
) -> None:
    axis = value_axis(values, str, "GB/s")
    assert (axis.low, *axis.ticks[1:-1], axis.high) == ticks
    assert value_axis((1.0, 30.0), str, "GB/s").ticks == (0.0, 10.0, 20.0, 30.0, 40.0)


def test_charts_of_one_kind_have_one_scale_and_its_names_differ() -> None:
    """Rows of tens of GB/s beside rows of some KB/s, as a mistake leaves them."""
    fast, slow = (
        {key(size, pair=pair): [rate] for size in ("64KiB", "1MiB")} for pair, rate in (("0-1", 40.0), ("1-0", 4e-6))
    )
    for rates in ({**fast, **slow}, slow):
        cards = bandwidth_cards(parse_recorded(record("image:1", rates), "r.json"))
        scales = {tuple(re.findall(r'text-anchor="end" x="60.0"[^>]*>([^<]+)', card.drawing)) for card in cards}
        assert len(cards) > len(scales) == 1 or len(cards) == 1
        [names] = scales
        assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.166919, "167 ms"), (3.71e-6, "3.71 µs"), (1.5, "1.5 s"), (9e-8, "90 ns")]
)
def test_a_time_has_the_unit_that_fits_it(seconds: float, text: str) -> None:
    run = parse_recorded(record("image:1", {key("1MiB"): [1.0]}), "r.json")
    [(name, row)] = run.rows.items()
    report = RunReport(replace(run, rows={name: replace(row, p99=seconds)}))
    assert f">{text}</td>" in html_page(report)
    assert any(f"| {text} |" in line for line in summary(report))
