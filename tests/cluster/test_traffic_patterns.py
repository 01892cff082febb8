# SPDX-License-Identifier: Apache-2.0
"""Traffic patterns between four nodes with shaped cables: what an incast reaches, and the node with a slow uplink."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from helpers.cli_run import command, profile
from helpers.namespaces import Network
from ranks import all_end_with, hosts, numbered, report_options, reports, run_ranks
from servers import etcd

from pytest_nixl.checks.pattern.check import judge_pattern_culprit, paired_again
from pytest_nixl.checks.pattern.fairness import TOGETHER, PatternKind, PatternSamples, judge_fairness
from pytest_nixl.checks.pattern.rank_flows import RankFlows
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import PatternChoice, TrafficPattern
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.alone  # what four nodes reach together is judged

NODES = ("node-0", "node-1", "node-2", "node-3")
BLOCK = 32 << 10
#: The rates of all cables and of the slow uplink; of each 1514 bytes that tbf lets through 1448 are payload.
FAST, SLOW = "100mbit", "20mbit"
RATE, DELIVERED = 100e6 / 8, 1448 / 1514
#: How often a pattern is measured at most: other processes of this machine only make it slower.
ATTEMPTS = 5
OVER_TCP = "transports = ['tcp']"
MakeSettings = Callable[..., Settings]


#: Four nodes, and the host of an existing etcd.
net = hosts(*NODES, "head")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def measured(net: Network, make_settings: MakeSettings, pattern: TrafficPattern, op: str = "WRITE") -> PatternSamples:
    kind = PatternKind(pattern, "UCX", op, MemoryPair("DRAM", "DRAM"), depth=2)
    settings = make_settings(duration=0.1)
    hosts = [LocalHost(supervisor(), rank, host.prefix) for rank, host in enumerate(net.hosts[:4])]
    names = [f"rank {rank} on {name}" for rank, name in enumerate(NODES)]
    flows = RankFlows(hosts, names, kind, settings, settings.agents[0])
    try:
        return flows.measure()
    finally:
        flows.close()


# The run of four ranks, below, measures a WRITE.
@pytest.mark.parametrize("op", [pytest.param("WRITE", marks=pytest.mark.whole), "READ"])
def test_the_sum_of_an_incast_is_that_of_the_shaped_link(net: Network, make_settings: MakeSettings, op: str) -> None:
    incast = PatternChoice.parse("incast").of(4, BLOCK)
    best = 0.0
    with net.shaped(dict.fromkeys(NODES, FAST)):
        for _ in range(ATTEMPTS):
            samples = measured(net, make_settings, incast, op)
            assert not any(flow.corruption for flow in samples.flows)
            assert {flow.transports for flow in samples.flows} == {("tcp/veth0",)}
            sums = [sum(rates) for rates in zip(*(flow.rates(TOGETHER) for flow in samples.flows), strict=True)]
            # No repetition is above the link: a burst of tbf is small beside a window.
            assert max(sums) <= 1.05 * RATE
            best = max(best, median(sums))
            if best >= 0.9 * DELIVERED * RATE:
                break
    assert best >= 0.9 * DELIVERED * RATE, f"{best / RATE:.3f} of the link in the best of {ATTEMPTS} measurements"
    assert judge_fairness(samples).verdict in (Verdict.PASS, Verdict.WARN)


@pytest.mark.soak
def test_no_verdict_about_an_uplink_is_wrong(
    net: Network, make_settings: MakeSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judge PYTEST_NIXL_REPEAT times a healthy network and one with a slow uplink, of each node in turn."""
    count = int(os.environ.get("PYTEST_NIXL_REPEAT", "4"))
    again, verdicts = paired_again(NODES, BLOCK), Counter[str]()
    for number in range(count):
        node = NODES[number % len(NODES)]
        with net.shaped(dict.fromkeys(NODES, FAST)):
            healthy = judge_pattern_culprit(measured(net, make_settings, again))
            net[node].shape("veth0", SLOW)
            slow = judge_pattern_culprit(measured(net, make_settings, again))
        named = slow.verdict is Verdict.FAIL and f"on {node} (what it sends) is the culprit" in slow.reason
        verdicts.update({"alarms": healthy.verdict is Verdict.FAIL, "named": named})
        with capsys.disabled():
            print(f"\n{number + 1} of {count}: healthy {healthy.verdict}, slow {node}: {slow}", end="", flush=True)
    assert (verdicts["alarms"], verdicts["named"]) == (0, count)


def test_four_ranks_measure_an_incast_and_name_the_node_with_a_slow_uplink(net: Network, tmp_path: Path) -> None:
    with etcd(net["head"], tmp_path) as url, net.shaped(dict.fromkeys(NODES, FAST)):
        net["node-2"].shape("veth0", SLOW)
        suite = command(
            "suites/pattern", "-v", "--nixl-pattern=incast", "--nixl-blocks=32KiB", "--nixl-op=WRITE", "--nixl-depth=2",
            "--nixl-ranks=4", f"--nixl-profile={profile(tmp_path / 'p.toml', OVER_TCP)}", f"--nixl-etcd={url}",
        )  # fmt: skip
        suite += report_options(tmp_path)
        env = {"UCX_TLS": "tcp"}
        done = run_ranks(net.hosts[:4], tmp_path / "ranks", *suite, rank_arguments=numbered(4), fork=False, env=env)
    all_end_with(1, done)
    [shown] = [ended.output for ended in done if " variant " in ended.output]  # rank 0 shows the rows
    form = r"^UCX +WRITE .* (\d-0) +load=(alone|together),pattern=incast:4 .* tcp/veth0 +PASS$"
    assert sorted(re.findall(form, shown, re.MULTILINE)) == [
        (f"{source}-0", load) for source in (1, 2, 3) for load in ("alone", "together")
    ]
    assert "of the fastest flow alone" in shown
    for report in reports(tmp_path, 4):
        assert "rank 2 on node-2 (what it sends) is the culprit" in report["text"]
