# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of GPUs on a host with a driver: a tree of the driver's files, and a stand-in for NVML.

NVML's Python package, NIXL and UCX are real. ``tests/gpu/nvml.c`` says how each fault is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pytest
from helpers import gpu_standin
from helpers.cli_run import ROOT, environment
from helpers.needs import need_programs

pytestmark = pytest.mark.long

GPU_CHECKS = ("gpus", "gpu-driver", "ucx-cuda", "gpu-p2p", "gpu-nvlink", "gpu-ecc", "gpu-bar1", "gpu-persistence")
FAULTS = gpu_standin.faults("fault")
#: One where NVML answers nothing, and one where it refuses a GPU: of these CI runs the whole doctor, the soak of all.
REFUSALS = {f"STANDIN_{name}" for name in ("NVML", "COUNT", "CUDA", "HANDLE", "CALLS")}
WHOLE = [fault for fault in FAULTS if {*fault["env"]} <= REFUSALS]


#: Verdict, reason and remedy of each check.
Verdicts: TypeAlias = dict[str, tuple[str, str, str]]

#: Reads a list of variables, and examines the host with each of them. Of its facts only those of the GPUs are read
#: again: NIXL and UCX, whose start takes most of the doctor's time, are asked once.
EXAMINE = """
import argparse, json, os, sys
from dataclasses import replace
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.checks.doctor.catalogue import examine, plain_results
from pytest_nixl.cli.doctor import add_sources, gathered
from pytest_nixl.host.facts import read_environment
from pytest_nixl.host.gpu import read_gpus
from pytest_nixl.host.devices import Topology
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile

parser = argparse.ArgumentParser()
add_sources(parser)
root = FactsRoot(None)
facts, backends = gathered(parser.parse_args(["--backend=UCX"]), root)
wanted = Requirements(load_profile("loopback"), backends, image=False)
told, usual = [], dict(os.environ)
for variables in json.load(sys.stdin):
    os.environ.update(variables)
    gpu, changed = read_gpus(root), read_environment(root)
    os.environ.clear()
    os.environ.update(usual)
    these = replace(facts, gpu=gpu, environment=changed, near=Topology.of(gpu, facts.rdma).nearest())
    told.append(plain_results(these, wanted, examine(these, wanted, gate=False)))
print(json.dumps(told))
"""


def on_the_host(env: Mapping[str, str], *command: str, stdin: str = "") -> str:
    """Run Python with this command line on that host; return what it prints."""
    need_programs("unshare", root=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", gpu_standin.DRIVER_TREE, "-", sys.executable,
         *command],
        cwd=ROOT, env=environment(**env), input=stdin, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


def by_check(result_rows: Mapping[str, Sequence[Mapping[str, str]]]) -> Verdicts:
    return {entry["id"]: (entry["verdict"], entry["reason"], entry["remedy"]) for entry in result_rows["checks"]}


def doctor(env: Mapping[str, str]) -> Verdicts:
    """Run the doctor on that host."""
    return by_check(json.loads(on_the_host(env, "-m", "pytest_nixl.cli", "doctor", "--json", "--backend=UCX")))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs, which have NVLinks."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "STANDIN_NVLINKS": "18"}


def test_healthy_gpus_pass(driver: dict[str, str]) -> None:
    report = doctor(driver)
    assert {id: report[id][0] for id in GPU_CHECKS} == dict.fromkeys(GPU_CHECKS, "PASS"), report
    assert report["gpus"][1] == "1 Stand-in 0, 1 Stand-in 1"
    assert report["gpu-driver"][1] == "driver 580.95.05, CUDA up to 12.9"
    assert "libcudart.so.12, which the loader does not find" in report["ucx-cuda"][1]
    assert "UCX VRAM:VRAM: 64 KiB each way over cuda_ipc/cuda" in report["transfers-arrive"][1]


#: Other states of the GPUs.
NOT_GIVEN, IN_MIG_MODE, WITHOUT_ECC = {"STANDIN_HANDLE": "0,4"}, {"STANDIN_MIG": "0,1"}, {"STANDIN_ECC": "0"}
#: States that explain nothing, or that the driver does not know.
UNEXPLAINED = [
    {"STANDIN_FABRIC": "0"},
    {"STANDIN_CONFIDENTIAL": "1"},
    {"STANDIN_CLOCKS": "4"},
    {"STANDIN_COMPUTE_MODE": "3", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps"},
    {
        f"STANDIN_nvmlDeviceGet{name}": "13"
        for name in ("RemappedRows", "CurrentClocksEventReasons", "GpuFabricInfo", "ComputeMode")
    },
]
SMALLER_SETS = [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "GPU-11"}]


@pytest.fixture(scope="module")
def examined(driver: dict[str, str]) -> Mapping[str, Verdicts]:
    """What the checks find with each of these variables, by the variable and its value."""
    every = [NOT_GIVEN, IN_MIG_MODE, WITHOUT_ECC, *SMALLER_SETS, *UNEXPLAINED, *(fault["env"] for fault in FAULTS)]
    document = json.loads(on_the_host(driver, "-c", EXAMINE, stdin=json.dumps(every)))
    return {str(variables): by_check(results) for variables, results in zip(every, document, strict=True)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_fault_is_named_by_one_check(fault: Mapping[str, Any], examined: Mapping[str, Verdicts]) -> None:
    results, id = examined[str(fault["env"])], fault["check"]
    verdict, reason, remedy = results[id]
    assert verdict == fault.get("verdict", "FAIL"), results[id]
    assert fault["said"] in reason
    assert fault["remedy"] in remedy
    # No other check accuses the GPUs that are left.
    judged = {other: results[other][0] for other in (*GPU_CHECKS, "variables-agree")}
    accusers = [other for other, verdict in judged.items() if verdict in ("FAIL", "WARN")]
    assert accusers == [id, *fault.get("also", ())]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("model", "passes"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 80GB HBM3,NVIDIA GH200 480GB", False)]
)
def test_gate_with_the_shipped_profile_is_green_on_its_own_gpus(
    model: str, passes: bool, driver: dict[str, str]
) -> None:
    suites = [f"suites/{name}" for name in ("bandwidth", "infrastructure", "metadata")]
    options = ["--nixl-gate", "--nixl-profile=h100", "--nixl-memory=VRAM:VRAM", "--nixl-blocks=64KiB"]
    done = on_the_host({**driver, "STANDIN_NAME": model}, "-m", "pytest", "-q", *suites, *options)
    assert ("NIXL gate: PASS" in done) is passes, done
    if not passes:
        assert "FAIL gpus: 1 GPU not of the profile's model H100: NVIDIA GH200 480GB" in done


@pytest.mark.parametrize("variables", [*SMALLER_SETS, *UNEXPLAINED])
def test_state_that_explains_nothing_is_no_fault(
    variables: Mapping[str, str], examined: Mapping[str, Verdicts]
) -> None:
    checks = (*GPU_CHECKS, "variables-agree")
    assert {id: examined[str(variables)][id][0] for id in checks} == dict.fromkeys(checks, "PASS")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if "whole" in fault else pytest.mark.whole, id=fault["name"]) for fault in WHOLE],
)
def test_the_doctor_says_the_same_where_nixl_and_ucx_have_that_nvml_too(
    fault: Mapping[str, Any], driver: dict[str, str], examined: Mapping[str, Verdicts]
) -> None:
    report, expected = doctor({**driver, **fault["env"]}), examined[str(fault["env"])]
    assert {id: report[id] for id in GPU_CHECKS} == {id: expected[id] for id in GPU_CHECKS}


def test_gpu_that_is_not_given_to_this_process_is_no_fault(examined: Mapping[str, Verdicts]) -> None:
    results = examined[str(NOT_GIVEN)]
    assert results["gpus"][:2] == ("PASS", "1 Stand-in 0")
    assert [id for id in GPU_CHECKS if results[id][0] not in ("PASS", "NOT-APPLICABLE")] == []


def test_mig_mode_is_named(examined: Mapping[str, Verdicts]) -> None:
    results = examined[str(IN_MIG_MODE)]
    assert results["gpus"][0] == results["gpu-p2p"][0] == "WARN", results
    assert "1 Stand-in 0, 1 Stand-in 1; in MIG mode: GPU 1: CUDA gives a process one part" in results["gpus"][1]
    assert "in 2 of 2 pairs one GPU cannot read the other's memory, because of MIG mode: GPU 1" in results["gpu-p2p"][1]
    assert all("nvidia-smi -i 0000:1b:00.0 -mig 0" in results[id][2] for id in ("gpus", "gpu-p2p"))


def test_gpus_without_ecc_have_no_errors_to_count(examined: Mapping[str, Verdicts]) -> None:
    assert examined[str(WITHOUT_ECC)]["gpu-ecc"][:2] == ("NOT-APPLICABLE", "ECC is disabled")


def test_missing_nvml_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    report = doctor(gpu_standin.build(tmp_path_factory.mktemp("driver"), gpu_standin.DRIVER))
    assert report["gpus"][1] == "2 Stand-in"
    verdict, reason, remedy = report["gpu-driver"]
    assert (verdict, "NVML (libnvidia-ml.so.1) was not found" in reason) == ("UNKNOWN", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
    verdict, reason, remedy = report["ucx-cuda"]
    assert (verdict, "libuct_cuda needs libnvidia-ml.so.1" in reason) == ("FAIL", True)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in remedy
