# SPDX-License-Identifier: Apache-2.0
"""Requests for KV blocks between two workers, as engines make them: every step timed, every byte compared."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.samples import KvSamples, RequestTimes
from pytest_nixl.core.wire import Ref
from pytest_nixl.measure.launch import Launch
from pytest_nixl.measure.link import loss_counters, obstacle_between
from pytest_nixl.model.device_counters import CarrierBytes, lossy_devices
from pytest_nixl.nixl.backends.ucx import protocol
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.processes.worker_errors import SAME_VERSION, WorkerError
from pytest_nixl.processes.worker_process import Pending, results

#: The least and the largest number of timed requests.
LEAST, MOST = 10, 200
#: The largest number of requests that start at a rate.
MOST_AT_RATE = 10_000


@dataclass(frozen=True)
class KvTraffic:
    """What each request does.

    :param blocks: the number of blocks of each tensor that a request moves.
    :param order: how they lie in the cache.
    :param method: how the transfer is made.
    :param merge: whether NIXL may merge descriptors of neighbouring blocks.
    :param in_flight: the number of requests in flight. The layout has at least as many ranges.
    :param rate: requests that start in each second, whether or not earlier ones are over (an open loop); None: each
        starts when one is over.
    """

    blocks: int
    order: BlockOrder = BlockOrder.SCATTERED
    method: KvMethod = KvMethod.PREPPED
    merge: bool = True
    in_flight: int = 1
    rate: float | None = None

    def count(self, seconds: float, duration: float, least: int) -> int:
        """Return the number of requests to time.

        :param seconds: the time that one request takes.
        :param duration: the least time to measure, in seconds.
        :param least: the least number of requests.
        """
        if self.rate is not None:
            return min(MOST_AT_RATE, max(least, int(duration * self.rate) + 1))
        if self.in_flight > 1:  # enough that the last requests, beside which fewer are in flight, hardly count
            least = max(least, 8 * self.in_flight)
        return max(least, min(MOST, int(duration / seconds) + 1))

    def __str__(self) -> str:
        parts = [self.order.value, self.method.value]
        if self.order is BlockOrder.CONTIGUOUS:
            parts.append("merged" if self.merge else "unmerged")
        return "-".join(parts)


class KvLink:
    """Two workers with a KV cache each, and requests from the initiator to the target.

    With a storage backend there is one worker, and the target's cache is a file, or an object for each block.

    ``source`` and ``destination`` are the buffers from which and to which blocks move.

    :param launch: two connected workers whose buffers have the size of the layout.
    :param op: ``WRITE`` (the prefill side pushes) or ``READ`` (the decode side pulls).
    :param timeout: the time that each request, and each comparison of a cache, may take, in seconds.
    """

    def __init__(self, launch: Launch, layout: KvLayout, op: str, timeout: float) -> None:
        self._launch, self._layout, self._op, self._timeout = launch, layout, op, timeout
        self.initiator, self.target, ends = launch.initiator, launch.target, launch.buffers
        self.source, self.destination = ends if op == "WRITE" else (ends[1], ends[0])

    def measure(self, traffic: KvTraffic, *, duration: float, least: int = LEAST) -> KvSamples:
        """Time requests, each with newly drawn blocks, and compare every byte of the receiving cache.

        :param duration: the least time to measure, in seconds.
        :param least: the least number of requests.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        """
        agent, other = self.initiator, self.target
        sides = [[buffer.address, buffer.memory, buffer.device] for buffer in self._launch.buffers]
        try:
            self._prepare_objects(self._layout.tensors * self._layout.blocks)
            prepared = agent.worker.call(
                "kv_prepare",
                agent=agent.ref,
                target=other.name,
                op=self._op,
                plugin=self._launch.backend.PLUGIN,
                layout=asdict(self._layout),
                sides=sides,
                method=traffic.method.value,
                merge=traffic.merge,
                storage=self._launch.buffers[1].ref if self._launch.backend.STORAGE else None,
            )
            requests = prepared["requests"]
            alone = KvTraffic(traffic.blocks, traffic.order, traffic.method, traffic.merge)
            first, corruption = self._verified("after the first request", requests, alone, 1)
            count = traffic.count(first["seconds"], duration, least)
            idle = self._launch.kernel_seconds()
            before = loss_counters((other.worker, agent.worker))
            answer, later = self._verified("after the timed requests", requests, traffic, count)
            after = loss_counters((other.worker, agent.worker), before)
            wait = max(idle, self._launch.kernel_seconds())
            agent.worker.call("kv_release", requests=requests)
            agent.worker.call("forget", objects=[requests])
            self._prepare_objects(0)
        except BaseException:
            self._launch.kill()
            raise
        log = agent.worker.output()
        descriptors = traffic.blocks * self._layout.tensors
        request_bytes = descriptors * self._layout.block_bytes
        carried = CarrierBytes.from_plain(answer["counted"], request_bytes * count)
        reported = self._launch.backend.transports(log, self._op, self._layout.block_bytes, self._launch.memory)
        transports = tuple(carried.named(reported))
        return KvSamples(
            traffic.order,
            request_bytes,
            descriptors,
            (prepared["seconds"],),
            (
                tuple(
                    RequestTimes(request["intended"], request["start"], tuple(request["steps"]))
                    for request in answer["times"]
                ),
            ),
            alone=traffic == alone,
            corruption=corruption or later,
            transports=transports,
            counted=carried,
            contention=(answer["contention"],),
            gpu_waits=(wait,) if wait else (),
            obstacle=obstacle_between(agent.worker, other.worker),
            protocol=protocol(log, self._op, self._layout.block_bytes, self._launch.memory),
            lossy=lossy_devices(before, after, transports, carried.payload),
        )

    def _prepare_objects(self, count: int) -> None:
        """Make each block of the target's cache an object, if it is in an object store; 0: delete them."""
        buffer = self._launch.buffers[1]
        if buffer.memory == "OBJ":
            arguments = {"agent": self.target.ref, "buffer": buffer.ref, "block": self._layout.block_bytes}
            self.target.worker.call("prepare_objects", seconds=self._timeout * 10, **arguments, count=count)

    def _verified(
        self, phase: str, requests: Ref, traffic: KvTraffic, count: int
    ) -> tuple[dict[str, Any], KvCorruption | None]:
        """Fill both caches, make requests, and compare the cache to which they moved blocks."""
        seed = secrets.randbits(63)
        draws: list[dict[str, Any]] = [
            {
                "count": traffic.blocks,
                "order": traffic.order.value,
                "seed": secrets.randbits(63),
                "sender": 0 if self._op == "WRITE" else 1,
            }
            for _ in range(count)
        ]
        filling = [self._fill(self.source, seed, inverted=False)]
        if self._launch.backend.STORAGE:  # one worker has both
            results(filling)
            filling = []
        results([*filling, self._fill(self.destination, seed, inverted=True)])
        answer = self._request(requests, draws, traffic)
        ranges = [times["range"] for times in answer["times"]]
        if len(ranges) != count or not all(number < self._layout.ranges for number in ranges):
            raise WorkerError(
                f"rank {self.initiator.worker.rank} did not report the times of {count} requests",
                SAME_VERSION,
            )
        wrong = self.destination.worker.call(
            "kv_compare",
            seconds=self._timeout,
            buffer=self.destination.ref,
            layout=asdict(self._layout),
            seed=seed,
            draws=[{**draw, "range": part} for draw, part in zip(draws, ranges, strict=True)],
            initiator=self._op == "READ",
        )
        return answer, None if wrong is None else self._corruption(phase, wrong)

    def _fill(self, buffer: Buffer, seed: int, *, inverted: bool) -> Pending:
        return buffer.worker.request(
            "kv_fill", buffer=buffer.ref, layout=asdict(self._layout), seed=seed, inverted=inverted
        )

    def _request(self, requests: Ref, draws: Sequence[dict[str, Any]], traffic: KvTraffic) -> dict[str, Any]:
        initiator, target = self.initiator, self.target
        seconds = self._timeout * len(draws) + 5
        initiator_worker, target_worker = initiator.worker, target.worker
        processes = [target_worker.pid] if initiator_worker.versions["host"] == target_worker.versions["host"] else []
        serving: list[Pending] = []
        if not self._launch.backend.STORAGE:
            serving = [target_worker.request("serve", seconds=seconds + 5, agent=target.ref, timeout=seconds)]
        running = initiator_worker.request(
            "kv_request",
            seconds=seconds,
            requests=requests,
            draws=list(draws),
            timeout=self._timeout,
            own=processes,
            op=self._op,
            in_flight=traffic.in_flight,
            interval=0.0 if traffic.rate is None else 1 / traffic.rate,
        )
        answer: dict[str, Any] = results([running], serving=serving)[0]
        return answer

    def _corruption(self, phase: str, wrong: dict[str, Any]) -> KvCorruption:
        layout = self._layout
        receiving, sending = (
            layout.pieces if self._op == "READ" else layout.pieces[::-1]
        )  # of the receiving cache first
        place, piece = divmod(wrong["block"], receiving)
        where = f"{layout.name(wrong['tensor'])}, block {place}, offset {piece * layout.block_bytes + wrong['offset']}"
        holds = ""
        if wrong["unchanged"]:
            holds = f"nothing arrived: it should hold {_block(wrong['source'], sending)}"
        elif wrong["holds"] >= 0:
            source = wrong["source"]
            expected = f"instead of {_block(source, sending)}" if source >= 0 else "but no request moved a block there"
            holds = f"it holds {_block(wrong['holds'], sending)} {expected}"
        return KvCorruption(
            phase, wrong["wrong_blocks"], wrong["wrong_bytes"], where, wrong["expected"], wrong["found"], holds
        )


def _block(number: int, pieces: int) -> str:
    """Return the name of a block: ``block 9``, or of one of its pieces: ``piece 1 of block 9``."""
    return f"block {number}" if pieces == 1 else f"piece {number % pieces} of block {number // pieces}"
