# SPDX-License-Identifier: Apache-2.0
"""The commands that a worker accepts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, cast

from pytest_nixl.core.cpu_contention import CpuContention
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.resource_limits import start_fault
from pytest_nixl.core.strict import Number, RefTo, StrictError, Text, check
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.device_counters import CarrierBytes, read_loss_counters
from pytest_nixl.model.row_key import HUGE
from pytest_nixl.model.worker_commands import (
    DESCRIPTOR_LISTS,
    WORKER_COMMANDS,
    AgentRef,
    BufferRef,
    Byte,
    Carriers,
    Cores,
    Count,
    Line,
    Name,
    Place,
    Port,
    Refs,
    Seconds,
    ShortName,
    Side,
    TransferCount,
    TransfersRef,
    WindowSeconds,
)
from pytest_nixl.nixl.backends import BACKENDS, plugin_of
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS
from pytest_nixl.nixl.worker import nixl_api, transfer
from pytest_nixl.nixl.worker.foreign_memory import obstacle
from pytest_nixl.nixl.worker.imported_files import import_file
from pytest_nixl.nixl.worker.row_transfers import prepare_row
from pytest_nixl.nixl.worker.tools import ToolOutput, Tools

if TYPE_CHECKING:
    from pytest_nixl.nixl.worker import devices, files, memory, objects, vram
else:  # pytest imports this module too, and has no need for numpy
    devices = lazy_module("pytest_nixl.nixl.worker.devices")
    files = lazy_module("pytest_nixl.nixl.worker.files")
    memory = lazy_module("pytest_nixl.nixl.worker.memory")
    objects = lazy_module("pytest_nixl.nixl.worker.objects")
    vram = lazy_module("pytest_nixl.nixl.worker.vram")

#: The most characters of UCX_TLS that are told.
_LONGEST_TLS = 200

ProgramRef: TypeAlias = Annotated[Ref, RefTo("program")]
#: Seed, offset and size in bytes.
Part: TypeAlias = tuple[Count, Place, Place]


class Corruption(TypedDict):
    wrong_bytes: Count
    total_bytes: Count
    offset: Count
    expected: Byte
    found: Byte


class CorruptTransfer(Corruption):
    transfer: Count


class CorruptTransfers(TypedDict):
    corrupt: Count
    first: CorruptTransfer | None


class RowEndFields(TypedDict):
    """The arguments of :class:`transfer.RowEnd`."""

    buffer: BufferRef
    size: Count
    seed: Count
    receives: bool
    new_patterns: bool


class MeasuredTransfers(TypedDict):
    """What :func:`transfer.measure` returns, what devices carried, and the cores that other processes took."""

    corruption: Corruption | None
    windows: list[WindowSeconds]
    transfers: list[TransferCount]
    latencies: list[Seconds]
    counted: Carriers
    contention: Cores


class AllocatedBuffer(TypedDict):
    buffer: BufferRef
    address: Count
    device: Count


class CreatedAgent(TypedDict):
    agent: AgentRef
    versions: dict[str, Annotated[str, Text(1024)]]


class Gpu(TypedDict):
    """A GPU: see :class:`pytest_nixl.nixl.worker.devices.WorkerGpu`."""

    number: Count
    name: Name
    uuid: Name
    pci: Name


class VisibleGpus(TypedDict):
    """The GPUs that a worker sees and the library that it used, or why it sees none."""

    devices: list[Gpu]
    by: Name
    why: Line
    remedy: Line


class LoadedNixl(TypedDict, total=False):
    nixl: Line
    nixl_package: Line
    nixl_module: Line


class WorkerProcess(LoadedNixl):
    """A worker's process, and the NIXL that it has loaded, if it has."""

    pid: Count
    python: ShortName
    host: Annotated[str, Text(255)]


class StartedProgram(TypedDict):
    program: ProgramRef
    pid: Count


class CommandRefusedError(Exception):
    """The command does not exist, or its arguments are wrong."""


class Commands:
    """The kernel's commands as methods named ``do_COMMAND``, and the objects that the worker keeps for pytest.

    :param cancelled: returns whether pytest has asked to end the running command.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self.cancelled = cancelled
        #: The kind and the object of each reference, by its number.
        self._objects: dict[int, tuple[str, Any]] = {}
        self._next = 1
        self._store: tuple[str, dict[str, str]] = "OBJ", {}
        self._tools = Tools(cancelled)

    def handle(self, command: str, arguments: dict[str, Any]) -> Any:
        """Run one command.

        :raises CommandRefusedError: the command does not exist, or its arguments are wrong.
        """
        entry = WORKER_COMMANDS.get(command)
        if entry is None or not entry.answered:
            raise CommandRefusedError(f"there is no command {command!r}")
        try:
            read: dict[str, Any] = check(entry.arguments, arguments)
        except StrictError as error:
            raise CommandRefusedError(f"invalid arguments of {command!r}: {error}") from None
        function = _function(entry.function) if isinstance(entry.function, str) else entry.function
        return function(self, **read)

    def do_hello(self, path: list[Line], loads: bool) -> WorkerProcess:
        """Load NIXL if ``loads``, and return its version; ``path`` is pytest's ``sys.path``, for functions of tests."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        loaded = cast(LoadedNixl, nixl_api.load()) if loads else LoadedNixl()
        return {"pid": os.getpid(), "python": platform.python_version(), "host": platform.node(), **loaded}

    def do_create_agent(
        self,
        name: Line,
        backends: list[Line],
        progress_thread: bool,
        listen_thread: bool,
        listen_port: Port,
        telemetry: bool,
        threads: Count = 0,
        sync_mode: Name = "auto",
        parameters: dict[str, dict[str, Line]] | None = None,
    ) -> CreatedAgent:
        """Load the backends' libraries, create an agent, then each backend separately, so that an error names it."""
        nixl = nixl_api.load()
        store = next((backend for backend in backends if plugin_of(backend) in OBJECT_PLUGINS), None)
        if store is not None:
            self._store = plugin_of(store), (parameters or {}).get(store, {})
            objects.open_store(*self._store).close()  # NIXL would not say what is missing
        versions: dict[str, str] = {}
        for backend in backends:
            if backend in BACKENDS:
                versions |= BACKENDS[backend].load(nixl)
        try:
            agent = nixl_api.make_agent(
                name,
                progress_thread=progress_thread,
                listen_thread=listen_thread,
                listen_port=listen_port,
                telemetry=telemetry,
                sync_mode=sync_mode,
            )
        except ValueError as error:  # such as an empty name
            raise nixl_api.NixlCallError(error) from error
        except RuntimeError as error:
            # NIXL refuses the agent, for example because it finds no plugin, or a variable is empty.
            reason, remedy = f"NIXL cannot create an agent: {error}", nixl_api.creation_remedy(str(error), listen_port)
            if os.strerror(errno.EAGAIN) in reason:
                fault, remedy = start_fault()
                reason = f"{reason}: {fault}"
            raise NixlPluginError(reason, remedy) from error
        for backend in backends:
            plugin = plugin_of(backend)
            if plugin not in agent.get_plugin_list():
                has = ", ".join(agent.get_plugin_list())
                raise NixlPluginError(f"NIXL has no plugin {plugin}: it has {has}", nixl_api.plugin_remedy())
            backend_options = nixl_api.backend_parameters(agent, backend, (parameters or {}).get(backend, {}), threads)
            with BACKENDS[backend].creating() if backend in BACKENDS else contextlib.nullcontext():
                agent.create_backend(plugin, backend_options)
        if ucx := ucx_version():
            versions["ucx"] = ucx
        if "UCX" in map(plugin_of, backends):
            facts = {"obstacle": obstacle(), "ucx_tls": os.environ.get("UCX_TLS", "")[:_LONGEST_TLS]}
            versions |= {name: text for name, text in facts.items() if text}
        return {"agent": self.keep(agent, "agent"), "versions": versions}

    def do_call(self, agent: AgentRef, method: Name, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call a public method of the agent. A result that JSON cannot express stays in the worker as a reference."""
        raw = self.get(agent)
        if method.startswith("_") or not isfunction(getattr(type(raw), method, None)):
            raise CommandRefusedError(f"{method!r} is not a public method of NIXL's agent")
        if method in nixl_api.RELEASES and any(isinstance(value, Ref) and self._dropped(value) for value in arguments):
            return None  # as NIXL does, which ignores a second release
        resolved = [self._resolve(method, place, value) for place, value in enumerate(arguments)]
        try:
            if method in nixl_api.LISTS and resolved[:1] == [[]]:
                result = nixl_api.empty_list(raw, method, *resolved[1:], **keywords)
            else:
                result = getattr(raw, method)(*resolved, **keywords)
        except (KeyError, ValueError) as error:
            raise nixl_api.NixlCallError(error) from error
        if method in nixl_api.RELEASES:
            [released] = arguments
            del self._objects[released.number]
        kind = nixl_api.HANDLES.get(method)
        if method == "get_xfer_telemetry":
            return {name: int(getattr(result, name)) for name in nixl_api.TELEMETRY_FIELDS}
        return self.keep(result, kind) if kind and result is not None else self._reply(result)

    def do_descriptor_list(self, descriptors: Ref, method: Name, arguments: list[Any]) -> Any:
        """Call a method of a descriptor list of NIXL."""
        source = self.get(descriptors)
        if descriptors.kind not in DESCRIPTOR_LISTS or method not in nixl_api.LIST_METHODS:
            raise CommandRefusedError(f"{method!r} is not a method of a descriptor list ({descriptors.kind})")
        if not hasattr(source, method):
            raise CommandRefusedError(f"a {descriptors.kind} has no method {method!r}")
        rows = [tuple(value) if isinstance(value, list) else value for value in arguments]
        try:
            result = getattr(source, method)(*rows)
        except (IndexError, KeyError, ValueError) as error:
            raise nixl_api.NixlCallError(error) from error
        return str(result.name) if method == "getType" else self._reply(result)

    def do_run(self, agent: AgentRef, function: Line, arguments: dict[str, Any], file: Line = "") -> Any:
        """Call ``module:function`` with the raw agent and ``arguments``, and return its JSON values or bytes.

        References in the arguments are replaced by their objects, such as a buffer.

        :param file: the file from which pytest has the module; empty: pytest has not loaded it.
        """
        resolved = {key: self.get(value) if isinstance(value, Ref) else value for key, value in arguments.items()}
        return _function(function, file)(self.get(agent), **resolved)

    def do_devices(self) -> VisibleGpus:
        """Return the GPUs that this worker sees and the library that it used, or why it sees none."""
        try:
            library = devices.vendor()
        except NotApplicableError as error:
            return {"devices": [], "by": "", "why": error.reason, "remedy": error.remedy}
        gpus = [cast(Gpu, asdict(device)) for device in library.devices()]
        return {"devices": gpus, "by": library.name, "why": "", "remedy": ""}

    def do_activate(self, device: Count) -> None:
        """Make a GPU the current one of this worker before the agent is created, as programs with GPU memory do."""
        devices.device(device).activate()

    def do_allocate(
        self,
        size: Count,
        memory_type: Name,
        directory: Line = "",
        alignment: Count = 1,
        device: Count = 0,
        pages: Name = HUGE,
    ) -> AllocatedBuffer:
        """Allocate a buffer; ``device`` applies to VRAM, ``pages`` to DRAM, ``directory`` and ``alignment`` to FILE."""
        buffer: memory.PatternBuffer
        if memory_type == "OBJ":
            buffer = objects.ObjectBuffer(size, objects.open_store(*self._store))
        elif memory_type == "FILE":
            buffer = files.FileBuffer(size, directory, alignment)
        elif memory_type == "VRAM":
            buffer = vram.VramBuffer(size, device)
        elif memory_type == "DRAM":
            buffer = memory.DramBuffer(size, huge=pages == HUGE)
        else:
            raise CommandRefusedError(f"there are no buffers of type {memory_type}: expected DRAM, VRAM, FILE or OBJ")
        return {"buffer": self.keep(buffer, "buffer"), "address": buffer.address, "device": buffer.device}

    def do_register(self, agent: AgentRef, buffer: BufferRef) -> Ref:
        """Register a whole buffer, and return the argument for ``deregister_memory``."""
        whole = self.get(buffer)
        whole.activate()
        descriptor = (whole.address, whole.size, whole.device, "")
        registered = self.get(agent).register_memory([descriptor], whole.memory)
        return self.keep(registered, type(registered).__name__)

    def do_prepare_objects(self, agent: AgentRef, buffer: BufferRef, block: Count, count: Count) -> None:
        """Register ``count`` objects of ``block`` bytes; 0 of them: deregister and delete those that there are."""
        objects = self.get(buffer)
        objects.prepare(self.get(agent), block, count) if count else objects.release(self.get(agent))

    def do_probe_objects(self, buffer: BufferRef) -> None:
        """Store and delete an object without NIXL, so that an error names what is wrong with the server."""
        self.get(buffer).name_fault()

    def do_fill(self, buffer: BufferRef, parts: list[Part], inverted: bool) -> None:
        """Fill parts of a buffer (seed, offset and size in bytes) with the patterns of their seeds or complements."""
        for part in parts:
            self.get(buffer).fill(*part, inverted=inverted)

    def do_compare(self, buffer: BufferRef, parts: list[Part]) -> list[Corruption | None]:
        """Compare parts of a buffer with the patterns of their seeds."""
        return [self.get(buffer).compare(*part) for part in parts]

    def do_kernel_seconds(self, buffer: BufferRef) -> Seconds:
        """Return the seconds that the GPU of a buffer takes for a kernel over 8 bytes."""
        seconds: float = self.get(buffer).kernel_seconds()
        return seconds

    def do_read(self, buffer: BufferRef, offset: Place, size: Place) -> bytes:
        """Return bytes of a buffer."""
        data: bytes = self.get(buffer).read(offset, size)
        return data

    def do_write(self, buffer: BufferRef, offset: Place, data: bytes) -> None:
        """Write bytes to a buffer."""
        self.get(buffer).write(offset, data)

    def do_add_agents(self, agent: AgentRef, metadata: list[bytes]) -> None:
        """Load the metadata of agents."""
        for remote in metadata:
            self.get(agent).add_remote_agent(remote)

    def do_connect(self, agent: AgentRef, targets: list[Line], timeout: Seconds) -> None:
        """Connect to targets that run ``serve``."""
        for target in targets:
            how: dict[str, Any] = {"depth": 0, "acknowledged": True, "notify_each": False}
            deadline = time.monotonic() + timeout
            transfer.Transfers(self.get(agent), target, [], {}, **how, deadline=deadline).greet()

    def do_row_prepare(
        self,
        agent: AgentRef,
        op: Name,
        target: Line,
        plugin: Name,
        sides: tuple[Side, Side],
        block: Count,
        batch: Count,
        count: Count,
        depth: Count,
        acknowledged: bool,
        notify_each: bool,
        announced: bool,
        storage: BufferRef | None,
        objects: BufferRef | None,
    ) -> TransfersRef:
        """Prepare the transfers of a row; the other arguments are those of :func:`prepare_row`.

        :param storage: the file to sync at the end of a window.
        :param objects: the objects of the target, whose server is asked if no transfer ends.
        """
        sync = self.get(storage).sync if storage is not None else None
        watch = self.get(objects) if objects is not None else None
        transfers = prepare_row(
            self.get(agent),
            op,
            target,
            plugin,
            list(map(list, sides)),
            block=block,
            batch=batch,
            count=count,
            depth=depth,
            acknowledged=acknowledged,
            notify_each=notify_each,
            announced=announced,
            sync=sync,
            watch=watch,
        )
        return self.keep(transfers, "transfers")

    def do_row_release(self, transfers: TransfersRef) -> None:
        """Release the transfers of a row, and forget them."""
        self.get(transfers).release()
        self.do_forget([transfers])

    def do_move(self, transfers: TransfersRef, timeout: Seconds) -> None:
        """Run each prepared transfer once, and wait until its bytes have arrived."""
        prepared = self._prepared(transfers, timeout)
        prepared.run_window(prepared.count, transfer.stamps_for(prepared.count))

    def do_move_each(
        self, transfers: TransfersRef, timeout: Seconds, count: Count, end: RowEndFields
    ) -> CorruptTransfers:
        """Run transfers with a pattern each, compared before the next is posted; return how many were corrupt."""
        row_end = self._row_end(end)
        assert row_end is not None
        return cast(CorruptTransfers, transfer.move_each(self._prepared(transfers, timeout), row_end, count))

    def do_measure(
        self,
        transfers: TransfersRef,
        timeout: Seconds,
        op: Name,
        own: list[Count],
        iterations: Count,
        warmup: Count,
        warmup_seconds: Seconds,
        duration: Seconds,
        end: RowEndFields | None = None,
        decisive_rate: Annotated[float, Number(0, 1 << 53)] | None = None,
        longest: Seconds | None = None,
    ) -> MeasuredTransfers:
        """Time windows of the prepared transfers, and measure this host's device counters and contention.

        :param own: the pids of other processes on this host that belong to the row.
        :param end: the initiator's end of the row, if bytes are compared between the windows.
        :param decisive_rate: as for :func:`pytest_nixl.nixl.worker.transfer.measure`, like ``longest``.
        """
        prepared = self._prepared(transfers, timeout)
        contention, counted = CpuContention(own), list[Any]()

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with contention, CarrierBytes.counting(op) as carried:
                yield
            counted.extend(carried)

        measured = transfer.measure(
            prepared,
            iterations=iterations,
            warmup=warmup,
            warmup_seconds=warmup_seconds,
            duration=duration,
            around=around(),
            end=self._row_end(end),
            decisive_rate=decisive_rate,
            longest=math.inf if longest is None else longest,
        )
        return cast(MeasuredTransfers, {**measured, "counted": counted, "contention": contention.cores})

    def do_loss_counters(self) -> list[tuple[Name, Name, Count]]:
        """Return the counters of this host's RDMA devices that tell of lost packets."""
        return read_loss_counters()

    def do_serve(self, agent: AgentRef, timeout: Seconds, idle: bool = False, end: RowEndFields | None = None) -> Count:
        """Be the target of another worker's commands until cancelled, and return the number of windows served."""
        how: dict[str, Any] = {"deadline": time.monotonic() + timeout, "idle": idle, "end": self._row_end(end)}
        return transfer.serve(self.get(agent), cancelled=self.cancelled, **how)

    def do_free_port(self) -> Annotated[int, Number(1, 65535, whole=True)]:
        """Return a free TCP port of this host, for a program that cannot choose one itself."""
        with socket.create_server(("", 0)) as server:
            port: int = server.getsockname()[1]
        return port

    def do_tool_find(self, tool: Name) -> dict[str, Line] | None:
        """Return path and versions of a program on this rank; None if it has none."""
        return self._tools.find(tool)

    def do_tool_start(
        self,
        tool: Name,
        arguments: list[Annotated[str, Text()]],
        variables: dict[str, Annotated[str, Text()] | None],
    ) -> StartedProgram:
        """Start a program."""
        program = self._tools.start(tool, arguments, variables)
        return {"program": self.keep(program, "program"), "pid": program.pid}

    def do_tool_look(self, program: ProgramRef, seen: Count, timeout: Seconds) -> ToolOutput:
        """Return a program's output after the first ``seen`` bytes, and its exit code."""
        return self._tools.look(self.get(program), seen, timeout)

    def do_tool_listens(self, program: ProgramRef, port: Port) -> bool:
        """Return whether a program listens on a TCP port."""
        return self._tools.listens(self.get(program), port)

    def do_tool_end(self, program: ProgramRef, number: Count) -> None:
        """Send a signal to a program."""
        self._tools.end(self.get(program), number)

    def do_forget(self, objects: Refs) -> None:
        """Drop references, which frees buffers and releases NIXL's objects."""
        for ref in objects:
            if self._dropped(ref):
                continue
            dropped = self.get(ref)
            del self._objects[ref.number]
            if ref.kind == "buffer":
                dropped.free()

    def _row_end(self, end: RowEndFields | None) -> transfer.RowEnd | None:
        return None if end is None else transfer.RowEnd(**{**end, "buffer": self.get(end["buffer"])})

    def _prepared(self, transfers: Ref, timeout: float) -> transfer.Transfers:
        """Return prepared transfers, with a deadline for their next command."""
        prepared: transfer.Transfers = self.get(transfers)
        prepared.deadline = time.monotonic() + timeout
        return prepared

    def keep(self, value: Any, kind: str) -> Ref:
        ref = Ref(self._next, kind)
        self._objects[ref.number] = kind, value
        self._next += 1
        return ref

    def get(self, ref: Ref) -> Any:
        if self._dropped(ref):
            raise CommandRefusedError(f"this {ref.kind} is no longer there: it was released, freed or deleted")
        kind, value = self._objects.get(ref.number, ("", None))
        if not kind:
            raise CommandRefusedError(f"this worker has created no {ref.kind} with the number {ref.number}")
        if kind != ref.kind:
            raise CommandRefusedError(f"object {ref.number} of this worker is a {kind} and not a {ref.kind}")
        return value

    def _dropped(self, ref: Ref) -> bool:
        """Return whether a reference is to an object that this worker had, and has no longer."""
        return 0 < ref.number < self._next and ref.number not in self._objects

    def _resolve(self, method: str, place: int, value: Any) -> Any:
        """Return an argument of a method of NIXL's agent, with the object in place of a reference.

        :raises CommandRefusedError: NIXL would read the memory of an object of another kind.
        """
        kinds = nixl_api.REFERENCES.get(method, {}).get(place, ())
        if isinstance(value, Ref):
            if value.kind not in kinds:
                expected = " or ".join(kinds) or "no reference"
                raise CommandRefusedError(f"argument {place + 1} is a {value.kind}: expected {expected}")
            return self.get(value)
        if kinds and not isinstance(value, list):
            raise CommandRefusedError(f"argument {place + 1} is not a reference to a {' or '.join(kinds)}")
        if isinstance(value, list):
            # NIXL needs descriptors as tuples, but JSON has only lists.
            return [tuple(part) if isinstance(part, list) else part for part in value]
        return value

    def _reply(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float, bool, bytes)):
            return value
        if isinstance(value, dict):
            return {str(key): self._reply(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._reply(part) for part in value]
        return self.keep(value, type(value).__name__)


def _function(text: str, file: str = "") -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not colon:
        raise CommandRefusedError(f"{text!r} is not module:function")
    loaded = import_file(module, file) if file else importlib.import_module(module)
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def ucx_version() -> str:
    """Return the version that the loaded UCX reports; empty if this process has not loaded UCX."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libucp") and ".so" in path:
            version = ctypes.CDLL(path).ucp_get_version_string
            version.restype = ctypes.c_char_p
            return str(version().decode())
    return ""
