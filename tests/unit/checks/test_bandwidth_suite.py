# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``bandwidth`` pass on what they get, record it, and end as it is judged."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of

from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.bandwidth import (
    test_bandwidth,
    test_cold,
    test_gpus,
    test_integrity,
    test_nics,
    test_ranks,
    test_raw,
)

JUDGED = Judgement(Verdict.WARN, "reason")


@pytest.mark.parametrize(
    ("check", "judge"),
    [
        (test_gpus.test_gpus_do_not_hold_each_other_up, "judge_gpus_together"),
        (test_nics.test_each_nic_moves_what_the_others_move, "judge_each_nic"),
        (test_ranks.test_pairs_do_not_hold_each_other_up, "judge_pairs_together"),
        (test_integrity.test_the_bytes_of_every_transfer_are_right, "judge_every_transfer"),
    ],
)
def test_a_check_ends_with_the_judgement_on_its_arguments(
    check: Any, judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = MagicMock(return_value=JUDGED)
    monkeypatch.setitem(check.__globals__, judge, judged)
    arguments = {name: f"the {name}" for name in signature(check).parameters if name != "verdict"}
    assert conclusion_of(check, **arguments) == "WARN: reason"
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
