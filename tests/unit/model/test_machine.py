# SPDX-License-Identifier: Apache-2.0
"""The machine of a profile: the ceiling of its NICs, the rows that it limits, and the faults that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.judge.profiles import Profile, load_profile, parse_profile
from pytest_nixl.judge.row import judge
from pytest_nixl.model.expectation import Expectation, Machine, ReferenceRun, row_ceiling
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict

DRAM, VRAM = MemoryPair("DRAM", "DRAM"), MemoryPair("VRAM", "VRAM")
KEY = RowKey("LIBFABRIC", "WRITE", VRAM, 64 << 20)
P5 = Machine(nics=32, nic_rate=12.5e9, gpus=8, gpu="H100", nic_kind="efa", source="s", nics_per_gpu=4)
POD = Machine(nics=1, nic_rate=12.5e9, gpus=1, gpu="H100", nic_kind="efa", source="s")
EFA_ONLY = Expectation(source="s", transports=("efa", "srd"))
RAILS = tuple(f"efa/rdmap{n}s0" for n in (79, 80, 81, 82))


def row(gigabytes: float, *transports: str, key: RowKey = KEY) -> Samples:
    """Return one launch of eight windows with this bandwidth in GB/s."""
    transfers = 100
    window = transfers * key.block / (gigabytes * 1e9)
    return Samples(key, (window,) * 8, (transfers,) * 8, (1e-3,), transports)


MACHINE = """
[machine]
nics = 32
nic_rate = "100 Gb/s"
nic_kind = "efa"
nics_per_gpu = 4
gpus = 8
gpu = "H100"
source = "counted"
"""


def profile(*tables: str, machine: str = MACHINE) -> Profile:
    return parse_profile(f'[profile]\nname = "t"\n{machine}{"".join(tables)}'.encode(), "t.toml")


def fault_of(*tables: str, machine: str = MACHINE) -> str:
    with pytest.raises(ValueError) as caught:
        profile(*tables, machine=machine)
    message = str(caught.value)
    assert "\n" not in message
    assert ": expected " in message
    return message


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("backend", ("UCX",), ("LIBFABRIC",)),
        ("op", ("WRITE", "READ"), ("WRITE",)),
        ("memory", (MemoryPair("DRAM", "VRAM"),), (DRAM, VRAM)),
        ("batch", (2,), (4,)),
        ("depth", (4,), (2,)),
        ("notify", ("each",), ("last",)),
        ("pages", ("huge",), ("base",)),
        ("blocks", (65536, 65536), (1, 65535)),
        ("blocks", (1, 65536), (65537, 1 << 20)),
    ],
)
def test_an_expectation_applies_to_the_rows_that_each_field_selects(field: str, accepted: Any, refused: Any) -> None:
    key = RowKey.parse("UCX/READ/DRAM:VRAM/64KiB/batch2/depth4/0-1/notify=each")
    assert Expectation("s").applies(key)
    assert [Expectation("s", **{field: value}).applies(key) for value in (accepted, refused)] == [True, False]


ANY = Expectation(source="s", floor=1.0)
HOSTS = replace(KEY, memory=DRAM)
UNTIMED = replace(row(285, "efa"), windows=(), transfers=())
PLAUSIBLE = "of the floor of 1e-09 GB/s (8e-09 Gb/s)"
ONLY_EFA = "the profile accepts only efa or srd"


@pytest.mark.parametrize(
    ("row_samples", "expectation", "machine", "verdict", "end"),
    [
        # A row that did not go entirely over the network, or may not have, has no ceiling of the cards.
        *((row(285, *transports), ANY, POD, "PASS", PLAUSIBLE)
          for transports in (("cma/memory",), ("cuda_ipc/cuda",), ("tcp/lo",), ("tcp/lo", "tcp/eth0"),
                             ("cuda_copy/cuda", "efa/rdmap79s0"), ())),
        # Cards that the transports name.
        (row(46.9, RAILS[0]), EFA_ONLY, P5, "IMPLAUSIBLE",
         "46.9 GB/s (375 Gb/s) is over the ceiling of 12.5 GB/s (100 Gb/s), the line rate of the 1 NIC of 100 Gb/s "
         "that carried it (rdmap79s0)"),
        (row(50.1, *RAILS), EFA_ONLY, P5, "IMPLAUSIBLE",
         "50 GB/s (400 Gb/s), the line rate of the 4 NICs of 100 Gb/s that carried it (rdmap79s0, rdmap80s0, "
         "rdmap81s0, rdmap82s0)"),
        (row(50.1, *RAILS), EFA_ONLY, replace(P5, nics=4), "IMPLAUSIBLE", "rdmap80s0, rdmap81s0, rdmap82s0)"),
        (row(20, *RAILS), EFA_ONLY, POD, "IMPLAUSIBLE",
         "the line rate of all 1 NIC of 100 Gb/s that the profile knows"),
        # Unnamed cards are those that a GPU reaches; host memory reaches all.
        (row(49.9, "efa"), EFA_ONLY, P5, "PASS", "judged by transports"),
        (row(50.1, "efa"), EFA_ONLY, P5, "IMPLAUSIBLE", "the line rate of the 4 NICs of 100 Gb/s that one GPU reaches"),
        (row(410, "efa"), EFA_ONLY, replace(P5, nics_per_gpu=None), "PASS", "judged by transports"),
        (row(100, "efa", key=HOSTS), EFA_ONLY, P5, "PASS", "judged by transports"),
        (row(100, *RAILS, key=HOSTS), EFA_ONLY, P5, "IMPLAUSIBLE", "rdmap82s0)"),
        (row(100, "efa", key=HOSTS), EFA_ONLY, POD, "IMPLAUSIBLE", "the line rate of the machine's 1 NIC of 100 Gb/s"),
        # IMPLAUSIBLE counts before NO-EXPECTATION and UNKNOWN, and after WRONG-TRANSPORT.
        (row(285, "efa"), None, POD, "IMPLAUSIBLE", "the line rate of the machine's 1 NIC of 100 Gb/s"),
        (row(285), EFA_ONLY, POD, "IMPLAUSIBLE", "the line rate of the machine's 1 NIC of 100 Gb/s"),
        (row(12), EFA_ONLY, POD, "UNKNOWN", ONLY_EFA),
        (row(285), None, POD, "NO-EXPECTATION", "the profile expects nothing of this row"),
        (row(285, "cuda_ipc/cuda"), EFA_ONLY, POD, "WRONG-TRANSPORT", ONLY_EFA),
        (UNTIMED, None, POD, "NO-EXPECTATION", "expects nothing of this row"),
    ],
)  # fmt: skip
def test_a_row_is_limited_by_the_cards_that_moved_its_bytes(
    row_samples: Samples, expectation: Expectation | None, machine: Machine | None, verdict: str, end: str
) -> None:
    judgement = judge(row_samples, expectation, machine)
    assert (str(judgement.verdict), judgement.reason[-len(end) :]) == (verdict, end)
    if "line rate" in end:
        assert "compare the counters of the NICs with the payload, and [machine] of the profile" in judgement.remedy


def test_figures_contain_the_ceiling_of_the_verdict() -> None:
    for expectation, machine, ceiling in ((EFA_ONLY, P5, 50e9), (EFA_ONLY, None, 0.0),
                                          (replace(EFA_ONLY, ceiling=60e9), P5, 60e9)):  # fmt: skip
        assert RowSummary.of(row(46.9, *RAILS), expectation, machine).ceiling == ceiling
        limit = row_ceiling(row(46.9, *RAILS), expectation, machine)
        assert (limit.value if limit is not None else 0.0) == ceiling


def test_every_field_of_a_machine() -> None:
    assert profile().machine == replace(P5, source="counted")
    small = '[machine]\nnics = 1\nnics_per_gpu = 1\nnic_rate = "25 Gb/s"\nsource = "s"\n'
    assert profile(machine=small).machine == Machine(1, 3.125e9, None, "", "", "s", 1), "a GPU may reach all cards"


def test_a_machine_may_be_described_by_its_gpus_alone() -> None:
    text = '[machine]\ngpu = "H100"\nsource = "s"\n'
    machine = profile(machine=text).machine
    assert machine == Machine(0, 0.0, None, "H100", "", "s")
    assert machine.has_gpus
    # Nothing is known of its network cards, so they limit nothing.
    assert machine.ceiling(4) is machine.ceiling(None) is None
    profile(EXPECT, 'floor = "285 GB/s"', machine=text)
    for other in ("nics_per_gpu = 1\n", 'nic_kind = "efa"\n'):
        assert fault_of(machine=text + other).startswith("profile t.toml, machine, nics: missing")
    assert fault_of(machine='[machine]\nsource = "s"\n').startswith("profile t.toml, machine, nics: missing")
    assert not Machine(1, 1.0, 0, "H100", "", "s").has_gpus


def test_model_is_a_whole_word_of_the_name() -> None:
    same = [("H100", "NVIDIA H100 80GB HBM3"), ("A100", "NVIDIA A100-SXM4-40GB"), ("h100", "NVIDIA H100")]
    others = [("H200", "NVIDIA GH200 480GB"), ("A10", "NVIDIA A10G"), ("H100(", "NVIDIA H100")]
    for model, name in same + others:
        assert Machine(0, 0.0, None, model, "", "s").is_model(name) is ((model, name) in same)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("nics = 32", "", "machine, nics: missing: expected a positive integer"),
        ("nics = 32", "nics = 2", "machine, nics_per_gpu: 4 is more than nics: expected at most 2"),
        ('nic_rate = "100 Gb/s"', "", "machine, nic_rate: missing: expected a number with a unit GB/s"),
        ('"100 Gb/s"', '"0 Gb/s"', "machine, nic_rate: '0 Gb/s' is not above zero: expected"),
        ('source = "counted"', "", "machine, source: missing: expected a text that says where each figure is from"),
        ("gpus = 8", "gpu_count = 8", "machine, gpu_count: unknown key"),
        ('nic_kind = "efa"', 'nic_kind = "e f a"', "machine, nic_kind: 'e f a' is not a transport name"),
    ],
)
def test_a_fault_of_the_machine_is_one_sentence(old: str, new: str, sentence: str) -> None:
    assert old in MACHINE
    assert fault_of(machine=MACHINE.replace(old, new)).startswith(f"profile t.toml, {sentence}")


EXPECT = '[[expect]]\nsource = "s"\n'


ONE, GPUS = '[machine]\nnics = 1\nnic_rate = "100 Gb/s"\nsource = "s"\n', 'memory = ["VRAM:VRAM", "VRAM:DRAM"]\n'
BOTH = 'memory = ["VRAM:VRAM", "DRAM:DRAM"]\n'


@pytest.mark.parametrize(
    ("machine", "lines", "fault"),
    [
        (ONE, 'floor = "12.6 GB/s"\ntransports = ["efa"]',
         "floor: '12.6 GB/s' is above the line rate of 1 NIC of 100 Gb/s, 12.5 GB/s"),
        (ONE, 'floor = "285 GB/s"', "floor: '285 GB/s' is above the line rate of 1 NIC of 100 Gb/s, 12.5 GB/s"),
        (MACHINE, f'{GPUS}transports = ["efa"]\nceiling = "51 GB/s"',
         "ceiling: '51 GB/s' is above the line rate of 4 NICs of 100 Gb/s, 50 GB/s"),
        (MACHINE, f'{GPUS}transports = ["efa"]\nfloor = "50 GB/s"', ""),
        (MACHINE, f'{BOTH}transports = ["efa"]\nfloor = "400 GB/s"', ""),
        (MACHINE.replace("nics_per_gpu = 4", ""), f'{GPUS}floor = "400 GB/s"', ""),
        (MACHINE, f'{BOTH}floor = "401 GB/s"',
         "floor: '401 GB/s' is above the line rate of 32 NICs of 100 Gb/s, 400 GB/s"),
        (MACHINE, 'floor = "900 GB/s"\ntransports = ["efa", "cma"]', ""),
        ("", 'floor = "900 GB/s"', ""),
    ],
)  # fmt: skip
def test_no_bound_is_above_the_line_rate_of_the_cards_that_the_rows_reach(machine: str, lines: str, fault: str) -> None:
    if not fault:
        assert len(profile(EXPECT, lines, machine=machine).expectations) == 1
        return
    assert fault_of(EXPECT, lines, machine=machine) == (
        f"profile t.toml, expect #1, {fault}: expected less, or a transport that needs no network card, such as cma or "
        "cuda_ipc, in transports"
    )


RECORDED = '[[reference]]\nsource = "page 1: 285"\n'


def test_every_field_of_a_recorded_figure() -> None:
    (item,) = profile(
        RECORDED,
        'backend = "ucx"\nop = "write"\nmemory = "VRAM:VRAM"\nblocks = "100MB"\nbandwidth = "284.98 GB/s"\n'
        'latency = "0.26 us"\np50 = "1 ms"\np99 = "2 ms"\nplausible = false\nnote = "no wire can"',
    ).references
    assert item == ReferenceRun(
        source="page 1: 285", note="no wire can", plausible=False, backend="UCX", op="WRITE", memory=VRAM,
        blocks=(10**8, 10**8), bandwidth=284.98e9, p50=1e-3, p99=2e-3, latency=0.26 * 1e-6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("", "reference #1: has no figure: expected bandwidth, p50, p99 or latency"),
        ('bandwidth = "1 GB/s"\nplausible = "no"', "reference #1, plausible: a text, not a boolean: expected true or"),
        ('floor = "1 GB/s"', "reference #1, floor: unknown key: expected backend, op"),
    ],
)
def test_a_fault_of_a_recorded_figure_is_one_sentence(lines: str, sentence: str) -> None:
    assert fault_of(RECORDED, lines).startswith(f"profile t.toml, {sentence}")


def test_a_recorded_figure_needs_its_source() -> None:
    message = fault_of('[[reference]]\nbandwidth = "1 GB/s"\n')
    assert message.startswith("profile t.toml, reference #1, source: missing: expected a text that names the document")


def test_a_recorded_figure_above_the_line_rate_must_be_marked_implausible() -> None:
    line = 'memory = "VRAM:VRAM"\nbandwidth = "51 GB/s"\n'
    assert fault_of(RECORDED, line) == (
        "profile t.toml, reference #1, bandwidth: '51 GB/s' is above the line rate of 4 NICs of 100 Gb/s, 50 GB/s: "
        "expected plausible = false in the same table"
    )
    assert not profile(RECORDED, line, "plausible = false").references[0].plausible
    assert profile(RECORDED, line, machine="").references[0].plausible
    for other in (("VRAM:VRAM", "DRAM:DRAM"), ("51 GB/s", "50 GB/s"), ('memory = "VRAM:VRAM"\n', "")):
        assert profile(RECORDED, line.replace(*other)).references[0].plausible


def test_a_recorded_figure_never_decides_a_verdict() -> None:
    only = profile(RECORDED, 'bandwidth = "50 GB/s"')
    assert only.expectation(KEY) is None
    assert judge(row(1, "efa"), only.expectation(KEY), only.machine).verdict is Verdict.NO_EXPECTATION


P5_TABLE = {
    4096: 0.112873, 8192: 0.224103, 16384: 0.433990, 32768: 0.804828, 65536: 1.408445, 131072: 2.853823,
    262144: 5.094198, 524288: 9.187162, 1048576: 15.088717, 2097152: 22.208871, 4194304: 30.181742,
    8388608: 36.774219, 16777216: 41.956359, 33554432: 45.127001, 67108864: 46.948036,
}  # fmt: skip
P5_SECOND = {4096: 0.11, 65536: 1.42, 1 << 20: 15.21, 4 << 20: 30.28, 16 << 20: 42.04, 64 << 20: 46.90}


def test_both_runs_of_p5_pass_and_a_tenth_less_than_the_worse_fails() -> None:
    p5 = load_profile("p5.48xlarge")
    for block, gigabytes in P5_TABLE.items():
        key, worse = replace(KEY, block=block), min(gigabytes, P5_SECOND.get(block, gigabytes))
        verdicts = [judge(row(value, *RAILS, key=key), p5.expectation(key), p5.machine).verdict
                    for value in (gigabytes, worse, 0.89 * worse)]  # fmt: skip
        assert verdicts == [Verdict.PASS, Verdict.PASS, Verdict.FAIL], block


POD_KEY = RowKey("UCX", "WRITE", VRAM, 100_000_000)
LIBFABRIC, UCX = RowKey("LIBFABRIC", "WRITE", DRAM, 4096), RowKey("UCX", "WRITE", DRAM, 4096)
EFA, SRD, CMA = "efa/rdmap0s6", "srd/rdmap0s6:1", "cma/memory"


@pytest.mark.parametrize(
    ("name", "key", "gigabytes", "transports", "verdict"),
    [
        ("p5.48xlarge", KEY, 46.948036, RAILS[:3], "IMPLAUSIBLE"),
        ("p5.48xlarge", KEY, 5, ("tcp/enp71s0",), "WRONG-TRANSPORT"),
        ("p5.48xlarge", KEY, 46.948036, (), "UNKNOWN"),
        ("p5.48xlarge", KEY, 375, (), "IMPLAUSIBLE"),
        *(("h100-hyperpod", POD_KEY, 284.98, transports, "IMPLAUSIBLE") for transports in ((), (SRD,))),
        *(("a10g-efa100", replace(LIBFABRIC, block=10**power), gigabytes, (EFA,), "PASS")
          for power, gigabytes in ((6, 1.2), (7, 8.5), (8, 11.8), (9, 12.3))),
        ("a10g-efa100", replace(LIBFABRIC, block=10**9), 12.6, (EFA,), "IMPLAUSIBLE"),
        ("a10g-efa100", replace(LIBFABRIC, block=10**8), 0.3, (EFA,), "FAIL"),
        ("a10g-efa100", replace(LIBFABRIC, block=10**8), 11.8, ("tcp/ens5",), "WRONG-TRANSPORT"),
        ("a10g-efa100", replace(UCX, block=10**9), 11.2, (SRD,), "PASS"),
        ("a10g-efa100", replace(UCX, block=10**6), 0.3, (SRD,), "PASS"),
        ("tcp-loopback", UCX, 0.001, ("tcp/veth0",), "FAIL"),
        ("tcp-loopback", UCX, 0.15, (CMA,), "WRONG-TRANSPORT"),
        ("tcp-loopback", replace(LIBFABRIC, op="READ"), 0.19, ("tcp/veth0",), "PASS"),
        ("tcp-loopback", LIBFABRIC, 0.009, ("tcp/veth0",), "FAIL"),
        ("tcp-loopback", replace(UCX, block=64 << 20), 0.1, ("tcp/veth0",), "FAIL"),
        ("tcp-loopback", replace(UCX, block=64 << 20), 700, ("tcp/veth0",), "IMPLAUSIBLE"),
        ("loopback", replace(UCX, block=1000), 0.001, (CMA,), "PASS"),
        ("loopback", replace(UCX, op="READ"), 0.061, (CMA,), "PASS"),
        ("loopback", UCX, 0.059, (CMA,), "FAIL"),
        ("loopback", replace(UCX, block=1 << 20, op="READ"), 0.59, (CMA,), "FAIL"),
        ("loopback", replace(UCX, block=1 << 30), 0.61, (CMA,), "PASS"),
        ("loopback", replace(UCX, block=64 << 20), 700, (CMA,), "IMPLAUSIBLE"),
        ("loopback", replace(UCX, block=2 << 30), 12, (CMA,), "NO-EXPECTATION"),
        ("loopback", replace(UCX, memory=VRAM), 12, (CMA,), "NO-EXPECTATION"),
        ("loopback", LIBFABRIC, 0.0096, ("tcp/lo",), "PASS"),
        ("loopback", LIBFABRIC, 0.0094, ("tcp/lo",), "FAIL"),
        ("loopback", replace(LIBFABRIC, block=1 << 20), 0.149, ("shm/memory",), "FAIL"),
        ("h100", replace(UCX, memory=VRAM, block=(16 << 20) - 1), 1, ("cuda_ipc/cuda",), "PASS"),
        ("h100", replace(UCX, memory=VRAM, block=16 << 20, op="READ"), 9.9, ("cuda_ipc/cuda",), "FAIL"),
        ("h100", replace(UCX, memory=VRAM), 3901, ("cuda_ipc/cuda",), "IMPLAUSIBLE"),
    ],
)  # fmt: skip
def test_rows_are_judged_by_the_profiles_that_come_with_the_plugin(
    name: str, key: RowKey, gigabytes: float, transports: tuple[str, ...], verdict: str
) -> None:
    loaded = load_profile(name)
    judgement = judge(row(gigabytes, *transports, key=key), loaded.expectation(key), loaded.machine)
    assert str(judgement.verdict) == verdict, judgement.reason


@pytest.mark.parametrize(
    ("name", "nics", "gigabits", "nics_per_gpu", "gpu"),
    [
        ("p4d.24xlarge", 4, 100, 1, "A100"),
        ("p5.48xlarge", 32, 100, 4, "H100"),
        ("p5en.48xlarge", 16, 200, None, "H200"),
        ("p6-b200.48xlarge", 8, 400, 2, "B200"),
        ("g5.48xlarge", 1, 100, None, "A10G"),
        ("g6.48xlarge", 1, 100, None, "L4"),
    ],
)
def test_aws_machines_have_the_documented_hardware(
    name: str, nics: int, gigabits: int, nics_per_gpu: int | None, gpu: str
) -> None:
    machine = load_profile(name).machine
    assert machine is not None
    assert (machine.nics, machine.nic_rate * 8 / 1e9, machine.nics_per_gpu) == (nics, gigabits, nics_per_gpu)
    assert (machine.gpus, machine.gpu, machine.nic_kind) == (8, gpu, "efa")
    assert "AWS" in machine.source
