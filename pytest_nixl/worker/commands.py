# SPDX-License-Identifier: Apache-2.0
"""The closed set of things that a worker does when asked."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_nixl.backends import BACKENDS
from pytest_nixl.errors import NixlPluginError
from pytest_nixl.evidence.counted import Counting
from pytest_nixl.evidence.others import Others
from pytest_nixl.worker import transfer
from pytest_nixl.worker.files import FileBuffer
from pytest_nixl.worker.memory import DramBuffer
from pytest_nixl.worker.tools import Tools
from pytest_nixl.worker.wire import Ref

#: The public methods of NIXL's agent that may be called by name.
AGENT_METHODS = frozenset(
    {
        "add_remote_agent",
        "check_remote_metadata",
        "check_remote_xfer_done",
        "check_xfer_state",
        "create_backend",
        "deregister_memory",
        "deserialize_descs",
        "estimate_xfer_cost",
        "fetch_remote_metadata",
        "get_agent_metadata",
        "get_backend_mem_types",
        "get_backend_params",
        "get_new_notifs",
        "get_partial_agent_metadata",
        "get_plugin_list",
        "get_plugin_mem_types",
        "get_plugin_params",
        "get_reg_descs",
        "get_serialized_descs",
        "get_xfer_descs",
        "get_xfer_telemetry",
        "initialize_xfer",
        "invalidate_local_metadata",
        "make_connection",
        "make_prepped_xfer",
        "prep_xfer_dlist",
        "query_memory",
        "query_xfer_backend",
        "register_memory",
        "release_dlist_handle",
        "release_xfer_handle",
        "remove_remote_agent",
        "send_local_metadata",
        "send_notif",
        "send_partial_agent_metadata",
        "transfer",
        "update_notifs",
    }
)

#: The methods that make a descriptor list, and the class of what they return.
_LISTS = {"get_reg_descs": "nixlRegDList", "get_xfer_descs": "nixlXferDList"}

#: What the packages that carry NIXL are called.
_NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")


class RefusedError(Exception):
    """The command is none of ours, or its arguments make no sense."""


class Commands:
    """The commands, as methods, over the objects that this worker holds.

    :param cancelled: whether pytest has asked for the running command to end.
    """

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._objects: dict[int, Any] = {}
        self._next = 1
        self._tools = Tools(cancelled)

    def handle(self, command: str, arguments: dict[str, Any]) -> Any:
        """Run one command by name. :raises RefusedError: if there is none of that name."""
        method = getattr(self, f"do_{command}", None)
        if method is None:
            raise RefusedError(f"there is no command {command!r}")
        return method(**arguments)

    def do_hello(self, path: list[str], loads: bool = True) -> dict[str, Any]:
        """Load NIXL, if this worker ``loads`` it; ``path`` is pytest's ``sys.path``, for functions that tests name."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        found = {"pid": os.getpid(), "python": platform.python_version(), "host": platform.node()}
        if not loads:
            return found
        import nixl._api

        return {**found, **_nixl_version(nixl)}

    def do_create_agent(
        self,
        name: str,
        backends: list[str],
        progress_thread: bool,
        listen_thread: bool,
        listen_port: int,
        telemetry: bool,
    ) -> dict[str, Any]:
        """Load what its backends need, create an agent with none, then each, so that a failure names it."""
        import nixl
        from nixl._api import nixl_agent, nixl_agent_config

        versions: dict[str, str] = {}
        for backend in backends:
            if backend in BACKENDS:
                versions |= BACKENDS[backend].load(_nixl_version(nixl))
        config = nixl_agent_config(
            enable_prog_thread=progress_thread,
            enable_listen_thread=listen_thread,
            listen_port=listen_port,
            capture_telemetry=telemetry,
            backends=[],
        )
        try:
            agent = nixl_agent(name, config)
        except RuntimeError as error:  # what NIXL finds wrong before there is an agent: no plugin, an empty variable
            raise NixlPluginError(f"NIXL makes no agent: {error}", _plugin_remedy()) from error
        for backend in backends:
            if backend not in agent.get_plugin_list():
                has = ", ".join(agent.get_plugin_list())
                raise NixlPluginError(f"NIXL has no plugin {backend}: it has {has}", _plugin_remedy())
            with BACKENDS[backend].creating() if backend in BACKENDS else contextlib.nullcontext():
                agent.create_backend(backend)
        if ucx := ucx_version():
            versions["ucx"] = ucx
        return {"agent": self._keep(agent, "agent"), "versions": versions}

    def do_call(self, agent: Ref, method: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call a public method of the agent; what it returns and JSON cannot express stays here as a reference."""
        if method not in AGENT_METHODS:
            raise RefusedError(f"{method!r} is no public method of NIXL's agent")
        resolved = [self._resolve(value) for value in arguments]
        named = {key: self._resolve(value) for key, value in keywords.items()}
        if method in _LISTS and resolved[:1] == [[]]:
            return self._reply(_empty_list(self._get(agent), method, *resolved[1:], **named))
        return self._reply(getattr(self._get(agent), method)(*resolved, **named))

    def do_run(self, agent: Ref, function: str, arguments: dict[str, Any]) -> Any:
        """Call ``module:function`` with the raw agent and ``arguments``; it returns JSON values or bytes."""
        module, colon, name = function.partition(":")
        if not colon:
            raise RefusedError(f"{function!r} is not module:function")
        return getattr(importlib.import_module(module), name)(self._get(agent), **arguments)

    def do_allocate(self, size: int, memory_type: str, directory: str, alignment: int) -> dict[str, Any]:
        """Make a buffer; ``directory`` and ``alignment`` are of a file, as :class:`FileBuffer` takes them."""
        buffer: DramBuffer | FileBuffer
        if memory_type == "FILE":
            buffer = FileBuffer(size, directory, alignment)
        elif memory_type == "DRAM":
            buffer = DramBuffer(size)
        else:
            raise RefusedError(f"{memory_type} buffers are not made by this version: only DRAM and FILE")
        return {"buffer": self._keep(buffer, "buffer"), "address": buffer.address, "device": buffer.device}

    def do_fill(self, buffer: Ref, seed: int, offset: int, size: int, inverted: bool) -> None:
        """Fill a buffer with the pattern of ``seed`` or its complement."""
        self._get(buffer).fill(seed, offset, size, inverted=inverted)

    def do_compare(self, buffer: Ref, seed: int, offset: int, size: int) -> dict[str, int] | None:
        """Compare a buffer with the pattern of ``seed``."""
        found: dict[str, int] | None = self._get(buffer).compare(seed, offset, size)
        return found

    def do_read(self, buffer: Ref, offset: int, size: int) -> bytes:
        """Return bytes of a buffer."""
        data: bytes = self._get(buffer).read(offset, size)
        return data

    def do_write(self, buffer: Ref, offset: int, data: bytes) -> None:
        """Write bytes to a buffer."""
        self._get(buffer).write(offset, data)

    def do_connect(self, agent: Ref, target: str, patience: float) -> None:
        """Connect to a target that serves."""
        self._initiator(agent, target, [], [], patience, acknowledged=True, tag_each=False).greet()

    def do_move(
        self, agent: Ref, target: str, plain: list[Ref], tagged: list[Ref], patience: float, **how: Any
    ) -> None:
        """Make each prepared transfer once, and wait until it is delivered."""
        initiator = self._initiator(agent, target, plain, tagged, patience, **how)
        initiator.window(len(plain), transfer.stamps_for(len(plain)))

    def do_measure(
        self,
        agent: Ref,
        target: str,
        plain: list[Ref],
        tagged: list[Ref],
        patience: float,
        op: str,
        own: list[int],
        iterations: int,
        warmup: int,
        settle: float,
        duration: float,
        **how: Any,
    ) -> dict[str, Any]:
        """Time windows of the prepared transfers, and see what this host's devices and other processes do meanwhile.

        :param own: processes of this host that belong to the row, besides this one.
        """
        initiator = self._initiator(agent, target, plain, tagged, patience, **how)
        counting, others = Counting(op), Others(own)
        found = transfer.measure(
            initiator,
            iterations=iterations,
            warmup=warmup,
            settle=settle,
            duration=duration,
            around=_both(others, counting),
        )
        return {**found, "counted": counting.plain(), "others": others.cores}

    def do_serve(self, agent: Ref, patience: float) -> int:
        """Be the target of another worker's ``connect``, ``move`` or ``measure``, until cancelled: windows served."""
        return transfer.serve(self._get(agent), deadline=time.monotonic() + patience, cancelled=self._cancelled)

    def do_free_port(self) -> int:
        """Return a TCP port of this host that nobody has at the moment, for a program that cannot choose one itself."""
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def do_tool_find(self, tool: str) -> dict[str, str] | None:
        """Say where this rank has a program; None: nowhere."""
        return self._tools.find(tool)

    def do_tool_start(self, tool: str, arguments: list[str], variables: dict[str, str | None]) -> dict[str, Any]:
        """Start a program."""
        program = self._tools.start(tool, arguments, variables)
        return {"program": self._keep(program, "program"), "pid": program.pid}

    def do_tool_look(self, program: Ref, seen: int, patience: float) -> dict[str, Any]:
        """Return what a program has written after the first ``seen`` bytes, and its exit code."""
        return self._tools.look(self._get(program), seen, patience)

    def do_tool_listens(self, program: Ref, port: int) -> bool:
        """Whether a program listens on a TCP port."""
        return self._tools.listens(self._get(program), port)

    def do_tool_end(self, program: Ref, number: int) -> None:
        """Send a program a signal."""
        self._tools.end(self._get(program), number)

    def do_forget(self, objects: list[Ref]) -> None:
        """Drop references, which releases what NIXL holds for them."""
        for ref in objects:
            self._objects.pop(ref.number, None)

    def _initiator(
        self,
        agent: Ref,
        target: str,
        plain: list[Ref],
        tagged: list[Ref],
        patience: float,
        *,
        acknowledged: bool,
        tag_each: bool,
        storage: Ref | None = None,
    ) -> transfer.Initiator:
        return transfer.Initiator(
            self._get(agent),
            target,
            [self._get(handle) for handle in plain],
            [self._get(handle) for handle in tagged],
            acknowledged=acknowledged,
            tag_each=tag_each,
            sync=self._get(storage).sync if storage is not None else None,
            deadline=time.monotonic() + patience,
        )

    def _keep(self, value: Any, kind: str) -> Ref:
        ref = Ref(self._next, kind)
        self._objects[ref.number] = value
        self._next += 1
        return ref

    def _get(self, ref: Ref) -> Any:
        if ref.number not in self._objects:
            raise RefusedError(f"this {ref.kind} is no longer there")
        return self._objects[ref.number]

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._get(value)
        if isinstance(value, list):
            # NIXL wants descriptors as tuples; JSON has only lists.
            return [tuple(part) if isinstance(part, list) else self._resolve(part) for part in value]
        return value

    def _reply(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float, bool, bytes)):
            return value
        if isinstance(value, dict):
            return {str(key): self._reply(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._reply(part) for part in value]
        return self._keep(value, type(value).__name__)


@contextlib.contextmanager
def _both(*contexts: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _empty_list(agent: Any, method: str, mem_type: str) -> Any:
    """Make a list of no descriptors: metadata of connections alone wants one, and NIXL's own method cannot."""
    bindings = sys.modules[type(agent.agent).__module__]
    return getattr(bindings, _LISTS[method])(agent.nixl_mems[mem_type])


def _plugin_remedy() -> str:
    folder = os.environ.get("NIXL_PLUGIN_DIR")
    where = f"NIXL_PLUGIN_DIR={folder}: unset it, or point it at" if folder else "NIXL_PLUGIN_DIR is not set: look at"
    return f"{where} the plugins of this build of NIXL; NIXL_LOG_LEVEL=info tells why one does not load"


def _nixl_version(nixl: Any) -> dict[str, str]:
    versions = {}
    for name in _NIXL_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    module = sys.modules["nixl._api"]
    package = next(iter(versions.items()), ("nixl", "of no package"))
    return {"nixl": package[1], "nixl_package": package[0], "nixl_module": str(module.__file__)}


def ucx_version() -> str:
    """Return the version of the UCX that this process has loaded, by its own word; empty where it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libucp") and ".so" in path:
            version = ctypes.CDLL(path).ucp_get_version_string
            version.restype = ctypes.c_char_p
            return str(version().decode())
    return ""
