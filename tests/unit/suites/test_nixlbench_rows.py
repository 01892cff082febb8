# SPDX-License-Identifier: Apache-2.0
"""Which rows nixlbench measures, how they are recorded, and how their check ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.nixlbench.row import JudgedRow
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.bandwidth import test_nixlbench

JUDGED = Judgement(Verdict.WARN, "reason")


def test_nixlbench_measures_three_sizes_of_each_link_once(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links that differ only in how their agents are created are one."""
    link = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1)
    other = replace(link, op="READ", pair=(2, 3))
    blocks = (4096, 512, 1 << 20, 64, 65536)
    settings = make_settings(blocks=blocks, batch=(1, 4), depth=(2,), nixlbench_args=("--mode=MG",))
    links = [link, replace(link, variant=(("progress-thread", "on"),)), other]
    run = SimpleNamespace(usable=True, settings=settings, links=links)
    monkeypatch.setattr(test_nixlbench, "Run", SimpleNamespace(of=lambda config: run))
    metafunc = MagicMock()
    test_nixlbench.pytest_generate_tests(metafunc)
    keys = [
        replace(kind, block=block, batch=batch, depth=2).measured_by("nixlbench[MG1x1]")
        for kind in (link, other)
        for block in (64, 4096, 1 << 20)
        for batch in (1, 4)
    ]
    metafunc.parametrize.assert_called_once_with("program_row", keys, ids=ANY)
    name_of = metafunc.parametrize.call_args.kwargs["ids"]
    assert name_of(keys[0]) == "UCX-WRITE-DRAM:DRAM-64B-batch1-depth2"
    assert name_of(keys[-1]) == "UCX-READ-DRAM:DRAM-2:3-1MiB-batch4-depth2"
    run.usable = False
    test_nixlbench.pytest_generate_tests(metafunc)
    assert metafunc.parametrize.call_args.args == ("program_row", [None])
    assert name_of(None) == "unknown"


def test_the_nixlbench_of_a_run_ends_with_it_and_its_rows_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, rows, run = MagicMock(), MagicMock(), MagicMock()
    monkeypatch.setattr(test_nixlbench, "Nixlbench", programs)
    monkeypatch.setattr(test_nixlbench, "supervisor", "supervisor")
    arguments = {"nixl_settings": "settings", "nixl_cluster": "cluster", "nixl_etcd_server": "an etcd"}
    with ExitStack() as stack:
        started = value_of(test_nixlbench.nixlbench, stack, **arguments)
        assert started is programs.return_value.__enter__.return_value
        programs.assert_called_once_with("settings", "cluster", "an etcd", "supervisor")
        programs.return_value.__exit__.assert_not_called()
    programs.return_value.__exit__.assert_called_once_with(None, None, None)
    record = value_of(test_nixlbench.record_program, ExitStack(), nixl_run=run, nixl_rows=rows)
    samples, summary = MagicMock(), MagicMock()
    for judged in (JudgedRow(JUDGED, samples, None, ("first", "second")), JudgedRow(JUDGED, None, summary)):
        record(judged, {"flags": "-x"})
    rows.record.assert_not_called()
    record(JudgedRow(JUDGED, samples, summary), {"flags": "-x"})
    rows.record.assert_called_once_with(samples, summary=summary, more={"flags": "-x"})
    assert run.record.mock_calls[0] == call.note("first", "second")


def test_a_row_of_nixlbench_ends_as_it_is_judged_unless_there_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, program, record = JudgedRow(JUDGED), MagicMock(), MagicMock()
    judge = MagicMock(return_value=judged)
    monkeypatch.setattr(test_nixlbench, "judge_row", judge)
    arguments: dict[str, Any] = {"program_row": "a row", "nixlbench": program, "profile": "profile"}
    program.obstacle.return_value = "no nixlbench"
    check = test_nixlbench.test_nixlbench
    assert conclusion_of(check, record_program=record, **arguments) == "NOT-APPLICABLE: no nixlbench"
    assert program.mock_calls == [call.obstacle("a row")]
    program.obstacle.return_value = None
    assert conclusion_of(check, record_program=record, **arguments) == "WARN: reason"
    for method in (program.run, program.plain, program.line_rates, program.described):
        method.assert_called_once_with("a row")
    judge.assert_called_once_with(
        program.run.return_value, program.plain.return_value, "a row", "profile", program.line_rates.return_value
    )
    record.assert_called_once_with(judged, program.described.return_value)
