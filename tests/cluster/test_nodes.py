# SPDX-License-Identifier: Apache-2.0
"""Several ranks, each on its own host: the suites with one command per rank, a slow cable, and refused ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, BANDWIDTH_OF_RANKS, command, profile
from helpers.namespaces import Network
from helpers.nixlbench import standin
from ranks import all_end_with, hosts, numbered, report_options, reports, run_ranks
from servers import ETCD_PORT, etcd, keys

NODES = ("node-0", "node-1", "node-2", "node-3")
BACKENDS = "--nixl-backend=UCX,LIBFABRIC"
#: Few transfers, because the rate does not matter.
FEW = (BACKENDS, "--nixl-blocks=64KiB", "--nixl-iterations=50", "--nixl-duration=20ms")
WHOLE = ("suites",)
#: The suites that send requests to other ranks. test_traffic_patterns.py has four ranks with UCX.
OF_RANKS = (
    "--nixl-backend=LIBFABRIC", "--nixl-op=WRITE",
    "suites/bandwidth", "suites/infrastructure", "suites/rank_race/test_this_run.py",
)  # fmt: skip
#: Only TCP uses the network between the hosts.
OVER_TCP = "transports = ['tcp']\nfloor = '0.0001 GB/s'"
#: The rates of all cables and of the slow one, and a floor between what TCP delivers on each. The two rates differ by
#: more than other load on this machine can explain.
FAST, SLOW = "500mbit", "50mbit"
BETWEEN = "transports = ['tcp']\nfloor = '0.018 GB/s'"


#: Four nodes, and the host of an existing etcd.
net = hosts(*NODES, "head")


@pytest.fixture(scope="module")
def env(net: Network) -> dict[str, str]:
    return {"UCX_TLS": "tcp"}


@pytest.fixture(scope="module")
def running_etcd(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd(net["head"], tmp_path_factory.mktemp("etcd")) as url:
        yield url


@pytest.fixture
def url(net: Network, running_etcd: str) -> Iterator[str]:
    """The URL of an existing etcd. No key may be left in it."""
    yield running_etcd
    assert keys(net["head"]) == []


@pytest.mark.parametrize(
    "suites",
    [
        pytest.param(WHOLE, id="whole", marks=pytest.mark.whole),
        pytest.param(("suites/metadata",), id="metadata", marks=pytest.mark.whole),
        pytest.param(("suites/metadata/test_exchange.py::test_an_agent_finds_another_through_etcd",), id="exchange"),
    ],
)
def test_two_ranks_run_the_suites_with_an_existing_etcd(
    net: Network, env: dict[str, str], url: str, tmp_path: Path, suites: tuple[str, ...]
) -> None:
    accepted = f"--nixl-profile={profile(tmp_path / 'p.toml', OVER_TCP)}"
    whole = command(*suites, *FEW, accepted, "--nixl-ranks=2", f"--nixl-etcd={url}")
    done = run_ranks(net.hosts[:2], tmp_path / "ranks", *whole, *report_options(tmp_path), env=env)
    all_end_with(0, done)
    assert [report["host"] for report in reports(tmp_path, 2)] in (["node-0", "node-1"], ["node-1", "node-0"])
    assert " ERROR" not in "".join(ended.output for ended in done)


@pytest.mark.parametrize(
    "suites", [pytest.param(WHOLE, id="whole", marks=pytest.mark.whole), pytest.param(OF_RANKS, id="of-ranks")]
)
def test_four_ranks_run_the_suites_with_the_etcd_of_rank_0(
    net: Network, env: dict[str, str], tmp_path: Path, suites: tuple[str, ...]
) -> None:
    accepted = f"--nixl-profile={profile(tmp_path / 'p.toml', OVER_TCP)}"
    listen = f"--nixl-etcd-listen=0.0.0.0:{ETCD_PORT}"
    whole = command(*FEW, *suites, accepted, "--nixl-ranks=4", listen)
    # A token makes that etcd require a password.
    env = {**env, "MASTER_ADDR": net.hosts[0].address, "NIXL_GROUP_TOKEN": "hunter2"}
    whole += report_options(tmp_path)
    done = run_ranks(net.hosts[:4], tmp_path / "ranks", *whole, rank_arguments=numbered(4), env=env)
    all_end_with(0, done)
    assert [report["host"] for report in reports(tmp_path, 4)] == list(NODES)
    assert {report["exit_code"] for report in reports(tmp_path, 4)} == {0}
    assert "hunter2" not in "".join(ended.output for ended in done)
    for number, ended in enumerate(done[1:], 1):
        assert f"rank {number} of 4 on node-{number} serves rank 0 on node-0" in ended.output
    assert not net.hosts[0].listens(ETCD_PORT)


@pytest.mark.alone  # the rates of cables are judged
def test_the_slow_direction_between_two_ranks_names_the_node(
    net: Network, env: dict[str, str], url: str, tmp_path: Path
) -> None:
    expected = f"--nixl-profile={profile(tmp_path / 'p.toml', BETWEEN)}"
    measure = command(
        BANDWIDTH_OF_RANKS, "--nixl-blocks=128KiB", "--nixl-iterations=40", expected, "--nixl-ranks=2",
        f"--nixl-etcd={url}",
    )  # fmt: skip
    measure += report_options(tmp_path)
    net["node-1"].shape("veth0", SLOW)
    try:
        done = run_ranks(net.hosts[:2], tmp_path / "ranks", *measure, rank_arguments=numbered(2), fork=False, env=env)
    finally:
        net["node-1"].unshape("veth0")
    all_end_with(1, done)
    for report in reports(tmp_path, 2):
        assert "bytes from rank 1 on node-1 to rank 0 on node-0 are slow" in report["text"]
    # Without NIXL the same bytes are as slow: a READ of rank 0's is what leaves rank 1.
    slow = r"^FAIL nixl-to-raw: UCX READ .*: the fabric is slow: ucx_perftest \(ucp_get, UCX \S+\) moves 0\.00"
    assert any(re.search(slow, ended.output, re.MULTILINE) for ended in done), done[0].output


def test_ranks_that_collect_different_tests_are_refused(
    net: Network, env: dict[str, str], url: str, tmp_path: Path
) -> None:
    """test_faults.py has other options, and tests/unit/cluster/test_membership.py a rank that is requested twice."""
    small = command(BANDWIDTH, "--nixl-blocks=4KiB", "--nixl-ranks=2", f"--nixl-etcd={url}")
    arguments = (["--nixl-rank=0"], ["--nixl-rank=1", "-k", "WRITE"])
    done = run_ranks(net.hosts[:2], tmp_path / "ranks", *small, rank_arguments=arguments, env=env)
    all_end_with(4, done)
    for ended in done:
        assert "rank 1 on node-1 did not collect tests that rank 0 collected (suites/bandwidth/" in ended.output


def test_nixlbench_between_two_nodes_names_the_node_of_a_killed_rank(
    net: Network, env: dict[str, str], url: str, tmp_path: Path
) -> None:
    # The stand-in prints what nixlbench with UCX printed on one host.
    expected = profile(tmp_path / "p.toml", "transports = ['cma']\nfloor = '0.0001 GB/s'")
    measure = command(
        "suites/bandwidth/test_nixlbench.py", "-v", "--nixl-level=extended", "--nixl-blocks=64KiB",
        f"--nixl-profile={expected}", "--nixl-ranks=2", f"--nixl-etcd={url}", f"--nixl-nixlbench={standin(tmp_path)}",
    )  # fmt: skip
    plays = {"STANDIN_PLAY": "killed:1", "STANDIN_ONLY": "READ"}
    done = run_ranks(net.hosts[:2], tmp_path / "ranks", *measure, env={**env, **plays})
    all_end_with(1, done)
    output = next(ended.output for ended in done if "serves rank 0" not in ended.output)
    assert "nixlbench:UCX  WRITE  DRAM:DRAM  64KiB      1      1  3.64" in output
    target = r"the target \(nixlbench of rank 1 on (\S+), pid \d+\) was ended by SIGKILL "
    initiator = r"the initiator \(nixlbench of rank 0 on (\S+), pid \d+\)"
    match = re.search(f"{target}.*{initiator}", output)
    assert match is not None, output
    assert {match[1], match[2]} == {"node-0", "node-1"}
