# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks with the real NIXL: every way to make them, every byte compared, and a corrupted block."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.kv_cache import link as kv_link
from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.link import MOST, MOST_AT_RATE, KvLink, KvTraffic
from pytest_nixl.checks.kv_cache.samples import RequestTimes
from pytest_nixl.core.cpu_contention import cpu_seconds
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.device_counters import LossyDevice
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import percentile
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError

LAYOUT = KvLayout(tensors=8, blocks=64, block_bytes=4096)
HOST = MemoryPair("DRAM", "DRAM")
ROW = RowKey.parse("UCX/WRITE/DRAM:DRAM/4KiB/batch128/depth1/0-1/kv=scattered-prepped,model=generic,tokens=64")
#: The ways in which a request is made.
ROUTES = [
    KvTraffic(16, BlockOrder.CONTIGUOUS),
    KvTraffic(16, BlockOrder.CONTIGUOUS, merge=False),
    KvTraffic(16),
    KvTraffic(16, method=KvMethod.INITIALIZED),
    KvTraffic(16, method=KvMethod.STRIDED),
    KvTraffic(16, BlockOrder.REPEATED),
]

Connect = Callable[..., KvLink]


@pytest.fixture(scope="module")
def connect(make_settings: Callable[..., Settings]) -> Iterator[Connect]:
    """Connect two workers with caches of a layout. Tests with caches of the same size have the same workers."""
    with ExitStack() as ended:
        pairs: dict[tuple[int, int], Launch] = {}
        settings = make_settings()

        def make(op: str, layout: KvLayout = LAYOUT) -> KvLink:
            pair = pairs.get((layout.size, layout.tensors))
            if pair is None or not pair.healthy:
                places = LocalHost(supervisor(), 0), LocalHost(supervisor(), 1)
                pair = Launch(places, settings, BACKENDS["UCX"], HOST, layout.size, regions=layout.tensors)
                pairs[layout.size, layout.tensors] = pair
                ended.callback(pair.close)
            return KvLink(pair, layout, op, settings.timeout)

        yield make


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_every_kind_of_request_moves_the_right_blocks(connect: Connect, op: str) -> None:
    link = connect(op)
    for traffic in ROUTES:
        samples = link.measure(traffic, duration=0.02)
        assert samples.corruption is None, traffic
        assert samples.descriptors == 16 * 8
        assert samples.request_bytes == 16 * 8 * 4096
        assert len(samples.steps) >= 10
        assert all(seconds > 0 for steps in samples.steps for seconds in steps)
        assert samples.bandwidth > 0
        assert samples.transports
        assert (samples.prepare > 0) == (traffic.method is not KvMethod.INITIALIZED)
        assert samples.step("post") <= samples.step("post", 99)


@pytest.mark.long
def test_a_hundred_thousand_descriptors_are_verified(connect: Connect) -> None:
    layout = KvLayout(tensors=64, blocks=1600, block_bytes=512)
    samples = connect("WRITE", layout).measure(KvTraffic(1563), duration=0.0, least=1)
    assert samples.descriptors == 100_032
    assert samples.corruption is None


#: Blocks are counted in pieces of 2 KiB: 2 of them are a block of the side with more heads.
SPLIT = KvLayout(tensors=8, blocks=128, block_bytes=2048)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("larger", ["initiator", "target"])
def test_pieces_of_blocks_move_between_different_tensor_parallel_sizes(connect: Connect, op: str, larger: str) -> None:
    layout = replace(SPLIT, pieces=(2, 1) if larger == "initiator" else (1, 2))
    link = connect(op, layout)
    for traffic in ROUTES:
        samples = link.measure(traffic, duration=0.0)
        assert samples.corruption is None, traffic
        assert samples.request_bytes == 16 * 8 * 2048


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_requests_in_flight_at_the_same_time_move_the_right_blocks(connect: Connect, op: str) -> None:
    link = connect(op, replace(LAYOUT, blocks=4 * 64, ranges=4))
    for traffic in ROUTES:
        samples = link.measure(replace(traffic, in_flight=4), duration=0.0)
        assert samples.corruption is None, traffic
        [launch] = samples.timed
        assert len(launch) == 32
        assert not samples.alone
        starts, ends = [times.start for times in launch], [times.notified for times in launch]
        assert starts == sorted(starts)
        assert any(start < end for start, end in zip(starts[1:], ends, strict=False)), "some were in flight together"
        assert samples.bandwidth == pytest.approx(samples.request_bytes * 32 / (max(ends) - min(starts)))


@pytest.mark.long
def test_a_stall_of_the_target_is_not_hidden_from_the_latency(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped target delays one request, and in an open loop all those that should have started meanwhile."""
    link = connect("READ")
    initiator, target = link.initiator.worker, link.target.worker
    request, stall, rate, continued, over = initiator.request, 0.8, 100.0, threading.Event(), threading.Event()

    def go_on(until: float) -> None:
        # The initiator polls while it waits, so that its processor time shows that its request was stalled.
        while cpu_seconds(initiator.pid) < until and not over.is_set():
            time.sleep(0.01)
        os.kill(target.pid, signal.SIGCONT)
        continued.set()

    def stalled(command: str, **arguments: Any) -> Any:
        if command == "kv_request" and len(arguments["draws"]) > 1:
            os.kill(target.pid, signal.SIGSTOP)
            threading.Thread(target=go_on, args=(cpu_seconds(initiator.pid) + stall,)).start()
        return request(command, **arguments)

    monkeypatch.setattr(initiator, "request", stalled)
    try:
        samples = link.measure(KvTraffic(1, rate=rate), duration=2.0)
    finally:
        over.set()
    assert continued.is_set()
    assert samples.corruption is None
    [launch] = samples.timed
    assert len(launch) == 201
    assert [times.intended for times in launch] == [pytest.approx(number / rate) for number in range(201)]
    # The first request waits for the whole stall; the others should have started meanwhile, and did not.
    assert percentile(samples.requests, 99) > stall / 2
    late = sum(times.latency > stall / 2 for times in launch)
    # Half of those that should have started in the first half of the stall: a busy machine starts the first one late.
    assert late >= stall / 4 * rate
    # By their own steps only those in flight were late, so that percentiles of the steps would hide the stall.
    assert 1 <= sum(sum(times.steps) > stall / 2 for times in launch) < late / 4


@pytest.mark.parametrize(
    ("kind", "seconds", "duration", "least", "count"),
    [
        (KvTraffic(2), 0.5, 8.0, 3, 17),  # as many as the duration has room for, and one more
        (KvTraffic(2), 0.5, 8.0, 20, 20),
        (KvTraffic(2), 2.0, 1.0, 1, 1),
        (KvTraffic(2), 1e-9, 1.0, 3, MOST),
        (KvTraffic(2), 1e-9, 1.0, MOST + 1, MOST + 1),
        (KvTraffic(2, in_flight=4), 0.5, 8.0, 3, 32),  # eight for each that is in flight
        (KvTraffic(2, in_flight=2), 0.5, 8.0, 3, 17),
        (KvTraffic(2, in_flight=2), 0.5, 0.0, 3, 16),
        (KvTraffic(2, in_flight=4), 0.5, 8.0, 40, 40),
        (KvTraffic(2, rate=4.0), 0.001, 8.0, 3, 33),  # the rate decides, and not the time of one
        (KvTraffic(2, rate=4.0), 0.001, 8.0, 50, 50),
        (KvTraffic(2, rate=1e9), 0.001, 8.0, 3, MOST_AT_RATE),
    ],
)
def test_as_many_requests_are_timed_as_the_duration_has_room_for(
    kind: KvTraffic, seconds: float, duration: float, least: int, count: int
) -> None:
    assert kind.count(seconds, duration, least) == count


def test_a_kind_of_request_is_named_by_what_differs() -> None:
    assert str(KvTraffic(2)) == "scattered-prepped"
    assert str(KvTraffic(2, BlockOrder.CONTIGUOUS)) == "contiguous-prepped-merged"
    assert str(KvTraffic(2, BlockOrder.CONTIGUOUS, merge=False)) == "contiguous-prepped-unmerged"


#: What a worker says of the first wrong block, unless a row says something else.
WRONG = {
    "block": 11, "tensor": 2, "offset": 3, "unchanged": False, "holds": -1, "source": -1, "wrong_blocks": 2,
    "wrong_bytes": 6, "expected": 1, "found": 2,
}  # fmt: skip


class ToldWorkers:
    """A launch of two workers that answer at once, and keep what they are asked. A double: real ones are above.

    :param wrong: what each comparison finds, in turn.
    """

    def __init__(self, backend: str, target: str, wrong: Sequence[dict[str, Any] | None], ranges: int) -> None:
        self.backend, self.memory = BACKENDS[backend], MemoryPair("DRAM", target)
        self.log: list[tuple[Any, ...]] = []
        self.killed, self.kernel_waits = 0, iter([1e-3, 2e-3])
        self._wrong, self._ranges = iter(wrong), ranges
        self.initiator, self.target = (
            SimpleNamespace(name=name, ref=f"ref of {name}", worker=self._worker(name)) for name in ("one", "other")
        )
        ends = ((self.initiator, 4096, "DRAM", 0), (self.target, 8192, target, 3))
        self.buffers = [
            SimpleNamespace(address=address, memory=kind, device=device, ref=f"buffer of {end.name}", worker=end.worker)
            for end, address, kind, device in ends
        ]

    def _worker(self, name: str) -> Any:
        versions = {"host": "node-a", "obstacle": "" if name == "one" else "no ptrace"}

        def call(command: str, **arguments: Any) -> Any:
            self.log.append((name, command, arguments))
            if command == "kv_request":
                times = [
                    {"intended": float(number), "start": 0.5, "steps": [0.1] * 5, "range": number % self._ranges}
                    for number in range(len(arguments["draws"]))
                ]
                counted = [["mlx5_0", "rdma", 640, None]]
                return {"times": times, "seconds": 0.5, "counted": counted, "contention": 0.75}
            if command == "kv_compare":
                return next(self._wrong, None)
            return {"requests": "prepared", "seconds": 0.25} if command == "kv_prepare" else None

        return SimpleNamespace(
            name=name, rank=7, pid=70 if name == "one" else 71, versions=versions, call=call, output=lambda: "the log",
            request=lambda command, **arguments: (call, command, arguments),
        )  # fmt: skip

    def kernel_seconds(self) -> float:
        self.log.append(("gpu", "kernel_seconds", {}))
        return next(self.kernel_waits)

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def link_of_doubles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ToldWorkers, KvLink]]:
    """Make a link of doubles."""
    counters = iter(({"node-a": "before"}, {"node-a": "after"}))

    def make(
        op: str = "WRITE", layout: KvLayout = SMALL, *, backend: str = "UCX", target: str = "DRAM",
        wrong: Sequence[dict[str, Any] | None] = (),
    ) -> tuple[ToldWorkers, KvLink]:  # fmt: skip
        workers = ToldWorkers(backend, target, wrong, layout.ranges)

        def wait(pending: Sequence[Any], *, serving: Sequence[Any] = ()) -> list[Any]:
            workers.log.append(("pytest", "wait", {"serving": [command for _, command, _ in serving]}))
            return [call(command, **arguments) for call, command, arguments in pending]

        def count(ends: Sequence[Any], before: Any = None) -> dict[str, str]:
            workers.log.append(("pytest", "loss_counters", {"ends": [end.name for end in ends], "before": before}))
            return next(counters)

        monkeypatch.setattr(kv_link, "results", wait)
        monkeypatch.setattr(kv_link, "loss_counters", count)
        return workers, KvLink(cast(Launch, workers), layout, op, 30.0)

    return make


SMALL = KvLayout(tensors=2, blocks=16, block_bytes=64, ranges=2)
FIRST, TIMED = "after the first request", "after the timed requests"


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(("backend", "target"), [("UCX", "DRAM"), ("POSIX", "FILE"), ("OBJ", "OBJ")])
def test_caches_are_filled_requested_and_compared_in_order(
    link_of_doubles: Callable[..., tuple[ToldWorkers, KvLink]],
    op: str,
    backend: str,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, link = link_of_doubles(op, backend=backend, target=target)
    lossy = MagicMock(return_value=(LossyDevice("node-a", "rxe0", 100, {"rcvd_seq_err": 1}),))
    monkeypatch.setattr(kv_link, "lossy_devices", lossy)
    traffic = KvTraffic(3, BlockOrder.CONTIGUOUS, merge=False, in_flight=2, rate=4.0)
    samples = link.measure(traffic, duration=0.25, least=2)
    stored, objects = backend != "UCX", backend == "OBJ"
    source, destination = ("one", "other") if op == "WRITE" else ("other", "one")
    around = [("other", "prepare_objects")] * objects
    served = [("pytest", "wait")]
    fill = [*served, (source, "kv_fill"), *served * stored, (destination, "kv_fill")]
    fill = fill if stored else [("pytest", "wait"), (source, "kv_fill"), (destination, "kv_fill")]
    verification = [*fill, ("pytest", "wait"), ("one", "kv_request"), (destination, "kv_compare")]
    assert [step[:2] for step in workers.log] == [
        *around, ("one", "kv_prepare"), *verification, ("gpu", "kernel_seconds"), ("pytest", "loss_counters"),
        *verification, ("pytest", "loss_counters"), ("gpu", "kernel_seconds"), ("one", "kv_release"),
        ("one", "forget"), *around,
    ]  # fmt: skip
    calls: dict[str, list[dict[str, Any]]] = {}
    for _, command, arguments in workers.log:
        calls.setdefault(command, []).append(arguments)
    plain = asdict(SMALL)
    assert calls["kv_prepare"] == [
        {
            "agent": "ref of one", "target": "other", "op": op, "plugin": BACKENDS[backend].PLUGIN, "layout": plain,
            "sides": [[4096, "DRAM", 0], [8192, target, 3]], "method": "prepped", "merge": False,
            "storage": "buffer of other" if stored else None,
        }
    ]  # fmt: skip
    assert calls.get("prepare_objects", []) == [
        {"seconds": 300.0, "agent": "ref of other", "buffer": "buffer of other", "block": 64, "count": count}
        for count in (32, 0) * objects
    ]
    seeds = [arguments["seed"] for arguments in calls["kv_compare"]]
    assert calls["kv_fill"] == [
        {"buffer": f"buffer of {end}", "layout": plain, "seed": seed, "inverted": end == destination}
        for seed in seeds
        for end in (source, destination)
    ]
    for request, compared, count, in_flight, interval in zip(
        calls["kv_request"], calls["kv_compare"], (1, 2), (1, 2), (0.0, 0.25), strict=True
    ):
        draws = request.pop("draws")
        assert request == {
            "seconds": 30.0 * count + 5, "requests": "prepared", "timeout": 30.0, "own": [71], "op": op,
            "in_flight": in_flight, "interval": interval,
        }  # fmt: skip
        assert [{**draw, "seed": 0} for draw in draws] == [
            {"count": 3, "order": "contiguous", "seed": 0, "sender": int(op == "READ")}
        ] * count
        made_draws = [{**draw, "range": number} for number, draw in enumerate(draws)]
        assert {**compared, "seed": 0} == {
            "seconds": 30.0, "buffer": f"buffer of {destination}", "layout": plain, "seed": 0, "draws": made_draws,
            "initiator": op == "READ",
        }  # fmt: skip
    assert len({*seeds, *(draw["seed"] for compared in calls["kv_compare"] for draw in compared["draws"])}) == 5
    assert {tuple(step["serving"]) for step in calls["wait"]} == ({()} if stored else {(), ("serve",)})
    assert calls["loss_counters"] == [
        {"ends": ["other", "one"], "before": None}, {"ends": ["other", "one"], "before": {"node-a": "before"}},
    ]  # fmt: skip
    assert (calls["kv_release"], calls["forget"]) == ([{"requests": "prepared"}], [{"objects": ["prepared"]}])
    lossy.assert_called_once_with(
        {"node-a": "before"}, {"node-a": "after"}, samples.transports, 2 * samples.request_bytes
    )
    times = tuple(RequestTimes(float(number), 0.5, (0.1,) * 5) for number in range(2))
    assert (samples.order, samples.request_bytes, samples.descriptors) == (BlockOrder.CONTIGUOUS, 6 * 64, 6)
    assert (samples.prepares, samples.timed, samples.alone) == ((0.25,), (times,), False)
    assert (samples.corruption, samples.contention, samples.gpu_waits) == (None, (0.75,), (2e-3,))
    assert (samples.obstacle, samples.lossy, samples.counted.payload) == (
        "no ptrace", lossy.return_value, 2 * 6 * 64,
    )  # fmt: skip
    assert workers.killed == 0


def test_a_target_of_another_host_is_contention_there_and_no_wait_is_none(
    link_of_doubles: Callable[..., tuple[ToldWorkers, KvLink]],
) -> None:
    workers, link = link_of_doubles()
    workers.target.worker.versions["host"], workers.kernel_waits = "node-b", iter([0.0, 0.0])
    samples = link.measure(KvTraffic(3), duration=0.0, least=1)
    owned = [arguments["own"] for _, command, arguments in workers.log if command == "kv_request"]
    assert (owned, samples.gpu_waits, samples.obstacle, samples.alone) == ([[], []], (), "", True)


LARGER = replace(SMALL, pieces=(1, 4))


@pytest.mark.parametrize(
    ("op", "layout", "wrong", "phase", "where", "holds"),
    [
        ("WRITE", SMALL, ({}, {"tensor": 3}), FIRST, "layer 1 K, block 11, offset 3", ""),
        ("READ", SMALL, (None, {}), TIMED, "layer 1 K, block 11, offset 3", ""),
        ("WRITE", SMALL, ({"holds": 9, "source": 0},), FIRST, "layer 1 K, block 11, offset 3",
         "it holds block 9 instead of block 0"),
        ("WRITE", SMALL, ({"holds": 0},), FIRST, "layer 1 K, block 11, offset 3",
         "it holds block 0 but no request moved a block there"),
        ("WRITE", SMALL, ({"unchanged": True, "holds": 4, "source": 7},), FIRST, "layer 1 K, block 11, offset 3",
         "nothing arrived: it should hold block 7"),
        # The target has four pieces of each block.
        ("WRITE", LARGER, ({"holds": 7, "source": 4},), FIRST, f"layer 1 K, block 2, offset {3 * 64 + 3}",
         "it holds block 7 instead of block 4"),
        ("READ", LARGER, ({"holds": 7, "source": 4},), FIRST, "layer 1 K, block 11, offset 3",
         "it holds piece 3 of block 1 instead of piece 0 of block 1"),
    ],
)  # fmt: skip
def test_the_first_corruption_is_told_by_layer_block_and_what_it_holds(
    link_of_doubles: Callable[..., tuple[ToldWorkers, KvLink]],
    op: str,
    layout: KvLayout,
    wrong: Sequence[dict[str, Any] | None],
    phase: str,
    where: str,
    holds: str,
) -> None:
    _, link = link_of_doubles(
        op, layout, wrong=[None if changes is None else {**WRONG, **changes} for changes in wrong]
    )
    corruption = link.measure(KvTraffic(2), duration=0.0, least=1).corruption
    assert corruption == KvCorruption(phase, 2, 6, where, 1, 2, holds)


@pytest.mark.parametrize("ranges", [[0], [0, 2], [2, 0], [0, 1, 0]])
def test_a_worker_that_tells_of_other_requests_ends_both(
    link_of_doubles: Callable[..., tuple[ToldWorkers, KvLink]], ranges: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, link = link_of_doubles()
    request = workers.initiator.worker.request

    def answer_wrongly(command: str, **arguments: Any) -> Any:
        call, *step = request(command, **arguments)
        if command != "kv_request" or len(arguments["draws"]) == 1:
            return call, *step

        def told_otherwise(command: str, **arguments: Any) -> Any:
            answer = call(command, **arguments)
            return {**answer, "times": [{**answer["times"][0], "range": part} for part in ranges]}

        return told_otherwise, *step

    monkeypatch.setattr(workers.initiator.worker, "request", answer_wrongly)
    with pytest.raises(WorkerError, match=r"^rank 7 did not report the times of 2 requests"):
        link.measure(KvTraffic(2), duration=0.0, least=2)
    assert workers.killed == 1
