# SPDX-License-Identifier: Apache-2.0
"""Real runs compared with a baseline: each test causes a fault that the run must report. Only baselines are made up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, Finished, bandwidth, command, environment, junit_suite, profile
from helpers.needs import need_programs
from helpers.records import KEY, record, write

pytestmark = pytest.mark.long

#: An expectation that every row meets.
ANY_SPEED = "floor = '1 KB/s'"

FAST = ("--nixl-op=WRITE", "--nixl-min-launches=1", "--nixl-duration=20ms")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a real run of three launches."""
    directory = tmp_path_factory.mktemp("store")
    done = bandwidth(
        "--nixl-op=WRITE", "--nixl-min-launches=3", "--nixl-duration=20ms", f"--nixl-store={directory}",
        "--nixl-image=registry/nixl:1@sha256:0123456789abcdef", env={"UCX_TLS": "tcp", "NIXL_ACCESS_KEY": "hunter2"},
    )  # fmt: skip
    assert done.verdicts == {
        "WRITE 64KiB": "WRONG-TRANSPORT"
    }  # the default profile refuses tcp; the row has a bandwidth
    assert len(list(directory.iterdir())) == 1, done.output
    return directory


def recorded(store: Path) -> dict[str, Any]:
    [path] = store.iterdir()
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_record_has_launches_versions_environment_host_and_results(store: Path) -> None:
    data = recorded(store)
    [row] = data["benchmarks"]
    assert len(row["extra_info"]["launches"]) == 3
    assert sorted(row["extra_info"]["launches"])[1] / 1e9 == pytest.approx(row["extra_info"]["GB/s"])
    assert row["stats"]["rounds"] == len(row["stats"]["data"])
    assert row["extra_info"]["image"] == "registry/nixl:1 (0123456789ab)"
    provenance = data["nixl"]["provenance"]
    assert provenance["image"]["reference"] == "registry/nixl:1"
    assert provenance["image"]["digest"] == "sha256:0123456789abcdef"
    assert {"nixl", "nixl_package", "ucx", "python", "kernel"} <= set(provenance["versions"])
    assert provenance["environment"]["UCX_TLS"] == "tcp"
    assert provenance["environment"]["NIXL_ACCESS_KEY"] == "***"
    assert "hunter2" not in json.dumps(data)
    assert {"name", "cpu", "cores", "nics", "gpus"} <= set(provenance["host"])
    assert [result["verdict"] for result in data["nixl"]["results"]] == ["WRONG-TRANSPORT"]


def test_pytest_benchmark_compares_the_records_of_a_store(store: Path, tmp_path: Path) -> None:
    [path] = store.iterdir()
    other = shutil.copy(path, tmp_path / "other.json")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", path, other], capture_output=True, text=True, check=True
    )
    assert done.stdout.count(KEY) == 2


def baseline(path: Path, launches: list[float], **more: Any) -> str:
    """Write a baseline of this machine and return the option that names it."""
    return f"--nixl-baseline={write(path, record('nixl:0', {KEY: launches}, **more))}"


def test_a_run_far_slower_than_its_baseline_is_regressed_and_fails(tmp_path: Path) -> None:
    # Of a baseline of seven launches three are enough to prove a loss.
    fast = baseline(tmp_path / "b.json", [1e6, 1.01e6, 0.99e6, 1.02e6, 0.98e6, 1e6, 1e6], versions={"ucx": "0.1"})
    done = bandwidth(
        "--nixl-op=WRITE", "--nixl-duration=20ms", "--nixl-min-launches=3", fast,
        f"--junit-xml={tmp_path / 'junit.xml'}",
    )  # fmt: skip
    assert f"REGRESSED regression: {KEY} against nixl:0: -100.0 %" in done.output
    assert "changed: versions ucx: 0.1 -> 1." in done.output
    assert "  a comparison needs several launches: each row has at least 3, so this run takes longer\n" in done.output
    assert "NIXL verdict: FAIL (1 PASS, 1 REGRESSED; 1 row measured)" in done.output
    assert done.code == 1
    suite = junit_suite(tmp_path / "junit.xml")
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
    failure = suite.find("testcase[@classname='nixl_run']/failure")
    assert failure is not None
    assert f"REGRESSED: {KEY} against nixl:0: -100.0 %" in failure.attrib["message"]


def in_small_disk(directory: Path, mount: str, *arguments: str) -> Finished:
    """Run pytest in a new mount namespace, with a new file system on a directory. Both end with the run."""
    need_programs(root=True)  # to mount a file system
    script = f'mount -t tmpfs {mount} none {directory} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command(BANDWIDTH, "--nixl-blocks=64KiB", *arguments)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout)


@pytest.mark.parametrize(
    ("mount", "reason", "expected", "code"),
    [
        ("-o size=4k", "No space left on device", "100 s", 0),
        # The same with another error of the file system. A failing verdict is the easier one to keep.
        pytest.param("-o ro", "Read-only file system", "1 ns", 1, marks=pytest.mark.whole),
    ],
    ids=["full-pass", "ro-fail"],
)
def test_a_store_that_cannot_be_written_is_reported_and_the_verdict_stands(
    tmp_path: Path, mount: str, reason: str, expected: str, code: int
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "p.toml").write_text(
        f'[profile]\nname = "test"\n[[expect]]\np99 = "{expected}"\nsource = "made by a test"\n'
    )
    done = in_small_disk(
        tmp_path / "store", mount, *FAST, f"--nixl-store={tmp_path / 'store'}", f"--nixl-profile={tmp_path / 'p.toml'}",
        f"--nixl-report={tmp_path / 'store'}/r.html",
    )  # fmt: skip
    assert f"cannot be written ({reason}): this run's verdict is not affected, but its record is lost" in done.output
    assert f"r.html cannot be written ({reason})" in done.output
    assert f"NIXL verdict: {'PASS' if code == 0 else 'FAIL'} (" in done.output
    assert "INTERNALERROR" not in done.output
    assert done.code == code


def test_a_slower_image_measured_in_turn_is_regressed(tmp_path: Path) -> None:
    # Four launches of each are the fewest that prove a loss.
    done = bandwidth(
        "--nixl-op=WRITE", "--nixl-duration=20ms", "--nixl-min-launches=4",
        f"--nixl-profile={profile(tmp_path / 'p.toml', ANY_SPEED)}",
        "--nixl-compare-image=nixl:1 env -u UCX_TLS", env={"UCX_TLS": "tcp"},
    )  # fmt: skip
    assert "REGRESSED regression: " in done.output
    assert done.code == 1


def test_the_first_run_makes_the_baseline_with_which_the_next_one_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    first = bandwidth(*FAST, f"--nixl-baseline={path}")
    assert f"  no baseline yet: {path} does not exist, so this run is compared with none" in first.output
    expected = f"NO-EXPECTATION regression: {path} does not exist, so no row was compared with an earlier run; "
    assert f"{expected}this run is the first baseline, and was written there: each row has one launch" in first.output
    second = bandwidth(*FAST, f"--nixl-baseline={path}", "--nixl-max-regression=99%")
    assert "does not exist" not in second.output
    assert recorded(tmp_path)["benchmarks"][0]["name"] == KEY
