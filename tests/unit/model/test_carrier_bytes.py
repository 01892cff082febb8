# SPDX-License-Identifier: Apache-2.0
"""What the initiator's devices counted, beside the transports that the backend reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.judge.row import judge
from pytest_nixl.model.carrier_bytes import Carrier, CarrierByteCounter, CarrierBytes, counted
from pytest_nixl.model.ceiling import row_ceiling
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.machine import Machine
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict

PAYLOAD = 1_000_000
EFA = [Carrier(f"rdmap{number}s0", "efa", PAYLOAD // 4) for number in range(79, 83)]
IDLE = [Carrier("rdmap96s0", "efa", 12), Carrier("eth0", "net", 4000), Carrier("lo", "net", 900)]


def say(*devices: Carrier) -> CarrierBytes:
    return CarrierBytes(devices, PAYLOAD)


def test_a_provider_without_a_device_gets_those_that_carried_the_payload() -> None:
    assert say(*EFA, *IDLE).named(["efa"]) == tuple(f"efa/rdmap{number}s0" for number in range(79, 83))


def test_a_named_device_stays_and_an_unread_one_stays_unnamed() -> None:
    assert say(Carrier("eth0", "net", PAYLOAD)).named(["tcp/eth1"]) == ("tcp/eth1",)
    assert say(*IDLE).named(["efa"]) == ("efa",)


@pytest.mark.parametrize(
    ("transports", "devices"),
    [
        (["efa"], EFA),
        (["efa/rdmap79s0-rdm", "efa/rdmap80s0-rdm", "efa/rdmap81s0-rdm", "efa/rdmap82s0-rdm"], EFA),
        (["rc_mlx5/mlx5_0:1"], [Carrier("mlx5_0", "rdma", PAYLOAD + 900)]),
        (["rc_mlx5/mlx5_0"], [Carrier("mlx5_0:1", "rdma", PAYLOAD), Carrier("mlx5_0:2", "rdma", 0)]),
        (["tcp/eth0"], [Carrier("eth0", "net", PAYLOAD + 900)]),
        # To an address of its own host, the kernel sends by loopback.
        (["tcp/eth0"], [Carrier("eth0", "net", 0), Carrier("lo", "net", PAYLOAD)]),
        (["tcp/lo", "tcp/eth0"], [Carrier("eth0", "net", PAYLOAD // 2), Carrier("lo", "net", PAYLOAD // 2)]),
        # What cannot be read contradicts nothing.
        (["tcp/bond0"], IDLE),
        (["rc_mlx5/mlx5_9:1"], IDLE),
        (["verbs"], IDLE),
        (["cma/memory"], IDLE),
        ([], IDLE),
    ],
)
def test_counters_that_agree_or_cannot_tell_contradict_nothing(transports: list[str], devices: list[Carrier]) -> None:
    assert say(*devices).contradiction(transports) == ""


@pytest.mark.parametrize(
    ("transports", "devices", "words"),
    [
        (["efa"], IDLE, "reported efa, and rdmap96s0 counted 12 bytes of a payload of 1,000,000"),
        (["tcp/eth0"], IDLE, "reported tcp/eth0, and eth0 and lo counted 4,900 bytes"),
        (["srd/rdmap96s0"], [*IDLE, *EFA], "reported srd/rdmap96s0, and rdmap96s0 counted 12 bytes"),
        (["rc/mlx5_0:1"], [Carrier("mlx5_0", "rdma", PAYLOAD // 2)], "mlx5_0 counted 500,000 bytes"),
    ],
)
def test_counters_that_lack_the_payload_contradict(transports: list[str], devices: list[Carrier], words: str) -> None:
    assert words in say(*devices).contradiction(transports)


def row(transports: Sequence[str], evidence: CarrierBytes | None, gigabytes: float = 10.0) -> Samples:
    key = RowKey("LIBFABRIC", "WRITE", MemoryPair("VRAM", "VRAM"), 1_000_000)
    return Samples(key, (1e6 / (gigabytes * 1e9),) * 4, (1,) * 4, (1e-3,), tuple(transports), counted=evidence)


FLOOR = Expectation(source="a test", floor=1e9, transports=("efa",))
P5 = Machine(nics=32, nic_rate=12.5e9, gpus=8, gpu="H100", nic_kind="efa", source="a test", nics_per_gpu=4)


def test_a_row_whose_devices_stood_still_is_wrong_transport_whatever_its_speed() -> None:
    judgement = judge(row(["efa"], say(*IDLE)), FLOOR)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert "LIBFABRIC reported efa, and rdmap96s0 counted 12 bytes" in judgement.reason
    assert "FI_EFA_ENABLE_SHM_TRANSFER=0" in judgement.remedy
    assert judge(row(["efa"], say(*EFA)), FLOOR).verdict is Verdict.PASS
    assert judge(row(["efa"], None), FLOOR).verdict is Verdict.PASS


EMULATED = [replace(item, carried=0, packets=PAYLOAD // 4 + 500) for item in EFA]
BY_RDMA = [replace(item, packets=PAYLOAD // 4 + 500) for item in EFA]
#: One that carries what announces the transfers, and no payload.
CONTROL = Carrier("rdmap96s0", "efa", 0, packets=PAYLOAD // 20)


@pytest.mark.parametrize("transport", ["efa", "efa/rdmap79s0-rdm", "srd/rdmap79s0:1"])
def test_a_write_that_no_rdma_moved_is_named_emulated(transport: str) -> None:
    provider = transport.partition("/")[0]
    (name, *_) = say(*EMULATED, *IDLE[1:]).named([transport])
    assert name.startswith(f"{provider}-emulated/rdmap79s0")


@pytest.mark.parametrize("devices", [EFA, BY_RDMA, [*BY_RDMA, CONTROL], [CONTROL], IDLE])
def test_a_write_by_rdma_or_another_way_is_not_named_emulated(devices: list[Carrier]) -> None:
    assert not any("emulated" in name for name in say(*devices).named(["efa", "tcp/eth0"]))


def test_a_device_that_counts_rdma_apart_is_no_carrier_by_its_packets() -> None:
    assert say(*BY_RDMA, CONTROL).named(["efa"]) == tuple(f"efa/{item.device}" for item in EFA)


def test_the_name_of_another_transport_of_efa_stays() -> None:
    # Messages are what it is made of: nobody takes it for RDMA.
    assert say(*EMULATED).named(["ud_verbs/rdmap79s0:1"]) == ("ud_verbs/rdmap79s0:1",)


def test_an_emulated_write_is_wrong_where_the_profile_wants_rdma() -> None:
    evidence = say(*EMULATED)
    transports = evidence.named(["efa"])
    judgement = judge(row(transports, evidence), FLOOR, P5)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert (
        "efa-emulated/rdmap82s0 (WRITE was emulated by send and receive: 4 EFA devices counted 1,002,000 bytes of "
        "packets (tx_bytes) and 0 bytes of RDMA (rdma_write_bytes) for a payload of 1,000,000), and the profile "
        "accepts efa only"
    ) in judgement.reason
    assert "FI_EFA_USE_DEVICE_RDMA" in judgement.remedy
    accepted = replace(FLOOR, transports=("efa", "efa-emulated"))
    assert judge(row(transports, evidence), accepted, P5).verdict is Verdict.PASS
    # The ceiling is that of the four cards all the same.
    assert judge(row(transports, evidence, 51.0), accepted, P5).verdict is Verdict.IMPLAUSIBLE


def test_built_in_profiles_want_rdma_where_the_cards_have_it() -> None:
    def verdict(profile: str, backend: str, provider: str, memory: str = "VRAM") -> Verdict:
        found = load_profile(profile)
        evidence = say(*EMULATED)
        key = RowKey(backend, "WRITE", MemoryPair(memory, memory), 64 << 20)
        samples = replace(row(evidence.named([provider]), evidence, 49.0), key=key)
        return judge(samples, found.expectation(key)).verdict

    assert verdict("p5.48xlarge", "LIBFABRIC", "efa") is Verdict.WRONG_TRANSPORT
    assert verdict("h100-hyperpod", "LIBFABRIC", "efa") is Verdict.WRONG_TRANSPORT
    # UCX has no RDMA write over srd, and the cards beside an A10G have none at all.
    assert verdict("h100-hyperpod", "UCX", "srd") is Verdict.PASS
    assert verdict("a10g-efa100", "LIBFABRIC", "efa", "DRAM") is Verdict.PASS
    assert verdict("a10g-efa100", "UCX", "srd", "DRAM") is Verdict.PASS


def test_the_ceiling_is_of_the_devices_that_carried_the_bytes() -> None:
    one = say(Carrier("rdmap79s0", "efa", PAYLOAD), *IDLE)
    four = say(*EFA, *IDLE)
    assert judge(row(["efa"], one, 13.0), FLOOR, P5).verdict is Verdict.IMPLAUSIBLE
    assert judge(row(["efa"], four, 46.9), FLOOR, P5).verdict is Verdict.PASS
    judgement = judge(row(["efa"], four, 51.0), FLOOR, P5)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert "4 NICs of 100 Gb/s that carried it (rdmap79s0, rdmap80s0, rdmap81s0, rdmap82s0)" in judgement.reason


def test_what_the_kernel_takes_to_its_own_host_has_no_ceiling_of_cards() -> None:
    local = CarrierBytes((Carrier("eth0", "net", 0), Carrier("lo", "net", PAYLOAD)), PAYLOAD)
    assert row_ceiling(row(["tcp/eth0"], local), None, P5) is None


def test_launches_add_what_both_saw() -> None:
    both = say(*EFA, *IDLE) + say(*EFA)
    assert both == CarrierBytes(tuple(Carrier(item.device, "efa", PAYLOAD // 2) for item in EFA), 2 * PAYLOAD)
    twice = say(*EMULATED) + say(*EMULATED)
    assert twice.devices[0] == Carrier("rdmap79s0", "efa", 0, packets=PAYLOAD // 2 + 1000)
    assert twice.emulated


def test_this_machines_own_counters_are_read() -> None:
    with CarrierByteCounter("WRITE") as counting:
        pass
    names = {item.device: item.kind for item in counted(counting.plain(), 1).devices}
    assert names["lo"] == "net"
