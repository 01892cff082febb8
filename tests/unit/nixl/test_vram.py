# SPDX-License-Identifier: Apache-2.0
"""GPU buffers, tested on a machine without a GPU.

``cuda-bindings``, NIXL and UCX are real. The kernels are those of ``kernels.cu``, compiled for this processor. The
driver is a stand-in whose GPUs are host memory (``gpu/driver.c``), to which only it has access. The tests prove the
arithmetic, the calls and their order, that our code does not access GPU memory from the host, and that all memory is
freed. They do not prove how a GPU runs the kernels.
"""

from __future__ import annotations

import importlib.metadata
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import gpu_standin
from helpers.cli_run import profile, run
from helpers.pytester_run import run_pytest

from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.backends.libraries import LOADED
from pytest_nixl.nixl.backends.ucx import VRAM_AS_HOST
from pytest_nixl.nixl.worker.devices import make_ptx
from pytest_nixl.nixl.worker.memory import TILE
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.settings import read_settings

pytestmark = pytest.mark.long

TESTS = str(Path(__file__).parents[2])
VRAM_KNOWN = ("suites/infrastructure/test_gpu.py", "-k", "taken_for_gpu_memory", "--benchmark-disable")
NO_DRIVER = "needs a GPU, and this host has no NVIDIA driver (no /dev/nvidiactl)"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the stand-in for the driver, and return the variables with which a process finds it and its log."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "PYTHONPATH": TESTS}


@pytest.fixture(scope="module")
def without_nvml(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same on a host without NVML, such as a container with NVIDIA_DRIVER_CAPABILITIES=compute."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("without-nvml"), gpu_standin.DRIVER), "PYTHONPATH": TESTS}


@pytest.fixture(scope="module")
def started(driver: dict[str, str], pytestconfig: pytest.Config) -> Iterator[Agents]:
    """Agents whose workers see two GPUs. They wait without a thread of NIXL, which would use most of a core each."""
    settings = replace(read_settings(pytestconfig, environ={}), progress_thread=("off",))
    with Agents(LocalHost(supervisor()), settings) as agents:
        yield agents


@pytest.fixture(scope="module")
def agent(started: Agents, driver: dict[str, str]) -> NixlAgent:
    """An agent whose worker sees two GPUs."""
    return started.start("with-gpus", environment=driver)


# Without a GPU


PLAIN = """
def test_link(nixl_link):
    assert nixl_link.move(4096) is None

def test_buffer(gpu_buffer):
    assert False, "the test must be skipped"

def test_user(nixl_agent):
    nixl_agent.allocate(4096, "VRAM")
"""


def test_tests_without_a_gpu_are_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLAIN)
    result = run_pytest(pytester, "-rs", "--nixl-blocks=4KiB", "--nixl-op=READ", "--nixl-memory=VRAM:VRAM,DRAM:DRAM")
    result.assert_outcomes(passed=1, skipped=3)
    reasons = [re.sub(r"^SKIPPED \[1\] \S+ ", "", line) for line in result.outlines if line.startswith("SKIPPED")]
    assert sorted(reasons) == [f"VRAM {NO_DRIVER}", f"VRAM {NO_DRIVER}", f"VRAM:VRAM {NO_DRIVER}"]


def test_gate_fails_if_requested_memory_is_missing(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makeconftest("from pytest_nixl.suites.conftest import *")
    pytester.makepyfile("from pytest_nixl.suites.bandwidth.test_bandwidth import test_bandwidth")
    any_speed = profile(tmp_path / "any.toml", "floor = '1 KB/s'")
    options = ["--nixl-blocks=4KiB,8KiB", "--nixl-op=READ", "--nixl-duration=10ms", "--benchmark-quiet", "--nixl-gate"]
    result = run_pytest(pytester, f"--nixl-profile={any_speed}", "--nixl-memory=DRAM:DRAM,VRAM:VRAM", *options)
    missing = "MISSING bandwidth: VRAM:VRAM was requested (--nixl-memory), but none of its 2 rows ran: VRAM:VRAM *"
    result.stdout.fnmatch_lines([missing, "    remedy: *--gpus all*", "NIXL gate: FAIL (*1 M*"])
    assert result.ret == 1


# With GPUs that are host memory


def test_worker_reports_the_gpus_that_it_sees(agent: NixlAgent) -> None:
    before = Path("/proc/self/maps").read_text().count("libcuda")  # other tests load a stand-in into this process
    assert [(gpu.number, gpu.name, gpu.pci) for gpu in agent.gpus()] == [
        (0, "Stand-in 0", "0000:1a:00.0"),
        (1, "Stand-in 1", "0000:1b:00.0"),
    ]
    assert len({gpu.uuid for gpu in agent.gpus()}) == 2
    agent.allocate(1, "VRAM", device=1).free()
    assert agent.worker.versions["gpu"] == "GPU 1, Stand-in 1 (0000:1b:00.0)"
    assert agent.worker.call("devices")["by"].startswith("cuda-bindings ")
    assert Path("/proc/self/maps").read_text().count("libcuda") == before


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 65537, 8 * TILE, 8 * TILE + 8, 16 * TILE + 3])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_kernels_write_and_compare_the_same_pattern_as_the_processor(agent: NixlAgent, size: int, offset: int) -> None:
    vram, dram = agent.allocate(size + 16, "VRAM", device=1), agent.allocate(size + 16)
    seed = (1 << 63) - size
    for buffer in (vram, dram):
        assert buffer.read() == bytes(size + 16)
        buffer.fill(seed, offset=offset, size=size).result()
    assert vram.read() == dram.read()
    for buffer in (vram, dram):
        assert buffer.compare(seed, offset=offset, size=size) is None
        buffer.fill(seed, offset=offset, size=size, inverted=True).result()
    assert vram.read() == dram.read()
    corruption = vram.compare(seed, offset=offset, size=size)
    assert corruption is not None
    assert corruption["wrong_bytes"] == size
    assert corruption == dram.compare(seed, offset=offset, size=size)
    for buffer in (vram, dram):
        buffer.free()


def test_first_wrong_byte_is_reported_at_any_offset(agent: NixlAgent) -> None:
    size = 8 * TILE + 100
    vram, dram = agent.allocate(size, "VRAM"), agent.allocate(size)
    for place in (size - 1, 8 * TILE + 3, 8 * TILE - 1, 4099, 5):
        for buffer in (vram, dram):
            buffer.fill(9).result()
            buffer.write(bytes(2), offset=min(place, size - 2))
        assert vram.compare(9) == dram.compare(9) is not None
    vram.free()
    with pytest.raises(WorkerError, match="this buffer is no longer there"):
        vram.read()


def test_host_access_to_gpu_memory_ends_the_worker(started: Agents, driver: dict[str, str]) -> None:
    """Every other test here relies on that: a host access to GPU memory in our code would end it."""
    agent = started.start(environment=driver)
    buffer = agent.allocate(4096, "VRAM")
    with pytest.raises(WorkerError, match=signal.Signals.SIGSEGV.name):
        agent.run("helpers.vram_functions:touch", address=buffer.address)


def test_worker_loads_the_cuda_runtime_that_the_loader_does_not_find(agent: NixlAgent, driver: dict[str, str]) -> None:
    assert agent.worker.versions[LOADED].endswith("/nvidia/cuda_runtime/lib/libcudart.so.12")


@pytest.mark.parametrize(
    ("host", "output", "code"),
    [
        (
            "without_nvml",
            rf"^FAIL {VRAM_AS_HOST}: .*rank 0 \(agent worker, pid .* libuct_cuda needs libnvidia-ml\.so\.1",
            1,
        ),
        ("driver", r"\(1 PASS", 0),
    ],
)
def test_the_suite_tells_how_ucx_takes_gpu_memory(
    request: pytest.FixtureRequest, host: str, output: str, code: int
) -> None:
    done = run(*VRAM_KNOWN, env=request.getfixturevalue(host))
    assert re.search(output, done.output, re.MULTILINE)
    assert done.code == code


REMAINING = """
def test_fails(nixl_agent, nixl_buffer):
    nixl_buffer(nixl_agent, 11111, register=False, memory="VRAM", device=1)
    nixl_buffer(nixl_agent, 4096)
    assert False, "the test's own"

def test_taken_for_host(gpu_buffer):
    assert False, "the fixture must fail"

def test_dies(nixl_agent, nixl_buffer):
    nixl_buffer(nixl_agent, 22222, register=False, memory="VRAM")
    nixl_agent.worker.kill()
"""


def test_buffers_are_freed_after_a_failed_test(pytester: pytest.Pytester, without_nvml: dict[str, str]) -> None:
    pytester.makepyfile(REMAINING)
    log = str(pytester.path / "log")
    result = run_pytest(pytester, "--nixl-timeout=20s", env={**without_nvml, "STANDIN_LOG": log})
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*VRAM memory is detected as host by UCX*", "E * the test's own"])
    # A real driver frees the memory of the killed worker; the stand-in does not log that.
    text = Path(log).read_text()
    allocated, freed = (Counter(re.findall(rf"^{kind} (\d+)$", text, re.MULTILINE)) for kind in ("allocate", "free"))
    assert allocated - freed == Counter({"22222": 1})
    assert freed["11111"] == 1


def test_functions_of_users_get_buffers_as_arrays_and_describe_arrays(agent: NixlAgent) -> None:
    dram, vram = agent.allocate(1000), agent.allocate(1000, "VRAM", device=1)
    dram.write(b"\x02" * 1000)
    assert agent.run("helpers.vram_functions:sum_of", buffer=dram) == 2000
    for function, buffer, more, expected in (
        ("describe", dram, {}, [dram.address, 1000, 0, "DRAM"]),
        ("describe", vram, {}, [vram.address, 1000, 1, "VRAM"]),
        ("describe_part", vram, {"offset": 10}, [vram.address + 10, 990, 1, "VRAM"]),
    ):
        assert agent.run(f"helpers.vram_functions:{function}", buffer=buffer, **more) == expected
    assert agent.run("helpers.vram_functions:register_array") == "DRAM 16384"
    vram.free()


# The kernels themselves


def test_ptx_is_compiled_from_the_source() -> None:
    text = make_ptx.PTX.read_text()
    assert f"// {make_ptx.digest()}\n" in text, "kernels.cu was changed: run make_ptx.py on a machine with nvcc"
    assert ".version 6.3\n.target sm_70\n" in text


def _ptxas() -> str:
    """Return the path of the assembler in CUDA's package: another release on PATH may not know ``sm_70``."""
    files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or ()
    return next(str(file.locate()) for file in files if file.name == "ptxas")


@pytest.mark.parametrize("target", ["sm_70", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_ptx_is_assembled_for_every_gpu_generation(target: str, tmp_path: Path) -> None:
    out = tmp_path / "kernels.cubin"
    subprocess.run([_ptxas(), f"-arch={target}", "-Werror", "-o", str(out), str(make_ptx.PTX)], check=True)
    assert b"nixl_compare" in out.read_bytes()
