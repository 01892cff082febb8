# SPDX-License-Identifier: Apache-2.0
"""Does nixlbench, NIXL's own benchmark, confirm the rows under the same profile?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from pytest_nixl import (
    Cluster,
    Judgement,
    Profile,
    RowKey,
    Run,
    SessionEtcd,
    Settings,
    Verdict,
    format_size,
    supervisor,
)
from pytest_nixl.checks.nixlbench.command import label
from pytest_nixl.checks.nixlbench.programs import Nixlbench
from pytest_nixl.checks.nixlbench.row import JudgedRow, judge_row

from ..conftest import Rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    rows = list(nixlbench_rows(run)) if run.usable else [None]  # None: each test reports why the run is not usable
    metafunc.parametrize("program_row", rows, ids=_id)


def nixlbench_rows(run: Run) -> Iterator[RowKey]:
    """Yield the keys of the rows that nixlbench measures: the smallest, a middle and the largest block of each link."""
    blocks = sorted(run.settings.blocks)
    sizes = blocks[0], blocks[len(blocks) // 2], blocks[-1]
    name = label(run.settings.nixlbench_args)
    every = product(run.links, sizes, run.settings.batch, run.settings.depth)
    # nixlbench creates its agents itself.
    rows = (replace(link, block=block, batch=batch, depth=depth, variant=()) for link, block, batch, depth in every)
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
def record_program(nixl_run: Run, nixl_rows: Rows) -> Callable[[JudgedRow, dict[str, object]], None]:
    """Return a function that records a program's measurement of a row in the table and in pytest-benchmark's files."""

    def write(judged: JudgedRow, more: dict[str, object]) -> None:
        nixl_run.record.note(*judged.notes)
        if judged.samples is None or judged.summary is None:
            return
        nixl_rows.record(judged.samples, summary=judged.summary, more=more)

    return write


@pytest.mark.nixl_check("nixlbench-bandwidth", level="extended")
def test_nixlbench(
    record_program: Callable[[JudgedRow, dict[str, object]], None],
    program_row: RowKey,
    nixlbench: Nixlbench,
    profile: Profile,
    verdict: Callable[[Judgement], None],
) -> None:
    """Bandwidth and transport of one row, measured by nixlbench between the same ranks, are as the profile expects."""
    reason = nixlbench.obstacle(program_row)
    if reason is not None:
        verdict(Judgement(Verdict.NOT_APPLICABLE, reason))
        return
    ran = nixlbench.run(program_row)
    judged = judge_row(ran, nixlbench.plain(program_row), program_row, profile, nixlbench.line_rates(program_row))
    record_program(judged, nixlbench.described(program_row))
    verdict(judged.judgement)
