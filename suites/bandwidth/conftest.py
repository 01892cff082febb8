# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run nixlbench: the rows that it measures, and its processes on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from pytest_nixl import Cluster, RowKey, Run, SessionEtcd, Settings, format_size, supervisor
from pytest_nixl.checks.bandwidth.cold_rows import cold_rows
from pytest_nixl.checks.nixlbench.command import label
from pytest_nixl.checks.nixlbench.programs import Nixlbench
from pytest_nixl.checks.nixlbench.row import JudgedRow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program_row" in metafunc.fixturenames:
        run = Run.of(metafunc.config)
        rows = list(nixlbench_rows(run)) if run.usable else [None]  # None: each test reports why the run is not usable
        metafunc.parametrize("program_row", rows, ids=_id)
    if "cold_row" in metafunc.fixturenames:
        run = Run.of(metafunc.config)
        # None: the test says why there is nothing to measure.
        metafunc.parametrize("cold_row", (cold_rows(run) if run.usable else []) or [None], ids=str)


def nixlbench_rows(run: Run) -> Iterator[RowKey]:
    """Yield the keys of the rows that nixlbench measures: the smallest, a middle and the largest block of each link."""
    blocks = sorted(run.settings.blocks)
    sizes = dict.fromkeys((blocks[0], blocks[len(blocks) // 2], blocks[-1]))
    name = label(run.settings.nixlbench_args)
    every = product(run.links, sizes, run.settings.batch, run.settings.depth)
    # nixlbench creates its agents itself.
    rows = (replace(link.key(block, batch, depth), variant=()) for link, block, batch, depth in every)
    for row in dict.fromkeys(rows):
        yield row.measured_by(name)


def _id(row: RowKey | None) -> str:
    if row is None:
        return "unknown"
    ranks = "" if row.default_ranks else f"-{row.pair[0]}:{row.pair[1]}"
    return (
        f"{row.plain_backend}-{row.op}-{row.memory}{ranks}-{format_size(row.block)}-batch{row.batch}-depth{row.depth}"
    )


@pytest.fixture(scope="session")
def nixlbench(nixl_settings: Settings, nixl_cluster: Cluster, nixl_etcd_server: SessionEtcd) -> Iterator[Nixlbench]:
    """The nixlbench of each rank, from ``--nixl-nixlbench`` or PATH."""
    with Nixlbench(nixl_settings, nixl_cluster, nixl_etcd_server, supervisor) as started:
        yield started


@pytest.fixture
def record_program(
    request: pytest.FixtureRequest, nixl_run: Run, row_benchmark: Callable[..., None]
) -> Callable[[JudgedRow, dict[str, object]], None]:
    """Return a function that records a program's measurement of a row in the table and in pytest-benchmark's files."""

    def write(judged: JudgedRow, more: dict[str, object]) -> None:
        nixl_run.recorder.note(*judged.notes)
        if judged.samples is None or judged.figures is None:
            return
        nixl_run.recorder.add_row(request.node.nodeid, judged.figures)
        row_benchmark(judged.samples, more)

    return write
