# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent that runs in a worker and has the public methods of NIXL's ``nixl_agent``.

Descriptor lists and handles stay in the worker. In this process they are opaque references for later calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pytest_nixl.core.wire import Ref
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import HOST
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.backends import between_agents, plugin_of, shake_hands
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST, taken_for_host
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_process import NixlError, Pending, Worker

if TYPE_CHECKING:
    from pytest_nixl.nixl.gpus import LinkGpu

#: ``(address, length in bytes, device)``, with a string as fourth element to register memory.
Descriptor = Sequence[Any]
_numbers = itertools.count()


@dataclass(frozen=True)
class Buffer:
    """Memory in a worker.

    :param worker: the worker that has allocated it.
    :param ref: the reference to the buffer in the worker.
    :param address: its address in that process; 0 for a file.
    :param size: in bytes.
    :param memory: ``DRAM``, ``VRAM`` or ``FILE``.
    :param device: the number of the GPU, or the descriptor of the file; 0 in host memory.
    """

    worker: Worker
    ref: Ref
    address: int
    size: int
    memory: str
    device: int

    def descriptor(self, offset: int = 0, size: int | None = None) -> tuple[int, int, int]:
        """Return ``(address, length, device)`` of a part of the buffer, for ``get_xfer_descs``.

        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        """
        return (self.address + offset, self.size - offset if size is None else size, self.device)

    def fill(self, seed: int, *, offset: int = 0, size: int | None = None, inverted: bool = False) -> Pending:
        """Start to fill the buffer with a pattern; ``.result()`` of the returned request waits for the end.

        :param seed: the number that determines the pattern.
        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        :param inverted: whether to write the pattern's complement, in which every byte is wrong.
        """
        length = self.size - offset if size is None else size
        return self.worker.request("fill", buffer=self.ref, seed=seed, offset=offset, size=length, inverted=inverted)

    def compare(self, seed: int, *, offset: int = 0, size: int | None = None) -> dict[str, int] | None:
        """Compare every byte with the pattern of ``seed``.

        :param offset: in bytes.
        :param size: in bytes; None for the rest of the buffer.
        :returns: None if all bytes are right; otherwise ``wrong_bytes``, ``total_bytes``, and ``offset``, ``expected``
            and ``found`` of the first wrong byte.
        """
        length = self.size - offset if size is None else size
        found = self.worker.call("compare", buffer=self.ref, seed=seed, offset=offset, size=length)
        return cast("dict[str, int] | None", found)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Return ``size`` bytes at ``offset``; by default the whole buffer."""
        length = self.size - offset if size is None else size
        return cast(bytes, self.worker.call("read", buffer=self.ref, offset=offset, size=length))

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write ``data`` to the buffer at ``offset`` (in bytes)."""
        self.worker.call("write", buffer=self.ref, offset=offset, data=data)

    def free(self) -> None:
        """Free the memory. Call it once, after all its registrations are deregistered."""
        self.worker.call("forget", objects=[self.ref])


class NixlAgent:
    """A NIXL agent in a separate worker process.

    The methods of NIXL's ``nixl_agent`` take the same arguments and return the same values, with opaque references for
    descriptor lists and handles. They raise :class:`~pytest_nixl.processes.worker_process.NixlError` if NIXL reports
    an error, and :class:`~pytest_nixl.processes.worker_process.WorkerError` if the worker dies or hangs. The pytest
    process survives both.
    """

    def __init__(self, worker: Worker, ref: Ref, name: str) -> None:
        self.worker = worker
        self.ref = ref
        self.name = name
        self._siblings: Agents | None = None
        self._made_with: dict[str, Any] = {}

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
    ) -> NixlAgent:
        """Create an agent in a worker.

        :param backends: the names of the backends to create.
        :param name: the agent's name for other agents; None for a generated one.
        :param progress_thread: whether NIXL makes progress in a spinning thread; otherwise only when it is polled.
            None for a thread only if a backend needs it, because other agents wait for it while they load metadata.
        :param listen_thread: whether NIXL listens for other agents' metadata.
        :param listen_port: the port of that listener; 0 for a free one.
        :param telemetry: whether NIXL records telemetry of transfers.
        :raises WorkerError: the agent or a backend cannot be created; the worker is then ended.
        """
        name = name or f"rank{worker.rank}-{worker.role}-{next(_numbers)}"
        options: dict[str, Any] = {
            "backends": list(backends),
            "progress_thread": shake_hands(backends) if progress_thread is None else progress_thread,
            "listen_thread": listen_thread,
            "telemetry": telemetry,
        }
        try:
            reply = worker.call("create_agent", name=name, listen_port=listen_port, **options)
        except BaseException:
            worker.kill()
            raise
        worker.versions.update(reply["versions"])
        agent = cls(worker, reply["agent"], name)
        agent._made_with = options
        return agent

    def close(self) -> None:
        """End the worker with all its agents."""
        self.worker.close()

    def beside(self, name: str | None = None, **options: Any) -> NixlAgent:
        """Create another agent in the same worker, which shares the process, its memory and its environment.

        :param options: as for :meth:`within`; by default those of this agent, except for the port.
        :raises WorkerError: the agent cannot be created; the worker is then ended with all its agents.
        """
        return NixlAgent.within(self.worker, name=name, **{**self._made_with, **options})

    def delete(self) -> None:
        """Delete the agent but keep the worker, like ``del agent`` in a program.

        If etcd does not answer, NIXL can take minutes; the worker is ended at its deadline.

        :raises WorkerError: the worker dies, or misses its deadline.
        """
        self.worker.call("forget", objects=[self.ref])

    def another(self, name: str | None = None, **options: Any) -> NixlAgent:
        """Start another agent in another worker, which ends with the same test.

        :param options: as for :meth:`Agents.start`.
        :raises ValueError: this agent does not come from the fixture ``nixl_agent``.
        :raises WorkerError: the worker or the agent cannot be started.
        """
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
        given = {name: value.ref if isinstance(value, Buffer) else value for name, value in arguments.items()}
        return self.worker.call("run", agent=self.ref, function=function, arguments=given)

    def gpus(self) -> list[LinkGpu]:
        """Return the GPUs that the worker sees.

        :raises NotApplicableError: the worker sees no GPU; the test is then skipped.
        """
        from pytest_nixl.nixl.gpus import gpus

        return gpus(self.worker)

    def allocate(
        self, size: int, memory: str = "DRAM", *, device: int = 0, directory: str = "", alignment: int = 1
    ) -> Buffer:
        """Allocate a buffer in the worker. :meth:`register` registers it.

        :param size: in bytes.
        :param memory: ``DRAM``, ``VRAM``, or ``FILE`` for a file without a name.
        :param device: the GPU for ``VRAM``, as CUDA numbers the GPUs that the worker sees.
        :param directory: the directory for ``FILE``; empty for the system's temporary directory.
        :param alignment: a divisor of all offsets and lengths (in bytes) that NIXL uses in a file. If it is a multiple
            of 4096, the page cache is bypassed if the file system supports that.
        :raises NotApplicableError: the worker does not see this GPU; the test is then skipped.
        :raises WorkerError: the memory cannot be allocated.
        """
        of: dict[str, Any] = {"directory": directory, "alignment": alignment}
        if memory == "VRAM":
            from pytest_nixl.nixl.gpus import require_gpu

            gpu = require_gpu(self.worker, device, memory)
            self.worker.versions["gpu"] = str(gpu)
            of = {"device": gpu.number}
        reply = self.worker.call("allocate", size=size, memory_type=memory, **of)
        return Buffer(self.worker, reply["buffer"], reply["address"], size, memory, reply["device"])

    def allocate_asked(self, size: int, *, initiator: bool = False) -> Buffer:
        """Allocate a buffer of the memory type that this run requests for targets or initiators.

        If the run requests several types, the first with GPU memory is used, because it is the harder case.

        :param size: in bytes.
        :param initiator: whether the memory type is that of initiators.
        :raises NotApplicableError: the worker does not see the GPU; the test is then skipped.
        """
        settings = self._siblings.settings if self._siblings is not None else None
        pairs = settings.memory if settings is not None else (HOST,)
        pair = next((each for each in pairs if "VRAM" in (each.initiator, each.target)), pairs[0])
        memory = pair.initiator if initiator else pair.target.replace("FILE", "DRAM")
        devices = settings.devices if settings is not None else None
        number = 0 if devices is None else devices.initiator if initiator else devices.target
        return self.allocate(size, memory, device=number)

    def register(self, buffer: Buffer) -> Ref:
        """Register a whole buffer, and return the argument for ``deregister_memory``.

        :raises FindingError: the backend treats GPU memory as host memory.
        :raises WorkerError: NIXL reports another error, or the worker dies or hangs.
        """
        try:
            return cast(Ref, self.worker.call("register", agent=self.ref, buffer=buffer.ref))
        except NixlError as error:
            words = taken_for_host(self.worker.output()) if buffer.memory == "VRAM" else ""
            if not words:
                raise
            reason = f"{self.worker.name} could not register memory of GPU {buffer.device}: {words}"
            raise FindingError(VRAM_AS_HOST, reason, error.detail) from None

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self.worker.call("call", agent=self.ref, method=method, arguments=list(arguments), keywords=keywords)

    # The following methods have the names, parameters and results of nixl_agent.

    def get_plugin_list(self) -> list[str]:
        """Return the names of the backend plugins that NIXL found."""
        return cast("list[str]", self._call("get_plugin_list"))

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Return the memory types that a plugin supports."""
        return cast("list[str]", self._call("get_plugin_mem_types", plugin_of(backend)))

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return the parameters that a plugin accepts."""
        return cast("dict[str, str]", self._call("get_plugin_params", plugin_of(backend)))

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Return the memory types that a created backend supports."""
        return cast("list[str]", self._call("get_backend_mem_types", plugin_of(backend)))

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Return the parameters of a created backend."""
        return cast("dict[str, str]", self._call("get_backend_params", plugin_of(backend)))

    def create_backend(self, backend: str, initParams: Mapping[str, str] | None = None) -> None:  # noqa: N803
        """Create a backend with parameters."""
        self._call("create_backend", backend, dict(initParams or {}))

    def register_memory(
        self, reg_list: Sequence[Descriptor] | Ref, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> Ref:
        """Register memory, and return its descriptor list."""
        return cast(Ref, self._call("register_memory", _plain(reg_list), mem_type, list(backends)))

    def deregister_memory(self, dereg_list: Ref, backends: Sequence[str] = ()) -> None:
        """Deregister the descriptor list that ``register_memory`` returned."""
        self._call("deregister_memory", dereg_list, list(backends))

    def query_memory(
        self, reg_list: Sequence[Descriptor] | Ref, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Ask a backend about memory or files."""
        return cast("list[dict[str, str] | None]", self._call("query_memory", _plain(reg_list), backend, mem_type))

    def get_xfer_descs(self, descs: Sequence[Descriptor] | Ref, mem_type: str | None = None) -> Ref:
        """Return a descriptor list for transfers."""
        return cast(Ref, self._call("get_xfer_descs", _plain(descs), mem_type))

    def get_reg_descs(self, descs: Sequence[Descriptor] | Ref, mem_type: str | None = None) -> Ref:
        """Return a descriptor list for registration."""
        return cast(Ref, self._call("get_reg_descs", _plain(descs), mem_type))

    def get_serialized_descs(self, descs: Ref) -> bytes:
        """Return a descriptor list as bytes."""
        return cast(bytes, self._call("get_serialized_descs", descs))

    def deserialize_descs(self, serialized_descs: bytes) -> Ref:
        """Restore a descriptor list from bytes."""
        return cast(Ref, self._call("deserialize_descs", serialized_descs))

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Connect to a remote agent now instead of at the first transfer."""
        self._call("make_connection", remote_agent, list(backends))

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Sequence[Descriptor] | Ref,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> Ref:
        """Prepare the descriptors of one side; the local side's ``agent_name`` is ``""`` or ``NIXL_INIT_AGENT``."""
        return cast(Ref, self._call("prep_xfer_dlist", agent_name, _plain(xfer_list), mem_type, list(backends)))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Ref,
        local_indices: Sequence[int],
        remote_xfer_side: Ref,
        remote_indices: Sequence[int],
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> Ref:
        """Return the handle of a transfer of prepared descriptors."""
        return cast(
            Ref,
            self._call(
                "make_prepped_xfer",
                operation,
                local_xfer_side,
                list(local_indices),
                remote_xfer_side,
                list(remote_indices),
                notif_msg,
                list(backends),
                skip_desc_merge,
            ),
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Ref,
        remote_descs: Ref,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Sequence[str] = (),
    ) -> Ref:
        """Return the handle of a transfer; ``operation`` is ``WRITE`` or ``READ``."""
        return cast(
            Ref,
            self._call(
                "initialize_xfer", operation, local_descs, remote_descs, remote_agent, notif_msg, list(backends)
            ),
        )

    def transfer(self, handle: Ref, notif_msg: bytes = b"") -> str:
        """Post a transfer, and return its state: ``DONE``, ``PROC`` or ``ERR``."""
        return cast(str, self._call("transfer", handle, notif_msg))

    def check_xfer_state(self, handle: Ref) -> str:
        """Return the state of a posted transfer: ``DONE``, ``PROC`` or ``ERR``."""
        return cast(str, self._call("check_xfer_state", handle))

    def estimate_xfer_cost(self, req_handle: Ref) -> list[int]:
        """Return NIXL's estimate: duration and error margin in microseconds, and the method."""
        return cast("list[int]", self._call("estimate_xfer_cost", req_handle))

    def get_xfer_telemetry(self, handle: Ref) -> Ref:
        """Return the telemetry of a finished transfer, if the agent records it."""
        return cast(Ref, self._call("get_xfer_telemetry", handle))

    def query_xfer_backend(self, handle: Ref) -> str:
        """Return the name of the backend that carries a transfer."""
        return cast(str, self._call("query_xfer_backend", handle))

    def release_xfer_handle(self, handle: Ref) -> None:
        """Release a transfer."""
        self._call("release_xfer_handle", handle)

    def release_dlist_handle(self, handle: Ref) -> None:
        """Release prepared descriptors."""
        self._call("release_dlist_handle", handle)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Return the notifications that arrived since the last call, by sender."""
        return cast("dict[str, list[bytes]]", self._call("get_new_notifs", list(backends)))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Return all notifications that were not handled yet, by sender."""
        return cast("dict[str, list[bytes]]", self._call("update_notifs", list(backends)))

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Return whether a notification with this tag has arrived, and remove it."""
        return cast(
            bool,
            self._call("check_remote_xfer_done", remote_agent_name, lookup_tag, list(backends), tag_is_prefix),
        )

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        """Send a notification without a transfer."""
        self._call("send_notif", remote_agent_name, notif_msg, backend)

    def get_agent_metadata(self) -> bytes:
        """Return all metadata of this agent."""
        return cast(bytes, self._call("get_agent_metadata"))

    def get_partial_agent_metadata(
        self, descs: Ref, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Return the metadata of some memory, with or without connection information."""
        return cast(bytes, self._call("get_partial_agent_metadata", descs, inc_conn_info, list(backends)))

    def add_remote_agent(self, metadata: bytes) -> str:
        """Load another agent's metadata, and return that agent's name."""
        name = self._call("add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else cast(str, name)

    def remove_remote_agent(self, agent: str) -> None:
        """Forget another agent and disconnect."""
        self._call("remove_remote_agent", agent)

    def send_local_metadata(self, ip_addr: str = "", port: int | None = None) -> None:
        """Publish all metadata to etcd, or send it to one peer. NIXL reports no failure: check the key in etcd."""
        self._call("send_local_metadata", ip_addr, **_port(port))

    def send_partial_agent_metadata(
        self,
        descs: Ref,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int | None = None,
        label: str = "",
    ) -> None:
        """Publish metadata of some memory under a label, or send it to one peer."""
        self._call(
            "send_partial_agent_metadata",
            descs,
            inc_conn_info,
            list(backends),
            ip_addr,
            label=label,
            **_port(port),
        )

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int | None = None, label: str = ""
    ) -> None:
        """Request another agent's metadata, which arrives later (see ``check_remote_metadata``)."""
        self._call("fetch_remote_metadata", remote_agent, ip_addr, label=label, **_port(port))

    def invalidate_local_metadata(self, ip_addr: str = "", port: int | None = None) -> None:
        """Remove this agent's metadata from etcd, or from one peer."""
        self._call("invalidate_local_metadata", ip_addr, **_port(port))

    def check_remote_metadata(self, agent: str, descs: Ref | None = None) -> bool:
        """Return whether another agent's metadata is loaded."""
        arguments = [agent] if descs is None else [agent, descs]
        return cast(bool, self._call("check_remote_metadata", *arguments))


class Agents:
    """A context manager for agents in separate workers, which end when it exits.

    :param place: the rank on which workers start by default.
    :param settings: the settings of the run.
    """

    def __init__(self, place: Host, settings: Settings) -> None:
        self._place = place
        self.settings = settings
        self._workers: list[Worker] = []

    def start(
        self,
        name: str | None = None,
        *,
        backends: Sequence[str] | None = None,
        environment: Mapping[str, str | None] | None = None,
        place: Host | None = None,
        **options: Any,
    ) -> NixlAgent:
        """Start a worker with an agent.

        :param name: the agent's name; None for a generated one.
        :param backends: the backends to create; None for the first requested one that moves bytes between agents.
        :param environment: variables for the worker; None unsets one.
        :param place: the rank, such as one of ``nixl_cluster.places``; None for the default of this object.
        :param options: as for :meth:`NixlAgent.within`.
        :raises WorkerError: the worker or the agent cannot be started.
        """
        places = [place or self._place]
        return self.start_each([name], backends=backends, environment=environment, places=places, **options)[0]

    def start_each(
        self,
        names: Sequence[str | None],
        *,
        backends: Sequence[str] | None = None,
        environment: Mapping[str, str | None] | None = None,
        places: Sequence[Host] = (),
        **options: Any,
    ) -> list[NixlAgent]:
        """Start a worker with an agent for each name, like :meth:`start`. The workers load NIXL at the same time.

        :param places: the ranks for the first, the second, … agent, which are used again from the first.
        """
        # No agent uses an etcd, in particular the deployment's, unless a test gives it the address.
        changed = {"NIXL_ETCD_ENDPOINTS": None, "NIXL_ETCD_NAMESPACE": None, **(environment or {})}
        asked = self.settings.backend
        chosen = (between_agents(asked) or asked)[:1] if backends is None else backends
        started = len(self._workers)
        for _, place in zip(names, itertools.cycle(places or [self._place]), strict=False):
            limits = self.settings.timeout, self.settings.start_timeout
            self._workers.append(place.start("agent", changed, *limits))
        agents = []
        for worker, name in zip(self._workers[started:], names, strict=True):
            agent = NixlAgent.within(worker, backends=chosen, name=name, **options)
            agent._siblings = self
            agents.append(agent)
        return agents

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()


def _plain(descriptors: Sequence[Descriptor] | Ref) -> Any:
    return descriptors if isinstance(descriptors, Ref) else [list(descriptor) for descriptor in descriptors]


def _port(port: int | None) -> dict[str, int]:
    return {} if port is None else {"port": port}
