# SPDX-License-Identifier: Apache-2.0
"""What NVML says of GPUs. Its package is a double, because no driver has these states at will; ``test_gpu`` has the
real package.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.host import driver_questions
from pytest_nixl.host.driver_questions import CUDA, ask_cuda
from pytest_nixl.host.nvml import query_nvml

NOT_SUPPORTED, LIBRARY_NOT_FOUND, LOST, RESET = 3, 12, 15, 16


class NvmlError(Exception):
    """An error of NVML. :param value: its number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml:
    """A double of NVML's package. It supports no function whose answer is not given.

    :param answers: by function, what it returns, raises, or is.
    """

    NVMLError = NvmlError
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = LIBRARY_NOT_FOUND, LOST, RESET
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_NVLINK_MAX_LINKS = 1, 0, 3

    def __init__(self, **answers: Any) -> None:
        self.ended = 0
        self._answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
            **answers,
        }

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's name
        self.ended += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            answer = self._answers.get(name, NvmlError(NOT_SUPPORTED))
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call


def answer(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return query_nvml()


HEALTHY = {"remap_pending": False, "remap_failed": False, "slowed": [], "fabric": "", "compute_mode": ""}
UNKNOWN = {
    "index": 0,
    "name": "",
    "pci": "",
    "state": HEALTHY,
    **dict.fromkeys(
        ("memory", "ecc", "uncorrected", "bar1", "persistence", "nvlinks", "capability", "mig", "instances")
    ),
}


def test_what_nvml_does_not_support_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    assert answer(monkeypatch, nvml) == {
        "driver": None,
        "cuda": None,
        "gpus": [UNKNOWN],
        "pairs": [],
        "unusable": [],
        "confidential": False,
    }
    assert nvml.ended == 1


def of_gpu(*values: Any) -> Callable[..., Any]:
    """Return a function that answers by the GPU that it is asked about; an error is raised."""

    def call(handle: str, *_: Any) -> Any:
        value = values[int(handle.removeprefix("gpu "))]
        if isinstance(value, Exception):
            raise value
        return value

    return call


def test_every_answer_of_nvml_is_a_value_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> str:
        if index == 3:
            raise NvmlError(RESET)
        return f"gpu {index}"

    memory = of_gpu(
        SimpleNamespace(total=80), SimpleNamespace(total=40), NvmlError(LOST), None, NvmlError(NOT_SUPPORTED)
    )
    links = {("gpu 0", 0): 1, ("gpu 0", 1): 0, ("gpu 0", 2): 1, ("gpu 1", 2): 0}
    nvml = Nvml(
        nvmlSystemGetDriverVersion=b"570.1",
        nvmlSystemGetCudaDriverVersion_v2=12080,
        nvmlDeviceGetCount=5,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetName=of_gpu("H100", b"A100", "", "", ""),
        nvmlDeviceGetPciInfo=of_gpu(
            SimpleNamespace(busId=b"00000000:1A:00.0"),
            SimpleNamespace(busId="00010000:1B:00.0"),
            None,
            None,
            SimpleNamespace(busId="0000:06:00.0"),
        ),
        nvmlDeviceGetBAR1MemoryInfo=of_gpu(SimpleNamespace(bar1Total=128), None, None, None, None),
        nvmlDeviceGetEccMode=of_gpu((1, 0), (0, 1), None, None, None),
        nvmlDeviceGetPersistenceMode=of_gpu(1, 0, None, None, None),
        nvmlDeviceGetCudaComputeCapability=of_gpu((9, 0), (8, 6), None, None, None),
        nvmlDeviceGetMigMode=of_gpu((1, 0), (0, 1), None, None, (1, 1)),
        nvmlDeviceGetMaxMigDeviceCount=of_gpu(4, 4, 4, 4, NvmlError(NOT_SUPPORTED)),
        nvmlDeviceGetMigDeviceHandleByIndex=lambda gpu, number: f"mig {number}" if number in (0, 3) else None,
        nvmlDeviceGetTotalEccErrors=lambda gpu, kind, counter: (gpu, kind, counter) == ("gpu 0", 1, 0) and 7,
        nvmlDeviceGetNvLinkState=lambda gpu, link: links.get((gpu, link)),
        nvmlDeviceGetP2PStatus=lambda reader, other, what: None if "4" in reader + other else (reader > other) + what,
        nvmlSystemGetConfComputeState=SimpleNamespace(ccFeature=1),
    )
    first = {
        "index": 0,
        "name": "H100",
        "pci": "0000:1a:00.0",
        "memory": 80,
        "ecc": True,
        "uncorrected": 7,
        "bar1": 128,
    }
    first |= {"persistence": True, "nvlinks": 2, "capability": 90, "mig": True, "instances": 2, "state": HEALTHY}
    second = {"index": 1, "name": "A100", "pci": "10000:1b:00.0", "memory": 40, "ecc": False, "uncorrected": False}
    second |= {"bar1": None, "persistence": False, "nvlinks": 0, "capability": 86, "mig": False, "instances": None}
    third = {"index": 4, "pci": "0000:06:00.0", "uncorrected": False, "mig": True, "instances": None}
    unknown = "the driver does not know"
    pairs = [(0, 1, "ok"), (0, 4, unknown), (1, 0, "the chipset does not support it")]
    pairs += [(1, 4, unknown), (4, 0, unknown), (4, 1, unknown)]
    assert answer(monkeypatch, nvml) == {
        "driver": "570.1",
        "cuda": "12.8",
        "gpus": [first, {**second, "state": HEALTHY}, {**UNKNOWN, **third}],
        "pairs": [{"one": reader, "other": other, "status": status} for reader, other, status in pairs],
        "unusable": [{"index": 2, "error": "error 15"}, {"index": 3, "error": "error 16"}],
        "confidential": True,
    }


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "ok"),
        (1, "the chipset does not support it"),
        (2, "the GPU does not support it"),
        (3, "the IOH topology does not support it"),
        (4, "it is disabled by a registry key of the driver"),
        (5, "it is not supported"),
        (6, "the driver does not know"),
        (7, "the driver does not know"),
    ],
)
def test_why_a_gpu_cannot_read_another_ones_memory(monkeypatch: pytest.MonkeyPatch, code: int, status: str) -> None:
    pairs = answer(monkeypatch, Nvml(nvmlDeviceGetCount=2, nvmlDeviceGetP2PStatus=code))["pairs"]
    assert {pair["status"] for pair in pairs} == {status}


@pytest.mark.parametrize(
    ("nvml", "reason", "ended"),
    [
        (None, "NVML's Python package is not installed: run `pip install nvidia-ml-py`", 0),
        (Nvml(nvmlInit=NvmlError(LIBRARY_NOT_FOUND)), "NVML (libnvidia-ml.so.1) was not found", 0),
        (Nvml(nvmlInit=NvmlError(18)), "NVML cannot be initialised: error 18", 0),
        (Nvml(nvmlDeviceGetCount=NvmlError(9)), "NVML does not answer: error 9", 1),
    ],
    ids=["no package", "no library", "not initialised", "fails"],
)
def test_an_nvml_that_does_not_work_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, nvml: Any, reason: str, ended: int
) -> None:
    assert answer(monkeypatch, nvml) == {"why": reason}
    assert getattr(nvml, "ended", 0) == ended


class FabricInfo(ctypes.Structure):
    """NVML's structure of that name."""

    _fields_ = (("state", ctypes.c_int), ("status", ctypes.c_int))


def fabric(state: int, status: int = 0, *, supported: bool = True) -> Nvml:
    """Return an NVML with a state of the NVLink fabric."""

    def fill(handle: str, info: Any) -> str:
        if not supported:
            raise NvmlError(NOT_SUPPORTED)
        info._obj.state, info._obj.status = state, status
        return ""

    nvml = Nvml(nvmlDeviceGetGpuFabricInfo=fill)
    vars(nvml)["c_nvmlGpuFabricInfo_t"] = FabricInfo
    return nvml


SLOWED = ["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"]
CLOCKS, OLD_CLOCKS = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"


@pytest.mark.parametrize(
    ("nvml", "changes"),
    [
        (Nvml(nvmlDeviceGetRemappedRows=(1, 2, 0, 0)), {}),
        (Nvml(nvmlDeviceGetRemappedRows=(0, 0, 1, 0)), {"remap_pending": True}),
        (Nvml(nvmlDeviceGetRemappedRows=(0, 0, 0, 1)), {"remap_failed": True}),
        *((Nvml(**{CLOCKS: bit}), {"slowed": [text]}) for bit, text in zip((8, 32, 64, 128), SLOWED, strict=True)),
        (Nvml(**{CLOCKS: 0x1 | 0x8 | 0x20 | 0x40 | 0x80}), {"slowed": SLOWED}),
        (Nvml(**{CLOCKS: 0x8, OLD_CLOCKS: 0x20}), {"slowed": SLOWED[:1]}),
        (Nvml(**{OLD_CLOCKS: 0x40}), {"slowed": SLOWED[2:3]}),
        (Nvml(nvmlDeviceGetComputeMode=0), {}),
        (Nvml(nvmlDeviceGetComputeMode=1), {"compute_mode": "exclusive thread"}),
        (Nvml(nvmlDeviceGetComputeMode=2), {"compute_mode": "prohibited"}),
        (Nvml(nvmlDeviceGetComputeMode=3), {"compute_mode": "exclusive process"}),
        (fabric(0), {}),
        (fabric(1), {"fabric": "has not started"}),
        (fabric(2, 7), {"fabric": "is in progress"}),
        (fabric(3), {}),
        (fabric(3, 7), {"fabric": "failed: error 7"}),
        (fabric(1, supported=False), {}),
    ],
)
def test_the_state_of_a_gpu_is_read_from_nvml(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, changes: dict[str, Any]
) -> None:
    assert answer(monkeypatch, nvml)["gpus"][0]["state"] == {**HEALTHY, **changes}


@pytest.mark.parametrize("feature", [0, 1])
def test_confidential_computing_is_read_from_nvml(monkeypatch: pytest.MonkeyPatch, feature: int) -> None:
    nvml = Nvml(nvmlSystemGetConfComputeState=SimpleNamespace(ccFeature=feature))
    assert answer(monkeypatch, nvml)["confidential"] is bool(feature)


@pytest.mark.parametrize(
    ("init", "environ", "bare"),
    [
        (100, {"CUDA_VISIBLE_DEVICES": "7", "PATH": "/bin"}, {"PATH": "/bin"}),
        (101, {"CUDA_VISIBLE_DEVICES": ""}, {}),
        (100, {"PATH": "/bin"}, None),
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (999, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (None, {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_another_process_asks_without_the_variable_that_may_hide_every_gpu(
    monkeypatch: pytest.MonkeyPatch, init: int | None, environ: dict[str, str], bare: dict[str, str] | None
) -> None:
    asked: list[Any] = []

    def question(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(answer=lambda: {"init": 0})

    monkeypatch.setattr(driver_questions, "DriverQuestion", question)
    monkeypatch.setattr(driver_questions, "NODES", ("/no/such", "/dev/null") if init == 0 else ("/no/such",))
    first: Any = SimpleNamespace(answer=lambda: {} if init is None else {"init": init})
    expected = {**first.answer(), "node": init == 0, **({} if bare is None else {"without_variable": 0})}
    assert ask_cuda(first, environ) == expected
    assert asked == ([] if bare is None else [(CUDA, bare)])
