# SPDX-License-Identifier: Apache-2.0
"""The methods of NIXL's ``nixl_agent``, carried out by an agent in a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from pytest_nixl.core.wire import Ref
from pytest_nixl.model.worker_commands import DESCRIPTOR_LISTS
from pytest_nixl.nixl.backends import plugin_of
from pytest_nixl.processes.worker_process import Worker

#: ``(address, length in bytes, device)``, with a string as fourth element to register memory.
Descriptor = Sequence[Any]


class Rows(Protocol):
    """An N x 3 array of NumPy: address, length in bytes and device."""

    def tolist(self) -> Any:
        """Return the rows as lists."""


Descriptors: TypeAlias = Sequence[Descriptor] | Rows | Ref


@dataclass(frozen=True)
class DescriptorList(Ref):
    """A descriptor list of NIXL in a worker, with the methods of NIXL's own lists."""

    def descCount(self) -> int:  # noqa: N802
        """Return the number of descriptors."""
        return cast(int, self._call("descCount"))

    def isEmpty(self) -> bool:  # noqa: N802
        """Return whether there is no descriptor."""
        return cast(bool, self._call("isEmpty"))

    def getType(self) -> str:  # noqa: N802
        """Return the name of the memory type: ``DRAM_SEG``, ``VRAM_SEG``, ``FILE_SEG``, ``OBJ_SEG`` or ``BLK_SEG``."""
        return cast(str, self._call("getType"))

    def index(self, descriptor: Descriptor) -> int:
        """Return the place of a descriptor."""
        return cast(int, self._call("index", list(descriptor)))

    def append(self, descriptor: Descriptor) -> None:
        """Add a descriptor at the end."""
        self._call("append", list(descriptor))

    def addDesc(self, descriptor: Descriptor) -> None:  # noqa: N802
        """Add a descriptor at the end."""
        self._call("addDesc", list(descriptor))

    def remDesc(self, index: int) -> None:  # noqa: N802
        """Remove a descriptor."""
        self._call("remDesc", index)

    def clear(self) -> None:
        """Remove all descriptors."""
        self._call("clear")

    def trim(self) -> DescriptorList:
        """Return a registered list as a list for transfers."""
        return cast(DescriptorList, with_methods(self._call("trim")))

    def print(self) -> None:
        """Let the worker write the descriptors to its output."""
        self._call("print")

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(self._call("__getitem__", index))

    def __setitem__(self, index: int, descriptor: Descriptor) -> None:
        self._call("__setitem__", index, list(descriptor))

    def _call(self, method: str, *arguments: Any) -> Any:
        worker = cast(Worker, self.owner)
        return worker.call("descriptor_list", descriptors=self, method=method, arguments=list(arguments))


@dataclass(frozen=True)
class TransferTelemetry:
    """What NIXL measured of a transfer.

    :param startTime: when it was posted, in microseconds.
    :param postDuration: how long its post took, in microseconds.
    :param xferDuration: how long it took, in microseconds.
    :param totalBytes: the bytes that it moved.
    :param descCount: the number of its descriptors, after neighbouring ones were merged.
    """

    startTime: int  # noqa: N815
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


def with_methods(value: Any) -> Any:
    """Return a reference to a descriptor list with the methods of the list, and any other value as it is."""
    lists = isinstance(value, Ref) and value.kind in DESCRIPTOR_LISTS
    return DescriptorList(value.number, value.kind, value.owner) if lists else value


class AgentCalls:
    """The methods of ``nixl_agent``, with its names, parameters and results.

    Descriptor lists and handles stay in the worker; here they are opaque references.
    """

    #: The worker that has the agent, and the reference to the agent in it.
    worker: Worker
    ref: Ref

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        called: dict[str, Any] = {"method": method, "arguments": list(arguments), "keywords": keywords}
        return with_methods(self.worker.call("call", agent=self.ref, **called))

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
        self, reg_list: Descriptors, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> DescriptorList:
        """Register memory, and return its descriptor list."""
        return cast(DescriptorList, self._call("register_memory", _plain(reg_list, ""), mem_type, list(backends)))

    def deregister_memory(self, dereg_list: Ref, backends: Sequence[str] = ()) -> None:
        """Deregister the descriptor list that ``register_memory`` returned."""
        self._call("deregister_memory", dereg_list, list(backends))

    def query_memory(
        self, reg_list: Descriptors, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Ask a backend about memory or files."""
        return cast("list[dict[str, str] | None]", self._call("query_memory", _plain(reg_list, ""), backend, mem_type))

    def get_xfer_descs(self, descs: Descriptors, mem_type: str | None = None) -> DescriptorList:
        """Return a descriptor list for transfers."""
        return cast(DescriptorList, self._call("get_xfer_descs", _plain(descs), mem_type))

    def get_reg_descs(self, descs: Descriptors, mem_type: str | None = None) -> DescriptorList:
        """Return a descriptor list for registration."""
        return cast(DescriptorList, self._call("get_reg_descs", _plain(descs, ""), mem_type))

    def get_remote_descs(self, descs: Descriptors, mem_type: str | None = None) -> DescriptorList:
        """Return a list of remote descriptors, from rows with the name of a remote agent as fourth element."""
        return cast(DescriptorList, self._call("get_remote_descs", _plain(descs), mem_type))

    def prep_mem_view(self, dlist: Ref, *, backends: Sequence[str] | None = None) -> int:
        """Prepare memory for a kernel that transfers it itself, and return the number of the view."""
        return cast(int, self._call("prep_mem_view", dlist, backends=None if backends is None else list(backends)))

    def release_mem_view(self, mvh: int) -> None:
        """Release what ``prep_mem_view`` returned."""
        self._call("release_mem_view", mvh)

    def get_serialized_descs(self, descs: Ref) -> bytes:
        """Return a descriptor list as bytes."""
        return cast(bytes, self._call("get_serialized_descs", descs))

    def deserialize_descs(self, serialized_descs: bytes) -> DescriptorList:
        """Restore a descriptor list from bytes."""
        return cast(DescriptorList, self._call("deserialize_descs", serialized_descs))

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Connect to a remote agent now instead of at the first transfer."""
        self._call("make_connection", remote_agent, list(backends))

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Descriptors,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> Ref:
        """Prepare the descriptors of one side; the local side's ``agent_name`` is ``""`` or ``NIXL_INIT_AGENT``."""
        return cast(Ref, self._call("prep_xfer_dlist", agent_name, _plain(xfer_list), mem_type, list(backends)))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Ref,
        local_indices: Iterable[int],
        remote_xfer_side: Ref,
        remote_indices: Iterable[int],
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

    def get_xfer_telemetry(self, handle: Ref) -> TransferTelemetry:
        """Return the telemetry of a finished transfer, if the agent records it."""
        return TransferTelemetry(**self._call("get_xfer_telemetry", handle))

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


def _plain(descriptors: Descriptors, *last: str) -> Any:
    """Return descriptors as JSON values.

    :param last: the fourth element that NIXL gives to each row of an N x 3 array.
    """
    if isinstance(descriptors, Ref):
        return descriptors
    if isinstance(descriptors, Sequence):
        return [list(descriptor) for descriptor in descriptors]
    return [[*row, *last] for row in descriptors.tolist()]


def _port(port: int | None) -> dict[str, int]:
    return {} if port is None else {"port": port}
