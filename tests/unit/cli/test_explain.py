# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl explain`` looks words up and lists checks; ``profile list`` and ``--version`` say what is installed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, WITHOUT, environment

from pytest_nixl import __version__, cli
from pytest_nixl.cli import explain
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.session.suites import checks_of_suites


def test_every_check_of_the_suites_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--checks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    found = [(check["suite"], check["id"]) for check in listed]
    assert sorted(found) == sorted((suite, id) for suite, ids in checks_of_suites().items() for id in ids)
    assert all(check["proves"].endswith(".") for check in listed)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nixl_err_backend"], ["error NIXL_ERR_BACKEND", "do:     `pytest-nixl doctor --backend UCX`"]),
        (["target", "uri", "is", "not"], ["error the target uri is not valid"]),
        (["VRAM-AS-HOST-MEMORY"], ["finding VRAM-AS-HOST-MEMORY", "remedy: "]),
        (["shm"], ["check shm", "proves: /dev/shm is larger", "fault `/dev/shm` has 64 MiB"]),
        (["--", "--nixl-gate"], ["option --nixl-gate"]),
        (["handshake"], ["error handshake_setup_failed", "doctor --side-channel=PREFILL_HOST:5600"]),
    ],
)
def test_a_word_is_explained_by_what_comes_with_the_package(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *words]) == 0
    printed = capsys.readouterr().out
    assert [text for text in said if text not in printed] == []


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["explain", *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]


def test_whole_words_come_before_longer_ones_and_parts_of_words_only_if_there_is_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = explained(capsys, "--all", "hang")
    assert "check ranks-leader-change" not in found, "the hang of change"
    assert found.index("error handshake_setup_failed") < found.index("finding LIBFABRIC-NOTIFICATION-HANGS")
    assert explained(capsys, "handshake", "hangs")[0] == "error handshake_setup_failed"
    assert explained(capsys, "mtu")[0] == "check mtu", "its own id is before the faults that name it"
    assert explained(capsys, "ompatib")[0] == "error NIXL compatibility hash mismatch"
    line = "ERROR 11-25 worker.py:88] Remote NIXL agent engine ID mismatch. Expected a, received b."
    assert explained(capsys, line) == ["error engine ID mismatch"], "a whole line of a log"
    line = "Invalid UCX_TLS=tcp for NIXL UCX backend: NVIDIA GPU(s) are present"
    assert explained(capsys, line) == ["error for NIXL UCX backend: NVIDIA GPU(s) are present"]


def test_many_entries_are_counted_unless_all_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = explained(capsys, "UCX"), explained(capsys, "--all", "UCX")
    assert short[:-1] == whole[: len(short) - 1]
    assert short[-1] == f"and {len(whole) - len(short) + 1} more: give more words, or --all"


def test_commands_name_the_suites_as_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "NIXL_ERR_NOT_FOUND"]) == 0
    assert "`pytest suites/metadata`" in capsys.readouterr().out
    inside = Path(explain.__file__).parents[1] / "suites"
    monkeypatch.setattr(explain, "suites_folder", lambda: inside)
    assert cli.main(["explain", "NIXL_ERR_NOT_FOUND"]) == 0
    out = capsys.readouterr().out
    assert "`pytest --pyargs pytest_nixl.suites.metadata`" in out
    assert "pytest suites/" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["xyzzy"], "no entry matches 'xyzzy': give a shorter part of the message, --checks or --findings"),
        (["memlick"], "no entry matches 'memlick': did you mean memlock?"),
        (["--checks", "NIXL_ERR_BACKEND"], "no entry matches 'NIXL_ERR_BACKEND': "),
        ([" "], "the word is empty: "),
        ([], "the word is empty: "),
    ],
)
def test_a_word_that_no_entry_matches_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pytest-nixl: {said}")
    assert printed.err.count("\n") == 1
