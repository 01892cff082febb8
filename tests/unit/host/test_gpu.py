# SPDX-License-Identifier: Apache-2.0
"""The reader of NVML, run with NVML's real Python package and a stand-in for its library, so that no GPU is needed."""

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

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None and not os.environ.get("CI"), reason="needs the package nvidia-ml-py"
)

ASK = "import json; from pytest_nixl.host.gpu import _ask_nvml; print(json.dumps(_ask_nvml()))"


def ask(**changes: str) -> dict[str, Any]:
    environment = {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
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
    return gpu_standin.build(tmp_path_factory.mktemp("nvml"), gpu_standin.NVML)


@pytest.fixture(scope="module")
def answer(library: dict[str, str]) -> dict[str, Any]:
    return ask(**library, **FAULTS)


def test_every_gpu_is_read_from_nvml(answer: dict[str, Any]) -> None:
    assert (answer["driver"], answer["cuda"]) == ("570.133.20", "12.8")
    good = {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "pci": "0000:1a:00.0", "memory": 80 << 30, "ecc": True,
        "uncorrected": 0, "bar1": 128 << 30, "persistence": True, "nvlinks": 18, "capability": 90,
        "mig": False,
    }  # fmt: skip
    bad = {"index": 1, "pci": "0000:1b:00.0", "uncorrected": 2, "bar1": 256 << 20, "persistence": False, "nvlinks": 17,
           "capability": None}  # fmt: skip
    assert answer["gpus"] == [good, {**good, **bad}]


def test_every_pair_of_gpus_is_read_from_nvml(answer: dict[str, Any]) -> None:
    assert answer["pairs"] == [
        {"one": 0, "other": 1, "status": "the chipset does not support it"},
        {"one": 1, "other": 0, "status": "ok"},
    ]


def test_missing_library_of_nvml_is_reported() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has an NVIDIA driver, and so has NVML's library")
    assert ask() == {"why": "NVML (libnvidia-ml.so.1) was not found"}


def test_library_of_another_driver_is_reported(library: dict[str, str]) -> None:
    words = "NVML cannot be initialised: RM has detected an NVML/RM version mismatch."
    assert ask(**library, STANDIN_NVML="18") == {"why": words}


def test_nvml_that_never_returns_is_left_after_the_limit(library: dict[str, str]) -> None:
    limited = "import pytest_nixl.host.gpu as gpu; gpu.NVML_LIMIT_SECONDS = 1.0; "
    environment = {
        **os.environ,
        **library,
        "STANDIN_NVML_HANGS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", limited + ASK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=20)
    assert json.loads(done.stdout) == {"why": "NVML does not answer: no answer within 1 s"}
