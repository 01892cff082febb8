# SPDX-License-Identifier: Apache-2.0
"""Judge the RDMA devices of a host, or of two hosts, by what each of them moves alone: name one that is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from pytest_nixl.core.units import gigabytes
from pytest_nixl.core.words import named
from pytest_nixl.judge.concurrent import QUIET, STARVED, TRIES
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.verdicts import Judgement, Verdict


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


def nic_pairs(ones: Sequence[Nic], others: Sequence[Nic]) -> list[NicPair]:
    """Return pairs with every device of two hosts, by their order; devices of the shorter list are used again."""
    return [NicPair(ones[number % len(ones)], others[number % len(others)])
            for number in range(max(len(ones), len(others)))]  # fmt: skip


class NicTrial:
    """The rows of some pairs of devices, each measured alone, and what follows from them.

    :param what: the rows in words, such as ``UCX DRAM:DRAM of 64KiB``.
    :param pairs: two or more pairs.
    """

    def __init__(self, what: str, pairs: Sequence[NicPair], measure: Measure) -> None:
        self._what, self._pairs, self._ask = what, pairs, measure
        self._contention = 0.0

    def judge(self) -> Judgement:
        """Measure each pair, measure again what looks bad, and return the verdict with the bad devices."""
        rows = {pair: self._measure(pair) for pair in self._pairs}
        wrong = [f"{pair}: {row.corruption}" for pair, row in rows.items() if row.corruption]
        if wrong:
            return Judgement(Verdict.CORRUPT, f"{self._what}: {named(wrong)}", _remedy(self._pairs[0]))
        elsewhere = {row.elsewhere for row in rows.values()} - {""}
        if elsewhere:
            return Judgement(
                Verdict.NOT_APPLICABLE,
                f"{self._what}: the bytes went over {named(sorted(elsewhere))}, and not over the chosen RDMA device",
                "unset UCX_TLS, or let it allow only transports of RDMA devices, such as UCX_TLS=rc,ud,self,cuda_copy",
            )
        broken = {pair: row for pair, row in rows.items() if row.error}
        if len(broken) == len(rows):
            first = next(iter(rows.values()))
            return Judgement(
                Verdict.FAIL,
                f"{self._what}: none of {len(rows)} RDMA devices moved a byte, the first with: {first.error}",
                "run `pytest-nixl doctor`: its check ucx-uses-rdma names why UCX cannot use an RDMA device",
            )
        sentences = [self._name_broken(pair, row, self._best(rows, pair)) for pair, row in broken.items()]
        sentences += [sentence for op in next(row.rates for row in rows.values() if row.rates)
                 for sentence in self._slow(op, rows)]  # fmt: skip
        if not sentences:
            return Judgement(Verdict.PASS, self._rates(rows))
        bad = next(iter(broken), self._pairs[0])
        if not broken and self._contention > DISTURBED_CORES:
            used = f"other processes used up to {self._contention:.1f} of the cores that a row needs"
            return Judgement(Verdict.INCONCLUSIVE, f"{self._what}: {'; '.join(sentences)}, but {used}", QUIET)
        return Judgement(Verdict.FAIL, f"{self._what}: {'; '.join(sentences)}", _remedy(bad))

    def _measure(self, pair: NicPair) -> NicRow:
        row = self._ask(pair)
        self._contention = max(self._contention, row.contention)
        return row

    def _best(self, rows: Mapping[NicPair, NicRow], pair: NicPair) -> NicPair:
        """Return the fastest pair, of the same kind as ``pair`` if there is one."""
        good = [each for each, row in rows.items() if not row.error]
        return max(good, key=lambda each: (each.kind == pair.kind, max(rows[each].rates.values())))

    def _name_broken(self, pair: NicPair, row: NicRow, good: NicPair) -> str:
        def bad(crossed: NicPair) -> bool:
            return bool(self._measure(crossed).error)

        return f"{self._culprit(pair, good, bad)} fails where the others do not: {row.error}"

    def _slow(self, op: str, rows: Mapping[NicPair, NicRow]) -> Iterator[str]:
        for pair, row in rows.items():
            other_rates = {nic_pair: other.rates[op] for nic_pair, other in rows.items()
                      if nic_pair is not pair and nic_pair.kind == pair.kind and op in other.rates}  # fmt: skip
            if op not in row.rates or not other_rates or row.rates[op] >= STARVED * median(other_rates.values()):
                continue
            middle = median_low(other_rates.values())
            good = next(nic_pair for nic_pair, rate in other_rates.items() if rate == middle)
            yield from self._again(op, pair, row, good, rows[good])

    def _again(self, op: str, pair: NicPair, row: NicRow, good: NicPair, beside: NicRow) -> Iterator[str]:
        """Yield the words about a slow pair, if it is also slow when it is measured again in turn with another."""
        for _ in range(TRIES - 1):
            row, beside = self._measure(pair), self._measure(good)
            if row.error:
                yield self._name_broken(pair, row, good)
            if row.error or beside.error or not _starves(op, row, beside):
                return

        def bad(crossed: NicPair) -> bool:
            row = self._measure(crossed)
            return not row.error and _starves(op, row, beside)

        yield (
            f"{self._culprit(pair, good, bad)} moves {gigabytes(row.rates[op])} GB/s ({op}), less than half of the "
            f"{gigabytes(beside.rates[op])} GB/s of {good}, in {TRIES} of {TRIES} measurements"
        )

    def _culprit(self, pair: NicPair, good: NicPair, bad: Callable[[NicPair], bool]) -> str:
        """Return the bad device of a pair: the one that is also bad with a device of a good pair."""
        if pair.initiator == pair.target:
            return str(pair)
        one, other = bad(NicPair(pair.initiator, good.target)), bad(NicPair(good.initiator, pair.target))
        if one == other:  # such as rails that are not connected with each other
            return f"{pair} (which of the two is not known)"
        return str(pair.initiator if one else pair.target)

    def _rates(self, rows: Mapping[NicPair, NicRow]) -> str:
        told = []
        for op in next(iter(rows.values())).rates:
            rates = {pair: row.rates[op] for pair, row in rows.items()}
            least, most = (how(rates, key=rates.__getitem__) for how in (min, max))
            told.append(f"{op} {gigabytes(rates[least])} ({least.initiator.device}) to "
                        f"{gigabytes(rates[most])} GB/s ({most.initiator.device})")  # fmt: skip
        return f"{self._what}, each of {len(rows)} RDMA devices alone: {', '.join(told)}"


def _starves(op: str, row: NicRow, beside: NicRow) -> bool:
    return op not in row.rates or row.rates[op] < STARVED * beside.rates[op]


def _remedy(pair: NicPair) -> str:
    device = pair.initiator.device.replace(":", "/")
    return (
        f"leave the device out of UCX_NET_DEVICES; check its cable, transceiver, switch port and PCIe link (`rdma "
        f"statistic show link {device}`, `lspci -vv`), and run `pytest suites/bandwidth/test_nics.py` again"
    )
