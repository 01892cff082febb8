# SPDX-License-Identifier: Apache-2.0
"""The machine of a profile: the ceiling of its NICs, the rows that it limits, and the faults that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nixl.judge.profiles import Profile, load_profile, parse_profile
from pytest_nixl.judge.row import judge
from pytest_nixl.model.expectation import Ceiling, Expectation, Machine, ReferenceRun, row_ceiling
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
    ("machine", "count", "gigabytes"),
    [
        (P5, 1, 12.5),
        (P5, 4, 50),
        (P5, 32, 400),
        (P5, 33, 400),
        (P5, None, 50),
        (POD, None, 12.5),
        (POD, 1, 12.5),
        (POD, 2, 12.5),
        (replace(P5, nics_per_gpu=None), None, None),
        (replace(P5, nics_per_gpu=None), 2, 25),
    ],
)
def test_a_ceiling_is_the_sum_of_the_cards_that_moved_bytes(
    machine: Machine, count: int | None, gigabytes: float | None
) -> None:
    assert machine.ceiling(count) == (None if gigabytes is None else gigabytes * 1e9)


@pytest.mark.parametrize("transports", [("cma/memory",), ("cuda_ipc/cuda",), ("tcp/lo",), ("tcp/lo", "tcp/eth0"),
                                        ("cuda_copy/cuda", "efa/rdmap79s0"), ()])  # fmt: skip
def test_a_row_not_entirely_over_the_network_has_no_ceiling_of_the_cards(transports: tuple[str, ...]) -> None:
    assert row_ceiling(row(285, *transports), Expectation(source="s", floor=1.0), POD) is None
    assert judge(row(285, *transports), Expectation(source="s", floor=1.0), POD).verdict is Verdict.PASS


def test_without_a_machine_only_the_ceiling_of_the_profile_applies() -> None:
    assert row_ceiling(row(285, "efa/rdmap79s0"), EFA_ONLY, None) is None
    assert row_ceiling(row(285, "efa/rdmap79s0"), replace(EFA_ONLY, ceiling=1e9), POD) == Ceiling(1e9)
    assert judge(row(285, "efa/rdmap79s0"), EFA_ONLY).verdict is Verdict.PASS


def test_named_cards_limit_the_row_and_the_reason_has_rate_count_and_sum() -> None:
    judgement = judge(row(46.9, "efa/rdmap79s0"), EFA_ONLY, P5)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert judgement.reason == (
        "LIBFABRIC WRITE VRAM:VRAM of 64MiB: 46.9 GB/s (375 Gb/s) is over the ceiling of 12.5 GB/s (100 Gb/s), "
        "the line rate of the 1 NIC of 100 Gb/s that carried it (rdmap79s0)"
    )
    assert "counters" in judgement.remedy
    assert "[machine]" in judgement.remedy
    assert judge(row(46.9, *RAILS), EFA_ONLY, P5).verdict is Verdict.PASS
    over = judge(row(50.1, *RAILS), EFA_ONLY, P5).reason
    assert "50 GB/s (400 Gb/s), the line rate of the 4 NICs of 100 Gb/s that carried it (rdmap79s0, " in over


def test_unnamed_cards_are_those_that_a_gpu_reaches() -> None:
    assert judge(row(49.9, "efa"), EFA_ONLY, P5).verdict is Verdict.PASS
    judgement = judge(row(50.1, "efa"), EFA_ONLY, P5)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert judgement.reason.endswith("the line rate of the 4 NICs of 100 Gb/s that one GPU reaches")


def test_a_row_between_host_memories_has_no_ceiling_of_unnamed_cards() -> None:
    key = replace(KEY, memory=DRAM)
    assert judge(row(100, "efa", key=key), EFA_ONLY, P5).verdict is Verdict.PASS
    assert judge(row(100, *RAILS, key=key), EFA_ONLY, P5).verdict is Verdict.IMPLAUSIBLE
    assert judge(row(100, "efa", key=key), EFA_ONLY, POD).verdict is Verdict.IMPLAUSIBLE


def test_more_cards_than_in_the_profile_count_as_those_of_the_profile() -> None:
    judgement = judge(row(20, *RAILS), EFA_ONLY, POD)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert judgement.reason.endswith("the line rate of all 1 NIC of 100 Gb/s that the profile knows")


def test_implausible_wins_over_no_expectation_and_unknown() -> None:
    assert judge(row(285, "efa"), None, POD).verdict is Verdict.IMPLAUSIBLE
    assert judge(row(12, "efa"), None, POD).verdict is Verdict.NO_EXPECTATION
    unknown = judge(row(285), EFA_ONLY, POD)
    assert unknown.verdict is Verdict.IMPLAUSIBLE
    assert unknown.reason.endswith("the line rate of the machine's 1 NIC of 100 Gb/s")
    assert judge(row(12), EFA_ONLY, POD).verdict is Verdict.UNKNOWN
    assert judge(row(285), None, POD).verdict is Verdict.NO_EXPECTATION
    assert judge(row(285, "cuda_ipc/cuda"), EFA_ONLY, POD).verdict is Verdict.WRONG_TRANSPORT
    untimed = replace(row(285, "efa"), windows=(), transfers=())
    assert judge(untimed, EFA_ONLY, POD).verdict is Verdict.ERROR
    assert judge(untimed, None, POD).verdict is Verdict.NO_EXPECTATION


def test_figures_contain_the_ceiling_of_the_verdict() -> None:
    assert RowSummary.of(row(46.9, *RAILS), EFA_ONLY, P5).ceiling == 50e9
    assert RowSummary.of(row(46.9, *RAILS), EFA_ONLY).ceiling == 0
    assert RowSummary.of(row(46.9, *RAILS), replace(EFA_ONLY, ceiling=60e9), P5).ceiling == 60e9


def test_every_field_of_a_machine() -> None:
    assert profile().machine == replace(P5, source="counted")
    small = '[machine]\nnics = 1\nnic_rate = "25 Gb/s"\nsource = "s"\n'
    assert profile(machine=small).machine == Machine(1, 3.125e9, None, "", "", "s")
    assert profile(machine="").machine is None


def test_a_machine_may_be_described_by_its_gpus_alone() -> None:
    text = '[machine]\ngpu = "H100"\nsource = "s"\n'
    machine = profile(machine=text).machine
    assert machine == Machine(0, 0.0, None, "H100", "", "s")
    assert machine.has_gpus
    # Nothing is known of its network cards, so they limit nothing.
    assert machine.ceiling(4) is machine.ceiling(None) is None
    profile(EXPECT, 'floor = "285 GB/s"', machine=text)
    assert fault_of(machine=text.replace("gpu", "nics_per_gpu = 1\ngpu")).startswith(
        "profile t.toml, machine, nics: miss"
    )
    assert fault_of(machine='[machine]\nsource = "s"\n').startswith("profile t.toml, machine, nics: missing")
    assert not Machine(1, 1.0, 0, "H100", "", "s").has_gpus


@pytest.mark.parametrize(
    ("model", "name", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H100 NVL", True),
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("H100", "NVIDIA L4", False),
        ("H100", "NVIDIA H20", False),
        ("H200", "NVIDIA GH200 480GB", False),
        ("B200", "NVIDIA GB200", False),
        ("A10", "NVIDIA A10G", False),
        ("L4", "NVIDIA L40S", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_model_is_a_whole_word_of_the_name(model: str, name: str, same: bool) -> None:
    assert Machine(0, 0.0, None, model, "", "s").is_model(name) is same


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("nics = 32", "", "machine, nics: missing: expected a positive integer"),
        ("nics = 32", "nics = 0", "machine, nics: 0 is not above zero: expected a positive integer"),
        ("nics = 32", "nics = 3.5", "machine, nics: the bare number 3.5, not an integer: expected"),
        ("nics = 32", 'nics = "32"', "machine, nics: a text, not an integer: expected"),
        ("nics = 32", "nics = 2", "machine, nics_per_gpu: 4 is more than nics: expected at most 2"),
        ('nic_rate = "100 Gb/s"', "", "machine, nic_rate: missing: expected a number with a unit GB/s"),
        ('"100 Gb/s"', '"100 Gb"', "machine, nic_rate: '100 Gb' has the wrong unit 'Gb': expected"),
        ('"100 Gb/s"', "100", "machine, nic_rate: the bare number 100, not a text: expected"),
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


@pytest.mark.parametrize(
    ("lines", "cards"),
    [
        ('floor = "12.6 GB/s"\ntransports = ["efa"]', "1 NIC of 100 Gb/s, 12.5 GB/s"),
        ('floor = "285 GB/s"', "1 NIC of 100 Gb/s, 12.5 GB/s"),
        ('floor = "285 GB/s"\ntransports = ["tcp", "rc_mlx5"]', "1 NIC of 100 Gb/s, 12.5 GB/s"),
    ],
)
def test_a_floor_above_the_line_rate_is_refused(lines: str, cards: str) -> None:
    machine = '[machine]\nnics = 1\nnic_rate = "100 Gb/s"\nsource = "s"\n'
    text = lines.partition('"')[2].partition('"')[0]
    assert fault_of(EXPECT, lines, machine=machine) == (
        f"profile t.toml, expect #1, floor: {text!r} is above the line rate of {cards}: "
        "expected less, or a transport that needs no network card, such as cma or cuda_ipc, in transports"
    )


def test_a_gpu_row_is_limited_by_the_cards_that_it_reaches_and_others_by_all() -> None:
    gpu, host = 'memory = ["VRAM:VRAM", "VRAM:DRAM"]\n', 'memory = ["VRAM:VRAM", "DRAM:DRAM"]\n'
    message = fault_of(EXPECT, gpu, 'transports = ["efa"]\nceiling = "51 GB/s"')
    assert message.startswith(
        "profile t.toml, expect #1, ceiling: '51 GB/s' is above the line rate of 4 NICs of 100 Gb/s, 50 GB/s: "
    )
    assert profile(EXPECT, gpu, 'transports = ["efa"]\nfloor = "50 GB/s"').expectations
    assert profile(EXPECT, host, 'transports = ["efa"]\nfloor = "400 GB/s"').expectations
    assert "32 NICs of 100 Gb/s, 400 GB/s" in fault_of(EXPECT, host, 'floor = "401 GB/s"')


def test_a_floor_above_the_line_rate_is_accepted_for_transports_without_a_card() -> None:
    assert profile(EXPECT, 'floor = "900 GB/s"\ntransports = ["cuda_ipc"]').expectations
    assert profile(EXPECT, 'floor = "900 GB/s"\ntransports = ["efa", "cma"]').expectations
    assert profile(EXPECT, 'floor = "900 GB/s"', machine="").expectations


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
        ('bandwith = "1 GB/s"', "reference #1, bandwith: unknown key (did you mean bandwidth?): expected backend"),
        ('bandwidth = "1 GB"', "reference #1, bandwidth: '1 GB' has the wrong unit 'GB': expected"),
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


def test_a_gpu_may_reach_all_cards_and_no_more() -> None:
    text = '[machine]\nnics = 2\nnic_rate = "100 Gb/s"\nsource = "s"\nnics_per_gpu = '
    assert profile(machine=f"{text}2\n").machine is not None
    assert "nics_per_gpu: 3 is more than nics: expected at most 2" in fault_of(machine=f"{text}3\n")


def test_a_recorded_figure_never_decides_a_verdict() -> None:
    only = profile(RECORDED, 'bandwidth = "50 GB/s"')
    assert only.expectation(KEY) is None
    assert judge(row(1, "efa"), only.expectation(KEY), only.machine).verdict is Verdict.NO_EXPECTATION


@pytest.mark.parametrize(
    ("transports", "gigabytes", "verdict"),
    [
        (RAILS, 46.948036, Verdict.PASS),
        (RAILS[:1], 46.948036, Verdict.IMPLAUSIBLE),
        (RAILS[:3], 46.948036, Verdict.IMPLAUSIBLE),
        (RAILS, 40, Verdict.FAIL),
        (("tcp/enp71s0",), 5, Verdict.WRONG_TRANSPORT),
        ((), 46.948036, Verdict.UNKNOWN),
        ((), 375, Verdict.IMPLAUSIBLE),
    ],
)
def test_the_recorded_run_of_two_p5_passes(transports: tuple[str, ...], gigabytes: float, verdict: Verdict) -> None:
    p5 = load_profile("p5.48xlarge")
    assert judge(row(gigabytes, *transports), p5.expectation(KEY), p5.machine).verdict is verdict


P5_TABLE = {
    4096: 0.112873, 8192: 0.224103, 16384: 0.433990, 32768: 0.804828, 65536: 1.408445, 131072: 2.853823,
    262144: 5.094198, 524288: 9.187162, 1048576: 15.088717, 2097152: 22.208871, 4194304: 30.181742,
    8388608: 36.774219, 16777216: 41.956359, 33554432: 45.127001, 67108864: 46.948036,
}  # fmt: skip
P5_SECOND = {4096: 0.11, 65536: 1.42, 1 << 20: 15.21, 4 << 20: 30.28, 16 << 20: 42.04, 64 << 20: 46.90}


@pytest.mark.parametrize("block", P5_TABLE)
def test_both_runs_of_p5_pass_and_a_tenth_less_than_the_worse_fails(block: int) -> None:
    p5 = load_profile("p5.48xlarge")
    key = replace(KEY, block=block)
    runs = [P5_TABLE[block], *([P5_SECOND[block]] if block in P5_SECOND else [])]
    for gigabytes in runs:
        assert judge(row(gigabytes, *RAILS, key=key), p5.expectation(key), p5.machine).verdict is Verdict.PASS
    lost = row(0.89 * min(runs), *RAILS, key=key)
    assert judge(lost, p5.expectation(key), p5.machine).verdict is Verdict.FAIL


@pytest.mark.parametrize("transports", [(), ("srd/rdmap0s6:1",), ("srd",)])
def test_the_284_98_of_a_pod_with_one_efa_is_implausible(transports: tuple[str, ...]) -> None:
    pod = load_profile("h100-hyperpod")
    key = RowKey("UCX", "WRITE", VRAM, 100_000_000)
    judgement = judge(row(284.98, *transports, key=key), pod.expectation(key), pod.machine)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert "285 GB/s" in judgement.reason
    assert "12.5 GB/s (100 Gb/s)" in judgement.reason
    first = pod.references[0]
    assert (first.bandwidth, first.latency, first.plausible) == (284.98e9, 0.26 * 1e-6, False)


def test_the_hyperpod_table_is_recorded_but_gives_no_floor() -> None:
    pod = load_profile("h100-hyperpod")
    assert [item.bandwidth for item in pod.references[1:]] == [0.5e9, 8e9, 120e9, 280e9, 280e9]
    assert [item.plausible for item in pod.references[1:]] == [True, True, False, False, False]
    assert all("expected, not measured" in item.note for item in pod.references[1:])
    assert [item.floor for item in pod.expectations] == [None]


@pytest.mark.parametrize(
    ("backend", "block", "gigabytes", "transport", "verdict"),
    [
        ("LIBFABRIC", 10**6, 1.2, "efa/rdmap0s6", Verdict.PASS),
        ("LIBFABRIC", 10**7, 8.5, "efa/rdmap0s6", Verdict.PASS),
        ("LIBFABRIC", 10**8, 11.8, "efa/rdmap0s6", Verdict.PASS),
        ("LIBFABRIC", 10**9, 12.3, "efa/rdmap0s6", Verdict.PASS),
        ("LIBFABRIC", 10**9, 12.6, "efa/rdmap0s6", Verdict.IMPLAUSIBLE),
        ("LIBFABRIC", 10**8, 0.3, "efa/rdmap0s6", Verdict.FAIL),
        ("LIBFABRIC", 10**8, 11.8, "tcp/ens5", Verdict.WRONG_TRANSPORT),
        ("UCX", 10**9, 11.2, "srd/rdmap0s6:1", Verdict.PASS),
        ("UCX", 10**9, 0.3, "tcp/ens5", Verdict.WRONG_TRANSPORT),
        ("UCX", 10**6, 0.3, "srd/rdmap0s6:1", Verdict.PASS),
    ],
)
def test_rows_are_judged_by_the_a10g_profile(
    backend: str, block: int, gigabytes: float, transport: str, verdict: Verdict
) -> None:
    a10g = load_profile("a10g-efa100")
    key = RowKey(backend, "WRITE", DRAM, block)
    assert judge(row(gigabytes, transport, key=key), a10g.expectation(key), a10g.machine).verdict is verdict


@pytest.mark.parametrize(
    ("backend", "block", "gigabytes", "verdict"),
    [
        ("UCX", 4096, 0.15, Verdict.PASS),
        ("UCX", 4096, 0.001, Verdict.FAIL),
        ("LIBFABRIC", 4096, 0.19, Verdict.PASS),
        ("LIBFABRIC", 4096, 0.009, Verdict.FAIL),
        ("LIBFABRIC", 64 << 20, 3.0, Verdict.PASS),
        ("UCX", 64 << 20, 0.1, Verdict.FAIL),
        ("UCX", 64 << 20, 700, Verdict.IMPLAUSIBLE),
    ],
)
def test_rows_are_judged_by_the_tcp_profile(backend: str, block: int, gigabytes: float, verdict: Verdict) -> None:
    tcp = load_profile("tcp-loopback")
    key = RowKey(backend, "READ", DRAM, block)
    assert judge(row(gigabytes, "tcp/veth0", key=key), tcp.expectation(key), tcp.machine).verdict is verdict
    assert judge(row(gigabytes, "cma/memory", key=key), tcp.expectation(key)).verdict is Verdict.WRONG_TRANSPORT


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
