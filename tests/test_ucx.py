# SPDX-License-Identifier: Apache-2.0
"""What UCX's protocol report tells of the transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nixl.backends.ucx import BACKEND

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "ucx"


@pytest.mark.parametrize(
    ("log", "op", "transports"),
    [
        ("loopback-default", "WRITE", ("cma/memory",)),
        ("loopback-default", "READ", ("cma/memory",)),
        ("loopback-tcp", "WRITE", ("tcp/lo", "tcp/eth0")),
        ("loopback-tcp", "READ", ("tcp/lo",)),
    ],
)
def test_recorded_reports_name_the_transport(log: str, op: str, transports: tuple[str, ...]) -> None:
    assert BACKEND.transports((RECORDED / f"{log}.log").read_text(), op, 65536) == transports


TABLE = """
[1.0] [h:1 :0]   | {scope} cfg#1 |
[1.0] [h:1 :0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1.0] [h:1 :0]   +--------------+-------------+------------------+
[1.0] [h:1 :0]   |     0..2K    | short       | {short} |
[1.0] [h:1 :0]   |  2049..64K   | copy-in     | {copy}  |
[1.0] [h:1 :0]   | 65537..inf   | zero-copy   | {zero}  |
"""


@pytest.mark.parametrize(
    ("block", "transports"),
    [
        (1, ("rc_mlx5/mlx5_0:1",)),
        (2048, ("rc_mlx5/mlx5_0:1",)),
        (2049, ("ud/mlx5_0:1",)),
        (65536, ("ud/mlx5_0:1",)),
        (65537, ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")),
        (1 << 40, ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")),
    ],
)
def test_the_range_of_the_block_decides(block: int, transports: tuple[str, ...]) -> None:
    # Written by hand after the form of the recorded reports: this machine has no adapter.
    log = TABLE.format(
        scope="inter-node",
        short="rc_mlx5/mlx5_0:1",
        copy="ud/mlx5_0:1",
        zero="50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
    )
    assert BACKEND.transports(log, "WRITE", block) == transports


def test_another_agent_counts_before_the_agent_itself() -> None:
    to_itself = TABLE.format(scope="self", short="cma/memory", copy="cma/memory", zero="cma/memory")
    to_other = TABLE.format(scope="inter-node", short="tcp/eth0", copy="tcp/eth0", zero="tcp/eth0")
    assert BACKEND.transports(to_other + to_itself, "WRITE", 4096) == ("tcp/eth0",)
    assert BACKEND.transports(to_itself, "WRITE", 4096) == ("cma/memory",)


def test_the_last_table_counts() -> None:
    first = TABLE.format(scope="inter-node", short="tcp/a", copy="tcp/a", zero="tcp/a")
    last = TABLE.format(scope="inter-node", short="tcp/b", copy="tcp/b", zero="tcp/b")
    assert BACKEND.transports(first + last, "WRITE", 4096) == ("tcp/b",)


@pytest.mark.parametrize("log", ["", "no table at all\n", TABLE[:90]])
def test_no_report_is_no_transport(log: str) -> None:
    assert BACKEND.transports(log, "WRITE", 4096) == ()
    assert BACKEND.transports(log, "READ", 4096) == ()


def test_a_report_that_is_cut_off_anywhere_never_raises() -> None:
    log = (RECORDED / "loopback-tcp.log").read_text()
    for length in range(0, len(log), 7):
        assert set(BACKEND.transports(log[:length], "READ", 65536)) <= {"tcp/lo", "tcp/eth0", "tcp/l"}
