# SPDX-License-Identifier: Apache-2.0
"""The check ``each-nic``: does each RDMA device move bytes alone, and as many as the others?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median, median_low

from pytest_nixl.checks.bandwidth.gpus_together import GpuEnd, seats
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.sentences import named
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.host.devices import UCX_CARDS, HostDevices
from pytest_nixl.host.rdma import network_cards, read_rdma
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.concurrent import MOST_PAIRS, QUIET, STARVED, TRIES, measure_at_once
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe
from pytest_nixl.nixl.gpus import gpus
from pytest_nixl.processes.hosts import Host
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run


@dataclass(frozen=True)
class Nic:
    """An active port of an RDMA device that UCX may use.

    :param rank: the rank on whose host it is.
    :param host: the name of that host.
    :param device: its name in UCX_NET_DEVICES, such as ``mlx5_0:1``.
    :param kind: its driver's family and its line rate: only devices of the same kind are compared.
    :param gpu: the number in CUDA of the GPU whose memory it moves; 0 for host memory.
    """

    rank: int
    host: str
    device: str
    kind: tuple[str, float | None]
    gpu: int = 0

    def __str__(self) -> str:
        return f"{self.device} of {self.host} (rank {self.rank})"


@dataclass(frozen=True)
class NicPair:
    """The devices that bytes leave and reach: one of each of two hosts, or one device twice."""

    initiator: Nic
    target: Nic

    @property
    def kind(self) -> object:
        """What is the same for the pairs with which it is compared."""
        return self.initiator.kind, self.target.kind

    def __str__(self) -> str:
        return str(self.initiator) if self.initiator == self.target else f"{self.initiator} to {self.target}"


@dataclass(frozen=True)
class NicRow:
    """What the devices of a pair moved.

    :param rates: bytes per second, by operation.
    :param error: why they moved nothing.
    :param corruption: which bytes were wrong.
    :param elsewhere: the transports that carried the bytes, if none of them is of this device.
    :param contention: the cores of the row that other processes used.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    corruption: str = ""
    elsewhere: str = ""
    contention: float = 0.0


#: Measures what a pair of devices moves.
Measure = Callable[[NicPair], NicRow]
#: A bad device, and a sentence about it.
_Fault = tuple[Nic, str]


def nic_pairs(initiators: Sequence[Nic], targets: Sequence[Nic]) -> list[NicPair]:
    """Return pairs with every device of two hosts, by their order; devices of the shorter list are used again."""
    return [
        NicPair(initiators[number % len(initiators)], targets[number % len(targets)])
        for number in range(max(len(initiators), len(targets)))
    ]


class NicTrial:
    """The rows of some pairs of devices, each measured alone, and what follows from them.

    :param label: the rows in words, such as ``UCX DRAM:DRAM of 64KiB``.
    :param pairs: two or more pairs.
    """

    def __init__(self, label: str, pairs: Sequence[NicPair], measure: Measure) -> None:
        self._label, self._pairs, self._ask = label, pairs, measure
        self._contention = 0.0

    def judge(self) -> Judgement:
        """Measure each pair, measure again what looks bad, and return the verdict with the bad devices."""
        rows = {pair: self._measure(pair) for pair in self._pairs}
        wrong = {pair: f"{pair}: {row.corruption}" for pair, row in rows.items() if row.corruption}
        if wrong:
            reason = f"{self._label}: {named(wrong.values())}"
            return Judgement(Verdict.CORRUPT, reason, _remedy(next(iter(wrong)).initiator))
        elsewhere = {row.elsewhere for row in rows.values()} - {""}
        if elsewhere:
            return Judgement(
                Verdict.NOT_APPLICABLE,
                f"{self._label}: the bytes went over {named(sorted(elsewhere))}, and not over the chosen RDMA device",
                "unset UCX_TLS, or let it allow only transports of RDMA devices, such as UCX_TLS=rc,ud,self,cuda_copy",
            )
        broken = {pair: row for pair, row in rows.items() if row.error}
        if len(broken) == len(rows):
            first = next(iter(rows.values()))
            return Judgement(
                Verdict.FAIL,
                f"{self._label}: none of {len(rows)} RDMA devices moved a byte, the first with: {first.error}",
                "run `pytest-nixl doctor`: its check ucx-uses-rdma names why UCX cannot use an RDMA device",
            )
        faults = [self._name_broken(pair, row, self._best(rows, pair)) for pair, row in broken.items()]
        faults += [
            fault for op in next(row.rates for row in rows.values() if row.rates) for fault in self._slow(op, rows)
        ]
        if not faults:
            return Judgement(Verdict.PASS, self._rates(rows))
        reason = f"{self._label}: {'; '.join(sentence for _, sentence in faults)}"
        if not broken and self._contention > DISTURBED_CORES:
            used = f"other processes used up to {self._contention:.1f} of the cores that a row needs"
            return Judgement(Verdict.INCONCLUSIVE, f"{reason}, but {used}", QUIET)
        return Judgement(Verdict.FAIL, reason, _remedy(faults[0][0]))

    def _measure(self, pair: NicPair) -> NicRow:
        row = self._ask(pair)
        self._contention = max(self._contention, row.contention)
        return row

    def _best(self, rows: Mapping[NicPair, NicRow], pair: NicPair) -> NicPair:
        """Return the fastest pair, of the same kind as ``pair`` if there is one."""
        good = [nics for nics, row in rows.items() if not row.error]
        return max(good, key=lambda nics: (nics.kind == pair.kind, max(rows[nics].rates.values())))

    def _name_broken(self, pair: NicPair, row: NicRow, good: NicPair) -> _Fault:
        def bad(crossed: NicPair) -> bool:
            return bool(self._measure(crossed).error)

        nic, name = self._culprit(pair, good, bad)
        return nic, f"{name} fails where the others do not: {row.error}"

    def _slow(self, op: str, rows: Mapping[NicPair, NicRow]) -> Iterator[_Fault]:
        for pair, row in rows.items():
            other_rates = {
                nic_pair: other.rates[op]
                for nic_pair, other in rows.items()
                if nic_pair is not pair and nic_pair.kind == pair.kind and op in other.rates
            }
            if op not in row.rates or not other_rates or row.rates[op] >= STARVED * median(other_rates.values()):
                continue
            middle = median_low(other_rates.values())
            good = next(nic_pair for nic_pair, rate in other_rates.items() if rate == middle)
            yield from self._again(op, pair, row, good, rows[good])

    def _again(self, op: str, pair: NicPair, row: NicRow, good: NicPair, good_row: NicRow) -> Iterator[_Fault]:
        """Yield the fault of a slow pair, if it is also slow when it is measured again in turn with another."""
        for _ in range(TRIES - 1):
            row, good_row = self._measure(pair), self._measure(good)
            if row.error:
                yield self._name_broken(pair, row, good)
            if row.error or good_row.error or not _starves(op, row, good_row):
                return

        def bad(crossed: NicPair) -> bool:
            row = self._measure(crossed)
            return not row.error and _starves(op, row, good_row)

        nic, name = self._culprit(pair, good, bad)
        yield (
            nic,
            f"{name} moves {gigabytes(row.rates[op])} GB/s ({op}), less than half of the "
            f"{gigabytes(good_row.rates[op])} GB/s of {good}, in {TRIES} of {TRIES} measurements",
        )

    def _culprit(self, pair: NicPair, good: NicPair, bad: Callable[[NicPair], bool]) -> tuple[Nic, str]:
        """Return the bad device of a pair, the one that is also bad with a device of a good pair, and its name."""
        if pair.initiator == pair.target:
            return pair.initiator, str(pair)
        initiator_fails, other = bad(NicPair(pair.initiator, good.target)), bad(NicPair(good.initiator, pair.target))
        if initiator_fails == other:  # such as rails that are not connected with each other
            return pair.initiator, f"{pair} (which of the two is not known)"
        culprit = pair.initiator if initiator_fails else pair.target
        return culprit, str(culprit)

    def _rates(self, rows: Mapping[NicPair, NicRow]) -> str:
        descriptions = []
        for op in next(iter(rows.values())).rates:
            rates = {pair: row.rates[op] for pair, row in rows.items()}
            least, most = (how(rates, key=rates.__getitem__) for how in (min, max))
            descriptions.append(
                f"{op} {gigabytes(rates[least])} ({least.initiator.device}) to "
                f"{gigabytes(rates[most])} GB/s ({most.initiator.device})"
            )
        return f"{self._label}, each of {len(rows)} RDMA devices alone: {', '.join(descriptions)}"


def _starves(op: str, row: NicRow, good_row: NicRow) -> bool:
    return op not in row.rates or row.rates[op] < STARVED * good_row.rates[op]


def _remedy(nic: Nic) -> str:
    device = nic.device.replace(":", "/")
    return (
        f"leave the device out of UCX_NET_DEVICES; check its cable, transceiver, switch port and PCIe link (`rdma "
        f"statistic show link {device}`, `lspci -vv`), and run `pytest suites/bandwidth/test_nics.py` again"
    )


_UCX, _TLS = "UCX", "UCX_TLS"
#: UCX's transports over RDMA devices, and those with which it recognises GPU memory and copies it in a process.
_OF_NICS = "ib,cuda_copy,gdr_copy"


def judge_each_nic(run: Run, settings: Settings, cluster: Cluster) -> Judgement:
    """Measure a short row over each RDMA device of every host, and judge whether one is bad beside the others.

    :raises NotApplicableError: UCX is not requested, or a host has fewer than two RDMA devices that UCX may use.
    """
    links = [link for link in run.links if link.backend == _UCX and not link.memory.stored]
    if not links:
        raise NotApplicableError("UCX is not requested, and only UCX takes a device from UCX_NET_DEVICES")
    if not network_cards(read_rdma(FactsRoot())):
        raise NotApplicableError("this host has no RDMA device")
    trial = _Rows(settings, cluster, [(link.op, link.memory) for link in links])
    with ThreadPoolExecutor(min(len(trial.hosts), MOST_PAIRS)) as pool:
        judgements = list(pool.map(trial.judge, trial.hosts))
    reasons = "; ".join(judgement.reason for judgement in judgements)
    worst = most_severe(judgements)
    if worst.verdict is Verdict.PASS:  # a host whose devices could not be measured has not passed
        worst = next((judgement for judgement in judgements if judgement.verdict is Verdict.NOT_APPLICABLE), worst)
    return replace(worst, reason=f"{reasons}{trial.left_out()}")


class _Rows:
    """The rows over each device.

    :param rows: the operations and memory types of the requested links.
    """

    def __init__(self, settings: Settings, cluster: Cluster, rows: Sequence[tuple[str, MemoryPair]]) -> None:
        self._cluster = cluster
        hosts = [HostDevices.of(plain) for plain in cluster.ask("devices")] or [HostDevices.here()]
        block = max(settings.blocks)
        self._settings = replace(settings, blocks=(block,), batch=(1,), duration=0.0)
        # GPU memory, if it is requested: a device and its GPU can be bad together.
        self._memory = max((memory for _, memory in rows), key=lambda memory: str(memory).count("VRAM"))
        self._ops = tuple(dict.fromkeys(op for op, memory in rows if memory == self._memory))
        self._block = block
        self._left_out: dict[str, None] = {}
        # One rank for each host: those of one host would share its devices.
        ranks = {host.name or str(rank): rank for rank, host in reversed(list(enumerate(hosts)))}
        first = sorted(ranks.values())
        self._one_host = len(first) == 1
        self._nics = {rank: self._usable(rank, hosts[rank]) for rank in first}
        if max(map(len, self._nics.values())) < 2 or not all(self._nics.values()):
            raise NotApplicableError(f"{self._few()}{self.left_out()}")
        #: The ranks of each two hosts that are measured with each other. An odd host takes the one before it.
        self.hosts = (
            [(0, 0)]
            if self._one_host
            else [
                (name, first[number + 1] if number + 1 < len(first) else first[number - 1])
                for number, name in enumerate(first)
                if number % 2 == 0
            ]
        )

    def left_out(self) -> str:
        """Return a clause about the devices that are not measured; empty: there are none."""
        return f"; left out: {named(self._left_out)}" if self._left_out else ""

    def judge(self, ranks: tuple[int, int]) -> Judgement:
        """Measure and judge the devices of two hosts, or of one."""
        initiators, targets = (self._nics[rank] for rank in ranks)
        where = "" if self._one_host else f" from {initiators[0].host} to {targets[0].host}"
        subject = f"UCX {self._memory} of {format_size(self._block)}{where}"
        measure = NicLinks(self._cluster.hosts, self._settings, self._ops, self._memory, one_host=self._one_host)
        try:
            return NicTrial(subject, nic_pairs(initiators, targets), measure).judge()
        finally:
            measure.close()

    def _usable(self, rank: int, host: HostDevices) -> list[Nic]:
        """Return the devices of a host that UCX may use, each with its nearest GPU if GPU memory is moved."""
        gpu_of = self._gpus(rank, host) if "VRAM" in str(self._memory) else None
        usable = []
        for nic, reason in ports(host, rank):
            name = nic.device.partition(":")[0]
            if not reason and gpu_of is not None and name not in gpu_of:
                reason = "near no GPU"
            if reason:
                self._left_out[f"{nic.device} of {nic.host} ({reason})"] = None
            else:
                usable.append(replace(nic, gpu=gpu_of[name] if gpu_of is not None else 0))
        return usable

    def _gpus(self, rank: int, host: HostDevices) -> dict[str, int]:
        """Return by device the number of the nearest GPU."""
        worker = self._cluster.hosts[rank].start("gpus", {}, self._settings.timeout, self._settings.start_timeout)
        try:
            ends = seats(gpus(worker, self._memory), host.gpus, host.rdma)
        finally:
            worker.kill()
        return nearest_gpus(ends)

    def _few(self) -> str:
        hosts_with_few = [
            f"{nics[0].host} has {len(nics)} ({named(nic.device for nic in nics)})"
            for nics in self._nics.values()
            if nics
        ]
        return "there are no two RDMA devices of a host to compare" + (
            f": {named(hosts_with_few)}" if hosts_with_few else ""
        )


class NicLinks:
    """The rows over a pair of devices, each with workers of its own, which are created when a pair is measured.

    :param hosts: the hosts on which workers start, by rank.
    :param settings: those of the run, with the one block that is measured.
    :param one_host: whether both ends of each pair are on the host of ranks 0 and 1.
    """

    def __init__(
        self, hosts: Sequence[Host], settings: Settings, ops: Sequence[str], memory: MemoryPair, *, one_host: bool
    ) -> None:
        self._workers, self._settings = Launches(hosts, settings), settings
        self._ops, self._memory, self._one_host = ops, memory, one_host

    def __call__(self, pair: NicPair) -> NicRow:
        """Return what a pair of devices moves."""
        initiator, target = pair.initiator, pair.target
        ranks = (0, 1) if self._one_host else (initiator.rank, target.rank)
        variables = self._variables(initiator), self._variables(target)
        devices = DevicePair(initiator.gpu, target.gpu)
        rates, contention = {}, 0.0
        try:
            for op in self._ops:
                links = self._workers.between_devices(_UCX, op, self._memory, [devices], ranks, [variables])
                [samples] = measure_at_once(links, max(self._settings.blocks), max(self._settings.depth))
                if samples.corruption is not None:
                    return NicRow(corruption=str(samples.corruption))
                used = [transport.partition("/")[2] for transport in samples.transports]
                if used and initiator.device not in used:
                    return NicRow(elsewhere=", ".join(samples.transports))
                rates[op] = samples.bandwidth
                contention = max(contention, *samples.contention)
        except WorkerError as error:
            return NicRow(error=error.reason)
        return NicRow(rates, contention=contention)

    def close(self) -> None:
        """End all workers."""
        self._workers.close()

    def _variables(self, nic: Nic) -> Mapping[str, str]:
        # Between two processes of a host UCX prefers to copy.
        only = {_TLS: _OF_NICS} if self._one_host and _TLS not in os.environ else {}
        return {UCX_CARDS: nic.device, **only}


def ports(host: HostDevices, rank: int) -> Iterator[tuple[Nic, str]]:
    """Yield each port of a host's devices that move data between hosts, and why it is left out; empty: it is not.

    :param rank: the rank there that measures them.
    """
    names = host.chosen.lstrip("^").split(",")
    for device in network_cards(host.rdma):
        for port in device.ports:
            name, reason = f"{device.name}:{port.number}", ""
            listed = name in names or device.name in names
            if host.chosen not in ("", "all") and listed == host.chosen.startswith("^"):
                reason = f"{UCX_CARDS}={host.chosen}"
            elif port.state not in ("ACTIVE", ""):
                reason = f"its port is {port.state}"
            yield Nic(rank, host.name or f"rank {rank}", name, (device.kind, port.rate)), reason


def nearest_gpus(ends: Sequence[GpuEnd]) -> dict[str, int]:
    """Return by network card the number of its GPU: the one that it is assigned to, else one that it is nearest to."""
    near = [(end.gpu.number, end.near.devices, end.nics) for end in reversed(ends) if end.near is not None and end.nics]
    by_device = {name: gpu for gpu, devices, _ in near for name in devices}
    return by_device | {name: gpu for gpu, _, gpu_devices in near for name in gpu_devices}
