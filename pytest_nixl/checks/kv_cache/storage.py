# SPDX-License-Identifier: Apache-2.0
"""The check ``kv-storage``: blocks of a KV cache move between memory and a file, in fragments and in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_nixl.checks.kv_cache.check import KvLaunches, KvRequestKind, KvSamples, judge_requests, times_of
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS

#: How engines ask for blocks, and the same bytes as one piece of each tensor.
FRAGMENTS, PIECES = "scattered-prepped", "contiguous-merged"
_MEMORY = MemoryPair("DRAM", "FILE")
#: How many times as long fragments take from which on the result says what an engine can do.
_COSTLY = 1.5


@dataclass(frozen=True)
class StoredRequests:
    """The requests of one backend and operation.

    :param fragments: each block of each tensor is somewhere else in the file.
    :param pieces: the blocks of each tensor are neighbours, which NIXL merges.
    """

    kind: KvRequestKind
    fragments: KvSamples
    pieces: KvSamples

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The times of the requests, which a profile may bound."""
        return (*times_of(self.kind, self.fragments), *times_of(replace(self.kind, way=PIECES), self.pieces))


def stored_kinds(settings: Settings) -> Iterator[KvRequestKind]:
    """Yield what to measure: each requested backend whose targets are files, and each operation."""
    for name in settings.backend:
        if BACKENDS[name].STORAGE and BACKENDS[name].PLUGIN not in OBJECT_PLUGINS:
            for op in settings.op:
                yield KvRequestKind(name, op, _MEMORY, (0, 0), FRAGMENTS, settings.kv_plan)


def measure_stored(launches: KvLaunches, kind: KvRequestKind) -> StoredRequests:
    """Measure requests for fragments and for pieces.

    :raises NixlPluginError: the caches do not fit into memory, or the file not into its folder.
    """
    return StoredRequests(kind, launches.measure(kind), launches.measure(replace(kind, way=PIECES)))


def judge_stored(found: StoredRequests) -> Judgement:
    """Judge the bytes of both kinds of request, and say how much the fragments cost."""
    for way, samples in ((FRAGMENTS, found.fragments), (PIECES, found.pieces)):
        judged = judge_requests(replace(found.kind, way=way), samples, None)
        if judged.verdict is not Verdict.PASS:
            return judged
    many, few = found.fragments, found.pieces
    block = many.request_bytes // many.descriptors
    tensors = found.kind.plan.layers * found.kind.plan.tensors_per_layer
    times = few.bandwidth / many.bandwidth
    cost = f"; fragments take {times:.1f} times as long: an engine that keeps the blocks of a request together in its "
    return Judgement(
        Verdict.PASS,
        f"{found.kind.backend} {found.kind.op} {found.kind.memory} over {' and '.join(many.transports) or 'a file'}: "
        f"{gigabytes(many.bandwidth)} GB/s in {many.descriptors} fragments of {format_size(block)}, "
        f"{gigabytes(few.bandwidth)} GB/s in {tensors} pieces of {format_size(few.request_bytes // tensors)}"
        + (f"{cost}files, or has larger blocks, loads them faster" if times >= _COSTLY else ""),
    )
