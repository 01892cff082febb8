# SPDX-License-Identifier: Apache-2.0
"""The command line of nixlbench, which ranks have it, and the verdict of a row that it measured in this run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.checks.nixlbench.command import Meeting, command, command_text, known_flags, label
from pytest_nixl.checks.nixlbench.driver import Ran, free_meeting
from pytest_nixl.checks.nixlbench.row import judge_row
from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.nixlbench_output import REMEDIES, Trouble
from pytest_nixl.model.nixlbench_table import read_output
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict

ROW = RowKey("LIBFABRIC", "READ", MemoryPair("DRAM", "VRAM"), 64 * KIB, batch=2)
MEETING = Meeting("ETCD", {"runtime_type": "ETCD", "benchmark_group": "g"})


def test_the_command_line_is_the_row_and_the_users_flags() -> None:
    assert command(ROW, "Libfabric", MEETING, iterations=17, warmup=0, more=("--check_consistency=1",)) == [
        "--runtime_type=ETCD", "--benchmark_group=g", "--backend=Libfabric", "--op_type=READ",
        "--initiator_seg_type=DRAM", "--target_seg_type=VRAM", "--start_block_size=65536", "--max_block_size=65536",
        "--start_batch_size=2", "--max_batch_size=2", "--num_iter=32", "--warmup_iter=16",
        "--total_buffer_size=1048576", "--check_consistency=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({}, {}, {"num_iter": "1008", "warmup_iter": "16", "pipeline_depth": None}),
        ({}, {"warmup": 17}, {"warmup_iter": "32"}),
        ({"block": 2 * MIB}, {}, {"num_iter": f"{256 * 16}", "total_buffer_size": f"{4 * MIB}"}),
        ({"block": 1024 * MIB}, {}, {"num_iter": f"{16 * 16}", "warmup_iter": f"{16 * 16}"}),
        ({"block": MIB}, {"iterations": 16}, {"num_iter": "16", "total_buffer_size": f"{2 * MIB}"}),
        ({"depth": 9}, {}, {"pipeline_depth": "9", "total_buffer_size": f"{2 * MIB}"}),
        ({}, {"more": ("--num_target_dev=8", "--num_initiator_dev=2")}, {"total_buffer_size": f"{8 * MIB}"}),
        ({}, {"more": ("--num_initiator_dev=4",)}, {"total_buffer_size": f"{4 * MIB}"}),
        ({}, {"more": ("--total_buffer_size=7",)}, {"total_buffer_size": "7"}),
    ],
)
def test_counts_and_sizes_follow_from_the_row(
    changes: Mapping[str, Any], arguments: Mapping[str, Any], expected: Mapping[str, str | None]
) -> None:
    words = command(replace(ROW, **changes), "UCX", MEETING, **{"iterations": None, "warmup": 1, **arguments})
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    assert len(flags) == len(words)
    assert {name: flags.get(f"--{name}") for name in expected} == expected


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--check_consistency=1 --mode=SG", "nixlbench"),
        ("--mode=MG --num_initiator_dev=8 --num_target_dev=4", "nixlbench[MG8x4]"),
        ("--mode=MG --enable_pt --num_threads=2", "nixlbench[MG1x1,enable_pt,num_threads=2]"),
    ],
)
def test_a_row_has_the_name_of_the_flags_that_change_it(more: str, name: str) -> None:
    assert label(more.split()) == name


def test_a_meeting_and_a_command_as_a_user_can_type_it() -> None:
    meeting = free_meeting("10.0.0.1")
    assert 20000 <= int(meeting.flags["asio_port"]) < 32000
    assert meeting == Meeting("ASIO", {"runtime_type": "ASIO", "asio_address": "10.0.0.1",
                                       "asio_port": meeting.flags["asio_port"]})  # fmt: skip
    assert command_text("/opt/b/nixlbench", ["--a=b c"]) == "nixlbench '--a=b c'"
    assert command_text("", []) == "nixlbench"
    lines = ("    -backend (it)", "  -x (no)", "      -deep (no)", "    -9 (no)", "    - (no)", "    -op_type (READ)")
    assert known_flags("\n".join(lines)) == {"backend", "op_type"}


def test_the_flags_of_the_real_help_are_known() -> None:
    flags = known_flags((ROOT / "fixtures/nixlbench/help-1.4.0.txt").read_text())
    row = command(replace(ROW, depth=2), "UCX", MEETING, iterations=None, warmup=10)
    assert {argument.removeprefix("--").partition("=")[0] for argument in row} <= flags
    assert {"asio_address", "device_list", "check_consistency"} <= flags


ASIO = (ROOT / "fixtures/nixlbench/20_asio.rank_a.out").read_text()
OVER_CARD = ASIO.replace("cma/memory  ", "tcp/eth0    ").replace("cma/memory", "tcp/eth0")
PLAIN = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 64 * KIB)
NAME = "nixlbench UCX WRITE DRAM:DRAM of 64KiB"
REACHED = "0.016 GB/s (0.128 Gb/s)"
GOOD = f"{REACHED} over {{}} is 1598 % of the floor of 0.001 GB/s (0.008 Gb/s)".format
FLOOR = "floor = '0.001 GB/s'\n"
CARD = f"{FLOOR}[machine]\nnics = 1\nnic_rate = '{{}} Gb/s'\nsource = 'a test'\n".format
BY_HAND = "and read what nixlbench prints when run by hand"


def ran(text: str = ASIO, **more: Any) -> Ran:
    return Ran(read_output(text), text, **more)


@pytest.mark.parametrize(
    ("result", "profile", "rates", "verdict", "reason", "remedy", "notes"),
    [
        (ran(remarks=("a", "b"), contention=0.25), FLOOR, {}, "PASS", GOOD("cma/memory"), "", ("a", "b")),
        (ran(inconsistent="target: x", uncompared="y"), FLOOR, {}, "CORRUPT", "target: x",
         REMEDIES[Trouble.INCONSISTENT], None),
        (ran(uncompared="the target"), FLOOR, {}, "UNKNOWN", "the target", "Run it again; if nixlbench crashes at its "
         "exit (two copies of libnl-route), set UCX_MODULES=^ib in its environment.", ()),
        (ran(uncompared="y"), "floor = '1 GB/s'\n", {}, "FAIL",
         f"{REACHED} is 2 % of the floor of 1 GB/s (8 Gb/s), and 1 of 1 windows are below it",
         "Check that the machine is idle (uptime, nvidia-smi) and that the container has enough cores (cpu.max), run "
         "the row again alone, and if it is still slow compare its transports and devices with those of a healthy "
         "machine.", ()),
        (ran(ASIO.replace("4100.6", "4.1   ")), FLOOR, {}, "INCONCLUSIVE",
         "nixlbench printed 0.015982 GB/s, at which a block takes 4101 us, but an Avg Lat. of 4.1 us",
         f"Run it again, {BY_HAND}: its clock may have been set.", ()),
        (ran(ASIO.replace("0.015982", "0.000000")), FLOOR, {}, "ERROR", "nixlbench printed a bandwidth of 0 GB/s",
         f"Increase --nixl-iterations, {BY_HAND}.", None),
        (ran(ASIO.replace("\n65536 ", "\n32768 ")), FLOOR, {}, "ERROR", "nixlbench did not print this row",
         f"Increase --nixl-iterations, {BY_HAND}.", None),
        (ran(OVER_CARD), FLOOR, {"eth0": 0.16e9}, "PASS", GOOD("tcp/eth0"), "",
         (f"{NAME}: {REACHED} is 10 % of 0.16 GB/s, the line rate of eth0 according to the driver",)),
        (ran(OVER_CARD), FLOOR, {"eth1": 0.16e9}, "PASS", GOOD("tcp/eth0"), "", ()),
        (ran(OVER_CARD), CARD("0.64"), {"eth0": 0.16e9}, "PASS", GOOD("tcp/eth0"), "",
         (f"{NAME}: {REACHED} is 20 % of 0.08 GB/s, the line rate of the 1 NIC of 0.64 Gb/s that carried it (eth0)",)),
    ],
)  # fmt: skip
def test_the_row_of_a_run_is_judged(
    result: Ran, profile: str, rates: dict[str, float], verdict: str, reason: str, remedy: str,
    notes: tuple[str, ...] | None, tmp_path: Path,
) -> None:  # fmt: skip
    path = tmp_path / "p.toml"
    path.write_text(f"[profile]\nname='p'\n[[expect]]\nsource='a test'\n{profile}")
    judged = judge_row(result, PLAIN, PLAIN.measured_by("nixlbench"), load_profile(str(path)), rates)
    assert judged.judgement == Judgement(Verdict(verdict), f"{NAME}: {reason}", remedy)
    if notes is None:
        assert (judged.samples, judged.summary, judged.notes) == (None, None, ())
        return
    assert judged.samples is not None
    assert judged.summary is not None
    assert (judged.samples.key, judged.notes) == (PLAIN.measured_by("nixlbench"), notes)
    assert judged.samples.contention == (() if result.contention is None else (0.25,))
    assert (judged.summary.bandwidth, judged.summary.values) == (0.015982e9, (0.015982e9,))
