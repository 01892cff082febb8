# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: the page in a real browser, metrics with Prometheus' parser, JUnit with a schema, and CSV."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import xmlschema
from helpers.browser import open_page, screenshot
from helpers.cli_run import bandwidth, profile
from helpers.records import key, record
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.cli import main
from pytest_nixl.core.units import format_size
from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report.files import write
from pytest_nixl.report.github import summary, workflow_commands
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

HOSTILE = "<script>alert('x')</script>&\"'|`*"
SLOW = (2, 3)


def rows(factor: float) -> dict[str, list[float]]:
    """Return rows of two operations and eight sizes, READ times ``factor``, and all links of four ranks, one slow."""
    found = {}
    for op, share in (("WRITE", 1.0), ("READ", 0.9 * factor)):
        for power in range(12, 27, 2):
            rate = 12.0 * 2**power / (2**power + 300e3) * share
            found[key(format_size(1 << power), op)] = [rate * (1 + 0.002 * launch) for launch in range(-2, 3)]
    for one in range(4):
        for other in range(4):
            if one != other and (one, other) != (0, 1):
                rate = 7.1 if (one, other) == SLOW else 11.9
                found[key("64MiB", "WRITE", f"{one}-{other}")] = [rate * (1 + 0.002 * n) for n in range(-2, 3)]
    return found


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
    )  # fmt: skip
    run = week(9, results)
    compared = compare_runs(week(6), run, 0.05)
    run = replace(run, results=(*results, *compared.results))
    return RunReport(run, compared, (*(week(number) for number in range(9)), run))


@pytest.fixture(scope="module")
def page(report: RunReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write(report, path)
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
        "Bandwidth over block size",
        "Latency of single transfers",
        "History by image",
        "Ranks and links",
        "Findings",
        "Provenance and what changed",
    ]
    labels = re.findall(r'aria-label="((?:bandwidth|latency|history) of [^"]*)"', text)
    assert [label.partition(" ")[0] for label in labels] == ["bandwidth"] + ["latency"] * 2 + ["history"] * 12
    assert text.count("<polyline") >= 2 + 3 + 8 + 12
    assert len(re.findall(r'class="mark"', text)) == 8  # one for the change of each READ row
    assert re.search(r'<td class="cell slow"[^>]*>7.1</td>', text)
    assert "slowest: rank 2 to rank 3, 7.1 GB/s, 59 % of the fastest" in text
    assert re.search(r'<tr class="changed"><td class="wrap">versions ucx</td><td class="wrap">1.19.0</td>', text)
    assert "<script" not in text


def test_an_error_or_a_request_in_the_browser_is_noticed(page: Path, tmp_path: Path) -> None:
    """Show that both checks of the previous test can fail, with a page that has a fault for each."""
    bad = tmp_path / "bad.html"
    fault = '<img src="http://127.0.0.1:9/x.png"><script>console.error("said by the page")</script>'
    bad.write_text(re.sub(r"<meta http-equiv.*", fault, page.read_text()))
    opened = open_page(bad, tmp_path)
    assert any("said by the page" in line for line in opened.console)
    assert "http://127.0.0.1:9/x.png" in opened.requests


@pytest.mark.parametrize(
    ("name", "width", "height", "options"),
    [
        ("light", 1200, 5200, ()),
        ("phone-dark", 500, 3200, ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")),
    ],
)
def test_screenshots_of_the_page_are_kept(
    page: Path, tmp_path: Path, name: str, width: int, height: int, options: tuple[str, ...]
) -> None:
    """With tox, ``report-light.png`` and ``report-phone-dark.png`` are kept in its work directory."""
    folder = Path(os.environ.get("TOX_ENV_DIR") or tmp_path)
    picture = folder / f"report-{name}.png"
    picture.unlink(missing_ok=True)
    screenshot(page, tmp_path, picture, width, height, *options)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (width, height)
    assert len(data) > 50_000  # an image of a single colour would be far smaller


def test_the_page_of_a_run_without_rows_reports_that(tmp_path: Path) -> None:
    passed = Result("nixl-loads", "x", Verdict.PASS)
    run = parse_recorded(record("nixl:1", {}, results=[passed]), "x")
    write(RunReport(run), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<strong>PASS</strong>" in text
    assert "<dd>0 measured</dd>" in text
    assert "<svg" not in text


def test_the_parser_of_prometheus_accepts_the_metrics(report: RunReport, tmp_path: Path) -> None:
    write(report, tmp_path / "m.prom")
    families = {one.name: one for one in text_string_to_metric_families((tmp_path / "m.prom").read_text())}
    assert all(one.documentation and one.type == "gauge" for one in families.values())
    rates = families["nixl_bandwidth_bytes_per_second"].samples
    assert len(rates) == len(report.run.rows)
    found = {(one.labels["op"], one.labels["block_bytes"], one.labels["pair"]): one.value for one in rates}
    assert found["READ", "65536", "0-1"] == pytest.approx(report.run.rows[key("64KiB", "READ")].bandwidth)
    [about] = families["nixl_run_info"].samples
    assert (about.labels["image"], about.labels["ucx_version"]) == ("registry.example/nixl:1.9.0", "1.20.0")
    assert [one.value for one in families["nixl_run_passed"].samples] == [0.0]
    assert [one.value for one in families["nixl_regressed"].samples] == [1.0]
    ratios = {one.labels["op"]: one.value for one in families["nixl_bandwidth_change_ratio"].samples}
    assert ratios["READ"] == pytest.approx(0.86, rel=0.01)
    assert {one.labels["quantile"] for one in families["nixl_latency_seconds"].samples} == {
        "0.5",
        "0.9",
        "0.99",
        "0.999",
    }


def test_labels_of_metrics_are_escaped(tmp_path: Path) -> None:
    image = 'a"b\\c\nd'
    run = parse_recorded(record(image, {key("4KiB"): [1.0]}), "x")
    write(RunReport(run), tmp_path / "m.prom")
    families = {one.name: one for one in text_string_to_metric_families((tmp_path / "m.prom").read_text())}
    assert families["nixl_run_info"].samples[0].labels["image"] == image


def test_the_table_has_a_line_for_each_row(report: RunReport, tmp_path: Path) -> None:
    write(report, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [line["row"] for line in found] == list(report.run.rows)
    line = found[list(report.run.rows).index(key("64KiB", "READ"))]
    assert (line["block_bytes"], line["op"], line["regression"]) == ("65536", "READ", "REGRESSED")
    assert len(line["launches"].split()) == 5
    assert float(line["change"]) == pytest.approx(-0.14, abs=0.01)


def test_the_summary_of_a_step_names_failures_and_escapes_markup(report: RunReport) -> None:
    text = "\n".join(summary(report))
    assert text.startswith("## NIXL verdict: FAIL")
    assert "<script" not in text
    assert "- **REGRESSED** " in text
    assert "  - Look at it." in text
    table = [line for line in text.splitlines() if line.startswith("| UCX")]
    assert len(table) == len(report.run.rows)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {7}
    assert "- versions ucx: 1.19.0 -&gt; 1.20.0" in text.replace(">", "&gt;")


def test_annotations_are_one_line_each_and_limited_in_number(report: RunReport) -> None:
    many = tuple(Result("c,d:e", "x", Verdict.FAIL, f"{number} %\nsecond line") for number in range(30))
    lines = list(workflow_commands(replace(report, run=replace(report.run, results=many))))
    assert len(lines) == 10
    assert lines[0] == "::error title=NIXL FAIL c%2Cd%3Ae::0 %25%0Asecond line"


def test_only_a_github_job_gets_a_summary_and_annotations(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    given = ("--nixl-op=WRITE", "--nixl-duration=20ms", f"--nixl-profile={profile(tmp_path / 'p.toml', IMPOSSIBLE)}")
    env = {"GITHUB_STEP_SUMMARY": str(path), "GITHUB_ACTIONS": ""}
    assert "::error" not in bandwidth(*given, env=env).output
    assert not path.exists()
    done = bandwidth(*given, "--nixl-image=nixl:7", env={**env, "GITHUB_ACTIONS": "true"})
    [line] = [line for line in done.output.splitlines() if line.startswith("::error ")]
    assert line.startswith("::error title=NIXL FAIL bandwidth::UCX WRITE DRAM%3ADRAM of 64KiB".replace("%3A", ":"))
    text = path.read_text()
    assert text.startswith("## NIXL verdict: FAIL\n\nnixl:7 on ")
    assert "| UCX WRITE DRAM:DRAM 64KiB | " in text


#: A latency bound instead of a floor, because contention keeps a row below its floor from failing.
IMPOSSIBLE = "p99 = '1 ns'"


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
    schema = xmlschema.XMLSchema(str(Path(__file__).parents[2] / "junit.xsd"))
    schema.validate(str(tmp_path / "junit.xml"))
    assert '<property name="nixl_image" value="registry/nixl:7"' in (tmp_path / "junit.xml").read_text()


def test_the_report_command_writes_reports_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

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
