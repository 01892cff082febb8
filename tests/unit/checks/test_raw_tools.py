# SPDX-License-Identifier: Apache-2.0
"""Comparison of NIXL with the real ucx_perftest, both over TCP on loopback, in runs as a user starts them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH_OF_RANKS, Finished, profile, run, undisturbed

from pytest_nixl.store.record_reader import parse_recorded

pytestmark = pytest.mark.long

#: A line of the table: the ratio and its source.
RATIO = re.compile(
    r"^UCX : ucx_perftest +(WRITE|READ) +DRAM:DRAM +(\w+) +pages=huge +([\d.]+) +of ([\d.]+) GB/s by ucx_perftest "
    r"\((ucp_put_bw|ucp_get), UCX [\d.]+\) over (\S+)$",
    re.MULTILINE,
)


def raw_run(path: Path, expectation: str, *arguments: str, env: Mapping[str, str] | None = None) -> Finished:
    """Run the rows and the comparison with the raw tool, with a profile of one expectation and without contention."""
    profile_option = f"--nixl-profile={profile(path / 'p.toml', expectation)}"
    variables = undisturbed({"UCX_TLS": "tcp", **(env or {})})
    return run(BANDWIDTH_OF_RANKS, profile_option, "--nixl-duration=20ms", *arguments, **variables)


LOW = "floor = '0.000001 GB/s'"


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Yield a run over TCP on loopback with its reports."""
    path = tmp_path_factory.mktemp("tcp")
    reports = f"--nixl-report={path / 'run.html'}"
    summary = {"GITHUB_STEP_SUMMARY": str(path / "summary.md"), "GITHUB_ACTIONS": "true"}
    done = raw_run(path, LOW, "-v", "--nixl-blocks=4KiB,1MiB", reports, f"--nixl-store={path / 'store'}", env=summary)
    return done, path


def test_the_table_shows_the_ratio_over_tcp_on_loopback(tcp: tuple[Finished, Path]) -> None:
    done, _ = tcp
    assert done.code == 0, done.output
    rows = RATIO.findall(done.output)
    assert [(op, block, test) for op, block, _, _, test, _ in rows] == [
        ("WRITE", "4KiB", "ucp_put_bw"), ("WRITE", "1MiB", "ucp_put_bw"),
        ("READ", "4KiB", "ucp_get"), ("READ", "1MiB", "ucp_get"),
    ]  # fmt: skip
    for op, block, ratio, raw, _, over in rows:
        assert over == "tcp/lo"
        [measured] = re.findall(rf"^UCX +{op} +\S+ +{block} +1 +1 +(\S+)", done.output, re.MULTILINE)
        assert float(ratio) == pytest.approx(float(measured) / float(raw), rel=0.02, abs=0.006)
    assert "4 rows measured" in done.output


def test_the_ratio_is_in_record_page_and_summary_but_in_no_row_key(tcp: tuple[Finished, Path]) -> None:
    _, path = tcp
    [record] = [json.loads(file.read_text()) for file in (path / "store").glob("*.json")]
    ratios = [ratio for result in record["nixl"]["results"] for ratio in result["ratios"]]
    assert [ratio["row"] for ratio in ratios] == [row["fullname"] for row in record["benchmarks"]]
    assert {ratio["raw"]["tool"] for ratio in ratios} == {"ucx_perftest"}
    assert "raw" not in "".join(row["fullname"] for row in record["benchmarks"])
    first = f"{ratios[0]['nixl'] / ratios[0]['raw']['value']:.2f}"
    page, summary = (path / "run.html").read_text(), (path / "summary.md").read_text()
    assert "<h2>NIXL and raw</h2>" in page
    assert f"<td>{first}</td>" in page
    assert "| row | NIXL : raw | raw GB/s | by | over |" in summary
    assert f" | {first} | " in summary
    [again] = [result for result in parse_recorded(record, "record").results if result.check == "nixl-to-raw"][:1]
    assert [str(ratio.row) for ratio in again.ratios] == [ratio["row"] for ratio in ratios][: len(again.ratios)]
    for result in record["nixl"]["results"]:
        del result["ratios"]  # as in a record of an earlier version
    assert {result.ratios for result in parse_recorded(record, "record").results} == {()}


def test_without_the_raw_tool_the_check_is_not_applicable(tmp_path: Path) -> None:
    done = raw_run(tmp_path, LOW, "--nixl-blocks=4KiB", "--nixl-op=WRITE", env={"PATH": "/nonexistent"})
    assert re.search(
        r"^NOT-APPLICABLE nixl-to-raw: ucx_perftest of rank 0 on (\S+) and ucx_perftest of rank 1 on \1 was not found: "
        r"give its directory with --nixl-raw-tools-dir=DIR; docs/how-to/raw-tools.md says how to unpack one$",
        done.output,
        re.MULTILINE,
    ), done.output
    assert done.code == 0


def test_a_failed_raw_tool_does_not_decide_about_nixl(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tools / "ucx_perftest"
    script.write_text("#!/bin/sh\necho no such device\nexit 7\n")
    script.chmod(0o755)
    options = ("--nixl-blocks=4KiB", "--nixl-op=WRITE", f"--nixl-raw-tools-dir={tools}")
    done = raw_run(tmp_path, LOW, *options)
    pattern = r"^WARN nixl-to-raw: no raw figure to compare with: ucx_perftest of rank 1 on \S+ ended with exit code 7$"
    assert re.search(pattern, done.output, re.MULTILINE), done.output
    assert "  | no such device" in done.output
    assert done.code == 0
