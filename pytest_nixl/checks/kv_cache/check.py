# SPDX-License-Identifier: Apache-2.0
"""The check ``kv-requests``: requests for the blocks of a KV cache, as engines make them, are right."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.link import KvLink, KvTraffic
from pytest_nixl.checks.kv_cache.samples import STEPS, KvSamples
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory, in_bytes
from pytest_nixl.judge.row import judge, name_losses
from pytest_nixl.measure.interleaved import take_turns
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.kv_cache import KV_MODELS, KvModel, KvPlan, format_tp
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.nixl_releases import takes_strided_descriptors
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey, Variant
from pytest_nixl.model.samples import Samples, percentile
from pytest_nixl.model.settings import MOST_LAUNCHES, Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import Host, LocalHost
from pytest_nixl.session.benchmark import versions_of


@dataclass(frozen=True)
class KvRequestKind:
    """What one test of the suite measures.

    :param ranks: the ranks of initiator and target.
    :param method: how the blocks lie and how the transfer is made, such as ``scattered-prepped``.
    :param plan: how many blocks of how many bytes.
    :param devices: the GPUs that were requested by number; None: none were, or there is no GPU memory.
    :param requests: the number of requests in flight.
    :param rate: requests that start in each second; None: each starts when one is over.
    :param settings: what else differs from the default and is part of the key: how the agents are created.
    :param agent_options: how the agents are created.
    """

    backend: str
    op: str
    memory: MemoryPair
    ranks: tuple[int, int]
    method: str
    plan: KvPlan
    devices: DevicePair | None = None
    requests: int = 1
    rate: float | None = None
    settings: Variant = ()
    agent_options: AgentOptions = AgentOptions()  # noqa: RUF009 - frozen

    @property
    def key(self) -> RowKey:
        """The key of the row. Its block is what one descriptor moves, and its batch the descriptors of a request."""
        plan = self.plan
        variant = {"kv": self.method, "model": _model_name(plan.model), "tokens": str(plan.tokens)} | dict(
            self.settings
        )
        variant |= {"tp": format_tp(plan.tp)} if plan.tp != (1, 1) else {}
        variant |= {"requests": str(self.requests)} if self.requests != 1 else {}
        variant |= {"rate": f"{self.rate:.9g}"} if self.rate is not None else {}
        return RowKey(
            self.backend,
            self.op,
            self.memory,
            plan.piece_bytes,
            plan.descriptors,
            1,
            self.ranks,
            self.devices,
            tuple(sorted(variant.items())),
        )

    def __str__(self) -> str:
        ranks = "" if self.ranks == (0, 1) else f"-{self.ranks[0]}:{self.ranks[1]}"
        settings = "".join(f"-{name}={value}" for name, value in self.settings)
        return f"{self.backend}-{self.op}-{self.memory}{ranks}-{self.method}{settings}"


def _model_name(model: KvModel) -> str:
    """Return a name for a row key: of a ``config.json``, whose path says nothing on another machine, its shape."""
    if KV_MODELS.get(model.name) is model:
        return model.name
    heads = "mla" if model.mla else f"{model.kv_heads}heads"
    return f"{model.layers}layers-{heads}-{model.head_dim}"


#: A cache has this many times the blocks of one request, so that the blocks of a request are scattered over it.
POOL = 2
#: Seconds to prepare the descriptors of both caches from which on the result says so. A million takes about two.
_LONG_PREPARATION = 1.0
#: The ways of the check ``kv-requests``: scattered blocks, as engines ask for them, and neighbouring blocks, which
#: NIXL can merge.
STANDARD_WAYS = {
    "scattered-prepped": (BlockOrder.SCATTERED, KvMethod.PREPPED, True),
    "contiguous-merged": (BlockOrder.CONTIGUOUS, KvMethod.PREPPED, True),
}
#: The ways of the check ``kv-requests-compared``: with strided descriptors, with blocks that are sent several times,
#: without merging, and without prepared descriptors.
EXTENDED_WAYS = {
    "scattered-strided": (BlockOrder.SCATTERED, KvMethod.STRIDED, True),
    "repeated-prepped": (BlockOrder.REPEATED, KvMethod.PREPPED, True),
    "contiguous-unmerged": (BlockOrder.CONTIGUOUS, KvMethod.PREPPED, False),
    "contiguous-initialized": (BlockOrder.CONTIGUOUS, KvMethod.INITIALIZED, True),
    "scattered-unmerged": (BlockOrder.SCATTERED, KvMethod.PREPPED, False),
    "scattered-initialized": (BlockOrder.SCATTERED, KvMethod.INITIALIZED, True),
}
WAYS = {**STANDARD_WAYS, **EXTENDED_WAYS}


def layout_of(plan: KvPlan, op: str, requests: int = 1) -> KvLayout:
    """Return the cache of one rank; it has as many bytes on both sides.

    :param requests: the number of requests in flight, each of which has a range of the cache.
    """
    pieces = plan.pieces_of(op)
    blocks = requests * POOL * plan.blocks * max(pieces)
    tensors = plan.layers * plan.tensors_per_layer
    return KvLayout(tensors, blocks, plan.piece_bytes, plan.tensors_per_layer, pieces, requests)


class KvLaunches:
    """Two workers with their caches for each pair of ranks, backend and memory, started when they are first needed.

    Only the workers of the latest launch are alive, so that only two caches use memory.

    :param hosts: the hosts by rank.
    """

    def __init__(self, hosts: Sequence[Host], settings: Settings) -> None:
        self._hosts, self._settings = hosts, settings
        self._kind: tuple[str, MemoryPair, tuple[int, int], int, AgentOptions] | None = None
        self._launched: Launch | None = None
        self._link: KvLink | None = None

    def measure(self, kind: KvRequestKind) -> KvSamples:
        """Measure the requests of one kind in one launch.

        :raises NixlPluginError: the caches do not fit into the memory of this host.
        :raises NotApplicableError: an end does not have this memory, or this NIXL does not know this way.
        :raises WorkerError: a worker fails.
        """
        settings = self._settings
        layout = layout_of(kind.plan, kind.op, kind.requests)
        order, method, merge = WAYS[kind.method]
        launch = self._launch(kind, layout)
        version = str(launch.initiator.worker.versions["nixl"])
        if method is KvMethod.STRIDED and not takes_strided_descriptors(version):
            raise NotApplicableError(f"NIXL {version} takes no strided descriptors", "use NIXL 1.5.0 or later")
        self._link = KvLink(launch, layout, kind.op, settings.timeout)
        traffic = KvTraffic(kind.plan.blocks, order, method, merge, kind.requests, kind.rate)
        return self._link.measure(traffic, duration=settings.duration)

    def measure_launches(self, kind: KvRequestKind, needs_launch: Callable[[Samples], bool]) -> KvSamples:
        """Measure the requests of one kind in several launches.

        :param needs_launch: returns whether one more launch is needed, from the samples so far.
        :raises NixlPluginError: as :meth:`measure`.
        """
        samples = self.measure(kind)
        while needs_launch(samples.row(kind.key)):
            self.close()
            samples = samples.with_launch(self.measure(kind))
        return samples

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the workers of the latest launch report; empty: nothing was measured yet."""
        return versions_of(self._link.initiator, self._link.target) if self._link is not None else {}

    def close(self) -> None:
        """End the workers."""
        if self._launched is not None:
            self._launched.close()
        self._launched = self._kind = None

    def _launch(self, kind: KvRequestKind, layout: KvLayout) -> Launch:
        place = kind.backend, kind.memory, kind.ranks, layout.size, kind.agent_options
        if self._launched is not None and self._kind == place and self._launched.healthy:
            return self._launched
        self.close()
        hosts = self._hosts[kind.ranks[0]], self._hosts[kind.ranks[1]]
        if all(isinstance(host, LocalHost) for host in hosts):  # the memory of other hosts is not known here
            _require_room(layout, (kind.memory.initiator, kind.memory.target).count("DRAM"))
        backend = BACKENDS[kind.backend]
        devices = self._settings.devices if kind.memory.on_gpu else None
        self._launched = Launch(
            hosts,
            self._settings,
            backend,
            kind.memory,
            layout.size,
            devices=devices,
            # The blocks of a file are aligned, so that the page cache is bypassed where the file system can.
            alignment=layout.block_bytes if kind.memory.stored else 1,
            regions=layout.tensors,
            agent_options=kind.agent_options,
        )
        self._kind = place
        return self._launched


def _require_room(layout: KvLayout, caches: int) -> None:
    free = available_memory(FactsRoot())
    needed = caches * layout.size
    if free is not None and free.size < needed:
        cache = f"{layout.tensors} tensors of {layout.blocks} blocks of {format_size(layout.block_bytes)}"
        raise NixlPluginError(
            f"{caches} KV caches of {cache} need {in_bytes(needed)}, but {free} are available on this host",
            "give a smaller --nixl-kv-tokens or --nixl-kv-requests",
        )


def in_turn(
    kind: KvRequestKind,
    our_launches: KvLaunches,
    other: KvLaunches,
    needs_launch: Callable[[Samples], bool],
    stored_rows: dict[RowKey, Samples],
) -> KvSamples:
    """Measure one kind of request with two sets of workers in the order ABBA ABBA …, each launch in new workers.

    :param needs_launch: returns whether both need one more launch, from the samples of the first so far.
    :param stored_rows: gets the samples of the other set after each pair of launches.
    :raises NixlPluginError: as :meth:`KvLaunches.measure`.
    """

    def launch(launches: KvLaunches) -> KvSamples:
        try:
            return launches.measure(kind)
        finally:
            launches.close()  # two caches at a time use memory

    def more(samples: KvSamples, other_samples: KvSamples) -> bool:
        stored_rows[kind.key] = other_samples.row(kind.key)
        again = len(samples.timed) < MOST_LAUNCHES and other_samples.corruption is None
        return again and needs_launch(samples.row(kind.key))

    our_launches.close()
    other.close()
    return take_turns(lambda: launch(our_launches), lambda: launch(other), KvSamples.with_launch, more)[0]


def summary_of(kind: KvRequestKind, samples: KvSamples, expectation: Expectation | None) -> RowSummary:
    """Return the summary of a row, with the median seconds of each step and of preparing the descriptors."""
    return replace(RowSummary.of(samples.row(kind.key), expectation), steps=_steps(samples))


def recorded(kind: KvRequestKind, samples: KvSamples) -> dict[str, object]:
    """Return what the record of a row says about requests, beside what it says about every row."""
    return {
        "steps_us": {name: seconds * 1e6 for name, seconds in _steps(samples).items()},
        "descriptors": samples.descriptors,
        "descriptors_per_second": samples.descriptors_per_second,
        "plan": str(kind.plan),
    }


def _steps(samples: KvSamples) -> dict[str, float]:
    prepare = {"prepare": samples.prepare} if samples.prepare else {}
    return {**prepare, **{name: samples.step(name) for name in STEPS}}


def times_of(kind: KvRequestKind, samples: KvSamples) -> tuple[Figure, ...]:
    """Return the time of a request until the target has its notification, which a profile may bound."""
    times = samples.requests
    labels = {
        "backend": kind.backend,
        "op": kind.op,
        "memory": kind.memory,
        "way": kind.method,
        "model": kind.plan.model.name,
        "tokens": kind.plan.tokens,
    }
    return (
        Figure.of("kv-request-p50", percentile(times, 50), labels),
        Figure.of("kv-request-p99", percentile(times, 99), labels),
    )


def describe(kind: KvRequestKind, samples: KvSamples) -> str:
    """Return what was measured in one sentence: medians, in milliseconds."""
    block = format_size(samples.request_bytes // samples.descriptors)
    steps = ", ".join(f"{name} {1e3 * samples.step(name):.2f}" for name in STEPS[:-1])
    more = "" if kind.requests == 1 else f", {kind.requests} in flight"
    if kind.rate is not None:
        p99 = 1e3 * percentile(samples.requests, 99)
        more += f", {kind.rate:g} each second; p99 {p99:.1f} ms from the intended start"
    return (
        f"{_name(kind)}: {gigabytes(samples.bandwidth)} GB/s, {samples.descriptors} x {block}; notified after "
        f"{1e3 * median(samples.requests):.1f} ms ({steps}){more}{_slow_preparation(kind, samples)}"
    )


def _slow_preparation(kind: KvRequestKind, samples: KvSamples) -> str:
    """Return that strided descriptors would make an engine start faster, if preparing the cache took long."""
    if samples.prepare < _LONG_PREPARATION or WAYS[kind.method][1] is not KvMethod.PREPPED:
        return ""
    layout = layout_of(kind.plan, kind.op, kind.requests)
    count = 2 * layout.tensors * layout.blocks
    return (
        f"; to prepare the {count} descriptors of both caches took {samples.prepare:.1f} s, by which an engine starts "
        "later: NIXL 1.5.0 and later take strided descriptors, one for each tensor"
    )


def judge_requests(kind: KvRequestKind, samples: KvSamples, expectation: Expectation | None) -> Judgement:
    """Judge requests by their bytes and by their transport, and name devices that lost packets.

    :param expectation: what the profile expects of the row, of which it has only the accepted transports.
    """
    if samples.corruption is not None:
        return Judgement(
            Verdict.CORRUPT,
            f"{_name(kind)}: {samples.corruption}",
            "Do not trust any transfer over this transport: keep the workers' logs, and run this test again over "
            "another transport, such as UCX_TLS=tcp,cuda_copy with UCX.",
        )
    row = samples.row(kind.key)
    passed = name_losses(Judgement(Verdict.PASS, describe(kind, samples)), row)
    if expectation is None or expectation.transports is None:
        return passed
    judgement = judge(row, expectation, environ=os.environ)
    return passed if judgement.verdict in (Verdict.PASS, Verdict.WARN) else judgement


def with_bounds(judged: Judgement, bounded: Judgement) -> Judgement:
    """Return the verdict on requests: their own, and if they pass, that of the profile's bounds of their times.

    :param judged: the requests' own, of :func:`judge_requests`; WARN: they pass, but a device lost packets.
    :param bounded: that of the bounds.
    """
    if judged.verdict not in (Verdict.PASS, Verdict.WARN) or bounded.verdict is Verdict.PASS:
        return judged
    if judged.verdict is Verdict.PASS:
        return bounded
    return Judgement(bounded.verdict, f"{bounded.reason}; {judged.reason}", judged.remedy)


def _name(kind: KvRequestKind) -> str:
    ranks = "" if kind.ranks in ((0, 1), (0, 0)) else f" ranks {kind.ranks[0]}-{kind.ranks[1]}"
    settings = "".join(f" {name}={value}" for name, value in kind.settings)
    return f"KV requests {kind.backend} {kind.op} {kind.memory}{ranks} {kind.method}{settings}"
