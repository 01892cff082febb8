# SPDX-License-Identifier: Apache-2.0
"""Links: a connected initiator and target, each in a separate worker, whose transfers are verified and timed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.units import MIB, gigabytes
from pytest_nixl.core.wire import Ref
from pytest_nixl.model import nixl_releases
from pytest_nixl.model.carrier_bytes import counted
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.rank_pairs import RankPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Corruption, Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Buffer, NixlAgent
from pytest_nixl.nixl.backends import BACKENDS, Backend
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST
from pytest_nixl.nixl.gpus import choose
from pytest_nixl.nixl.version_mismatch import versions_named
from pytest_nixl.nixl.worker.transfer import COUNTED
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_process import Pending, Worker, results

_log = logging.getLogger(__name__)

#: Seconds of transfers before a row is timed, and before the first row of a launch. New processes may share a core at
#: first, which costs a third of the bandwidth of small blocks. A traffic shaper's burst also ends in this time.
SETTLE_SECONDS, FIRST_SETTLE_SECONDS = 0.05, 0.3
#: The least time for which a row is timed if other rows are timed at the same time, in seconds.
BESIDE_SECONDS = 1.0
#: Additional environment variables of the initiator's worker and of the target's worker.
Variables = tuple[Mapping[str, str], Mapping[str, str]]


@dataclass(frozen=True)
class _End:
    """One end of a pair: an agent and its registered buffer."""

    agent: NixlAgent
    buffer: Buffer


@dataclass(frozen=True)
class _Transfers:
    """Prepared transfers, one per transfer in flight: without a notification, and the same with one."""

    plain: list[Ref]
    tagged: list[Ref]


class WorkerPair:
    """A launch: two connected workers with one agent each, for WRITE and READ.

    With a storage backend there is one worker with one agent, and the target is a file.

    :param places: the ranks of the initiator's worker and of the target's worker.
    :param memory: the memory types of initiator and target.
    :param capacity: the size of each end's buffer in bytes.
    :param alignment: a divisor of the offsets and lengths of all transfers, in bytes.
    :param devices: the GPUs of the ends in VRAM; None to let :func:`~pytest_nixl.nixl.gpus.choose` choose.
    :param variables: additional environment variables of the two workers.
    :raises NotApplicableError: an end does not have this memory.
    :raises WorkerError: a worker or an agent cannot be started, or the agents cannot connect.
    """

    def __init__(
        self,
        places: tuple[Host, Host],
        settings: Settings,
        backend: Backend,
        memory: MemoryPair,
        capacity: int,
        alignment: int = 1,
        devices: DevicePair | None = None,
        variables: Variables = ({}, {}),
    ) -> None:
        self.backend = backend
        self.memory = memory
        self.capacity = capacity
        self._directory, self._alignment = settings.file_dir, alignment
        self._settle = FIRST_SETTLE_SECONDS
        # Metadata is exchanged over the workers' own channel, so these agents never wait for an etcd that is down.
        environment: dict[str, str | None] = {"NIXL_ETCD_ENDPOINTS": None}
        wanted = backend.environment(os.environ)
        environment |= {name: value for name, value in wanted.items() if name not in os.environ}
        workers: list[Worker] = []
        try:
            # Start both workers before waiting for one.
            roles = ("initiator",) if backend.STORAGE else ("initiator", "target")
            for place, role, own in zip(places, roles, variables, strict=False):
                limits = settings.timeout, settings.start_timeout
                workers.append(place.start(role, {**environment, **own}, *limits))
            self.devices = choose(workers[0], workers[-1], memory, devices)
            ends = (memory.initiator, self.devices.initiator), (memory.target, self.devices.target)
            for worker, (kind, device) in zip(workers, ends, strict=False):
                if kind == "VRAM":
                    worker.call("activate", device=device)
            self.initiator = self._end(self._agent(workers[0]), memory.initiator, self.devices.initiator)
            there = self.initiator.agent if backend.STORAGE else self._agent(workers[1])
            self.target = self._end(there, memory.target, self.devices.target)
            if not backend.STORAGE:
                with versions_named(workers):
                    self._connect()
        except BaseException:
            for worker in workers:
                worker.kill()
            raise

    def _agent(self, worker: Worker) -> NixlAgent:
        return NixlAgent.within(worker, backends=[self.backend.NAME], progress_thread=False)

    def _end(self, agent: NixlAgent, memory: str, device: int) -> _End:
        if memory == "VRAM":
            types = sorted(name.removesuffix("_SEG") for name in agent.get_backend_mem_types(self.backend.NAME))
            if memory not in types:
                moves = f"{self.backend.NAME} supports only {' and '.join(types)}"
                raise NotApplicableError(
                    f"{self.memory} needs a backend that supports GPU memory, but {moves}",
                    "use --nixl-backend=UCX or LIBFABRIC, or remove VRAM from --nixl-memory",
                )
        buffer = agent.allocate(
            self.capacity, memory, device=device, directory=self._directory, alignment=self._alignment
        )
        agent.register(buffer)
        return _End(agent, buffer)

    def _connect(self) -> None:
        """Exchange metadata over the workers' own channel, without etcd and without a port."""
        here, there = self.initiator.agent, self.target.agent
        # One at a time, while the other polls: LIBFABRIC waits for the peer here, and there is no progress thread.
        for one, other in ((here, there), (there, here)):
            metadata = other.get_agent_metadata()
            serving = other.worker.request("serve", agent=other.ref, patience=other.worker.timeout)
            adding = one.worker.request(
                "call", agent=one.ref, method="add_remote_agent", arguments=[metadata], keywords={}
            )
            results([adding], serving=serving)
        serving = there.worker.request("serve", agent=there.ref, patience=there.worker.timeout)
        connecting = here.worker.request("connect", agent=here.ref, target=there.name, patience=here.worker.timeout)
        results([connecting], serving=serving)

    def settle(self) -> float:
        """Return the seconds of transfers before a row is timed, which are more for the first row of a launch."""
        settle, self._settle = self._settle, SETTLE_SECONDS
        return settle

    @property
    def healthy(self) -> bool:
        """Whether both workers still run."""
        return self.initiator.agent.worker.alive and self.target.agent.worker.alive

    def close(self) -> None:
        """End both workers."""
        self.initiator.agent.close()
        self.target.agent.close()

    def kill(self) -> None:
        """End both workers immediately."""
        self.initiator.agent.worker.kill()
        self.target.agent.worker.kill()


class Link:
    """A connected initiator and target with backend, memory types and operation.

    ``initiator`` and ``target`` are the agents. ``source`` and ``destination`` are the buffers from which and to which
    bytes move. ``devices`` are the GPUs of the ends in VRAM.

    :param pairs: the pairs of the session, which start a new launch on request.
    :param pair: the current launch.
    :param op: ``WRITE`` or ``READ``.
    :param asked: the GPUs that were requested by number and so are part of the row keys.
    """

    def __init__(
        self, pairs: WorkerPairs, pair: WorkerPair, op: str, settings: Settings, asked: DevicePair | None = None
    ) -> None:
        self._pairs = pairs
        self._settings = settings
        self.backend = pair.backend.NAME
        self.op = op
        self.memory = pair.memory
        self._asked = asked
        self._use(pair)

    def _use(self, pair: WorkerPair) -> None:
        self._pair = pair
        self.initiator = pair.initiator.agent
        self.target = pair.target.agent
        self.devices = pair.devices
        ends = (pair.initiator.buffer, pair.target.buffer)
        self.source, self.destination = ends if self.op == "WRITE" else (ends[1], ends[0])

    def key(self, block: int, *, batch: int = 1, depth: int = 1) -> RowKey:
        """Return the key of the row that :meth:`measure` measures with the same arguments.

        :param block: the size of one block in bytes.
        """
        ranks = (self.initiator.worker.rank, self.target.worker.rank)
        return RowKey(self.backend, self.op, self.memory, block, batch, depth, ranks, self._asked)

    def move(self, block: int, *, batch: int = 1, depth: int = 1) -> Corruption | None:
        """Run ``depth`` transfers of ``batch`` blocks once with a new pattern, and compare every byte.

        :param block: the size of one block in bytes.
        :returns: the corruption; None if every byte is right.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        """
        with self._transfers(block, batch, depth) as transfers:
            return self._verify("after a transfer", transfers, block * batch * depth)

    def measure_launches(
        self, block: int, *, batch: int = 1, depth: int = 1, another: Callable[[Samples], bool]
    ) -> Samples:
        """Measure one row in several launches.

        :param block: the size of one block in bytes.
        :param another: returns whether one more launch is needed, from the samples so far.
        :raises WorkerError: as :meth:`measure`.
        """
        samples = self.measure(block, batch=batch, depth=depth)
        while another(samples):
            self.relaunch()
            samples = samples.with_launch(self.measure(block, batch=batch, depth=depth))
        return samples

    def relaunch(self) -> None:
        """End both workers and start new ones for the next launch."""
        self._use(self._pairs.replace(self._pair))

    def measure(
        self, block: int, *, batch: int = 1, depth: int = 1, beside: Callable[[], object] | None = None
    ) -> Samples:
        """Measure one row in one launch.

        Before and after the timed windows, new patterns are transferred and every byte is compared at the destination.
        The bytes of the timed transfers are compared, too.

        :param block: the size of one block in bytes.
        :param batch: blocks per transfer.
        :param depth: transfers in flight.
        :param beside: for rows that are measured at the same time: called before the transfers are timed, to wait for
            the other rows. All are then timed for the same duration, whatever the number of iterations.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        :raises FindingError: GPU memory was moved as host memory.
        """
        size = block * batch * depth
        key = self.key(block, batch=batch, depth=depth)
        with self._transfers(block, batch, depth) as transfers:
            corruption = self._verify("before the timed transfers", transfers, size)
            seed = self._fill(size, poison=False)
            if beside is not None:
                beside()
            found = self._timed(transfers, block, together=beside is not None)
            corruption = corruption or self._compare("after the timed transfers", seed, size)
            corruption = corruption or self._verify("in the transfers after the timed ones", transfers, size)
        evidence = counted(found["counted"], block * batch * sum(found["transfers"]))
        log, backend = self.initiator.worker.output(), self._pair.backend
        if corruption is None and (mistaken := backend.mistaken(log, self.op, self.memory)):
            raise FindingError(VRAM_AS_HOST, mistaken)
        reported = backend.transports(log, self.op, block, self.memory)
        samples = Samples(
            key=key,
            windows=tuple(found["windows"]),
            transfers=tuple(found["transfers"]),
            latencies=tuple(found["latencies"]),
            transports=evidence.named(reported),
            corruption=corruption,
            counted=evidence,
            others=(found["others"],),
            obstacle=self._obstacle(),
        )
        _log.info(
            "%s: %s GB/s over %s",
            key,
            gigabytes(samples.bandwidth),
            "+".join(samples.transports) or "an unknown transport",
        )
        return samples

    def _obstacle(self) -> str:
        """Return what keeps UCX from copying between processes; empty if nothing does, or if there are two hosts."""
        one, other = self.initiator.worker.versions, self.target.worker.versions
        if one["host"] != other["host"]:
            return ""
        return str(one.get("obstacle") or other.get("obstacle") or "")

    @contextlib.contextmanager
    def _transfers(self, block: int, batch: int, depth: int) -> Iterator[_Transfers]:
        """Prepare ``depth`` transfers for use at the same time. A failure ends the pair."""
        size = block * batch
        if size * depth > self._pair.capacity:
            raise NixlPluginError(
                f"{depth} transfers of {size} bytes do not fit into this link's buffers of {self._pair.capacity} bytes",
                "add the block size to --nixl-blocks, and the batch and depth to --nixl-batch and --nixl-depth",
            )
        try:
            with versions_named([self.initiator.worker, self.target.worker]):
                slots = [self._sides(slot * size, block, batch) for slot in range(depth)]
                first = COUNTED if self._announced else b""
                plain = [self._prepare(*sides) for sides in slots]
                tagged = [self._prepare(*sides, notification=first) for sides in slots]
                yield _Transfers(plain, tagged)
                for handle in [*plain, *tagged]:
                    self.initiator.release_xfer_handle(handle)
                self.initiator.worker.call("forget", objects=[*plain, *tagged, *itertools.chain(*slots)])
        except BaseException:
            self._pair.kill()
            raise

    def _sides(self, offset: int, block: int, batch: int) -> tuple[Ref, Ref]:
        """Return the descriptors of one transfer in the initiator's and in the target's buffer."""
        buffers = (self._pair.initiator.buffer, self._pair.target.buffer)
        local, remote = (
            self.initiator.get_xfer_descs(
                [buffer.descriptor(offset + number * block, block) for number in range(batch)], buffer.memory
            )
            for buffer in buffers
        )
        return local, remote

    def _prepare(self, local: Ref, remote: Ref, *, notification: bytes = b"") -> Ref:
        return self.initiator.initialize_xfer(
            self.op, local, remote, self.target.name, notification, backends=[self._pair.backend.PLUGIN]
        )

    @property
    def _announced(self) -> bool:
        """Whether this NIXL sends only the notification with which a handle was created."""
        version = str(self.initiator.worker.versions.get("nixl", ""))
        return not self._pair.backend.COMPLETION_IMPLIES_DELIVERY and nixl_releases.sends_the_first_notification(
            version
        )

    def _verify(self, phase: str, transfers: _Transfers, size: int) -> Corruption | None:
        seed = self._fill(size, poison=True)
        self._run("move", transfers, self._settings.timeout)
        return self._compare(phase, seed, size)

    def _fill(self, size: int, *, poison: bool) -> int:
        """Write a new pattern to the source and, with ``poison``, its complement to the destination."""
        seed = random.getrandbits(63)
        filling = [self.source.fill(seed, size=size)]
        if poison:
            filling.append(self.destination.fill(seed, size=size, inverted=True))
        results(filling)
        return seed

    def _compare(self, phase: str, seed: int, size: int) -> Corruption | None:
        found = self.destination.compare(seed, size=size)
        return None if found is None else Corruption(phase=phase, **found)

    def _timed(self, transfers: _Transfers, block: int, *, together: bool) -> dict[str, Any]:
        settings = self._settings
        iterations = 1 if together else settings.iterations or (1000 if block <= MIB else 100)
        duration = max(settings.duration, BESIDE_SECONDS) if together else settings.duration
        found: dict[str, Any] = self._run(
            "measure",
            transfers,
            settings.timeout + duration,
            iterations=iterations,
            warmup=min(settings.warmup, 1) if together else settings.warmup,
            settle=self._pair.settle(),
            duration=duration,
            op=self.op,
            own=self._beside_the_initiator(),
        )
        return found

    def _beside_the_initiator(self) -> list[int]:
        """Return the pids of this row's other processes on the initiator's host, which are not contention."""
        ends = self.initiator.worker, self.target.worker
        return [ends[1].pid] if ends[0].versions["host"] == ends[1].versions["host"] else []

    def _run(
        self, command: str, transfers: _Transfers, seconds: float, **arguments: int | float | str | list[int]
    ) -> Any:
        """Run ``command`` in the initiator and return its answer; meanwhile the target serves, if it is an agent."""
        # Workers time out before this process does, so that their own messages arrive.
        patience = seconds + 5
        storage = self._pair.backend.STORAGE
        serving: Pending | None = None
        if not storage:
            serving = self.target.worker.request("serve", seconds=patience, agent=self.target.ref, patience=seconds)
        running = self.initiator.worker.request(
            command,
            seconds=patience,
            agent=self.initiator.ref,
            target=self.target.name,
            plain=transfers.plain,
            tagged=transfers.tagged,
            patience=seconds,
            acknowledged=self.op == "WRITE" and not storage,
            tag_each=not self._pair.backend.COMPLETION_IMPLIES_DELIVERY,
            announced=self._announced,
            storage=self.destination.ref if storage and self.op == "WRITE" else None,
            **arguments,
        )
        return results([running], serving=serving)[0]


class WorkerPairs:
    """The pairs of a session, which are created when first needed and reused while they are healthy.

    The pairs of two ranks are ended before those of two other ranks start, so that only two ranks use memory.

    :param places: the ranks on which workers can start.
    :param settings: the settings of the run.
    """

    def __init__(self, places: Sequence[Host], settings: Settings) -> None:
        self._places = places
        self._settings = settings
        self._pairs: dict[_Kind, WorkerPair] = {}
        self._refused: dict[_Kind, NotApplicableError] = {}

    def link(
        self,
        backend: str,
        op: str,
        memory: MemoryPair,
        ranks: RankPair = (0, 1),
        devices: DevicePair | None = None,
    ) -> Link:
        """Return a link, with new workers if those of an earlier test have ended.

        :param op: ``WRITE`` or ``READ``.
        :param memory: the memory types of initiator and target.
        :param ranks: the ranks of initiator and target.
        :param devices: the GPUs of the ends in VRAM; None for those of ``--nixl-devices``.
        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        self._end(lambda kind: kind.ranks != ranks)
        return self._link(self._kind(backend, memory, ranks, devices), op)

    def together(self, backend: str, op: str, memory: MemoryPair, pairs: Sequence[RankPair]) -> list[Link]:
        """Return one link for each pair of ranks, for use at the same time.

        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        self._end(lambda kind: kind.ranks not in pairs)
        return [self._link(self._kind(backend, memory, ranks), op) for ranks in pairs]

    def between_devices(
        self,
        backend: str,
        op: str,
        memory: MemoryPair,
        devices: Sequence[DevicePair],
        ranks: RankPair = (0, 1),
        variables: Sequence[Variables] = (),
    ) -> list[Link]:
        """Return one link for each pair of GPUs of two ranks, for use at the same time.

        For host memory there is also one link per pair; the devices are then only numbers.

        :param variables: for each pair, additional environment variables of its two workers.
        :raises NotApplicableError: an end does not have this memory.
        :raises WorkerError: a worker or an agent cannot be started.
        """
        kinds = [
            _Kind(backend, memory, ranks, pair, tuple(tuple(sorted(end.items())) for end in own))
            for pair, own in zip(devices, variables or [({}, {})] * len(devices), strict=True)
        ]
        self._end(lambda kind: kind not in kinds)
        return [self._link(kind, op) for kind in kinds]

    def replace(self, pair: WorkerPair) -> WorkerPair:
        """End a pair and return a new one of the same kind, for the next launch."""
        pair.close()
        return self._launch(next(kind for kind, one in self._pairs.items() if one is pair))

    def close(self) -> None:
        """End all workers."""
        self._end(lambda _: True)

    def _kind(self, backend: str, memory: MemoryPair, ranks: RankPair, devices: DevicePair | None = None) -> _Kind:
        has_gpu = "VRAM" in (memory.initiator, memory.target)
        return _Kind(backend, memory, ranks, (devices or self._settings.devices) if has_gpu else None)

    def _link(self, kind: _Kind, op: str) -> Link:
        if kind in self._refused:
            raise self._refused[kind]
        pair = self._pairs.get(kind)
        if pair is None or not pair.healthy:
            if pair is not None:
                pair.kill()
            try:
                pair = self._launch(kind)
            except NotApplicableError as error:  # the answer would be the same next time
                self._refused[kind] = error
                raise
        return Link(self, pair, op, self._settings, kind.devices)

    def _launch(self, kind: _Kind) -> WorkerPair:
        blocks = self._settings.blocks
        capacity = max(blocks) * max(self._settings.batch) * max(self._settings.depth)
        one, other = kind.ranks
        places = self._places[one], self._places[other]
        backend, alignment = BACKENDS[kind.backend], math.gcd(*blocks)
        variables = (dict(kind.variables[0]), dict(kind.variables[1])) if kind.variables else ({}, {})
        pair = WorkerPair(places, self._settings, backend, kind.memory, capacity, alignment, kind.devices, variables)
        self._pairs[kind] = pair
        return pair

    def _end(self, which: Callable[[_Kind], bool]) -> None:
        for kind in list(filter(which, self._pairs)):
            self._pairs.pop(kind).close()


@dataclass(frozen=True)
class _Kind:
    """What a link requires of a pair."""

    backend: str
    memory: MemoryPair
    ranks: RankPair
    devices: DevicePair | None
    #: Additional environment variables of the initiator's worker and of the target's worker.
    variables: tuple[tuple[tuple[str, str], ...], ...] = ()
