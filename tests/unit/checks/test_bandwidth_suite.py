# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``bandwidth`` pass on what they get, record it, and end as it is judged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.nixlbench.row import JudgedRow
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.bandwidth import (
    test_bandwidth,
    test_cold,
    test_gpus,
    test_integrity,
    test_nics,
    test_nixlbench,
    test_ranks,
    test_raw,
)

JUDGED = Judgement(Verdict.WARN, "reason")


@pytest.mark.parametrize(
    ("module", "judge", "check", "names"),
    [
        (
            test_gpus,
            "judge_gpus_together",
            "test_gpus_do_not_hold_each_other_up",
            "nixl_run nixl_settings nixl_cluster nixl_launches profile",
        ),
        (
            test_nics,
            "judge_each_nic",
            "test_each_nic_moves_what_the_others_move",
            "nixl_run nixl_settings nixl_cluster",
        ),
        (
            test_ranks,
            "judge_pairs_together",
            "test_pairs_do_not_hold_each_other_up",
            "nixl_run nixl_settings nixl_cluster nixl_launches",
        ),
        (
            test_integrity,
            "judge_every_transfer",
            "test_the_bytes_of_every_transfer_are_right",
            "nixl_link nixl_settings",
        ),
    ],
)
def test_a_check_ends_with_the_judgement_of_its_room(
    module: Any, judge: str, check: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = MagicMock(return_value=JUDGED)
    monkeypatch.setattr(module, judge, judged)
    arguments: dict[str, Any] = {name: f"the {name}" for name in names.split()}
    assert conclusion_of(getattr(module, check), **arguments) == "WARN: reason"
    judged.assert_called_once_with(*arguments.values())


def test_a_culprit_is_looked_for_by_the_rules_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, rows = MagicMock(return_value=JUDGED), SimpleNamespace(needs_launch="more", judge="judge")
    monkeypatch.setattr(test_ranks, "judge_culprit", judged)
    check = test_ranks.test_no_rank_is_to_blame_for_a_slow_pair
    arguments: dict[str, Any] = {"nixl_run": "run", "nixl_cluster": "cluster", "nixl_launches": "launches"}
    assert conclusion_of(check, nixl_rows=rows, **arguments) == "WARN: reason"
    judged.assert_called_once_with("run", "cluster", "launches", "more", "judge")


@pytest.mark.parametrize("cold", [True, False])
def test_a_row_is_measured_recorded_and_judged(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_link, rows = MagicMock(return_value="a link"), MagicMock(**{"judge.return_value": JUDGED})
    monkeypatch.setattr(test_cold, "cold_link", cold_link)
    check: Callable[..., None]
    counts = {"block": 4096, "batch": 3, "depth": 2}
    if cold:
        check, row = test_cold.test_bandwidth_of_bytes_in_no_cache, SimpleNamespace(**counts)
        arguments: dict[str, Any] = {"cold_row": row, "nixl_settings": "settings", "nixl_launches": "launches"}
    else:
        check, arguments = test_bandwidth.test_bandwidth, {"nixl_link": "a link", **counts}
    assert conclusion_of(check, nixl_rows=rows, **arguments) == "WARN: reason"
    assert cold_link.mock_calls == ([call(row, "settings", "launches")] if cold else [])
    samples = rows.measure.return_value
    assert rows.mock_calls == [
        call.measure("a link", 4096, batch=3, depth=2),
        call.record(samples, "a link"),
        call.judge(samples),
    ]


def test_the_ratios_of_a_raw_tool_are_recorded_with_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, run = MagicMock(return_value=(JUDGED, ("ratio",))), MagicMock()
    monkeypatch.setattr(test_raw, "compare", compared)
    arguments: dict[str, Any] = {"link_kind": "kind", "nixl_run": run, "nixl_cluster": "cluster", "profile": "profile"}
    request: Any = SimpleNamespace(node=SimpleNamespace(nodeid="a test"))
    check = test_raw.test_nixl_moves_what_the_path_carries
    assert conclusion_of(check, request=request, **arguments) == "WARN: reason"
    compared.assert_called_once_with("kind", run, "cluster", "profile")
    run.record.add_ratios.assert_called_once_with("a test", ("ratio",))


@pytest.mark.parametrize(
    ("module", "function", "argument", "nothing"),
    [(test_cold, "cold_rows", "cold_row", {"None": None}), (test_raw, "link_kinds", "link_kind", {"1": None})],
)
def test_each_cold_row_or_link_of_a_usable_run_is_a_parameter_with_its_name(
    module: Any, function: str, argument: str, nothing: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that cannot be used has one parameter, so that the test says why."""

    def parameters(usable: bool, rows: Callable[[Any], Any]) -> tuple[list[Any], list[str]]:
        monkeypatch.setattr(module, "Run", SimpleNamespace(of=lambda config: SimpleNamespace(usable=usable)))
        monkeypatch.setattr(module, function, rows)
        metafunc = MagicMock()
        module.pytest_generate_tests(metafunc)
        ((name, values),) = (parametrized.args for parametrized in metafunc.parametrize.call_args_list)
        assert name == argument
        return list(values), list(metafunc.parametrize.call_args.kwargs["ids"])

    assert parameters(True, lambda run: {"a": 1, "b": 2}) == ([1, 2], ["a", "b"])
    assert parameters(False, lambda run: {"a": 1}) == (list(nothing.values()), list(nothing))


@pytest.mark.parametrize(
    ("blocks", "flags", "rows"),
    [
        (
            (4096, 512, 1 << 20, 64, 65536),
            ("--mode=MG",),
            ["64B-batch1", "64B-batch4", "4KiB-batch1", "4KiB-batch4", "1MiB-batch1", "1MiB-batch4"],
        ),
        ((4096,), (), ["4KiB-batch1", "4KiB-batch4"]),
    ],
)
def test_nixlbench_measures_three_sizes_of_each_link_once(
    blocks: tuple[int, ...],
    flags: tuple[str, ...],
    rows: list[str],
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Links that differ only in how their agents are created are one."""
    link = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 1)
    links = [link, replace(link, variant=(("progress-thread", "on"),)), replace(link, op="READ", pair=(2, 3))]
    settings = make_settings(blocks=blocks, batch=(1, 4), depth=(2,), nixlbench_args=flags)
    run = SimpleNamespace(usable=True, settings=settings, links=links)
    monkeypatch.setattr(test_nixlbench, "Run", SimpleNamespace(of=lambda config: run))

    def parameters() -> list[tuple[str, Any]]:
        metafunc = MagicMock()
        test_nixlbench.pytest_generate_tests(metafunc)
        ((name, values),) = (parametrized.args for parametrized in metafunc.parametrize.call_args_list)
        assert name == "program_row"
        return [(metafunc.parametrize.call_args.kwargs["ids"](value), value) for value in values]

    names, keys = zip(*parameters(), strict=True)
    texts = [f"{text}-depth2" for text in rows]
    assert [*names] == [f"UCX-{kind}-{text}" for kind in ("WRITE-DRAM:DRAM", "READ-DRAM:DRAM-2:3") for text in texts]
    program = "nixlbench[MG1x1]" if flags else "nixlbench"
    assert [str(key) for key in keys] == [
        f"{program}:UCX/{kind[0]}/DRAM:DRAM/{text.replace('-', '/')}/{kind[1]}"
        for kind in (("WRITE", "0-1"), ("READ", "2-3"))
        for text in texts
    ]
    run.usable = False
    assert parameters() == [("unknown", None)]


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
    assert run.record.mock_calls == [call.note("first", "second"), call.note()]
    rows.record.assert_not_called()
    record(JudgedRow(JUDGED, samples, summary), {"flags": "-x"})
    rows.record.assert_called_once_with(samples, summary=summary, more={"flags": "-x"})


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
    assert program.mock_calls[1:] == [
        call.obstacle("a row"),
        call.run("a row"),
        call.plain("a row"),
        call.line_rates("a row"),
        call.described("a row"),
    ]
    judge.assert_called_once_with(
        program.run.return_value, program.plain.return_value, "a row", "profile", program.line_rates.return_value
    )
    record.assert_called_once_with(judged, program.described.return_value)
