# SPDX-License-Identifier: Apache-2.0
"""Judging of rows: every verdict, each limit, and the order of faults."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.core.resource_limits import NO_SPACE_REMEDY
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.judge.row import another_launch, decisive_bandwidth, judge, percentage
from pytest_nixl.model.device_counters import Carrier, CarrierBytes, LossyDevice
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import BUSY_GPU, Corruption, Samples
from pytest_nixl.model.verdicts import Verdict

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1_000_000)
FULL = Expectation(
    source="these tests", floor=1e9, ceiling=100e9, p50=1e-3, p99=2e-3, transports=("cma", "posix", "sysv")
)
FLOOR = Expectation(source="these tests", floor=1e9)


VRAM = RowKey("UCX", "WRITE", MemoryPair("VRAM", "VRAM"), 1_000_000, devices=DevicePair(0, 3))


def samples(*gigabytes: float, latencies: tuple[float, ...] = (100e-6,), transports: tuple[str, ...] = ("cma/memory",),
            corruption: Corruption | None = None, key: RowKey = KEY, protocol: str = "") -> Samples:  # fmt: skip
    """Return windows of one second with these bandwidths in GB/s, which are exact in binary for whole megabytes."""
    transfers = tuple(round(value * 1e9) // 1_000_000 for value in gigabytes)
    assert all(n * 1e6 == value * 1e9 for n, value in zip(transfers, gigabytes, strict=True))
    return Samples(key, (1.0,) * len(gigabytes), transfers, latencies, transports, corruption, protocol=protocol)


CORRUPTION = Corruption("after the last window", 3, 4096, 17, 0x0B, 0x00)


def test_a_transport_that_is_unknown_because_no_log_can_be_written_has_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # it has no free space
    judgement = judge(samples(2, transports=()), FULL)
    assert judgement.verdict is Verdict.UNKNOWN
    assert "nothing more can be written to /proc: its file system is full: `df /proc`" in judgement.reason
    assert judgement.remedy == NO_SPACE_REMEDY


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("tcp", False), ("tcp,cuda_copy", False), ("tcp,self", False), ("rc", False), ("tcp,cma", True), ("^tcp", True)],
)
def test_a_variable_that_forbids_the_accepted_transports_is_the_remedy(value: str, allowed: bool) -> None:
    """The remedy says first that UCX_TLS is set in this run, and nothing of causes that it makes impossible."""
    expectation = replace(FULL, transports=("cma",))
    remedy = judge(samples(2, transports=("tcp/lo",)), expectation, None, {"UCX_TLS": value}).remedy
    assert remedy.startswith(f"Unset UCX_TLS on every rank: UCX_TLS={value} is set in this run. ") is not allowed
    assert ("SYS_PTRACE" in remedy) is allowed
    assert ("Or, on one machine only, choose a profile for it: " in remedy) is (value in ("tcp", "tcp,cuda_copy"))


def test_no_profile_for_tcp_on_one_machine_is_named_to_a_row_with_gpu_memory() -> None:
    expectation, key = replace(FULL, transports=("cuda_ipc",)), replace(KEY, memory=MemoryPair("DRAM", "VRAM"))
    remedy = judge(samples(2, transports=("tcp/lo",), key=key), expectation, None, {"UCX_TLS": "tcp,cuda_copy"}).remedy
    assert remedy.endswith("is set in this run. Or choose a profile for it: --nixl-profile.")


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ([("rank 0 on a", "all"), ("rank 1 on b", "tcp")], "Unset UCX_TLS on rank 1 on b: UCX_TLS=tcp is set there."),
        ([("rank 0 on a", "tcp"), ("rank 1 on b", "tcp")], "Unset UCX_TLS on every rank: UCX_TLS=tcp is set"),
        ([("rank 1 on b", "cma")], "Check UCX_TLS and UCX_NET_DEVICES in the environment of every rank"),
    ],
)
def test_the_only_rank_whose_ucx_tls_forbids_the_accepted_transports_is_named(
    settings: list[tuple[str, str]], start: str
) -> None:
    expectation, setting = replace(FULL, transports=("cma",)), dict(settings).get("rank 0 on a", "")
    row = replace(samples(2, transports=("tcp/lo",)), ucx_tls=tuple(settings))
    assert judge(row, expectation, None, {"UCX_TLS": setting} if setting else {}).remedy.startswith(start)


def contended(cores: float, *gigabytes: float) -> Samples:
    return replace(samples(*gigabytes), contention=(cores,))


def timed(*latencies: float) -> Samples:
    return samples(2, latencies=latencies)


def beside_gpu_load(wait: float, gigabytes: float, latency: float = 100e-6) -> Samples:
    """Return four windows of a row, of which a second kernel had to wait for its GPU."""
    return replace(samples(*[gigabytes] * 4, latencies=(latency,)), gpu_waits=(1e-5, wait))


def launches(*gigabytes: float) -> Samples:
    """Return launches of four equal windows each."""
    row_samples = samples(*[gigabytes[0]] * 4)
    for value in gigabytes[1:]:
        row_samples = row_samples.with_launch(samples(*[value] * 4))
    return row_samples


CEILING = Expectation(source="these tests", ceiling=1e9)
OF_FLOOR, AGREE = "of the floor of 1 GB/s (8 Gb/s)", "it, and three quarters of them are needed for a verdict"
GOOD = f"2 GB/s (16 Gb/s) over cma/memory is 200 % {OF_FLOOR}"
#: How each remedy begins.
NOTHING, OTHER_WAY = (
    "Learn a profile from good runs (pytest-nixl profile learn)",
    "Do not trust any transfer over",
)
VARIABLES, LOG = "Check UCX_TLS and UCX_NET_DEVICES in the environment of every", "Search the worker's log for the "
CLOCK, LONGER = "Do not use this bandwidth: the clock stopped", "Run the row again with a --nixl-duration ten times"
IDLE, STOP = (
    "Check that the machine is idle (uptime, nvidia-smi) and",
    "Stop other processes on the machine and run",
)
OF_GPU = "; but other processes used a GPU of this row: a kernel over 8 bytes took 2.0 ms on it"
GPU_REMEDY = "Stop the other processes that use the GPU (`nvidia-smi` shows them), and run the row again."
CORES, ALONE = "Check that the machine is idle and that there is a core", "Run this row again alone with a longer "


@pytest.mark.parametrize(
    ("row", "expectation", "verdict", "reason", "remedy"),
    [
        # The first fault decides, in the order of severity; what nothing is expected of may still be corrupt.
        (samples(2), None, "NO-EXPECTATION", "the profile expects nothing of this row", NOTHING),
        *((samples(2, corruption=CORRUPTION, transports=("tcp/lo",)), expectation, "CORRUPT",
           "3 of 4096 bytes are wrong after the last window, the first at offset 17: expected 0x0b, found 0x00",
           OTHER_WAY)
          for expectation in (None, FULL)),
        (samples(500, latencies=(1.0,), transports=("tcp/lo", "cma/memory")), FULL, "WRONG-TRANSPORT",
         "went over tcp/lo, but the profile accepts only cma or posix or sysv", VARIABLES),
        (replace(samples(2, transports=("tcp/lo",)), windows=(), transfers=()), FULL, "WRONG-TRANSPORT",
         "went over tcp/lo, but the profile accepts only cma or posix or sysv", VARIABLES),
        (samples(500, transports=()), FULL, "UNKNOWN",
         "the transport that carried the bytes is not known, and the profile accepts only cma or posix or sysv", LOG),
        (samples(101, 101, 101), FULL, "IMPLAUSIBLE",
         "101 GB/s (808 Gb/s) is over the ceiling of 100 GB/s (800 Gb/s), which no such machine can exceed", CLOCK),
        (samples(100, 100, 100), FULL, "PASS", f"100 GB/s (800 Gb/s) over cma/memory is 10000 % {OF_FLOOR}", ""),
        (samples(99, 99, 101), FULL, "PASS", f"99 GB/s (792 Gb/s) over cma/memory is 9900 % {OF_FLOOR}", ""),
        (samples(1, 1, 1, 1), FLOOR, "PASS", f"1 GB/s (8 Gb/s) over cma/memory is 100 % {OF_FLOOR}", ""),
        (samples(2, 2, 2, 0.5), FLOOR, "PASS", GOOD, ""),
        (samples(0.5, 0.5, 0.5, 2), FLOOR, "FAIL",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, and 3 of 4 windows are below it", IDLE),
        (samples(0.5, 0.5, 2), FLOOR, "INCONCLUSIVE",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, but only 2 of 3 windows are below {AGREE}", LONGER),
        (samples(*(2,) * 35, *(0.5,) * 12), FLOOR, "INCONCLUSIVE",
         f"2 GB/s (16 Gb/s) is 200 % {OF_FLOOR}, but only 35 of 47 windows are at or above {AGREE}", LONGER),
        (contended(0.4, 0.5, 0.5, 0.5), FLOOR, "INCONCLUSIVE",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, but other processes used 0.4 of this row's cores", STOP),
        (contended(0.4, 2, 2, 0.5), FLOOR, "INCONCLUSIVE",
         f"2 GB/s (16 Gb/s) is 200 % {OF_FLOOR}, but only 2 of 3 windows are at or above {AGREE}", LONGER),
        (contended(0.04, 0.95, 0.95, 0.95), FLOOR, "FAIL",
         f"0.95 GB/s (7.6 Gb/s) is 95 % {OF_FLOOR}, and 3 of 3 windows are below it", IDLE),
        (contended(0.06, 0.95, 0.95, 0.95), FLOOR, "INCONCLUSIVE",
         f"0.95 GB/s (7.6 Gb/s) is 95 % {OF_FLOOR}, but other processes used 0.06 of this row's cores", STOP),
        (timed(1e-3), replace(FULL, p99=None), "PASS", GOOD, ""),
        (timed(1.001e-3), replace(FULL, p99=None), "FAIL",
         "the p50 latency of 1001 us is just over 100 % of its bound of 1000 us", CORES),
        (timed(2e-3), replace(FULL, p50=None), "PASS", GOOD, ""),
        (timed(2.001e-3), FULL, "FAIL",
         "the p50 latency of 2001 us is 200 % of its bound of 1000 us and the p99 latency of 2001 us is just over "
         "100 % of its bound of 2000 us", CORES),
        (timed(*[1e-4] * 99, 1.0), FULL, "PASS", GOOD, ""),
        (timed(*[1e-4] * 98, 1.0, 1.0), FULL, "FAIL",
         "the p99 latency of 1000000 us is 50000 % of its bound of 2000 us", CORES),
        (samples(2, 2, 0.5, latencies=(1.0,)), FULL, "FAIL",
         "the p50 latency of 1000000 us is 100000 % of its bound of 1000 us and the p99 latency of 1000000 us is "
         "50000 % of its bound of 2000 us", CORES),
        (samples(0.5, latencies=(1.0,)), FULL, "FAIL",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, and 1 of 1 windows are below it", IDLE),
        (beside_gpu_load(2e-3, 0.5), FULL, "INCONCLUSIVE",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, and 4 of 4 windows are below it{OF_GPU}", GPU_REMEDY),
        (beside_gpu_load(2e-3, 2, 5e-3), FULL, "INCONCLUSIVE",
         "the p50 latency of 5000 us is 500 % of its bound of 1000 us and the p99 latency of 5000 us is 250 % of its "
         f"bound of 2000 us{OF_GPU}", GPU_REMEDY),
        (beside_gpu_load(2e-3, 2), FULL, "PASS", GOOD, ""),
        (beside_gpu_load(BUSY_GPU, 0.5), FULL, "FAIL",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}, and 4 of 4 windows are below it", IDLE),
        (timed(), FLOOR, "PASS", GOOD, ""),
        (timed(), replace(FLOOR, p50=1e-6), "ERROR",
         "no single transfer was timed, but the profile has a latency bound", ALONE),
        (timed(), replace(FLOOR, p99=1e-6), "ERROR",
         "no single transfer was timed, but the profile has a latency bound", ALONE),
        (samples(0.001), Expectation(source="", p50=1e-3, p99=1e-3, transports=("cma",)), "PASS",
         "0.001 GB/s (0.008 Gb/s) over cma/memory; no floor, judged by transports and p50 and p99", ""),
        (samples(0.5), CEILING, "NO-EXPECTATION",
         "went over cma/memory and is not over the ceiling of 1 GB/s; the profile expects nothing else of it", NOTHING),
        (samples(0.5, transports=()), CEILING, "NO-EXPECTATION",
         "went over an unknown transport and is not over the ceiling of 1 GB/s; the profile expects nothing else "
         "of it", NOTHING),
        (samples(0.5), Expectation(source=""), "NO-EXPECTATION",
         "went over cma/memory; the profile expects nothing of it", NOTHING),
        (launches(1.25, 1.25, 1.25), FLOOR, "PASS", f"1.25 GB/s (10 Gb/s) over cma/memory is 125 % {OF_FLOOR}", ""),
        (launches(2, 2), FLOOR, "INCONCLUSIVE",
         f"2 GB/s (16 Gb/s) is 200 % {OF_FLOOR}; 2 of the 3 launches needed at least", STOP),
        (launches(0.75, 0.75, 0.75), FLOOR, "FAIL",
         f"0.75 GB/s (6 Gb/s) is 75 % {OF_FLOOR}; 3 launches, spread 0 %, between 0.741 GB/s and 0.759 GB/s: below "
         f"the floor", IDLE),
        (launches(0.5, 1.25, 2), FLOOR, "INCONCLUSIVE",
         f"1.25 GB/s (10 Gb/s) is 125 % {OF_FLOOR}; 3 launches, spread 71 %, between 0.019 GB/s and 61.2 GB/s: a "
         f"spread over 3 % needs 5 launches", STOP),
        (replace(launches(0.5, 0.5, 0.5), contention=(0.0, 0.0, 0.4)), FLOOR, "INCONCLUSIVE",
         f"0.5 GB/s (4 Gb/s) is 50 % {OF_FLOOR}; 3 launches, spread 0 %, between 0.494 GB/s and 0.506 GB/s: below "
         f"the floor; in 1 of 3 launches other processes used up to 0.4 of this row's cores", STOP),
        *((replace(samples(2), windows=windows, transfers=(1,) * len(windows)), FULL, "ERROR",
           "no window of transfers was timed", ALONE)
          for windows in ((), (1.0, 0.0), (math.inf,))),
    ],
)  # fmt: skip
def test_a_row_is_judged_by_what_is_expected_of_it(
    row: Samples, expectation: Expectation | None, verdict: str, reason: str, remedy: str
) -> None:
    judgement = judge(row, expectation)
    assert (str(judgement.verdict), judgement.reason) == (verdict, f"UCX WRITE DRAM:DRAM of 1000000B: {reason}")
    assert judgement.remedy.startswith(remedy) if remedy else judgement.remedy == ""


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (1.0, 1.0, "100 %"),
        (199, 200, "just under 100 %"),
        (201, 200, "just over 100 %"),
        (197, 200, "98 %"),
        (203, 200, "102 %"),
        (0.0012, 1.0, "0.12 %"),
        (0.0, 1.0, "0 %"),
    ],
)
def test_a_percentage_is_never_rounded_to_the_bound(value: float, reference: float, text: str) -> None:
    assert percentage(value, reference) == text


DISTURBED = replace(launches(0.5, 0.5, 0.5), contention=(0.0, 0.0, 0.4))
#: Windows far from the floor that disagree about it.
DISAGREEING = (samples(*(5,) * 7, *(0.5,) * 3), samples(*(0.2,) * 7, *(2,) * 3))
SETTLED = ((4,), (0.25,), (1.25, 1.25, 1.25), (0.5, 1.25, 2, 0.5, 1.25, 2, 1))
FAULTY = (samples(2, transports=("tcp/lo",)), samples(2, corruption=CORRUPTION), samples(2, latencies=(1.0,)))


@pytest.mark.parametrize(
    ("row", "expectation", "more"),
    [
        *((launches(*values), FLOOR, True) for values in ((2,), (0.5,), (1.25, 1.25), (0.5, 1.25, 2))),
        *((launches(*values), FLOOR, False) for values in SETTLED),
        *((row, FLOOR, True) for row in DISAGREEING),
        *((row.with_launch(row).with_launch(row), FLOOR, False) for row in DISAGREEING),
        (samples(*(5,) * 8, *(0.5,) * 2), FLOOR, False),
        (samples(*(0.2,) * 8), FLOOR, False),
        (DISTURBED, FLOOR, True),
        (replace(samples(0.5), lossy=(LossyDevice("a", "rxe0", 1000, {"rcvd_seq_err": 9}),)), FLOOR, True),
        (replace(DISTURBED, contention=(0.0,) * 3), FLOOR, False),
        # Of other faults than the floor no further launch is needed.
        *((row, FULL, False) for row in FAULTY),
        *((samples(2), expectation, False) for expectation in (None, replace(FULL, floor=None))),
    ],
)
def test_another_launch_is_needed_while_it_could_decide(
    row: Samples, expectation: Expectation | None, more: bool
) -> None:
    assert another_launch(row, expectation) is more


def test_windows_that_agree_suffice_far_above_the_floor_unless_latencies_are_judged() -> None:
    assert decisive_bandwidth(None) == decisive_bandwidth(replace(FLOOR, floor=None)) == 0.0
    assert decisive_bandwidth(FLOOR) == 4e9
    assert decisive_bandwidth(replace(FLOOR, p50=1e-3)) is decisive_bandwidth(replace(FLOOR, p99=1e-3)) is None


#: How each step of the remedy of a wrong transport begins.
STEPS = {
    "UCX": "check UCX_TLS and UCX_NET_DEVICES in the environment of every rank",
    "LIBFABRIC": "check FI_PROVIDER in the environment of every rank",
    "own": "check the backend's own settings in the environment of every rank",
    "cma": "for cma allow the processes to read each other's memory (in a container --cap-add SYS_PTRACE",
    "shm": "for posix and sysv give both processes one IPC namespace and a /dev/shm",
    "cuda_ipc": "for cuda_ipc check that both processes are on one host with one IPC and one PID namespace (docker run",
    "fabric": "between two hosts of one NVLink domain (NVL72) the memory needs a fabric handle",
    "cuda_copy": "for cuda_copy check that UCX has its CUDA module (ucx_info -d), and for gdr_copy that gdrdrv",
    "GPU": "for GPU memory check that the network card can access it: nvidia_peermem is loaded (lsmod)",
    "RDMA": "for RDMA check that the container has /dev/infiniband and an unlimited memlock (ulimit -l)",
    "emulated": "for RDMA over EFA check that FI_EFA_USE_DEVICE_RDMA is unset or 1 on every rank",
    "EFA": "for EFA check that fi_info -p efa lists a device",
    "NVLink": "UCX reads by cuda_ipc only over NVLink: between GPUs without NVLink let it read over PCIe (`export",
    "WRITE, too": "if WRITE does not go over cuda_ipc either, check that both processes have one IPC and one PID",
    "UCX_TLS": "that UCX_TLS, if it is set, names cuda_ipc and cuda_copy, and that the GPUs reach each other",
}
READ_VRAM, SHARED = replace(VRAM, op="READ"), {"hosts": ("one", "one")}
EMULATED = {"protocol": "software emulation"}


@pytest.mark.parametrize(
    ("key", "accepted", "transport", "more", "environ", "steps"),
    [
        (KEY, ("cma",), "tcp/eth0", {}, {}, "UCX cma shm"),
        (KEY, ("rc_mlx5",), "tcp/eth0", {}, {}, "UCX RDMA"),
        (KEY, ("efa",), "tcp/eth0", {}, {}, "UCX EFA"),
        (replace(KEY, backend="LIBFABRIC"), ("efa",), "tcp/eth0", {}, {}, "LIBFABRIC EFA"),
        (replace(KEY, backend="LIBFABRIC"), ("efa",), "efa-emulated/rdmap0", {}, {}, "LIBFABRIC emulated"),
        (replace(KEY, backend="MOONCAKE"), ("rdma",), "tcp/eth0", {}, {}, "own"),
        (VRAM, ("cuda_ipc",), "tcp/eth0", {}, {}, "UCX cuda_ipc UCX_TLS fabric"),
        (VRAM, ("cuda_ipc",), "shm/memory", {}, {}, "UCX cuda_ipc UCX_TLS"),
        (VRAM, ("rc_mlx5",), "tcp/eth0", {}, {}, "UCX GPU RDMA"),
        (VRAM, ("gdr_copy", "cuda_copy"), "tcp/eth0", {}, {}, "UCX cuda_copy"),
        # READ that UCX emulates, because the GPUs of one host have no NVLink.
        (READ_VRAM, ("cuda_ipc",), "tcp/lo", {**EMULATED, **SHARED}, {"HOME": "/"}, "NVLink WRITE,_too"),
        (READ_VRAM, ("cuda_ipc",), "tcp/lo", {**EMULATED, **SHARED}, {"UCX_TLS": "tcp,cuda_ipc"},
         "NVLink WRITE,_too UCX_TLS"),
        (READ_VRAM, ("cuda_ipc",), "tcp/lo", EMULATED, {}, "NVLink WRITE,_too UCX_TLS"),
        (READ_VRAM, ("cuda_ipc",), "tcp/lo", {**EMULATED, "hosts": ("one", "two")}, {"HOME": "/"},
         "UCX cuda_ipc UCX_TLS"),
        (VRAM, ("cuda_ipc",), "tcp/lo", {**EMULATED, **SHARED}, {"HOME": "/"}, "UCX cuda_ipc UCX_TLS"),
        (READ_VRAM, ("cuda_ipc",), "tcp/lo", SHARED, {"HOME": "/"}, "UCX cuda_ipc UCX_TLS"),
        (READ_VRAM, ("cma",), "tcp/lo", {**EMULATED, **SHARED}, {"HOME": "/"}, "UCX cma shm"),
    ],
)  # fmt: skip
def test_the_remedy_for_a_wrong_transport_is_for_the_accepted_ones(
    key: RowKey, accepted: tuple[str, ...], transport: str, more: Any, environ: dict[str, str], steps: str
) -> None:
    row = replace(samples(2, transports=(transport, f"{accepted[0]}/x"), key=key), **more)
    judgement = judge(row, Expectation(source="", transports=accepted), None, environ)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    as_what = " as software emulation, not as RMA" if "protocol" in more else ""
    assert judgement.reason.startswith(f"{key.words}: went over {transport}{as_what}")
    assert judgement.reason.endswith(f", but the profile accepts only {' or '.join(accepted)}")
    text = judgement.remedy[0].lower() + judgement.remedy[1:]
    places = {name: text.find(step[0].lower() + step[1:] if name == "NVLink" else step) for name, step in STEPS.items()}
    found_steps = sorted((place, name.replace(" ", "_")) for name, place in places.items() if place >= 0)
    assert [name for _, name in found_steps] == steps.split()


P5 = load_profile("p5.48xlarge").machine


@pytest.mark.parametrize("launches", [1, 3])
def test_cards_that_a_slow_row_left_idle_are_named(launches: int) -> None:
    """One card of the four that a GPU reaches has carried all bytes, as with one rail of UCX."""
    cards = tuple(Carrier(f"mlx5_{number}", "rdma", 1 << 40 if number == 2 else 7) for number in range(4))
    row = replace(samples(*[0.5] * 4, key=VRAM, transports=("rc_mlx5/mlx5_2:1",)), counted=CarrierBytes(cards, 1 << 40))
    for _ in range(launches - 1):
        row = row.with_launch(row)
    expectation = replace(FLOOR, transports=("rc_mlx5",))
    judgement = judge(row, expectation, P5)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.endswith("; only 1 of the 4 network cards that a GPU reaches carried it (mlx5_2)")
    assert "`export UCX_MAX_RMA_RAILS=4`" in judgement.remedy
    libfabric = replace(row, key=replace(row.key, backend="LIBFABRIC"))
    assert judge(libfabric, expectation, P5).remedy.startswith("Give every rank all 4 cards")


@pytest.mark.parametrize(
    ("carried", "memory", "transport"),
    [
        (1 << 40, "VRAM", "rc_mlx5/mlx5_0:1"),  # all cards carried a part
        (7, "DRAM", "rc_mlx5/mlx5_0:1"),  # a host's memory may have one card
        (7, "VRAM", "tcp/eth0"),
        (7, "VRAM", "rc_mlx5/mlx5_0:1 tcp/eth0"),
    ],
)
def test_cards_are_not_blamed_for_other_slow_rows(carried: int, memory: str, transport: str) -> None:
    cards = (Carrier("mlx5_0", "rdma", 1 << 40), *(Carrier(f"mlx5_{number}", "rdma", carried) for number in (1, 2, 3)))
    cards = (*cards, Carrier("eth0", "net", 1 << 40))
    key = replace(VRAM, memory=MemoryPair(memory, memory))
    row = samples(*[0.5] * 4, key=key, transports=tuple(transport.split()))
    for counted in (CarrierBytes(cards, 1 << 40), None):
        judgement = judge(replace(row, counted=counted), FLOOR, P5)
        assert judgement.verdict is Verdict.FAIL
        assert "network cards" not in judgement.reason


ONE_HOST, TWO_HOSTS = ("node-a", "node-a"), ("node-a", "node-b")
BETWEEN = "are on one host, node-a, and this profile is for rows between two hosts"
WITHIN = "the ranks are on two hosts, node-a and node-b, and this profile is for rows within one"
OF_PLACE = {
    BETWEEN: "Start each rank on a host of its own. To rehearse on one host, give --nixl-profile=loopback.",
    WITHIN: "Give the profile of your hosts with --nixl-profile: `pytest-nixl init` writes a first one, and "
    "`pytest-nixl profile learn` writes one from three good runs.",
}


@pytest.mark.parametrize(
    ("hosts", "transports", "accepted", "place"),
    [
        (ONE_HOST, ("cma/memory",), ("rc_mlx5", "dc_mlx5"), BETWEEN),
        (ONE_HOST, ("cuda_ipc", "cma/memory"), ("tcp",), BETWEEN),
        (TWO_HOSTS, ("tcp/eth0",), FULL.transports, WITHIN),
        ((), ("tcp/eth0",), ("cma",), ""),
        (TWO_HOSTS, ("tcp/eth0",), ("cma", "rc_mlx5"), ""),
        (ONE_HOST, ("tcp/eth0",), ("rc_mlx5",), ""),
        (ONE_HOST, ("cma/memory",), ("posix", "tcp"), ""),
        (TWO_HOSTS, ("cma/memory",), ("rc_mlx5",), ""),
    ],
)
@pytest.mark.parametrize(("ranks", "ends"), [((0, 1), "both ranks"), ((0, 0), "initiator and target")])
def test_the_placement_of_the_ranks_is_named_where_the_profile_is_for_another(
    hosts: Any, transports: tuple[str, ...], accepted: tuple[str, ...], place: str, ranks: Any, ends: str
) -> None:
    row = replace(samples(2, transports=transports, key=replace(KEY, pair=ranks)), hosts=hosts)
    judgement = judge(row, replace(FULL, transports=accepted))
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    went = f"went over {' and '.join(transports)}, but the profile accepts only {' or '.join(accepted)}"
    where = {BETWEEN: f": {ends} {place}", WITHIN: f": {place}"}.get(place, "")
    assert judgement.reason == f"{row.key.words}: {went}{where}"
    assert (judgement.remedy == OF_PLACE.get(place)) is bool(place)
