# SPDX-License-Identifier: Apache-2.0
"""Print facts as the node information template in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_nixl.core.units import gigabits
from pytest_nixl.host.fact import Fact
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.gpu_nic_affinity import WORDS, Topology

_UNKNOWN = "unknown"


def markdown(facts: Facts, title: str = "Node") -> Iterator[str]:
    """Yield the lines of the template; an unknown value is printed with its reason.

    :param title: the heading of the node.
    """
    software, gpu = facts.software, facts.gpu
    yield f"{title}:"
    yield f"- Hostname: {_told(facts.host.name)}"
    yield f"- IP Address: {_address(facts)}"
    yield f"- GPUs: {_gpus(facts)}"
    yield f"- Network: {_network(facts)}"
    yield f"- OS: {_told(facts.host.system)}"
    yield f"- CUDA: {_told(gpu.cuda)}"
    yield f"- Role: {_role(facts)}"
    yield f"- Kernel: {_told(facts.host.kernel)} ({_told(facts.host.architecture)})"
    yield f"- Container: {_told(facts.host.container)}"
    yield f"- CPUs: {_told(facts.host.cpus)} ({_told(facts.host.processor)}), {len(facts.host.numa)} NUMA nodes"
    yield f"- GPU driver: {_told(gpu.driver)}"
    yield f"- NIXL: {_told(software.nixl)}; UCX: {_told(software.ucx)}; libfabric: {_told(software.libfabric)}"
    yield f"- EFA installer: {_told(software.efa_installer)}"
    yield f"- etcd: {_told(facts.etcd.version)}"
    yield f"- Image: {_told(facts.environment.image)}"


def _told(fact: Fact[str] | Fact[int]) -> str:
    return str(fact.value) if fact.value is not None else f"{_UNKNOWN} ({fact.why})"


def _address(facts: Facts) -> str:
    nics = sorted(facts.network.nics, key=lambda nic: nic.name != facts.network.default.value)
    found = [text.partition("/")[0] for nic in nics for text in nic.routable()]
    return found[0] if found else f"{_UNKNOWN} (no interface has an IPv4 address that other hosts can reach)"


def _gpus(facts: Facts) -> str:
    models = Counter(gpu.name for gpu in facts.gpu.gpus)
    return ", ".join(f"{count}x {name}" for name, count in models.items()) or "none"


def _network(facts: Facts) -> str:
    if facts.rdma:
        kinds = Counter((device.kind, device.rate) for device in facts.rdma)
        return ", ".join(f"{count}x {_kind(kind)}{_rate(rate)}" for (kind, rate), count in kinds.items())
    nics = facts.nics or tuple(nic for nic in facts.network.nics if nic.name == facts.network.default.value)
    return ", ".join(f"{nic.name} ({nic.driver or 'virtual'}){_rate(nic.rate)}" for nic in nics) or "none"


def _kind(kind: str) -> str:
    return {"efa": "EFA", "mlx": "InfiniBand or RoCE (mlx5)"}.get(kind, kind)


def _rate(rate: float | None) -> str:
    return f" ({gigabits(rate)} Gbps)" if rate else ""


def _role(facts: Facts) -> str:
    for name in (
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "RANK",
        "JOB_COMPLETION_INDEX",
        "LWS_WORKER_INDEX",
    ):
        if name in facts.environment.launcher:
            rank = facts.environment.launcher[name]
            return f"rank {rank} ({'initiator' if rank == '0' else 'target'}; {name})"
    return f"{_UNKNOWN} (no launcher has set a rank)"


def near_lines(facts: Facts) -> Iterator[str]:
    """Yield a line for each GPU with its nearest network cards, and one for the cards that are near no GPU."""
    topology = Topology.of(facts.gpu, facts.rdma)
    placed = {gpu.name: gpu for gpu in topology.gpus}
    for near in facts.near:
        gpu = placed[str(near.gpu)]
        cards = ", ".join(near.devices) or "no network card"
        own = f"; when all GPUs are used, only: {', '.join(near.own)}" if set(near.own) != set(near.devices) else ""
        yield f"GPU {near.gpu} ({gpu.pci}, {gpu.node}): {cards} ({WORDS[near.how]}){own}"
    if not facts.near:
        yield "no GPU has a known position on the PCI bus"
    idle = [f"{nic.name} ({nic.node})" for nic in topology.idle()]
    if idle and facts.near:
        yield f"near no GPU: {', '.join(idle)}"
