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
from helpers.needs import need_programs

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


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    need_programs("gcc")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[2] / "nvml" / "stub.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(source)], check=True
    )
    return ask(LD_LIBRARY_PATH=str(folder))


def test_every_gpu_is_read_from_nvml(answer: dict[str, Any]) -> None:
    assert (answer["driver"], answer["cuda"]) == ("570.133.20", "12.8")
    good = {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "pci": "0000:53:00.0", "memory": 80 << 30, "ecc": True,
        "uncorrected": 0, "bar1": 128 << 30, "persistence": True, "nvlinks": 18, "capability": 90,
    }  # fmt: skip
    bad = {"index": 1, "pci": "0000:54:00.0", "uncorrected": 2, "bar1": 256 << 20, "persistence": False, "nvlinks": 17,
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
    assert ask() == {"why": "NVML cannot be initialised: NVML Shared Library Not Found"}
