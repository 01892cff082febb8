# SPDX-License-Identifier: Apache-2.0
"""The check ``kv-storage``: blocks of a KV cache move between memory and storage: a file, or an object for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from pytest_nixl.checks.kv_cache.check import KvLaunches, KvRequestKind, judge_requests, times_of
from pytest_nixl.checks.kv_cache.samples import KvSamples
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS

#: How engines ask for blocks, and the same bytes as one piece of each tensor.
FRAGMENTS, PIECES = "scattered-prepped", "contiguous-merged"
#: The most tokens of a request whose blocks are objects, of which a server stores a few hundred in a second.
_MOST_TOKENS = 32
#: How many times as long fragments take from which on the result says what an engine can do.
_COSTLY = 1.5


@dataclass(frozen=True)
class StoredRequests:
    """The requests of one backend and operation.

    :param fragments: each block of each tensor is somewhere else in the file.
    :param pieces: the blocks of each tensor are neighbours, which NIXL merges; None: each block is an object.
    """

    kind: KvRequestKind
    fragments: KvSamples
    pieces: KvSamples | None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The times of the requests, which a profile may bound."""
        pieces = () if self.pieces is None else times_of(replace(self.kind, method=PIECES), self.pieces)
        return (*times_of(self.kind, self.fragments), *pieces)


def stored_kinds(settings: Settings) -> Iterator[KvRequestKind]:
    """Yield what to measure: each requested backend of storage, and each operation."""
    for name, agent, op in product(settings.backend, settings.agents, settings.op):
        plan, backend = settings.kv_plan, BACKENDS[name]
        if not backend.STORAGE:
            continue
        objects = backend.PLUGIN in OBJECT_PLUGINS
        if objects:
            plan = replace(plan, tokens=min(plan.tokens, _MOST_TOKENS))
        memory = MemoryPair("DRAM", "OBJ" if objects else "FILE")
        variant = agent.variant(name, backend.PLUGIN)
        yield KvRequestKind(name, op, memory, (0, 0), FRAGMENTS, plan, settings=variant, agent_options=agent)


def measure_stored(launches: KvLaunches, kind: KvRequestKind) -> StoredRequests:
    """Measure requests for fragments, and in a file also for pieces.

    :raises NixlPluginError: the caches do not fit into memory, or the file not into its folder.
    """
    fragments = launches.measure(kind)
    objects = kind.memory.target == "OBJ"
    return StoredRequests(kind, fragments, None if objects else launches.measure(replace(kind, method=PIECES)))


def judge_stored(requests: StoredRequests) -> Judgement:
    """Judge the bytes of both kinds of request, and say how much the fragments cost."""
    for method, samples in ((FRAGMENTS, requests.fragments), (PIECES, requests.pieces)):
        if samples is not None:
            judged = judge_requests(replace(requests.kind, method=method), samples, None)
            if judged.verdict is not Verdict.PASS:
                return judged
    many, few = requests.fragments, requests.pieces
    block = many.request_bytes // many.descriptors
    kind, transports = requests.kind, " and ".join(many.transports) or "storage"
    name = f"{kind.backend} {kind.op} {kind.memory} over {transports}"
    if few is None:
        rate_text = f"{gigabytes(many.bandwidth)} GB/s in {many.descriptors} objects of {format_size(block)}"
        return Judgement(Verdict.PASS, f"{name}: {rate_text}")
    tensors = kind.plan.layers * kind.plan.tensors_per_layer
    times = few.bandwidth / many.bandwidth
    cost = f"; fragments take {times:.1f} times as long: an engine that keeps the blocks of a request together in its "
    return Judgement(
        Verdict.PASS,
        f"{name}: {gigabytes(many.bandwidth)} GB/s in {many.descriptors} fragments of {format_size(block)}, "
        f"{gigabytes(few.bandwidth)} GB/s in {tensors} pieces of {format_size(few.request_bytes // tensors)}"
        + (f"{cost}files, or has larger blocks, loads them faster" if times >= _COSTLY else ""),
    )
