# SPDX-License-Identifier: Apache-2.0
"""``tests/helpers/parallel.py``: which tests its commands choose, which wait, and what fails them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import parallel
from helpers.cli_run import ROOT, environment, eventually

#: A test that ends once it may, and one that runs alone.
CONCURRENT = """
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
        [sys.executable, "parallel.py", *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_what_must_run_alone_waits_for_the_tests_of_the_other_command(tmp_path: Path) -> None:
    for name, text in {"pytest.ini": MARKERS, "test_beside.py": CONCURRENT, "test_alone.py": ALONE,
                       "parallel.py": Path(parallel.__file__).read_text(encoding="utf-8")}.items():  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
    with started(tmp_path, "--workers=1", "--in=test_beside.py", "not long") as first:
        assert eventually((tmp_path / "begun").exists, 300)
        with started(tmp_path, "--workers=1", "--in=test_alone.py", "not long") as other:
            assert other.stdout is not None
            output = []
            for line in other.stdout:
                output.append(line)
                if line.startswith("waiting until the tests of another environment have ended"):
                    break
            assert not (tmp_path / "alone").exists(), "".join(output)
            (tmp_path / "enough").touch()
            assert other.wait(300) == 0, "".join([*output, *other.stdout])
        assert first.wait(300) == 0
    assert (tmp_path / "alone").exists()


@pytest.mark.long
def test_a_failure_of_either_part_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "parallel.py").write_text(Path(parallel.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text("def test_beside(): pass\n" + ALONE)  # nobody has written the file "ended"
    with started(tmp_path, "--workers=1", "--in=test_it.py", "not long") as command:
        output = command.communicate(timeout=300)[0]
    assert command.returncode == 1, output
    assert "1 passed, 1 deselected" in output
    assert "1 failed, 1 deselected" in output


@pytest.mark.long
def test_a_test_that_waits_for_ever_fails_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "held").touch()
    text = Path(parallel.__file__).read_text(encoding="utf-8")
    (tmp_path / "parallel.py").write_text(text.replace(f"LONGEST = {parallel.LONGEST}", "LONGEST = 3"))
    (tmp_path / "test_it.py").write_text(
        "import fcntl\n\n\ndef test_waits():\n    with open('held') as one, open('held') as other:\n"
        "        fcntl.flock(one, fcntl.LOCK_EX)\n        fcntl.flock(other, fcntl.LOCK_EX)\n\n\n"
        "def test_passes(): pass\n"
    )
    with started(tmp_path, "--workers=1", "--in=test_it.py", "not long") as command:
        output = command.communicate(timeout=300)[0]
    assert command.returncode == 1, output
    assert "FAILED test_it.py::test_waits - Failed: Timeout" in output
    assert "1 failed, 1 passed" in output
    assert not list(tmp_path.glob(".pytest_cache"))


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


def test_of_tests_with_a_mark_only_the_files_that_name_it_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (_, several), _ = parallel.commands("long and not whole", [], 4)
    chosen = [argument for argument in several if argument.endswith(".py")]
    assert f"tests/integration/{Path(__file__).name}" in chosen
    assert 10 < len(chosen) < len(parallel.test_files([]))


def test_what_somebody_names_runs_whatever_its_marks() -> None:
    options = parallel.parsed(["--in=tests/cluster", "not soak", "tests/cluster/test_hosts.py", "-k", "name"])
    assert options.wanted == ["tests/cluster/test_hosts.py", "-k", "name"]
    assert options.workers == parallel.WORKERS
