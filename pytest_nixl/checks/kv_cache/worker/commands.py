# SPDX-License-Identifier: Apache-2.0
"""The commands of a worker about KV caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypedDict, cast

from pytest_nixl.checks.kv_cache.blocks import BlockDraw, BlockOrder, KvLayout, KvMethod, draw
from pytest_nixl.core.cpu_contention import CpuContention
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.strict import Number, RefTo
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.device_counters import CarrierBytes
from pytest_nixl.model.worker_commands import (
    AgentRef,
    BufferRef,
    Byte,
    Carriers,
    Cores,
    Count,
    Line,
    Name,
    Seconds,
    ShortName,
    Side,
    WindowSeconds,
    WorkerObjects,
)
from pytest_nixl.nixl.worker.transfer import Transfers

if TYPE_CHECKING:
    from pytest_nixl.checks.kv_cache.worker import cache
    from pytest_nixl.checks.kv_cache.worker import requests as kv_requests
else:  # pytest imports this module too, and has no need for numpy
    cache = lazy_module("pytest_nixl.checks.kv_cache.worker.cache")
    kv_requests = lazy_module("pytest_nixl.checks.kv_cache.worker.requests")

RequestsRef: TypeAlias = Annotated[Ref, RefTo("requests")]
#: A block's number, or -1 for none.
_BlockNumber: TypeAlias = Annotated[int, Number(-1, 1 << 31, whole=True)]


class Draw(TypedDict):
    """How the blocks of a request are drawn; ``sender`` is the side that sends, and ``order`` a :class:`BlockOrder`."""

    count: Count
    order: ShortName
    seed: Count
    sender: Annotated[int, Number(0, 1, whole=True)]


class MadeDraw(Draw, total=False):
    """The draw of a request that was made, and the range of the caches that it used."""

    range: Count


class WrongBlock(TypedDict):
    """The wrong blocks of a cache, and the first of them: what :func:`cache.compare` returns."""

    wrong_blocks: Count
    wrong_bytes: Count
    tensor: Count
    block: Count
    source: _BlockNumber
    offset: Count
    expected: Byte
    found: Byte
    holds: _BlockNumber
    unchanged: bool


class PreparedRequests(TypedDict):
    requests: RequestsRef
    seconds: Seconds


class RequestFields(TypedDict):
    """When a request should have started and did, the seconds of its steps, and the range that it used."""

    intended: Seconds
    start: Seconds
    steps: tuple[Seconds, Seconds, Seconds, Seconds, Seconds]
    range: Annotated[int, Number(0, 1 << 16, whole=True)]


class MeasuredRequests(TypedDict):
    """The times of requests, the seconds of all, what devices carried, and the cores that other processes took."""

    times: list[RequestFields]
    seconds: WindowSeconds
    counted: Carriers
    contention: Cores


def kv_fill(objects: WorkerObjects, buffer: BufferRef, layout: KvLayout, seed: Count, inverted: bool) -> None:
    """Fill a KV cache with the pattern of ``seed`` or its complement."""
    cache.fill(objects.get(buffer), layout, seed, inverted=inverted)


def kv_compare(
    objects: WorkerObjects, buffer: BufferRef, layout: KvLayout, seed: Count, draws: list[MadeDraw], initiator: bool
) -> WrongBlock | None:
    """Compare a KV cache after requests with the pattern of the other cache.

    :param draws: with the ``range`` of the caches that each request used, in which it was made.
    :param initiator: whether the cache is the initiator's (after a READ).
    """
    ranges = [drawn.get("range", 0) * layout.range_blocks for drawn in draws]
    moved = [drawn.moved(blocks) for drawn, blocks in zip(_drawn(layout, draws), ranges, strict=True)]
    moves = [(drawn.local, drawn.remote) if initiator else (drawn.remote, drawn.local) for drawn in moved]
    return cast("WrongBlock | None", cache.compare(objects.get(buffer), layout, seed, moves))


def kv_prepare(
    objects: WorkerObjects,
    agent: AgentRef,
    target: Line,
    op: Name,
    plugin: Name,
    layout: KvLayout,
    sides: tuple[Side, Side],
    method: Name,
    merge: bool,
    storage: BufferRef | None,
) -> PreparedRequests:
    """Prepare requests between two KV caches; ``sides`` are address, memory type and device of each.

    :param storage: the buffer of the target if it is a file or objects: a request then ends with its sync instead of
        the target's acknowledgement.
    """
    local, remote = (kv_requests.CacheSide(*side) for side in sides)
    raw = objects.get(agent)
    transfers = Transfers(raw, target, [], {}, acknowledged=True, notify_each=False)
    file = objects.get(storage) if storage is not None else None
    requests = kv_requests.KvRequests(
        raw, transfers, target, op, plugin, layout, (local, remote), KvMethod(method), merge=merge, file=file
    )
    return {"requests": objects.keep(requests, "requests"), "seconds": requests.prepare_seconds}


def kv_request(
    objects: WorkerObjects,
    requests: RequestsRef,
    draws: list[Draw],
    timeout: Seconds,
    own: list[Count],
    op: Name,
    in_flight: Count,
    interval: Seconds,
) -> MeasuredRequests:
    """Make one request for each draw, and return the times of each.

    :param timeout: the time that each request may take, in seconds.
    :param in_flight: the number of requests in flight.
    :param interval: seconds between the intended starts of two requests; 0: each starts when one is over.
    :param own: the pids of other processes on this host that belong to the requests.
    """
    prepared = objects.get(requests)
    drawn = _drawn(prepared.layout, draws)
    contention = CpuContention(own)
    start = time.perf_counter()
    with contention, CarrierBytes.counting(op) as counted:
        times = prepared.run(drawn, timeout, in_flight=in_flight, interval=interval)
    seconds = time.perf_counter() - start
    return {"times": times, "seconds": seconds, "counted": counted, "contention": contention.cores}


def kv_release(objects: WorkerObjects, requests: RequestsRef) -> None:
    """Release the prepared descriptors of requests."""
    objects.get(requests).close()


def _drawn(layout: KvLayout, draws: Sequence[Draw]) -> list[BlockDraw]:
    return [
        draw(layout, drawn["count"], BlockOrder(drawn["order"]), drawn["seed"], sender=drawn["sender"])
        for drawn in draws
    ]
