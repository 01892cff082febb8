# SPDX-License-Identifier: Apache-2.0
"""The commands of a worker about KV caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pytest_nixl.checks.kv_cache.blocks import BlockDraw, BlockOrder, KvLayout, KvMethod, draw
from pytest_nixl.checks.kv_cache.worker import cache as kv_cache
from pytest_nixl.checks.kv_cache.worker.requests import CacheSide, KvRequests
from pytest_nixl.core.cpu_contention import CpuContention
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.carrier_bytes import CarrierBytes
from pytest_nixl.model.worker_command import WorkerObjects
from pytest_nixl.nixl.worker.transfer import Transfers


def kv_fill(objects: WorkerObjects, buffer: Ref, layout: dict[str, Any], seed: int, inverted: bool) -> None:
    """Fill a KV cache with the pattern of ``seed`` or its complement."""
    kv_cache.fill(objects.get(buffer), KvLayout(**layout), seed, inverted=inverted)


def kv_compare(
    objects: WorkerObjects, buffer: Ref, layout: dict[str, Any], seed: int, draws: list[dict[str, Any]], initiator: bool
) -> dict[str, Any] | None:
    """Compare a KV cache after requests with the pattern of the other cache.

    :param draws: with the ``range`` of the caches that each request used, in which it was made.
    :param initiator: whether the cache is the initiator's (after a READ).
    """
    cache = KvLayout(**layout)
    ranges = [each.get("range", 0) * cache.range_blocks for each in draws]
    drawn = [each.moved(blocks) for each, blocks in zip(_drawn(cache, draws), ranges, strict=True)]
    moves = [(each.local, each.remote) if initiator else (each.remote, each.local) for each in drawn]
    return kv_cache.compare(objects.get(buffer), cache, seed, moves)


def kv_prepare(
    objects: WorkerObjects,
    agent: Ref,
    target: str,
    op: str,
    plugin: str,
    layout: dict[str, Any],
    sides: list[list[Any]],
    method: str,
    merge: bool,
    storage: Ref | None,
) -> dict[str, Any]:
    """Prepare requests between two KV caches; ``sides`` are address, memory type and device of each.

    :param storage: the buffer of the target if it is a file or objects: a request then ends with its sync instead of
        the target's acknowledgement.
    """
    local, remote = (CacheSide(*side) for side in sides)
    raw = objects.get(agent)
    transfers = Transfers(raw, target, [], {}, acknowledged=True, notify_each=False)
    cache = KvLayout(**layout)
    file = objects.get(storage) if storage is not None else None
    requests = KvRequests(
        raw, transfers, target, op, plugin, cache, (local, remote), KvMethod(method), merge=merge, file=file
    )
    return {"requests": objects.keep(requests, "requests"), "seconds": requests.prepare_seconds}


def kv_request(
    objects: WorkerObjects,
    requests: Ref,
    draws: list[dict[str, Any]],
    timeout: float,
    own: list[int],
    op: str,
    in_flight: int,
    interval: float,
) -> dict[str, Any]:
    """Make one request for each draw, and return the times of each.

    :param timeout: the time that each request may take, in seconds.
    :param in_flight: the number of requests in flight.
    :param interval: seconds between the intended starts of two requests; 0: each starts when one is over.
    :param own: the pids of other processes on this host that belong to the requests.
    """
    prepared: KvRequests = objects.get(requests)
    drawn = _drawn(prepared.layout, draws)
    contention = CpuContention(own)
    start = time.perf_counter()
    with contention, CarrierBytes.counting(op) as counted:
        times = prepared.run(drawn, timeout, in_flight=in_flight, interval=interval)
    seconds = time.perf_counter() - start
    return {"times": times, "seconds": seconds, "counted": counted, "contention": contention.cores}


def kv_release(objects: WorkerObjects, requests: Ref) -> None:
    """Release the prepared descriptors of requests."""
    objects.get(requests).close()


def _drawn(layout: KvLayout, draws: Sequence[dict[str, Any]]) -> list[BlockDraw]:
    return [
        draw(layout, drawn["count"], BlockOrder(drawn["order"]), drawn["seed"], sender=drawn["sender"])
        for drawn in draws
    ]
