# SPDX-License-Identifier: Apache-2.0
"""What ``facts --markdown``, ``facts --near`` and ``init`` make of the facts of a node, compared as a whole."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_sysfs import facts_of

from pytest_nixl.cli import init
from pytest_nixl.cli.facts import markdown, near_lines
from pytest_nixl.cli.init import (
    ClusterPlan,
    describe_floors,
    enroot_name,
    starter_profile,
    template_values,
)
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.recorded_tree import Fact

#: A p5.48xlarge: 8 GPUs, 32 EFA devices of 100 Gb/s and as many interfaces.
NODE = facts_of("p5.48xl")
MLX = tuple(replace(card, name=f"mlx5_{number}", kind="mlx") for number, card in enumerate(NODE.rdma[:3]))


def rated(*rates: float | None) -> tuple[Any, ...]:
    """Return cards of NVIDIA, each with the rates of its ports."""
    return tuple(
        replace(card, ports=(replace(card.ports[0], rate=rate),)) for card, rate in zip(MLX, rates, strict=False)
    )


def a_node(**changes: Any) -> Facts:
    """Return the node without RDMA devices and GPUs but those given; each other change is one of its facts."""
    gpu = replace(NODE.gpu, gpus=changes.pop("gpus", ()))
    parts = {
        name: replace(getattr(NODE, name), **values) for name, values in changes.items() if isinstance(values, dict)
    }
    rdma = changes.get("rdma", ())
    return replace(NODE, gpu=gpu, rdma=rdma, near=changes.get("near", ()), **parts)


DEFAULT = NODE.network.default.value
TCP = {"nics": tuple(replace(nic, rate=12.5e9 if nic.name == DEFAULT else 1e9) for nic in NODE.network.nics)}
VIRTUAL = tuple(replace(nic, virtual=True, driver="", pci="") for nic in TCP["nics"])
UNKNOWN: Fact[str] = Fact(None, "a test", "nobody says it")
GPUS = NODE.gpu.gpus


def fact(value: Any) -> Fact[Any]:
    return Fact(value, "a test")


TWO_MODELS = (replace(GPUS[0], name="H100"), replace(GPUS[1], name="L4"), replace(GPUS[2], name="H100"))
MARKDOWN = """\
Node:
- Hostname: node-a
- IP Address: 10.0.0.11
- GPUs: 8x GPU
- Network: 32x EFA (100 Gbps)
- OS: Ubuntu 22.04.5 LTS
- CUDA: 12.8
- Role: unknown (no launcher has set a rank)
- Kernel: 6.8.0-1030-aws (x86_64)
- Container: no
- CPUs: 192 (AMD EPYC 7R13 Processor), 2 NUMA nodes
- GPU driver: 570.133.20
- NIXL: 1.5.0; UCX: 1.21.0; libfabric: 2.3
- EFA installer: 1.43.2
- etcd: 3.5.18
- Image: unknown (no variable names the image)"""


def launched(**variables: str) -> Facts:
    return replace(NODE, environment=replace(NODE.environment, launcher=variables))


ADDRESSED = tuple(
    replace(nic, addresses=addresses) for nic, addresses in zip(
        NODE.network.nics, (("10.0.0.11/16", "10.0.0.12/16"), ("10.1.0.1/16",)), strict=False
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name", "text"),
    [
        (NODE, "", ""),
        *((launched(**{name: "0"}), "Role", f"rank 0 (initiator; {name})")
          for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "JOB_COMPLETION_INDEX",
                       "LWS_WORKER_INDEX")),
        (launched(SLURM_PROCID="1", OMPI_COMM_WORLD_RANK="2"), "Role", "rank 1 (target; SLURM_PROCID)"),
        (a_node(gpus=GPUS, rdma=NODE.rdma, host={"name": UNKNOWN}), "Hostname", "unknown (nobody says it)"),
        (a_node(gpus=TWO_MODELS, rdma=NODE.rdma), "GPUs", "2x H100, 1x L4"),
        (a_node(rdma=NODE.rdma), "GPUs", "none"),
        (a_node(gpus=GPUS, rdma=(*rated(12.5e9, 50e9, 12.5e9), *(replace(NODE.rdma[0], kind="irdma", ports=()),))),
         "Network", "2x InfiniBand or RoCE (mlx5) (100 Gbps), 1x InfiniBand or RoCE (mlx5) (400 Gbps), 1x irdma"),
        (a_node(gpus=GPUS, rdma=NODE.rdma, network={"nics": ADDRESSED}), "IP Address", "10.0.0.11"),
        (a_node(gpus=GPUS, rdma=NODE.rdma, network={"nics": ADDRESSED, "default": fact(ADDRESSED[1].name)}),
         "IP Address", "10.1.0.1"),
        (a_node(gpus=GPUS, rdma=NODE.rdma, network={"nics": ADDRESSED[2:]}), "IP Address",
         "unknown (no interface has an IPv4 address that other hosts can reach)"),
        (a_node(gpus=GPUS, network={"nics": TCP["nics"][:2]}), "Network",
         "enp71s0 (ena) (100 Gbps), enp72s0 (ena) (8 Gbps)"),
        (a_node(gpus=GPUS, network={"nics": VIRTUAL}), "Network", "enp71s0 (virtual) (100 Gbps)"),
        (a_node(gpus=GPUS, network={"nics": ()}), "Network", "none"),
    ],
)  # fmt: skip
def test_the_template_of_a_node_is_filled_in(facts: Facts, name: str, text: str) -> None:
    lines = {line.partition(": ")[0]: line for line in markdown(facts)}
    if name:
        assert lines.pop(f"- {name}") == f"- {name}: {text}"
    expected = [line for line in MARKDOWN.splitlines() if line.partition(": ")[0] != f"- {name}"]
    if name in ("Network", "IP Address"):
        lines = {key: line for key, line in lines.items() if key not in ("- Network", "- IP Address")}
        expected = [line for line in expected if not line.startswith(("- Network", "- IP Address"))]
    assert list(lines.values()) == expected


def test_the_nearest_cards_of_each_gpu_are_named() -> None:
    first, last, *_ = NODE.near[:2]
    two = replace(first, devices=first.devices[:2], own=first.devices[:1])
    alone = replace(last, devices=(), own=())
    [port] = NODE.rdma[0].ports
    ports = (replace(port, state="DOWN"), replace(port, number=2), replace(port, number=3, state=""))
    rdma = (replace(NODE.rdma[0], ports=ports), replace(NODE.rdma[1], closed="not permitted"),
            replace(NODE.rdma[2], ports=()), *NODE.rdma[3:])  # fmt: skip
    four = ", ".join(first.devices)
    gpu = f"GPU {first.gpu} ({GPUS[0].pci}, NUMA node 0): "
    switch = " (under the same PCI switch)"
    for near, cards, line in (
        ((first,), NODE.rdma,
         f"{gpu}{four}{switch}; UCX_NET_DEVICES=" + ",".join(f"{name}:1" for name in first.devices)),
        ((first,), rdma, f"{gpu}{four}{switch}; UCX_NET_DEVICES={rdma[0].name}:2,{rdma[0].name}:3,{rdma[2].name}:1,"
                         f"{rdma[3].name}:1"),
        ((two,), NODE.rdma, f"{gpu}{', '.join(first.devices[:2])}{switch}; when all GPUs are used, only: "
                            f"{first.devices[0]}; UCX_NET_DEVICES={first.devices[0]}:1"),
        ((replace(two, own=()),), NODE.rdma, f"{gpu}{', '.join(first.devices[:2])}{switch}; "
                                             f"UCX_NET_DEVICES={first.devices[0]}:1,{first.devices[1]}:1"),
        ((replace(alone, gpu=first.gpu),), NODE.rdma, f"{gpu}no network card"),
        ((replace(alone, gpu=first.gpu),), (), f"{gpu}this host has no RDMA device"),
        ((), NODE.rdma[:2], "no GPU has a known position on the PCI bus; UCX_NET_DEVICES="
                            f"{NODE.rdma[0].name}:1,{NODE.rdma[1].name}:1"),
        ((), (), "no GPU has a known position on the PCI bus"),
    ):  # fmt: skip
        assert next(near_lines(replace(NODE, near=near, rdma=cards))) == line
    assert len(list(near_lines(NODE))) == 8


RC_OR_DC = ("dc", "dc_mlx5", "dc_x", "rc", "rc_gda", "rc_mlx5", "rc_v", "rc_verbs", "rc_x")
EFA, EMULATED = ("srd",), ("efa", "srd", "efa-emulated")
NO_CARD, NO_RATE = "this node has no RDMA device", "no RDMA device of this node reports its rate"
RATES = "the RDMA devices of this node have different rates (100 Gb/s, 400 Gb/s)"
OF_CARD = "the line rate of one RDMA device, as its driver reports it"
ASSUMED = "which is assumed, because no network card reports its line rate"
SWITCH = (replace(MLX[0], manages_nvlink=True),)
CHECKS = ["nixl-loads", "backend-loads", "etcd-answers", "metadata-by-etcd", "metadata-by-side-channel",
          "endpoints-well-formed", "bandwidth"]  # fmt: skip
OF_RDMA = ["plugin-libraries", "memlock", "rdma-devices", "rdma-ports", "uverbs-open"]


def floors(small: str, large: str, rate: str, origin: str) -> tuple[tuple[str, str, str], ...]:
    return (
        ("4KiB..1048575B", small, "a block below 1 MiB takes a time that is mostly latency; slower is broken"),
        ("1MiB..1GiB", large, f"a tenth of {rate} Gb/s, {origin}"),
    )


@pytest.mark.parametrize(
    ("facts", "backend", "accepted", "undescribed", "values"),
    [
        (a_node(rdma=NODE.rdma, gpus=GPUS[:2], near=(NODE.near[0], replace(NODE.near[1], own=NODE.near[1].own[:2]))),
         "LIBFABRIC", EMULATED, "",
         {"memories": ("DRAM:DRAM", "VRAM:VRAM"), "required": [*CHECKS, *OF_RDMA, "gpus", "gpu-driver"], "nics": 32,
          "nic_rate": "100", "nics_per_gpu": 2, "efa": 32, "gpus": 2, "gpu": "GPU",
          "floors": floors("0.001", "1.25", "100", OF_CARD)}),
        (a_node(), "UCX", ("tcp",), NO_CARD,
         {"required": CHECKS, "nics": 0, "nic_rate": "1", "floors": floors("0.001", "0.0125", "1", ASSUMED)}),
        (a_node(network=TCP), "UCX", ("tcp",), NO_CARD,
         {"required": CHECKS, "nic_rate": "100",
          "floors": floors("0.001", "1.25", "100", f"the line rate of {DEFAULT}, as its driver reports it")}),
        (a_node(rdma=SWITCH), "UCX", ("tcp",), NO_CARD,
         {"required": CHECKS, "nic_rate": "1", "floors": floors("0.001", "0.0125", "1", ASSUMED)}),
        (a_node(rdma=rated(5e6)), "LIBFABRIC", ("verbs",), "",
         {"required": [*CHECKS, *OF_RDMA], "nics": 1, "nic_rate": "0.04",
          "floors": floors("0.0005", "0.0005", "0.04", OF_CARD)}),
        (a_node(rdma=rated(50e9, None, 12.5e9), gpus=TWO_MODELS, near=NODE.near[:2]), "UCX",
         RC_OR_DC, RATES,
         {"memories": ("DRAM:DRAM", "VRAM:VRAM"), "required": [*CHECKS, "gpus", "gpu-driver"], "nic_rate": "100",
          "gpus": 3, "floors": floors("0.001", "1.25", "100", OF_CARD)}),
        (a_node(rdma=rated(None)), "UCX", RC_OR_DC, NO_RATE,
         {"required": CHECKS, "nic_rate": "1", "floors": floors("0.001", "0.0125", "1", ASSUMED)}),
        (a_node(rdma=NODE.rdma[:1], gpus=GPUS[:1], near=(replace(NODE.near[0], own=()),)), "UCX", EFA, "",
         {"memories": ("DRAM:DRAM", "VRAM:VRAM"), "required": [*CHECKS, *OF_RDMA, "gpus", "gpu-driver"], "nics": 1,
          "nic_rate": "100", "efa": 1, "gpus": 1, "gpu": "GPU", "floors": floors("0.001", "1.25", "100", OF_CARD)}),
    ],
    ids=["uneven-gpus", "nothing", "tcp", "an-nvlink-switch", "a-slow-card", "different-rates", "no-rate",
         "one-card"],
)  # fmt: skip
def test_a_first_profile_is_made_of_what_the_node_has(
    facts: Facts, backend: str, accepted: tuple[str, ...], undescribed: str, values: dict[str, Any]
) -> None:
    without = {"memories": ("DRAM:DRAM",), "nics": 0, "nics_per_gpu": 0, "efa": 0, "gpus": 0, "gpu": ""}
    of_node = {"backend": backend, "transports": accepted, "undescribed": undescribed, "today": "2026-11-28"}
    text = starter_profile(facts, backend, date(2026, 11, 28))
    assert text == init.starter_file("profile.toml", {**without, **of_node, **values})
    [_, (_, _, source)] = values["floors"]
    assert describe_floors(facts) == f"sanity floors of {source.removeprefix('a tenth of ')}"


PAGES = NODE.host.huge_pages


@pytest.mark.parametrize(
    ("facts", "plan", "values"),
    [
        (NODE, {"nodes": 4, "backend": "UCX", "product": "p5.48xlarge"},
         {"nodes": 4, "backend": "UCX", "node_label": "node.kubernetes.io/instance-type: p5.48xlarge"}),
        (NODE, {"product": "P5.48xlarge"}, {}),
        (a_node(host={"cpus": fact(8), "memory": fact(1 << 30), "architecture": fact("aarch64"), "huge_pages": ()}), {},
         {"memories": "DRAM:DRAM", "gpus": 0, "efa": 0, "cpus": 7, "memory": "512Mi", "shared_memory": "128Mi",
          "node_label": "kubernetes.io/arch: arm64", "huge_pages": False}),
        (a_node(host={"cpus": fact(1), "memory": fact(None), "architecture": fact("riscv")}), {},
         {"memories": "DRAM:DRAM", "gpus": 0, "efa": 0, "cpus": 1, "memory": "2048Mi", "shared_memory": "512Mi",
          "node_label": "kubernetes.io/arch: riscv"}),
        (a_node(host={"cpus": fact(None), "architecture": fact(None)}), {},
         {"memories": "DRAM:DRAM", "gpus": 0, "efa": 0, "cpus": 1}),
        *((replace(NODE, host=replace(NODE.host, huge_pages=pages)), {}, {"huge_pages": enough})
          for pages, enough in (((replace(PAGES[0], total=2560),), True), ((replace(PAGES[0], total=2559),), False),
                                ((replace(PAGES[0], size=1 << 30),), False),
                                ((replace(PAGES[0], total=2000), replace(PAGES[0], total=560)), True))),
    ],
)  # fmt: skip
def test_the_files_of_a_cluster_fit_one_of_its_nodes(
    facts: Facts, plan: dict[str, Any], values: dict[str, Any]
) -> None:
    cluster = {"image": init.PLACEHOLDER, "nodes": 2, "backend": "LIBFABRIC", "product": "", **plan}
    profile = Path("my files/profile.toml")
    assert template_values(ClusterPlan(facts, **cluster), Path("my files")) == {
        "image": init.PLACEHOLDER, "nodes": 2, "backend": "LIBFABRIC", "memories": "DRAM:DRAM,VRAM:VRAM", "gpus": 8,
        "efa": 32, "script": Path("my files/pytest-nixl.sbatch"), "learn_like": f"'{profile}'",
        "profile_path": f"'{profile.resolve()}'", "container_image": "", "pod_profile": "/profile/profile.toml",
        "mount_profile": True, "node_label": "kubernetes.io/arch: amd64", "cpus": 32, "memory": f"{128 << 10}Mi",
        "shared_memory": f"{16 << 10}Mi", "huge_pages": True, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("localhost:5000/a/b", "localhost:5000#a/b"),
        ("localhost/a", "localhost#a"),
        ("vllm/vllm-openai:v1", "vllm/vllm-openai:v1"),
        ("a.b:1", "a.b:1"),
    ],
)
def test_enroot_finds_an_image_behind_its_registry(image: str, name: str) -> None:
    assert enroot_name(image) == name
