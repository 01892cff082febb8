# SPDX-License-Identifier: Apache-2.0
"""The parser of nixlbench's output: every recorded file, damaged rows, and recordings cut off at every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nixl.model.nixlbench_output import Configuration, Fault, NixlbenchRow, Trouble
from pytest_nixl.model.nixlbench_table import read_output

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"

#: The recordings with a table, and its rows. The target of the last one was killed before the first row.
TABLES = {
    "nixlbench/01_normal.rank_a.out": 15,
    "nixlbench/02_check_consistency_write.rank_a.out": 9,
    "nixlbench/06_posix_write.out": 15,
    "nixlbench/13_four_ranks.rank_a.out": 3,
    "nixlbench/20_asio.rank_a.out": 1,
    "efa-p5/nixlbench-rank0.out": 15,
    "nixlbench/21_target_killed.rank_a.out": 0,
}
#: The kind of the first failure that a recording reports; the further ones are of no known kind.
FAILURES = {
    "nixlbench/03_unresolvable_host.err": Trouble.URI_NOT_VALID,
    "nixlbench/04_etcd_down.err": Trouble.LOCK_NOT_ACQUIRED,
    "nixlbench/07_racy_same_rank.rank_a.err": Trouble.RANKS_MISSING,
    "nixlbench/09_alone.err": Trouble.RANKS_MISSING,
    "nixlbench/21_target_killed.rank_a.out": Trouble.OTHER,
}
OTHER_TEXTS = ("efa-p5/efa-counters-after.txt", "efa-p5/efa-counters-before.txt", "nixlbench/help-1.4.0.txt")
FILES = sorted(str(path.relative_to(FIXTURES)) for path in [*FIXTURES.glob("nixlbench/*"), *FIXTURES.glob("efa-p5/*")])
IDS = [name.rpartition("/")[2] for name in FILES]


def text_of(name: str) -> str:
    return (FIXTURES / name).read_text()


NORMAL = text_of("nixlbench/01_normal.rank_a.out")


@pytest.mark.parametrize("name", FILES, ids=IDS)
def test_every_recorded_file_is_read(name: str) -> None:
    output = read_output(text_of(name))
    assert (len(output.rows), output.tables) == (TABLES.get(name, 0), name in TABLES)
    troubles = [fault.trouble for fault in output.faults]
    assert troubles[:1] == [FAILURES.get(name)] * (name in FAILURES)
    assert {*troubles[1:]} <= {Trouble.OTHER}
    assert output.recognised is (name not in OTHER_TEXTS)


def test_a_row_of_four_ranks_has_their_sum() -> None:
    row = read_output(text_of("nixlbench/13_four_ranks.rank_a.out")).rows[0]
    assert row == NixlbenchRow(
        4096, 1, 0.056482e9, aggregate=0.315313e9, utilisation=0.315313, latency_avg=72.5e-6, prep_avg=32e-6,
        prep_p99=32e-6, post_avg=8.3e-6, post_p99=27e-6, transfer_avg=63.9e-6, transfer_p99=97e-6,
    )  # fmt: skip


def test_a_complete_table_has_each_batch_of_each_block() -> None:
    limits = {"start_block_size": "4096", "max_block_size": "8192", "start_batch_size": "1", "max_batch_size": "5"}
    rows = tuple((block, batch) for block in (4096, 8192) for batch in (1, 2, 4))
    assert Configuration(limits).planned() == rows


@pytest.mark.long
@pytest.mark.parametrize("name", FILES, ids=IDS)
def test_text_cut_off_at_any_byte_yields_only_complete_rows(name: str) -> None:
    """Of a text without a table, at each seventh byte."""
    text = text_of(name)
    whole = read_output(text)
    for end in range(0, len(text) + 1, 1 if name in TABLES else 7):
        cut = read_output(text[:end])
        lines_of_table = text[:end].partition("\nBlock Size")[2].split("\n")[:-1]
        assert cut.rows == whole.rows[: sum(line[:1].isdigit() for line in lines_of_table)], end
        assert cut.registrations == whole.registrations[: len(cut.registrations)], end
        assert cut.faults == whole.faults[: len(cut.faults)], end
        assert cut.warnings == whole.warnings[: len(cut.warnings)], end
        assert cut.configuration.values.items() <= whole.configuration.values.items(), end


def test_a_warning_between_lines_is_kept_and_loses_no_row() -> None:
    warning = "WARNING: Adjusting num_iter to 1008 to allow equal distribution to 1 threads"
    whole, lines = read_output(NORMAL), NORMAL.split("\n")
    for at in range(len(lines)):
        output = read_output("\n".join([*lines[:at], warning, *lines[at:]]))
        assert (output.rows, output.configuration) == (whole.rows, whole.configuration)
        assert output.warnings == (warning,)


def test_a_rank_that_registers_twice_in_one_run_is_a_fault() -> None:
    racy = "".join(text_of(f"nixlbench/07_racy_same_rank.rank_{name}.out") for name in ("a", "b"))
    assert read_output(racy).faults == (Fault(Trouble.DUPLICATE_RANK, "two processes registered as rank 0 of 2"),)
    assert read_output(NORMAL + text_of("nixlbench/01_normal.rank_b.out")).faults == ()
    assert read_output(NORMAL * 2).faults == (), "all ranks of the first run were ready before the second"


@pytest.mark.parametrize(
    "row",
    [
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8",
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0 1.0",
        "4096 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 x",
        "4096.0 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        "4096 -1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        "٤٠٩٦ 1 0.265866 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
        f"4096 1 {'9' * 21} 15.4 25.0 25.0 6.4 9.0 8.8 15.0",
    ],
)
def test_malformed_rows_are_skipped(row: str) -> None:
    heading = next(line for line in NORMAL.splitlines() if line.startswith("Block Size"))
    good = "8192 1 0.265866 15.4 25.0 -nan 6.4 9.0 8.8 15.0"
    assert [row.block for row in read_output(f"{heading}\n{row}\n{good}\n").rows] == [8192]
    assert read_output(f"{good}\n").rows == ()
