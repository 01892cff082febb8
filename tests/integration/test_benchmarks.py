# SPDX-License-Identifier: Apache-2.0
"""The figures of ``tox -e bench``: bound, peer and load beside each, and the table between its markers."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from helpers.cli_run import ROOT
from helpers.nixlbench import standin

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench
import nixlbench_sweep
from figures import BEGIN, END, Figure, table, write_table


@pytest.mark.parametrize(
    ("values", "bound", "at_least", "holds"),
    [
        ((4, 5, 9), 5, False, True),
        ((4, 6, 9), 5, False, False),
        ((0.9, 0.98), 0.97, True, False),
        ((1,), 0.97, True, True),
    ],
)
def test_the_median_decides_whether_a_bound_holds(
    values: tuple[float, ...], bound: float, at_least: bool, holds: bool
) -> None:
    figure = Figure("it", values, "s", bound, at_least=at_least)
    assert figure.holds is holds
    assert ("DOES NOT HOLD" in str(figure)) is not holds


def test_a_figure_is_printed_with_its_bound_peer_and_load() -> None:
    figure = Figure("sweep", (4.2, 4.4, 4.9), "s", 5, peer="`nixlbench`: 31.0 s", load="load 0.1")
    assert str(figure) == "sweep: 4.4 s (4.2 to 4.9); bound: at most 5 s, holds; `nixlbench`: 31.0 s; load 0.1"


def test_the_table_names_day_machine_and_the_highest_load() -> None:
    figures = [
        Figure("a", (1.0,), "s", 2, load="load 0.3"),
        Figure("b", (0.98, 1.0, 1.02), "", 0.97, at_least=True, digits=2, peer="bare", load="load 12.5"),
    ]
    lines = table(figures, date(2026, 1, 2)).splitlines()
    assert "2026-01-02" in lines[0]
    assert "cores" in lines[0]
    assert "load 12.5 at most" in lines[0]
    assert lines[4:] == ["| a | at most 2 s | 1.0 s | – |", "| b | at least 0.97 | 1.00 (0.98 to 1.02) | bare |"]


def test_a_figure_without_a_bound_holds() -> None:
    figure = Figure("it", (1e9,), "s", math.inf, digits=0)
    assert (figure.holds, figure.limit) == (True, "–")


def test_a_row_differs_by_its_range_in_percent_of_its_median() -> None:
    assert nixlbench_sweep.spreads([{1: 10.0, 2: 5.0}, {1: 12.0, 2: 5.0}, {1: 9.0}]) == [30.0, 0.0]


def test_the_rates_of_a_nixlbench_are_those_of_its_table() -> None:
    texts = [(ROOT / "fixtures" / "nixlbench" / f"01_normal.rank_{rank}.out").read_text() for rank in "ab"]
    rates = nixlbench_sweep.rates_of(texts)
    assert len(rates) > 1
    assert all(rate > 1e6 for rate in rates.values())


@pytest.mark.parametrize("runtime", ["ETCD", "ASIO"])
def test_two_processes_of_nixlbench_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    """The program is a double: it meets its partner as the real one does, and prints what that printed."""
    monkeypatch.setenv("STANDIN_PLAY", "normal")
    monkeypatch.setattr(nixlbench_sweep, "close_supervisor", lambda: None)  # that of other tests
    seconds, rates = nixlbench_sweep.sweep(str(standin(tmp_path)), runtime)
    assert seconds > 0
    assert rates


def test_a_nixlbench_that_fails_is_named(tmp_path: Path) -> None:
    program = tmp_path / "nixlbench"
    program.write_text("#!/bin/sh\necho why; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)--runtime_type=ASIO .*ended with \[3, 3\]:\nwhy\n"):
        nixlbench_sweep.sweep(str(program), "ASIO")


def test_only_what_is_between_the_markers_is_written(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for text in ("none", f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"):
        page.write_text(text)
        with pytest.raises(ValueError, match="once each and in this order"):
            write_table(page, "new")
        assert page.read_text() == text


def test_the_page_of_claims_has_the_markers() -> None:
    text = bench.CLAIMS.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1


def test_the_second_command_is_given_in_seconds_or_as_junit(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite time="100.5"/><testsuite time="20"/></testsuites>')
    options = bench.parsed(["--second-command", "200", "--second-command", str(junit), "second"])
    [figure] = bench.measured(options)
    assert figure.values == (200.0, 120.5)


def test_a_second_command_that_is_not_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(bench.second_command(bench.parsed([]))) == []
    assert "README's second command: not measured; --tests measures it" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_second_command_runs_in_a_fresh_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As README says it; in a clone of what is committed, and without the variables of the tox that runs this."""
    assert bench.TESTS in (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setenv("TOX_WORK_DIR", "elsewhere")
    (tmp_path / "committed").write_text("")
    for text in ("init -q", "add committed", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *text.split()], cwd=tmp_path, check=True)
    (tmp_path / "new").write_text("")
    command = 'test -f committed && ! test -e new && test -z "$TOX_WORK_DIR"'
    assert bench.time_of_a_clone(command, tmp_path) > 0
    with pytest.raises(SystemExit, match=r"^echo why; exit 3 failed after \d+ s:\nwhy\n$"):
        bench.time_of_a_clone("echo why; exit 3", tmp_path)


def test_the_second_command_is_measured_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_of_a_clone", lambda: 359.6)
    [figure] = bench.measured(bench.parsed(["--tests", "second"]))
    assert str(figure).startswith("README's second command: 360 s; bound: at most 360 s, holds; load ")


def test_a_figure_that_cannot_be_measured_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\nold\n{END}\n")

    def fail(_: object) -> Iterator[Figure]:
        raise SystemExit("pytest suites failed")

    second: dict[str, object] = {"quick": fail, "second": bench.second_command}
    monkeypatch.setattr(bench, "FIGURES", second)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--second-command=200", f"--write={page}"])
    with pytest.raises(SystemExit, match=r"^not measured: quick; the reasons are above$"):
        bench.main()
    output = capsys.readouterr().out
    assert "quick: not measured: pytest suites failed\n" in output
    assert "| README's second command | at most 360 s | 200 s |" in output
    assert "old" in page.read_text(), "a table without a figure is not written"


def test_a_figure_that_is_left_out_is_named_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\nold\n{END}\n")
    left_out: dict[str, object] = {"ranks": lambda _: pytest.fail("measured"), "second": bench.second_command}
    monkeypatch.setattr(bench, "FIGURES", left_out)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--without=ranks", "--second-command=200", f"--write={page}"])
    bench.main()
    assert " at most (not measured: ranks):\n" in page.read_text()
    assert "| README's second command | at most 360 s | 200 s |" in page.read_text()


@pytest.mark.parametrize(
    "arguments", [["fast"], ["--without=fast"], ["--write", "README.md", "--repeats=1", "quick", "doctor"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parsed(arguments)
    assert "error: " in capsys.readouterr().err


@pytest.mark.long
def test_the_doctor_is_measured() -> None:
    [figure] = bench.measured(bench.parsed(["--repeats=1", "doctor"]))
    assert figure.unit == "s"
    assert figure.value > 0
