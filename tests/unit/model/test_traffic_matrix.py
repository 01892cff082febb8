# SPDX-License-Identifier: Apache-2.0
"""The reader of kvbench's traffic matrices: what kvbench writes is read, and each bad input is one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_nixl.model.traffic_pattern import MOST_RANKS, parse_matrix, read_matrix

#: As kvbench's generator writes it, in sections.
SECTIONS = """\
[rdma]
0 710M 0B 0
0 0 0 0
20.83M 0 0 512B
0 0 1.5G 0

[read]
710M 710M 0 0

[write]
710M 710M 0 0
"""
MIB = 1 << 20


def test_a_file_with_sections_has_its_matrix_in_rdma() -> None:
    matrix = parse_matrix(SECTIONS)
    assert matrix[0] == (0, 710 * MIB, 0, 0)
    # As kvbench: a fraction of a byte is dropped.
    assert matrix[2] == (int(20.83 * MIB), 0, 0, 512)
    assert matrix[3] == (0, 0, 3 << 29, 0)


def test_a_file_is_read_with_tabs_empty_lines_and_small_letters(tmp_path: Path) -> None:
    file = tmp_path / "matrix.txt"
    file.write_text("\ufeff [ RDMA ] \r\n0\t1024g\r\n \t\r\n4096 -0\r\n", encoding="utf-8")
    assert read_matrix(str(file)) == ((0, 1 << 40), (4096, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no line of a matrix"),
        ("0 1M\n0 0 0\n", "line 2 has 3 cells, but the matrix has 2 lines"),
        ("0 -1M\n0 0\n", "'-1M' in line 1 is negative"),
        ("0 1MiB\n0 0\n", "'1MiB' in line 1 has the unknown unit 'MiB'"),
        *((f"0 {cell}\n0 0\n", f"'{cell}' in line 1 is not a size") for cell in ("1e6", ".5", "5.", "-", "1.M", "M")),
        ("0 9999999G\n0 0\n", "'9999999G' in line 1 is more than 1 TiB"),
        ("0 1M\n0 64K\n", "line 2 lets rank 1 send 64K to itself"),
        ("0 0\n0 0\n", "each of its cells is 0"),
        (" [gpu] \n0 1M\n0 0\n", "line 1 begins the unknown section '[gpu]'"),
        ("0\n" * (MOST_RANKS + 1), f"it has {MOST_RANKS + 1} lines"),
        ("0 1\x1b[31m\n0 0\n", "is not a size"),
    ],
)
def test_bad_input_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_matrix(text)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_the_sentence_about_a_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "matrix.txt"
    file.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match=r"matrix\.txt is not text"):
        read_matrix(str(file))
    with pytest.raises(ValueError, match=r"no\\x1bfile cannot be read: No such file"):
        read_matrix(str(tmp_path / "no\x1bfile"))
    with pytest.raises(ValueError, match="is a directory: expected a traffic matrix"):
        read_matrix(str(tmp_path))
    file.write_text("0 1\n")
    with pytest.raises(ValueError, match=r"matrix\.txt: line 1 has 2 cells, but the matrix has 1 line:"):
        read_matrix(str(file))
