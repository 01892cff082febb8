# SPDX-License-Identifier: Apache-2.0
"""States of a GPU that explain a fault: pending repairs of its memory, slow clocks, its fabric, its compute mode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class GpuState:
    """What NVML says of a GPU. A value that the driver does not have is that of a healthy GPU.

    :param remap_pending: whether rows of its memory are replaced at its next reset.
    :param remap_failed: whether a row could not be replaced.
    :param slowed: why its clocks are slow now; empty: nothing is wrong with cooling and power.
    :param fabric: how far it is from joining the NVLink fabric; empty: it has joined, or it has no fabric.
    :param compute_mode: its compute mode; empty: several processes may use it.
    """

    remap_pending: bool = False
    remap_failed: bool = False
    slowed: tuple[str, ...] = ()
    fabric: str = ""
    compute_mode: str = ""


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
