# SPDX-License-Identifier: Apache-2.0
"""Several GPUs at the same time, as far as a machine without GPUs can test it.

Pairs, network cards and verdicts are computed from a real topology. The measurements use real NIXL between host
memories, over a separate network card for each pair, and one card can be slowed. Nothing here uses a real GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT
from helpers.fake_sysfs import facts_of
from helpers.namespaces import FAST, SLOW, Host, four_cables, require_tools
from helpers.pytester_run import run_pytest

from pytest_nixl.checks.bandwidth import gpus_together
from pytest_nixl.checks.bandwidth.gpus_together import (
    REMEDY,
    GpuEnd,
    GpuPair,
    judge_gpus,
    judge_gpus_together,
    measure_gpus,
    pairs_of,
    seats,
)
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.host.devices import FAR, SWITCH, GpuNics, HostDevices
from pytest_nixl.host.gpu import GpuFacts
from pytest_nixl.host.rdma import RdmaDevice
from pytest_nixl.judge.concurrent import QUIET, measure_at_once, spread, starving
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.gpus import LinkGpu
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_process import Pending, Worker
from pytest_nixl.session.settings import read_settings

TESTS = str(Path(__file__).parents[2])
SUITE = "suites/bandwidth/test_gpus.py"
P5 = facts_of("p5.48xl")
CARDS = P5.rdma
GPUS = [LinkGpu(gpu.index, "H100", f"GPU-{gpu.index}", gpu.pci) for gpu in P5.gpu.gpus]
BLOCK = 16384


# Pairs of GPUs and their network cards


@pytest.mark.parametrize(
    ("initiators", "targets", "one_host", "expected"),
    [
        (4, 4, True, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (1, 1, True, []),
        (8, 2, False, [(0, 0), (1, 1)]),
    ],
)
def test_gpus_are_paired_by_number(
    initiators: int, targets: int, one_host: bool, expected: list[tuple[int, int]]
) -> None:
    assert pairs_of(initiators, targets, one_host=one_host) == [DevicePair(*pair) for pair in expected]


def test_each_gpu_gets_the_cards_nearest_to_it() -> None:
    placed = seats(GPUS, P5.gpu.gpus, CARDS)
    assert [seat.gpu for seat in placed] == GPUS
    assert placed[0].variables() == {"UCX_NET_DEVICES": "rdmap79s0:1,rdmap80s0:1,rdmap81s0:1,rdmap82s0:1"}
    assert len({name for seat in placed for name in seat.nics}) == 32
    assert [str(placed[number]) for number in (0, 4, -1)] == [
        f"GPU {gpu.number} ({gpu.pci}, NUMA node {node})" for gpu, node in ((GPUS[0], 0), (GPUS[4], 1), (GPUS[-1], 1))
    ]


def test_a_gpu_keeps_its_cards_if_cuda_numbers_it_first() -> None:
    """CUDA numbers GPUs like this with CUDA_VISIBLE_DEVICES=5,0."""
    shown = [replace(GPUS[5], number=0), replace(GPUS[0], number=1)]
    placed = seats(shown, P5.gpu.gpus, CARDS)
    assert [seat.nics[0] for seat in placed] == ["rdmap164s0", "rdmap79s0"]


@pytest.mark.parametrize("bad", [replace(CARDS[0], closed="Permission denied"), replace(CARDS[0], uverbs="")])
def test_an_unusable_card_is_assigned_to_no_gpu(bad: RdmaDevice) -> None:
    cards = [bad, *CARDS[1:]]
    assert seats(GPUS, P5.gpu.gpus, cards)[0].nics == ("rdmap80s0", "rdmap81s0", "rdmap82s0")


@pytest.mark.parametrize(
    ("pci", "gpu_facts"), [("0000:00:1e.0", P5.gpu.gpus), (GPUS[0].pci, [replace(P5.gpu.gpus[0], path="")])]
)
def test_a_gpu_with_an_unknown_position_has_no_card(pci: str, gpu_facts: Sequence[GpuFacts]) -> None:
    [seat] = seats([replace(GPUS[0], pci=pci)], gpu_facts, CARDS)
    assert (seat.near, seat.nics, seat.variables(), str(seat)) == (None, (), {}, f"GPU 0 ({pci})")


# The verdict on their bandwidth


def lane(number: int, alone: float = 40e9, transports: tuple[str, ...] = ()) -> GpuPair:
    near = GpuNics(number, (f"near{number}", f"also{number}"), SWITCH, (f"near{number}",))
    initiator, target = (GpuEnd(LinkGpu(index, "H100", f"{index}", f"0000:{index}0:00.0"), near, "NUMA node 0")
                  for index in (number, number + 1))  # fmt: skip
    return GpuPair(initiator, target, alone, transports)


LANES = [lane(number) for number in range(4)]


def judged(
    rates: Sequence[float], scaling: float | None = None, lanes: Sequence[GpuPair] = LANES, took: str = ""
) -> Judgement:
    return judge_gpus("UCX WRITE VRAM:VRAM", 64 << 20, lanes, spread(lambda: rates), scaling, took)


def measured(together: str, by_gpu: str, slowest: int, rate: str, over: str = "") -> str:
    return (
        f"UCX WRITE VRAM:VRAM of 64MiB, 4 GPUs at once: {together} of the sum of each alone; by GPU {by_gpu} GB/s; the "
        f"slowest is GPU {slowest} (0000:{slowest}0:00.0, NUMA node 0) to GPU {slowest + 1}{over}, with {rate} of the "
        "40 GB/s that it moves alone"
    )


HEALTHY, STARVED, EVEN = [39e9, 38e9, 36e9, 39e9], [39e9, 38e9, 12e9, 39e9], [20e9] * 4
WELL = measured("152 GB/s together, 95%", "0: 39, 1: 38, 2: 36, 3: 39", 2, "36")
STARVES = (
    measured("128 GB/s together, 80%", "0: 39, 1: 38, 2: 12, 3: 39", 2, "12")
    + ": it starves while the others are measured"
)
SHARED = measured("80 GB/s together, 50%", "0: 20, 1: 20, 2: 20, 3: 20", 0, "20")
TOOK = "other processes used up to 0.7 of the cores that the links need"
FAR_CARD = (LANES[0], lane(1, transports=("rc_mlx5/far3:1", "rc_mlx5/near1:1")), *LANES[2:])


@pytest.mark.parametrize(
    ("rates", "scaling", "lanes", "took", "verdict", "reason", "remedy"),
    [
        (HEALTHY, 0.95, LANES, TOOK, "PASS", WELL, ""),
        (HEALTHY, None, LANES, "", "PASS",
         f"{WELL}; no GPU starves, and the profile has no `scaling` that requires more", ""),
        (STARVED, 0.9, FAR_CARD, "", "FAIL", STARVES, REMEDY),
        (STARVED, None, LANES, TOOK, "INCONCLUSIVE", f"{STARVES}, but {TOOK}", QUIET),
        (EVEN, 0.9, LANES, "", "FAIL", f"{SHARED}: the profile requires 90%", REMEDY),
        (HEALTHY, 0.9, FAR_CARD, "", "WARN",
         f"{WELL}; over network cards that are not nearest to the GPU: GPU 1 by far3",
         "unset the variables that name devices (UCX_NET_DEVICES, FI_EFA_IFACE), so that the backend chooses"),
    ],
)  # fmt: skip
def test_gpus_are_judged_by_the_one_that_starves_and_by_the_scaling_of_the_profile(
    rates: list[float], scaling: float | None, lanes: Sequence[GpuPair], took: str, verdict: str, reason: str,
    remedy: str,
) -> None:  # fmt: skip
    assert judged(rates, scaling, lanes, took) == Judgement(Verdict(verdict), reason, remedy)


@pytest.mark.parametrize(
    ("transports", "astray"),
    [
        (("rc_mlx5/near1:1", "rc_mlx5/also1:1"), ()),
        (("cuda_ipc/cuda", "rc_mlx5"), ()),
        (("rc_mlx5/far3:1", "rc_mlx5/near1:1", "ud/far2:1", "rc_mlx5/far3:1"), ("far3", "far2")),
    ],
)
def test_a_network_card_is_astray_if_it_is_not_nearest_to_the_gpu_that_uses_it(
    transports: tuple[str, ...], astray: tuple[str, ...]
) -> None:
    pair = lane(1, transports=transports)
    assert pair.astray == astray
    assert str(pair) == f"GPU 1 (0000:10:00.0, NUMA node 0) to GPU 2 over {', '.join(transports)}"


@pytest.mark.parametrize("near", [None, GpuNics(1, ("near1",), FAR), GpuNics(1, (), SWITCH)], ids=repr)
def test_no_card_is_far_from_a_gpu_whose_nearest_card_is_unknown(near: GpuNics | None) -> None:
    pair = lane(1, transports=("rc_mlx5/far3:1",))
    assert pair.astray == ("far3",)
    assert replace(pair, initiator=replace(pair.initiator, near=near)).astray == ()


def test_a_profile_gives_the_scaling_of_gpus(tmp_path: Path) -> None:
    def machine(text: str) -> float | None:
        path = tmp_path / "p.toml"
        path.write_text(f'[profile]\nname = "p"\n[machine]\nnics = 4\nnic_rate = "100 Gb/s"\nsource = "s"\n{text}\n')
        section = load_profile(str(path)).machine
        assert section is not None
        return section.scaling

    assert machine('scaling = "90%"') == 0.9
    assert machine("") is None
    for text in ('"110%"', '"0.9"', "0.9", '"0%"'):
        with pytest.raises(ValueError, match=r'scaling: .*expected a share such as "90%"'):
            machine(f"scaling = {text}")


# The measurements, with doubles of links and workers


def sample(bandwidth: float, *transports: str, wrong: str | None = None, contention: float = 0.0) -> Any:
    return SimpleNamespace(
        bandwidth=bandwidth, transports=transports, corruption=wrong, contention=(contention,), key="a row"
    )


@pytest.mark.parametrize(
    ("slow", "wrong", "others", "expected"),
    [
        (39e9, None, 0.0, "PASS: {}38 GB/s together, 95% of the sum of each alone; by GPU 0: 19, 1: 19 GB/s; the "
         "slowest is GPU 0 (0000:00:00.0, NUMA node 0) to GPU 1 over rc/near0:1, with 19 of the 20 GB/s that it moves "
         "alone"),
        (39e9, "3 bytes are wrong", 0.0, "CORRUPT: "),
        (1e9, None, 0.0, "FAIL: "),
        (1e9, None, 0.9, "INCONCLUSIVE: "),
    ],
)  # fmt: skip
def test_each_link_is_measured_alone_and_then_all_at_once(
    slow: float, wrong: str | None, others: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest measurement together counts, of which a slow one is repeated."""
    log: list[tuple[str, int, int]] = []

    def measure(links: Sequence[str], block: int, depth: int) -> list[Any]:
        log.append(("+".join(links), block, depth))
        if len(links) == 1:
            return [sample(20e9)]
        rates = (19e9, 19e9) if slow > 19e9 else (19e9, slow)
        return [
            sample(rate, f"rc/near{number}:1", wrong=wrong if number else None, contention=others)
            for number, rate in enumerate(rates)
        ]

    monkeypatch.setattr(gpus_together, "measure_at_once", measure)
    links: Any = ["first", "second"]
    seated = [(gpu_lane.initiator, gpu_lane.target) for gpu_lane in LANES[:2]]
    judgement = measure_gpus("UCX WRITE VRAM:VRAM", links, seated, 4096, 8, 0.9)
    start = "UCX WRITE VRAM:VRAM of 4KiB, 2 GPUs at once: "
    assert f"{judgement.verdict}: {judgement.reason}".startswith(expected.format(start))
    times = 3 if slow < 19e9 else 1
    assert log == [("first", 4096, 8), ("second", 4096, 8), *[("first+second", 4096, 8)] * times]
    if wrong:
        assert judgement.reason.startswith("UCX WRITE VRAM:VRAM")
        assert f"{seated[1][0]} to GPU 2" in judgement.reason


@pytest.mark.parametrize(
    ("backend", "chosen", "one_host", "with_cards"),
    [("UCX", "", False, True), ("UCX", "mlx5_0", False, False), ("LIBFABRIC", "", True, False)],
)
def test_all_gpus_of_two_ranks_are_measured_with_their_cards_unless_cards_are_chosen(
    backend: str, chosen: str, one_host: bool, with_cards: bool, make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("UCX_NET_DEVICES", chosen)
    if not chosen:
        monkeypatch.delenv("UCX_NET_DEVICES")
    workers = [MagicMock(rank=rank, versions={"host": "a" if one_host else f"node-{rank}"}) for rank in range(2)]
    hosts = [MagicMock(**{"start.return_value": worker}) for worker in workers]
    plain = json.loads(json.dumps(HostDevices("a", CARDS, P5.gpu.gpus, "").plain()))
    cluster: Any = SimpleNamespace(hosts=[*hosts, None], ask={"devices": [plain, plain]}.__getitem__)
    visible = {0: GPUS[:2], 1: GPUS[4:7]} if chosen else {0: GPUS[:3], 1: GPUS[4:6]}
    monkeypatch.setattr(gpus_together, "gpus", lambda worker, memory: visible[worker.rank])
    judge = MagicMock(side_effect=[Judgement(Verdict.PASS, "first"), Judgement(Verdict.FAIL, "second", "mend it")])
    monkeypatch.setattr(gpus_together, "measure_gpus", judge)
    pairs, memory = MagicMock(), MemoryPair("DRAM", "VRAM")
    rows = (("WRITE", memory), ("READ", memory), ("WRITE", memory), ("WRITE", MemoryPair("DRAM", "DRAM")))
    links = [RowKey(backend, op, kind, 64) for op, kind in rows]
    settings = make_settings(blocks=(64, 4096), depth=(1, 8), timeout=7.0, start_timeout=9.0)
    profile: Any = SimpleNamespace(machine=SimpleNamespace(scaling=0.9))
    run: Any = SimpleNamespace(links=links)
    judgement = judge_gpus_together(run, settings, cluster, pairs, profile)
    assert judgement == Judgement(Verdict.FAIL, "first; second", "mend it")
    ends = [seats(gpus, P5.gpu.gpus, CARDS) for gpus in visible.values()]
    numbers = [(0, 1), (1, 0)] if one_host else [(0, 0), (1, 1)]
    seated = [(ends[0][first], ends[1][second]) for first, second in numbers]
    variables = [(first.variables(), second.variables()) if with_cards else ({}, {}) for first, second in seated]
    devices = [DevicePair(*pair) for pair in numbers]
    assert pairs.between_devices.call_args_list == [
        call(backend, op, memory, devices, variables=variables) for op in ("WRITE", "READ")
    ]
    between = pairs.between_devices.return_value
    assert judge.mock_calls == [
        call(f"{backend} {op} DRAM:VRAM", between, seated, 4096, 8, 0.9) for op in ("WRITE", "READ")
    ]
    for place, worker in zip(hosts, workers, strict=True):
        assert place.start.call_args_list == [call("gpus", {}, 7.0, 9.0)] * 2
        assert worker.kill.call_count == 2
    visible[1] = GPUS[4:5]
    judge.side_effect = [Judgement(Verdict.PASS, "")]
    for reason, text in (("", ""), ("CUDA_VISIBLE_DEVICES=4", " (CUDA_VISIBLE_DEVICES=4)")):
        hidden: Any = SimpleNamespace(why=reason)
        monkeypatch.setattr(gpus_together, "visible", lambda gpus, environ, hidden=hidden: hidden)
        with pytest.raises(NotApplicableError) as error:
            judge_gpus_together(run, settings, cluster, pairs, profile)
        assert error.value.reason == f"only one GPU is visible, H100 0000:97:00.0, but this check needs two{text}"
    run.links = links[-1:]
    with pytest.raises(NotApplicableError, match=r"^no GPU memory is requested: --nixl-memory has no VRAM"):
        judge_gpus_together(run, settings, cluster, pairs, profile)


# Real transfers, each pair over a separate network card


@pytest.fixture(scope="module")
def cables() -> Iterator[tuple[Host, Host]]:
    require_tools()
    with four_cables() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def links(cables: tuple[Host, Host], pytestconfig: pytest.Config) -> Iterator[list[Link]]:
    """Yield three links, each with the card of its number, set as for the workers of four GPUs."""
    settings = replace(read_settings(pytestconfig, environ={}), blocks=(BLOCK,))
    places = [LocalHost(supervisor(), rank, host.prefix) for rank, host in enumerate(cables)]
    pairs = Launches(places, settings)
    devices = [DevicePair(number, number) for number in range(3)]
    card_variables = [{"UCX_TLS": "tcp", "UCX_NET_DEVICES": f"card{number}"} for number in range(3)]
    try:
        yield pairs.between_devices("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), devices,
                                    variables=[(variables, variables) for variables in card_variables])  # fmt: skip
    finally:
        pairs.close()


def seated() -> list[tuple[GpuEnd, GpuEnd]]:
    """Return the GPUs of each link, each nearest to the card of its number."""
    gpu_nics = [GpuNics(number, (f"card{number}",), SWITCH, (f"card{number}",)) for number in range(3)]
    return [(replace(lane.initiator, near=near), lane.target) for lane, near in zip(LANES[:3], gpu_nics, strict=True)]


@pytest.mark.long
def test_each_pair_uses_its_own_network_card(links: list[Link], cables: tuple[Host, Host]) -> None:
    def sent() -> list[int]:
        return [cables[0].counter(f"card{number}", "tx_bytes") for number in range(3)]

    before = sent()
    samples = measure_at_once(links, BLOCK, 1)
    assert starving([sample.bandwidth for sample in samples]) is None
    assert [sample.corruption for sample in samples] == [None] * 3
    assert [sample.transports for sample in samples] == [(f"tcp/card{number}",) for number in range(3)]
    for sample, first, last in zip(samples, before, sent(), strict=True):
        assert last - first >= BLOCK * sum(sample.transfers)
    # All were timed for the same duration: none continues alone after the others have ended.
    assert {round(sum(sample.windows)) for sample in samples} <= {1, 2}


@pytest.fixture
def slow_card(cables: tuple[Host, Host]) -> Iterator[None]:
    """Let the third of the cards be ten times slower than the others."""
    cables[0].shape("card2", SLOW)
    yield
    cables[0].shape("card2", FAST)


@pytest.mark.long
@pytest.mark.usefixtures("slow_card")
def test_the_slowest_of_three_starves_if_its_card_is_slow(links: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_nixl.measure.link.BESIDE_SECONDS", 0.3)
    # This machine may be busy, which excuses a slow link.
    monkeypatch.setattr("pytest_nixl.judge.concurrent.DISTURBED_CORES", math.inf)
    judgement = measure_gpus("UCX WRITE DRAM:DRAM", links, seated(), BLOCK, 1, 0.01)
    assert judgement.verdict is Verdict.FAIL, judgement.reason
    assert "the slowest is GPU 2 (0000:20:00.0, NUMA node 0) to GPU 3 over tcp/card2, with 0.00" in judgement.reason
    assert "starves" in judgement.reason


@pytest.mark.long
def test_the_workers_of_links_measured_together_are_not_other_processes(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them keeps a core busy."""
    our_pids: dict[int, set[int]] = {}
    request = Worker.request

    def noted(worker: Worker, command: str, **arguments: Any) -> Pending:
        if command == "measure":
            our_pids[worker.pid] = {worker.pid, *arguments["own"]}
        return request(worker, command, **arguments)

    monkeypatch.setattr(Worker, "request", noted)
    monkeypatch.setattr("pytest_nixl.measure.link.BESIDE_SECONDS", 0.1)
    measure_at_once(links, BLOCK, 1)
    workers = {end.worker.pid for link in links for end in (link.initiator, link.target)}
    assert our_pids == dict.fromkeys((link.initiator.worker.pid for link in links), workers)


# The check on a rank without two GPUs


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables with which a process finds the stand-in for the driver."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "PYTHONPATH": TESTS}


@pytest.mark.long
def test_a_rank_without_two_gpus_is_reported_in_one_sentence(pytester: pytest.Pytester, driver: dict[str, str]) -> None:
    suite = str(ROOT / SUITE)
    result = run_pytest(pytester, suite, "--nixl-memory=VRAM:VRAM")
    result.stdout.fnmatch_lines(
        ["NOT-APPLICABLE gpus-together: VRAM:VRAM needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)"]
    )
    result = run_pytest(pytester, suite, "--nixl-memory=VRAM:VRAM", env={**driver, "STANDIN_GPUS": "1"})
    result.stdout.fnmatch_lines(["NOT-APPLICABLE gpus-together: *one GPU * Stand-in 0 0000:1a:00.0*"])
