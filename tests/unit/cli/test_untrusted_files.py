# SPDX-License-Identifier: Apache-2.0
"""Commands refuse a FIFO, a device, and a file that is too large or nested too deeply, in one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nixl.cli import main
from pytest_nixl.core.untrusted_file import write_regular
from pytest_nixl.host.recorded_tree import ANSWERS_FOLDER
from pytest_nixl.judge.profile_table import MOST_TABLES

#: A command that waits for a FIFO would wait for ever.
pytestmark = pytest.mark.timeout(120)

HEAD = '[profile]\nname = "p"\n'
ROW = '[[expect]]\nblocks = "{0}..{0}"\nfloor = "1GB/s"\nsource = "measured"\n'
#: The name of a file in a command.
FILE = "FILE"
READERS = {
    "connector": ("connector", FILE, FILE),
    "nixlbench": ("profile", "judge", "loopback", f"--nixlbench={FILE}"),
    "learn": ("profile", "learn", FILE, FILE, FILE, "--name=x", "--output=new.toml"),
    "profile": ("profile", "show", FILE),
    "tree": ("doctor", "--root=TREE"),
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)  # a file with a hole, which takes no space


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command and return its one sentence."""
    assert main([argument.replace(FILE, str(folder / FILE)) for argument in arguments]) == 2
    error_output = capsys.readouterr().err.strip()
    assert len(error_output.splitlines()) == 1
    return error_output


@pytest.mark.parametrize("make", [fifo, device, huge])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_never_ends_is_refused(
    reader: str,
    make: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if reader == "tree":
        (tmp_path / "TREE" / ANSWERS_FOLDER).mkdir(parents=True)
        make(tmp_path / "TREE" / ANSWERS_FOLDER / "environment.json")
        file_name = "environment.json"
    else:
        make(tmp_path / FILE)
        file_name = FILE
    message = refusal(tmp_path, capsys, *READERS[reader])
    expected_text = "has more than" if make is huge else "is a FIFO" if make is fifo else "is a device"
    if reader == "profile" and make is not huge:
        expected_text = "is not a file"
    if reader == "tree" and make is device:
        expected_text = "lies outside the recorded tree"
    assert file_name in message
    assert expected_text in message
    assert "expected" in message


@pytest.mark.parametrize("endless", ["/proc/kmsg", "/proc/self/pagemap"])
@pytest.mark.parametrize("reader", sorted(set(READERS) - {"tree"}))
def test_a_file_of_proc_that_never_ends_is_refused(
    reader: str, endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a file is a regular one of size 0, which waits for more, or has more bytes than any memory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE).symlink_to(endless)
    message = refusal(tmp_path, capsys, *READERS[reader])
    assert str(tmp_path / FILE) in message or Path(endless).name in message
    assert "has more than" in message or "is a stream that does not end" in message or "cannot be read" in message


@pytest.mark.parametrize("command", ["init", "doctor"])
def test_a_recorded_answer_of_another_form_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TREE" / ANSWERS_FOLDER).mkdir(parents=True)
    (tmp_path / "TREE" / ANSWERS_FOLDER / "kernel_log.json").write_text("{}")
    message = refusal(tmp_path, capsys, command, "--root=TREE")
    assert message.startswith(
        f"pytest-nixl: {tmp_path}/TREE is not a tree that this version can read (KeyError('why'))"
    )
    assert not (tmp_path / "nixl").exists()


@pytest.mark.parametrize("append", [False, True])
def test_a_file_is_not_written_to_a_fifo(append: bool, tmp_path: Path) -> None:
    fifo(tmp_path / FILE)
    with pytest.raises(ValueError, match="is a FIFO: expected the name of a new or a regular file"):
        write_regular(tmp_path / FILE, "text", append=append)
    write_regular(tmp_path / "regular", "first ")
    write_regular(tmp_path / "regular", "second", append=append)
    assert (tmp_path / "regular").read_text() == ("first second" if append else "second")


def test_an_error_that_quotes_a_long_word_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "x" * 200_000]) == 2
    error = capsys.readouterr().err
    assert len(error) < 2200
    assert error.rstrip().endswith("or the path of a TOML file")


@pytest.mark.parametrize("make", [fifo, device])
def test_facts_are_not_written_to_what_is_not_a_file(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / FILE)
    (tmp_path / "TREE" / ANSWERS_FOLDER).mkdir(parents=True)
    message = refusal(tmp_path, capsys, "facts", f"--root={tmp_path}/TREE", f"--output={FILE}")
    assert "expected the name of a new or a regular file" in message


def test_answers_that_are_nested_too_deeply_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "TREE" / ANSWERS_FOLDER
    answers.mkdir(parents=True)
    (answers / "environment.json").write_text("[" * 100_000)
    tree = str(tmp_path / "TREE")
    assert "it is nested more than 32 deep" in refusal(tmp_path, capsys, "facts", "--compare", tree, tree)


def test_a_profile_of_too_many_tables_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_text(HEAD + "".join(ROW.format(size) for size in range(1, MOST_TABLES + 2)))
    message = refusal(tmp_path, capsys, "profile", "show", FILE)
    assert "expect: 1,001 tables: expected at most 1,000" in message


@pytest.mark.parametrize("arguments", [("explain", FILE), ("profile", "show", FILE)], ids=["explain", "profile"])
def test_a_file_of_the_kernel_that_waits_for_more_is_refused(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not every container may read it, and then that is the sentence."""
    (tmp_path / FILE).symlink_to("/proc/kmsg")
    message = refusal(tmp_path, capsys, *arguments)
    assert "is a stream that does not end" in message or os.strerror(errno.EPERM) in message
