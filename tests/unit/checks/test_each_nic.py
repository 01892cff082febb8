# SPDX-License-Identifier: Apache-2.0
"""The check ``each-nic`` on made rates: which device is named, and which is not. ``tests/machines`` has real ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from helpers.cli_run import run
from helpers.fake_sysfs import facts_of
from helpers.forked_runs import save_time
from helpers.namespaces import SLOW, four_cables, require_tools

from pytest_nixl.checks.bandwidth import each_nic
from pytest_nixl.checks.bandwidth.each_nic import (
    Nic,
    NicLinks,
    NicPair,
    NicRow,
    NicTrial,
    judge_each_nic,
    nearest_gpus,
    nic_pairs,
    ports,
)
from pytest_nixl.checks.bandwidth.gpus_together import seats
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.devices import HostDevices
from pytest_nixl.host.rdma import Port
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.gpus import LinkGpu
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run
from pytest_nixl.session.settings import read_settings

KIND = ("mlx", 50e9)


def nics(rank: int, number: int = 4) -> list[Nic]:
    return [Nic(rank, f"node-{'ab'[rank]}", f"mlx5_{index}:1", KIND) for index in range(number)]


FIRST, OTHER = nics(0), nics(1)
LOOPS = [NicPair(nic, nic) for nic in FIRST]
ACROSS = nic_pairs(FIRST, OTHER)
#: What a pair moves, from the devices of its ends and how often it was measured before.
Moves = Callable[[NicPair, int], NicRow]


def rate(value: float, contention: float = 0.0) -> NicRow:
    return NicRow({"WRITE": value, "READ": value}, contention=contention)


def judged(pairs: list[NicPair], moves: Moves) -> Judgement:
    counts: dict[NicPair, Iterator[int]] = {}
    return NicTrial("rows", pairs, lambda pair: moves(pair, next(counts.setdefault(pair, count())))).judge()


def bad(*devices: Nic, row: NicRow) -> Moves:
    """Return what pairs move if some devices are bad."""
    return lambda pair, _: row if {pair.initiator, pair.target} & set(devices) else rate(40e9)


def test_devices_of_two_hosts_are_paired_by_order_and_none_is_left_out() -> None:
    assert [(str(pair.initiator.device), pair.target.device) for pair in nic_pairs(FIRST[:3], OTHER[:2])] == [
        ("mlx5_0:1", "mlx5_0:1"), ("mlx5_1:1", "mlx5_1:1"), ("mlx5_2:1", "mlx5_0:1"),
    ]  # fmt: skip


def test_healthy_devices_pass_with_the_slowest_and_the_fastest() -> None:
    rates = dict(zip(FIRST, (40e9, 39e9, 42e9, 21e9), strict=True))
    judgement = judged(LOOPS, lambda pair, _: rate(rates[pair.initiator]))
    assert (judgement.verdict, judgement.reason, judgement.remedy) == (
        Verdict.PASS,
        "rows, each of 4 RDMA devices alone: WRITE 21 (mlx5_3:1) to 42 GB/s (mlx5_2:1), "
        "READ 21 (mlx5_3:1) to 42 GB/s (mlx5_2:1)",
        "",
    )


@pytest.mark.parametrize("number", [2, 4])
def test_a_slow_device_of_one_host_is_named(number: int) -> None:
    judgement = judged(LOOPS[:number], bad(FIRST[1], row=rate(19e9)))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith(
        "rows: mlx5_1:1 of node-a (rank 0) moves 19 GB/s (WRITE), less than half of the 40 GB/s of mlx5_0:1 of node-a "
        "(rank 0), in 3 of 3 measurements; mlx5_1:1 of node-a (rank 0) moves 19 GB/s (READ)"
    )
    assert "leave the device out of UCX_NET_DEVICES" in judgement.remedy


def test_a_device_that_is_slow_in_one_direction_is_named_for_it() -> None:
    judgement = judged(LOOPS, bad(FIRST[2], row=NicRow({"WRITE": 40e9, "READ": 1e9})))
    assert judgement.verdict is Verdict.FAIL
    assert "moves 1 GB/s (READ)" in judgement.reason
    assert "(WRITE)" not in judgement.reason


@pytest.mark.parametrize("culprit", [FIRST[2], OTHER[2]])
def test_the_slow_end_of_a_pair_is_named_with_its_host(culprit: Nic) -> None:
    judgement = judged(ACROSS, bad(culprit, row=rate(2e9)))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.startswith(
        f"rows: {culprit} moves 2 GB/s (WRITE), less than half of the 40 GB/s of mlx5_0:1"
    )


def test_two_slow_devices_of_eight_are_both_named() -> None:
    many = nics(0, 8)
    judgement = judged([NicPair(nic, nic) for nic in many], bad(many[3], many[6], row=rate(2e9)))
    assert [f"mlx5_{number}:1 of node-a (rank 0) moves" in judgement.reason for number in range(8)] == [
        number in (3, 6) for number in range(8)
    ]


def test_a_path_that_is_slow_only_between_two_devices_is_named_with_both() -> None:
    slow = ACROSS[1]
    judgement = judged(ACROSS, lambda pair, _: rate(2e9 if pair == slow else 40e9))
    assert (
        "rows: mlx5_1:1 of node-a (rank 0) to mlx5_1:1 of node-b (rank 1) (which of the two is not known) moves"
        in judgement.reason
    )


def test_a_device_without_a_connection_is_named_with_its_error() -> None:
    judgement = judged(ACROSS, bad(OTHER[3], row=NicRow(error="nixlRemoteDisconnectError (…)")))
    assert (judgement.verdict, judgement.reason) == (
        Verdict.FAIL,
        "rows: mlx5_3:1 of node-b (rank 1) fails where the others do not: nixlRemoteDisconnectError (…)",
    )


def test_the_error_of_a_pair_whose_rails_are_separate_names_both_ends() -> None:
    """Where rails are not connected with each other, no other device can show which end is bad."""

    def moves(pair: NicPair, _: int) -> NicRow:
        crossed = pair.initiator.device != pair.target.device
        return NicRow(error="unreachable") if crossed or pair == ACROSS[2] else rate(40e9)

    judgement = judged(ACROSS, moves)
    assert (
        "mlx5_2:1 of node-a (rank 0) to mlx5_2:1 of node-b (rank 1) (which of the two is not known) fails"
        in judgement.reason
    )


def test_a_device_that_fails_when_it_is_measured_again_is_named_with_its_error() -> None:
    def moves(pair: NicPair, before: int) -> NicRow:
        if pair.initiator is not FIRST[0]:
            return rate(40e9)
        return NicRow(error="gone") if before else rate(1e9)

    judgement = judged(LOOPS, moves)
    assert "rows: mlx5_0:1 of node-a (rank 0) fails where the others do not: gone" in judgement.reason


def test_wrong_bytes_are_corrupt() -> None:
    judgement = judged(ACROSS, bad(FIRST[1], row=NicRow(corruption="3 of 64 bytes are wrong")))
    assert (judgement.verdict, judgement.reason) == (
        Verdict.CORRUPT,
        "rows: mlx5_1:1 of node-a (rank 0) to mlx5_1:1 of node-b (rank 1): 3 of 64 bytes are wrong",
    )


def test_no_device_is_accused_if_none_works() -> None:
    judgement = judged(LOOPS, bad(*FIRST, row=NicRow(error="NIXL_ERR_BACKEND")))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == "rows: none of 4 RDMA devices moved a byte, the first with: NIXL_ERR_BACKEND"
    assert "ucx-uses-rdma" in judgement.remedy


def test_bytes_that_went_another_way_say_nothing_about_devices() -> None:
    judgement = judged(LOOPS, bad(*FIRST, row=NicRow(elsewhere="cma/memory")))
    assert judgement.verdict is Verdict.NOT_APPLICABLE
    assert "the bytes went over cma/memory, and not over the chosen RDMA device" in judgement.reason


def test_a_device_of_another_kind_is_not_compared() -> None:
    management = replace(FIRST[3], kind=("mlx", 3.1e9))
    pairs = [*LOOPS[:3], NicPair(management, management)]
    assert judged(pairs, bad(management, row=rate(3e9))).verdict is Verdict.PASS


@pytest.mark.parametrize("good", [1, 2])
def test_a_device_that_is_slow_only_once_or_twice_is_not_named(good: int) -> None:
    """What other processes do hits any device; one good measurement beside another device is enough."""
    judgement = judged(LOOPS, lambda pair, before: rate(1e9 if pair.initiator is FIRST[0] and before < good else 40e9))
    assert judgement.verdict is Verdict.PASS


def test_a_slow_device_on_a_busy_host_is_named_but_not_failed() -> None:
    judgement = judged(LOOPS, bad(FIRST[1], row=rate(2e9, contention=0.8)))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "mlx5_1:1 of node-a (rank 0) moves 2 GB/s" in judgement.reason
    assert judgement.reason.endswith("but other processes used up to 0.8 of the cores that a row needs")


def test_healthy_devices_on_a_busy_host_are_not_accused() -> None:
    """Two rates of five differ by more than a factor of two, and yet hardly ever does one device look bad."""
    chance = random.Random(39)
    accused = sum(
        judged(LOOPS[:2], lambda *_: rate(40e9 * chance.lognormvariate(0, 0.6), contention=0.9)).verdict
        is not Verdict.PASS
        for _ in range(500)
    )
    assert accused <= 25


def test_a_card_is_measured_with_the_gpu_that_it_is_assigned_to() -> None:
    facts = facts_of("p5.48xl")
    gpus = [LinkGpu(gpu.index, "H100", f"GPU-{gpu.index}", gpu.pci) for gpu in facts.gpu.gpus]
    gpu_by_card = nearest_gpus(seats(gpus, facts.gpu.gpus, facts.rdma))
    assert len(gpu_by_card) == 32
    assert [gpu_by_card[f"rdmap{number}s0"] for number in (79, 82, 164)] == [0, 0, 5]


@pytest.mark.parametrize(
    ("chosen", "left_out"),
    [
        ("", {"mlx5_1:1": "its port is DOWN"}),
        ("all", {"mlx5_1:1": "its port is DOWN"}),
        ("mlx5_0:1,mlx5_1", {"mlx5_0:2": "UCX_NET_DEVICES=mlx5_0:1,mlx5_1", "mlx5_1:1": "its port is DOWN"}),
        ("^mlx5_0", {"mlx5_0:1": "UCX_NET_DEVICES=^mlx5_0", "mlx5_0:2": "UCX_NET_DEVICES=^mlx5_0",
                     "mlx5_1:1": "its port is DOWN"}),
    ],
)  # fmt: skip
def test_devices_that_are_not_to_be_used_or_have_no_link_are_left_out(chosen: str, left_out: dict[str, str]) -> None:
    card = facts_of("p5.48xl").rdma[0]

    def port(number: int, state: str) -> Port:
        return Port(number, state, None, "InfiniBand", {}, ())

    cards = (
        replace(card, name="mlx5_0", kind="mlx", ports=(port(1, "ACTIVE"), port(2, "ACTIVE"))),
        replace(card, name="mlx5_1", kind="mlx", ports=(port(1, "DOWN"),)),
    )
    reasons = {nic.device: reason for nic, reason in ports(HostDevices("node-a", cards, (), chosen), 0)}
    assert {device: reason for device, reason in reasons.items() if reason} == left_out


def host(name: str, *devices: str) -> Any:
    """Return the answer of a rank on a host with these devices."""
    card = facts_of("p5.48xl").rdma[0]
    cards = tuple(
        replace(card, name=device, kind="mlx", ports=(Port(1, "ACTIVE", 5e10, "InfiniBand", {}, ()),))
        for device in devices
    )
    return json.loads(json.dumps(HostDevices(name, cards, (), "").plain()))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_each_operation_is_measured_once_and_workers_end(
    error: type[BaseException] | None, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices and their rows are doubles, because no machine of CI has two RDMA devices."""
    rows = MagicMock(return_value=rate(40e9), side_effect=error)
    rows_of = MagicMock(return_value=rows)
    monkeypatch.setattr(each_nic, "read_rdma", lambda _: facts_of("p5.48xl").rdma)
    monkeypatch.setattr(each_nic, "NicLinks", rows_of)
    links = [RowKey("UCX", op, MemoryPair("DRAM", "DRAM"), 4096) for op in ("WRITE", "READ", "WRITE")]
    cluster = SimpleNamespace(ask=lambda _: [host("a", "m0", "m1"), host("b", "m0", "m1")], hosts=())
    settings = read_settings(pytestconfig, environ={})
    with pytest.raises(error) if error else nullcontext():
        judgement = judge_each_nic(cast(Run, SimpleNamespace(links=links)), settings, cast(Cluster, cluster))
        assert judgement.verdict is Verdict.PASS
    assert rows_of.call_args.args[2] == ("WRITE", "READ")
    rows.close.assert_called_once_with()


def test_one_rank_of_each_host_measures_its_devices_with_the_next_host(pytestconfig: pytest.Config) -> None:
    answers = [host("a", "m0", "m1"), host("a", "m0", "m1"), host("b", "m0", "m1"), host("c", "m0")]
    cluster = cast(Cluster, SimpleNamespace(ask={"devices": answers}.__getitem__))
    settings, rows = read_settings(pytestconfig, environ={}), [("WRITE", MemoryPair("DRAM", "DRAM"))]
    assert each_nic._Rows(settings, cluster, rows).hosts == [(0, 2), (3, 2)]
    answers[:] = [host("a", "m0"), host("b", "m0")]
    with pytest.raises(NotApplicableError, match=r"of a host to compare: a has 1 \(m0:1\), b has 1 \(m0:1\)"):
        each_nic._Rows(settings, cluster, rows)


def test_a_host_without_rdma_has_nothing_to_compare() -> None:
    done = run("suites/bandwidth/test_nics.py", "-rs")
    assert done.code == 1, done.output  # nothing was checked
    assert "each-nic: this host has no RDMA device" in done.output


@pytest.mark.long
@pytest.mark.parametrize("slow", [pytest.param(False, marks=pytest.mark.whole), True], ids=["healthy", "slow"])
def test_a_slow_card_between_two_hosts_is_named(
    slow: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Real NIXL between two network namespaces, over the kernel's cables in place of RDMA devices."""
    require_tools()
    save_time(monkeypatch.setattr)  # the slow card is far below the other
    monkeypatch.setattr("pytest_nixl.measure.link.BESIDE_SECONDS", 0.3)
    # Each pair gets new workers each time. The tests on made rates have all three measurements.
    monkeypatch.setattr("pytest_nixl.checks.bandwidth.each_nic.TRIES", 2)
    monkeypatch.setenv("UCX_TLS", "tcp")
    settings = replace(read_settings(pytestconfig, environ={}), blocks=(32768,), batch=(1,), iterations=20, warmup=2)
    with four_cables() as hosts:
        if slow:
            hosts[1].shape("card2", SLOW)
        nics = [[Nic(rank, f"node-{'ab'[rank]}", f"card{number}", KIND) for number in (1, 2)] for rank in range(2)]
        places = [LocalHost(supervisor(), rank, host.prefix) for rank, host in enumerate(hosts)]
        links = NicLinks(places, settings, ("WRITE", "READ"), MemoryPair("DRAM", "DRAM"), one_host=False)
        try:
            judgement = NicTrial("rows", nic_pairs(*nics), lambda pair: replace(links(pair), contention=0.0)).judge()
        finally:
            links.close()
    print(judgement)
    if not slow:
        assert judgement.verdict is Verdict.PASS, judgement.reason
        return
    assert judgement.verdict is Verdict.FAIL, judgement.reason
    # The cables are networks of their own: no device reaches another one. The second host sends in a READ.
    assert f"{nics[0][1]} to {nics[1][1]} (which of the two is not known) moves 0.00" in judgement.reason
    assert "(READ), less than half of the" in judgement.reason
