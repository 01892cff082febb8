# SPDX-License-Identifier: Apache-2.0
"""What each line of nixlbench's output says: one line, and everything that is read from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.nixlbench_output import (
    Configuration,
    Fault,
    NixlbenchOutput,
    NixlbenchRegistration,
    NixlbenchRow,
    Trouble,
)
from pytest_nixl.model.nixlbench_table import read_files, read_output
from pytest_nixl.model.row_key import RowKey

#: The options that only newer releases print.
NEWER = ("reregister_mem", "pipeline_depth", "use_hugepages", "prepared_xfer")
ROLE = "Init nixl worker, dev all rank 3, type initiator, hostname h"
ROLES = {"roles": frozenset({(3, "initiator")})}
UCX = "[1763640000.0] [vm:12:0]     ucp_context.c:12  UCX"


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ("All processes are ready to proceed", {"ready": True}),
        ("All processes are ready", {}),
        ("Connecting to ETCD at  http://a:1 ", {"endpoint": "http://a:1"}),
        (ROLE, ROLES),
        ("Init nixl worker, dev all rank 4, type target", {"roles": frozenset({(4, "target")})}),
        *((ROLE.replace("initiator", other), {}) for other in ("initiators", "other")),
        (ROLE.replace("rank 3", "rank "), {}),
        ("Waiting for all processes to start... (expecting 5 total: 2 initiators and 3 targets)",
         {"expected": {"initiator": 2, "target": 3}}),
        ("exit code 3", {}),
        *((f"{ROLE}\n{line}", {**ROLES, "endings": frozenset({(3, code)})})
          for line, code in (("exit code 139", 139), ("Exit status: 1", 1))),
        *((f"{ROLE}\n{line}", ROLES) for line in (
            "exit 3", "exit: 3", "exit  3", "exit : 3", "exit codes 3", "an exit code 3", "exit code 3.",
            "exit code 3 of it", f"exit code 3\n{ROLE}")),
        ("ETCD Runtime: Registered as rank 0 item 1 of 2", {"registrations": (NixlbenchRegistration(0, 1, 2),)}),
        *((f"ETCD Runtime: Registered as rank {numbers}", {}) for numbers in (" item 1 of 2", "0 item  of 2")),
        *((f"nixlbench: {loss}\nnixlbench: {loss}", {"losses": (f"nixlbench: {loss}",)})
          for loss in ("peer rank 1 key missing", "peer liveness check failed", "keepalive lost")),
        ("nixlbench: peer rank 1 is here", {}),
        *((line, {"report": line}) for line in (
            "[1] | cma/memory |", "[1] +--------+", "2 rails", "fabric_attr: {", "pytest-nixl: interface eth0")),
        *((line, {"warnings": (line,)}) for line in (
            "WARNING: odd", "W1120 12:00:00.000000    12 nixl_agent.cpp:12] slow", f"{UCX}  WARN  odd")),
        *((line, {}) for line in (
            "warnings: 0", f"{UCX}  WARNED", f"{UCX}  WARN  odd".replace("UCX", "xUCX"), "a | b", "", "nothing")),
    ],
)  # fmt: skip
def test_a_line_is_read_as_one_thing(lines: str, fields: Mapping[str, Any]) -> None:
    assert read_output(f"{lines}\n") == NixlbenchOutput(**fields)


#: By kind of failure: lines that report it. Each of them has one of the words by which other lines are passed over.
TROUBLES = {
    Trouble.URI_NOT_VALID: ("x: the target uri is not valid",),
    Trouble.LOCK_EXPIRED: ("mutex: session is expired",),
    Trouble.LOCK_NOT_ACQUIRED: ("Failed to acquire lock: no",),
    Trouble.RANKS_MISSING: ("Error in barrier wait x/ rank 0 completed 1/2 ranks",),
    Trouble.STALE_GROUP: ("Rank 2 is greater than or equal to global size 2",),
    Trouble.INCONSISTENT: ("iov 0: Consistency check failed",),
    Trouble.UNSUPPORTED_BACKEND: ("Unsupported NIXLBench backend: x",),
    Trouble.REFUSED: (
        "ERROR: unknown command line flag 'x'", "Incorrect buffer size", "Invalid op type", "Unsupported mem type",
        "num_iter must be 1", "storage backend should be one", "NVSHMEM worker requested", "VRAM not supported",
        "--x is disabled for nixlbench", "NIXL Device API requires it", "prepared_xfer is incompatible",
        "Unknown storage backend", "Error: Number of it",
    ),
    Trouble.OTHER: (
        "Failed to do it", "Failed to acquire locks", "Timeout waiting for it", "Error: odd", "E1120 12:00:00 odd",
        f"{UCX}  ERROR odd", f"{UCX}  FATAL odd",
    ),
    None: (
        "Failedness", "Errors: 0", "x Error", f"{UCX}  ERRORS", f"{UCX}  INFO no error", "[1] xUCX  ERROR",
        "x Invalid op type", "E112 odd", "[a UCX  ERROR odd",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("trouble", "line"), [(kind, line) for kind, lines in TROUBLES.items() for line in lines])
def test_a_failure_is_of_the_kind_that_its_line_says(trouble: Trouble | None, line: str) -> None:
    faults = () if trouble is None else (Fault(trouble, line),)
    assert read_output(f"{line}\n") == NixlbenchOutput(faults=faults)


@pytest.mark.parametrize(
    "line",
    [
        "x Caught signal 11", "x Segmentation fault", "terminate called after x", "double free or corruption",
        "free(): x", "malloc(): x", "corrupted size", "*** stack smashing detected", "srun: error: x: Killed",
        "Aborted", "Killed x", "Illegal instruction", "Floating point exception", "Bus error", "x core dumped",
        "x exited on signal 9", "x oom-kill",
    ],
)  # fmt: skip
def test_a_crash_is_read_from_what_a_process_or_its_launcher_prints(line: str) -> None:
    assert read_output(f"{line}\n{line}\n") == NixlbenchOutput(crashes=(line,))


TIMES = ("Avg Lat. (s)", "P99 Lat. (ms)", "Avg Prep (us)", "P99 Prep (ns)", "Avg Post (us)", "P99 Post (us)",
         "Avg Tx (us)", "P99 Tx (us)")  # fmt: skip


def table(*heads: str) -> NixlbenchOutput:
    """Return what is read of a table with these columns, in whose second line the fourth column has the value 4."""
    cells = ["4096", "2", *map(str, range(3, len(heads) + 3))]
    return read_output(f"{'  '.join(('Block Size (B)', 'Batch Size', *heads))}\n{' '.join(cells)}\n")


def test_each_column_has_its_field_and_its_unit() -> None:
    of_all = ("Aggregate B/W (MiB/Sec)", "Network Util (%)")
    row = NixlbenchRow(
        4096, 2, bandwidth=3 * 2.0**30, aggregate=4 * 2.0**20, utilisation=5.0, latency_avg=6.0, latency_p99=7e-3,
        prep_avg=8e-6, prep_p99=9e-9, post_avg=10e-6, post_p99=11e-6, transfer_avg=12e-6, transfer_p99=13e-6,
    )  # fmt: skip
    assert table("B/W (GiB/Sec)", *of_all, *TIMES, "Odd (us)") == NixlbenchOutput((row,), tables=1)
    for head, bandwidth in (("B/W (GB/Sec)", 3e9), ("B/W (MB/Sec)", 3e6), ("B/W", 3.0)):
        assert table(head) == NixlbenchOutput((NixlbenchRow(4096, 2, bandwidth),), tables=1)


@pytest.mark.parametrize("head", ["B/W (miles)", "B/W ()", "B/W (GB/Sec) x", "B/W GB/Sec)", "Odd (GB/Sec)"])
def test_a_table_without_a_bandwidth_in_a_known_unit_is_none(head: str) -> None:
    assert table(head) == NixlbenchOutput()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("Op type (--op_type=[READ,WRITE]) : WRITE", {"op_type": "WRITE"}),
        ("Odd (--)  : 1", {"odd_(--)": "1"}),
        ("Odd Name  :   a: b", {"odd_name": "a: b"}),
        ("Odd Name:", {"odd_name": ""}),
        ("Odd Name", {}),
    ],
)
def test_a_line_of_the_configuration_is_a_flag_or_a_name_with_its_value(line: str, values: dict[str, str]) -> None:
    output = read_output(f"NIXLBench Configuration\n{line}\n------ of it\nEnd : 1\n")
    assert output == NixlbenchOutput(configuration=Configuration(values))


#: A text that is a failure wherever it stands in a line, which shows what is left of the line.
INVALID = "the target uri is not valid"


@pytest.mark.parametrize(
    ("printed", "plain"),
    [
        ("\x1b[1;31m{}\x1b[0m", "{}"),
        ("\x1b]0;title\x07{}", "{}"),
        ("\x1b]0;title\x1b\\{}", "{}"),
        ("\x1b]0;title {}", "0;title {}"),
        ("\x1bc{}\x1b", "{}"),
        ("a\tb\x00{}\r", "a b{}"),
        ("{}  ", "{}"),
        ("x" * 4090 + "{}{}", None),
    ],
)
def test_a_line_is_read_without_colours_and_control_characters(printed: str, plain: str | None) -> None:
    faults = () if plain is None else (Fault(Trouble.URI_NOT_VALID, plain.format(INVALID)),)
    assert read_output(printed.format(INVALID, "") + "\n") == NixlbenchOutput(faults=faults)


def test_a_line_belongs_to_the_rank_of_its_label(tmp_path: Path) -> None:
    labels = {
        "3: ": "3", " 12: ": "12", "[1,4]<stdout>: ": "4", "[1,5]<stderr>:": "5", "[1,6]<stddiag>: ": "6",
        "[1,]<stdout>: ": "", "[1,7]<std>: ": "", ": ": "", "12345678: ": "",
    }  # fmt: skip
    path = tmp_path / "nixlbench.out"
    path.write_text("".join(f"{label}{INVALID} \n" for label in labels) + "3: cut")
    texts = [f"{'' if rank else label}{INVALID}" for label, rank in labels.items()]
    output = read_files([path])
    assert output == NixlbenchOutput(
        faults=tuple(Fault(Trouble.URI_NOT_VALID, text) for text in texts), unfinished="cut"
    )


def test_the_outputs_of_two_ranks_are_one(tmp_path: Path) -> None:
    """The configuration and the report are those of the rank with the table; its row is counted once for each table."""
    texts = {
        "target": (
            f"WARNING: odd\nETCD Runtime: Registered as rank 1 item 2 of 2\n{ROLE.replace('3', '1')}\nError: a\n"
            "Waiting for all processes to start... (expecting 2 total: 1 initiators and 1 targets)\n"
            "Connecting to ETCD at http://a:1\nAll processes are ready to proceed\nAborted\nexit code 134\n[1] | a |\nx"
        ),
        "initiator": (
            "WARNING: odd\nWARNING: own\nETCD Runtime: Registered as rank 1 item 1 of 2\n"
            f"{ROLE}\nNIXLBench Configuration\nSome : b\n----\nBlock Size (B)  Batch Size  B/W (GB/Sec)\n"
            "4096 1 2\nError: b\nKilled\nnixlbench: keepalive lost\nexit code 1\n[1] | b |\ny"
        ),
    }
    paths = [tmp_path / name for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    duplicate = Fault(Trouble.DUPLICATE_RANK, "two processes registered as rank 1 of 2")
    assert read_files(paths) == NixlbenchOutput(
        rows=(NixlbenchRow(4096, 1, 2e9),), configuration=Configuration({"some": "b"}),
        registrations=(NixlbenchRegistration(1, 2, 2), NixlbenchRegistration(1, 1, 2)),
        warnings=("WARNING: odd", "WARNING: own"), tables=1,
        faults=(Fault(Trouble.OTHER, "Error: a"), Fault(Trouble.OTHER, "Error: b"), duplicate),
        endpoint="http://a:1", ready=True, unfinished="y", roles=frozenset({(1, "initiator"), (3, "initiator")}),
        expected={"initiator": 1, "target": 1}, report="[1] | b |", crashes=("Aborted", "Killed"),
        losses=("nixlbench: keepalive lost",), endings=frozenset({(1, 134), (3, 1)}),
    )  # fmt: skip
    first = read_files(paths[:1])
    assert (type(first.roles), type(first.endings)) == (frozenset, frozenset)
    assert read_files([]) == NixlbenchOutput()


@pytest.mark.parametrize(
    ("times", "spread"),
    [
        ({"post_avg": 1.0, "post_p99": 2.0, "transfer_avg": 3.0, "transfer_p99": 8.0}, 2.0),
        ({"post_avg": 1.0, "post_p99": 8.0, "transfer_avg": 3.0, "transfer_p99": 2.0}, 2.0),
        ({"transfer_avg": 4.0, "transfer_p99": 8.0}, 2.0), ({"post_p99": 8.0}, 0.0), ({"post_avg": 1.0}, 0.0),
    ],
)  # fmt: skip
def test_the_spread_of_a_row_is_its_slowest_time_by_its_average(times: dict[str, float], spread: float) -> None:
    assert NixlbenchRow(4096, 1, 1e9, **times).spread == spread


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({}, ()),
        ({"prepared_xfer": "1"}, ("reregister_mem", "pipeline_depth", "use_hugepages")),
        ({"pipeline_depth": "1"}, ("reregister_mem", "use_hugepages")),
        ({"start_block_size": "many", "num_iter": None}, ("start_block_size", "num_iter")),
    ],
)
def test_a_configuration_lacks_what_nixlbench_prints_in_each_run(
    changed: dict[str, str | None], lacking: tuple[str, ...]
) -> None:
    text = (Path(__file__).parents[3] / "fixtures/nixlbench/01_normal.rank_a.out").read_text()
    printed = read_output(text).configuration.values
    values = {name: value for name, value in {**printed, **changed}.items() if value is not None}
    older = {name: value for name, value in values.items() if name in changed or name not in NEWER}
    assert Configuration(older).lacking() == lacking


def test_a_configuration_names_the_row_of_a_block_and_a_batch() -> None:
    values = {"backend": "ucx", "op_type": "write", "initiator_seg_type": "vram", "target_seg_type": "dram"}
    assert Configuration(values).key(4096, 2) == RowKey("UCX", "WRITE", MemoryPair("VRAM", "DRAM"), 4096, 2)
    stored = Configuration({**values, "backend": "posix", "pipeline_depth": "8", "device_list": "a,,b"})
    assert stored.key(1, 1) == RowKey("POSIX", "WRITE", MemoryPair("VRAM", "FILE"), 1, 1, 8)
    assert (stored.devices, Configuration().devices) == (("a", "b"), ())
    assert [Configuration({"n": text}).count("n") for text in ("010", "0", "-1", "1.5", "")] == [
        10,
        None,
        None,
        None,
        None,
    ]
    counts = {"num_iter": "160", "warmup_iter": "0", "large_blk_iter_ftr": "16"}
    assert [Configuration({**counts, "warmup_iter": warmup}).transfers(block) for warmup, block in
            (("0", 1 << 20), ("0", (1 << 20) + 1), ("32", 2 << 20), ("", 1))] == [
        (160, 0), (10, 0), (10, 2), None]  # fmt: skip
