# SPDX-License-Identifier: Apache-2.0
"""The nearest network cards of each GPU, on recorded topologies of other hosts and on changed ones."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.efa_counters import recorded_run
from helpers.fake_sysfs import TOPOLOGY, Tree, build, facts_of, p5, read_tree
from helpers.hwloc import read_hwloc

from pytest_nixl.cli.facts import near_lines
from pytest_nixl.host.devices import FAR, NODE, ROOT, SWITCH, UNPLACED, GpuNics, Placed, Topology, distance, share


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


def test_every_gpu_of_a_p5_has_four_cards_that_it_does_not_share() -> None:
    near = facts_of("p5.48xl").near
    assert {(gpu_nics.how, len(gpu_nics.devices)) for gpu_nics in near} == {(SWITCH, 4)}
    assert Counter(name for gpu_nics in near for name in gpu_nics.own) == {f"rdmap{number}s0": 1 for number in (
        79, 80, 81, 82, 96, 97, 98, 99, 113, 114, 115, 116, 130, 131, 132, 133,
        147, 148, 149, 150, 164, 165, 166, 167, 181, 182, 183, 184, 198, 199, 200, 201,
    )}  # fmt: skip


def test_cards_that_carried_the_recorded_run_belong_to_one_gpu() -> None:
    carried = {carrier.device.removesuffix(" of node-b") for carrier in recorded_run().carriers(["efa"])}
    [gpu] = [gpu_nics for gpu_nics in facts_of("p5.48xl").near if carried & set(gpu_nics.devices)]
    assert (gpu.gpu, set(gpu.own)) == (0, carried)
    assert facts_of("p5.48xl").gpu.gpus[gpu.gpu].pci == "0000:53:00.0"


def test_gpus_share_too_few_cards_evenly() -> None:
    near = facts_of("p4d.24xl").near
    assert {(gpu_nics.how, gpu_nics.own == gpu_nics.devices, len(gpu_nics.own)) for gpu_nics in near} == {
        (ROOT, True, 1)
    }
    assert set(Counter(gpu_nics.own for gpu_nics in near).values()) == {2}
    assert [gpu_nics.own for gpu_nics in facts_of("g5.48xl").near] == [("rdmap0s21",)] * 8


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ({"0": "ab", "1": "ab"}, {"0": "a", "1": "b"}),
        ({"0": "abcd", "1": "abcd"}, {"0": "ac", "1": "bd"}),
        ({"0": "ab", "1": "ab", "2": "ab", "3": "ab"}, {"0": "a", "1": "b", "2": "a", "3": "b"}),
        # A GPU with only one candidate gets it, although another GPU comes first.
        ({"0": "ab", "1": "a"}, {"0": "b", "1": "a"}),
        ({"0": "", "1": "a"}, {"0": "", "1": "a"}),
        ({}, {}),
    ],
)
def test_cards_are_distributed_over_gpus(candidates: dict[str, str], shares: dict[str, str]) -> None:
    assert share({gpu: tuple(nics) for gpu, nics in candidates.items()}) == {g: tuple(n) for g, n in shares.items()}


def placed(path: str, numa: int) -> Placed:
    return Placed("x", "", f"/sys/devices/{path}", numa)


@pytest.mark.parametrize(
    ("first", "second", "how"),
    [
        (("pci0000:44/0000:44:00.0/0000:45:00.0", 0), ("pci0000:44/0000:44:00.0/0000:46:00.0", 0), SWITCH),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:44/0000:44:02.0", 0), ROOT),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:55/0000:55:02.0", 0), NODE),
        (("pci0000:44/0000:44:01.0", 0), ("pci0000:55/0000:55:02.0", 1), FAR),
        (("pci0000:44/0000:44:01.0", -1), ("pci0000:55/0000:55:02.0", -1), UNPLACED),
        (("pci0000:44/0000:44:01.0", -1), ("pci0000:55/0000:55:02.0", 1), UNPLACED),
        (("pci0000:44/0000:44:01.0", -1), ("pci0000:44/0000:44:02.0", -1), ROOT),
        (("", 0), ("", 0), NODE),
    ],
)
def test_distance_of_two_devices(first: tuple[str, int], second: tuple[str, int], how: str) -> None:
    assert distance(placed(*first), placed(*second)) == how
    assert distance(placed(*second), placed(*first)) == how


def move(tree: Tree, address: str, path: str, numa: int) -> None:
    """Move a device to another position on the PCI bus."""
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


def without_numa(tree: Tree) -> None:
    """Let no PCI device have a NUMA node, as in some virtual machines, and put each GPU on a PCI root of its own."""
    for number, device in enumerate(read_hwloc(TOPOLOGY / "p5.48xl.xml")):
        if device.vendor == "10de" and device.family == "0302":
            move(tree, device.address, f"/sys/devices/pci{number + 0xE00:04x}:00/{device.address}", -1)
    for place in tree.place("/sys/devices").glob("pci*/**/numa_node"):
        tree.write(f"/{place.relative_to(tree.folder)}", -1)


def test_unknown_numa_nodes_are_that_of_a_host_of_one_node_and_else_unknown(healthy: Tree, tmp_path: Path) -> None:
    tree = healthy.copy(tmp_path / "tree")
    without_numa(tree)
    facts = read_tree(tree)
    assert {gpu_nics.how for gpu_nics in facts.near} == {UNPLACED}
    assert [next(near_lines(facts)).partition("): ")[0], next(near_lines(facts)).partition(" (on ")[2]] == [
        "GPU 0 (0000:53:00.0, unknown NUMA node",
        "another root of the bus; the firmware does not say at which processor); UCX_NET_DEVICES="
        + ",".join(f"{nic.name}:1" for nic in facts.rdma),
    ]
    tree.remove("/sys/devices/system/node/node1")
    facts = read_tree(tree)
    assert {gpu_nics.how for gpu_nics in facts.near} == {NODE}
    assert all("NUMA node 0" in line for line in near_lines(facts))


def test_cards_are_near_by_switch_then_by_processor(healthy: Tree, tmp_path: Path) -> None:
    tree = healthy.copy(tmp_path / "tree")
    move(tree, "0000:53:00.0", "/sys/devices/pci0000:30/0000:30:01.0/0000:53:00.0", 0)
    near = read_tree(tree).near
    assert (near[0].how, len(near[0].devices)) == (NODE, 16)
    # GPUs 1 to 3 keep their own cards; the moved GPU gets those that no other GPU is near.
    assert near[0].own == ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")
    assert [len(gpu_nics.own) for gpu_nics in near] == [4] * 8
    only_one = healthy.copy(tmp_path / "only-one")
    for nic in only_one.place("/sys/class/infiniband").iterdir():
        if nic.name != "rdmap79s0":
            shutil.rmtree(nic)
    near = read_tree(only_one).near
    assert [gpu_nics.how for gpu_nics in near] == [SWITCH] + [NODE] * 3 + [FAR] * 4
    assert [(gpu_nics.devices, gpu_nics.own) for gpu_nics in near[3:5]] == [(("rdmap79s0",),) * 2, (("rdmap79s0",), ())]


def test_ports_that_manage_nvlink_are_near_no_gpu(healthy: Tree, tmp_path: Path) -> None:
    p6 = build(tmp_path / "p6", "p6-b200.48xl", gpu="NVIDIA B200", rate="400 Gb/sec (4X NDR)")
    for pci in read_hwloc(TOPOLOGY / "p6-b200.48xl.xml"):
        if pci.fabric.startswith("ibp"):
            p6.write(f"/sys/class/infiniband/{pci.fabric}/ports/1/state", "4: ACTIVE")
            p6.link(f"/sys/class/infiniband/{pci.fabric}/device", pci.path)
    node = read_tree(p6)
    assert {card.name for card in node.rdma if card.kind != "efa"} == {"ibp115s0f0", "ibp116s0f0"}
    assert {name for near in node.near for name in (*near.devices, *near.own)} == {card.name for card in node.efa}
    assert [len(near.devices) for near in node.near] == [2] * 8
    assert [len(near.own) for near in node.near] == [1] * 8
    # Without EFA, the firmware of the card says what it is for.
    tree = healthy.copy(tmp_path / "tree")
    cards = sorted(tree.place("/sys/class/infiniband").iterdir())
    for number, card in enumerate(cards):
        card.rename(card.with_name(f"mlx5_{number}"))
    for device in tree.folder.glob("sys/devices/pci*/**/driver"):
        if device.readlink().name == "efa":
            device.unlink()
    assert {name for gpu_nics in read_tree(tree).near for name in gpu_nics.own} == {
        f"mlx5_{number}" for number in range(len(cards))
    }
    (tree.place("/sys/class/infiniband/mlx5_3/device") / "vpd").write_bytes(b"\x82\x10\x00V0\x06SMDL=SW_MNG\x00\xff")
    facts = read_tree(tree)
    assert [card.name for card in facts.rdma if card.manages_nvlink] == ["mlx5_3"]
    assert "mlx5_3" not in {name for gpu_nics in facts.near for name in (*gpu_nics.devices, *gpu_nics.own)}


def test_card_near_no_gpu_is_idle() -> None:
    topology = Topology(
        (Placed("0", "a", "/sys/devices/pci0000:00/0000:00:01.0", 0),),
        (Placed("near", "b", "/sys/devices/pci0000:00/0000:00:02.0", 0),
         Placed("idle", "c", "/sys/devices/pci0000:80/0000:80:02.0", 1)),
    )  # fmt: skip
    assert topology.nearest() == (GpuNics(0, ("near",), ROOT, ("near",)),)
    assert topology.idle() == (topology.nics[1],)
    assert replace(topology, nics=()).nearest() == (GpuNics(0, (), FAR, ()),)
