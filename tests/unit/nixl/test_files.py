# SPDX-License-Identifier: Apache-2.0
"""A buffer that is a file: what it leaves when it is freed, and how it is written on a full file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.nixl.worker import files
from pytest_nixl.nixl.worker.files import FileBuffer


def test_a_buffer_that_is_freed_leaves_no_descriptor_and_no_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    buffer = FileBuffer(8192, str(tmp_path), 4096)
    buffer.fill(3, 0, 8192)
    buffer.sync()
    assert buffer.compare(3, 0, 8192) is None
    buffer.write(5, bytes([buffer.read(5, 1)[0] ^ 1]))
    wrong = buffer.compare(3, 0, 8192)
    assert wrong is not None
    assert (wrong["wrong_bytes"], wrong["offset"]) == (1, 5)
    assert list(tmp_path.iterdir()) == [], "it has no name"
    buffer.free()
    assert sorted(os.listdir("/proc/self/fd")) == sorted(before)


def test_a_write_that_the_storage_takes_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = FileBuffer(4096, str(tmp_path), 4096)
    monkeypatch.setattr(os, "pwrite", lambda *_: 100)
    with pytest.raises(OSError, match="No space left on device"):
        buffer.write(0, bytes(4096))
    monkeypatch.undo()
    buffer.free()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NixlPluginError, match=f"4096 bytes cannot be created in {tmp_path}/none: No such file"):
        FileBuffer(4096, f"{tmp_path}/none", 4096)


@pytest.mark.parametrize(
    ("system", "alignment", "message"),
    [
        ("ext4", 4096, "direct/ext4"),
        ("ext4", 4097, "cached/ext4"),
        ("tmpfs", 4096, "memory/tmpfs"),
        ("ramfs", 1, "memory/ramfs"),
    ],
)
def test_a_file_says_whether_the_page_cache_or_the_storage_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    system: str, alignment: int, message: str,
) -> None:  # fmt: skip
    """The file system is a double, because a machine has not each of them."""
    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(files, "_open", lambda _, *, direct: (os.open(path, os.O_RDWR), direct))
    monkeypatch.setattr(files, "file_system", lambda *_: system)
    FileBuffer(4096, str(tmp_path), alignment).free()
    assert capfd.readouterr().err == f"pytest-nixl: file {message}\n"


@pytest.mark.parametrize(
    ("refused", "message"),
    [((), "direct"), ((os.O_TMPFILE,), "direct"), ((os.O_DIRECT,), "cached"), ((os.O_TMPFILE, os.O_DIRECT), "cached")],
)
def test_a_file_system_may_refuse_files_without_name_or_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    refused: tuple[int, ...], message: str,
) -> None:  # fmt: skip
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if any(flags & flag == flag for flag in refused):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags & ~os.O_DIRECT, mode)

    monkeypatch.setattr(files, "file_system", lambda *_: "ext4")
    monkeypatch.setattr(os, "open", refuse)
    FileBuffer(4096, str(tmp_path), 4096).free()
    assert capfd.readouterr().err == f"pytest-nixl: file {message}/ext4\n"
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_read_from_the_storage_and_not_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = FileBuffer(4096, str(tmp_path), 4096)
    advice: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *arguments: advice.append(arguments))
    buffer.read(5, 7)
    assert advice == [(5, 7, os.POSIX_FADV_DONTNEED)]
    buffer.free()
