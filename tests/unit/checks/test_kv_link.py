# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks with the real NIXL: every way to make them, every byte compared, and a corrupted block."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import pytest

from pytest_nixl.checks.kv_cache import link as kv_link
from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.link import MOST, MOST_AT_RATE, KvLink, KvTraffic
from pytest_nixl.checks.kv_cache.samples import STEPS
from pytest_nixl.core.cpu_contention import cpu_seconds
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import percentile
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

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


def test_lost_packets_are_counted_while_requests_are_timed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    link, done = connect("WRITE"), []
    verified, calls = link._verified, []

    def time_requests(phase: str, *arguments: Any) -> Any:
        done.append(phase)
        return verified(phase, *arguments)

    def compare(*arguments: Any) -> tuple[str, ...]:
        calls.append(arguments)
        return ("lossy",)

    # No host of these tests has RDMA.
    monkeypatch.setattr(kv_link, "loss_counters", lambda workers, before=None: {"a": list(done)})
    monkeypatch.setattr(link, "_verified", time_requests)
    monkeypatch.setattr(kv_link, "lossy_devices", compare)
    samples = link.measure(KvTraffic(16), duration=0.0, least=2)
    assert samples.lossy == cast(Any, ("lossy",))
    first, timed = "after the first request", "after the timed requests"
    assert calls == [({"a": [first]}, {"a": [first, timed]}, samples.transports, 2 * samples.request_bytes)]


def test_the_target_of_one_host_is_no_contention(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The initiator's worker knows its own pid; that of the target is its own too if both are on one host."""
    link = connect("WRITE")
    initiator, target = (end.worker for end in (link.initiator, link.target))
    request, excluded = initiator.request, []

    def record_request(command: str, **arguments: Any) -> Any:
        excluded.extend([arguments["own"]] if command == "kv_request" else [])
        return request(command, **arguments)

    monkeypatch.setattr(initiator, "request", record_request)
    link.measure(KvTraffic(16), duration=0.0, least=1)
    assert excluded
    assert {tuple(pids) for pids in excluded} == {(target.pid,)}
    excluded.clear()
    monkeypatch.setitem(target.versions, "host", "another")
    link.measure(KvTraffic(16), duration=0.0, least=1)
    assert {tuple(pids) for pids in excluded} == {()}


def test_a_gpu_that_others_use_before_or_after_the_requests_is_told(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, waits = connect("WRITE"), [1e-5, 2e-3, 3e-3, 1e-5, 0.0, 0.0]
    monkeypatch.setattr(link._launch, "kernel_seconds", lambda: waits.pop(0))
    launches = [link.measure(KvTraffic(16), duration=0.0, least=1) for _ in range(3)]
    assert [launch.gpu_waits for launch in launches] == [(2e-3,), (3e-3,), ()]
    assert launches[0].with_launch(launches[1]).row(ROW).gpu_waits == (2e-3, 3e-3)


@pytest.mark.long
def test_a_hundred_thousand_descriptors_are_verified(connect: Connect) -> None:
    layout = KvLayout(tensors=64, blocks=1600, block_bytes=512)
    samples = connect("WRITE", layout).measure(KvTraffic(1563), duration=0.0, least=1)
    assert samples.descriptors == 100_032
    assert samples.corruption is None


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[KvLink, Callable[[int], None]], None]:
    """Change the cache that receives blocks, through the kernel, whenever requests are over."""

    def plant(link: KvLink, fault: Callable[[int], None]) -> None:
        request = link._request

        def changed(*arguments: Any) -> dict[str, Any]:
            answer = request(*arguments)
            memory = os.open(f"/proc/{link.destination.worker.pid}/mem", os.O_RDWR)
            fault(memory)
            os.close(memory)
            return answer

        monkeypatch.setattr(link, "_request", changed)

    return plant


Change = Callable[[KvLink, Callable[[int], None]], None]


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_corrupted_byte_is_reported_with_layer_block_and_offset(connect: Connect, change: Change, op: str) -> None:
    link = connect(op)
    place = link.destination.address + LAYOUT.offset(5, 63) + 9
    change(link, lambda memory: _put(memory, place, bytes([os.pread(memory, 1, place)[0] ^ 0x40])))
    corruption = link.measure(KvTraffic(16), duration=0.0).corruption
    assert corruption is not None
    assert corruption.wrong_bytes == 1
    assert corruption.where == "layer 2 V, block 63, offset 9"
    assert corruption.holds == ""


#: Requests for every block of the cache in its order, so that each block has a known source.
ALL = KvTraffic(LAYOUT.blocks, BlockOrder.CONTIGUOUS)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_two_exchanged_blocks_are_reported_with_what_the_first_holds(connect: Connect, change: Change, op: str) -> None:
    link = connect(op)
    first_address, second_address = (link.destination.address + LAYOUT.offset(4, block) for block in (3, 9))

    def exchange(memory: int) -> None:
        first, second = (os.pread(memory, LAYOUT.block_bytes, place) for place in (first_address, second_address))
        _put(memory, first_address, second)
        _put(memory, second_address, first)

    change(link, exchange)
    corruption = link.measure(ALL, duration=0.0).corruption
    assert corruption is not None
    assert corruption.wrong_blocks == 2
    assert corruption.where.startswith("layer 2 K, block 3, offset ")
    assert corruption.holds == "it holds block 9 instead of block 3"


def test_a_block_that_did_not_arrive_is_reported_so(connect: Connect, change: Change) -> None:
    link = connect("WRITE")
    place = link.destination.address + LAYOUT.offset(0, 5)

    def undo(memory: int) -> None:
        _put(memory, place, bytes(byte ^ 0xFF for byte in os.pread(memory, LAYOUT.block_bytes, place)))

    change(link, undo)
    corruption = link.measure(ALL, duration=0.0).corruption
    assert corruption is not None
    assert corruption.where == "layer 0 K, block 5, offset 0"
    assert corruption.holds == "nothing arrived: it should hold block 5"


def _put(memory: int, place: int, data: bytes) -> None:
    assert os.pwrite(memory, data, place) == len(data)


def test_the_steps_of_a_request_are_its_duration(connect: Connect) -> None:
    samples = connect("WRITE").measure(KvTraffic(4), duration=0.0)
    for steps, whole in zip(samples.steps, samples.requests, strict=True):
        assert whole == pytest.approx(sum(steps) - steps[STEPS.index("release")])


#: Two pieces of 2 KiB for each block of the side with more heads. Blocks are counted in pieces: 2 of them are a block.
SPLIT = {
    "WRITE": KvLayout(tensors=8, blocks=128, block_bytes=2048, pieces=(2, 1)),
    "READ": KvLayout(tensors=8, blocks=128, block_bytes=2048, pieces=(1, 2)),
}


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("larger", ["initiator", "target"])
def test_pieces_of_blocks_move_between_different_tensor_parallel_sizes(connect: Connect, op: str, larger: str) -> None:
    layout = replace(SPLIT["WRITE"], pieces=(2, 1) if larger == "initiator" else (1, 2))
    link = connect(op, layout)
    for traffic in ROUTES:
        samples = link.measure(traffic, duration=0.0)
        assert samples.corruption is None, traffic
        assert samples.request_bytes == 16 * 8 * 2048


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_corrupted_piece_is_reported_with_the_block_that_it_is_in(connect: Connect, change: Change, op: str) -> None:
    layout = replace(SPLIT[op], pieces=(1, 2) if op == "WRITE" else (2, 1))  # the receiving side has larger blocks
    link = connect(op, layout)
    place = link.destination.address + layout.offset(5, 2 * 31 + 1) + 9
    change(link, lambda memory: _put(memory, place, bytes([os.pread(memory, 1, place)[0] ^ 0x40])))
    corruption = link.measure(KvTraffic(16), duration=0.0).corruption
    assert corruption is not None
    assert corruption.where == f"layer 2 V, block 31, offset {2048 + 9}"


def test_an_exchanged_piece_is_reported_with_the_piece_that_should_be_there(connect: Connect, change: Change) -> None:
    layout = SPLIT["WRITE"]  # the sending side has larger blocks, of which one piece goes to each block here
    link = connect("WRITE", layout)
    first_address, second_address = (link.destination.address + layout.offset(4, block) for block in (3, 9))

    def exchange(memory: int) -> None:
        first, second = (os.pread(memory, layout.block_bytes, place) for place in (first_address, second_address))
        _put(memory, first_address, second)
        _put(memory, second_address, first)

    change(link, exchange)
    corruption = link.measure(KvTraffic(64, BlockOrder.CONTIGUOUS), duration=0.0, least=1).corruption
    assert corruption is not None
    assert corruption.where.startswith("layer 2 K, block 3, offset ")
    assert re.fullmatch(r"it holds piece ([01]) of block 9 instead of piece \1 of block 3", corruption.holds)


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
    request, initiator, target = link._request, link.initiator.worker, link.target.worker
    stall, rate, continued, over = 0.8, 100.0, threading.Event(), threading.Event()

    def go_on(until: float) -> None:
        # The initiator polls while it waits, so that its processor time shows that its request was stalled.
        while cpu_seconds(initiator.pid) < until and not over.is_set():
            time.sleep(0.01)
        os.kill(target.pid, signal.SIGCONT)
        continued.set()

    def stalled(requests: Any, draws: Any, traffic: KvTraffic) -> dict[str, Any]:
        if len(draws) == 1:
            return request(requests, draws, traffic)
        os.kill(target.pid, signal.SIGSTOP)
        waiting = threading.Thread(target=go_on, args=(cpu_seconds(initiator.pid) + stall,))
        waiting.start()
        try:
            return request(requests, draws, traffic)
        finally:
            over.set()
            waiting.join()

    monkeypatch.setattr(link, "_request", stalled)
    samples = link.measure(KvTraffic(1, rate=rate), duration=2.0)
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


@pytest.mark.parametrize(
    ("op", "wrong", "where", "holds"),
    [
        ("WRITE", {}, "layer 1 K, block 5, offset 3", ""),
        ("READ", {}, "layer 1 K, block 5, offset 3", ""),
        ("WRITE", {"holds": 9, "source": 0}, "layer 1 K, block 5, offset 3", "it holds block 9 instead of block 0"),
        ("WRITE", {"holds": 0, "source": -1}, "layer 1 K, block 5, offset 3",
         "it holds block 0 but no request moved a block there"),
        ("WRITE", {"unchanged": True, "holds": 4, "source": 7}, "layer 1 K, block 5, offset 3",
         "nothing arrived: it should hold block 7"),
    ],
)  # fmt: skip
def test_a_corruption_is_told_by_layer_block_and_what_it_holds(
    op: str, wrong: dict[str, Any], where: str, holds: str
) -> None:
    answer = {
        "block": 5, "tensor": 2, "offset": 3, "unchanged": False, "holds": -1, "source": -1, "wrong_blocks": 2,
        "wrong_bytes": 6, "expected": 1, "found": 2, **wrong,
    }  # fmt: skip
    link = KvLink.__new__(KvLink)
    link._layout, link._op = KvLayout(tensors=4, blocks=16, block_bytes=64), op
    fault = link._corruption("after", answer)
    assert (fault.phase, fault.wrong_blocks, fault.wrong_bytes, fault.expected, fault.found) == ("after", 2, 6, 1, 2)
    assert (fault.where, fault.holds) == (where, holds)


def test_a_corrupted_piece_is_told_by_its_block() -> None:
    link = KvLink.__new__(KvLink)
    answer = {
        "block": 11, "tensor": 1, "offset": 3, "unchanged": False, "holds": 7, "source": 4, "wrong_blocks": 1,
        "wrong_bytes": 1, "expected": 1, "found": 2,
    }  # fmt: skip
    link._layout = KvLayout(tensors=4, blocks=16, block_bytes=64, pieces=(1, 4))
    link._op = "WRITE"  # the target has four pieces of each block
    fault = link._corruption("after", answer)
    assert (fault.where, fault.holds) == ("layer 0 V, block 2, offset 195", "it holds block 7 instead of block 4")
    link._op = "READ"
    fault = link._corruption("after", answer)
    assert fault.where == "layer 0 V, block 11, offset 3"
    assert fault.holds == "it holds piece 3 of block 1 instead of piece 0 of block 1"
