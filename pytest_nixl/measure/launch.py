# SPDX-License-Identifier: Apache-2.0
"""A launch: two connected workers with one agent each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import HUGE
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import Backend
from pytest_nixl.nixl.buffer import Buffer, PendingBuffer
from pytest_nixl.nixl.gpus import gpus, require_gpu
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import GpuFullError, WorkerError
from pytest_nixl.processes.worker_process import Pending, Worker, results


@contextmanager
def versions_named(workers: Sequence[Worker]) -> Iterator[None]:
    """Add the releases to a :class:`WorkerError` that is raised in this context, if the workers have different ones.

    :raises WorkerError: the error that was raised in the context.
    """
    try:
        yield
    except WorkerError as error:
        versions = {}
        for worker in workers:
            ucx = f" (UCX {worker.versions['ucx']})" if worker.versions.get("ucx") else ""
            versions[worker.rank] = f"{worker.versions['nixl_package']} {worker.versions['nixl']}{ucx}"
        listing = " and ".join(f"rank {rank} has {version}" for rank, version in versions.items())
        if len({*versions.values()}) > 1 and listing not in error.reason:
            error.reason = f"{error.reason}; {listing}, which may be the cause"
            page = "docs/reference/versions.md"
            error.remedy = f"install the same release of NIXL on all ranks (see {page}); otherwise {error.remedy}"
        raise


#: Seconds of transfers before a row is timed, and before the first row of a launch. New processes may share a core at
#: first, which costs a third of the bandwidth of small blocks. A traffic shaper's burst also ends in this time. The
#: medians of 4 KiB in 12 launches each with 0.15, 0.2 and 0.3 s were 1.36, 1.37 and 1.36 GB/s.
WARMUP_SECONDS, FIRST_WARMUP_SECONDS = 0.005, 0.15
#: Additional environment variables of the initiator's worker and of the target's worker.
Variables = tuple[Mapping[str, str], Mapping[str, str]]


class Launch:
    """Two connected workers with one agent each, for WRITE and READ.

    ``initiator`` and ``target`` are the agents, and ``buffers`` are their registered buffers, in this order.

    With a storage backend there is one worker with one agent, and the target is a file.

    :param hosts: the ranks of the initiator's worker and of the target's worker.
    :param memory: the memory types of initiator and target.
    :param capacity: the size of each end's buffer in bytes.
    :param alignment: a divisor of the offsets and lengths of all transfers, in bytes.
    :param devices: the GPUs of the ends in VRAM; None to let :func:`choose_gpus` choose.
    :param variables: additional environment variables of the two workers.
    :param smaller: smaller sizes, the largest first, to try if a GPU has no memory for ``capacity``. The launch's
        ``capacity`` is then the one for which it has, and ``shortage`` says why.
    :param regions: the number of equal parts in which each buffer is registered.
    :param agent_options: how the agents are created; None for the first of the settings.
    :param pages: the pages of buffers in host memory: ``huge`` or ``base``.
    :raises NotApplicableError: an end does not have this memory.
    :raises WorkerError: a worker or an agent cannot be started, or the agents cannot connect.
    """

    def __init__(
        self,
        hosts: tuple[Host, Host],
        settings: Settings,
        backend: Backend,
        memory: MemoryPair,
        capacity: int,
        alignment: int = 1,
        devices: DevicePair | None = None,
        variables: Variables = ({}, {}),
        regions: int = 1,
        agent_options: AgentOptions | None = None,
        smaller: Sequence[int] = (),
        pages: str = HUGE,
    ) -> None:
        self.backend = backend
        self.agent_options = agent_options or settings.agents[0]
        self.memory = memory
        self.shortage: GpuFullError | None = None
        self._directory, self._alignment, self._regions = settings.file_dir, alignment, regions
        self._pages = pages
        self._warmup_seconds = FIRST_WARMUP_SECONDS
        environment = worker_environment(backend)
        workers: list[Worker] = []
        try:
            # Start both workers before waiting for one.
            roles = ("initiator",) if backend.STORAGE else ("initiator", "target")
            for host, role, own_variables in zip(hosts, roles, variables, strict=False):
                limits = settings.timeout, settings.start_timeout
                workers.append(host.start(role, {**environment, **own_variables}, *limits))
            self.devices = choose_gpus(workers[0], workers[-1], memory, devices)
            ends = (memory.initiator, self.devices.initiator), (memory.target, self.devices.target)
            for worker, (kind, device) in zip(workers, ends, strict=False):
                if kind == "VRAM":
                    worker.call("activate", device=device)
            agents = NixlAgent.within_each(
                workers,
                backends=[backend.NAME],
                progress_thread=self.agent_options.progress_thread or False,
                agent_options=self.agent_options,
            )
            self.initiator, self.target = agents[0], agents[-1]
            self.capacity, self.buffers = self._allocate(agents, ends, (capacity, *smaller))
            self._register(self.initiator, self.buffers[0])
            self._register(self.target, self.buffers[1])
            if not backend.STORAGE:
                with versions_named(workers):
                    connect_partners(agents, [(0, 1)])
        except BaseException:
            for worker in workers:
                worker.kill()
            raise

    def _allocate(
        self, agents: Sequence[NixlAgent], ends: tuple[tuple[str, int], tuple[str, int]], sizes: Sequence[int]
    ) -> tuple[int, tuple[Buffer, Buffer]]:
        """Return the first of some sizes for which both ends have memory, and their buffers.

        :raises GpuFullError: a GPU has no memory for any of them.
        """
        for size in sizes:
            # Both allocate at the same time: the kernel takes long to give new memory.
            pending = [self._request_buffer(agents[place], *ends[place], size) for place in (0, -1)]
            buffers = []
            for request in pending:
                try:
                    buffers.append(request.result())
                except GpuFullError as error:
                    self.shortage = error
            if len(buffers) == len(pending):
                return size, (buffers[0], buffers[1])
            for buffer in buffers:
                buffer.free()
        assert self.shortage is not None
        raise self.shortage

    def _request_buffer(self, agent: NixlAgent, memory: str, device: int, size: int) -> PendingBuffer:
        if memory == "VRAM":
            types = sorted(name.removesuffix("_SEG") for name in agent.get_backend_mem_types(self.backend.NAME))
            if memory not in types:
                moves = f"{self.backend.NAME} supports only {' and '.join(types)}"
                raise NotApplicableError(
                    f"{self.memory} needs a backend that supports GPU memory, but {moves}",
                    "use --nixl-backend=UCX, or remove VRAM from --nixl-memory",
                )
        return agent.request_buffer(
            size, memory, device=device, directory=self._directory, alignment=self._alignment, pages=self._pages
        )

    def _register(self, agent: NixlAgent, buffer: Buffer) -> None:
        if buffer.memory == "OBJ":
            pass  # a row registers its own objects, one for each block
        elif self._regions == 1:
            agent.register(buffer)
        else:
            part = self.capacity // self._regions
            parts = [(*buffer.descriptor(number * part, part), "") for number in range(self._regions)]
            agent.register_memory(parts, buffer.memory)

    def warmup_seconds(self) -> float:
        """Return the seconds of transfers before a row is timed, which are more for the first row of a launch."""
        seconds, self._warmup_seconds = self._warmup_seconds, WARMUP_SECONDS
        return seconds

    def kernel_seconds(self) -> float:
        """Return the seconds of a kernel over 8 bytes on the slower GPU of the two ends; 0: neither is in VRAM."""
        return max(buffer.gpu_wait() for buffer in self.buffers)

    @property
    def healthy(self) -> bool:
        """Whether both workers still run."""
        return self.initiator.worker.alive and self.target.worker.alive

    def close(self) -> None:
        """End both workers."""
        for end in (self.initiator, self.target):
            end.worker.ask_to_end()  # both at the same time
        self.initiator.close()
        self.target.close()

    def kill(self) -> None:
        """End both workers immediately."""
        self.initiator.worker.kill()
        self.target.worker.kill()


def worker_environment(backend: Backend) -> dict[str, str | None]:
    """Return the changes to this process's environment variables in workers with one agent of a backend each."""
    variables = backend.environment(os.environ)
    # Metadata is exchanged over the workers' own channel, so these agents never wait for an etcd that is down.
    return {"NIXL_ETCD_ENDPOINTS": None, **{key: value for key, value in variables.items() if key not in os.environ}}


def choose_gpus(first: Worker, second: Worker, memory: MemoryPair, requested: DevicePair | None) -> DevicePair:
    """Return the devices of a link's two ends; an end in host memory has device 0.

    :param first: the initiator's worker.
    :param second: the target's worker.
    :param memory: the memory types of both ends.
    :param requested: the requested GPUs; None for the initiator's first GPU and the target's first GPU that is a
        different one, if there is one.
    :raises NotApplicableError: an end in VRAM has no GPU, or not the requested one.
    """
    ends = (("VRAM" in memory.initiator, first), ("VRAM" in memory.target, second))
    visible = [gpus(worker, memory) if needs else [] for needs, worker in ends]
    if requested is not None:
        numbers = (requested.initiator, requested.target)
        for number, (needs, worker) in zip(numbers, ends, strict=True):
            if needs:
                require_gpu(worker, number, memory)
        return DevicePair(*(number if needs else 0 for number, (needs, _) in zip(numbers, ends, strict=True)))
    initiators_gpu = visible[0][0].uuid if visible[0] else ""
    target = next((gpu.number for gpu in visible[1] if gpu.uuid != initiators_gpu), 0)
    return DevicePair(0, target)


def connect_partners(agents: Sequence[NixlAgent], pairs: Iterable[tuple[int, int]]) -> None:
    """Let pairs of agents exchange metadata over their workers' own channels, without etcd or a port, and connect.

    While an agent loads the metadata of others or connects to them, these only poll: LIBFABRIC waits for its peer in
    these requests, and there is no progress thread. So the pairs are connected by the highest bit in which the numbers
    of their agents differ: each agent is then either on one side or on the other, and n agents need only log2(n) turns.

    :param pairs: the numbers of the agents to connect.
    :raises WorkerError: a pair cannot connect; workers of each pair may then have ended, or be busy.
    """
    sides: dict[int, tuple[_Partners, _Partners]] = {}
    for first, other in (sorted(pair) for pair in pairs):
        low, high = sides.setdefault((first ^ other).bit_length(), ({}, {}))
        low.setdefault(first, []).append(other)
        high.setdefault(other, []).append(first)
    used = sorted({number for low, high in sides.values() for number in (*low, *high)})
    metadata = dict(zip(used, results([_metadata(agents[number]) for number in used]), strict=True))

    def add(agent: NixlAgent, partners: Sequence[int]) -> list[Pending]:
        parts: list[list[bytes]] = [[]]
        for partner in partners:
            if sum(map(len, parts[-1])) + len(metadata[partner]) > _PART_BYTES and parts[-1]:
                parts.append([])
            parts[-1].append(metadata[partner])
        seconds = _all(agent, partners)
        return [agent.worker.request("add_agents", seconds=seconds, agent=agent.ref, metadata=part) for part in parts]

    def connect(agent: NixlAgent, partners: Sequence[int]) -> list[Pending]:
        seconds, names = _all(agent, partners), [agents[partner].name for partner in partners]
        return [agent.worker.request("connect", seconds=seconds, agent=agent.ref, targets=names, timeout=seconds)]

    for low, high in sides.values():
        for ask, asking, polling in ((add, low, high), (add, high, low), (connect, low, high)):
            _while_others_poll(agents, ask, asking, polling)


#: The partners of agents, by number.
_Partners = dict[int, list[int]]
#: The most bytes of metadata in one request, which has to fit into a value of etcd; one agent's may be larger.
_PART_BYTES = 1 << 18


def _all(agent: NixlAgent, partners: Sequence[int]) -> float:
    """Return the seconds that an agent may take for all its partners."""
    return agent.worker.timeout * len(partners)


def _metadata(agent: NixlAgent) -> Pending:
    return agent.worker.request("call", agent=agent.ref, method="get_agent_metadata", arguments=[], keywords={})


def _while_others_poll(
    agents: Sequence[NixlAgent],
    ask: Callable[[NixlAgent, Sequence[int]], list[Pending]],
    asking: _Partners,
    polling: _Partners,
) -> None:
    """Send requests to each asking agent, and wait for the answers. The others poll meanwhile."""
    idle = len(asking) + len(polling) > 2  # the processes of several pairs may share a processor
    seconds = max(_all(agents[number], partners) for number, partners in asking.items())
    serving = [
        agents[number].worker.request(
            "serve", seconds=seconds + 5, agent=agents[number].ref, timeout=seconds, idle=idle
        )
        for number in polling
    ]
    requests = [request for number, partners in asking.items() for request in ask(agents[number], partners)]
    results(requests, serving=serving)
