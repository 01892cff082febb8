# SPDX-License-Identifier: Apache-2.0
"""The questions to NVML and the CUDA driver, with stand-ins for both libraries, so that no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import gpu_standin
from helpers.double_libraries import build, in_a_child

from pytest_nixl.host import driver_questions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None and not os.environ.get("CI"), reason="needs the package nvidia-ml-py"
)

ASK = """
import json
from pytest_nixl.host import driver_questions as asked
{change}
print(json.dumps({question}))
"""
ASK_NVML = "asked.DriverQuestion(asked.NVML).answer()"
ASK_CUDA = "asked.ask_cuda(asked.DriverQuestion(asked.CUDA))"


def ask(question: str = ASK_NVML, change: str = "", **changes: str) -> dict[str, Any]:
    environment = {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = ASK.format(question=question, change=change)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


#: The faults of the second of two GPUs, and that the first one cannot read the second one's memory.
FAULTS = {
    "STANDIN_NAME": "NVIDIA H100 80GB HBM3", "STANDIN_MEMORY": str(80 << 30), "STANDIN_DRIVER": "570.133.20",
    "STANDIN_CUDA": "12080", "STANDIN_BAR1": f"{128 << 30},{256 << 20}", "STANDIN_NVLINKS": "18,17",
    "STANDIN_DOWN": "0,1", "STANDIN_ECC_ERRORS": "0,2", "STANDIN_PERSISTENCE": "1,0", "STANDIN_CC": "9,0",
    "STANDIN_P2P": "1,0",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return gpu_standin.build(tmp_path_factory.mktemp("driver"), bindings=False)


@pytest.fixture(scope="module")
def answer(library: dict[str, str]) -> dict[str, Any]:
    return ask(**library, **FAULTS)


def test_every_gpu_is_read_from_nvml(answer: dict[str, Any]) -> None:
    assert (answer["driver"], answer["cuda"]) == ("570.133.20", "12.8")
    good = {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "pci": "0000:1a:00.0", "memory": 80 << 30, "ecc": True,
        "uncorrected": 0, "bar1": 128 << 30, "persistence": True, "nvlinks": 18, "capability": 90,
        "mig": False, "instances": None,
        "state": {"remap_pending": False, "remap_failed": False, "slowed": [], "fabric": "", "compute_mode": ""},
    }  # fmt: skip
    bad = {"index": 1, "pci": "0000:1b:00.0", "uncorrected": 2, "bar1": 256 << 20, "persistence": False, "nvlinks": 17,
           "capability": None}  # fmt: skip
    assert answer["gpus"] == [good, {**good, **bad}]


def test_library_of_another_driver_is_reported(library: dict[str, str]) -> None:
    error = "NVML cannot be initialised: RM has detected an NVML/RM version mismatch."
    assert ask(**library, STANDIN_NVML="18") == {"why": error}


def test_answer_that_came_in_time_is_read_after_the_limit(library: dict[str, str]) -> None:
    late = "[question := asked.DriverQuestion(asked.CUDA), question._child.wait(), question.answer()][-1]"
    assert ask(late, "asked.LIMIT_SECONDS = 0.0", **library)["init"] == 0


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("raise ImportError", "NVML's Python package is not installed: run `pip install nvidia-ml-py`"),
        ("import os; os._exit(3)", "NVML does not answer: the process that asked it failed (exit status 3)"),
        ("print(1); raise SystemExit('a\\nb')", "NVML does not answer: the process that asked it failed (b)"),
        ("raise SystemExit(0)", "NVML does not answer: the process that asked it failed (exit status 0)"),
        ("while True: pass", "NVML does not answer: no answer within 0.5 s"),
    ],
    ids=["absent", "ends", "fails", "says nothing", "hangs"],
)
def test_a_process_that_asks_finds_what_this_one_finds_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, reason: str
) -> None:
    """The package is a double, because no library of NVML ends a process at will."""
    (tmp_path / "pynvml.py").write_text(package)
    monkeypatch.setattr(driver_questions, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    question = driver_questions.DriverQuestion(driver_questions.NVML)
    assert len(set(children.read_text().split()) - before) == 1
    assert question.answer() == {"why": reason}
    assert question.end()
    assert set(children.read_text().split()) <= before


FIRST = {"uuid": "GPU-10101010-1010-1010-1010-101010101010", "pci": "0000:1a:00.0"}
SECOND = {"uuid": "GPU-11111111-1111-1111-1111-111111111111", "pci": "0000:1b:00.0"}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, [FIRST, SECOND]), ("1,0", [SECOND, FIRST]), ("0,7", [FIRST]), (SECOND["uuid"], [SECOND])],
)
def test_gpus_that_cuda_shows_are_read(
    visible: str | None, devices: list[dict[str, str]], library: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    changes = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    answer = ask(ASK_CUDA, **library, **changes, STANDIN_DMABUF="1")
    assert answer == {"init": 0, "devices": devices, "dma_buf": True, "node": os.path.exists("/dev/nvidiactl")}


@pytest.mark.parametrize(
    ("visible", "code"),
    [("7", 100), ("-1", 100), ("", 100), ("7,0", 100), ("GPU-deadbeef", 100), ("MIG-deadbeef", 100), ("0,0", 101)],
)
def test_variable_that_hides_every_gpu_is_told_from_a_driver_that_fails(
    visible: str, code: int, library: dict[str, str]
) -> None:
    """The codes are those of driver 580 on an H100."""
    answer = ask(ASK_CUDA, **library, CUDA_VISIBLE_DEVICES=visible)
    assert (answer["init"], answer["without_variable"]) == (code, 0)
    answer = ask(ASK_CUDA, **library, CUDA_VISIBLE_DEVICES=visible, STANDIN_INIT="100")
    assert (answer["init"], answer["without_variable"]) == (100, 100)


#: Of three devices, the second has no UUID and the third no address.
DOUBLE = """
    #include <string.h>
    int cuInit(unsigned flags) { return INIT; }
    int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
    int cuDeviceGet(int *device, int number) { *device = 10 + number; return 0; }
    int cuDeviceGetUuid(char *to, int device) { return device == 11 ? 1 : !memset(to, device, 16); }
    int cuDeviceGetPCIBusId(char *to, int size, int device) {
        return device == 12 || size != 32 ? 1 : !strcpy(to, "00000000:1A:00.0");
    }
    int cuDeviceGetAttribute(int *value, int attribute, int device) {
        *value = DMA_BUF;
        return attribute != 124 || device != 10 || DMA_BUF > 1;
    }
"""
DEVICES = [
    {"uuid": "GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "pci": "0000:1a:00.0"},
    {"uuid": "", "pci": "0000:1a:00.0"},
    {"uuid": "GPU-0c0c0c0c-0c0c-0c0c-0c0c-0c0c0c0c0c0c", "pci": ""},
]


@pytest.mark.parametrize(
    ("init", "count", "dma_buf", "answer"),
    [
        (0, 3, 1, {"init": 0, "devices": DEVICES, "dma_buf": True}),
        (0, 1, 0, {"init": 0, "devices": DEVICES[:1], "dma_buf": False}),
        (0, 1, 2, {"init": 0, "devices": DEVICES[:1], "dma_buf": None}),
        (0, 0, 1, {"init": 0, "devices": []}),
        (100, 3, 1, {"init": 100}),
    ],
)
def test_what_the_cuda_driver_shows_is_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: int, count: int, dma_buf: int, answer: dict[str, Any]
) -> None:
    source = DOUBLE.replace("INIT", str(init)).replace("COUNT", str(count)).replace("DMA_BUF", str(dma_buf))
    [library] = build(tmp_path, {"libcuda-double.so": source})
    monkeypatch.setenv("PYTEST_NIXL_LIBCUDA", library)
    assert in_a_child([], driver_questions.query_cuda) == answer
    monkeypatch.setenv("PYTEST_NIXL_LIBCUDA", f"{tmp_path}/none")
    reason = f"{tmp_path}/none: cannot open shared object file: No such file or directory"
    assert driver_questions.query_cuda() == {"library": reason}
