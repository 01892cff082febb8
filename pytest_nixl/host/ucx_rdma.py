# SPDX-License-Identifier: Apache-2.0
"""What the UCX that NIXL loads offers of this host's RDMA devices, and what its libibverbs answers for each of them."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CLASS = "/sys/class/infiniband"
#: What a probe registers, in bytes: more than the 64 KiB that containers may lock by default.
_REGISTERED = 1 << 20
#: The place of ``max_srq`` in ``struct ibv_device_attr``, and more than its size.
_MAX_SRQ, _ATTRIBUTES = 212, 1024
_RESOURCE = re.compile(r"resource \d+ .*-- (\w+)/(\S+?):\d+$", re.MULTILINE)
_OTHER_ABI = re.compile(r"libibverbs: Warning: (Driver \S+ does not support the kernel ABI of .*) for device \S*/(\S+)")


@dataclass(frozen=True)
class VerbsAnswer:
    """What UCX's libibverbs answers for an RDMA device.

    :param listed: whether it has the device in its list.
    :param opened: why it cannot open the device; empty if it can, or if it does not list it.
    :param registered: why it cannot register 1 MiB of memory with the device; empty as for ``opened``.
    :param shared_queues: the number of shared receive queues that the device can have; None if it was not opened.
    """

    listed: bool
    opened: str
    registered: str
    shared_queues: int | None


@dataclass(frozen=True)
class UcxRdma:
    """What UCX offers of RDMA.

    :param module: the file of UCX's RDMA module; empty if UCX did not load it.
    :param libibverbs: the file of the libibverbs that this module uses; empty without the module.
    :param offered: the transports that UCX offers for each RDMA device, whatever UCX_TLS and UCX_NET_DEVICES say.
    :param answers: what libibverbs answers, by RDMA device.
    :param other_abi: libibverbs' words about devices whose kernel interface no provider supports, by device.
    """

    module: str
    libibverbs: str
    offered: dict[str, tuple[str, ...]]
    answers: dict[str, VerbsAnswer]
    other_abi: dict[str, str] = field(default_factory=dict)


def other_abi(log: str) -> dict[str, str]:
    """Return libibverbs' words about devices whose kernel interface no provider supports, by device.

    :param log: the stderr of a process with libibverbs.
    """
    return {device: text for text, device in _OTHER_ABI.findall(log)}


def has_devices() -> bool:
    """Return whether this host has RDMA devices."""
    return os.path.isdir(_CLASS) and bool(os.listdir(_CLASS))


def ask_ucx_rdma(libraries: Callable[[], Sequence[str]]) -> dict[str, Any] | None:
    """Ask UCX and its libibverbs in this process about each RDMA device of this host.

    :param libraries: returns the paths of the libraries that this process has loaded; one of them is UCX.
    :return: JSON values of an :class:`UcxRdma`; None if UCX is not loaded.
    """
    names, ucp = os.listdir(_CLASS), _file(libraries(), "libucp")
    if not ucp:
        return None
    offered = offered_transports(_resources(ctypes.CDLL(ucp)), names)
    module = _file(libraries(), "libuct_ib")
    verbs = _Verbs(module) if module else None
    return {
        "module": module,
        "libibverbs": verbs.file if verbs else "",
        "offered": offered,
        "answers": verbs.answers(names) if verbs else {},
    }


def offered_transports(text: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the transports that UCX offers for each of some devices.

    :param text: UCX's own list, as ``ucx_info`` prints it.
    :param names: the devices.
    """
    offered: dict[str, list[str]] = {}
    for transport, device in _RESOURCE.findall(text):
        if device in names:
            offered.setdefault(device, []).append(transport)
    return offered


def _file(files: Sequence[str], name: str) -> str:
    return next((file for file in files if re.match(rf"{name}[-.]", os.path.basename(file))), "")


def _resources(ucp: ctypes.CDLL) -> str:
    """Return UCX's own list of the transports and devices that it can use, as ``ucx_info`` prints it."""
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        return ""
    for name, value in (("TLS", "all"), ("NET_DEVICES", "all"), ("MAX_COMPONENT_MDS", "1024")):
        ucp.ucp_config_modify(config, name.encode(), value.encode())
    # ucp_params_t: its first member says that only the second is set, the features: UCP_FEATURE_RMA.
    parameters = (ctypes.c_uint64 * 64)(1, 2)
    failed = ucp.ucp_init_version(major, minor, ctypes.byref(parameters), config, ctypes.byref(context))
    ucp.ucp_config_release(config)
    if failed:
        return ""
    text = printed(lambda stream: ucp.ucp_context_print_info(context, stream))
    ucp.ucp_cleanup(context)
    return text


def printed(write: Callable[[ctypes.c_void_p], object]) -> str:
    """Return what a function of a library writes to a stream of C."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    write(stream)
    libc.fclose(stream)
    return (text.value or b"").decode(errors="replace")


class _Verbs:
    """The libibverbs that a library uses.

    :param user: the file of that library: a process may have loaded several copies of libibverbs.
    """

    def __init__(self, user: str) -> None:
        self._library = library = ctypes.CDLL(user, use_errno=True)
        pointer, int_ = ctypes.c_void_p, ctypes.c_int
        library.ibv_get_device_list.restype = ctypes.POINTER(pointer)
        library.ibv_get_device_name.restype, library.ibv_get_device_name.argtypes = ctypes.c_char_p, [pointer]
        library.ibv_open_device.restype, library.ibv_open_device.argtypes = pointer, [pointer]
        library.ibv_close_device.argtypes = [pointer]
        library.ibv_query_device.argtypes = [pointer, pointer]
        library.ibv_alloc_pd.restype, library.ibv_alloc_pd.argtypes = pointer, [pointer]
        library.ibv_dealloc_pd.argtypes = [pointer]
        library.ibv_reg_mr.restype = pointer
        library.ibv_reg_mr.argtypes = [pointer, pointer, ctypes.c_size_t, int_]
        library.ibv_dereg_mr.argtypes = [pointer]
        address = ctypes.cast(library.ibv_get_device_list, pointer).value or 0
        self.file = _file_at(address)

    def answers(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return what it answers for some devices, by name."""
        count = ctypes.c_int()
        listed = self._library.ibv_get_device_list(ctypes.byref(count))
        answers: dict[str, dict[str, Any]] = {
            name: {"listed": False, "opened": "", "registered": "", "shared_queues": None} for name in names
        }
        for number in range(count.value if listed else 0):
            name = self._library.ibv_get_device_name(listed[number]).decode(errors="replace")
            if name in answers:
                answers[name] |= {"listed": True, **self._open(listed[number])}
        if listed:
            self._library.ibv_free_device_list(listed)
        return answers

    def _open(self, device: int) -> dict[str, Any]:
        ctypes.set_errno(0)
        context = self._library.ibv_open_device(device)
        if not context:
            return {"opened": _error_text(ctypes.get_errno())}
        try:
            attributes = ctypes.create_string_buffer(_ATTRIBUTES)
            failed = self._library.ibv_query_device(context, attributes)
            queues = None if failed else ctypes.c_int.from_buffer(attributes, _MAX_SRQ).value
            return {"shared_queues": queues, "registered": self._register(context)}
        finally:
            self._library.ibv_close_device(context)

    def _register(self, context: int) -> str:
        memory = ctypes.create_string_buffer(_REGISTERED)
        ctypes.set_errno(0)
        domain = self._library.ibv_alloc_pd(context)
        if not domain:
            return _error_text(ctypes.get_errno())
        region = self._library.ibv_reg_mr(domain, memory, _REGISTERED, 1)  # IBV_ACCESS_LOCAL_WRITE
        fault = "" if region else _error_text(ctypes.get_errno())
        if region:
            self._library.ibv_dereg_mr(region)
        self._library.ibv_dealloc_pd(domain)
        return fault


def _error_text(error: int) -> str:
    return os.strerror(error) if error else "it does not say why"


def _file_at(address: int) -> str:
    """Return the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return fields[5] if len(fields) > 5 else ""
    return ""
