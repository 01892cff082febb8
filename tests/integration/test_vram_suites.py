# SPDX-License-Identifier: Apache-2.0
"""The suites with GPU memory: the real NIXL and UCX, on stand-ins for the CUDA driver and NVML.

UCX takes the stand-in for a driver, so the bytes go through its CUDA transports: by ``cuda_ipc``, or copied through
host memory (staged). ``tests/gpu/driver.c`` says what is like a GPU. What only a GPU can prove is in
``docs/explanation/gpu-memory.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import gpu_standin
from helpers.cli_run import Finished, bandwidth, profile, run

from pytest_nixl.fixtures.opened_etcd import PrivateEtcd

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
    matches = re.findall(r"^UCX +(WRITE|READ) +(\S+) .* (\S+) +(\S+)$", done.output, re.MULTILINE)
    return {f"{op} {memory}": (transport, verdict) for op, memory, transport, verdict in matches}


def measured(
    folder: Path,
    env: Mapping[str, str],
    *arguments: str,
    memory: str = "VRAM:VRAM",
    expect: str = CUDA_IPC,
    fault: str = "",
) -> Finished:
    path = profile(folder / "expected.toml", expect)
    return bandwidth(*SHORT, f"--nixl-profile={path}", f"--nixl-memory={memory}", *arguments, env=env, fault=fault)


def test_rows_of_every_pair_pass(driver: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    any_transport = "floor = '1 B/s'"
    pairs = "VRAM:VRAM,DRAM:VRAM,VRAM:DRAM"
    done = measured(tmp_path, {**driver, "STANDIN_LOG": str(log)}, "--nixl-op=WRITE,READ", memory=pairs,
                    expect=any_transport)  # fmt: skip
    by = {"VRAM:VRAM": "cuda_ipc/cuda", "DRAM:VRAM": "tcp/lo", "VRAM:DRAM": "tcp/lo"}
    expected = {f"{op} {memory}": (transport, "PASS") for op in ("WRITE", "READ") for memory, transport in by.items()}
    assert rows(done) == expected, done.output
    assert done.code == 0
    # The driver opened the other process's memory, and copied from host memory where UCX staged the bytes.
    assert {"export", "open", "from-host", "to-host"} <= {line.split()[0] for line in log.read_text().splitlines()}


@pytest.mark.parametrize("gpus", [pytest.param("1", marks=pytest.mark.whole), "2"])
def test_write_passes_and_read_is_the_wrong_transport_without_nvlink(
    gpus: str, driver: dict[str, str], tmp_path: Path
) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_NVLINKS": "0", "STANDIN_GPUS": gpus}, "--nixl-op=WRITE,READ")
    assert rows(done) == {
        "WRITE VRAM:VRAM": ("cuda_ipc/cuda", "PASS"),
        "READ VRAM:VRAM": ("tcp/lo", "WRONG-TRANSPORT"),
    }, done.output
    assert "went over tcp/lo as software emulation, not as RMA, but the profile accepts only cuda_ipc" in done.output
    assert "UCX reads by cuda_ipc only over NVLink: between GPUs without NVLink let it read over PCIe" in done.output
    # The remedy works.
    assert "`export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y` on every rank" in done.output
    variables = {"STANDIN_NVLINKS": "0", "STANDIN_GPUS": gpus, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
    done = measured(tmp_path, {**driver, **variables}, "--nixl-op=READ")
    assert rows(done) == {"READ VRAM:VRAM": ("cuda_ipc/cuda", "PASS")}, done.output


def test_staged_transfers_over_tcp_are_named(driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_NO_IPC": "1"}, "--nixl-op=WRITE")
    assert rows(done) == {"WRITE VRAM:VRAM": ("tcp/lo", "WRONG-TRANSPORT")}, done.output
    assert "one PID namespace" in done.output


def test_staged_transfers_over_shared_memory_are_named(driver: dict[str, str], tmp_path: Path) -> None:
    """CMA cannot read GPU memory, and carries no messages: beside it UCX stages by System V's shared memory."""
    env = {**driver, "UCX_TLS": "cma,sysv,cuda_copy"}
    done = measured(tmp_path, env, "--nixl-op=WRITE", "--nixl-backend-params=UCX:ucx_error_handling_mode=none")
    assert rows(done) == {"WRITE VRAM:VRAM": ("sysv/memory", "WRONG-TRANSPORT")}, done.output
    assert "went over sysv/memory as software emulation, not as RMA" in done.output


def test_wrong_bytes_are_corrupt(driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, "STANDIN_CORRUPT": "1"}, "--nixl-op=WRITE,READ")
    assert {op: verdict for op, (_, verdict) in rows(done).items()} == {
        "WRITE VRAM:VRAM": "CORRUPT",
        "READ VRAM:VRAM": "CORRUPT",
    }, done.output
    assert re.search(r"[1-9]\d* of \d+ bytes are wrong", done.output)


def test_rows_that_fit_into_a_full_gpu_are_measured(driver: dict[str, str], tmp_path: Path) -> None:
    env = {**driver, "STANDIN_MEMORY": f"{1 << 30},{160 << 10}"}
    done = measured(tmp_path, env, "--nixl-op=WRITE", "--nixl-blocks=4KiB,64KiB,1MiB")
    verdicts = re.findall(r"^UCX +WRITE +VRAM:VRAM +(\S+) .* (\S+)$", done.output, re.MULTILINE)
    assert verdicts == [("4KiB", "PASS"), ("64KiB", "PASS"), ("1MiB", "ERROR")], done.output
    assert re.search(
        r"GPU 1 \(0000:1b:00.0, GPU-11111111-1111-1111-1111-111111111111\) cannot allocate 1048576 bytes: "
        r"CUDA_ERROR_OUT_OF_MEMORY .*: this row needs 1048576 bytes at each end, and the ends have 65536",
        " ".join(done.output.split()),
    ), done.output
    done.expect(1, "run `nvidia-smi -i 0000:1b:00.0` to see which processes use its memory")


@pytest.mark.parametrize("fault", gpu_standin.faults("row"), ids=lambda fault: fault["name"])
@pytest.mark.whole
def test_fault_of_a_row_is_named(fault: Mapping[str, Any], driver: dict[str, str], tmp_path: Path) -> None:
    done = measured(tmp_path, {**driver, **fault["env"]}, "--nixl-op=WRITE")
    assert done.code == 1
    assert [verdict for _, verdict in rows(done).values()] in ([fault["verdict"]], []), done.output
    assert f"{fault['verdict']} " in done.output
    assert fault["said"] in " ".join(done.output.split())


def test_lost_gpu_is_named(driver: dict[str, str], tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.touch()
    done = measured(tmp_path, {**driver, "STANDIN_LOST": str(lost)}, "--nixl-op=WRITE")
    done.expect(1, "CUDA_ERROR_LAUNCH_FAILED", "a GPU that had an error may need a reset")


def test_a_row_on_a_gpu_that_others_use_is_not_accused(driver: dict[str, str], tmp_path: Path) -> None:
    """It is below its floor with and without them. Only because a kernel takes long are they the reason."""
    floor = "floor = '100000 GB/s'\nmemory = ['VRAM:VRAM']\ntransports = ['cuda_ipc']"
    done = measured(tmp_path, {**driver, "STANDIN_BUSY": "2"}, "--nixl-op=WRITE", expect=floor)
    assert rows(done) == {"WRITE VRAM:VRAM": ("cuda_ipc/cuda", "INCONCLUSIVE")}, done.output
    done.expect(
        done.code,
        "but other processes used a GPU of this row: a kernel over 8 bytes took ... ms on it",
        "remedy: Stop the other processes that use the GPU (`nvidia-smi` shows them), and run the row again.",
    )


#: A plugin of a run: the target dies after transfers were verified, so that the initiator has the target's memory open.
DEAD_TARGET = """
import os, signal
from pytest_nixl.measure.link import Link

timed = Link._timed
def killed(link, *arguments, **named):
    os.kill(link.target.worker.pid, signal.SIGKILL)
    return timed(link, *arguments, **named)
Link._timed = killed
"""


def test_dead_target_whose_memory_is_open_is_named(driver: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = measured(tmp_path, {**driver, "STANDIN_LOG": str(log)}, "--nixl-op=WRITE", fault=DEAD_TARGET)
    done.expect(1, "ERROR ...target worker...SIGKILL")
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    assert "open" in calls
    assert "close" not in calls


#: A plugin of a run: every flow is slowed, and no end is full. A double, because GPUs that are this host's cores slow
#: each other by chance only.
SLOWED = """
from pytest_nixl.checks.pattern import fairness

fairness.SLOWED = fairness.FULL = 100.0
"""


def test_flows_of_a_pattern_on_one_gpu_name_it(driver: dict[str, str], tmp_path: Path) -> None:
    path = profile(tmp_path / "expected.toml", CUDA_IPC)
    options = ("--nixl-pattern=incast:3", "--nixl-memory=VRAM:VRAM", "--nixl-op=READ", "--nixl-blocks=64KiB")
    env = {**driver, "STANDIN_GPUS": "1", "STANDIN_NVLINKS": "0"}
    done = run("suites/pattern", *options, *SHORT[:2], f"--nixl-profile={path}", fault=SLOWED, env=env)
    text = "no end of 1->0 and 2->0 is full: ranks 0, 1 and 2 share GPU 0, Stand-in 0 (0000:1a:00.0), and processes on"
    assert done.output.count(text) == 1, done.output
    assert "64KiB (load alone, pattern incast:3): went over tcp/lo as software emulation, not as RMA" in done.output


def test_rows_between_two_ranks_pass(driver: dict[str, str], tmp_path: Path, nixl_private_etcd: PrivateEtcd) -> None:
    path = profile(tmp_path / "expected.toml", CUDA_IPC)
    options = ("--nixl-memory=VRAM:VRAM", "--nixl-op=WRITE,READ", "--nixl-ranks=2", f"--nixl-profile={path}", *SHORT)

    def rank(_: int) -> Finished:
        env = {**driver, "NIXL_GROUP_TOKEN": "of these two ranks and no other"}
        return bandwidth(*options, f"--nixl-etcd={nixl_private_etcd.endpoint}", env=env)

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, range(2)))
    assert [done.code for done in ranks] == [0, 0], ranks[0].output + ranks[1].output
    passed = {f"{op} VRAM:VRAM": ("cuda_ipc/cuda", "PASS") for op in ("WRITE", "READ")}
    assert passed in [rows(done) for done in ranks], ranks[0].output + ranks[1].output


#: Of each suite, what GPU memory may change; all of them are run in tox -e soak. In ``faults`` targets die whose memory
#: the initiator has open.
SAMPLE = (
    "suites/bandwidth", "suites/kv_cache",
    "suites/faults/test_transfers.py::test_the_initiator_is_told_that_its_target_died",
    "suites/faults/test_workers.py::test_a_target_that_dies_is_named_and_the_initiator_lives",
    "suites/control_path/test_control_path.py::test_the_first_transfer_and_later_ones",
    "suites/metadata/test_lifecycle.py::test_an_agent_that_was_restarted_is_found_by_those_who_knew_it",
)  # fmt: skip


@pytest.mark.parametrize(
    ("suites", "ops"),
    [
        # WRITE with GPU memory is measured above. READ needs NVLink, too.
        (SAMPLE, ("READ",)),
        pytest.param(
            [f"suites/{name}" for name in ("bandwidth", "kv_cache", "metadata", "control_path", "faults")],
            ("WRITE", "READ"),
            marks=pytest.mark.whole,
        ),
    ],
    ids=["sample", "all"],
)
def test_suites_pass_with_gpu_memory(
    suites: Sequence[str], ops: Sequence[str], driver: dict[str, str], tmp_path: Path
) -> None:
    """One run for all of them."""
    path = profile(tmp_path / "expected.toml", CUDA_IPC)
    options = ("--nixl-memory=VRAM:VRAM", "--nixl-blocks=64KiB", f"--nixl-op={','.join(ops)}", "--nixl-kv-tokens=64")
    report = tmp_path / "verdict.json"
    done = run(*suites, *options, "-rA", *SHORT[:2], f"--nixl-profile={path}", f"--nixl-report={report}", env=driver)
    assert done.code == 0, done.output
    passed = {f"{op} VRAM:VRAM": ("cuda_ipc/cuda", "PASS") for op in ops}
    assert rows(done) == passed, done.output
    requests = rf"^UCX VRAM:VRAM .* over cuda_ipc/cuda: {2 * len(ops)} PASS$"
    assert re.search(requests, done.output, re.MULTILINE), done.output
    assert "UCX READ VRAM:VRAM of 64KiB, 2 GPUs at once" in report.read_text()
    for test in (
        "test_the_initiator_is_told_that_its_target_died",
        "test_a_target_that_dies_is_named_and_the_initiator_lives",
        "test_the_first_transfer_and_later_ones",
        "test_an_agent_that_was_restarted_is_found_by_those_who_knew_it",
    ):
        assert re.search(rf"^PASSED .*::{test}$", done.output, re.MULTILINE), test


@pytest.mark.parametrize(
    "suites",
    [  # in `faults` only default checks use it
        # A leak of agents with GPU memory is found in test_endurance_suite.py.
        pytest.param(("suites/endurance",), marks=pytest.mark.whole),
        # What is counted is GPU memory, of one exporter; test_telemetry_suite.py has the others without it.
        ("suites/telemetry/test_counts.py", "-k", "prometheus_mp"),
        # Ten launches with CUDA contexts. What it records is seen without GPU memory.
        pytest.param(("suites/telemetry/test_overhead.py",), marks=pytest.mark.whole),
    ],
    ids=["endurance", "telemetry", "overhead"],
)
def test_extended_suite_passes_with_gpu_memory(suites: tuple[str, ...], driver: dict[str, str]) -> None:
    done = run(*suites, "--nixl-level=extended", "--nixl-memory=VRAM:VRAM", "--nixl-blocks=64KiB", env=driver)
    assert re.search(r"NIXL verdict: PASS.*[1-9]\d* PASS", done.expect(0).output), done.output
