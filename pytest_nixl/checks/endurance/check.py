# SPDX-License-Identifier: Apache-2.0
"""What grows while an agent repeats the same work: memory, descriptors, threads, regions, keys and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

from pytest_nixl.core.strict import Number, check
from pytest_nixl.judge.figure_bounds import judge_figures
from pytest_nixl.judge.growth import Growth, Slope
from pytest_nixl.model.figure import FIGURE_KINDS, MOST_SAMPLES, UNITS, Bound, Figure
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent

#: The samples before the first that counts, and the least number of samples that count.
WARM_UP, SAMPLES = 4, 24
#: The least number of cycles between two samples, and the seconds that more of them may take at first.
_FEWEST, _SAMPLE_SECONDS = 3, 0.5
#: The most samples that are judged; of more, each second, third, … one.
_MOST = MOST_SAMPLES
#: A sample is taken at least this often in a run of a given duration, as a share of it.
_SHARE = 200
#: The most seconds of the cycles between two samples, as a share of the worker's deadline.
_DEADLINE_SHARE = 4
_AMOUNT = Number(0, 1e18)
#: The resources of a worker, by the end of the name of their figure.
RESOURCES = ("heap", "memory", "descriptors", "sockets", "threads", "shared-memory", "metadata")
#: A worker's answer; its C library may not tell of the heap.
_SAMPLE = {name if name != "heap" else "heap?": _AMOUNT for name in (*RESOURCES, "seconds", "reference")}
#: The anonymous memory by which a cycle of LIBFABRIC may grow besides: 8 KiB with each message were seen.
POOLS = 16384


@dataclass(frozen=True)
class CycleKind:
    """Work that an agent repeats.

    :param id: its name in figures, and in the worker.
    :param label: what is repeated, as a phrase.
    :param count: how many cycles there are between two samples, or fewer if each takes long.
    :param heap: the bytes in use by ``malloc`` by which a cycle may grow; ``memory``: those of anonymous memory.
    :param slowdown: how many times the first cycle the last one may take.
    :param kept_sockets: whether a finding says that sockets grow, so that their number has no default limit.
    :param kept_heap: the bytes in use by ``malloc`` that a finding allows a cycle of LIBFABRIC besides.
    """

    id: str
    label: str
    count: int
    heap: int = 512
    memory: int = 512
    slowdown: float = 3.0
    kept_sockets: bool = False
    kept_heap: int = 0

    @property
    def limits(self) -> tuple[Bound, ...]:
        """The default limits, as bounds of the figures of this cycle."""
        counts = {"descriptors": 0.1, "sockets": 0.1, "threads": 0.1, "shared-memory": 0.1, "etcd-keys": 0.02}
        if self.kept_sockets:
            del counts["sockets"]
        growths = {"heap": self.heap, "memory": self.memory, "metadata": 1, **counts}
        limits = {**{f"growth-{name}": limit for name, limit in growths.items()}, "slowdown": self.slowdown}
        source, labels = "docs/explanation/endurance.md", {"cycle": (self.id,)}
        more = {"growth-memory": self.memory + POOLS, "growth-heap": self.heap + self.kept_heap}
        libfabric = {**labels, "backend": ("LIBFABRIC",)}
        return (
            *(Bound(name, source, libfabric, at_most=limit, default=True) for name, limit in more.items()),
            *(Bound(name, source, labels, at_most=limit, default=True) for name, limit in limits.items()),
        )


#: The cycles. The page docs/explanation/endurance.md says why each has its limits.
CYCLES = {
    kind.id: kind
    for kind in (
        CycleKind("transfer", "a transfer with a notification", 150),
        # The finding NIXL-REMOVED-AGENT-KEEPS-SOCKETS: what belongs to each socket is kept, too.
        CycleKind("connection", "adding an agent, a transfer and its removal", 12, 4096, 8192, kept_sockets=True),
        CycleKind("registration", "a registration and a deregistration", 150),
        CycleKind("publication", "a publication to etcd and its removal", 12, memory=4096, slowdown=10.0),
        # The finding LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY.
        CycleKind(
            *("agent", "the creation, a transfer and the deletion of an agent", 3, 768, 16384),
            slowdown=10.0,
            kept_heap=2304,
        ),
    )
}
#: What UCX 1.23 leaves of each agent beside a GPU if the thread has no CUDA context: 18 times 32 B, with the header of
#: ``malloc`` 48 B each (docs/explanation/endurance.md).
HEAP_WITHOUT_CONTEXT = 18 * 48
#: More sockets a cycle than this: removed agents keep them.
KEPT_SOCKETS = 0.1


class Endurance:
    """An agent that repeats one cycle, and the samples that are taken meanwhile.

    :param agent: an agent in a worker of its own.
    :param duration: the least time in seconds that the cycles take.
    :param published: waits until the agent has published under a label, and returns the number of keys in etcd.
    """

    def __init__(
        self,
        agent: NixlAgent,
        kind: CycleKind,
        backend: str,
        duration: float,
        published: Callable[[str], int] | None = None,
    ) -> None:
        self.kind, self.backend = kind, backend
        self.cycles = 0
        self._agent, self._duration, self._published = agent, duration, published
        self._count = self._least = kind.count
        self._samples: list[dict[str, float]] = []
        self._places: list[float] = []
        self._timed: list[tuple[float, float]] = []

    def figures(self) -> tuple[Figure, ...]:
        """Repeat the cycles, and return the growth of each resource; a second call goes on where the first ended.

        :raises WorkerError: a step fails, the worker dies, or misses its deadline.
        """
        if not self._samples:
            self._count = _FEWEST
            for _ in range(WARM_UP):
                before = time.monotonic()
                self._sample()
                seconds_each = max(time.monotonic() - before, 1e-6) / self._count
                self._least = max(_FEWEST, min(self.kind.count, int(_SAMPLE_SECONDS / seconds_each)))
                self._count = self._least
            self._timed.clear()
        self._samples, self._places = [], []
        began = time.monotonic()
        while len(self._samples) < SAMPLES or time.monotonic() < began + self._duration:
            before = time.monotonic()
            self._sample()
            took = max(time.monotonic() - before, 1e-6)
            room = min(self._duration / _SHARE, self._agent.worker.timeout / _DEADLINE_SHARE)
            self._count = max(self._least, min(2 * self._count, int(self._count * room / took)))
        return self._growths()

    def describe(self) -> str:
        """Return by how much each resource grows with each cycle, with the interval, without those that do not."""
        grows = [
            f"{figure.name.removeprefix('growth-')} {growth_text(figure, slope.value)} "
            f"({growth_text(figure, slope.low)} to {growth_text(figure, slope.high)})"
            for figure, slope in self._slopes()
            if slope.low or slope.high
        ]
        growing = ", ".join(grows) or "nothing grows"
        return f"{self.cycles} times {self.kind.label}; growth with each (99 % interval): {growing}"

    def _sample(self) -> None:
        label = f"sampled-{self.cycles}" if self._published else ""
        began = time.monotonic()
        answer = self._agent.run(
            "pytest_nixl.checks.endurance.worker:repeat",
            cycle=self.kind.id,
            backend=self.backend,
            count=self._count,
            seconds=self._agent.worker.timeout / _DEADLINE_SHARE,
            label=label,
        )
        check(_SAMPLE, answer)
        sample = cast("dict[str, float]", answer)
        if self._published is not None:
            sample["etcd-keys"] = self._published(label)
            # The call only asks for a publication, so the time until etcd has the last one counts.
            sample["seconds"] = (time.monotonic() - began) / self._count
        self.cycles += self._count
        self._timed.append((sample["seconds"], sample["reference"]))
        self._samples.append(sample)
        self._places.append(self.cycles)

    def _slopes(self) -> list[tuple[Figure, Slope]]:
        step = -(-len(self._samples) // _MOST)
        samples, places = self._samples[::step], self._places[::step]
        slopes = []
        for name in (*RESOURCES, "etcd-keys"):
            if all(name in sample for sample in samples):
                values = [sample[name] for sample in samples]
                slope = Slope.of(values, places)
                figure = self._figure(f"growth-{name}", max(0.0, slope.low))
                slopes.append((replace(figure, samples=tuple(zip(places, values, strict=True))), slope))
        return slopes

    def _growths(self) -> tuple[Figure, ...]:
        # Whether cycles become slower shows only against the first ones, so all samples count here.
        timed = self._timed[:: -(-len(self._timed) // _MOST)]
        times, references = ([pair[side] for pair in timed] for side in (0, 1))
        labels = {"backend": self.backend, "cycle": self.kind.id}
        slower = self._figure("slowdown", max(1.0, Growth.of([times], [references]).least_factor))
        usual = Figure.of("cycle-time", median(times), labels, tuple(times))
        return (usual, *(figure for figure, _ in self._slopes()), slower)

    def _figure(self, name: str, value: float) -> Figure:
        return Figure.of(name, value, {"backend": self.backend, "cycle": self.kind.id})


def growth_text(figure: Figure, value: float) -> str:
    """Return a growth with its sign and unit."""
    text = UNITS[FIGURE_KINDS[figure.name].unit.name].show(abs(value))
    return f"{'-' if value < 0 else '+'}{text}"


def endure(endurance: Endurance, bounds: Sequence[Bound]) -> tuple[Figure, ...]:
    """Repeat the cycles, and return the growth of each resource.

    If something grows beyond its limit, the cycles are repeated, and the lesser growth counts: a leak goes on, while a
    pool that was filled, or another process that began to work, does not count twice.

    :param bounds: those of the profile; the default limits of the cycle apply to the other figures.
    """
    figures = endurance.figures()
    if judge_figures(figures, (*bounds, *endurance.kind.limits)).verdict is Verdict.PASS:
        return figures
    return tuple(min(pair, key=lambda figure: figure.value) for pair in zip(figures, endurance.figures(), strict=True))


def judge_endurance(judged: Judgement, endurance: Endurance) -> Judgement:
    """Return the verdict on the figures of an endurance check, with what was repeated in its reason."""
    if judged.verdict is Verdict.PASS:
        return Judgement(Verdict.PASS, endurance.describe())
    return Judgement(judged.verdict, f"{judged.reason}; {endurance.describe()}", judged.remedy)


def kept_sockets(figures: Sequence[Figure]) -> bool:
    """Return whether the number of sockets grows with each cycle."""
    return any(figure.name == "growth-sockets" and figure.value > KEPT_SOCKETS for figure in figures)


def kept_memory(figures: Sequence[Figure]) -> bool:
    """Return whether the bytes in use by ``malloc`` grow with each agent by more than with a healthy backend."""
    return any(figure.name == "growth-heap" and figure.value > CYCLES["agent"].heap for figure in figures)
