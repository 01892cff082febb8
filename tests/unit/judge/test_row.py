# SPDX-License-Identifier: Apache-2.0
"""Judging of rows: every verdict, each limit, and the order of faults."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace

import pytest

from pytest_nixl.core.resource_limits import NO_SPACE_REMEDY
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.judge.row import another_launch, decisive_bandwidth, judge, percentage
from pytest_nixl.model.device_counters import Carrier, CarrierBytes
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import BUSY_GPU, Corruption, Samples
from pytest_nixl.model.transports import ucx_tls_allows
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


CORRUPTION = Corruption("after the last window", 3, 4096, 17, 0xAB, 0x00)


@pytest.mark.parametrize(
    ("wait", "gigabytes", "latency", "verdict"),
    [
        (2e-3, 0.5, 100e-6, Verdict.INCONCLUSIVE),
        (2e-3, 2, 5e-3, Verdict.INCONCLUSIVE),
        (2e-3, 2, 100e-6, Verdict.PASS),
        (BUSY_GPU, 0.5, 100e-6, Verdict.FAIL),
        (2e-3, 200, 100e-6, Verdict.IMPLAUSIBLE),
    ],
)
def test_a_slow_row_on_a_gpu_that_others_use_is_undecided(
    wait: float, gigabytes: float, latency: float, verdict: Verdict
) -> None:
    row_samples = replace(samples(*[gigabytes] * 4, latencies=(latency,)), gpu_waits=(1e-5, wait))
    judged = judge(row_samples, FULL)
    assert judged.verdict is verdict
    expected_text = "; but other processes used a GPU of this row: a kernel over 8 bytes took 2.0 ms on it"
    assert judged.reason.endswith(expected_text) is (verdict is Verdict.INCONCLUSIVE)


def test_a_row_remembers_the_launch_in_which_its_gpu_was_busy() -> None:
    busy, idle = replace(samples(2), gpu_waits=(2e-3,)), replace(samples(2), gpu_waits=(1e-5,))
    assert [joined.disturbed for joined in (busy.with_launch(idle), idle.with_launch(busy), idle)] == [
        True,
        True,
        False,
    ]


def test_a_row_without_a_known_transport_is_unknown() -> None:
    judgement = judge(samples(2, transports=()), FULL)
    assert judgement.verdict is Verdict.UNKNOWN
    assert "accepts only cma or posix or sysv" in judgement.reason
    assert "UCX_PROTO_INFO" in judgement.remedy


def test_a_transport_that_is_unknown_because_no_log_can_be_written_has_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # it has no free space
    judgement = judge(samples(2, transports=()), FULL)
    assert judgement.verdict is Verdict.UNKNOWN
    assert "nothing more can be written to /proc: its file system is full: `df /proc`" in judgement.reason
    assert judgement.remedy == NO_SPACE_REMEDY


@pytest.mark.parametrize(
    ("backend", "accepted", "required", "absent"),
    [
        ("UCX", ("cma",), ("UCX_TLS", "UCX_NET_DEVICES", "SYS_PTRACE", "ptrace_scope", "/dev/shm"), ("ulimit",)),
        ("UCX", ("rc_mlx5",), ("UCX_TLS", "/dev/infiniband", "ulimit -l", "ibv_devinfo"), ("PTRACE", "fi_info")),
        ("LIBFABRIC", ("efa",), ("FI_PROVIDER", "fi_info -p efa", "security group"), ("UCX_TLS", "PTRACE")),
        ("MOONCAKE", ("rdma",), ("settings",), ("UCX_TLS", "FI_PROVIDER", "PTRACE")),
    ],
)
def test_the_remedy_for_a_wrong_transport_is_for_the_accepted_one(
    backend: str, accepted: tuple[str, ...], required: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    expectation = replace(FULL, transports=accepted)
    remedy = judge(samples(2, transports=("tcp/eth0",), key=replace(KEY, backend=backend)), expectation).remedy
    assert [fragment for fragment in required if fragment not in remedy] == []
    assert [fragment for fragment in absent if fragment in remedy] == []
    assert remedy.startswith("Check ")


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("tcp", False), ("tcp,cuda_copy", False), ("tcp,self", False), ("tcp,cma", True), ("sm,tcp", True),
        ("shm", True), ("all", True), ("^tcp", True), ("^cma", False), ("^sm", False), ("mm", False), ("\\cma", True),
        ("rc", False),
    ],
)  # fmt: skip
def test_a_variable_that_forbids_the_accepted_transports_is_the_remedy(value: str, allowed: bool) -> None:
    """The remedy says first that UCX_TLS is set in this run, and nothing of causes that it makes impossible."""
    assert ucx_tls_allows(value, ["cma"]) is allowed
    expectation = replace(FULL, transports=("cma",))
    remedy = judge(samples(2, transports=("tcp/lo",)), expectation, None, {"UCX_TLS": value}).remedy
    assert remedy.startswith(f"Unset UCX_TLS on every rank: UCX_TLS={value} is set in this run. ") is not allowed
    assert ("SYS_PTRACE" in remedy) is allowed
    assert ("Or, on one machine only, choose a profile for it: " in remedy) is (value in ("tcp", "tcp,cuda_copy"))


@pytest.mark.parametrize("memory", ["VRAM:DRAM", "DRAM:VRAM"])
def test_no_profile_for_tcp_on_one_machine_is_named_to_a_row_with_gpu_memory(memory: str) -> None:
    expectation, key = replace(FULL, transports=("cuda_ipc",)), replace(KEY, memory=MemoryPair.parse(memory))
    remedy = judge(samples(2, transports=("tcp/lo",), key=key), expectation, None, {"UCX_TLS": "tcp,cuda_copy"}).remedy
    assert remedy.endswith("is set in this run. Or choose a profile for it: --nixl-profile.")


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ([("rank 1 on b", "tcp")], "Unset UCX_TLS on rank 1 on b: UCX_TLS=tcp is set there."),
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


def test_a_row_over_the_ceiling_is_implausible() -> None:
    judgement = judge(samples(101, 101, 101), FULL)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert judgement.reason == (
        "UCX WRITE DRAM:DRAM of 1000000B: 101 GB/s (808 Gb/s) is over the ceiling of 100 GB/s (800 Gb/s), "
        "which no such machine can exceed"
    )


def test_the_ceiling_itself_and_one_window_over_it_are_plausible() -> None:
    assert judge(samples(100, 100, 100), FULL).verdict is Verdict.PASS
    assert judge(samples(99, 99, 101), FULL).verdict is Verdict.PASS


def test_the_floor_itself_passes() -> None:
    judgement = judge(samples(1, 1, 1, 1), FLOOR)
    assert judgement.verdict is Verdict.PASS
    assert "is 100 % of the floor" in judgement.reason


@pytest.mark.parametrize(
    ("windows", "verdict", "message"),
    [
        ((2, 2, 2, 0.5), Verdict.PASS, "200 % of the floor"),
        ((2, 2, 2, 2, 0.5, 0.5), Verdict.INCONCLUSIVE, "only 4 of 6 windows are at or above it"),
        ((2, 2, 0.5), Verdict.INCONCLUSIVE, "only 2 of 3 windows are at or above it"),
        ((0.5, 0.5, 0.5, 2), Verdict.FAIL, "50 % of the floor of 1 GB/s (8 Gb/s), and 3 of 4 windows are below it"),
        ((0.5, 0.5, 2), Verdict.INCONCLUSIVE, "only 2 of 3 windows are below it"),
        ((0.5, 0.5, 2, 2), Verdict.INCONCLUSIVE, "only 2 of 4 windows are at or above it"),
        ((0.5, 0.5, 1.25, 1.25), Verdict.INCONCLUSIVE, "only 2 of 4 windows are below it"),
        ((2,) * 35 + (0.5,) * 12, Verdict.INCONCLUSIVE, "only 35 of 47 windows are at or above it"),
        ((2,), Verdict.PASS, "200 %"),
        ((0.5,), Verdict.FAIL, "1 of 1 windows are below it"),
    ],
)
def test_three_quarters_of_the_windows_must_agree_for_a_verdict(
    windows: tuple[float, ...], verdict: Verdict, message: str
) -> None:
    judgement = judge(samples(*windows), FLOOR)
    assert judgement.verdict is verdict
    assert message in judgement.reason


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((0.5, 0.5, 0.5), "50 % of the floor of 1 GB/s (8 Gb/s), but other processes used 0.4 of this row's cores"),
        # Other processes made none of the windows faster.
        ((2, 2, 0.5), "but only 2 of 3 windows are at or above it"),
    ],
)
def test_contention_excuses_only_a_row_below_its_floor(windows: tuple[float, ...], message: str) -> None:
    judgement = judge(replace(samples(*windows), contention=(0.4,)), FLOOR)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert message in judgement.reason


@pytest.mark.parametrize(("cores", "verdict"), [(0.04, Verdict.FAIL), (0.06, Verdict.INCONCLUSIVE)])
def test_contention_excuses_a_single_launch_as_far_as_it_explains_it(cores: float, verdict: Verdict) -> None:
    assert judge(replace(samples(0.95, 0.95, 0.95), contention=(cores,)), FLOOR).verdict is verdict


@pytest.mark.parametrize(
    ("expectation", "latencies", "verdict"),
    [
        (replace(FULL, p99=None), (1e-3,), Verdict.PASS),
        (replace(FULL, p99=None), (1.001e-3,), Verdict.FAIL),
        (replace(FULL, p50=None), (2e-3,), Verdict.PASS),
        (replace(FULL, p50=None), (2.001e-3,), Verdict.FAIL),
        # Of a hundred latencies, the slowest is beyond the 99th percentile, and the second slowest is not.
        (FULL, (100e-6,) * 99 + (1.0,), Verdict.PASS),
        (FULL, (100e-6,) * 98 + (1.0,) * 2, Verdict.FAIL),
        (replace(FULL, p50=None), (100e-6,) * 98 + (1.0,) * 2, Verdict.FAIL),
        (replace(FULL, p99=None), (100e-6,) * 98 + (1.0,) * 2, Verdict.PASS),
    ],
)
def test_a_latency_over_its_bound_fails(
    expectation: Expectation, latencies: tuple[float, ...], verdict: Verdict
) -> None:
    assert judge(samples(2, latencies=latencies), expectation).verdict is verdict


@pytest.mark.parametrize("windows", [(), (0.0,), (1.0, -1.0), (math.nan,), (math.inf,)])
def test_a_row_without_timed_windows_is_an_error(windows: tuple[float, ...]) -> None:
    untimed = replace(samples(2), windows=windows, transfers=(1,) * len(windows))
    judgement = judge(untimed, FULL)
    assert judgement.verdict is Verdict.ERROR
    assert judgement.reason == "UCX WRITE DRAM:DRAM of 1000000B: no window of transfers was timed"


def test_a_latency_bound_without_timed_transfers_is_an_error() -> None:
    untimed = samples(2, latencies=())
    assert "no single transfer was timed" in judge(untimed, FULL).reason
    assert judge(untimed, FULL).verdict is Verdict.ERROR
    assert judge(untimed, FLOOR).verdict is Verdict.PASS
    for bounded in (replace(FLOOR, p50=1e-6), replace(FLOOR, p99=1e-6)):
        assert judge(untimed, bounded).verdict is Verdict.ERROR


def test_without_a_floor_a_row_passes_by_its_latency() -> None:
    bound = Expectation(source="these tests", p99=1e-3)
    judgement = judge(samples(0.001), bound)
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason.endswith("no floor, judged by p99")


def test_a_ceiling_alone_is_no_expectation() -> None:
    ceiling = Expectation(source="these tests", ceiling=1e9)
    below = judge(samples(0.5), ceiling)
    assert below.verdict is Verdict.NO_EXPECTATION
    assert below.reason == (
        "UCX WRITE DRAM:DRAM of 1000000B: went over cma/memory and is not over the ceiling of 1 GB/s; the profile "
        "expects nothing else of it"
    )
    assert judge(samples(0.5), replace(ceiling, ceiling=None)).reason.endswith(
        "of 1000000B: went over cma/memory; the profile expects nothing of it"
    ), "a row of KV requests, or of a pattern"
    assert ": went over an unknown transport and is not over" in judge(samples(0.5, transports=()), ceiling).reason
    assert judge(samples(1.5), ceiling).verdict is Verdict.IMPLAUSIBLE


def test_the_order_of_the_verdicts() -> None:
    """Start with samples that have every fault and repair one at a time: the first fault left decides."""
    bad = samples(500, corruption=CORRUPTION, transports=("tcp/lo",), latencies=(1.0,))
    assert judge(bad, None).verdict is Verdict.CORRUPT
    assert judge(bad, FULL).verdict is Verdict.CORRUPT
    bad = replace(bad, corruption=None)
    assert judge(bad, None).verdict is Verdict.NO_EXPECTATION
    assert judge(bad, FULL).verdict is Verdict.WRONG_TRANSPORT
    assert judge(replace(bad, windows=(), transfers=()), FULL).verdict is Verdict.WRONG_TRANSPORT
    assert judge(replace(bad, transports=()), FULL).verdict is Verdict.UNKNOWN
    bad = replace(bad, transports=("cma/memory",))
    assert judge(bad, FULL).verdict is Verdict.IMPLAUSIBLE
    slow = replace(bad, transfers=(500,))
    assert (judge(slow, FULL).verdict, "floor" in judge(slow, FULL).reason) == (Verdict.FAIL, True)
    good = replace(bad, transfers=(2000,))
    assert (judge(good, FULL).verdict, "p99" in judge(good, FULL).reason) == (Verdict.FAIL, True)
    assert judge(replace(good, latencies=(1e-4,)), FULL).verdict is Verdict.PASS


def test_a_late_transfer_fails_a_row_with_an_undecided_floor() -> None:
    doubtful = samples(2, 2, 0.5, latencies=(1.0,))
    assert judge(doubtful, FULL).verdict is Verdict.FAIL
    assert judge(replace(doubtful, latencies=(1e-4,)), FULL).verdict is Verdict.INCONCLUSIVE


def test_batch_and_depth_are_named_unless_they_are_one() -> None:
    reason = judge(samples(2, key=replace(KEY, block=4096)), None).reason
    assert reason.startswith("UCX WRITE DRAM:DRAM of 4KiB: ")
    reason = judge(samples(2, key=replace(KEY, block=4096, batch=8, depth=4)), None).reason
    assert reason.startswith("UCX WRITE DRAM:DRAM of 4KiB (batch 8, depth 4): ")


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (1.0, 1.0, "100 %"),
        (0.9999, 1.0, "just under 100 %"),
        (1.0001, 1.0, "just over 100 %"),
        (199, 200, "just under 100 %"),
        (201, 200, "just over 100 %"),
        (197, 200, "98 %"),
        (203, 200, "102 %"),
        (0.5, 1.0, "50 %"),
        (0.0012, 1.0, "0.12 %"),
        (0.0, 1.0, "0 %"),
        (30.0, 1.0, "3000 %"),
    ],
)
def test_a_percentage_is_never_rounded_to_the_bound(value: float, reference: float, text: str) -> None:
    assert percentage(value, reference) == text


@pytest.mark.parametrize(
    ("block", "gigabytes", "transports", "verdict"),
    [
        (1000, 0.001, ("cma/memory",), Verdict.PASS),
        (1000, 0.001, ("tcp/lo",), Verdict.WRONG_TRANSPORT),
        (4096, 1.2, ("cma/memory",), Verdict.PASS),
        (4096, 0.05, ("cma/memory",), Verdict.FAIL),
        (4 << 20, 40, ("posix/memory",), Verdict.PASS),
        (64 << 20, 0.5, ("cma/memory",), Verdict.FAIL),
        (64 << 20, 12, ("cma/memory",), Verdict.PASS),
        (64 << 20, 700, ("cma/memory",), Verdict.IMPLAUSIBLE),
        (2 << 30, 12, ("cma/memory",), Verdict.NO_EXPECTATION),
    ],
)
def test_rows_are_judged_by_the_loopback_profile(
    block: int, gigabytes: float, transports: tuple[str, ...], verdict: Verdict
) -> None:
    key = replace(KEY, block=block)
    row = Samples(key, (block * 100 / (gigabytes * 1e9),) * 4, (100,) * 4, (1e-3,), transports)
    assert judge(row, load_profile("loopback").expectation(key)).verdict is verdict


def launches(*gigabytes: float) -> Samples:
    """Return launches of four equal windows each."""
    row_samples = samples(*[gigabytes[0]] * 4)
    for value in gigabytes[1:]:
        row_samples = row_samples.with_launch(samples(*[value] * 4))
    return row_samples


@pytest.mark.parametrize(
    ("values", "verdict", "message"),
    [
        ((1.25, 1.25, 1.25), Verdict.PASS, "125 % of the floor"),
        ((2, 2), Verdict.INCONCLUSIVE, "200 % of the floor of 1 GB/s (8 Gb/s); 2 of the 3 launches needed at least"),
        ((0.75, 0.75, 0.75), Verdict.FAIL, "75 % of the floor of 1 GB/s (8 Gb/s); 3 launches"),
        ((0.5, 1.25, 2), Verdict.INCONCLUSIVE, "a spread over 3 % needs 5 launches"),
        ((0.5, 1.25, 2, 0.5, 1.25, 2, 1), Verdict.INCONCLUSIVE, "no further launch is made"),
    ],
)
def test_several_launches_are_judged_by_their_spread(values: tuple[float, ...], verdict: Verdict, message: str) -> None:
    judgement = judge(launches(*values), FLOOR)
    assert judgement.verdict is verdict
    assert message in judgement.reason


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ((4,), False),
        ((0.25,), False),
        ((2,), True),
        ((0.5,), True),
        ((1.25, 1.25), True),
        ((1.25, 1.25, 1.25), False),
        ((0.5, 1.25, 2), True),
        ((0.5, 1.25, 2, 0.5, 1.25, 2, 1), False),
    ],
)
def test_another_launch_is_needed_while_it_could_decide(values: tuple[float, ...], more: bool) -> None:
    assert another_launch(launches(*values), FLOOR) is more


@pytest.mark.parametrize(
    ("windows", "more"),
    [((5,) * 7 + (0.5,) * 3, True), ((5,) * 8 + (0.5,) * 2, False), ((0.2,) * 7 + (2,) * 3, True), ((0.2,) * 8, False)],
)
def test_another_launch_is_needed_if_windows_far_from_the_floor_disagree(
    windows: tuple[float, ...], more: bool
) -> None:
    row = samples(*windows)
    assert (judge(row, FLOOR).verdict is Verdict.INCONCLUSIVE) is more
    assert another_launch(row, FLOOR) is more
    assert another_launch(row.with_launch(row).with_launch(row), FLOOR) is False


def test_a_launch_that_others_disturbed_asks_for_another_one() -> None:
    disturbed = replace(launches(0.5, 0.5, 0.5), contention=(0.0, 0.0, 0.4))
    assert another_launch(disturbed, FLOOR) is True
    assert another_launch(replace(disturbed, contention=(0.0,) * 3), FLOOR) is False
    assert judge(disturbed, FLOOR).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("expectation", "bandwidth"),
    [
        (None, 0.0),
        (replace(FLOOR, floor=None), 0.0),
        (FLOOR, 4e9),
        (replace(FLOOR, p50=1e-3), None),
        (replace(FLOOR, p99=1e-3), None),
    ],
    ids=["nothing is expected", "no floor", "far above the floor", "p50", "p99"],
)
def test_windows_that_agree_suffice_far_above_the_floor_unless_latencies_are_judged(
    expectation: Expectation | None, bandwidth: float | None
) -> None:
    assert decisive_bandwidth(expectation) == bandwidth


@pytest.mark.parametrize(
    "bad",
    [
        samples(2, transports=("tcp/lo",)),
        samples(2, transports=()),
        samples(2, corruption=CORRUPTION),
        samples(2, latencies=(1.0,)),
        replace(samples(2), windows=(), transfers=()),
    ],
    ids=["wrong transport", "unknown", "corrupt", "late", "untimed"],
)
def test_another_launch_is_not_needed_for_faults_other_than_the_floor(bad: Samples) -> None:
    assert another_launch(bad, FULL) is False
    assert another_launch(bad, None) is False
    assert another_launch(samples(2), replace(FULL, floor=None)) is False


@pytest.mark.parametrize(
    ("accepted", "named", "unnamed"),
    [
        (
            ("cuda_ipc",),
            (
                "names cuda_ipc and cuda_copy",
                "nvidia-smi topo -p2p r",
                "one IPC and one PID namespace",
                "between two hosts of one NVLink domain (NVL72) the memory needs a fabric handle",
            ),
            ("peermem",),
        ),
        (("rc_mlx5",), ("nvidia_peermem is loaded", "DMA-BUF", "ibv_devinfo"), ("cuda_ipc", "gdrdrv")),
        (("gdr_copy", "cuda_copy"), ("/dev/gdrdrv", "ucx_info -d"), ("nvidia_peermem", "topo")),
        (("efa",), ("nvidia_peermem is loaded", "fi_info -p efa"), ("cuda_ipc",)),
    ],
)
def test_each_accepted_transport_of_gpu_memory_has_its_remedy(
    accepted: tuple[str, ...], named: tuple[str, ...], unnamed: tuple[str, ...]
) -> None:
    transports = ("tcp/eth0", "shm/memory")
    judgement = judge(samples(2, transports=transports, key=VRAM), Expectation(source="", transports=accepted))
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert judgement.reason.startswith("UCX WRITE VRAM:VRAM of 1000000B (GPUs 0:3): went over tcp/eth0 and shm/memory,")
    assert all(fragment in judgement.remedy for fragment in named)
    assert not any(fragment in judgement.remedy for fragment in unnamed)


@pytest.mark.parametrize(
    ("op", "hosts", "environ", "first", "of_tls"),
    [
        ("READ", ("one", "one"), {"HOME": "/"}, True, False),
        ("READ", ("one", "one"), {"UCX_TLS": "tcp,cuda_ipc"}, True, True),
        ("READ", (), {}, True, True),
        ("READ", ("one", "two"), {"HOME": "/"}, False, True),
        ("WRITE", ("one", "one"), {"HOME": "/"}, False, True),
    ],
    ids=["unset", "set", "unknown", "two hosts", "WRITE"],
)
def test_read_that_ucx_emulates_without_nvlink_has_its_remedy_first(
    op: str, hosts: tuple[str, ...], environ: dict[str, str], first: bool, of_tls: bool
) -> None:
    emulated = samples(2, transports=("tcp/lo",), key=replace(VRAM, op=op), protocol="software emulation")
    judgement = judge(replace(emulated, hosts=hosts), Expectation(source="", transports=("cuda_ipc",)), None, environ)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert ": went over tcp/lo as software emulation, not as RMA, but the profile accepts only" in judgement.reason
    assert judgement.remedy.count("one IPC and one PID namespace (docker run --ipc=host --pid=host") == 1
    assert "fabric handle" not in judgement.remedy, "not over a network"
    assert judgement.remedy.startswith("UCX reads by cuda_ipc only over NVLink: ") == first
    assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y" in judgement.remedy) == first
    assert ("UCX_TLS" in judgement.remedy) == of_tls
    assert ("UCX_NET_DEVICES" in judgement.remedy) != first


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


@pytest.mark.parametrize("accepted", [("tcp",), ("rc_mlx5", "dc_mlx5")])
@pytest.mark.parametrize("transports", [("cma/memory",), ("cuda_ipc/cuda",), ("cuda_ipc", "cma/memory")])
def test_ranks_that_share_a_host_are_named_where_the_profile_is_for_two(
    accepted: tuple[str, ...], transports: tuple[str, ...]
) -> None:
    row = replace(samples(2, transports=transports), hosts=("node-a", "node-a"))
    judgement = judge(row, replace(FULL, transports=accepted))
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert judgement.reason.endswith(
        ": both ranks are on one host, node-a, and this profile is for rows between two hosts"
    )
    assert judgement.remedy.startswith("Start each rank on a host of its own. ")
    alone = judge(replace(samples(2, key=replace(KEY, pair=(0, 0))), hosts=("node-a", "node-a")),
                  replace(FULL, transports=accepted))  # fmt: skip
    assert ": initiator and target are on one host, node-a, " in alone.reason


def test_a_profile_for_one_host_is_named_between_two() -> None:
    judgement = judge(replace(samples(2, transports=("tcp/eth0",)), hosts=("node-a", "node-b")), FULL)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert judgement.reason.endswith(
        ": the ranks are on two hosts, node-a and node-b, and this profile is for rows within one"
    )
    assert "pytest-nixl profile learn" in judgement.remedy


@pytest.mark.parametrize(
    ("hosts", "transport", "accepted"),
    [
        ((), "tcp/eth0", ("cma",)),
        (("a", "a"), "tcp/eth0", ("cma",)),
        (("a", "b"), "tcp/eth0", ("rc_mlx5",)),
        (("a", "b"), "tcp/eth0", ("cma", "rc_mlx5")),
        (("a", "a"), "tcp/eth0", ("rc_mlx5",)),
        (("a", "a"), "cma/memory", ("posix", "tcp")),
        (("a", "b"), "cma/memory", ("rc_mlx5",)),
    ],
)
def test_other_wrong_transports_do_not_blame_the_placement(
    hosts: tuple[str, ...], transport: str, accepted: tuple[str, ...]
) -> None:
    judgement = judge(replace(samples(2, transports=(transport,)), hosts=hosts), replace(FULL, transports=accepted))
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert "host, " not in judgement.reason
    assert "hosts, " not in judgement.reason
