# SPDX-License-Identifier: Apache-2.0
"""Three ranks on busy cores: one behind a slow uplink is named without a floor, and none of a healthy network."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH_OF_RANKS, command
from helpers.contention import spinning
from helpers.namespaces import network, require_tools
from ranks import numbered, report_options, reports, run_ranks
from servers import etcd

pytestmark = pytest.mark.alone  # what the ranks reach is judged

NODES = ("node-0", "node-1", "node-2")
#: The rates of all cables, and of the slow uplink: slow enough that busy cores keep both, and do not explain it.
FAST, SLOW = "200mbit", "20mbit"
NAMED = "rank 2 on node-2 (what it sends, over tcp/veth0) is the culprit (UCX WRITE DRAM:DRAM of 1MiB, in turn with "


@pytest.mark.parametrize("slow", [True, False], ids=["slow uplink", "healthy"])
def test_busy_cores_hide_no_slow_rank_and_accuse_none(tmp_path: Path, slow: bool) -> None:
    require_tools()
    with network(tmp_path, *NODES, "head") as net, etcd(net["head"], tmp_path) as url, ExitStack() as stack:
        for host in net.hosts:
            host.run("umount", "/proc/stat")  # they see the load of this machine
        if slow:
            stack.enter_context(net.shaped(dict.fromkeys(NODES, FAST)))
            net["node-2"].shape("veth0", SLOW)
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(spinning())
        suite = command(
            BANDWIDTH_OF_RANKS, "-v", "--nixl-ranks=3", "--nixl-blocks=1MiB", f"--nixl-etcd={url}",
            "-k", "test_bandwidth or blame", *report_options(tmp_path),
        )  # fmt: skip
        done = run_ranks(
            net.hosts[:3], tmp_path / "ranks", *suite, rank_arguments=numbered(3), fork=False, env={"UCX_TLS": "tcp"}
        )
    report = reports(tmp_path, 3)[0]
    assert (NAMED in report["text"]) == slow, (tmp_path / "run.xml").read_text()  # it has the reason of each check
    assert ("is the culprit" in report["text"]) == slow, report["text"]
    assert [one.code for one in done] == [int(slow)] * 3
