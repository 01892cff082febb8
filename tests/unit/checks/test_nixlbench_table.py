# SPDX-License-Identifier: Apache-2.0
"""The parser of nixlbench's output: every recorded file row by row, and cut off at every byte."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.model.nixlbench_output import (
    Fault,
    NixlbenchOutput,
    NixlbenchRegistration,
    NixlbenchRow,
    Trouble,
)
from pytest_nixl.model.nixlbench_table import read_output

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"

#: The recordings with a table. The target of the last one was killed before the first row.
TABLES = (
    "nixlbench/01_normal.rank_a.out",
    "nixlbench/02_check_consistency_write.rank_a.out",
    "nixlbench/06_posix_write.out",
    "nixlbench/13_four_ranks.rank_a.out",
    "nixlbench/20_asio.rank_a.out",
    "efa-p5/nixlbench-rank0.out",
    "nixlbench/21_target_killed.rank_a.out",
)
FILES = sorted(str(path.relative_to(FIXTURES)) for path in [*FIXTURES.glob("nixlbench/*"), *FIXTURES.glob("efa-p5/*")])
IDS = [name.rpartition("/")[2] for name in FILES]


def read(name: str) -> NixlbenchOutput:
    return read_output((FIXTURES / name).read_text())


def printed(name: str) -> list[list[float]]:
    """Return the columns of each row as the file has them, in bytes, bytes per second and seconds."""
    table = (FIXTURES / name).read_text().partition("Block Size")[2]
    rows = [line.split() for line in table.splitlines() if line[:1].isdigit()]
    # Block, batch, GB/s, with more than two ranks also of all in GB/s and per cent, seven times in microseconds.
    rows = [[*row[:3], *row[-7:], *row[3:-7]] for row in rows]
    units = [1.0, 1.0, 1e9, *[1e-6] * 7, 1e9, 1.0]
    return [[float(text) * unit for text, unit in zip(row, units, strict=False)] for row in rows]


def in_order(row: NixlbenchRow) -> tuple[float, ...]:
    """Return what the table printed, in the order of its columns; the sums over ranks are last."""
    assert row.latency_p99 is None
    return tuple(value for value in astuple(row) if value is not None)


def test_all_recordings_are_covered() -> None:
    assert len(FILES) == 20
    assert set(TABLES) <= set(FILES)


@pytest.mark.parametrize("name", FILES, ids=IDS)
def test_every_recorded_file_is_read_row_by_row(name: str) -> None:
    output = read(name)
    assert [list(in_order(row)) for row in output.rows] == [pytest.approx(row) for row in printed(name)]
    assert output.tables == (name in TABLES)
    assert [len(read(table).rows) for table in TABLES] == [15, 9, 15, 3, 1, 15, 0]
    assert output.unfinished == ""


def wrong_cuts(name: str, step: int = 1) -> list[int]:
    """Return the bytes at which a text is cut off so that it is read wrongly; only each ``step``-th is tried."""
    content = (FIXTURES / name).read_bytes()
    whole = read_output(content.decode())
    lines = content.decode().split("\n")
    # The first byte at which each row is complete: the byte after its line break.
    header = next((n for n, line in enumerate(lines) if line.startswith("Block Size")), len(lines))
    ends = [
        sum(len(line) + 1 for line in lines[: n + 1])
        for n, line in enumerate(lines)
        if n > header and line[:1].isdigit()
    ]
    assert len(ends) == len(whole.rows)
    wrong = []
    for end in range(0, len(content) + 1, step):
        cut = read_output(content[:end].decode())
        printed = sum(end >= row_end for row_end in ends)
        values = cut.configuration.values
        if (
            cut.rows != whole.rows[:printed]
            or cut.registrations != whole.registrations[: len(cut.registrations)]
            or cut.faults != whole.faults[: len(cut.faults)]
            or cut.warnings != whole.warnings[: len(cut.warnings)]
            or values != {name: whole.configuration.values[name] for name in values}
        ):
            wrong.append(end)
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("name", FILES, ids=IDS)
def test_text_cut_off_at_any_byte_yields_only_complete_rows(name: str) -> None:
    """Of a text without a table, at each seventh byte."""
    assert wrong_cuts(name, step=1 if name in TABLES else 7) == []


def test_registrations_of_two_ranks_are_read() -> None:
    assert read("nixlbench/01_normal.rank_a.out").registrations == (NixlbenchRegistration(rank=0, item=1, size=2),)
    target = read("nixlbench/01_normal.rank_b.out")
    assert target.registrations == (NixlbenchRegistration(rank=1, item=2, size=2),)
    assert target.endpoint == "http://127.0.0.1:41790"
    assert target.ready
    assert target.roles == {(1, "target")}
    assert target.faults == ()


def test_the_configuration_is_read() -> None:
    configuration = read("nixlbench/01_normal.rank_a.out").configuration
    assert (configuration.backend, configuration.op) == ("UCX", "WRITE")
    assert (configuration.initiator_memory, configuration.target_memory) == ("DRAM", "DRAM")
    assert configuration.devices == ("all",)
    assert configuration.count("num_iter") == 160
    assert configuration.count("enable_pt") is None
    assert configuration.values["etcd_endpoint"] == "http://127.0.0.1:41790"
    assert len(configuration.values) == 30
    efa = read("efa-p5/nixlbench-rank0.out").configuration
    assert (efa.backend, efa.initiator_memory, efa.target_memory) == ("LIBFABRIC", "VRAM", "VRAM")
    assert len(efa.values) == 26
    posix = read("nixlbench/06_posix_write.out").configuration
    assert posix.backend == "POSIX"
    assert posix.values["filenames"] == ""
    assert posix.values["etcd_endpoint"] == "disabled (storage backend)"
    assert len(posix.values) == 37


def test_rows_and_transfers_follow_from_the_configuration() -> None:
    efa = read("efa-p5/nixlbench-rank0.out")
    assert efa.configuration.planned() == tuple((4 * KIB << n, 1) for n in range(15))
    assert efa.configuration.transfers(MIB) == (1008, 112)
    assert efa.configuration.transfers(2 * MIB) == (63, 7)
    nothing = read("nixlbench/09_alone.out").configuration
    assert (nothing.planned(), nothing.transfers(1)) == (None, None)


def test_each_batch_is_a_separate_row() -> None:
    text = (FIXTURES / "nixlbench/01_normal.rank_a.out").read_text()
    row = next(line for line in text.splitlines() if line.startswith("8192 "))
    batched = text.replace(row, row + "\n" + row.replace("8192                1 ", "8192                16"))
    assert [(row.block, row.batch) for row in read_output(batched).rows[:4]] == [
        (4096, 1), (8192, 1), (8192, 16), (16384, 1)]  # fmt: skip
    limits = text.replace(
        "Max batch size (--max_batch_size=N)                         : 1", "x (--max_batch_size=N) : 4"
    )
    assert (read_output(limits).configuration.planned() or ())[:4] == ((4096, 1), (4096, 2), (4096, 4), (8192, 1))


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: Adjusting num_iter to 1008 to allow equal distribution to 1 threads",
        "W1120 12:00:00.000000    12 nixl_agent.cpp:12] slow",
        "[1763640000.0] [vm:12:0]     ucp_context.c:12  UCX  WARN  transport 'x' is not available",
    ],
)
def test_a_warning_between_lines_is_kept_and_loses_no_row(line: str) -> None:
    text = (FIXTURES / "nixlbench/01_normal.rank_a.out").read_text()
    whole = read_output(text)
    lines = text.split("\n")
    for at in range(len(lines)):
        output = read_output("\n".join([*lines[:at], line, *lines[at:]]))
        assert output.rows == whole.rows
        assert output.configuration == whole.configuration
        assert output.warnings == (line,)


def test_crlf_line_endings_are_read() -> None:
    text = (FIXTURES / "nixlbench/01_normal.rank_a.out").read_text()
    assert read_output(text.replace("\n", "\r\n")) == read_output(text)


@pytest.mark.parametrize(
    ("name", "trouble", "text"),
    [
        ("03_unresolvable_host.err", Trouble.URI_NOT_VALID, "Failed to acquire lock: the target uri is not valid"),
        ("04_etcd_down.err", Trouble.LOCK_NOT_ACQUIRED, "Failed to acquire lock: connections to all backends failing"),
        ("07_racy_same_rank.rank_a.err", Trouble.RANKS_MISSING, "Error in barrier wait xferbench/g07/"),
        ("09_alone.err", Trouble.RANKS_MISSING, "Error in barrier wait xferbench/g09/"),
    ],
)
def test_recorded_failures_are_recognised(name: str, trouble: Trouble, text: str) -> None:
    first, *later = read(f"nixlbench/{name}").faults
    assert first.trouble is trouble
    assert first.text.startswith(text)
    assert first.remedy
    assert later
    assert {fault.trouble for fault in later} == {Trouble.OTHER}


def test_two_processes_with_the_same_rank_are_a_fault() -> None:
    first, second = ((FIXTURES / f"nixlbench/07_racy_same_rank.rank_{name}.out").read_text() for name in ("a", "b"))
    assert read_output(first).faults == ()
    assert read_output(first + second).faults == (
        Fault(Trouble.DUPLICATE_RANK, "two processes registered as rank 0 of 2"),
    )


def test_two_ranks_or_two_runs_are_not_a_duplicate_rank() -> None:
    first, second = ((FIXTURES / f"nixlbench/01_normal.rank_{name}.out").read_text() for name in ("a", "b"))
    assert read_output(first + second).faults == ()
    twice = read_output(first + first)
    assert (twice.faults, twice.tables, len(twice.rows)) == ((), 2, 30)


@pytest.mark.parametrize(
    "row",
    [
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8",
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0 1.0",
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 x",
        "4096.0 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        "0 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        "4096 -1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        "٤٠٩٦ 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        f"{'9' * 5000} 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        f"4096 1 {'9' * 5000} 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
    ],
)
def test_malformed_rows_are_skipped(row: str) -> None:
    header = (FIXTURES / "nixlbench/01_normal.rank_a.out").read_text().partition("Block Size")[2].partition("\n")[0]
    good = "8192 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0"
    output = read_output(f"Block Size{header}\n{row}\n{good}\n")
    assert [row.block for row in output.rows] == [8192]
    assert read_output(f"{good}\n").rows == ()


def test_a_row_with_inf_and_nan_is_read() -> None:
    header = (FIXTURES / "nixlbench/01_normal.rank_a.out").read_text().partition("Block Size")[2].partition("\n")[0]
    (row,) = read_output(f"Block Size{header}\n4096 1 inf 0.0 -nan 25.0 6.4 9.0 8.8 15.0\n").rows
    assert row.bandwidth == float("inf")
    assert row.prep_avg != row.prep_avg


@pytest.mark.parametrize("name", ["help-1.4.0.txt"])
def test_other_text_is_not_recognised(name: str) -> None:
    assert not read(f"nixlbench/{name}").recognised
    assert not read_output("").recognised
    assert not read_output("Failed to do it\n").recognised


def test_every_recorded_output_is_recognised() -> None:
    outputs = [name for name in FILES if name.startswith("nixlbench/") and "help" not in name]
    assert [name for name in outputs if not read(name).recognised] == []
