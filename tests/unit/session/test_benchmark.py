# SPDX-License-Identifier: Apache-2.0
"""Rows in the files of pytest-benchmark, and the tools of pytest-benchmark on these files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_benchmark.plugin
from helpers.cli_run import ROOT, WITHOUT, bandwidth, environment, run

from pytest_nixl.session.benchmark import MachineFacts

KEY = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1"


def record(directory: Path, name: str) -> Path:
    """Run one row, which must pass without a warning; return its record."""
    path = directory / f"{name}.json"
    done = bandwidth("--nixl-op=WRITE", f"--benchmark-json={path}", "-W", "error")
    assert done.code == 0, done.output
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of one run, for the tests that only read it."""
    return record(tmp_path_factory.mktemp("recorded"), "one")


@pytest.mark.long
def test_a_row_is_recorded_under_its_key_with_its_values(recorded: Path) -> None:
    row: dict[str, Any]
    [row] = json.loads(recorded.read_text())["benchmarks"]
    extra, stats = row["extra_info"], row["stats"]
    assert row["fullname"] == row["name"] == extra["key"] == KEY
    assert row["group"] == "UCX WRITE DRAM:DRAM"
    # A round is the time of one transfer in one window: each launch's bandwidth is the median over its windows.
    assert 0.999999 * 65536 / stats["max"] <= min(extra["launches"])
    assert max(extra["launches"]) <= 1.000001 * 65536 / stats["min"]
    assert 0.999999 * min(extra["launches"]) <= extra["GB/s"] * 1e9 <= 1.000001 * max(extra["launches"])
    assert extra["Gb/s"] == pytest.approx(8 * extra["GB/s"])
    assert stats["rounds"] >= 10
    assert extra["transfers"] >= stats["rounds"]
    assert 0 < extra["p50_us"] <= extra["p99_us"]
    assert extra["transports"][0] in ("cma/memory", "posix/memory", "sysv/memory")
    assert {"initiator_nixl", "target_nixl", "initiator_python", "target_host"} <= set(extra)
    assert extra["initiator_ucx"][:2] == "1."


@pytest.mark.long
def test_two_runs_are_compared_by_row_key(recorded: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", str(recorded), str(record(tmp_path, "two"))],
        cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count(KEY) == 2
    assert "1 tests" not in done.stdout


@pytest.mark.long
def test_autosave_and_compare_work_within_a_run(tmp_path: Path) -> None:
    storage = f"--benchmark-storage={tmp_path}"
    for options in (("--benchmark-autosave",), ("--benchmark-compare",)):
        done = bandwidth("--nixl-op=WRITE", storage, *options)
        assert done.code == 0, done.output
    assert len(list(tmp_path.rglob("0001_*.json"))) == 1


@pytest.mark.long
def test_benchmark_only_runs_only_the_rows() -> None:
    done = bandwidth("suites/infrastructure", "--benchmark-only", "--nixl-op=WRITE")
    assert done.verdicts == {"WRITE 64KiB": "PASS"}
    assert done.code == 0


@pytest.mark.long
def test_benchmark_disable_measures_and_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = bandwidth("--benchmark-disable", "--nixl-op=WRITE", f"--benchmark-json={path}")
    assert done.verdicts == {"WRITE 64KiB": "PASS"}
    # Depending on its version, pytest-benchmark writes no file, an empty one, or one without a benchmark.
    text = path.read_text() if path.exists() else ""
    assert not text or not json.loads(text)["benchmarks"]


@pytest.mark.long
def test_a_run_outside_the_clone_has_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = run("--pyargs", "pytest_nixl.suites.bandwidth", "--nixl-op=WRITE", "--nixl-blocks=64KiB",
               f"--benchmark-json={path}", directory=tmp_path)  # fmt: skip
    assert done.code == 0, done.output
    assert [row["fullname"] for row in json.loads(path.read_text())["benchmarks"]] == [KEY]


@pytest.mark.long
def test_the_wheel_carries_the_suites_profiles_and_templates(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "__pycache__", "tests"))
    subprocess.run([*build, f"--target={site}", str(source)], check=True, capture_output=True)
    path = tmp_path / "run.json"
    # The copy in the wheel comes first on the path, and its entry point is loaded.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *WITHOUT, "--pyargs", "pytest_nixl.suites.bandwidth",
         "--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-duration=20ms", "-v", f"--benchmark-json={path}"],
        cwd=tmp_path, env=environment(PYTHONPATH=str(site)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site/pytest_nixl/suites/bandwidth/test_bandwidth.py" in done.stdout
    assert [row["fullname"] for row in json.loads(path.read_text())["benchmarks"]] == [KEY]
    init = [sys.executable, "-m", "pytest_nixl.cli", "init", "files"]
    written = subprocess.run(
        init, cwd=tmp_path, env=environment(PYTHONPATH=str(site)), capture_output=True, text=True, check=False
    )
    assert written.returncode == 0, written.stdout + written.stderr
    assert (tmp_path / "files" / "indexed-job.yaml").is_file()


def test_the_facts_are_those_of_pytest_benchmark_and_each_file_has_its_own() -> None:
    facts = MachineFacts()
    first, other = (facts.pytest_benchmark_generate_machine_info() for _ in range(2))
    assert first is not None
    assert first.keys() == pytest_benchmark.plugin.pytest_benchmark_generate_machine_info().keys()
    assert first == other
    assert first["cpu"] is not other["cpu"], "hooks may change it"
