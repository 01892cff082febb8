# SPDX-License-Identifier: Apache-2.0
"""Links with the real NIXL: verified transfers for every batch, depth and operation, and correct measurements."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.measure import link as measure_link
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import (
    BESIDE_SECONDS,
    LONGEST_SECONDS,
    Link,
    loss_counters,
    obstacle_between,
    ucx_tls_of_ranks,
    usual_iterations,
    usual_warmup,
)
from pytest_nixl.model.device_counters import CarrierBytes
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import HUGE, RowKey, row_variant
from pytest_nixl.model.samples import Corruption, Samples
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.worker_errors import GpuFullError, NixlError, WorkerError, WorkerLateError
from pytest_nixl.processes.worker_process import Worker

DRAM = MemoryPair("DRAM", "DRAM")
WRONG = {"wrong_bytes": 1, "total_bytes": 4096, "offset": 3, "expected": 4, "found": 5}
MakePairs = Callable[..., Launches]


def link(pairs: Launches, op: str = "WRITE") -> Link:
    return pairs.link("UCX", op, DRAM)


#: Rows of the tests that share workers: block, batch and depth.
ROWS = [(1, 1, 1), (4096, 8, 1), (65536, 1, 4), (12345, 3, 5)]
BLOCKS, BATCHES, DEPTHS = (tuple(sorted(set(values))) for values in zip(*ROWS, strict=True))


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(("block", "batch", "depth"), ROWS)
def test_every_byte_arrives_and_is_compared(
    shared_pairs: MakePairs, op: str, block: int, batch: int, depth: int
) -> None:
    pairs = shared_pairs(blocks=BLOCKS, batch=BATCHES, depth=DEPTHS)
    samples = link(pairs, op).measure(block, batch=batch, depth=depth)
    assert samples.corruption is None
    assert str(samples.key).startswith(f"UCX/{op}/DRAM:DRAM/")
    assert samples.key.pair == (0, 1)
    assert samples.transfer_bytes == block * batch
    assert {transport.split("/")[0] for transport in samples.transports} <= {"cma", "posix", "sysv"}
    assert samples.transports
    assert samples.bandwidth > 0


def test_each_host_is_asked_once_what_its_devices_have_lost_and_not_again_if_it_has_none() -> None:
    hosts: list[str] = []

    def worker(host: str) -> Worker:
        def call(command: str) -> list[tuple[str, str, int]]:
            hosts.append(f"{command} {host}")
            return [("rxe0", "sent_pkts", len(hosts))] if host == "a" else []

        return cast(Worker, SimpleNamespace(versions={"host": host}, call=call))

    workers = [worker("a"), worker("b"), worker("a")]
    before = loss_counters(workers)
    assert before == {"a": [("rxe0", "sent_pkts", 1)], "b": []}
    assert loss_counters(workers, before) == {"a": [("rxe0", "sent_pkts", 3)]}
    assert hosts == ["loss_counters a", "loss_counters b", "loss_counters a"]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("pages", ["huge", "base"])
def test_the_kernel_is_asked_for_huge_pages_only_for_rows_that_have_them(shared_pairs: MakePairs, pages: str) -> None:
    one_link = link(shared_pairs(pages=pages, blocks=(4096,)), "WRITE")
    for agent, buffer in ((one_link.initiator, one_link.source), (one_link.target, one_link.destination)):
        maps = Path(f"/proc/{agent.worker.pid}/smaps").read_text()
        mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)+?VmFlags:(.*)$", maps, re.MULTILINE)
        [flags] = [flags for first, end, flags in mappings if int(first, 16) <= buffer.address < int(end, 16)]
        assert ("hg" in flags.split()) is (pages == "huge")


def test_default_iterations_move_160_mib_of_large_blocks_in_10_windows_at_least() -> None:
    assert [usual_iterations(size << 20) for size in (1, 2, 3, 16, 64)] == [1000, 80, 54, 10, 10]
    assert usual_iterations((1 << 20) + 1) == 160


def test_large_blocks_are_warmed_up_with_fewer_transfers() -> None:
    assert [usual_warmup(size << 20, 10) for size in (1, 16, 17, 32, 64, 320)] == [10, 10, 10, 5, 3, 1]


@pytest.mark.parametrize(
    ("hosts", "obstacles", "expected"),
    [
        ("aa", ("", ""), ""),
        ("aa", ("Yama", ""), "Yama"),
        ("aa", ("", "seccomp"), "seccomp"),
        ("aa", ("Yama", "seccomp"), "Yama"),
        ("ab", ("Yama", "seccomp"), ""),
    ],
)
def test_only_workers_of_one_host_have_an_obstacle(hosts: str, obstacles: tuple[str, str], expected: str) -> None:
    first, other = (
        SimpleNamespace(versions={"host": host, "obstacle": obstacle})
        for host, obstacle in zip(hosts, obstacles, strict=True)
    )
    assert obstacle_between(cast(Any, first), cast(Any, other)) == expected


@pytest.mark.parametrize(
    ("ranks", "values", "expected"),
    [
        ((0, 1), ("", "tcp"), (("rank 1 on b", "tcp"),)),
        ((0, 1), ("tcp", "tcp"), (("rank 0 on a", "tcp"), ("rank 1 on b", "tcp"))),
        ((0, 0), ("tcp", "tcp"), ()),
    ],
)
def test_each_of_two_ranks_that_sets_ucx_tls_is_known(
    ranks: tuple[int, int], values: tuple[str, str], expected: object
) -> None:
    first, other = (
        SimpleNamespace(rank=rank, versions={"host": host, **({"ucx_tls": value} if value else {})})
        for rank, host, value in zip(ranks, "ab", values, strict=True)
    )
    assert ucx_tls_of_ranks(cast(Any, first), cast(Any, other)) == expected


#: What an initiator says of ten windows of ten transfers.
MEASURED = {
    "windows": [0.01] * 10, "transfers": [10] * 10, "latencies": [0.001], "corruption": None, "counted": [],
    "contention": 0.7,
}  # fmt: skip


class KeptCalls:
    """A pair of workers that keeps what they are asked. It is a double, so that a worker fails when a test wants it.

    :ivar calls: the commands whose answers are waited for at once, with their arguments.
    :ivar log: all commands in order; a request with its rank, and what a buffer is filled or compared with.
    :ivar compared: the answers of comparisons, in order, then None.
    """

    def __init__(
        self, target: str = "DRAM", *, storage: bool = False, delivers: bool = True, nixl: str = "1.5.1",
        hosts: str = "aa",
    ) -> None:  # fmt: skip
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.log: list[object] = []
        self.sent: dict[str, dict[str, Any]] = {}
        self.beside_measure: dict[str, Any] = {}
        self.measured: dict[str, Any] = dict(MEASURED)
        self.compared: list[dict[str, int] | None] = []
        self.moved: list[dict[str, Any]] = []
        self.waits, self.mistaken = [1e-5, 2e-3], ""
        self.faults: dict[str, BaseException] = {}
        self.killed = False
        self.backend = SimpleNamespace(
            NAME="UCX", PLUGIN="plugin", STORAGE=storage, COMPLETION_IMPLIES_DELIVERY=delivers,
            transports=partial(self.read_log, "transports"), mistaken=partial(self.read_log, "mistaken"),
        )  # fmt: skip
        self.memory, self.capacity, self.shortage = MemoryPair("DRAM", target), 4096, None
        self.devices, self.agent_options = None, None
        self.initiator, self.target = (self._end(rank, host, nixl) for rank, host in enumerate(hosts))
        self.buffers = tuple(
            Buffer(end.worker, cast(Any, 10 + rank), rank, 4096, memory, 0)
            for rank, (end, memory) in enumerate(zip((self.initiator, self.target), ("DRAM", target), strict=True))
        )

    def read_log(self, method: str, *values: object) -> object:
        self.log.append((method, *values))
        return ("cma/memory",) if method == "transports" else self.mistaken

    def _end(self, rank: int, host: str, nixl: str) -> Any:
        versions = {"nixl": nixl, "nixl_package": "nixl-cu12", "host": host}
        worker = SimpleNamespace(
            rank=rank, pid=100 + rank, call=self.call, request=partial(self.request, rank), versions=versions,
            output=lambda: f"log of {rank}",
        )  # fmt: skip
        return SimpleNamespace(name=f"agent {rank}", ref=rank, worker=worker)

    def call(self, command: str, **values: Any) -> str:
        self.calls.append((command, values))
        self.log.append(command)
        if command in self.faults:
            raise self.faults[command]
        return command

    def request(self, rank: int, command: str, **values: Any) -> Any:
        parts = [part for [seed, _, size] in values.get("parts", ()) for part in (seed, size)]
        self.log.append((rank, command, *parts, *(["inverted"] if values.get("inverted") else [])))
        self.sent[command] = values
        if command == "measure":
            self.beside_measure = self.sent.get("serve", {})
        answers = {"compare": [self.compared.pop(0) if command == "compare" and self.compared else None]}
        moved = self.moved.pop(0) if command == "move_each" else None
        answer = {**answers, "measure": self.measured, "move_each": moved}.get(command)
        return SimpleNamespace(result=lambda: answer)

    def kernel_seconds(self) -> float:
        self.log.append("kernel")
        return self.waits.pop(0)

    def warmup_seconds(self) -> float:
        return 0.15

    def kill(self) -> None:
        self.killed = True

    def link(self, op: str = "WRITE", footprint: int = 0, notify: str = "last", **changes: Any) -> Link:
        row = RowKey("UCX", op, self.memory, 1, variant=row_variant((), footprint, notify, HUGE))
        usual: dict[str, Any] = {"timeout": 3.0, "iterations": None, "warmup": 7, "duration": 0.05, "sources": {}}
        return Link(cast(Any, None), cast(Any, self), row, cast(Any, SimpleNamespace(**{**usual, **changes})))


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests to such pairs be answered at once, and patterns have the seeds 1, 2, 3 …"""
    seeds = count(1)
    monkeypatch.setattr("secrets.randbits", lambda _: next(seeds))

    def results(pending: Sequence[Any], *, serving: Sequence[Any] = ()) -> list[Any]:
        return [request.result() for request in pending]

    monkeypatch.setattr(measure_link, "results", results)


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_measured_row_is_what_both_ends_did_and_said(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    hosts = "ab" if op == "WRITE" else "aa"
    pair, lossy = KeptCalls(hosts=hosts), list[object]()
    pair.initiator.worker.versions["obstacle"], pair.target.worker.versions["ucx_tls"] = "Yama", "tcp"

    def compare(*values: object) -> tuple[str, ...]:
        lossy.append(values)
        return ("lossy",)

    monkeypatch.setattr(measure_link, "lossy_devices", compare)
    monkeypatch.setattr(measure_link, "protocol", lambda *values: f"protocol of {values}")
    samples = pair.link(op).measure(256, batch=2, depth=4)
    source, destination = (0, 1) if op == "WRITE" else (1, 0)
    log = ("log of 0", op, pair.memory)
    assert pair.log == [
        "row_prepare",
        (source, "fill", 1, 2048), (destination, "fill", 1, 2048, "inverted"), (1, "serve"), (0, "move"),
        (source, "fill", 2, 2048), (destination, "compare", 1, 2048),
        "kernel", *["loss_counters"] * len({*hosts}), (1, "serve"), (0, "measure"), "kernel",
        *["loss_counters"] * len({*hosts}),
        (source, "fill", 3, 2048), (destination, "compare", 2, 2048), (destination, "fill", 3, 2048, "inverted"),
        (1, "serve"), (0, "move"), (destination, "compare", 3, 2048),
        "row_release", ("mistaken", *log), ("transports", "log of 0", op, 256, pair.memory),
    ]  # fmt: skip
    assert samples == Samples(
        key=RowKey("UCX", op, DRAM, 256, 2, 4, variant=row_variant((), 0, "last", HUGE)), windows=(0.01,) * 10,
        transfers=(10,) * 10, latencies=(0.001,), transports=("cma/memory",), counted=CarrierBytes((), 512 * 100),
        contention=(0.7,), protocol=f"protocol of {('log of 0', op, 256, pair.memory)}", hosts=tuple(hosts),
        obstacle="Yama" if hosts == "aa" else "", ucx_tls=((f"rank 1 on {hosts[1]}", "tcp"),), gpu_waits=(2e-3,),
        lossy=cast(Any, ("lossy",)),
    )  # fmt: skip
    counters = dict.fromkeys(hosts, "loss_counters")
    assert lossy == [(counters, counters, ("cma/memory",), 512 * 100)]


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(
    ("compared", "between", "phase", "moves"),
    [
        ([WRONG], None, "before the timed transfers", 1),
        ([WRONG, WRONG], WRONG, "before the timed transfers", 1),
        ([None, WRONG], WRONG, "between the timed transfers", 1),
        ([None, WRONG], None, "after the timed transfers", 1),
        ([None, None, WRONG], None, "in the transfers after the timed ones", 2),
        ([], None, "", 2),
    ],
)
def test_the_first_corruption_of_a_row_is_named_by_its_phase(
    compared: list[dict[str, int] | None], between: dict[str, int] | None, phase: str, moves: int
) -> None:
    pair = KeptCalls()
    pair.compared, pair.measured["corruption"], pair.mistaken = compared, between, "VRAM is host memory"
    if phase:
        assert pair.link().measure(256).corruption == Corruption(phase, **WRONG)
    else:
        with pytest.raises(FindingError, match="VRAM is host memory"):
            pair.link().measure(256)
    assert pair.log.count((0, "move")) == moves


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_the_first_corrupt_transfer_and_their_number_are_told(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(measure_link, "EACH_PER_COMMAND", 8)
    pair = KeptCalls()
    pair.moved = [
        {"corrupt": 0, "first": None}, {"corrupt": 2, "first": {"transfer": 3, **WRONG}},
        {"corrupt": 1, "first": {"transfer": 1, **WRONG}},
    ]  # fmt: skip
    corruption = pair.link(op).move_each(256, 20)
    assert corruption == Corruption("in transfer 11 (3 of 20 are corrupt)", **WRONG)
    source, destination = (0, 1) if op == "WRITE" else (1, 0)
    steps = [
        [(source, "fill", seed, 256), (destination, "fill", seed, 256, "inverted"), (1, "serve"), (0, "move_each")]
        for seed in (1, 2, 3)
    ]
    assert pair.log == ["row_prepare", *[step for part in steps for step in part], "row_release"]
    ends = [
        {"buffer": 10 + rank, "size": 256, "seed": 3, "receives": rank == destination, "new_patterns": True}
        for rank in range(2)
    ]
    assert [pair.sent["move_each"]["end"], pair.sent["serve"]["end"]] == ends
    assert pair.sent["move_each"]["count"] == 4
    pair.moved = [{"corrupt": 0, "first": None}]
    assert pair.link(op).move_each(256, 8) is None


SHORT = {"windows": [0.01] * 7, "transfers": [10] * 7}
TIMED = {
    "timeout": 3.05, "seconds": 8.05, "iterations": 1000, "warmup": 7, "warmup_seconds": 0.15, "duration": 0.05,
    "decisive_rate": None, "longest": LONGEST_SECONDS, "own": [101],
}  # fmt: skip
#: Of rows that are measured at the same time.
TOGETHER = {"iterations": 1, "warmup": 1, "duration": BESIDE_SECONDS, "timeout": 4.0, "seconds": 9.0}


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(
    ("pair", "row", "named", "expected", "between"),
    [
        ({}, {}, {}, {}, 256),
        ({}, {"op": "READ"}, {"clear_above": 1e6}, {"decisive_rate": 1e6 / 256}, 256),
        ({}, {}, {"batch": 4, "depth": 2, "clear_above": 1e6}, {"decisive_rate": 1e6 / 1024}, 2048),
        ({}, {"iterations": 30}, {"clear_above": 1e6}, {"iterations": 30, "longest": None}, 256),
        ({}, {"duration": 0.08}, {"clear_above": 1e6}, {"duration": 0.08, "timeout": 3.08, "seconds": 8.08}, 256),
        ({}, {"footprint": 1024}, {"clear_above": 1e6}, {}, None),
        ({"storage": True}, {}, {"clear_above": 1e6}, {"decisive_rate": 1e6 / 256}, None),
        ({"target": "OBJ", "storage": True}, {}, {}, {"iterations": 10}, None),
        ({}, {"iterations": 3}, {"beside": True, "clear_above": 1e6}, {**TOGETHER, "longest": None}, None),
        ({}, {"warmup": 0, "duration": 9.0}, {"beside": True},
         {**TOGETHER, "warmup": 0, "duration": 9.0, "timeout": 12.0, "seconds": 17.0}, None),
        ({"hosts": "ab"}, {}, {}, {"own": []}, 256),
        ({}, {}, {"links": ["aa", "ba", "bb"]}, {"own": [101, 100, 101, 101]}, 256),
    ],
)  # fmt: skip
def test_a_row_is_timed_as_the_settings_and_its_neighbours_say(
    pair: dict[str, Any], row: dict[str, Any], named: dict[str, Any], expected: dict[str, Any], between: int | None
) -> None:
    """Rows together are measured by time alone: their transfers are not counted, so that all move bytes all the time.

    ``between``: the bytes that both ends compare and overwrite between the windows; None: they do not.
    """
    calls = KeptCalls(**pair)
    if "beside" in named:
        named = {**named, "beside": lambda: calls.log.append("beside")}
    if "links" in named:
        named = {**named, "links": [KeptCalls(hosts=hosts).link() for hosts in named["links"]]}
    calls.measured |= SHORT
    samples = calls.link(**row).measure(256, **named)
    ends = [
        {"buffer": 10 + rank, "size": between, "seed": 2, "receives": rank is receiver, "new_patterns": False}
        for receiver in [int(row.get("op") != "READ")]
        for rank in range(2)
    ]
    timed = {**TIMED, **expected}
    sent = {"transfers": "row_prepare", "op": row.get("op", "WRITE"), **timed}
    assert calls.sent["measure"] == {**sent, **({"end": ends[0]} if between else {})}
    served = {"agent": 1, "timeout": timed["timeout"], "seconds": timed["seconds"]}
    if "storage" not in pair:
        assert calls.beside_measure == {**served, **({"end": ends[1]} if between else {})}
    assert samples.contention == (0.0,), "a few windows that agree were not disturbed"
    assert samples.gpu_waits == (() if "beside" in named else (2e-3,)), "of rows together: the others use the GPU"
    assert ((1, "serve") in calls.log) is not ("storage" in pair)
    if "beside" in named:
        assert calls.log.index("beside") < calls.log.index("loss_counters") < calls.log.index((0, "measure"))


@pytest.mark.usefixtures("answered")
@pytest.mark.parametrize(
    ("block", "size", "source", "changes"),
    [
        (64 << 20, 1 << 20, "default", {"warmup": 3, "iterations": 10}),
        (64 << 20, 1 << 20, "--nixl-warmup", {"warmup": 7, "iterations": 10}),
        (2 << 20, 1 << 20, "default", {"iterations": 80}),
        (1 << 19, 1 << 19, "default", {}),
    ],
)
def test_large_blocks_need_fewer_transfers_and_are_compared_in_part(
    block: int, size: int, source: str, changes: dict[str, int]
) -> None:
    calls = KeptCalls()
    calls.capacity = 1 << 30
    calls.measured |= {"windows": [0.05] * 2, "transfers": [5] * 2}
    samples = calls.link(sources={"warmup": source}).measure(block)
    sent = calls.sent["measure"]
    assert {name: sent[name] for name in ("warmup", "iterations")} == {"warmup": 7, "iterations": 1000, **changes}
    assert sent["end"]["size"] == size
    assert samples.contention == (0.7,), "long windows"


@pytest.mark.parametrize(
    ("pair", "row", "notify_each", "announced"),
    [
        ({}, {}, False, False),
        # Of those that walk a footprint, only the last of a window has a notification.
        ({}, {"footprint": 4096}, False, False),
        ({}, {"footprint": 4096, "notify": "each"}, True, False),
        ({}, {"footprint": 4096, "notify": "each", "op": "READ"}, True, False),
        ({"storage": True}, {"footprint": 4096}, False, False),
        # With a backend whose DONE means posted, only a notification proves that a WRITE has arrived.
        ({"delivers": False}, {"footprint": 4096}, True, False),
        ({"delivers": False}, {"footprint": 4096, "op": "READ"}, False, False),
        ({"delivers": False, "nixl": "0.9.0"}, {}, True, True),
        ({"nixl": "0.9.0"}, {}, False, False),
    ],
)
def test_transfers_are_prepared_with_the_notifications_that_their_row_and_backend_need(
    pair: dict[str, Any], row: dict[str, Any], notify_each: bool, announced: bool
) -> None:
    calls = KeptCalls(**pair)
    with calls.link(**row)._transfers(256, 2, 3) as transfers:
        pass
    assert transfers == cast(Any, "row_prepare")
    [(_, prepared), (released, freed)] = calls.calls
    assert (prepared["count"], prepared["depth"]) == (8 if "footprint" in row else 3, 3)
    assert (prepared["notify_each"], prepared["announced"]) == (notify_each, announced)
    acknowledged = "storage" not in pair and (row.get("op") != "READ" or row.get("notify") == "each")
    assert prepared["acknowledged"] is acknowledged
    assert (prepared["op"], prepared["target"], prepared["plugin"]) == (row.get("op", "WRITE"), "agent 1", "plugin")
    assert prepared["sides"] == [[0, "DRAM", 0], [1, "DRAM", 0]]
    assert (prepared["block"], prepared["batch"], prepared["agent"], prepared["objects"]) == (256, 2, 0, None)
    assert prepared["storage"] == (11 if "storage" in pair else None)
    assert (released, freed["transfers"], calls.killed) == ("row_release", "row_prepare", False)


@pytest.mark.parametrize(
    ("size", "footprint", "shortage", "message"),
    [
        (2048, 0, None, ""),
        (
            2049, 0, None, "2 transfers of 2049 bytes do not fit into this link's buffers of 4096 bytes\n"
            "remedy: add the block size to --nixl-blocks, and the batch and depth to --nixl-batch and --nixl-depth",
        ),
        (
            2049, 0, GpuFullError("GPU 0 is full", "end others"),
            "GPU 0 is full: this row needs 4098 bytes at each end, and the ends have 4096\nremedy: end others",
        ),
        (512, 1024, None, ""),
        (
            513, 1024, None, "2 transfers of 513 bytes do not fit into the footprint of 1024 bytes\n"
            "remedy: give a larger --nixl-footprint",
        ),
    ],
)  # fmt: skip
def test_a_row_fits_into_buffers_and_footprint_or_is_refused(
    size: int, footprint: int, shortage: Any, message: str
) -> None:
    calls = KeptCalls()
    calls.shortage = shortage
    one_link = calls.link(footprint=footprint)
    if message:
        with pytest.raises(NixlPluginError) as caught, one_link._transfers(size, 1, 2):
            pass
        assert str(caught.value) == message
        assert (calls.calls, calls.killed) == ([], False)
    else:
        with one_link._transfers(size, 1, 2):
            pass


@pytest.mark.parametrize("step", ["row_prepare", "within", "row_release"])
@pytest.mark.parametrize(
    "error", [NixlError("refused", "", "", "nixlBackendError"), WorkerLateError("late"), KeyboardInterrupt()], ids=repr
)
def test_a_failure_ends_both_workers(step: str, error: BaseException) -> None:
    calls = KeptCalls()
    calls.faults[step] = error
    with pytest.raises(type(error)) as caught, calls.link()._transfers(256, 1, 1):
        calls.call("within")
    assert caught.value is error
    assert calls.killed


def test_a_failure_names_the_release_of_each_rank() -> None:
    calls = KeptCalls()
    calls.target.worker.versions = {**calls.target.worker.versions, "nixl": "1.4.0"}
    calls.faults["row_prepare"] = NixlError("refused", "", "", "nixlBackendError")
    with pytest.raises(NixlError, match=r"; rank 0 has nixl-cu12 1.5.1 and rank 1 has nixl-cu12 1.4.0,"):
        calls.link().move(256)


def test_objects_are_registered_for_a_row_and_deleted_after_it() -> None:
    calls = KeptCalls("OBJ", storage=True)
    with calls.link()._transfers(256, 2, 3):
        assert calls.calls[0] == ("prepare_objects", {"agent": 1, "buffer": 11, "block": 256, "count": 6})
        assert calls.calls[1][1]["objects"] == 11
    assert [command for command, _ in calls.calls] == [
        "prepare_objects",
        "row_prepare",
        "row_release",
        "prepare_objects",
    ]
    assert [calls.calls[-1][1][name] for name in ("block", "count")] == [0, 0]


def test_an_object_store_that_does_not_answer_is_named_and_one_that_does_is_cleaned() -> None:
    calls = KeptCalls("OBJ", storage=True)
    calls.faults["row_prepare"] = NixlError("refused", "", "detail", "nixlBackendError")
    with pytest.raises(NixlError, match=r"^refused"), calls.link()._transfers(256, 1, 1):
        pass
    commands = [(command, arguments["buffer"], arguments.get("count")) for command, arguments in calls.calls[2:]]
    assert commands == [("probe_objects", 11, None), ("prepare_objects", 11, 0)]
    assert calls.killed
    calls.killed, calls.faults["probe_objects"] = False, WorkerError("the server is down", "start it")
    with pytest.raises(WorkerError, match=r"^the server is down; refused\n") as caught:
        with calls.link()._transfers(256, 1, 1):
            pass
    assert (caught.value.remedy, caught.value.detail, calls.killed) == ("start it", "detail", True)


class _Launches(tuple[int, ...]):
    """Samples that keep only the number of each of their launches."""

    def with_launch(self, other: tuple[int, ...]) -> _Launches:
        return _Launches((*self, *other))


@pytest.mark.parametrize("launches", [1, 3])
def test_a_row_is_launched_until_no_launch_is_wanted(monkeypatch: pytest.MonkeyPatch, launches: int) -> None:
    log: list[object] = []
    one_link = KeptCalls().link()

    def measure(self: Link, block: int, **values: float) -> _Launches:
        log.append((block, values))
        return _Launches([log.count("relaunch")])

    monkeypatch.setattr(Link, "measure", measure)
    monkeypatch.setattr(Link, "relaunch", lambda _: log.append("relaunch"))
    rows = one_link.measure_launches(
        256, batch=2, depth=3, another=lambda samples: len(cast(Any, samples)) < launches, clear_above=1e9
    )
    assert rows == cast(Any, tuple(range(launches)))
    first, measured = (256, {"batch": 2, "depth": 3, "clear_above": 1e9}), (256, {"batch": 2, "depth": 3})
    assert log == [first, *["relaunch", measured] * (launches - 1)], "only the first launch may end early"
    log.clear()
    one_link.measure_launches(256, another=lambda _: False)
    assert log == [(256, {"batch": 1, "depth": 1, "clear_above": None})]
