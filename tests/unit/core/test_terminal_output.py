# SPDX-License-Identifier: Apache-2.0
"""Unwritable output, a deleted directory, no /proc, no /dev/shm: each is reported in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, command, environment, profile

from pytest_nixl.store.store import Store

CHECK = """
import pathlib, shutil
import pytest

@pytest.mark.nixl_check("check")
@pytest.mark.parametrize("number", range(3))
def test_check(number):
    here = pathlib.Path.cwd()
    if number == 1 and (here / "delete me").exists():
        shutil.rmtree(here)
"""

ROW = (BANDWIDTH, "--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-duration=20ms")
CLI = [sys.executable, "-m", "pytest_nixl.cli"]

#: Shell script that runs its arguments with standard output closed.
CLOSED = 'exec "$@" >&-'


def _start(argv: Sequence[str], output: str, directory: Path = ROOT) -> tuple[int, str]:
    """Run a command whose standard output is closed, full or without a reader; return its exit code and stderr."""
    started = ["bash", "-c", CLOSED, "closed", *argv] if output == "closed" else list(argv)
    if output == "left":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            started, cwd=directory, env=environment(PYTHONPATH=str(ROOT)), stdout=writer, stderr=subprocess.PIPE,
            text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr


OUTPUTS = {"closed": "it is closed", "full": "No space left on device", "left": "Broken pipe"}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_whose_output_cannot_be_written_writes_its_report_and_does_not_end_with_0(
    tmp_path: Path, output: str
) -> None:
    (tmp_path / "test_check.py").write_text(CHECK)
    report = tmp_path / "r.html"
    code, messages = _start(command(str(tmp_path), f"--nixl-report={report}"), output)
    assert code == 3, messages
    (sentence,) = messages.splitlines()
    assert sentence.startswith(
        f"pytest-nixl: standard output cannot be written ({OUTPUTS[output]}): the run was completed"
    )
    assert re.search(r"<strong>PASS</strong>.*3 PASS", report.read_text(), re.S)


@pytest.mark.long
def test_the_record_of_a_run_on_a_full_output_is_stored(tmp_path: Path) -> None:
    any_speed = profile(tmp_path / "p.toml", "floor = '1 KB/s'")
    code, messages = _start(command(*ROW, f"--nixl-store={tmp_path}/store", f"--nixl-profile={any_speed}"), "full")
    assert code == 3, messages
    (stored,), skipped = Store(tmp_path / "store").runs()
    assert (len(stored.rows), stored.interrupted, skipped) == (1, "", [])


@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        ("closed", 2, "is closed: redirect it to a file, such as >answer.txt"),
        ("full", 2, "cannot be written (No space left on device)"),
        ("left", 1, "cannot be written: the program that was reading it has ended"),
    ],
)
def test_the_command_reports_in_one_sentence_that_its_output_cannot_be_written(
    output: str, code: int, reason: str
) -> None:
    assert _start([*CLI, "explain", "--findings"], output) == (code, f"pytest-nixl: standard output {reason}\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("explain", "--findings"), 0), (("report", "x", "y.html"), 2)],
)
def test_the_command_in_a_deleted_directory_ends_with_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f'rmdir {gone}; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", line, "gone", *CLI, *arguments], cwd=gone, env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)


@pytest.mark.long
def test_a_run_whose_directory_is_deleted_is_interrupted_and_writes_its_report(tmp_path: Path) -> None:
    gone, report = tmp_path / "gone", tmp_path / "r.html"
    gone.mkdir()
    (gone / "delete me").touch()
    (tmp_path / "test_check.py").write_text(CHECK)
    done = subprocess.run(
        command(str(tmp_path / "test_check.py"), f"--rootdir={tmp_path}", f"--nixl-report={report}"), cwd=gone,
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    reason = f"the directory in which pytest was started, {gone}, was deleted"
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "NIXL verdict: " in done.stdout.splitlines()[-1]
    assert reason in done.stdout.splitlines()[-1]
    assert reason in report.read_text()


Inside = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def inside() -> Inside:
    """Run a command in a new mount namespace, after a line of shell that mounts."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    assert shutil.which("unshare"), "there is no unshare: install util-linux"

    def run(mounts: str, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "--mount", *user, "bash", "-c", f'{mounts} && exec "$@"', "inside", *argv], cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return run


NO_PROC = "mount -t tmpfs none /proc"


@pytest.mark.long
def test_a_run_without_proc_fails_with_that_reason_and_writes_its_report(inside: Inside, tmp_path: Path) -> None:
    done = inside(NO_PROC, *command(*ROW, f"--nixl-report={tmp_path}/r.html"))
    assert done.returncode == 1, done.stdout
    assert re.search(r"^ERROR \S+: /proc is not mounted", done.stdout, re.M)
    assert "    remedy: mount it: `mount -t proc proc /proc`" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "/proc is not mounted" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("subcommand", ["doctor", "facts"])
def test_the_command_without_proc_ends_with_a_sentence(inside: Inside, subcommand: str) -> None:
    done = inside(NO_PROC, *CLI, subcommand)
    assert done.returncode == 2
    assert "pytest-nixl: /proc is not mounted" in done.stderr
    assert "Traceback" not in done.stderr


READ_ONLY_SHM = "mount -t tmpfs -o ro none /dev/shm"


@pytest.mark.long
def test_unusable_shared_memory_fails_its_check(inside: Inside, tmp_path: Path) -> None:
    run = command("suites/infrastructure/test_machine.py", "-k", "shm", f"--nixl-report={tmp_path}/r.html")
    done = inside(READ_ONLY_SHM, *run)
    reason = "/dev/shm cannot be used: it is mounted read-only"
    assert done.returncode == 1, done.stdout
    assert f"FAIL shm: {reason}" in done.stdout
    assert "    remedy: start the container with `docker run --shm-size=8g`" in done.stdout
    assert reason in (tmp_path / "r.html").read_text()


@pytest.mark.long
def test_a_row_on_read_only_shared_memory_names_the_shared_memory(inside: Inside) -> None:
    done = inside(READ_ONLY_SHM, *command(*ROW))
    assert done.returncode == 1, done.stdout
    # The agents of both ranks are created at the same time, so either rank may be the first that fails.
    assert re.search(r"\(NIXL_ERR_BACKEND: /dev/shm is mounted read-only\) in rank [01] ", done.stdout), done.stdout
    assert "    remedy: mount it: `mount -t tmpfs -o rw tmpfs /dev/shm`" in done.stdout
