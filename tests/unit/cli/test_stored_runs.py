# SPDX-License-Identifier: Apache-2.0
"""The commands that read recorded runs: ``compare``, ``history``, ``report`` and ``profile learn``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.records import KEY, key, record, write

from pytest_nixl import cli
from pytest_nixl.cli import profile, report

OTHER = key("4KiB")
FAST = (1.0, 1.01, 0.99, 1.02, 0.98)
SLOW = tuple(value / 2 for value in FAST)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs, one of another machine, a torn one and one that was interrupted."""
    write(tmp_path / "0.json", record("nixl:0", {KEY: FAST, OTHER: FAST}))
    write(tmp_path / "1.json", record("nixl:1", {KEY: SLOW, OTHER: FAST}, week=1))
    data = record("nixl:2", {KEY: FAST}, week=2)
    data["nixl"]["interrupted"] = "INTERRUPTED after 1 of 2 checks: Ctrl-C"
    write(tmp_path / "2.json", data)
    (tmp_path / "3.json").write_text("{")
    return tmp_path


def test_two_runs_are_compared_and_each_note_is_printed_once(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(*arguments: str) -> tuple[int, list[str]]:
        code = cli.main(["compare", *arguments, "--store", str(store)])
        return code, capsys.readouterr().out.splitlines()

    code, lines = compared("nixl:0", "nixl:1")
    left_out = f"left out: {store}/2.json cannot be a baseline (INTERRUPTED after 1 of 2 checks: Ctrl-C)"
    assert code == 1
    assert lines[0].startswith(f"skipped: {store}/3.json is incomplete or not JSON")
    assert lines[1] == left_out
    assert lines[2].startswith("REGRESSED 2 rows together against nixl:0: -29.3 % ")
    assert lines[3].startswith("    remedy: Differences from nixl:0: ")
    regressed = [line.partition(" against")[0] for line in lines if line.startswith("REGRESSED")]
    assert regressed == ["REGRESSED 2 rows together", f"REGRESSED {KEY}"]
    assert [line for line in lines if line.startswith("nixl:1 of")] == ["nixl:1 of 2026-03-09 03:00 UTC"]
    assert compared("nixl:0", "nixl:0", "--gate")[0] == 0
    assert compared("nixl:0", "nixl:1", "--max-regression=60%")[0] == 0
    # A run that was interrupted can be judged, and does not pass.
    code, lines = compared("nixl:0", str(store / "2.json"), "--max-regression=60%")
    assert (code, lines[-1]) == (1, f"{store}/2.json: INTERRUPTED after 1 of 2 checks: Ctrl-C")
    assert cli.main(["compare", "nixl:0", "nixl:1", "--max-regression=5"]) == 2
    fault = "'5' is not a percentage: expected a percentage, such as 5%"
    assert capsys.readouterr().err == f"pytest-nixl: --max-regression: {fault}\n"


@pytest.mark.parametrize("gate", [False, True])
def test_undecided_rows_fail_a_comparison_with_the_gate_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gate: bool
) -> None:
    paths = [str(write(tmp_path / f"{number}.json", record(f"nixl:{number}", {KEY: (0.5, 1.5)}))) for number in (0, 1)]
    assert cli.main(["compare", *paths, *["--gate"] * gate]) == int(gate)
    assert capsys.readouterr().out.startswith(f"INCONCLUSIVE {KEY} against nixl:0: ")


def test_the_commands_that_compare_need_scipy(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "scipy" else name)
    for arguments in (["compare", "a", "b"], ["report", str(store), "r.html", "--baseline=nixl:0"]):
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err == (
            "pytest-nixl: this command needs scipy, which is not installed\nremedy: pip install 'scipy>=1.11.1'\n"
        )


def test_the_history_of_rows_is_printed(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(runs: Any, courses: Any) -> Any:
        names = ", ".join(run.name for run in runs)
        return [SimpleNamespace(text=f"{course.key} in {names}") for course in courses]

    write(store / "4.json", record("nixl:4", {KEY: FAST}, week=3, cores=4096))
    monkeypatch.setattr("pytest_nixl.report.history.lines", shown)

    def printed(*arguments: str) -> list[str]:
        assert cli.main(["history", str(store), *arguments]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first.startswith(f"skipped: {store}/3.json is incomplete")
        return lines

    *left_out, row = printed()
    assert [line.partition(" was measured")[0] for line in left_out] == [
        f"left out: {store}/{number}.json" for number in (0, 1, 2)
    ]
    assert row == f"{KEY} in nixl:4"
    (store / "4.json").unlink()
    rows = {KEY, OTHER}
    assert set(printed()) == {f"{row} in nixl:0, nixl:1, nixl:2" for row in rows}
    assert set(printed("--last=2")) == {f"{row} in nixl:1, nixl:2" for row in rows}
    for text in ("64KiB", "WRITE DRAM:DRAM of 64KiB", "UCX/WRITE DRAM:DRAM"):
        expected = {KEY} if "64" in text else rows
        assert set(printed(f"--row={text}")) == {f"{row} in nixl:0, nixl:1, nixl:2" for row in expected}
    for path, row, refusal in (
        (store, "READ", "no row key contains 'READ'"),
        (store / "none", "", f"{store}/none cannot be read (No such file or directory)"),
    ):
        assert cli.main(["history", str(path), f"--row={row}"]) == 2
        assert capsys.readouterr().err == f"pytest-nixl: {refusal}\n"
    for file in store.iterdir():
        file.unlink()
    assert cli.main(["history", str(store)]) == 2
    assert (
        capsys.readouterr().err == f"pytest-nixl: {store} has no record of a run: give the directory of --nixl-store\n"
    )


@pytest.mark.parametrize(
    ("run", "options", "name", "others"),
    [
        ("STORE/1.json", [], "nixl:1", 0),
        ("nixl:1", ["--store=STORE"], "nixl:1", 3),
        ("STORE/1.json", ["--baseline=STORE/0.json", "--gate"], "nixl:1", 0),
        ("STORE", ["--baseline=nixl:0"], "nixl:2", 3),
    ],
)
def test_a_report_is_written_of_a_run_with_its_history(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: str, options: list[str],
    name: str, others: int,
) -> None:  # fmt: skip
    written: list[tuple[Any, Path]] = []
    monkeypatch.setattr(report, "write_report", lambda content, path: written.append((content, path)))
    paths = [store / "r.html", store / "r.csv"]
    arguments = [text.replace("STORE", str(store)) for text in (run, *map(str, paths), *options)]
    assert cli.main(["report", *arguments]) == 0
    skipped = capsys.readouterr().out.splitlines()
    assert skipped[-2:] == [f"wrote {path}" for path in paths]
    notes = [note.partition("/3.json")[0] for note in skipped[:-2] if "/3.json" in note]
    assert notes == ([f"skipped: {store}"] if others else [])
    for (content, path), expected in zip(written, paths, strict=True):
        assert (path, content.run.name, len(content.history), content.gate) == (
            expected, name, others, "--gate" in options
        )  # fmt: skip
        baseline = content.compared and (content.compared.before.name, content.compared.margin)
        assert baseline == (("nixl:0", 0.05) if len(options) > 0 and "baseline" in options[0] else None)


def test_a_learned_profile_is_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = MagicMock(return_value=("[[expect]]\n[[expect]]", ["a remark", "and another"]))
    monkeypatch.setattr(profile, "learned_profile", learned)
    monkeypatch.setattr(profile, "load_profile", "profile {}".format)
    path = tmp_path / "new.toml"
    arguments = ["profile", "learn", "a.json", "b.json", "--name=mine", f"--output={path}"]
    assert cli.main([*arguments, "--like=other"]) == 0
    assert capsys.readouterr().out == f"a remark\nand another\n{path}: a profile of 2 rows from 2 runs\n"
    assert path.read_text() == "[[expect]]\n[[expect]]\n"
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"pytest-nixl: {path} already exists: give the path of a new file\n"
    runs = [Path("a.json"), Path("b.json")]
    assert learned.mock_calls == [call("mine", runs, "profile other"), call("mine", runs, None)]
