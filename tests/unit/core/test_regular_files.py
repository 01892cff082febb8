# SPDX-License-Identifier: Apache-2.0
"""Only regular files of a limited size are read and written; anything else is refused in one sentence."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nixl.core.untrusted_file import open_regular, read_regular, write_regular


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


MADE: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_not_a_regular_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x\x1b"
    MADE[kind](path)
    shown = f"{tmp_path}/x\\x1b is {kind}: expected "
    with pytest.raises(ValueError) as refused:
        read_regular(path, 10, "a profile")
    assert str(refused.value) == f"{shown}a profile"
    with pytest.raises(ValueError) as refused:
        write_regular(path, "x")
    assert str(refused.value) == f"{shown}the name of a new or a regular file"


def test_a_file_is_replaced_or_continued_and_a_socket_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, append, expected in (("first", False, "first"), ("new", False, "new"), ("er", True, "newer")):
        write_regular(Path("x"), text, append=append)
        assert Path("x").read_text() == expected
    listen(Path("s"))
    with pytest.raises(ValueError, match=r"^s is a socket: expected the name of a new or a regular file$"):
        write_regular(Path("s"), "x")


@pytest.mark.parametrize(("largest", "size"), [((1 << 20) - 1, "1023 KiB"), (1 << 20, "1 MiB"), (3 << 20, "3 MiB")])
def test_a_file_has_its_size_at_most(tmp_path: Path, largest: int, size: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(largest))
    assert read_regular(path, largest, "a profile") == bytes(largest)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError) as refused:
        read_regular(path, largest, "a profile")
    assert str(refused.value) == f"{path} has more than {size}: expected a profile"


def test_a_file_that_grows_is_refused_and_one_of_proc_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    with open_regular(path, 4, "a profile") as file:
        with path.open("ab") as other:
            other.write(b"def")
        assert file.read() == b"abcdef"
    path.write_bytes(b"")
    assert read_regular(path, 4, "a profile") == b""
    maps = Path("/proc/self/cgroup")
    assert read_regular(maps, 1 << 20, "a profile") == maps.read_bytes()
    with pytest.raises(ValueError, match=r"^/proc/self/status has more than 0 KiB: expected a profile$"):
        read_regular(Path("/proc/self/status"), 20, "a profile")
    with pytest.raises(OSError, match="/proc/self/mem"):
        read_regular(Path("/proc/self/mem"), 20, "a profile")
