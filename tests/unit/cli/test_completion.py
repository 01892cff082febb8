# SPDX-License-Identifier: Apache-2.0
"""A shell completes the arguments of ``pytest-nixl`` by the script that ``pytest-nixl completion`` prints."""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.needs import need_programs
from helpers.terminal_screen import open_terminal

from pytest_nixl import cli
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.session.suites import checks_of_suites

COMMANDS = set(cli.COMMANDS)
#: Completes the words after the name of the script; the last one is the word at the cursor.
_COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_pytest_nixl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.fixture
def complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return what bash offers for words, of which the last one is at the cursor."""
    path = script("bash", tmp_path, capsys)

    def offered(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", _COMPLETE, "bash", str(path), "pytest-nixl", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_bash_offers_every_subcommand(complete: Callable[..., list[str]]) -> None:
    assert set(complete("")) > COMMANDS
    assert complete("com") == ["compare", "completion"]
    assert complete("--v") == ["--version"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", ""), {"quick", "standard", "extended", "--backend", "--profile", "--suite", "--print"}),
        (("run", "--suite", ""), set(checks_of_suites())),
        (("run", "--suite", "=", ""), set(checks_of_suites())),
        (("run", "quick", "--profile", "="), set(bundled_profiles())),
        (("run", "quick", "--profile", "h10"), {"h100", "h100-hyperpod"}),
        (("profile", ""), {"list", "show", "learn", "judge"}),
        (("profile", "show", "loop"), {"loopback"}),
        (("checks", "--level", "q"), {"quick"}),
        (("checks", "shm", "memlo"), {"memlock"}),
        (("findings", ""), set(FINDINGS)),
        (("finding", ""), set(FINDINGS)),
        (("completion", ""), {"bash", "zsh", "fish"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bash_offers_what_an_argument_takes(
    complete: Callable[..., list[str]], words: tuple[str, ...], expected: set[str]
) -> None:
    offered = set(complete(*words))
    assert expected <= offered
    assert {each for each in offered - expected if not each.startswith("-")} == set()


def test_bash_offers_files_where_a_file_is_expected_and_to_pytest(complete: Callable[..., list[str]]) -> None:
    assert complete("facts", "--output", "") == []  # so that bash completes files (-o default)
    assert complete("run", "quick", "--", "--") == []


def test_bash_offers_every_option_of_every_parser(complete: Callable[..., list[str]]) -> None:
    assert {"--root", "--backend", "--etcd", "--peer", "--gate", "--json"} < set(complete("doctor", "--"))


@pytest.mark.parametrize(
    ("shell", "before"),
    [
        pytest.param(("bash", "--norc", "--noprofile", "-i"), "", id="bash"),
        pytest.param(("zsh", "-f", "-i"), "autoload -U compinit; compinit -u -D; ", id="zsh"),
    ],
)
def test_an_interactive_shell_completes_a_word(
    shell: tuple[str, ...], before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_programs(shell[0])
    path = script(shell[0], tmp_path, capsys)
    ours, theirs = open_terminal()
    env = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "type> ", "HOME": str(tmp_path), "INPUTRC": "/dev/null"}
    with subprocess.Popen(
        [*shell], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            os.write(ours, f"{before}source '{path}'; echo rea''dy\n".encode())
            # A Tab that comes before the prompt would be one for the terminal, not for the shell.
            _read_until(ours, r"ready\r\n(?s:.*)type> ")
            os.write(ours, b"pytest-nixl run --sui\t")
            assert "pytest-nixl run --suite " in _read_until(ours, "--suite ")
        finally:
            process.kill()
            os.close(ours)


def _read_until(descriptor: int, pattern: str) -> str:
    """Read what a shell writes until it matches a pattern, or has been silent for a minute."""
    found = ""
    while re.search(pattern, found) is None:
        ready, _, _ = select.select([descriptor], [], [], 60)
        assert ready, f"the shell wrote only {found!r}"
        found += os.read(descriptor, 4096).decode(errors="replace")
    return found


def test_zsh_runs_the_script_for_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zsh, bash = (script(shell, tmp_path, capsys).read_text() for shell in ("zsh", "bash"))
    first, _, rest = bash.partition("\n")
    assert "bash" in first
    assert zsh.endswith(f"autoload -U +X bashcompinit && bashcompinit\n{rest}")


def test_fish_gets_every_subcommand_and_option_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = script("fish", tmp_path, capsys).read_text().splitlines()
    found = [line for line in lines if line.startswith("complete -c pytest-nixl -n '__pytest_nixl_at")]
    assert len(found) == len(set(found)) == len([line for line in lines if line.startswith("complete ")])
    for command in COMMANDS:
        assert any(line.startswith(f"complete -c pytest-nixl -n '__pytest_nixl_at {command}' ") for line in found)
    assert any("'__pytest_nixl_at run' -l suite -r -a 'bandwidth " in line for line in found)


def test_fish_completes_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_programs("fish")
    path = script("fish", tmp_path, capsys)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {path}; complete -C 'pytest-nixl run --sui'"], capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--suite")


def test_an_unknown_shell_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
