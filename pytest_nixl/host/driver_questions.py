# SPDX-License-Identifier: Apache-2.0
"""Questions to NVML and the CUDA driver, each asked in a process of its own with a time limit.

A call into a broken driver may never return, and pytest must never load a driver. This module imports little, because
its processes are on the doctor's critical path.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from pytest_nixl.core.resource_limits import let_end_first

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: How long all answers of a library may take. The driver of a host without persistence mode takes seconds to load.
LIMIT_SECONDS = 20.0
#: How long an answer is waited for if the limit passed while this process did other work.
_READING_SECONDS = 2.0
NVML, CUDA = "NVML", "the CUDA driver"
#: Device nodes of the driver on Linux and on Windows Subsystem for Linux.
NODES = ("/dev/nvidiactl", "/dev/dxg")
#: CUDA_ERROR_NO_DEVICE and CUDA_ERROR_INVALID_DEVICE, which a value of CUDA_VISIBLE_DEVICES can cause.
_BY_VARIABLE = (100, 101)
#: CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF = 124
#: The functions that answer, by what is asked.
_FUNCTIONS = {
    NVML: "from pytest_nixl.host.nvml import query_nvml as query",
    CUDA: "from pytest_nixl.host.driver_questions import query_cuda as query",
}


def silent(subject: str) -> str:
    """Return how the reason begins if a library is there and does not answer."""
    return f"{subject} does not answer"


class DriverQuestion:
    """A question that a process of its own asks from now on.

    :param subject: what is asked: :data:`NVML` or :data:`CUDA`.
    :param environ: the environment variables of that process; None for those of this one.
    """

    def __init__(self, subject: str, environ: Mapping[str, str] | None = None) -> None:
        self._subject, self._until = subject, time.monotonic() + LIMIT_SECONDS
        # The process finds this package where this one found it, which may be on no path of the environment.
        script = f"import json, sys; sys.path[:] = {sys.path!r}; {_FUNCTIONS[subject]}; print(json.dumps(query()))"
        self._child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=None if environ is None else dict(environ),
        )
        let_end_first(self._child.pid)

    def answer(self) -> dict[str, Any]:
        """Return the answer, or why there is none, soon after the limit at the latest."""
        try:
            remaining = self._until - time.monotonic()
            output, errors = self._child.communicate(timeout=max(_READING_SECONDS, remaining))
        except subprocess.TimeoutExpired:
            reason = f"{silent(self._subject)}: no answer within {LIMIT_SECONDS:g} s"
            if not self.end():
                reason += f"; process {self._child.pid}, which asked it, cannot be killed and is left behind"
            return {"why": reason}
        if self._child.returncode or not output:
            last = (errors.strip().splitlines() or [f"exit status {self._child.returncode}"])[-1]
            return {"why": f"{silent(self._subject)}: the process that asked it failed ({last})"}
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        return answer

    def end(self) -> bool:
        """Kill the process, and return whether it has ended."""
        self._child.kill()
        try:
            self._child.wait(1)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()
        return True


def ask_cuda(question: DriverQuestion, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the answer of :func:`query_cuda`.

    If CUDA shows no GPU and a variable may be the cause, another process asks without that variable.
    """
    answer = question.answer()
    answer["node"] = any(map(os.path.exists, NODES))
    if answer.get("init") in _BY_VARIABLE and VISIBLE_DEVICES in environ:
        bare = {name: value for name, value in environ.items() if name != VISIBLE_DEVICES}
        answer["without_variable"] = DriverQuestion(CUDA, bare).answer().get("init")
    return answer


def query_cuda() -> dict[str, Any]:
    """Return what the CUDA driver shows to this process: the result of cuInit, and each device."""
    try:
        cuda = ctypes.CDLL(os.environ.get("PYTEST_NIXL_LIBCUDA") or "libcuda.so.1")
    except OSError as error:
        return {"library": str(error)}
    code = cuda.cuInit(0)
    if code:
        return {"init": code}
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    identity, address = ctypes.create_string_buffer(16), ctypes.create_string_buffer(32)
    devices = []
    for number in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), number)
        # Not its second version, which returns the UUID of a MIG instance.
        named = not cuda.cuDeviceGetUuid(identity, device)
        placed = not cuda.cuDeviceGetPCIBusId(address, len(address), device)
        devices.append(
            {
                "uuid": f"GPU-{uuid.UUID(bytes=identity.raw)}" if named else "",
                "pci": pci_address(address.value.decode()) if placed else "",
            }
        )
    answer: dict[str, Any] = {"init": 0, "devices": devices}
    if devices and not cuda.cuDeviceGet(ctypes.byref(device), 0):
        code = cuda.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF, device)
        answer["dma_buf"] = None if code else value.value == 1
    return answer


def pci_address(text: str) -> str:
    """Convert the PCI address of a library, such as NVML's ``00000000:53:00.0``, to that of sysfs, ``0000:53:00.0``."""
    domain, _, place = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{place}"
