# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of GPUs on a host with a driver: a tree of the driver's files, and a stand-in for NVML.

NVML's Python package, NIXL and UCX are real. ``tests/gpu/nvml.c`` says how each fault is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, environment
from helpers.needs import need_programs

pytestmark = pytest.mark.long

GPU_CHECKS = ("gpus", "gpu-driver", "ucx-cuda", "gpu-p2p", "gpu-nvlink", "gpu-ecc", "gpu-bar1", "gpu-persistence")
#: Each fault of a GPU that NVML reports, all on one host.
FAULTS = {
    "STANDIN_NVLINKS": "18,17", "STANDIN_DOWN": "0,1", "STANDIN_ECC_ERRORS": "0,2", "STANDIN_PERSISTENCE": "1,0",
    "STANDIN_BAR1": f"{1 << 30},{256 << 20}", "STANDIN_P2P": "1,0", "STANDIN_DRIVER": "570.133.20",
}  # fmt: skip


#: Verdict, reason and remedy of each check.
Found: TypeAlias = dict[str, tuple[str, str, str]]

#: Reads a list of variables, and examines the host with each of them. Of its facts only those of the GPUs are read
#: again: NIXL and UCX, whose start takes most of the doctor's time, are asked once.
EXAMINE = """
import argparse, json, os, sys
from dataclasses import replace
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.checks.doctor.examine import examine, plain
from pytest_nixl.cli.doctor import add_sources, gathered
from pytest_nixl.host.environment import read_environment
from pytest_nixl.host.gpu import read_gpus
from pytest_nixl.host.gpu_nic_affinity import Topology
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile

parser = argparse.ArgumentParser()
add_sources(parser)
root = FactsRoot(None)
facts, backends = gathered(parser.parse_args(["--backend=UCX"]), root)
wanted = Requirements(load_profile("loopback"), backends, image=False)
told = []
for variables in json.load(sys.stdin):
    os.environ.update(variables)
    gpu, changed = read_gpus(root), read_environment(root)
    for name in variables:
        del os.environ[name]
    these = replace(facts, gpu=gpu, environment=changed, near=Topology.of(gpu, facts.rdma).nearest())
    told.append(plain(these, wanted, examine(these, wanted, gate=False)))
print(json.dumps(told))
"""


def on_the_host(env: Mapping[str, str], *command: str, given: str = "") -> str:
    """Run Python with this command line on that host; return what it prints."""
    need_programs("unshare", root=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", gpu_standin.DRIVER_TREE, "-", sys.executable,
         *command],
        cwd=ROOT, env=environment(**env), input=given, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


def by_check(told: Mapping[str, Sequence[Mapping[str, str]]]) -> Found:
    return {each["id"]: (each["verdict"], each["reason"], each["remedy"]) for each in told["checks"]}


def doctor(env: Mapping[str, str]) -> Found:
    """Run the doctor on that host."""
    return by_check(json.loads(on_the_host(env, "-m", "pytest_nixl.cli", "doctor", "--json", "--backend=UCX")))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs, which have NVLinks."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "STANDIN_NVLINKS": "18"}


def test_healthy_gpus_pass(driver: dict[str, str]) -> None:
    found = doctor(driver)
    assert {id: found[id][0] for id in GPU_CHECKS} == dict.fromkeys(GPU_CHECKS, "PASS"), found
    assert found["gpus"][1] == "1 Stand-in 0, 1 Stand-in 1"
    assert found["gpu-driver"][1] == "driver 580.95.05, CUDA up to 12.9"
    assert "libcudart.so.12, which the loader does not find" in found["ucx-cuda"][1]
    assert "UCX VRAM:VRAM: 64 KiB each way over cuda_ipc/cuda" in found["transfers-arrive"][1]


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


LOADED = "driver 580.95.05 is loaded, but NVML "
#: What NVML refuses: variable and code of the stand-in, the check that fails, and what its reason and remedy say.
REFUSED = [
        ("NVML", "18", "gpu-driver", "libraries have another version: NVML cannot be initialised: RM has detected an "
         "NVML/RM version mismatch", "restart the container, or reboot the host"),
        ("NVML", "4", "gpu-driver", f"{LOADED}cannot be initialised: Insufficient Permissions", "open /dev/nvidiactl"),
        ("NVML", "9", "gpu-driver", f"{LOADED}cannot be initialised: Driver Not Loaded", "container /dev/nvidiactl"),
        ("COUNT", "999", "gpu-driver", f"{LOADED}does not answer: Unknown Error", "run `nvidia-smi` and `dmesg`"),
        ("CUDA", "11080", "gpu-driver", "driver 580.95.05 supports CUDA up to 11.8, but nixl-cu12 is built for CUDA 12",
         "install a newer driver"),
        ("HANDLE", "0,15", "gpus", "NVML cannot use 1 of 2 GPUs: GPU 1 (GPU is lost)", "reboot the host"),
        ("CALLS", "15,0", "gpus", "NVML cannot use 1 of 2 GPUs: GPU 0 (GPU is lost)", "reboot the host"),
        ("CALLS", "0,16", "gpus", "NVML cannot use 1 of 2 GPUs: GPU 1 (GPU requires restart)", "--gpu-reset"),
        ("HANDLE", "8", "gpus", "NVML cannot use 2 of 2 GPUs: GPU 0 (Insufficient External Power), GPU 1 (",
         "connect the GPU's own power cables"),
        ("HANDLE", "4", "gpus", "NVML cannot use 2 of 2 GPUs: GPU 0 (Insufficient Permissions), GPU 1 (",
         "may open /dev/nvidiactl"),
]  # fmt: skip
#: What the CUDA driver refuses: variables, the check that fails, and what its reason and remedy say.
REFUSED_BY_CUDA = [
    ({"STANDIN_INIT": "802"}, "gpu-driver", "CUDA_ERROR_SYSTEM_NOT_READY", "systemctl status nvidia-fabricmanager"),
    ({"STANDIN_INIT": "803"}, "gpu-driver", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart the container"),
    ({"STANDIN_INIT": "999"}, "gpu-driver", "CUDA_ERROR_UNKNOWN", "nvidia-modprobe"),
    ({"STANDIN_HIDES": "1"}, "gpus", "GPU 1 (0000:1b:00.0, GPU-11111111-1111-1111-1111-111111111111)", "device node"),
    ({"CUDA_VISIBLE_DEVICES": "7"}, "variables-agree", "CUDA_VISIBLE_DEVICES=7 shows 0 of this host's 2 GPUs", "unset"),
    ({"CUDA_VISIBLE_DEVICES": "0,0"}, "variables-agree", "names one GPU twice (0)", "unset CUDA_VISIBLE_DEVICES"),
    ({"CUDA_VISIBLE_DEVICES": "0,7"}, "variables-agree", "the list ends at '7'", "unset CUDA_VISIBLE_DEVICES"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-dead"}, "variables-agree", "'GPU-dead'", "unset CUDA_VISIBLE_DEVICES"),
]
#: One where NVML answers nothing, and one where it refuses a GPU: of these CI runs the whole doctor, the soak of all.
WHOLE_IN_CI = [("NVML", "4"), ("CALLS", "15,0")]
#: Other states of the GPUs.
NOT_GIVEN, IN_MIG_MODE, WITHOUT_ECC = {"STANDIN_HANDLE": "0,4"}, {"STANDIN_MIG": "0,1"}, {"STANDIN_ECC": "0"}
SMALLER_SETS = [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "GPU-11"}]


@pytest.fixture(scope="module")
def examined(driver: dict[str, str]) -> Mapping[str, Found]:
    """What the checks find with each of these variables, by the variable and its value."""
    every = [{f"STANDIN_{variable}": code} for variable, code, *_ in REFUSED]
    every += [NOT_GIVEN, IN_MIG_MODE, WITHOUT_ECC, *SMALLER_SETS, *(variables for variables, *_ in REFUSED_BY_CUDA)]
    told = json.loads(on_the_host(driver, "-c", EXAMINE, given=json.dumps(every)))
    return {str(variables): by_check(each) for variables, each in zip(every, told, strict=True)}


@pytest.mark.parametrize(("variable", "code", "id", "words", "remedy"), REFUSED)
def test_what_nvml_refuses_is_named(
    variable: str, code: str, id: str, words: str, remedy: str, examined: Mapping[str, Found]
) -> None:
    found = examined[str({f"STANDIN_{variable}": code})]
    assert found[id][0] == "FAIL", found[id]
    assert words in found[id][1]
    assert remedy in found[id][2]
    # No other check accuses the GPUs that are left.
    assert [other for other in GPU_CHECKS if found[other][0] == "FAIL"] == [id]


@pytest.mark.parametrize(("variables", "id", "words", "remedy"), REFUSED_BY_CUDA)
def test_what_the_cuda_driver_refuses_is_named(
    variables: Mapping[str, str], id: str, words: str, remedy: str, examined: Mapping[str, Found]
) -> None:
    found = examined[str(variables)]
    assert found[id][0] == ("WARN" if id == "gpus" else "FAIL"), found[id]
    assert words in found[id][1]
    assert remedy in found[id][2]
    others = (*GPU_CHECKS, "variables-agree")
    assert [other for other in others if found[other][0] not in ("PASS", "NOT-APPLICABLE")] == [id]


@pytest.mark.parametrize("variables", SMALLER_SETS)
def test_smaller_set_of_gpus_is_no_fault(variables: Mapping[str, str], examined: Mapping[str, Found]) -> None:
    checks = (*GPU_CHECKS, "variables-agree")
    assert {id: examined[str(variables)][id][0] for id in checks} == dict.fromkeys(checks, "PASS")


@pytest.mark.parametrize(
    ("variable", "code"),
    [
        pytest.param(variable, code, marks=() if (variable, code) in WHOLE_IN_CI else pytest.mark.whole)
        for variable, code, *_ in REFUSED
    ],
)
def test_the_doctor_says_the_same_where_nixl_and_ucx_have_that_nvml_too(
    variable: str, code: str, driver: dict[str, str], examined: Mapping[str, Found]
) -> None:
    changed = {f"STANDIN_{variable}": code}
    found, expected = doctor({**driver, **changed}), examined[str(changed)]
    assert {id: found[id] for id in GPU_CHECKS} == {id: expected[id] for id in GPU_CHECKS}


def test_gpu_that_is_not_given_to_this_process_is_no_fault(examined: Mapping[str, Found]) -> None:
    found = examined[str(NOT_GIVEN)]
    assert found["gpus"][:2] == ("PASS", "1 Stand-in 0")
    assert [id for id in GPU_CHECKS if found[id][0] not in ("PASS", "NOT-APPLICABLE")] == []


def test_mig_mode_is_named(examined: Mapping[str, Found]) -> None:
    found = examined[str(IN_MIG_MODE)]
    assert found["gpus"][0] == found["gpu-p2p"][0] == "WARN", found
    assert "1 Stand-in 0, 1 Stand-in 1; in MIG mode: GPU 1: CUDA gives a process one part" in found["gpus"][1]
    assert "in 2 of 2 pairs one GPU cannot read the other's memory, because of MIG mode: GPU 1" in found["gpu-p2p"][1]
    assert all("nvidia-smi -i GPU -mig 0" in found[id][2] for id in ("gpus", "gpu-p2p"))


def test_gpus_without_ecc_have_no_errors_to_count(examined: Mapping[str, Found]) -> None:
    assert examined[str(WITHOUT_ECC)]["gpu-ecc"][:2] == ("NOT-APPLICABLE", "ECC is disabled")


def test_missing_nvml_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = doctor(gpu_standin.build(tmp_path_factory.mktemp("driver"), gpu_standin.DRIVER))
    assert found["gpus"][1] == "2 Stand-in"
    verdict, reason, remedy = found["gpu-driver"]
    assert (verdict, "NVML (libnvidia-ml.so.1) was not found" in reason) == ("UNKNOWN", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
    verdict, reason, remedy = found["ucx-cuda"]
    assert (verdict, "libuct_cuda needs libnvidia-ml.so.1" in reason) == ("FAIL", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
