# SPDX-License-Identifier: Apache-2.0
"""The bytes that the initiator's devices counted, compared with the transports that the backend reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.judge.row import judge
from pytest_nixl.model.device_counters import Carrier, CarrierBytes
from pytest_nixl.model.expectation import Expectation, Machine, row_ceiling
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict

PAYLOAD = 1_000_000
EFA = [Carrier(f"rdmap{number}s0", "efa", PAYLOAD // 4) for number in range(79, 83)]
IDLE = [Carrier("rdmap96s0", "efa", 12), Carrier("eth0", "net", 4000), Carrier("lo", "net", 900)]

EMULATED = [replace(item, carried=0, packets=PAYLOAD // 4 + 500) for item in EFA]
BY_RDMA = [replace(item, packets=PAYLOAD // 4 + 500) for item in EFA]
#: A device that carries control messages but no payload.
CONTROL = Carrier("rdmap96s0", "efa", 0, packets=PAYLOAD // 20)


def say(*devices: Carrier) -> CarrierBytes:
    return CarrierBytes(devices, PAYLOAD)


OF_CARDS = [f"efa/{item.device}" for item in EFA]


@pytest.mark.parametrize(
    ("devices", "transports", "names"),
    [
        # A provider without a device gets those that carried the payload; one that has a device keeps it.
        ([*EFA, *IDLE], ["efa"], OF_CARDS),
        ([Carrier("eth0", "net", PAYLOAD)], ["tcp/eth1"], ["tcp/eth1"]),
        (IDLE, ["efa"], ["efa"]),
        # A WRITE that RDMA did not move.
        ([*EMULATED, *IDLE[1:]], ["efa"], [name.replace("efa", "efa-emulated") for name in OF_CARDS]),
        ([*EMULATED, *IDLE[1:]], ["efa/rdmap79s0-rdm"], ["efa-emulated/rdmap79s0-rdm"]),
        ([*EMULATED, *IDLE[1:]], ["srd/rdmap79s0:1"], ["srd-emulated/rdmap79s0:1"]),
        (EMULATED, ["srd-emulated/rdmap79s0"], ["srd-emulated/rdmap79s0"]),
        # ud_verbs always sends messages and never claims to use RDMA.
        (EMULATED, ["ud_verbs/rdmap79s0:1"], ["ud_verbs/rdmap79s0:1"]),
        # By RDMA, or by another transport. Packets of a device that counts RDMA separately are no payload.
        *((devices, ["efa", "tcp/eth0"], [*OF_CARDS, "tcp/eth0"]) for devices in (EFA, BY_RDMA, [*BY_RDMA, CONTROL])),
        *((devices, ["efa", "tcp/eth0"], ["efa", "tcp/eth0"]) for devices in ([CONTROL], IDLE)),
    ],
)
def test_a_transport_is_named_with_the_devices_that_carried_the_payload(
    devices: list[Carrier], transports: list[str], names: list[str]
) -> None:
    assert say(*devices).named(transports) == tuple(names)


@pytest.mark.parametrize(
    ("transports", "devices"),
    [
        (["efa"], EFA),
        (["efa/rdmap79s0-rdm", "efa/rdmap80s0-rdm", "efa/rdmap81s0-rdm", "efa/rdmap82s0-rdm"], EFA),
        (["rc_mlx5/mlx5_0:1"], [Carrier("mlx5_0", "rdma", PAYLOAD + 900)]),
        (["rc_mlx5/mlx5_0"], [Carrier("mlx5_0:1", "rdma", PAYLOAD), Carrier("mlx5_0:2", "rdma", 0)]),
        (["tcp/eth0"], [Carrier("eth0", "net", PAYLOAD + 900)]),
        # The kernel uses the loopback to send to an address of its own host.
        (["tcp/eth0"], [Carrier("eth0", "net", 0), Carrier("lo", "net", PAYLOAD)]),
        (["tcp/lo", "tcp/eth0"], [Carrier("eth0", "net", PAYLOAD // 2), Carrier("lo", "net", PAYLOAD // 2)]),
        (["tcp/eth0", "efa-emulated"], [*EMULATED, IDLE[1]]),
        (["efa-emulated", "tcp/eth0"], [*EMULATED, IDLE[1]]),
        # Devices that were not read contradict nothing.
        (["tcp/bond0"], IDLE),
        (["tcp/eth0", "tcp/bond0"], IDLE),
        (["tcp/eth0", "cma/memory"], IDLE),
        (["rc_mlx5/mlx5_9:1"], IDLE),
        (["verbs"], IDLE),
        (["cma/memory"], IDLE),
        ([], IDLE),
    ],
)
def test_counters_that_agree_or_are_missing_contradict_nothing(transports: list[str], devices: list[Carrier]) -> None:
    assert say(*devices).contradiction(transports) == ""


@pytest.mark.parametrize(
    ("transports", "devices", "values"),
    [
        (["efa"], IDLE, ("reported efa", "rdmap96s0", " 12 bytes", "1,000,000")),
        (["tcp/eth0"], IDLE, ("reported tcp/eth0", "eth0 and lo", " 4,900 bytes")),
        (["srd/rdmap96s0"], [*IDLE, *EFA], ("reported srd/rdmap96s0", " 12 bytes")),
        (["rc/mlx5_0:1"], [Carrier("mlx5_0", "rdma", PAYLOAD // 2)], ("mlx5_0 ", " 500,000 bytes")),
        (["rc/mlx5_0"], [Carrier("mlx5_0:1", "rdma", 7), Carrier("mlx5_0:2", "rdma", 0)], ("mlx5_0:1", " 7 bytes")),
    ],
)
def test_counters_without_the_payload_contradict(
    transports: list[str], devices: list[Carrier], values: tuple[str, ...]
) -> None:
    contradiction = say(*devices).contradiction(transports)
    assert [value for value in values if value not in contradiction] == [], contradiction


def row(transports: Sequence[str], evidence: CarrierBytes | None, gigabytes: float = 10.0) -> Samples:
    key = RowKey("LIBFABRIC", "WRITE", MemoryPair("VRAM", "VRAM"), 1_000_000)
    return Samples(key, (1e6 / (gigabytes * 1e9),) * 4, (1,) * 4, (1e-3,), tuple(transports), counted=evidence)


FLOOR = Expectation(source="a test", floor=1e9, transports=("efa",))
P5 = Machine(nics=32, nic_rate=12.5e9, gpus=8, gpu="H100", nic_kind="efa", source="a test", nics_per_gpu=4)


def test_row_whose_devices_carried_nothing_is_wrong_transport_at_any_bandwidth() -> None:
    judgement = judge(row(["efa"], say(*IDLE)), FLOOR)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert "LIBFABRIC reported efa" in judgement.reason
    assert "rdmap96s0" in judgement.reason
    assert "FI_EFA_ENABLE_SHM_TRANSFER=0" in judgement.remedy
    assert judge(row(["efa"], say(*EFA)), FLOOR).verdict is Verdict.PASS
    assert judge(row(["efa"], None), FLOOR).verdict is Verdict.PASS


def test_emulated_write_is_wrong_transport_if_the_profile_wants_rdma() -> None:
    evidence = say(*EMULATED)
    transports = evidence.named(["efa"])
    judgement = judge(row(transports, evidence), FLOOR, P5)
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    for value in ("efa-emulated/rdmap82s0", "WRITE was emulated", "1,002,000", "1,000,000"):
        assert value in judgement.reason
    assert "FI_EFA_USE_DEVICE_RDMA" in judgement.remedy
    assert "(rx_bytes) and 0 bytes of RDMA (rdma_read_bytes)" in evidence.emulation("READ")
    # Also beside another wrong transport; and without counters, by what the backend reports.
    assert "WRITE was emulated" in judge(row([*transports, "tcp/eth0"], evidence), FLOOR, P5).reason
    uncounted = judge(row([*transports, "tcp/eth0"], None), FLOOR, P5)
    assert (uncounted.verdict, "FI_EFA_USE_DEVICE_RDMA" in uncounted.remedy) == (Verdict.WRONG_TRANSPORT, True)
    accepted = replace(FLOOR, transports=("efa", "efa-emulated"))
    assert judge(row(transports, evidence), accepted, P5).verdict is Verdict.PASS
    # The ceiling is still that of the four cards.
    assert judge(row(transports, evidence, 51.0), accepted, P5).verdict is Verdict.IMPLAUSIBLE


def test_built_in_profiles_require_rdma_if_the_cards_support_it() -> None:
    def verdict(profile: str, backend: str, provider: str, memory: str = "VRAM") -> Verdict:
        built_in = load_profile(profile)
        evidence = say(*EMULATED)
        key = RowKey(backend, "WRITE", MemoryPair(memory, memory), 64 << 20)
        samples = replace(row(evidence.named([provider]), evidence, 49.0), key=key)
        return judge(samples, built_in.expectation(key)).verdict

    assert verdict("p5.48xlarge", "LIBFABRIC", "efa") is Verdict.WRONG_TRANSPORT
    assert verdict("h100-hyperpod", "LIBFABRIC", "efa") is Verdict.WRONG_TRANSPORT
    # UCX has no RDMA write over srd, and the cards of an A10G host have no RDMA.
    assert verdict("h100-hyperpod", "UCX", "srd") is Verdict.PASS
    assert verdict("a10g-efa100", "LIBFABRIC", "efa", "DRAM") is Verdict.PASS
    assert verdict("a10g-efa100", "UCX", "srd", "DRAM") is Verdict.PASS


def test_ceiling_is_the_sum_of_the_devices_that_carried_the_bytes() -> None:
    carriers = say(Carrier("rdmap79s0", "efa", PAYLOAD), *IDLE)
    four = say(*EFA, *IDLE)
    assert judge(row(["efa"], carriers, 13.0), FLOOR, P5).verdict is Verdict.IMPLAUSIBLE
    assert judge(row(["efa"], four, 46.9), FLOOR, P5).verdict is Verdict.PASS
    judgement = judge(row(["efa"], four, 51.0), FLOOR, P5)
    assert judgement.verdict is Verdict.IMPLAUSIBLE
    assert "100 Gb/s" in judgement.reason
    assert "(rdmap79s0, rdmap80s0, rdmap81s0, rdmap82s0)" in judgement.reason


def test_traffic_over_the_loopback_has_no_ceiling_of_cards() -> None:
    local = CarrierBytes((Carrier("eth0", "net", 0), Carrier("lo", "net", PAYLOAD)), PAYLOAD)
    assert row_ceiling(row(["tcp/eth0"], local), None, P5) is None


def test_sum_of_two_launches_has_the_devices_of_both() -> None:
    both = say(*EFA, *IDLE) + say(*EFA)
    assert both == CarrierBytes(tuple(Carrier(item.device, "efa", PAYLOAD // 2) for item in EFA), 2 * PAYLOAD)
    twice = say(*EMULATED) + say(*EMULATED)
    assert twice.devices[0] == Carrier("rdmap79s0", "efa", 0, packets=PAYLOAD // 2 + 1000)
    assert twice.emulated
    # What one launch does not count separately, the sum does not.
    for both in (say(*EMULATED) + say(*EFA), say(*EFA) + say(*EMULATED)):
        assert both.devices[0] == Carrier("rdmap79s0", "efa", PAYLOAD // 4)


def test_counters_of_this_machine_are_read() -> None:
    with CarrierBytes.counting("WRITE") as counted:
        pass
    names = {item.device: item.kind for item in CarrierBytes.from_plain(counted, 1).devices}
    assert names["lo"] == "net"
