# SPDX-License-Identifier: Apache-2.0
"""Which network card is nearest to each GPU: on the real topologies of hosts that we have not, and broken ones."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_sysfs import TOPOLOGY, Tree, build, p5

from pytest_nixl.checks.doctor.catalogue import checks
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.cli import main
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.gpu_nic_affinity import FAR, NODE, ROOT, SWITCH, GpuNics, Placed, Topology, distance, share
from pytest_nixl.host.hwloc import hwloc_facts, read_hwloc
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.device_counters import devices_that_moved, difference, read_counters
from pytest_nixl.model.verdicts import Judgement, Verdict

RECORDED = TOPOLOGY.parent / "efa-p5"
PROFILES = {"p5.48xl": "p5.48xlarge", "p4d.24xl": "p4d.24xlarge", "p6-b200.48xl": "p6-b200.48xlarge",
            "g5.48xl": "g5.48xlarge"}  # fmt: skip


def facts_of(name: str) -> Facts:
    return hwloc_facts(TOPOLOGY / f"{name}.xml")


def read(tree: Tree) -> Facts:
    return gather(FactsRoot(tree.folder), backends=(), etcd="", environ={})


def judge(facts: Facts, id: str = "gpu-nics", profile: str = "p5.48xlarge") -> Judgement:
    return checks()[id].judge(facts, Requirements(load_profile(profile), ("LIBFABRIC",)))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


@pytest.mark.parametrize("name", PROFILES)
def test_a_tree_of_sysfs_and_hwlocs_file_say_the_same(name: str, tmp_path: Path, healthy: Tree) -> None:
    tree = healthy if name == "p5.48xl" else build(tmp_path / "tree", name, gpu="G", rate="100 Gb/sec (4X EDR)")
    there, told = read(tree), facts_of(name)
    theirs = Topology.of(there.gpu, there.rdma)
    ours = Topology.of(told.gpu, [nic for nic in told.rdma if nic.kind == "efa"])
    assert theirs.gpus == ours.gpus
    assert sorted(theirs.nics, key=lambda nic: nic.pci) == sorted(ours.nics, key=lambda nic: nic.pci)
    assert len(ours.gpus) == 8
    assert there.near == theirs.nearest() == ours.nearest()


def test_every_gpu_of_a_p5_has_its_four_cards_and_each_card_one_gpu() -> None:
    near = facts_of("p5.48xl").near
    assert {(each.how, len(each.devices)) for each in near} == {(SWITCH, 4)}
    assert Counter(name for each in near for name in each.own) == {f"rdmap{number}s0": 1 for number in (
        79, 80, 81, 82, 96, 97, 98, 99, 113, 114, 115, 116, 130, 131, 132, 133,
        147, 148, 149, 150, 164, 165, 166, 167, 181, 182, 183, 184, 198, 199, 200, 201,
    )}  # fmt: skip


def test_the_cards_that_carried_the_recorded_run_are_those_of_one_gpu() -> None:
    before, after = (read_counters(RECORDED / f"efa-counters-{when}.txt") for when in ("before", "after"))
    carried = {each.device.name for each in devices_that_moved(difference(before, after), "WRITE", 11_592_663_040)}
    [gpu] = [each for each in facts_of("p5.48xl").near if carried & set(each.devices)]
    assert (gpu.gpu, set(gpu.own)) == (0, carried)
    assert facts_of("p5.48xl").gpu.gpus[gpu.gpu].pci == "0000:53:00.0"


def test_gpus_that_have_fewer_cards_than_they_are_share_them_evenly() -> None:
    near = facts_of("p4d.24xl").near
    assert {(each.how, each.own == each.devices, len(each.own)) for each in near} == {(ROOT, True, 1)}
    assert set(Counter(each.own for each in near).values()) == {2}
    assert [each.own for each in facts_of("g5.48xl").near] == [("rdmap0s21",)] * 8


def test_two_gpus_under_one_switch_take_one_of_its_two_cards_each() -> None:
    told = facts_of("p6-b200.48xl")
    near = Topology.of(told.gpu, told.efa).nearest()
    assert [len(each.devices) for each in near] == [2] * 8
    assert set(Counter(each.own for each in near).values()) == {1}
    assert len({name for each in near for name in each.own}) == 8


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ({"0": "ab", "1": "ab"}, {"0": "a", "1": "b"}),
        ({"0": "abcd", "1": "abcd"}, {"0": "ac", "1": "bd"}),
        ({"0": "ab", "1": "ab", "2": "ab", "3": "ab"}, {"0": "a", "1": "b", "2": "a", "3": "b"}),
        # Who has one candidate gets it, though another was asked first, and then takes the other.
        ({"0": "ab", "1": "a"}, {"0": "b", "1": "a"}),
        ({"0": "", "1": "a"}, {"0": "", "1": "a"}),
        ({}, {}),
    ],
)
def test_cards_are_shared_out(candidates: dict[str, str], shares: dict[str, str]) -> None:
    assert share({gpu: tuple(nics) for gpu, nics in candidates.items()}) == {g: tuple(n) for g, n in shares.items()}


def placed(path: str, numa: int) -> Placed:
    return Placed("x", "", f"/sys/devices/{path}", numa)


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        (("pci0000:44/0000:44:00.0/0000:45:00.0", 0), ("pci0000:44/0000:44:00.0/0000:46:00.0", 0), SWITCH),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:44/0000:44:02.0", 0), ROOT),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:55/0000:55:02.0", 0), NODE),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:55/0000:55:02.0", 1), FAR),
        # Firmware that names no node leaves two roots of the bus as far apart as can be.
        (("pci0000:44/0000:44:01.0", -1), ("pci0000:55/0000:55:02.0", -1), FAR),
        (("", 0), ("", 0), NODE),
    ],
)
def test_how_near_two_devices_are(one: tuple[str, int], other: tuple[str, int], how: str) -> None:
    assert distance(placed(*one), placed(*other)) == how
    assert distance(placed(*other), placed(*one)) == how


def move(tree: Tree, address: str, path: str, numa: int) -> None:
    """Hang a device elsewhere on the bus."""
    [old] = tree.folder.glob(f"sys/devices/pci*/**/{address}")
    new = tree.place(path)
    new.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(old, new)
    shutil.rmtree(old)
    (new / "numa_node").unlink()
    (new / "numa_node").write_text(f"{numa}\n")
    cards = [card / "device" for card in tree.place("/sys/class/infiniband").iterdir()]
    for link in [tree.place(f"/sys/bus/pci/devices/{address}"), *cards]:
        if address in str(link.readlink()):
            link.unlink()
            tree.link(f"/{link.relative_to(tree.folder)}", path)


def test_a_card_that_hangs_on_the_other_processor_is_told(healthy: Tree, tmp_path: Path) -> None:
    assert judge(read(healthy)).verdict is Verdict.PASS
    tree = healthy.copy(tmp_path / "tree")
    move(tree, "0000:4f:00.0", "/sys/devices/pci0000:f0/0000:f0:01.0/0000:4f:00.0", 1)
    judged = judge(read(tree))
    assert judged.verdict is Verdict.FAIL
    assert judged.reason == ("fewer network cards beside a GPU on the bus than the 4 of the profile: GPU 0 has 3; "
                             "beside no GPU: rdmap79s0 (NUMA node 1)")  # fmt: skip


def test_a_gpu_that_reaches_every_card_across_the_processors_is_told(healthy: Tree, tmp_path: Path) -> None:
    tree = healthy.copy(tmp_path / "tree")
    for other in range(0x93, 0xD0):  # the second processor has GPUs 4 to 7, and then no card
        for nic in tree.folder.glob(f"sys/class/infiniband/rdmap{other}s0"):
            shutil.rmtree(nic)
    facts = read(tree)
    assert [each.how for each in facts.near] == [SWITCH] * 4 + [FAR] * 4
    assert [each.own for each in facts.near[4:]] == [()] * 4
    judged = judge(facts, profile="loopback")
    assert judged.verdict is Verdict.WARN
    assert judged.reason == ("every network card is across the processors from GPU 4 (NUMA node 1), "
                             "GPU 5 (NUMA node 1), GPU 6 (NUMA node 1), GPU 7 (NUMA node 1)")  # fmt: skip


def test_a_card_on_another_root_of_the_same_processor_is_good_where_the_profile_names_no_count(
    healthy: Tree, tmp_path: Path
) -> None:
    tree = healthy.copy(tmp_path / "tree")
    move(tree, "0000:53:00.0", "/sys/devices/pci0000:30/0000:30:01.0/0000:53:00.0", 0)
    facts = read(tree)
    assert (facts.near[0].how, len(facts.near[0].devices)) == (NODE, 16)
    # GPUs 1 to 3 keep their own: what nobody else is beside falls to the one that hangs apart.
    assert facts.near[0].own == ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")
    assert [len(each.own) for each in facts.near] == [4] * 8
    assert judge(facts).reason.startswith("fewer network cards beside a GPU on the bus than the 4 of the profile: GPU")
    judged = judge(facts, profile="loopback")
    assert judged.verdict is Verdict.PASS
    assert "the network cards nearest to GPU 0 hang at the same processor, on another root" in judged.reason


def only_one_card(tree: Tree) -> Tree:
    """Leave the host one network card: at the first processor, as a g6.48xlarge has it."""
    cards = sorted(tree.place("/sys/class/infiniband").iterdir(), key=lambda card: int(card.name[5:].partition("s")[0]))
    for nic in cards[1:]:
        shutil.rmtree(nic)
    return tree


def test_a_machine_with_one_card_is_not_told_to_use_another(healthy: Tree, tmp_path: Path) -> None:
    facts = read(only_one_card(healthy.copy(tmp_path / "tree")))
    assert [each.how for each in facts.near] == [SWITCH] + [NODE] * 3 + [FAR] * 4
    judged = judge(facts, profile="g6.48xlarge")
    assert judged.verdict is Verdict.PASS
    assert judged.reason.startswith(
        "the machine has 1 network card, and all are here: across the processors from GPU 4"
    )
    # Whether the host has more of them than this pod, no profile tells.
    judged = judge(facts, profile="loopback")
    assert judged.verdict is Verdict.WARN
    assert "GPUs at the processor of that card" in judged.remedy
    # A machine that has more was not given all of them.
    assert judge(facts, profile="g5.48xlarge").verdict is Verdict.PASS
    assert judge(facts, profile="p5.48xlarge").verdict is Verdict.FAIL


def test_ports_for_the_management_of_nvlink_are_nobodys(healthy: Tree, tmp_path: Path) -> None:
    told = facts_of("p6-b200.48xl")
    assert {card.name for card in told.rdma if card.kind != "efa"} == {"ibp115s0f0", "ibp116s0f0"}
    assert {name for each in told.near for name in (*each.devices, *each.own)} == {card.name for card in told.efa}
    assert [len(each.devices) for each in told.near] == [2] * 8
    assert [len(each.own) for each in told.near] == [1] * 8
    # Where there is no EFA, the firmware of the card says what it is for.
    tree = healthy.copy(tmp_path / "tree")
    cards = sorted(tree.place("/sys/class/infiniband").iterdir())
    for number, card in enumerate(cards):
        card.rename(card.with_name(f"mlx5_{number}"))
    for device in tree.folder.glob("sys/devices/pci*/**/driver"):
        if device.readlink().name == "efa":
            device.unlink()
    assert {name for each in read(tree).near for name in each.own} == {f"mlx5_{number}" for number in range(len(cards))}
    (tree.place("/sys/class/infiniband/mlx5_3/device") / "vpd").write_bytes(b"\x82\x10\x00V0\x06SMDL=SW_MNG\x00\xff")
    facts = read(tree)
    assert [card.name for card in facts.rdma if card.manages_nvlink] == ["mlx5_3"]
    assert "mlx5_3" not in {name for each in facts.near for name in (*each.devices, *each.own)}


@pytest.mark.parametrize("name", PROFILES)
def test_a_host_is_judged_by_hwlocs_file_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--hwloc", str(TOPOLOGY / f"{name}.xml"), "--profile", PROFILES[name]])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "PASS     rdma-devices" in said.replace("PASS  rdma", "PASS     rdma")
    assert "PASS     gpu-nics" in said.replace("PASS  gpu-nics", "PASS     gpu-nics")
    # hwloc's file has the models of some: what it has not is not made up.
    known = all(gpu.name for gpu in facts_of(name).gpu.gpus)
    assert ("UNKNOWN  gpus" in said) == (not known)
    assert main(["doctor", "--hwloc", str(TOPOLOGY / f"{name}.xml"), "--profile", "h100-hyperpod"]) == 1
    assert "8 GPUs of the 1 that the profile says" in capsys.readouterr().out


def test_the_nearest_cards_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["facts", "--near", "--hwloc", str(TOPOLOGY / "p6-b200.48xl.xml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0] == ("GPU 0 (0000:51:00.0, NUMA node 0): rdmap79s0, rdmap80s0 (under the same PCI switch); its own "
                        "where all GPUs are used: rdmap79s0")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not XML", "is no topology of hwloc (syntax error"),
        ("<html/>", "is no topology of hwloc (its root is <html>)"),
        ('<topology><object type="PCIDev" pci_busid="0" pci_type="?"/></topology>', "(pci_type='?')"),
        ('<topology><object type="Bridge"/></topology>', "('bridge_type')"),
        ("<topology/>", "tells of no PCI device"),
    ],
)
def test_what_is_no_file_of_hwloc_is_said_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.xml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_hwloc(path)
    assert words in str(caught.value)
    assert "expected what `lstopo --of xml` of hwloc 2 writes" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_hwloc_cannot_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["facts", "--record", str(tmp_path / "new"), "--hwloc", str(TOPOLOGY / "g5.48xl.xml")])
    assert code == 2
    assert "--record cannot record the topology of --hwloc" in capsys.readouterr().err


def test_a_card_that_is_nobodys_is_named() -> None:
    topology = Topology(
        (Placed("0", "a", "/sys/devices/pci0000:00/0000:00:01.0", 0),),
        (Placed("near", "b", "/sys/devices/pci0000:00/0000:00:02.0", 0),
         Placed("idle", "c", "/sys/devices/pci0000:80/0000:80:02.0", 1)),
    )  # fmt: skip
    assert topology.nearest() == (GpuNics(0, ("near",), ROOT, ("near",)),)
    assert topology.idle() == (topology.nics[1],)
    assert replace(topology, nics=()).nearest() == (GpuNics(0, (), FAR, ()),)
