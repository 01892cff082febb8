# SPDX-License-Identifier: Apache-2.0
"""All GPUs of a rank at one time: which are paired, and how what they move is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.host.gpu import GpuFacts
from pytest_nixl.host.gpu_nic_affinity import FAR, GpuNics, Placed, Topology
from pytest_nixl.host.rdma import RdmaDevice, network_cards
from pytest_nixl.judge.concurrent import ConcurrentRates, ConcurrentVerdict, corrupt, measure_at_once, spread
from pytest_nixl.measure.link import Link
from pytest_nixl.model.machine import card, is_network
from pytest_nixl.model.memory import DevicePair
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.gpus import LinkGpu

#: What tells UCX which network cards to use, each as ``name:port``.
UCX_CARDS = "UCX_NET_DEVICES"
REMEDY = (
    "measure that GPU alone by --nixl-devices; look at `nvidia-smi topo -m`, and at its PCIe link, its NVLinks and its "
    "network card"
)


def pairs_of(initiators: int, targets: int, *, one_host: bool) -> list[DevicePair]:
    """Return which GPU moves bytes to which: to that of the same number there, or, on one host, to the next one.

    Those that have no other are left out; of a single GPU of one host there is no pair.
    """
    if one_host:
        count = min(initiators, targets)
        return [DevicePair(number, (number + 1) % count) for number in range(count)] if count > 1 else []
    return [DevicePair(number, number) for number in range(min(initiators, targets))]


@dataclass(frozen=True)
class GpuEnd:
    """A GPU, and the network cards nearest to it.

    :param near: None: where it hangs on the bus is not known.
    """

    gpu: LinkGpu
    near: GpuNics | None
    node: str = ""

    @property
    def own(self) -> tuple[str, ...]:
        """The network cards that fall to it when all GPUs are used; none where every one is far."""
        return self.near.own if self.near is not None else ()

    def variables(self) -> dict[str, str]:
        """Return what makes UCX use those in a worker of this GPU; nothing where there is none."""
        return {UCX_CARDS: ",".join(f"{name}:1" for name in self.own)} if self.own else {}

    def __str__(self) -> str:
        return f"GPU {self.gpu.number} ({', '.join(filter(None, [self.gpu.pci, self.node]))})"


def seats(gpus: Sequence[LinkGpu], known: Sequence[GpuFacts], cards: Sequence[RdmaDevice]) -> list[GpuEnd]:
    """Return where each of a worker's GPUs hangs, and its share of the network cards that can be used.

    :param gpus: those that the worker sees, as it counts them.
    :param known: all of the host, with their places on the bus.
    :param cards: the RDMA devices of the host.
    """
    places = {gpu.pci: gpu for gpu in known if gpu.pci and gpu.path}
    placed = [Placed(str(gpu.number), gpu.pci, places[gpu.pci].path, places[gpu.pci].numa)
              for gpu in gpus if gpu.pci in places]  # fmt: skip
    usable = [Placed(nic.name, nic.pci, nic.path, nic.numa) for nic in network_cards(cards)
              if nic.active and nic.uverbs and not nic.closed and nic.path]  # fmt: skip
    near = {each.gpu: each for each in Topology(tuple(placed), tuple(usable)).nearest()}
    nodes = {int(each.name): each.node for each in placed}
    return [GpuEnd(gpu, near.get(gpu.number), nodes.get(gpu.number, "")) for gpu in gpus]


@dataclass(frozen=True)
class GpuPair:
    """One pair of GPUs: what it moves alone and beside the others, in bytes per second, and over what.

    :param initiator: where the initiator's GPU is; ``target`` is that of the other end.
    :param transports: what carried the bytes as the backend reports it.
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
        """The network cards that carried bytes of it and are not among those nearest to the initiator's GPU."""
        near = self.initiator.near
        if near is None or near.how == FAR or not near.devices:
            return ()
        used = [card(each) for each in self.transports if is_network(each)]
        return tuple(dict.fromkeys(name for name in used if name and name not in near.devices))


def judge_gpus(
    what: str, block: int, lanes: Sequence[GpuPair], found: ConcurrentRates, scaling: float | None
) -> ConcurrentVerdict:
    """Judge what GPUs moved together.

    :param what: the kind of link, in words.
    :param found: what each lane got beside the others.
    :param scaling: the share of what they move one by one that all must move together; None: the profile has none.
    """
    efficiency = found.total / sum(lane.alone for lane in lanes)
    slowest = lanes[found.slowest]
    each = ", ".join(
        f"{lane.initiator.gpu.number}: {gigabytes(rate)}" for lane, rate in zip(lanes, found.rates, strict=True)
    )
    words = (
        f"{what} of {format_size(block)}, {len(lanes)} GPUs at once: {gigabytes(found.total)} GB/s together, "
        f"{efficiency:.0%} of what they move one by one; by GPU {each} GB/s; the slowest is {slowest}, with "
        f"{gigabytes(found.rates[found.slowest])} of the {gigabytes(slowest.alone)} GB/s that it moves alone"
    )
    if found.starving is not None:
        return ConcurrentVerdict(Verdict.FAIL, f"{words}: it starves beside the others", REMEDY)
    if scaling is not None and efficiency < scaling:
        return ConcurrentVerdict(Verdict.FAIL, f"{words}: the profile wants {scaling:.0%}", REMEDY)
    strayed = [f"GPU {lane.initiator.gpu.number} by {', '.join(lane.astray)}" for lane in lanes if lane.astray]
    if strayed:
        remedy = f"let the backend choose by the bus: unset what names devices ({UCX_CARDS}, FI_EFA_IFACE)"
        return ConcurrentVerdict(
            Verdict.WARN, f"{words}; not by the network cards nearest to it: {'; '.join(strayed)}", remedy
        )
    if scaling is None:
        remedy = "put `scaling` under [machine] of the profile: the share that a good machine of yours has"
        return ConcurrentVerdict(Verdict.NO_EXPECTATION, f"{words}; the profile does not say what is good", remedy)
    return ConcurrentVerdict(Verdict.PASS, words)


def measure_gpus(
    what: str,
    links: Sequence[Link],
    seated: Sequence[tuple[GpuEnd, GpuEnd]],
    block: int,
    depth: int,
    scaling: float | None,
) -> ConcurrentVerdict:
    """Measure one row of each link alone, one after the other, then of all at the same time, and judge that.

    :param what: the kind of link, in words.
    :param seated: the GPUs of each link's two ends.
    :param scaling: as :func:`judge_gpus`.
    """
    names = [f"{one} to GPU {other.gpu.number}" for one, other in seated]
    alone = [measure_at_once([link], block, depth)[0] for link in links]
    beside: list[Samples] = []

    def rates() -> list[float]:
        beside[:] = measure_at_once(links, block, depth)
        moved.extend(beside)
        return [each.bandwidth for each in beside]

    moved = list(alone)
    found = spread(rates)
    fault = corrupt(what, [names[number % len(names)] for number in range(len(moved))], moved)
    if fault is not None:
        return fault
    lanes = [GpuPair(one, other, before.bandwidth, now.transports)
             for (one, other), before, now in zip(seated, alone, beside, strict=True)]  # fmt: skip
    return judge_gpus(what, block, lanes, found, scaling)
