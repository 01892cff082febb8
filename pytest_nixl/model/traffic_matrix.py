# SPDX-License-Identifier: Apache-2.0
"""Read a traffic matrix of NIXL's kvbench: the bytes that each rank sends to each other rank.

The format is that of kvbench's ``matrix_file``: one line for each source, one cell for each target, separated by
spaces. A cell is a number of bytes, such as ``4096``, or a size such as ``1M`` with the unit B, K, M or G, where K is
1024. A fraction of a byte is dropped, as kvbench does: its generator rounds ``20.83M``. A file with sections, kvbench's
``tp_file``, has the matrix in the section ``[rdma]``; its sections ``[read]`` and ``[write]`` are about storage, and
are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pytest_nixl.core.strict import printable
from pytest_nixl.core.untrusted_file import read_regular

#: The most bytes of a file: a matrix of 1,024 ranks has a million cells.
MOST_BYTES = 16 << 20
#: The most ranks of a matrix.
MOST_RANKS = 1024
#: The most bytes of a cell.
MOST_CELL = 1 << 40

_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_CELL = re.compile(r"(-?)([0-9]{1,18})(?:\.([0-9]{1,18}))?([A-Za-z]*)")
_SECTION = re.compile(r"\[(.*)\]")
_MATRIX, _STORAGE = "rdma", ("read", "write")
#: The most characters of a line or a cell that a message quotes.
_QUOTED = 40

Matrix = tuple[tuple[int, ...], ...]


def read_matrix(path: str) -> Matrix:
    """Read the matrix of a file.

    :returns: a line for each source with the bytes to each target.
    :raises ValueError: the file cannot be read, or holds no such matrix. The text of the error is one sentence.
    """
    name = printable(path)
    try:
        data = read_regular(Path(path), MOST_BYTES, "a traffic matrix")
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not text: expected a traffic matrix") from None
    try:
        return parse_matrix(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def parse_matrix(text: str) -> Matrix:
    """Read a matrix from its text.

    :raises ValueError: with one sentence, which names the line.
    """
    lines = list(_lines(text))
    ranks = len(lines)
    if not lines:
        raise ValueError("it has no line of a matrix: expected a line for each source, with a size for each target")
    if ranks > MOST_RANKS:
        raise ValueError(f"it has {ranks} lines: expected at most {MOST_RANKS} ranks")
    rows = []
    for source, (number, line) in enumerate(lines):
        cells = line.split()
        if len(cells) != ranks:
            raise ValueError(
                f"line {number} has {len(cells)} cell{'' if len(cells) == 1 else 's'}, but the matrix has {ranks} "
                f"line{'' if ranks == 1 else 's'}: expected as many cells in each line as lines"
            )
        rows.append(tuple(_bytes(cell, number) for cell in cells))
        if rows[-1][source]:
            raise ValueError(f"line {number} lets rank {source} send {cells[source]} to itself: expected 0")
    if not any(map(any, rows)):
        raise ValueError("each of its cells is 0: expected a rank that sends bytes to another")
    return tuple(rows)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of the matrix that are not empty, each with its number in the file, from 1."""
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _SECTION.fullmatch(line.strip())
        if found is not None:
            section = found[1].strip().lower()
            if section not in (_MATRIX, *_STORAGE):
                raise ValueError(
                    f"line {number} begins the unknown section {_shown(line)}: expected [rdma], [read] or [write]"
                )
        elif line.strip() and section not in _STORAGE:
            yield number, line


def _bytes(cell: str, line: int) -> int:
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(f"{_shown(cell)} in line {line} is not a size: expected bytes such as 4096, or a size like 1M")
    sign, whole, fraction, unit = found.groups()
    if unit and unit.lower() not in _UNITS:
        raise ValueError(f"{_shown(cell)} in line {line} has the unknown unit {_shown(unit)}: expected B, K, M or G")
    digits = fraction or ""
    size = int(whole + digits) * _UNITS[unit.lower() or "b"] // int("1" + "0" * len(digits))
    if sign and int(whole + digits):
        raise ValueError(f"{_shown(cell)} in line {line} is negative: expected 0 or more bytes")
    if size > MOST_CELL:
        raise ValueError(f"{_shown(cell)} in line {line} is more than {MOST_CELL >> 40} TiB: expected a smaller size")
    return size


def _shown(text: str) -> str:
    return repr(printable(text.strip()[:_QUOTED]))
