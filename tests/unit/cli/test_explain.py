# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain`` reads logs, looks words up and lists checks; ``profile list`` and ``--version``."""

from __future__ import annotations

import io
import os
import select
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, WITHOUT, environment

from pytest_nixl import __version__, cli, wait_until
from pytest_nixl.cli import explain
from pytest_nixl.judge.profiles import bundled_profiles


@pytest.mark.long
def test_the_printed_command_runs_that_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--checks", "shm"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    command = shlex.split(line.partition("run it: ")[2])
    done = subprocess.run(
        [sys.executable, "-m", *command, "--collect-only", "-q", *WITHOUT], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "test_machine[shm]" in done.stdout
    assert "1 test collected" in done.stdout


def test_each_profile_is_listed_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= set(bundled_profiles())
    [p4d] = [line for line in lines if line.startswith("p4d.24xlarge ")]
    assert p4d.endswith("(expects nothing of rows yet)")
    [loopback] = [line for line in lines if line.startswith("loopback ")]
    assert loopback.endswith("two processes of one host, host memory")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pytest-nixl {__version__}\n"


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["explain", *arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


def test_no_entry_prints_a_link_of_markdown() -> None:
    assert [line for entry in explain._entries() for line in (*entry.names, *entry.lines) if "](" in line] == []


def test_of_many_causes_the_first_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.log"
    errors = ("BACKEND", "NOT_FOUND", "REMOTE_DISCONNECT", "INVALID_PARAM", "MISMATCH", "NO_TELEMETRY", "UNKNOWN",
              "REPOST_ACTIVE", "NOT_SUPPORTED")  # fmt: skip
    file.write_text("\n".join(f"NIXL_ERR_{error}" for error in errors))
    heads = explained(capsys, str(file))
    assert len(heads) == 9
    assert heads[-1] == "and 1 more: --all prints them"
    assert len(explained(capsys, "--all", str(file))) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("INFO the secret is hunter2\n" * 5, "nothing is known of this log of 5 lines"),
        ("no end of line", "nothing is known of this log of 1 line"),
        ("", "the log is empty"),
    ],
)
def test_a_log_of_which_nothing_is_known_is_one_sentence(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli.main(["explain", "-"]) == 2
    assert capsys.readouterr() == ("", f"pytest-nixl: {message}\n")


def test_a_pipe_is_read_as_a_log_if_somebody_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"NIXL_ERR_BACKEND\n")

    def write_more() -> None:
        wait_until(lambda: not select.select([reader], [], [], 0)[0], "the first line to be read", seconds=60)
        os.write(writer, b"NIXL_ERR_NOT_FOUND")
        os.close(writer)

    thread = threading.Thread(target=write_more)
    thread.start()
    assert len(explained(capsys, f"/dev/fd/{reader}")) == 2
    thread.join()
    os.close(reader)
    monkeypatch.setattr(explain, "FIRST_BYTE_SECONDS", 0.01)
    os.mkfifo(tmp_path / "engine")
    assert cli.main(["explain", str(tmp_path / "engine")]) == 2
    assert capsys.readouterr().err == "pytest-nixl: nothing was written to this pipe within 0 s\n"


def test_many_entries_are_counted_unless_all_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = explained(capsys, "UCX"), explained(capsys, "--all", "UCX")
    assert short[:-1] == whole[: len(short) - 1]
    assert short[-1] == f"and {len(whole) - len(short) + 1} more: give more words, or --all"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["xyzzy"], "no entry matches: give the line as it was printed, or one word of it, --checks or --findings"),
        (["Nixl_Err_Bakcend"], "no entry matches: did you mean nixl_err_backend?"),
        (["NIXL", "compatibility", "hash", "mismach"], "no entry matches: give the line as it"),
        (["--checks", "NIXL_ERR_BACKEND"], "no entry matches: "),
        (["hunter2 " * 30], "nothing is known of these words"),
        (["absent.log"], "there is no file of this name"),
        ([" "], "the word is empty: "),
        (["a=--"], "no entry matches: "),
        (["nixl-gaet"], "no entry matches: did you mean nixl-gate?"),
    ],
)
def test_a_word_that_no_entry_matches_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pytest-nixl: {message}")
    assert printed.err.count("\n") == 1
