# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent that runs in a worker and has the public methods of NIXL's ``nixl_agent``.

Descriptor lists and handles stay in the worker. In this process they are opaque references for later calls.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from pytest_nixl.core.wire import Ref
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import HOST
from pytest_nixl.model.row_key import HUGE
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.nixl.agent_calls import AgentCalls, DescriptorList, with_methods
from pytest_nixl.nixl.backends import between_agents, libraries, shake_hands
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST, taken_for_host
from pytest_nixl.nixl.buffer import Buffer, PendingBuffer
from pytest_nixl.nixl.gpus import gpus, require_gpu
from pytest_nixl.processes.hosts import Host, LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.processes.worker_process import Worker, results

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it

    from pytest_nixl.nixl.gpus import LinkGpu

_numbers = itertools.count()
#: How an agent is created if nothing is said.
DEFAULT = AgentOptions()


class AgentKeywords(TypedDict, total=False):
    """How an agent is created, as :meth:`NixlAgent.within` describes it."""

    progress_thread: bool | None
    listen_thread: bool
    listen_port: int
    telemetry: bool
    agent_options: AgentOptions


class BesideOptions(AgentKeywords, total=False):
    """The options of :meth:`NixlAgent.beside`."""

    backends: Sequence[str]


class AnotherOptions(AgentKeywords, total=False):
    """The options of :meth:`NixlAgent.another`, as :meth:`Agents.start` describes them."""

    backends: Sequence[str] | None
    environment: Mapping[str, str | None] | None
    host: Host | None


def _refuse_unknown(method: str, options: Mapping[str, object], options_type: type) -> None:
    """Blame the call that has an unknown option, and not the one that creates the agent."""
    __tracebackhide__ = True
    names = sorted(options_type.__annotations__)  # those of a TypedDict are with the inherited ones
    for name in options:
        if name not in names:
            raise TypeError(f"{method}() has no option {name!r}; it has name, {', '.join(names)}")


class NixlAgent(AgentCalls):
    """A NIXL agent in a separate worker process.

    The methods of NIXL's ``nixl_agent`` take the same arguments and return the same values, with opaque references for
    descriptor lists and handles. They raise :class:`~pytest_nixl.processes.worker_errors.NixlError` if NIXL reports
    an error, and :class:`~pytest_nixl.processes.worker_errors.WorkerError` if the worker dies or hangs. The pytest
    process survives both.
    """

    def __init__(self, worker: Worker, ref: Ref, name: str) -> None:
        self.worker, self.ref = worker, ref
        self.name = worker.agent_names[ref.number] = name
        self._siblings: Agents | None = None
        self._made_with: dict[str, Any] = {}

    def __repr__(self) -> str:
        backends = ", ".join(self._made_with.get("backends", ())) or "no backend"
        ended = "" if self.worker.alive else ", which has ended"
        return f"<NixlAgent {self.name!r} created with {backends} in {self.worker.name}{ended}>"

    @classmethod
    def within(
        cls,
        worker: Worker,
        *,
        backends: Sequence[str],
        name: str | None = None,
        progress_thread: bool | None = True,
        listen_thread: bool = False,
        listen_port: int = 0,
        telemetry: bool = False,
        agent_options: AgentOptions = DEFAULT,
    ) -> NixlAgent:
        """Create an agent in a worker.

        :param backends: the names of the backends to create.
        :param name: the agent's name for other agents; None for a generated one.
        :param progress_thread: whether NIXL makes progress in a spinning thread; otherwise only when it is polled.
            None for a thread only if a backend needs it, because other agents wait for it while they load metadata.
        :param listen_thread: whether NIXL listens for other agents' metadata.
        :param listen_port: the port of that listener; 0 for a free one.
        :param telemetry: whether NIXL records telemetry of transfers.
        :param agent_options: worker threads, synchronization mode and parameters of backends. Its progress thread
            does not count here.
        :raises WorkerError: the agent or a backend cannot be created; the worker is then ended.
        """
        [agent] = cls.within_each(
            [worker],
            [name],
            backends=backends,
            progress_thread=progress_thread,
            listen_thread=listen_thread,
            listen_port=listen_port,
            telemetry=telemetry,
            agent_options=agent_options,
        )
        return agent

    @classmethod
    def within_each(
        cls,
        workers: Sequence[Worker],
        names: Sequence[str | None] = (),
        *,
        backends: Sequence[str],
        progress_thread: bool | None = True,
        listen_thread: bool = False,
        listen_port: int = 0,
        telemetry: bool = False,
        agent_options: AgentOptions = DEFAULT,
    ) -> list[NixlAgent]:
        """Create an agent in each worker, all at the same time. The parameters are those of :meth:`within`.

        :param workers: the workers.
        :param names: the name of each agent; None, or none at all, for generated names.
        :raises WorkerError: an agent or a backend cannot be created; all these workers are then ended.
        """
        options: dict[str, Any] = {
            "backends": list(backends),
            "progress_thread": shake_hands(backends) if progress_thread is None else progress_thread,
            "listen_thread": listen_thread,
            "telemetry": telemetry or agent_options.telemetry,
        }
        arguments: dict[str, Any] = {
            **options,
            "sync_mode": agent_options.sync_mode,
            "parameters": {name: agent_options.parameters_of(name) for name in backends},
        }
        called = [
            f"rank{worker.rank}-{worker.role}-{next(_numbers)}" if name is None else name
            for worker, name in zip(workers, names or [None] * len(workers), strict=True)
        ]
        try:
            replies = results(
                [
                    worker.request(
                        "create_agent",
                        name=name,
                        listen_port=listen_port,
                        threads=agent_options.threads_of(worker.role),
                        **arguments,
                    )
                    for worker, name in zip(workers, called, strict=True)
                ]
            )
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        agents = []
        for worker, name, reply in zip(workers, called, replies, strict=True):
            worker.versions.update(reply["versions"])
            agents.append(cls(worker, reply["agent"], name))
            agents[-1]._made_with = {**options, "agent_options": agent_options}
        return agents

    @property
    def siblings(self) -> Sequence[Worker]:
        """The workers that end together with that of this agent, and its own; none if nothing ends them together."""
        return self._siblings.workers if self._siblings is not None else ()

    def close(self) -> None:
        """End the worker with all its agents."""
        self.worker.close()

    def beside(self, name: str | None = None, **options: Unpack[BesideOptions]) -> NixlAgent:
        """Create another agent in the same worker, which shares the process, its memory and its environment.

        :param options: as for :meth:`within`; by default those of this agent, except for the port.
        :raises WorkerError: the agent cannot be created; the worker is then ended with all its agents.
        """
        __tracebackhide__ = True
        _refuse_unknown("beside", options, BesideOptions)
        return NixlAgent.within(self.worker, name=name, **{**self._made_with, **options})

    @contextlib.contextmanager
    def polled(self) -> Iterator[None]:
        """Poll the agent in its worker while the body makes calls to other workers.

        Agents of some backends wait for each other's progress while they load metadata, and an agent without a
        progress thread makes progress only when it is polled. Other agents are not polled here. A call to this
        worker ends the polling. Notifications that arrive meanwhile are lost.

        :raises WorkerError: the worker fails, or the body takes longer than the worker's time limit.
        """
        if self._made_with.get("progress_thread", True) or not shake_hands(self._made_with["backends"]):
            yield
            return
        limit = self.worker.timeout
        serving = self.worker.request("serve", seconds=limit + 5, agent=self.ref, timeout=limit)
        try:
            yield
        except BaseException:
            if self.worker.alive:
                self.worker.cancel()
                with contextlib.suppress(WorkerError):
                    serving.result()
            raise
        results([], serving=[serving])

    def connect_to(self, other: NixlAgent) -> None:
        """Connect to an agent that this one knows, if their backend waits for the other's progress to connect.

        The other agent is polled meanwhile. With other backends nothing is done: the first transfer connects.

        :raises WorkerError: NIXL cannot connect, or a worker fails.
        """
        if shake_hands(self._made_with["backends"]):
            with other.polled():
                self.make_connection(other.name)

    def delete(self) -> None:
        """Delete the agent but keep the worker, like ``del agent`` in a program.

        If etcd does not answer, NIXL can take minutes; the worker is ended at its deadline.

        :raises WorkerError: the worker dies, or misses its deadline.
        """
        self.worker.call("forget", objects=[self.ref])

    def another(self, name: str | None = None, **options: Unpack[AnotherOptions]) -> NixlAgent:
        """Start another agent in another worker, which ends with the same test.

        :param options: as for :meth:`Agents.start`.
        :raises ValueError: this agent does not come from the fixture ``nixl_agent``.
        :raises WorkerError: the worker or the agent cannot be started.
        """
        __tracebackhide__ = True  # the line of the test is the one to mend
        _refuse_unknown("another", options, AnotherOptions)
        if self._siblings is None:
            raise ValueError("only an agent of the fixture nixl_agent can start another")
        return self._siblings.start(name, **options)

    def run(self, function: str, **arguments: Any) -> Any:
        """Call a function with the raw ``nixl_agent`` in the worker.

        :param function: ``module:function``; it is called as ``function(agent, **arguments)``.
        :param arguments: JSON values, bytes, or a :class:`Buffer` of this worker. The function gets a buffer as an
            array with ``__array_interface__``, or in VRAM ``__cuda_array_interface__``.
        :returns: what the function returns: JSON values or bytes. Use
            :func:`pytest_nixl.nixl.worker.arrays.descriptor_of` in the function to give arrays to NIXL.
        :raises WorkerError: the function raises an exception, or the worker dies or hangs.
        """
        wire_arguments = {name: value.ref if isinstance(value, Buffer) else value for name, value in arguments.items()}
        file = getattr(sys.modules.get(function.split(":")[0]), "__file__", None)
        source = {"file": file} if file else {}  # pytest may have it from a file that is not on sys.path
        return self.worker.call("run", agent=self.ref, function=function, arguments=wire_arguments, **source)

    def gpus(self) -> list[LinkGpu]:
        """Return the GPUs that the worker sees.

        :raises NotApplicableError: the worker sees no GPU; the test is then skipped.
        """
        return gpus(self.worker)

    def allocate(
        self, size: int, memory: str = "DRAM", *, device: int = 0, directory: str = "", alignment: int = 1
    ) -> Buffer:
        """Allocate a buffer in the worker. :meth:`register` registers it.

        :param size: in bytes.
        :param memory: ``DRAM``, ``VRAM``, ``FILE`` for a file without a name, or ``OBJ`` for objects.
        :param device: the GPU for ``VRAM``, as CUDA numbers the GPUs that the worker sees.
        :param directory: the directory for ``FILE``; empty for the system's temporary directory.
        :param alignment: a divisor of all offsets and lengths (in bytes) that NIXL uses in a file. If it is a multiple
            of 4096, the page cache is bypassed if the file system supports that.
        :raises NotApplicableError: the worker does not see this GPU; the test is then skipped.
        :raises WorkerError: the memory cannot be allocated.
        """
        request = self.request_buffer(size, memory, device=device, directory=directory, alignment=alignment)
        return request.result()

    def request_buffer(
        self,
        size: int,
        memory: str = "DRAM",
        *,
        device: int = 0,
        directory: str = "",
        alignment: int = 1,
        pages: str = HUGE,
    ) -> PendingBuffer:
        """Start to allocate a buffer like :meth:`allocate`; ``.result()`` of what is returned waits for it.

        :param pages: the pages of a buffer in host memory: ``huge`` or ``base``.
        :raises NotApplicableError: the worker does not see this GPU.
        """
        of: dict[str, Any] = {"directory": directory, "alignment": alignment}
        if memory == "VRAM":
            gpu = require_gpu(self.worker, device, memory)
            self.worker.versions["gpu"] = str(gpu)
            of = {"device": gpu.number}
        elif memory == "DRAM" and pages != HUGE:
            of["pages"] = pages
        request = self.worker.request("allocate", size=size, memory_type=memory, **of)
        return PendingBuffer(request, size, memory)

    def allocate_asked(self, size: int, *, initiator: bool = False) -> Buffer:
        """Allocate a buffer of the memory type that this run requests for targets or initiators.

        If the run requests several types, the first with GPU memory is used, because it is the harder case.

        :param size: in bytes.
        :param initiator: whether the memory type is that of initiators.
        :raises NotApplicableError: the worker does not see the GPU; the test is then skipped.
        """
        settings = self._siblings.settings if self._siblings is not None else None
        pairs = settings.memory if settings is not None else (HOST,)
        pair = next((pair for pair in pairs if pair.on_gpu), HOST)
        memory = pair.initiator if initiator else "DRAM" if pair.stored else pair.target
        devices = settings.devices if settings is not None else None
        number = 0 if devices is None else devices.initiator if initiator else devices.target
        return self.allocate(size, memory, device=number)

    def register(self, buffer: Buffer) -> DescriptorList:
        """Register a whole buffer, and return its descriptor list, the argument for ``deregister_memory``.

        :raises FindingError: the backend treats GPU memory as host memory.
        :raises WorkerError: NIXL reports another error, or the worker dies or hangs.
        """
        try:
            return cast(DescriptorList, with_methods(self.worker.call("register", agent=self.ref, buffer=buffer.ref)))
        except NixlError as error:
            description = taken_for_host(self.worker.output()) if buffer.memory == "VRAM" else ""
            if not description:
                raise
            lacking = libraries.lacking(self.worker.versions)
            reason = f"{self.worker.name} could not register memory of GPU {buffer.device}: {description}"
            reason += f"; {lacking}" if lacking else ""
            raise FindingError(VRAM_AS_HOST, reason, error.detail, libraries.remedy(lacking)) from None


class Agents:
    """A context manager for agents in separate workers, which end when it exits.

    ``with Agents(settings=nixl_settings) as agents:`` in a fixture of your own gives it any scope.

    :param host: the rank on which workers start by default, such as one of ``nixl_cluster.hosts``; None for this host.
    :param settings: the settings of the run, from the fixture ``nixl_settings``.
    """

    def __init__(self, host: Host | None = None, settings: Settings | None = None) -> None:
        if settings is None:
            raise TypeError("Agents() needs settings=nixl_settings, the value of the fixture of that name")
        if host is None:
            our_variables = own_variables(settings.programs, memory=settings.memory)
            host = LocalHost(supervisor(), own=our_variables)
        self._host = host
        self.settings = settings
        self._workers: list[Worker] = []

    def start(
        self,
        name: str | None = None,
        *,
        backends: Sequence[str] | None = None,
        environment: Mapping[str, str | None] | None = None,
        host: Host | None = None,
        **options: Any,
    ) -> NixlAgent:
        """Start a worker with an agent.

        :param name: the agent's name; None for a generated one.
        :param backends: the backends to create; None for the first requested one that moves bytes between agents.
        :param environment: variables for the worker; None unsets one.
        :param host: the rank, such as one of ``nixl_cluster.hosts``; None for the default of this object.
        :param options: as for :meth:`NixlAgent.within`. Without ``progress_thread``, and with None, the run's option
            ``--nixl-progress-thread`` decides; if it is ``auto``, the agent has a thread, or with None only if its
            backend needs one. The run's other options of agents apply, too.
        :raises WorkerError: the worker or the agent cannot be started.
        """
        hosts = [host or self._host]
        [agent] = self.start_each([name], backends=backends, environment=environment, hosts=hosts, **options)
        return agent

    def start_each(
        self,
        names: Sequence[str | None],
        *,
        backends: Sequence[str] | None = None,
        environment: Mapping[str, str | None] | None = None,
        hosts: Sequence[Host] = (),
        **options: Any,
    ) -> list[NixlAgent]:
        """Start a worker with an agent for each name, like :meth:`start`. The workers load NIXL at the same time.

        :param hosts: the ranks for the first, the second, … agent, which are used again from the first.
        """
        # No agent uses an etcd, in particular the deployment's, unless a test gives it the address.
        changed = {"NIXL_ETCD_ENDPOINTS": None, "NIXL_ETCD_NAMESPACE": None, **(environment or {})}
        requested = self.settings.backend
        chosen = (between_agents(requested) or requested)[:1] if backends is None else backends
        run_options = self.settings.agents[0]
        if options.get("progress_thread") is None and run_options.progress_thread is not None:
            options["progress_thread"] = run_options.progress_thread
        options.setdefault("agent_options", run_options)
        started = len(self._workers)
        for _, host in zip(names, itertools.cycle(hosts or [self._host]), strict=False):
            limits = self.settings.timeout, self.settings.start_timeout
            self._workers.append(host.start("agent", changed, *limits))
        agents = NixlAgent.within_each(self._workers[started:], names, backends=chosen, **options)
        for agent in agents:
            agent._siblings = self
        return agents

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that were started, in their order."""
        return tuple(self._workers)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.ask_to_end()  # all at the same time
        for worker in self._workers:
            worker.close()
