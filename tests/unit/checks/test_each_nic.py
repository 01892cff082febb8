# SPDX-License-Identifier: Apache-2.0
"""The check ``each-nic`` on made rates: which device is named, and which is not. ``tests/machines`` has real ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

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
from pytest_nixl.checks.bandwidth.gpus_together import GpuEnd, seats
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.devices import SWITCH, GpuNics, HostDevices
from pytest_nixl.host.rdma import Port
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.gpus import LinkGpu
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError
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

    def measure(pair: NicPair) -> NicRow:
        assert (pair.initiator.rank, pair.target.rank) == (pairs[0].initiator.rank, pairs[0].target.rank)
        return moves(pair, next(counts.setdefault(pair, count())))

    return NicTrial("rows", pairs, measure).judge()


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


AGAIN = ", in 3 of 3 measurements"
BROKEN, GONE = NicRow(error="nixlRemoteDisconnectError (…)"), NicRow(error="NIXL_ERR_BACKEND")
CROSSED = ACROSS[1]
UNKNOWN = "mlx5_1:1 of node-a (rank 0) to mlx5_1:1 of node-b (rank 1) (which of the two is not known)"


def slow(device: str, op: str, moved: float, good: str) -> str:
    return f"{device} moves {moved:g} GB/s ({op}), less than half of the 40 GB/s of {good}{AGAIN}"


def only_between(pair: NicPair, row: NicRow) -> Moves:
    return lambda nics, _: row if nics == pair else rate(40e9)


def separate_rails(pair: NicPair, _: int) -> NicRow:
    """Where rails are not connected with each other, no other device can show which end is bad."""
    crossed = pair.initiator.device != pair.target.device
    return NicRow(error="unreachable") if crossed or pair == CROSSED else rate(40e9)


@pytest.mark.parametrize(
    ("pairs", "moves", "verdict", "reason"),
    [
        *[
            (LOOPS[:count], bad(FIRST[1], row=rate(19e9)), "FAIL",
             f"{slow(str(FIRST[1]), 'WRITE', 19, str(FIRST[0]))}; {slow(str(FIRST[1]), 'READ', 19, str(FIRST[0]))}")
            for count in (2, 4)
        ],
        (LOOPS, bad(FIRST[2], row=NicRow({"WRITE": 40e9, "READ": 1e9})), "FAIL",
         slow(str(FIRST[2]), "READ", 1, str(FIRST[0]))),
        *[
            (ACROSS, bad(culprit, row=rate(2e9)), "FAIL",
             "; ".join(slow(str(culprit), op, 2, str(ACROSS[0])) for op in ("WRITE", "READ")))
            for culprit in (FIRST[2], OTHER[2])
        ],
        (ACROSS, only_between(CROSSED, rate(2e9)), "FAIL",
         "; ".join(slow(UNKNOWN, op, 2, str(ACROSS[0])) for op in ("WRITE", "READ"))),
        (ACROSS, bad(OTHER[3], row=BROKEN), "FAIL", f"{OTHER[3]} fails where the others do not: {BROKEN.error}"),
        (ACROSS, bad(FIRST[0], row=BROKEN), "FAIL", f"{FIRST[0]} fails where the others do not: {BROKEN.error}"),
        (ACROSS, separate_rails, "FAIL", f"{UNKNOWN} fails where the others do not: unreachable"),
        (ACROSS, bad(FIRST[1], row=NicRow(corruption="3 of 64 bytes are wrong")), "CORRUPT",
         f"{CROSSED}: 3 of 64 bytes are wrong"),
        (LOOPS, bad(*FIRST, row=GONE), "FAIL",
         "none of 4 RDMA devices moved a byte, the first with: NIXL_ERR_BACKEND"),
        (LOOPS, bad(*FIRST, row=NicRow(elsewhere="cma/memory")), "NOT-APPLICABLE",
         "the bytes went over cma/memory, and not over the chosen RDMA device"),
        (LOOPS, bad(FIRST[0], row=NicRow(elsewhere="cma/memory")), "NOT-APPLICABLE",
         "the bytes went over cma/memory, and not over the chosen RDMA device"),
        (LOOPS[:2], bad(FIRST[1], row=BROKEN), "FAIL", f"{FIRST[1]} fails where the others do not: {BROKEN.error}"),
        # A broken device is one even on a busy host, which may be slow.
        (LOOPS, bad(FIRST[1], row=replace(BROKEN, contention=0.8)), "FAIL",
         f"{FIRST[1]} fails where the others do not: {BROKEN.error}"),
        (LOOPS, bad(FIRST[1], row=rate(2e9, contention=0.8)), "INCONCLUSIVE",
         "; ".join(slow(str(FIRST[1]), op, 2, str(FIRST[0])) for op in ("WRITE", "READ"))
         + ", but other processes used up to 0.8 of the cores that a row needs"),
    ],
)  # fmt: skip
def test_the_bad_device_is_named_with_its_host_and_no_other(
    pairs: list[NicPair], moves: Moves, verdict: str, reason: str
) -> None:
    judgement = judged(pairs, moves)
    assert (judgement.verdict.value, judgement.reason) == (verdict, f"rows: {reason}")
    remedy = {"none of": "ucx-uses-rdma", "the bytes": "UCX_TLS=rc"}.get(reason[:9].rpartition(" ")[0], "")
    if verdict in ("FAIL", "CORRUPT") and not remedy:
        device = reason.partition(":1 ")[0]  # the bad one, which is named first
        remedy = (
            f"leave the device out of UCX_NET_DEVICES; check its cable, transceiver, switch port and PCIe link "
            f"(`rdma statistic show link {device}/1`, `lspci -vv`), and run "
        )
    assert (remedy if verdict != "INCONCLUSIVE" else "stop other processes") in judgement.remedy


def test_two_slow_devices_of_eight_are_both_named() -> None:
    many = nics(0, 8)
    judgement = judged([NicPair(nic, nic) for nic in many], bad(many[3], many[6], row=rate(2e9)))
    assert [f"mlx5_{number}:1 of node-a (rank 0) moves" in judgement.reason for number in range(8)] == [
        number in (3, 6) for number in range(8)
    ]
    assert "link mlx5_3/1`" in judgement.remedy


def test_only_a_bad_device_is_measured_again_with_the_fastest_devices_of_its_kind() -> None:
    rates = {FIRST[0]: 25e9, FIRST[1]: 40e9, FIRST[2]: 40e9, FIRST[3]: 90e9}
    measured: list[NicPair] = []

    def moves(pair: NicPair, before: int) -> NicRow:
        measured.append(pair)
        return rate(rates[pair.initiator])

    assert judged(LOOPS, moves).verdict is Verdict.PASS
    assert measured == LOOPS
    other_kind = [replace(nic, kind=("mlx", 1e11)) for nic in (FIRST[1], OTHER[1])]
    pairs = [ACROSS[0], NicPair(*other_kind), *ACROSS[2:]]
    rows = dict(zip(pairs[1:], (rate(100e9), NicRow({"WRITE": 50e9, "READ": 41e9}), rate(45e9)), strict=True))
    crossed: list[NicPair] = []

    def moves_or_fails(pair: NicPair, before: int) -> NicRow:
        if pair not in pairs:
            crossed.append(pair)
        return rows.get(pair, BROKEN)

    judged(pairs, moves_or_fails)
    assert crossed == [NicPair(FIRST[0], OTHER[2]), NicPair(FIRST[2], OTHER[0])]


def test_a_device_that_fails_when_it_is_measured_again_is_named_with_its_error() -> None:
    def moves(pair: NicPair, before: int) -> NicRow:
        if pair.initiator is not FIRST[0]:
            return rate(40e9)
        return NicRow(error="gone") if before else rate(1e9)

    judgement = judged(LOOPS, moves)
    assert "rows: mlx5_0:1 of node-a (rank 0) fails where the others do not: gone" in judgement.reason


@pytest.mark.parametrize("across", [True, False])
def test_a_device_of_another_kind_is_not_compared(across: bool) -> None:
    management = replace((OTHER if across else FIRST)[3], kind=("mlx", 3.1e9))
    pairs = [*ACROSS[:3], NicPair(FIRST[3], management)] if across else [*LOOPS[:3], NicPair(management, management)]
    assert judged(pairs, bad(management, row=rate(3e9))).verdict is Verdict.PASS


@pytest.mark.parametrize("good", [1, 2])
def test_a_device_that_is_slow_only_once_or_twice_is_not_named(good: int) -> None:
    """What other processes do hits any device; one good measurement beside another device is enough."""
    judgement = judged(LOOPS, lambda pair, before: rate(1e9 if pair.initiator is FIRST[0] and before < good else 40e9))
    assert judgement.verdict is Verdict.PASS


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


def test_a_card_of_several_gpus_is_measured_with_the_first_that_it_is_nearest_to_unless_it_is_assigned() -> None:
    def end(number: int, devices: tuple[str, ...], assigned: tuple[str, ...]) -> GpuEnd:
        return GpuEnd(LinkGpu(number, "H100", f"{number}", ""), GpuNics(number, devices, SWITCH, assigned))

    ends = [end(0, ("m0", "m1"), ("m0",)), end(1, ("m0", "m1", "m2"), ("m2",)), end(2, ("m2",), ()),
            GpuEnd(LinkGpu(3, "H100", "3", ""), None), end(4, ("m1", "m2"), ("m1",))]  # fmt: skip
    assert nearest_gpus(ends) == {"m0": 0, "m1": 4, "m2": 1}
    assert nearest_gpus(ends[:3]) == {"m0": 0, "m1": 0, "m2": 1}


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
        return Port(number, state, number * 1e9, "InfiniBand", {}, ())

    cards = (
        replace(card, name="mlx5_0", kind="mlx", ports=(port(1, "ACTIVE"), port(2, "ACTIVE"))),
        replace(card, name="mlx5_1", kind="mlx", ports=(port(1, "DOWN"),)),
    )
    nics = list(ports(HostDevices("node-a", cards, (), chosen), 0))
    assert [nic.kind for nic, _ in nics] == [("mlx", 1e9), ("mlx", 2e9), ("mlx", 1e9)]
    reasons = {nic.device: reason for nic, reason in nics}
    assert {device: reason for device, reason in reasons.items() if reason} == left_out


def host(name: str, *devices: str, state: str = "ACTIVE") -> Any:
    """Return the answer of a rank on a host with these devices, whose ports are in a state."""
    card = facts_of("p5.48xl").rdma[0]
    cards = tuple(
        replace(card, name=device, kind="mlx", ports=(Port(1, state, 5e10, "InfiniBand", {}, ()),))
        for device in devices
    )
    return json.loads(json.dumps(HostDevices(name, cards, (), "").plain()))


Judge = Callable[..., Judgement]


@pytest.fixture
def judge(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judge the devices of hosts. They and their rows are doubles: no machine of CI has two RDMA devices."""

    def judge_hosts(
        answers: list[Any], rows: MagicMock, links: Sequence[RowKey], hosts: Sequence[Any] = (), cards: Any = None
    ) -> Judgement:
        monkeypatch.setattr(each_nic, "read_rdma", lambda _: facts_of("p5.48xl").rdma if cards is None else cards)
        monkeypatch.setattr(each_nic, "NicLinks", rows)
        cluster = SimpleNamespace(ask={"devices": answers}.__getitem__, hosts=hosts)
        settings = replace(
            read_settings(pytestconfig, environ={}),
            blocks=(4096, 65536), batch=(1, 4), duration=3.0, timeout=7.0, start_timeout=9.0,
        )  # fmt: skip
        return judge_each_nic(cast(Run, SimpleNamespace(links=links)), settings, cast(Cluster, cluster))

    return judge_hosts


def links_of(*texts: str) -> list[RowKey]:
    """Return links such as ``UCX/WRITE/DRAM:DRAM``."""
    return [RowKey(backend, op, MemoryPair.parse(memory), 4096) for backend, op, memory in
            (text.split("/") for text in texts)]  # fmt: skip


USUAL = links_of("UCX/WRITE/DRAM:DRAM", "LIBFABRIC/READ/DRAM:DRAM", "UCX/READ/DRAM:DRAM", "UCX/WRITE/DRAM:DRAM")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_each_operation_is_measured_once_and_workers_end(judge: Judge, error: type[BaseException] | None) -> None:
    rows = MagicMock()
    rows.return_value = MagicMock(return_value=rate(40e9), side_effect=error)
    with pytest.raises(error) if error else nullcontext():
        judgement = judge([host("a", "m0", "m1"), host("b", "m0", "m1")], rows, USUAL, ["host a", "host b"])
        assert judgement == Judgement(
            Verdict.PASS,
            "UCX DRAM:DRAM of 64KiB from a to b, each of 2 RDMA devices alone: WRITE 40 (m0:1) to 40 GB/s (m0:1), "
            "READ 40 (m0:1) to 40 GB/s (m0:1)",
        )
    hosts, settings, ops, memory = rows.call_args.args
    assert (hosts, ops, str(memory)) == (["host a", "host b"], ("WRITE", "READ"), "DRAM:DRAM")
    assert (settings.blocks, settings.batch, settings.duration) == ((65536,), (1,), 0.0)
    assert rows.call_args.kwargs == {"one_host": False}
    rows.return_value.close.assert_called_once_with()


@pytest.mark.parametrize(
    ("links", "cards", "answers", "reason"),
    [
        (links_of("LIBFABRIC/WRITE/DRAM:DRAM", "UCX/WRITE/DRAM:FILE"), None, [],
         "UCX is not requested, and only UCX takes a device from UCX_NET_DEVICES"),
        (USUAL, (), [], "this host has no RDMA device"),
        (USUAL, None, [host("a", "m0"), host("b", "m0")],
         "there are no two RDMA devices of a host to compare: a has 1 (m0:1), b has 1 (m0:1)"),
        (USUAL, None, [host("a", "m0", "m1"), host("b")],
         "there are no two RDMA devices of a host to compare: a has 2 (m0:1, m1:1)"),
        (USUAL, None, [host("a", "m0", state="DOWN")],
         "there are no two RDMA devices of a host to compare; left out: m0:1 of a (its port is DOWN)"),
    ],
)  # fmt: skip
def test_a_run_without_two_devices_of_a_host_to_compare_says_why(
    judge: Judge, links: Sequence[RowKey], cards: Any, answers: list[Any], reason: str
) -> None:
    rows = MagicMock()
    with pytest.raises(NotApplicableError) as error:
        judge(answers, rows, links, cards=cards)
    assert error.value.reason == reason
    rows.assert_not_called()


def test_one_rank_of_each_host_measures_its_devices_with_the_next_host(judge: Judge) -> None:
    """An odd host takes the one before it; one that could not be measured has not passed."""
    answers = [host("a", "m0", "m1"), host("a", "m0", "m1"), host("b", "m0", "m1"), host("c", "m0"), host("", "m0")]
    pairs: set[str] = set()

    def moves(pair: NicPair) -> NicRow:
        pairs.add(str(pair))
        return NicRow(elsewhere="tcp/eth0") if pair.initiator.host == "c" else rate(40e9)

    def measure(*_: object, one_host: bool) -> MagicMock:
        assert not one_host
        return MagicMock(side_effect=moves)

    judgement = judge(answers[:4], MagicMock(side_effect=measure), USUAL)
    assert pairs == {
        "m0:1 of a (rank 0) to m0:1 of b (rank 2)", "m1:1 of a (rank 0) to m1:1 of b (rank 2)",
        "m0:1 of c (rank 3) to m0:1 of b (rank 2)", "m0:1 of c (rank 3) to m1:1 of b (rank 2)",
    }  # fmt: skip
    assert judgement.verdict is Verdict.NOT_APPLICABLE
    assert judgement.reason.startswith("UCX DRAM:DRAM of 64KiB from a to b, each of 2 RDMA devices alone: WRITE 40 ")
    assert judgement.reason.endswith(
        "; UCX DRAM:DRAM of 64KiB from c to b: the bytes went over tcp/eth0, and not over the chosen RDMA device"
    )
    pairs.clear()
    judge([answers[2], answers[4]], MagicMock(side_effect=measure), USUAL)
    assert pairs == {f"m{number}:1 of b (rank 0) to m0:1 of rank 1 (rank 1)" for number in (0, 1)}
    pairs.clear()
    judge([host(name, "m0", "m1") for name in "abde"], MagicMock(side_effect=measure), USUAL)
    assert {pair.partition(" of ")[2] for pair in pairs} == {
        f"{first} (rank {rank}) to {device}:1 of {second} (rank {rank + 1})"
        for rank, first, second in ((0, "a", "b"), (2, "d", "e"))
        for device in ("m0", "m1")
    }


def test_the_devices_of_one_host_are_measured_with_themselves_and_their_gpus(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU memory is preferred; a device that is near no GPU is left out, and the worker that sees the GPUs ends."""
    place, worker, pairs = MagicMock(), MagicMock(), list[NicPair]()
    place.start.return_value = worker
    read_gpus = MagicMock(return_value="the GPUs")
    monkeypatch.setattr(each_nic, "gpus", read_gpus)
    monkeypatch.setattr(each_nic, "seats", lambda *arguments: arguments)
    monkeypatch.setattr(each_nic, "nearest_gpus", lambda ends: {"m0": 5, "m2": 3} if ends[0] == "the GPUs" else {})

    def moves(pair: NicPair) -> NicRow:
        pairs.append(pair)
        return rate(40e9)

    rows = MagicMock(side_effect=lambda *_, one_host: MagicMock(side_effect=moves))
    links = links_of("UCX/WRITE/DRAM:DRAM", "UCX/READ/DRAM:VRAM", "UCX/WRITE/VRAM:VRAM")
    judgement = judge([host("a", "m0", "m1", "m2")] * 2, rows, links, [place, place])
    assert [(pair.initiator.device, pair.initiator.gpu, pair.target) for pair in pairs] == [
        ("m0:1", 5, pairs[0].initiator), ("m2:1", 3, pairs[1].initiator),
    ]  # fmt: skip
    assert judgement.reason == (
        "UCX VRAM:VRAM of 64KiB, each of 2 RDMA devices alone: WRITE 40 (m0:1) to 40 GB/s (m0:1), READ 40 (m0:1) to 40 "
        "GB/s (m0:1); left out: m1:1 of a (near no GPU)"
    )
    assert (rows.call_args.args[2], rows.call_args.kwargs) == (("WRITE",), {"one_host": True})
    read_gpus.assert_called_once_with(worker, MemoryPair("VRAM", "VRAM"))
    place.start.assert_called_once_with("gpus", {}, 7.0, 9.0)
    worker.kill.assert_called_once_with()


#: The samples of a row: what carried its bytes, what was wrong, and which cores others used.
def carried(
    bandwidth: float, *transports: str, wrong: str | None = None, contention: tuple[float, ...] = (0.0,)
) -> Any:
    return SimpleNamespace(bandwidth=bandwidth, transports=transports, corruption=wrong, contention=contention)


@pytest.mark.parametrize(
    ("samples", "row"),
    [
        ([carried(4e9, "rc/m0:1", "rc/m1:1", contention=(0.25, 0.5)), carried(3e9, contention=(0.1,))],
         NicRow({"WRITE": 4e9, "READ": 3e9}, contention=0.5)),
        ([carried(4e9, "rc/m0:1"), carried(3e9, "rc/m0:1", contention=(0.75,))],
         NicRow({"WRITE": 4e9, "READ": 3e9}, contention=0.75)),
        ([carried(4e9, "rc/m1:1", "tcp/eth0")], NicRow(elsewhere="rc/m1:1, tcp/eth0")),
        ([carried(4e9, "rc/m1:1", wrong="3 bytes")], NicRow(corruption="3 bytes")),
        ([carried(4e9, "rc/m0:1"), WorkerError("a worker has ended")], NicRow(error="a worker has ended")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("tls", ["", "rc"])
def test_a_row_over_two_devices_has_workers_with_these_devices_alone(
    samples: list[Any], row: NicRow, one_host: bool, tls: str, make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between two processes of one host UCX would copy instead, unless the user has chosen transports."""
    monkeypatch.setenv("UCX_TLS", tls)
    if not tls:
        monkeypatch.delenv("UCX_TLS")
    launches, remaining = MagicMock(), iter(samples)
    monkeypatch.setattr(each_nic, "Launches", launches)
    measured: list[Any] = []

    def measure(links: Any, block: int, depth: int) -> list[Any]:
        measured.append((links, block, depth))
        sample = next(remaining)
        if isinstance(sample, Exception):
            raise sample
        return [sample]

    monkeypatch.setattr(each_nic, "measure_at_once", measure)
    settings, memory = make_settings(blocks=(512, 4096), depth=(1, 8)), MemoryPair("DRAM", "VRAM")
    links = NicLinks(["a", "b", "c", "d"], settings, ("WRITE", "READ"), memory, one_host=one_host)  # type: ignore[list-item]
    ends = Nic(2, "node-c", "m0:1", KIND, gpu=4), Nic(3, "node-d", "m7:1", KIND, gpu=5)
    assert links(NicPair(*ends)) == row
    only = {"UCX_TLS": "ib,cuda_copy,gdr_copy"} if one_host and not tls else {}
    variables = [({"UCX_NET_DEVICES": "m0:1", **only}, {"UCX_NET_DEVICES": "m7:1", **only})]
    ranks = (0, 1) if one_host else (2, 3)
    launches.assert_called_once_with(["a", "b", "c", "d"], settings)
    between = launches.return_value.between_devices
    assert between.call_args_list == [
        call("UCX", op, memory, [DevicePair(4, 5)], ranks, variables) for op in ("WRITE", "READ")[: len(measured)]
    ]
    assert measured == [(between.return_value, 4096, 8)] * len(samples)
    links.close()
    launches.return_value.close.assert_called_once_with()


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
