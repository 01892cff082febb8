# SPDX-License-Identifier: Apache-2.0
"""Links: a connected initiator and target, each in a separate worker, whose transfers are verified and timed."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.units import MIB, gigabytes
from pytest_nixl.core.wire import Ref
from pytest_nixl.measure.launch import Launch, versions_named
from pytest_nixl.model import nixl_releases
from pytest_nixl.model.device_counters import CarrierBytes, lossy_devices
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.row_key import EACH, RowKey
from pytest_nixl.model.samples import Corruption, Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST, protocol
from pytest_nixl.nixl.worker.transfer import WINDOW_SECONDS, WINDOWS
from pytest_nixl.processes.worker_errors import NixlError, WorkerError, WorkerLateError
from pytest_nixl.processes.worker_process import Pending, Worker, results

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker.commands import MeasuredTransfers

_log = logging.getLogger(__name__)

#: The least time for which a row is timed if other rows are timed at the same time, in seconds.
BESIDE_SECONDS = 1.0
#: The least number of bytes that the timed transfers of blocks above 1 MiB move: in each window 16 MiB, so that its one
#: acknowledgement hardly counts.
LARGE_BYTES = 160 * MIB
#: The seconds that the windows of a row should take at most, whatever the link's speed: on a slow link there are fewer
#: transfers, and then fewer windows. ``--nixl-iterations`` and ``--nixl-duration`` may ask for more.
LONGEST_SECONDS = 1.0
#: The most bytes that are compared and overwritten between two timed windows, from the beginning of the destination.
BETWEEN_WINDOWS_BYTES = MIB
#: The most transfers with a pattern each that one command makes within its deadline: a second on a busy host.
EACH_PER_COMMAND = 250


#: The arguments of :class:`pytest_nixl.nixl.worker.transfer.RowEnd` for the initiator and for the target.
_RowEnds = tuple[dict[str, Any], dict[str, Any]]


class Link:
    """A connected initiator and target with backend, memory types and operation.

    ``initiator`` and ``target`` are the agents. ``source`` and ``destination`` are the buffers from which and to which
    bytes move. ``devices`` are the GPUs of the ends in VRAM. ``agent_options`` says how the agents were created.

    :param relaunch: ends a launch, and returns a new one of the same kind.
    :param launch: the current launch.
    :param row: the key of any row of the link: those of the others differ from it in block, batch and depth.
    """

    def __init__(self, relaunch: Callable[[Launch], Launch], launch: Launch, row: RowKey, settings: Settings) -> None:
        self._relaunch = relaunch
        self._settings = settings
        self._row = row
        self.backend, self.op, self.memory, self.footprint = row.backend, row.op, row.memory, row.footprint
        self._use(launch)

    def _use(self, launch: Launch) -> None:
        self._launch = launch
        self.initiator, self.target = launch.initiator, launch.target
        self.devices = launch.devices
        self.agent_options = launch.agent_options
        self.source, self.destination = launch.buffers if self.op == "WRITE" else launch.buffers[::-1]

    def key(self, block: int, *, batch: int = 1, depth: int = 1) -> RowKey:
        """Return the key of the row that :meth:`measure` measures with the same arguments.

        :param block: the size of one block in bytes.
        """
        return replace(self._row, block=block, batch=batch, depth=depth)

    def move(self, block: int, *, batch: int = 1, depth: int = 1) -> Corruption | None:
        """Run ``depth`` transfers of ``batch`` blocks once with a new pattern, and compare every byte.

        :param block: the size of one block in bytes.
        :returns: the corruption; None if every byte is right.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        """
        with self._transfers(block, batch, depth) as transfers:
            size = block * batch * self._count(block * batch, depth)
            seed = self._fill(size, poison=True)
            self._run("move", transfers, self._settings.timeout)
            return self._compare("after a transfer", seed, size)

    def move_each(self, block: int, count: int) -> Corruption | None:
        """Run transfers one at a time, each with a pattern of its own, which is compared before the next one is posted.

        Before each transfer the destination has the complement of its pattern, so that no byte is right yet.

        :param block: the size of one transfer in bytes.
        :param count: the number of transfers.
        :returns: the corruption of the first transfer that is corrupt; None if every byte is right.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        """
        corrupt, first = 0, None
        with self._transfers(block, 1, 1) as transfers:
            for start in range(0, count, EACH_PER_COMMAND):
                ends = self._row_ends(block, self._fill(block, poison=True), new_patterns=True)
                number = min(EACH_PER_COMMAND, count - start)
                checked = self._run("move_each", transfers, self._settings.timeout, ends=ends, count=number)
                corrupt += checked["corrupt"]
                if first is None and checked["first"] is not None:
                    first = start + checked["first"].pop("transfer"), checked["first"]
        if first is None:
            return None
        return Corruption(f"in transfer {first[0]} ({corrupt} of {count} are corrupt)", **first[1])

    def measure_launches(
        self,
        block: int,
        *,
        batch: int = 1,
        depth: int = 1,
        another: Callable[[Samples], bool],
        clear_above: float | None = None,
    ) -> Samples:
        """Measure one row in several launches.

        :param block: the size of one block in bytes.
        :param another: returns whether one more launch is needed, from the samples so far.
        :param clear_above: as for :meth:`measure`, for the first launch.
        :raises WorkerError: as :meth:`measure`.
        """
        samples = self.measure(block, batch=batch, depth=depth, clear_above=clear_above)
        while another(samples):
            self.relaunch()
            samples = samples.with_launch(self.measure(block, batch=batch, depth=depth))
        return samples

    def relaunch(self) -> None:
        """End both workers and start new ones for the next launch."""
        self._use(self._relaunch(self._launch))

    def measure(
        self,
        block: int,
        *,
        batch: int = 1,
        depth: int = 1,
        beside: Callable[[], object] | None = None,
        links: Sequence[Link] = (),
        clear_above: float | None = None,
    ) -> Samples:
        """Measure one row in one launch.

        Before and after the timed windows, new patterns are transferred and every byte is compared at the destination.
        The bytes of the timed transfers are compared, too: after the last window, and between windows if the
        transfers do not walk a footprint. They are then overwritten, so that the next window has to move them again.

        :param block: the size of one block in bytes.
        :param batch: blocks per transfer.
        :param depth: transfers in flight.
        :param beside: for rows that are measured at the same time: called before the transfers are timed, to wait for
            the other rows. All are then timed for the same duration, whatever the number of iterations.
        :param links: the links that are measured at the same time, whose workers are not contention.
        :param clear_above: bytes per second: the first four windows suffice if they agree and none is slower; None: no
            row is clear. It does not apply if ``--nixl-iterations`` is given, if ``--nixl-duration`` is more than ten
            windows take, if other rows are timed at the same time, or if the transfers walk a footprint.
        :raises WorkerError: a worker dies or hangs, or NIXL reports an error; both workers are then ended.
        :raises FindingError: GPU memory was moved as host memory.
        """
        key = self.key(block, batch=batch, depth=depth)
        size = block * batch * self._count(block * batch, depth)
        with self._transfers(block, batch, depth) as transfers:
            first, seed, last = self._fill(size, poison=True), secrets.randbits(63), secrets.randbits(63)
            self._run("move", transfers, self._settings.timeout)
            filling = self._start_filling(seed, size)
            corruption = self._compare("before the timed transfers", first, size)
            results(filling)
            waits = [] if beside is not None else [self._launch.kernel_seconds()]
            if beside is not None:
                beside()
            before = loss_counters((self.target.worker, self.initiator.worker))
            between = beside is None and not self.footprint and not self._launch.backend.STORAGE
            ends = self._row_ends(min(size, BETWEEN_WINDOWS_BYTES), seed) if between else None
            if self._settings.iterations or self.footprint or beside is not None:
                clear_above = None
            decisive_rate = None if clear_above is None else clear_above / (block * batch)
            measured = self._timed(
                transfers, block, [self, *links], ends, decisive_rate=decisive_rate, together=beside is not None
            )
            if beside is None:
                waits.append(self._launch.kernel_seconds())
            after = loss_counters((self.target.worker, self.initiator.worker), before)
            if corruption is None and measured["corruption"] is not None:
                corruption = Corruption(phase="between the timed transfers", **measured["corruption"])
            filling = self._start_filling(last, size)
            corruption = corruption or self._compare("after the timed transfers", seed, size)
            results([*filling, self.destination.fill(last, size=size, inverted=True)])
            if corruption is None:
                self._run("move", transfers, self._settings.timeout)
                corruption = self._compare("in the transfers after the timed ones", last, size)
        carried = CarrierBytes.from_plain(measured["counted"], block * batch * sum(measured["transfers"]))
        log, backend = self.initiator.worker.output(), self._launch.backend
        if corruption is None and (mistaken := backend.mistaken(log, self.op, self.memory)):
            raise FindingError(VRAM_AS_HOST, mistaken)
        transports = carried.named(backend.transports(log, self.op, block, self.memory))
        samples = Samples(
            key=key,
            windows=tuple(measured["windows"]),
            transfers=tuple(measured["transfers"]),
            latencies=tuple(measured["latencies"]),
            transports=transports,
            corruption=corruption,
            counted=carried,
            # Windows that agree are proof of none. The kernel counts in steps of 10 ms, too coarse for few short ones.
            contention=(
                measured["contention"]
                if len(measured["windows"]) >= WINDOWS or sum(measured["windows"]) > WINDOWS * WINDOW_SECONDS
                else 0.0,
            ),
            obstacle=obstacle_between(self.initiator.worker, self.target.worker),
            protocol=protocol(log, self.op, block, self.memory),
            hosts=tuple(str(end.worker.versions["host"]) for end in (self.initiator, self.target)),
            ucx_tls=ucx_tls_of_ranks(self.initiator.worker, self.target.worker),
            gpu_waits=(max(waits),) if any(waits) else (),
            lossy=lossy_devices(before, after, transports, carried.payload),
        )
        _log.info(
            "%s: %s GB/s over %s",
            key,
            gigabytes(samples.bandwidth),
            "+".join(samples.transports) or "an unknown transport",
        )
        return samples

    @contextlib.contextmanager
    def _transfers(self, block: int, batch: int, depth: int) -> Iterator[Ref]:
        """Prepare the transfers of a row. A failure ends the launch."""
        size = block * batch
        if size * depth > (capacity := self._launch.capacity):
            if (shortage := self._launch.shortage) is not None:
                raise NixlPluginError(
                    f"{shortage.reason}: this row needs {size * depth} bytes at each end, and the ends have {capacity}",
                    shortage.remedy,
                )
            raise NixlPluginError(
                f"{depth} transfers of {size} bytes do not fit into this link's buffers of {capacity} bytes",
                "add the block size to --nixl-blocks, and the batch and depth to --nixl-batch and --nixl-depth",
            )
        if self.footprint and self.footprint < size * depth:
            raise NixlPluginError(
                f"{depth} transfers of {size} bytes do not fit into the footprint of {self.footprint} bytes",
                "give a larger --nixl-footprint",
            )
        try:
            with versions_named([self.initiator.worker, self.target.worker]):
                self._prepare_objects(block, batch * depth)
                prepared = self._prepare(block, batch, self._count(size, depth), depth)
                yield prepared
                self.initiator.worker.call("row_release", seconds=self._settings.timeout, transfers=prepared)
                self._prepare_objects(0, 0)
        except (NixlError, WorkerLateError) as error:
            try:
                self._name_fault(error)
            finally:
                self._launch.kill()
            raise
        except BaseException:
            self._launch.kill()
            raise

    def _count(self, size: int, depth: int) -> int:
        """Return the number of prepared transfers: those that walk the footprint, or one per transfer in flight.

        :param size: the bytes of one transfer.
        """
        return self.footprint // size if self.footprint else depth

    def _prepare(self, block: int, batch: int, count: int, depth: int) -> Ref:
        """Prepare the transfers of neighbouring parts of the buffers in the initiator's worker."""
        storage = self._launch.backend.STORAGE
        prepared: Ref = self.initiator.worker.call(
            "row_prepare",
            seconds=self._settings.timeout,
            agent=self.initiator.ref,
            op=self.op,
            target=self.target.name,
            plugin=self._launch.backend.PLUGIN,
            sides=[[end.address, end.memory, end.device] for end in self._launch.buffers],
            block=block,
            batch=batch,
            count=count,
            depth=depth,
            acknowledged=(self.op == "WRITE" or self._row.notify == EACH) and not storage,
            notify_each=self._notifies_each,
            announced=self._announced,
            storage=self.destination.ref if storage and self.op == "WRITE" else None,
            objects=self._launch.buffers[1].ref if self.memory.target == "OBJ" else None,
        )
        return prepared

    def _prepare_objects(self, block: int, count: int) -> None:
        """Register the objects of a row, if the target is an object store; 0 of them: delete the existing ones."""
        if self.memory.target == "OBJ":
            ends: dict[str, Any] = {"agent": self.target.ref, "buffer": self._launch.buffers[1].ref}
            self.target.worker.call("prepare_objects", **ends, block=block, count=count)

    def _name_fault(self, error: WorkerError) -> None:
        """Ask the object store without NIXL, whose error does not say what failed. If it answers, delete the objects.

        :raises WorkerError: the server cannot be used, with the reason.
        """
        if self.memory.target == "OBJ":
            try:
                self.target.worker.call("probe_objects", buffer=self._launch.buffers[1].ref)
            except WorkerError as found:
                raise WorkerError(f"{found.reason}; {error.reason}", found.remedy, error.detail) from None
            with contextlib.suppress(WorkerError):
                self._prepare_objects(0, 0)

    @property
    def _notifies_each(self) -> bool:
        """Whether all transfers carry a notification; with some backends only that proves the delivery of a WRITE."""
        return self._row.notify == EACH or (self.op == "WRITE" and not self._launch.backend.COMPLETION_IMPLIES_DELIVERY)

    @property
    def _announced(self) -> bool:
        """Whether this NIXL sends only the notification with which a handle was created."""
        version = str(self.initiator.worker.versions.get("nixl", ""))
        return not self._launch.backend.COMPLETION_IMPLIES_DELIVERY and nixl_releases.sends_the_first_notification(
            version
        )

    def _fill(self, size: int, *, poison: bool) -> int:
        """Write a new pattern to the source and, with ``poison``, its complement to the destination."""
        seed = secrets.randbits(63)
        filling = [self.source.fill(seed, size=size)]
        if poison:
            filling.append(self.destination.fill(seed, size=size, inverted=True))
        results(filling)
        return seed

    def _start_filling(self, seed: int, size: int) -> list[Pending]:
        """Start to write a pattern to the source, and return what to wait for."""
        filling = [self.source.fill(seed, size=size)]
        if self._launch.backend.STORAGE:  # one worker has both ends, and answers in turn
            results(filling)
            return []
        return filling

    def _compare(self, phase: str, seed: int, size: int) -> Corruption | None:
        corruption = self.destination.compare(seed, size=size)
        return None if corruption is None else Corruption(phase=phase, **corruption)

    def _row_ends(self, size: int, seed: int, *, new_patterns: bool = False) -> _RowEnds:
        """Return what the workers of initiator and target need to compare and write ``size`` bytes between windows."""
        initiator, target = (
            {
                "buffer": buffer.ref,
                "size": size,
                "seed": seed,
                "receives": buffer is self.destination,
                "new_patterns": new_patterns,
            }
            for buffer in self._launch.buffers
        )
        return initiator, target

    def _timed(
        self,
        transfers: Ref,
        block: int,
        links: Sequence[Link],
        ends: _RowEnds | None = None,
        *,
        decisive_rate: float | None = None,
        together: bool,
    ) -> MeasuredTransfers:
        settings = self._settings
        usual = WINDOWS if self.memory.target == "OBJ" else usual_iterations(block)
        iterations = 1 if together else settings.iterations or usual
        explicit = settings.sources.get("warmup", "default") != "default"
        warmup = settings.warmup if explicit else usual_warmup(block, settings.warmup)
        duration = max(settings.duration, BESIDE_SECONDS) if together else settings.duration
        if duration > WINDOWS * WINDOW_SECONDS:
            decisive_rate = None
        measured: MeasuredTransfers = self._run(
            "measure",
            transfers,
            settings.timeout + duration,
            ends=ends,
            iterations=iterations,
            warmup=min(warmup, 1) if together else warmup,
            warmup_seconds=self._launch.warmup_seconds(),
            duration=duration,
            decisive_rate=decisive_rate,
            longest=None if settings.iterations else LONGEST_SECONDS,
            op=self.op,
            own=self._beside_the_initiator(links),
        )
        return measured

    def _beside_the_initiator(self, links: Sequence[Link]) -> list[int]:
        """Return the pids of the links' other workers on the initiator's host, which are not contention."""
        initiator = self.initiator.worker
        workers = [end.worker for link in links for end in (link.initiator, link.target)]
        return [
            worker.pid
            for worker in workers
            if worker is not initiator and worker.versions["host"] == initiator.versions["host"]
        ]

    def _run(
        self,
        command: str,
        transfers: Ref,
        seconds: float,
        ends: _RowEnds | None = None,
        **arguments: int | float | str | list[int] | None,
    ) -> Any:
        """Run ``command`` in the initiator and return its answer; meanwhile the target serves, if it is an agent.

        :param ends: the initiator's and the target's end of the row, if they compare bytes between windows.
        """
        # Workers time out before this process does, so that their own messages arrive.
        limit = seconds + 5
        serving: list[Pending] = []
        if not self._launch.backend.STORAGE:
            target_end = {} if ends is None else {"end": ends[1]}
            serving = [
                self.target.worker.request("serve", seconds=limit, agent=self.target.ref, timeout=seconds, **target_end)
            ]
        initiator_end = {} if ends is None else {"end": ends[0]}
        running = self.initiator.worker.request(
            command,
            seconds=limit,
            transfers=transfers,
            timeout=seconds,
            **initiator_end,
            **arguments,
        )
        return results([running], serving=serving)[0]


def usual_iterations(block: int) -> int:
    """Return the least number of timed transfers of a row if ``--nixl-iterations`` gives none.

    :param block: the size of one block in bytes.
    """
    return 1000 if block <= MIB else max(WINDOWS, -(-LARGE_BYTES // block))


def usual_warmup(block: int, most: int) -> int:
    """Return the number of transfers before the clock starts if ``--nixl-warmup`` gives none.

    :param block: the size of one block in bytes.
    :param most: the number for blocks of which as many do not move more than the timed transfers have to.
    """
    return min(most, -(-LARGE_BYTES // block))


def ucx_tls_of_ranks(first: Worker, second: Worker) -> tuple[tuple[str, str], ...]:
    """Return each of two ranks that has UCX_TLS set, in words, and its value; empty if both workers are of one rank."""
    if first.rank == second.rank:
        return ()
    settings = (
        (f"rank {worker.rank} on {worker.versions['host']}", worker.versions.get("ucx_tls"))
        for worker in (first, second)
    )
    return tuple((rank, str(value)) for rank, value in settings if value)


def loss_counters(workers: Iterable[Worker], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return by host what its devices count of packets, for :func:`pytest_nixl.model.device_counters.lossy_devices`.

    :param before: what this returned earlier: a host that had no counters is not asked again. None: ask all.
    """
    by_host = {str(worker.versions["host"]): worker for worker in workers}
    counting = {host: worker for host, worker in by_host.items() if before is None or before[host]}
    return {host: worker.call("loss_counters") for host, worker in counting.items()}


def obstacle_between(one: Worker, other: Worker) -> str:
    """Return what keeps UCX from copying between two workers; empty if nothing does, or if they are on two hosts."""
    first, second = one.versions, other.versions
    if first["host"] != second["host"]:
        return ""
    return str(first.get("obstacle") or second.get("obstacle") or "")
