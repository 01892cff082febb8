# SPDX-License-Identifier: Apache-2.0
"""The check ``gpus-together``: how much do several GPUs of a rank transfer at the same time?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.host.devices import NOT_NEAR, UCX_CARDS, GpuNics, HostDevices, Placed, Topology
from pytest_nixl.host.gpu import GpuFacts, read_gpus, visible
from pytest_nixl.host.rdma import RdmaDevice, network_cards
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.concurrent import (
    QUIET,
    ConcurrentRates,
    corrupt,
    disturbance,
    measure_at_once,
    spread,
)
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.transports import card, is_network
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe
from pytest_nixl.nixl.gpus import LinkGpu, gpus
from pytest_nixl.processes.worker_process import Worker
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

REMEDY = (
    "measure that GPU alone with --nixl-devices; check `nvidia-smi topo -m`, its PCIe link, its NVLinks and its "
    "network card"
)


def pairs_of(initiators: int, targets: int, *, one_host: bool) -> list[DevicePair]:
    """Return the pairs of GPUs to measure: GPUs of the same number on two hosts, neighbours on one host.

    A GPU without a partner is left out, so a single GPU on one host gives no pair.

    :param initiators: the number of GPUs of the initiator; ``targets`` is the target's.
    """
    if one_host:
        count = min(initiators, targets)
        return [DevicePair(number, (number + 1) % count) for number in range(count)] if count > 1 else []
    return [DevicePair(number, number) for number in range(min(initiators, targets))]


@dataclass(frozen=True)
class GpuEnd:
    """A GPU and the network cards nearest to it.

    :param near: the nearest network cards; None: the GPU's position on the PCIe bus is not known.
    :param node: its NUMA node, in words; empty: not known.
    """

    gpu: LinkGpu
    near: GpuNics | None
    node: str = ""

    @property
    def nics(self) -> tuple[str, ...]:
        """The network cards for this GPU when all GPUs are in use; empty: every card is far away."""
        return self.near.own if self.near is not None else ()

    def variables(self) -> dict[str, str]:
        """Return the environment variables that make UCX use the own network cards; empty: there are none."""
        return {UCX_CARDS: ",".join(f"{name}:1" for name in self.nics)} if self.nics else {}

    def __str__(self) -> str:
        return f"GPU {self.gpu.number} ({', '.join(filter(None, [self.gpu.pci, self.node]))})"


def seats(gpus: Sequence[LinkGpu], gpu_facts: Sequence[GpuFacts], cards: Sequence[RdmaDevice]) -> list[GpuEnd]:
    """Return each GPU of a worker with its position on the bus and its share of the usable network cards.

    :param gpus: the GPUs that the worker sees, with its numbers.
    :param gpu_facts: all GPUs of the host, with their positions on the bus.
    :param cards: the RDMA devices of the host.
    """
    places = {gpu.pci: gpu for gpu in gpu_facts if gpu.pci and gpu.path}
    placed = [
        Placed(str(gpu.number), gpu.pci, places[gpu.pci].path, places[gpu.pci].numa)
        for gpu in gpus
        if gpu.pci in places
    ]
    usable = [
        Placed(nic.name, nic.pci, nic.path, nic.numa)
        for nic in network_cards(cards)
        if nic.active and nic.uverbs and not nic.closed and nic.path
    ]
    near = {place.gpu: place for place in Topology(tuple(placed), tuple(usable)).nearest()}
    nodes = {int(place.name): place.node for place in placed}
    return [GpuEnd(gpu, near.get(gpu.number), nodes.get(gpu.number, "")) for gpu in gpus]


@dataclass(frozen=True)
class GpuPair:
    """One pair of GPUs.

    :param initiator: the GPU of the initiator; ``target`` is the GPU of the target.
    :param alone: bytes per second if no other pair is measured.
    :param transports: the transports that carried the bytes, as the backend reports them.
    """

    initiator: GpuEnd
    target: GpuEnd
    alone: float
    transports: tuple[str, ...]

    def __str__(self) -> str:
        over = f" over {', '.join(self.transports)}" if self.transports else ""
        return f"{self.initiator} to GPU {self.target.gpu.number}{over}"

    @property
    def astray(self) -> tuple[str, ...]:
        """The network cards that carried bytes of this pair but are not nearest to the initiator's GPU."""
        near = self.initiator.near
        if near is None or near.how in NOT_NEAR or not near.devices:
            return ()
        used = [card(transport) for transport in self.transports if is_network(transport)]
        return tuple(dict.fromkeys(name for name in used if name and name not in near.devices))


def judge_gpus(
    label: str, block: int, lanes: Sequence[GpuPair], rates: ConcurrentRates, scaling: float | None, took: str = ""
) -> Judgement:
    """Judge the bandwidth of GPUs that were measured at the same time.

    :param label: the kind of link, in words.
    :param block: block size in bytes.
    :param rates: the bandwidth of each lane while all were measured.
    :param scaling: the least ratio of the bandwidth together to the sum of the bandwidths alone; None: the profile has
        none, and only a GPU that starves is a fault.
    :param took: a clause about what other processes took from the lanes; empty: too little to slow one.
    """
    efficiency = rates.total / sum(lane.alone for lane in lanes)
    slowest = lanes[rates.slowest]
    rates_by_gpu = ", ".join(
        f"{lane.initiator.gpu.number}: {gigabytes(rate)}" for lane, rate in zip(lanes, rates.rates, strict=True)
    )
    reason = (
        f"{label} of {format_size(block)}, {len(lanes)} GPUs at once: {gigabytes(rates.total)} GB/s together, "
        f"{efficiency:.0%} of the sum of each alone; by GPU {rates_by_gpu} GB/s; the slowest is {slowest}, with "
        f"{gigabytes(rates.rates[rates.slowest])} of the {gigabytes(slowest.alone)} GB/s that it moves alone"
    )
    slow = ""
    if rates.starving is not None:
        slow = "it starves while the others are measured"
    elif scaling is not None and efficiency < scaling:
        slow = f"the profile requires {scaling:.0%}"
    if slow and took:
        return Judgement(Verdict.INCONCLUSIVE, f"{reason}: {slow}, but {took}", QUIET)
    if slow:
        return Judgement(Verdict.FAIL, f"{reason}: {slow}", REMEDY)
    strayed = [f"GPU {lane.initiator.gpu.number} by {', '.join(lane.astray)}" for lane in lanes if lane.astray]
    if strayed:
        remedy = f"unset the variables that name devices ({UCX_CARDS}, FI_EFA_IFACE), so that the backend chooses"
        return Judgement(
            Verdict.WARN, f"{reason}; over network cards that are not nearest to the GPU: {'; '.join(strayed)}", remedy
        )
    if scaling is None:
        reason += "; no GPU starves, and the profile has no `scaling` that requires more"
    return Judgement(Verdict.PASS, reason)


def measure_gpus(
    label: str,
    links: Sequence[Link],
    seated: Sequence[tuple[GpuEnd, GpuEnd]],
    block: int,
    depth: int,
    scaling: float | None,
) -> Judgement:
    """Measure one row of each link alone, then of all links at the same time, and judge the latter by the former.

    :param label: the kind of link, in words.
    :param seated: the GPUs of the two ends of each link.
    :param block: block size in bytes; ``depth`` is the number of transfers in flight.
    :param scaling: as in :func:`judge_gpus`.
    """
    names = [f"{first} to GPU {second.gpu.number}" for first, second in seated]
    alone = [samples for link in links for samples in measure_at_once([link], block, depth)]
    together: list[Samples] = []

    def rates() -> list[float]:
        together.extend(measure_at_once(links, block, depth))
        return [samples.bandwidth for samples in together[-len(links) :]]

    summary = spread(rates)
    fault = corrupt(label, names, [*alone, *together])
    if fault is not None:
        return fault
    lanes = [
        GpuPair(first, second, before.bandwidth, now.transports)
        for (first, second), before, now in zip(seated, alone, together[-len(links) :], strict=True)
    ]
    return judge_gpus(label, block, lanes, summary, scaling, disturbance(together))


def judge_gpus_together(run: Run, settings: Settings, cluster: Cluster, pairs: Launches, profile: Profile) -> Judgement:
    """Let all GPUs transfer at the same time, each with its nearest network cards, and judge whether one starves.

    :raises NotApplicableError: no GPU memory is requested, or an end has fewer than two GPUs.
    """
    kinds = {(link.backend, link.op, link.memory): None for link in run.links if "VRAM" in str(link.memory)}
    if not kinds:
        raise NotApplicableError("no GPU memory is requested: --nixl-memory has no VRAM")
    block, depth = max(settings.blocks), max(settings.depth)
    scaling = profile.machine.scaling if profile.machine is not None else None
    judgements: list[Judgement] = []
    for backend, op, memory in kinds:
        *ends, one_host = _seats(cluster, settings, memory)
        devices = pairs_of(len(ends[0]), len(ends[1]), one_host=one_host)
        if len(devices) < 2:
            raise NotApplicableError(_few(min(ends, key=len)))
        # Cards in UCX_NET_DEVICES are used as given. LIBFABRIC itself chooses cards by their position on the PCI bus.
        named = backend != "UCX" or UCX_CARDS in os.environ
        variables = [
            ({}, {}) if named else (ends[0][pair.initiator].variables(), ends[1][pair.target].variables())
            for pair in devices
        ]
        links = pairs.between_devices(backend, op, memory, devices, variables=variables)
        seated = [(ends[0][pair.initiator], ends[1][pair.target]) for pair in devices]
        judgements.append(measure_gpus(f"{backend} {op} {memory}", links, seated, block, depth, scaling))
    return replace(most_severe(judgements), reason="; ".join(judgement.reason for judgement in judgements))


def _seats(cluster: Cluster, settings: Settings, memory: MemoryPair) -> tuple[list[GpuEnd], list[GpuEnd], bool]:
    """Return the GPUs with their positions for both ends, and whether both ends are on one host."""
    hosts = [HostDevices.of(plain) for plain in cluster.ask("devices")] or [HostDevices.here()] * 2
    workers: list[Worker] = []
    try:
        for host in cluster.hosts[:2]:
            workers.append(host.start("gpus", {}, settings.timeout, settings.start_timeout))
        initiators, targets = (
            seats(gpus(worker, memory), hosts[worker.rank].gpus, hosts[worker.rank].rdma) for worker in workers
        )
        return initiators, targets, len({worker.versions["host"] for worker in workers}) == 1
    finally:
        for worker in workers:
            worker.kill()


def _few(ends: list[GpuEnd]) -> str:
    """Return a sentence about why there are fewer than two GPUs."""
    reason = visible(read_gpus(FactsRoot()).gpus, os.environ).why
    return f"only one GPU is visible, {ends[0].gpu.name} {ends[0].gpu.pci}, but this check needs two" + (
        f" ({reason})" if reason else ""
    )
