# SPDX-License-Identifier: Apache-2.0
"""Commands refuse a FIFO, a stream, and a file that is too large or nested too deeply, in one sentence."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nixl.cli import main
from pytest_nixl.host.recorded_tree import ANSWERS_FOLDER

#: A command that waits for a FIFO would wait for ever.
pytestmark = pytest.mark.timeout(120)

#: The name of a file in a command.
FILE = "FILE"
READERS = {
    "connector": ("connector", FILE, FILE),
    "nixlbench": ("profile", "judge", "loopback", f"--nixlbench={FILE}"),
    "learn": ("profile", "learn", FILE, FILE, FILE, "--name=x", "--output=new.toml"),
    "profile": ("profile", "show", FILE),
    "tree": ("doctor", "--root=TREE"),
}


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)  # a file with a hole, which takes no space


def stream(path: Path) -> None:
    path.symlink_to("/proc/kmsg")  # a regular file of size 0, which waits for more; not every container may read it


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the answers in a recorded tree, which is in the current directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "TREE" / ANSWERS_FOLDER
    folder.mkdir(parents=True)
    return folder


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command and return its one sentence."""
    assert main([argument.replace(FILE, str(folder / FILE)) for argument in arguments]) == 2
    error_output = capsys.readouterr().err.strip()
    assert len(error_output.splitlines()) == 1
    return error_output


ENDLESS = f"is a stream that does not end|lies outside the recorded tree|{os.strerror(errno.EPERM)}"
KINDS: list[tuple[Callable[[Path], None], str]] = [
    (os.mkfifo, "(is a FIFO|is not a file): expected"), (huge, "has more than .*: expected"), (stream, ENDLESS)
]  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "make", "fault"),
    [*((reader, *kind) for reader in READERS for kind in KINDS), ("explain", stream, ENDLESS)],
)
def test_a_file_that_never_ends_is_refused(
    reader: str, make: Callable[[Path], None], fault: str, answers: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = answers / "environment.json" if reader == "tree" else Path.cwd() / FILE
    make(path)
    message = refusal(path.parent, capsys, *READERS.get(reader, (reader, FILE)))
    assert re.search(f"{path.name}.* ({fault})", message), message


@pytest.mark.parametrize(
    ("command", "name", "answer", "error"),
    [
        ("init", "kernel_log", "{}", "KeyError('why')"),
        ("doctor", "kernel_log", "3", "TypeError("),
        ("doctor", "environment", "[]", "AttributeError("),
    ],
)
def test_a_recorded_answer_of_another_form_is_refused(
    command: str, name: str, answer: str, error: str, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (answers / f"{name}.json").write_text(answer)
    message = refusal(answers, capsys, command, "--root=TREE")
    assert message.startswith(f"pytest-nixl: {answers.parent} is not a tree that this version can read ({error}")
    assert message.endswith("): record it again with `pytest-nixl facts --record DIR`")
    assert not Path("nixl").exists()


def test_an_error_that_quotes_a_long_word_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "x" * 200_000]) == 2
    error = capsys.readouterr().err
    assert len(error) < 2200
    assert error.rstrip().endswith("or the path of a TOML file")


def test_facts_are_not_written_to_what_is_not_a_file(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(answers / FILE)
    message = refusal(answers, capsys, "facts", "--root=TREE", f"--output={FILE}")
    assert message.endswith("is a FIFO: expected the name of a new or a regular file")


def test_answers_that_are_nested_too_deeply_are_refused(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (answers / "environment.json").write_text("[" * 100_000)
    assert "it is nested more than 32 deep" in refusal(answers, capsys, "facts", "--compare", "TREE", "TREE")
