# SPDX-License-Identifier: Apache-2.0
"""The suites with GPU memory: the real NIXL and UCX, on stand-ins for the CUDA driver and NVML.

UCX takes the stand-in for a driver, so the bytes go through its CUDA transports: by ``cuda_ipc``, or copied through
host memory (staged). ``tests/gpu/driver.c`` says what is like a GPU. What only a GPU can prove is in
``docs/explanation/gpu-memory.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import gpu_standin
from helpers.cli_run import Finished, bandwidth, profile, run

pytestmark = pytest.mark.long

#: A profile by which only the transport is judged.
CUDA_IPC = "floor = '1 B/s'\nmemory = ['VRAM:VRAM']\ntransports = ['cuda_ipc']"
SHORT = ("--nixl-duration=10ms", "--nixl-iterations=2", "--nixl-gate")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a host with two GPUs and NVLinks between them."""
    return {**gpu_standin.build(tmp_path_factory.mktemp("driver")), "STANDIN_NVLINKS": "18"}


def rows(done: Finished) -> dict[str, tuple[str, str]]:
    """Return transport and verdict of each row, by operation and memory."""
    found = re.findall(r"^UCX +(WRITE|READ) +(\S+) .* (\S+) +(\S+)$", done.output, re.MULTILINE)
    return {f"{op} {memory}": (transport, verdict) for op, memory, transport, verdict in found}


def measured(
    folder: Path, env: Mapping[str, str], *arguments: str, memory: str = "VRAM:VRAM", expect: str = CUDA_IPC
) -> Finished:
    path = profile(folder / "expected.toml", expect)
    return bandwidth(*SHORT, f"--nixl-profile={path}", f"--nixl-memory={memory}", *arguments, env=env)


def test_rows_of_every_pair_pass(driver: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    any_transport = "floor = '1 B/s'"
    pairs = "VRAM:VRAM,DRAM:VRAM,VRAM:DRAM"
    done = measured(tmp_path, {**driver, "STANDIN_LOG": str(log)}, "--nixl-op=WRITE,READ", memory=pairs,
                    expect=any_transport)  # fmt: skip
    by = {"VRAM:VRAM": "cuda_ipc/cuda", "DRAM:VRAM": "tcp/lo", "VRAM:DRAM": "tcp/lo"}
    wanted = {f"{op} {memory}": (transport, "PASS") for op in ("WRITE", "READ") for memory, transport in by.items()}
    assert rows(done) == wanted, done.output
    assert done.code == 0
    # The driver opened the other process's memory, and copied from host memory where UCX staged the bytes.
    assert {"export", "open", "from-host", "to-host"} <= {line.split()[0] for line in log.read_text().splitlines()}


@pytest.mark.parametrize("faults", [{"STANDIN_NVLINKS": "0"}, {"STANDIN_NVLINKS": "0", "STANDIN_GPUS": "1"}])
def test_write_passes_without_nvlink(faults: dict[str, str], driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, **faults}, "--nixl-op=WRITE")
    assert rows(done) == {"WRITE VRAM:VRAM": ("cuda_ipc/cuda", "PASS")}, done.output


def test_read_without_nvlink_is_the_wrong_transport(driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_NVLINKS": "0"}, "--nixl-op=READ")
    assert rows(done) == {"READ VRAM:VRAM": ("tcp/lo", "WRONG-TRANSPORT")}, done.output
    assert "went over tcp/lo as software emulation, not as RMA, but the profile accepts only cuda_ipc" in done.output
    assert "UCX reads by cuda_ipc only over NVLink: between GPUs without NVLink use WRITE" in done.output


@pytest.mark.parametrize("faults", [{"STANDIN_NO_IPC": "1"}, {"UCX_TLS": "tcp,cuda_copy"}, {"UCX_TLS": "^cuda_ipc"}])
def test_staged_transfers_are_right_and_named(faults: dict[str, str], driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, **faults}, "--nixl-op=WRITE")
    assert rows(done) == {"WRITE VRAM:VRAM": ("tcp/lo", "WRONG-TRANSPORT")}, done.output
    assert "one PID namespace" in done.output


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_wrong_bytes_are_corrupt(op: str, driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_CORRUPT": "1"}, f"--nixl-op={op}")
    assert rows(done)[f"{op} VRAM:VRAM"][1] == "CORRUPT", done.output
    assert re.search(r"[1-9]\d* of \d+ bytes are wrong", done.output)


@pytest.mark.parametrize("memory", [4096, 65536])  # too little for the buffer, and for the pattern beside it
def test_gpu_without_enough_memory_is_named(memory: int, driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_MEMORY": str(memory)}, "--nixl-op=WRITE")
    assert re.search(r"GPU [01] cannot allocate \d+ bytes: CUDA_ERROR_OUT_OF_MEMORY", done.output), done.output
    assert "run `nvidia-smi` to see which processes use its memory" in done.output
    assert done.code == 1


def test_lost_gpu_is_named(driver: dict[str, str], tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.touch()
    done = measured(tmp_path, {**driver, "STANDIN_LOST": str(lost)}, "--nixl-op=WRITE")
    assert "CUDA_ERROR_LAUNCH_FAILED" in done.output, done.output
    assert "a GPU that had an error may need a reset" in done.output
    assert done.code == 1


def test_dead_target_whose_memory_is_open_is_named(driver: dict[str, str]) -> None:
    done = run("suites/faults", "-k", "died or dies", "--nixl-memory=VRAM:VRAM", "--nixl-gate", env=driver)
    assert "(2 PASS; 0 rows" in done.output, done.output
    assert done.code == 0


@pytest.mark.whole
@pytest.mark.parametrize("suite", ["metadata", "control_path", "faults", "pattern"])
def test_suite_passes_with_gpu_memory(suite: str, driver: dict[str, str]) -> None:
    done = run(f"suites/{suite}", "--nixl-memory=VRAM:VRAM", "--nixl-blocks=64KiB", env=driver)
    assert done.code == 0, done.output
    assert re.search(r"NIXL verdict: PASS.*[1-9]\d* PASS", done.output), done.output
