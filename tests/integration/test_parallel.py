# SPDX-License-Identifier: Apache-2.0
"""``tests/helpers/parallel.py``: which tests its commands choose, which wait, and which run once more."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import parallel
from helpers.cli_run import ROOT, environment, eventually

#: A test that ends once it may, and one that runs alone.
BESIDE = """
import pathlib, time

def test_beside():
    pathlib.Path("begun").touch()
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
    pathlib.Path("ended").touch()
"""
ALONE = """
import pathlib, pytest

@pytest.mark.alone
def test_alone():
    assert pathlib.Path("ended").exists()
    pathlib.Path("alone").touch()
"""
MARKERS = "[pytest]\nmarkers =\n    alone\n    long\n"


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the copy of ``parallel.py`` in a folder."""
    return subprocess.Popen(
        [sys.executable, "parallel.py", "--passed-alone=passed-alone.txt", *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_what_must_run_alone_waits_for_the_tests_of_the_other_command(tmp_path: Path) -> None:
    for name, text in {"pytest.ini": MARKERS, "test_beside.py": BESIDE, "test_alone.py": ALONE,
                       "parallel.py": Path(parallel.__file__).read_text(encoding="utf-8")}.items():  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
    with started(tmp_path, "--workers=1", "--in=test_beside.py", "not long") as one:
        assert eventually((tmp_path / "begun").exists, 300)
        with started(tmp_path, "--workers=1", "--in=test_alone.py", "not long") as other:
            assert other.stdout is not None
            said = []
            for line in other.stdout:
                said.append(line)
                if line.startswith("waiting until the tests of another environment have ended"):
                    break
            assert not (tmp_path / "alone").exists(), "".join(said)
            (tmp_path / "enough").touch()
            assert other.wait(300) == 0, "".join([*said, *other.stdout])
        assert one.wait(300) == 0
    assert (tmp_path / "alone").exists()


@pytest.mark.long
def test_a_failure_of_either_part_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "parallel.py").write_text(Path(parallel.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text("def test_beside(): pass\n" + ALONE)  # nobody has written the file "ended"
    with started(tmp_path, "--workers=1", "--in=test_it.py", "not long") as one:
        output = one.communicate(timeout=300)[0]
    assert one.returncode == 1, output
    assert "1 passed, 1 deselected" in output
    assert "1 failed, 1 deselected" in output


#: Five tests: one passes, the others fail, or fail only the first time.
FLAKY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(5))
def test_it(number):
    before = pathlib.Path(f"before-{number}")
    failed, first = FAILED[number], not before.exists()
    before.touch()
    assert not (failed == "always" or failed == "first" and first)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("failed", "code", "listed"),
    [
        (["", "", "", "", ""], 0, []),
        (["", "first", "", "first", ""], 0, [1, 3]),
        (["", "first", "", "always", ""], 1, [1]),
        (["", "first", "first", "first", "first"], 1, []),
    ],
    ids=["none", "two at first", "one of them always", "too many"],
)
def test_a_few_that_failed_run_once_more_and_are_named(
    tmp_path: Path, failed: list[str], code: int, listed: list[int]
) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "parallel.py").write_text(Path(parallel.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"FAILED = {failed!r}\n{FLAKY}")
    with started(tmp_path, "--workers=1", "--in=test_it.py", "not long") as one:
        output = one.communicate(timeout=300)[0]
    assert one.returncode == code, output
    names = [f"test_it.py::test_it[{number}]" for number in listed]
    assert (tmp_path / "passed-alone.txt").read_text().splitlines() == names
    assert [line.rpartition(" ")[2] for line in output.splitlines() if "passed alone, to be mended" in line] == names
    assert not list(tmp_path.glob(".pytest_cache"))


@pytest.mark.parametrize(
    "results",
    [[(1, []), (1, ["test_it.py::test_a"])], [(1, ["test_it.py::test_a"]), (0, []), (5, [])]],
    ids=["a part that names no test", "tests that are not found again"],
)
def test_no_failure_is_lost_by_running_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: list[tuple[int, list[str]]]
) -> None:
    answers = iter(results)
    monkeypatch.setattr(parallel, "run", lambda command: next(answers))
    # The command that runs this test holds the lock: it would never be free.
    monkeypatch.setattr(parallel, "beside_others", nullcontext)
    monkeypatch.setattr(parallel, "commands", lambda *asked: [(fcntl.LOCK_SH, ["beside"]), (fcntl.LOCK_SH, ["alone"])])
    listed = tmp_path / "passed-alone.txt"
    asked = parallel.parsed([f"--passed-alone={listed}", "--workers=1", "not long"])
    assert parallel.main(asked) == 1
    assert listed.read_text() == ""


@pytest.mark.long
def test_a_test_that_waits_for_ever_fails_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "held").touch()
    (tmp_path / "test_it.py").write_text(
        "import fcntl\n\n\ndef test_waits():\n    with open('held') as one, open('held') as other:\n"
        "        fcntl.flock(one, fcntl.LOCK_EX)\n        fcntl.flock(other, fcntl.LOCK_EX)\n\n\n"
        "def test_passes(): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel, "LONGEST", 3)
    assert parallel.run([*parallel.PYTEST, "test_it.py"]) == (1, ["test_it.py::test_waits"])


@pytest.mark.long
def test_a_file_that_cannot_be_imported_does_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "parallel.py").write_text(Path(parallel.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    with started(tmp_path, "--workers=1", "--in=test_it.py", "not long") as one:
        output = one.communicate(timeout=300)[0]
    assert one.returncode == 2, output
    assert "once more" not in output


@pytest.mark.parametrize("where", [[], ["tests/libfabric", "tests/cluster", "tests/unit/nixl/test_libfabric.py"]])
def test_each_file_is_chosen_once_and_those_of_other_environments_are_not(
    monkeypatch: pytest.MonkeyPatch, where: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    files = [str(file) for file in parallel.test_files(where)]
    assert len(files) == len(set(files)) > 10
    assert any(file.startswith("tests/libfabric") for file in files) is bool(where)
    (_, several), (_, alone) = parallel.commands("not soak", where, 1)
    left_out = parallel.files_without_any("not soak", where)
    assert [f"--ignore={file}" in several for file in left_out] == [True] * len(left_out)
    # What no worker imports runs alone, or none of its tests is chosen.
    assert set(left_out) <= set(files)
    assert all("mark.soak" in Path(file).read_text() or file in alone for file in left_out)


@pytest.mark.long
def test_files_are_compiled_once_if_many_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"test_{number}.py" for number in range(parallel.MANY)]
    for file in files:
        file.write_text("def test_it(): pass\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    parallel.compile_first(files[1:], 2)
    assert not list(tmp_path.glob("__pycache__/*"))
    parallel.compile_first(files, 2)
    assert len(list(tmp_path.glob("__pycache__/*.pyc"))) == parallel.MANY
    monkeypatch.setattr(parallel, "PYTEST", ["/no/such/program"])
    parallel.compile_first(files, 2)  # nothing is left to do


def test_without_a_test_that_runs_alone_there_is_one_command(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    [(_, command)] = parallel.commands("not long", [str(tmp_path)], 3)
    assert command[-1] == str(tmp_path)
    assert command[command.index("-n") + 1] == "3"


def test_what_somebody_names_runs_whatever_its_marks() -> None:
    asked = parallel.parsed(["--in=tests/cluster", "not soak", "tests/cluster/test_hosts.py", "-k", "name"])
    assert asked.wanted == ["tests/cluster/test_hosts.py", "-k", "name"]
    assert asked.workers == parallel.WORKERS
