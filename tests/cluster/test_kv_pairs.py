# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks between ranks on their own hosts: of each pair of a prefill rank and a decode rank."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.cli_run import command, profile
from helpers.namespaces import Network
from ranks import all_end_with, hosts, report_options, reports, run_ranks
from servers import etcd

NODES = ("node-0", "node-1", "node-2")
OVER_TCP = "transports = ['tcp']"
VARIABLES = {"UCX_TLS": "tcp", "NIXL_GROUP_TOKEN": "hunter2"}


#: Three nodes, and the host of an existing etcd.
net = hosts(*NODES, "head")


def test_each_pair_of_two_prefill_ranks_and_a_decode_rank_is_measured(net: Network, tmp_path: Path) -> None:
    with etcd(net["head"], tmp_path) as url:
        suite = command(
            "suites/kv_cache", "-v", "--nixl-kv-tokens=32", "--nixl-kv-tp=2:4", "--nixl-pairs=0:2,1:2",
            "--nixl-ranks=3", f"--nixl-profile={profile(tmp_path / 'p.toml', OVER_TCP)}",
            f"--nixl-etcd={url}", "--nixl-gate",
        )  # fmt: skip
        done = run_ranks(net.hosts[:3], tmp_path / "ranks", *suite, *report_options(tmp_path), env=VARIABLES)
    all_end_with(0, done)
    [shown] = [ended.output for ended in done if " variant " in ended.output]  # rank 0 shows the rows
    form = r"^UCX +(\S+) .* (\d-\d) +kv=([^,]+),model=generic,tokens=32,tp=2:4 .* tcp/veth0 +PASS$"
    assert sorted(re.findall(form, shown, re.MULTILINE)) == sorted(
        (op, pair, layout)
        for pair in ("0-2", "1-2")
        for op in ("READ", "WRITE")
        for layout in ("contiguous-merged", "scattered-prepped")
    )
    assert {report["exit_code"] for report in reports(tmp_path, 3)} == {0}
