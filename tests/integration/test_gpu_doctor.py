# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of GPUs on a host with a driver: a tree of the driver's files, and a stand-in for NVML.

NVML's Python package, NIXL and UCX are real. ``tests/gpu/nvml.c`` says how each fault is made.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, environment
from helpers.needs import need_programs

pytestmark = pytest.mark.long

#: Shows two GPUs and a driver in /proc to the command that follows.
DRIVER_TREE = """
set -e
mount -t tmpfs tmpfs /proc/driver
mkdir -p /proc/driver/nvidia/gpus
echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build" > /proc/driver/nvidia/version
for bus in 1a 1b; do
    mkdir "/proc/driver/nvidia/gpus/0000:$bus:00.0"
    echo "Model: Stand-in" > "/proc/driver/nvidia/gpus/0000:$bus:00.0/information"
done
exec "$@"
"""
#: Each fault of a GPU that NVML reports, all on one host.
FAULTS = {
    "STANDIN_NVLINKS": "18,17", "STANDIN_DOWN": "0,1", "STANDIN_ECC_ERRORS": "0,2", "STANDIN_PERSISTENCE": "1,0",
    "STANDIN_BAR1": f"{1 << 30},{256 << 20}", "STANDIN_P2P": "1,0", "STANDIN_DRIVER": "570.133.20",
}  # fmt: skip


def doctor(env: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """Run the doctor on that host; return verdict, reason and remedy of each check."""
    need_programs("unshare", root=True)
    inner = [sys.executable, "-m", "pytest_nixl.cli", "doctor", "--json", "--backend=UCX"]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", DRIVER_TREE, "-", *inner]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    return {each["id"]: (each["verdict"], each["reason"], each["remedy"]) for each in json.loads(done.stdout)["checks"]}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs, which have NVLinks."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "STANDIN_NVLINKS": "18"}


def test_healthy_gpus_pass(driver: dict[str, str]) -> None:
    found = doctor(driver)
    passed = ("gpus", "gpu-driver", "ucx-cuda", "gpu-p2p", "gpu-nvlink", "gpu-ecc", "gpu-bar1", "gpu-persistence")
    assert {id: found[id][0] for id in passed} == dict.fromkeys(passed, "PASS"), found
    assert found["gpus"][1] == "1 Stand-in 0, 1 Stand-in 1"
    assert found["gpu-driver"][1] == "driver 580.95.05, CUDA up to 12.9"
    assert "libcudart.so.12, which the loader does not find" in found["ucx-cuda"][1]


def test_each_fault_that_nvml_reports_is_named(driver: dict[str, str]) -> None:
    found = doctor({**driver, **FAULTS})
    wanted = {
        "gpu-driver": ("FAIL", "the kernel's driver is 580.95.05, but the container's libraries are 570.133.20"),
        "gpu-p2p": ("FAIL", "in 1 of 2 pairs one GPU cannot read the other's memory: GPU 0 that of GPU 1 (the chipset"),
        "gpu-nvlink": ("FAIL", "1 GPU with fewer active NVLinks than the 18 of the others: GPU 1 has 17"),
        "gpu-ecc": ("FAIL", "uncorrectable memory errors: GPU 1 has 2"),
        "gpu-bar1": ("WARN", "BAR1 covers only a part of the memory: GPU 1: 256 MiB of 1 GiB"),
        "gpu-persistence": ("WARN", "the driver unloads while no process uses GPU 1"),
    }
    for id, (verdict, words) in wanted.items():
        assert found[id][0] == verdict, found[id]
        assert words in found[id][1]
        assert found[id][2]


def test_library_of_another_driver_is_named(driver: dict[str, str]) -> None:
    verdict, reason, remedy = doctor({**driver, "STANDIN_NVML": "18"})["gpu-driver"]
    assert verdict == "FAIL"
    assert "RM has detected an NVML/RM version mismatch" in reason
    assert "restart the container" in remedy


def test_missing_nvml_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = doctor(gpu_standin.build(tmp_path_factory.mktemp("driver"), gpu_standin.DRIVER))
    assert found["gpus"][1] == "2 Stand-in"
    verdict, reason, remedy = found["gpu-driver"]
    assert (verdict, "NVML (libnvidia-ml.so.1) was not found" in reason) == ("UNKNOWN", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
    verdict, reason, remedy = found["ucx-cuda"]
    assert (verdict, "libuct_cuda needs libnvidia-ml.so.1" in reason) == ("FAIL", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
