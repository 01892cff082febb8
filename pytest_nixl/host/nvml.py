# SPDX-License-Identifier: Apache-2.0
"""What NVML says of this host's GPUs, as JSON values: asked in a process of its own, which imports little."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.lazy_module import lazy_module, load
from pytest_nixl.host.driver_questions import NVML, pci_address, silent

if TYPE_CHECKING:
    import pynvml
else:  # only the extra gpu installs it
    pynvml = lazy_module("pynvml")

#: How the reason begins if there is an NVML, but it does not work.
NVML_FAILS = ("NVML cannot be initialised", silent(NVML))
#: NVML_P2P_CAPS_INDEX_READ, which NVML's Python package defines as a tuple that its own functions refuse.
_READ = 0
_P2P = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the IOH topology does not support it",
    4: "it is disabled by a registry key of the driver",
    5: "it is not supported",
    6: "the driver does not know",
}
#: Bits of nvmlDeviceGetCurrentClocksEventReasons that name a fault of cooling or power.
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
#: The names of that function, by the age of NVML's Python package.
_CLOCKS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_FABRIC = {1: "has not started", 2: "is in progress"}
_FABRIC_COMPLETED = 3
EXCLUSIVE, PROHIBITED = "exclusive process", "prohibited"
_COMPUTE_MODES = {1: "exclusive thread", 2: PROHIBITED, 3: EXCLUSIVE}


def query_nvml() -> dict[str, Any]:
    """Return what NVML says, or why it says nothing."""
    try:
        load(pynvml)
    except ImportError:
        return {"why": "NVML's Python package is not installed: run `pip install nvidia-ml-py`"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return {"why": "NVML (libnvidia-ml.so.1) was not found"}
        return {"why": f"{NVML_FAILS[0]}: {error}"}
    try:
        return _nvml_facts(pynvml)
    except pynvml.NVMLError as error:
        return {"why": f"{NVML_FAILS[1]}: {error}"}
    finally:
        pynvml.nvmlShutdown()


def _nvml_facts(nvml: Any) -> dict[str, Any]:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of NVML; return None if this GPU or driver does not support it."""
        with contextlib.suppress(nvml.NVMLError):
            answer = function(*arguments)
            return answer.decode() if isinstance(answer, bytes) else answer
        return None

    handles, unusable = {}, []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = _handle(nvml, index)
        except nvml.NVMLError as error:
            unusable.append({"index": index, "error": str(error)})
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": ask(nvml.nvmlSystemGetDriverVersion),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": [_nvml_gpu(nvml, ask, index, handle) for index, handle in handles.items()],
        "pairs": [
            {
                "one": reader,
                "other": other,
                "status": _P2P.get(ask(nvml.nvmlDeviceGetP2PStatus, handles[reader], handles[other], _READ), _P2P[6]),
            }
            for reader, other in permutations(handles, 2)
        ],
        "unusable": unusable,
        "confidential": query_confidential(nvml, ask),
    }


def _handle(nvml: Any, index: int) -> Any:
    """Return NVML's handle of a GPU.

    :raises NVMLError: the GPU cannot be used. NVML says so when it is asked for the handle, or when the GPU is used.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise
    return handle


def _nvml_gpu(nvml: Any, ask: Callable[..., Any], index: int, handle: Any) -> dict[str, Any]:
    pci, memory, bar1 = (
        ask(function, handle)
        for function in (nvml.nvmlDeviceGetPciInfo, nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetBAR1MemoryInfo)
    )
    ecc, persistence = ask(nvml.nvmlDeviceGetEccMode, handle), ask(nvml.nvmlDeviceGetPersistenceMode, handle)
    capability, mig = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle), ask(nvml.nvmlDeviceGetMigMode, handle)
    uncorrected = ask(
        nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    links = [ask(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return {
        "index": index,
        "name": ask(nvml.nvmlDeviceGetName, handle) or "",
        "pci": pci_address(pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId) if pci else "",
        "memory": memory.total if memory else None,
        "ecc": None if ecc is None else bool(ecc[0]),
        "uncorrected": uncorrected,
        "bar1": bar1.bar1Total if bar1 else None,
        "persistence": None if persistence is None else bool(persistence),
        "nvlinks": None if all(link is None for link in links) else sum(link == 1 for link in links),
        "capability": 10 * capability[0] + capability[1] if capability else None,
        "mig": None if mig is None else bool(mig[0]),
        "instances": _instances(nvml, ask, handle) if mig and mig[0] else None,
        "state": query_state(nvml, ask, handle),
    }


def _instances(nvml: Any, ask: Callable[..., Any], handle: Any) -> int | None:
    """Return the number of a GPU's MIG instances; None if NVML does not say."""
    most = ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    if most is None:
        return None
    return sum(ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number) is not None for number in range(most))


def query_state(nvml: Any, ask: Callable[..., Any], handle: Any) -> dict[str, Any]:
    """Return the values of a :class:`GpuState`.

    :param nvml: NVML's Python package.
    :param ask: calls a function of NVML, and returns None if the driver does not have it.
    """
    rows = _ask(nvml, ask, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    clocks = next(filter(None, (_ask(nvml, ask, name, handle) for name in _CLOCKS)), 0)
    return {
        "remap_pending": bool(rows[2]),
        "remap_failed": bool(rows[3]),
        "slowed": [text for bit, text in _SLOWED.items() if clocks & bit],
        "fabric": _fabric(nvml, ask, handle),
        "compute_mode": _COMPUTE_MODES.get(_ask(nvml, ask, "nvmlDeviceGetComputeMode", handle), ""),
    }


def query_confidential(nvml: Any, ask: Callable[..., Any]) -> bool:
    """Return whether confidential computing is on."""
    state = _ask(nvml, ask, "nvmlSystemGetConfComputeState")
    return bool(state is not None and state.ccFeature)


def _fabric(nvml: Any, ask: Callable[..., Any], handle: Any) -> str:
    structure = getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
    if structure is None:
        return ""
    info = structure()
    if _ask(nvml, ask, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
        return ""
    if info.state == _FABRIC_COMPLETED and info.status:
        return f"failed: {nvml.NVMLError(info.status)}"
    return _FABRIC.get(info.state, "")


def _ask(nvml: Any, ask: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """Call a function that an older package of NVML may lack; return None if it does."""
    function = getattr(nvml, name, None)
    return None if function is None else ask(function, *arguments)
