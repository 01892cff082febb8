# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that move the blocks of a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import pytest

from pytest_nixl import (
    BACKENDS,
    Cluster,
    Figure,
    Judgement,
    LocalHost,
    NotApplicableError,
    Profile,
    Run,
    Settings,
    between_agents,
    supervisor,
)
from pytest_nixl.checks.kv_cache.check import (
    EXTENDED_WAYS,
    STANDARD_WAYS,
    KvLaunches,
    KvRequestKind,
    describe,
    in_turn,
    judge_requests,
    recorded,
    summary_of,
    times_of,
    with_bounds,
)
from pytest_nixl.checks.kv_cache.samples import KvSamples

from ..conftest import Rows

NOTHING = "no requested backend moves bytes between the memory of two agents"
REMEDY = "give --nixl-backend=UCX or LIBFABRIC, and a --nixl-memory without FILE"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, methods in (("kv_kind", STANDARD_WAYS), ("other_kv_kind", EXTENDED_WAYS)):
        if name in metafunc.fixturenames:
            run = Run.of(metafunc.config)
            # None: the test says why there is nothing to measure.
            metafunc.parametrize(name, (list(_kinds(run, methods)) if run.usable else []) or [None], ids=str)


def _kinds(run: Run, methods: Iterable[str]) -> Iterator[KvRequestKind]:
    """Yield what to measure, one pair of ranks after another."""
    settings, pairs = run.settings, run.placement.pairs
    memories = dict.fromkeys(memory_pair for memory_pair in settings.memory if not memory_pair.stored)
    backends = between_agents(settings.backend)
    for backend, memory, agent, ranks, op, method in product(
        backends, memories, settings.agents, pairs, settings.op, methods
    ):
        devices = settings.devices if memory.on_gpu else None
        variant = agent.variant(backend, BACKENDS[backend].PLUGIN)
        yield KvRequestKind(
            backend,
            op,
            memory,
            ranks,
            method,
            settings.kv_plan,
            devices,
            settings.kv_requests,
            settings.kv_rate,
            variant,
            agent,
        )


@pytest.fixture(scope="session")
def kv_launches(nixl_cluster: Cluster, nixl_settings: Settings) -> Iterator[KvLaunches]:
    """The workers with the KV caches."""
    launches = KvLaunches(nixl_cluster.hosts, nixl_settings)
    yield launches
    launches.close()


@pytest.fixture(scope="session")
def other_kv_launches(nixl_settings: Settings) -> Iterator[KvLaunches | None]:
    """The workers of the other image, where ``--nixl-compare-image`` names one."""
    if nixl_settings.compare_image is None:
        yield None
        return
    prefix = nixl_settings.compare_image.prefix
    launches = KvLaunches([LocalHost(supervisor(), rank, prefix) for rank in range(2)], nixl_settings)
    yield launches
    launches.close()


@pytest.fixture
def measure_requests(
    kv_launches: KvLaunches,
    other_kv_launches: KvLaunches | None,
    nixl_rows: Rows,
    nixl_run: Run,
) -> Callable[[KvRequestKind], KvSamples]:
    """Measure requests in as many launches as it takes; in turn with the other image if there is one."""

    def measure(kind: KvRequestKind) -> KvSamples:
        if other_kv_launches is None:
            return kv_launches.measure_launches(kind, nixl_rows.needs_launch)
        samples = in_turn(kind, kv_launches, other_kv_launches, nixl_rows.needs_launch, nixl_run.record.other_samples)
        nixl_run.record.other_versions.update(other_kv_launches.versions)
        return samples

    return measure


@pytest.fixture
def move_blocks(
    measure_requests: Callable[[KvRequestKind], KvSamples],
    kv_launches: KvLaunches,
    nixl_rows: Rows,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    profile: Profile,
    nixl_run: Run,
) -> Callable[[KvRequestKind | None], Judgement]:
    """Make requests of one kind, record what was measured, and judge it."""

    def move(kind: KvRequestKind | None) -> Judgement:
        if kind is None:
            raise NotApplicableError(NOTHING, REMEDY)
        samples = measure_requests(kind)
        expectation = profile.expectation(kind.key)
        summary, more = summary_of(kind, samples, expectation), recorded(kind, samples)
        nixl_rows.record(samples.row(kind.key), summary=summary, versions=kv_launches.versions, more=more)
        if samples.corruption is None:
            nixl_run.record.note_detail(describe(kind, samples))
        bounded = record_figures(times_of(kind, samples))
        return with_bounds(judge_requests(kind, samples, expectation), bounded)

    return move
