# SPDX-License-Identifier: Apache-2.0
"""What a run found: how each kind of result is added to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.records import ROW

from pytest_nixl.model.figure import Figure
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session import check_result
from pytest_nixl.session.run import LiveRecord

SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/eth0",))


def result(nodeid: str, verdict: Verdict = Verdict.PASS) -> Result:
    return Result("bandwidth", nodeid, verdict, "a reason", row=ROW, summary=SUMMARY)


@pytest.fixture
def found() -> LiveRecord:
    return LiveRecord()


def test_the_result_of_a_teardown_replaces_that_of_the_call(found: LiveRecord) -> None:
    for outcome in (result("a"), result("b"), result("a", Verdict.ERROR)):
        found.add_result(outcome)
    assert [(outcome.nodeid, outcome.verdict) for outcome in found.results] == [
        ("b", Verdict.PASS),
        ("a", Verdict.ERROR),
    ]


def test_results_of_no_test_do_not_replace_each_other(found: LiveRecord) -> None:
    missing = Result("nixl-loads", "", Verdict.MISSING)
    found.add_run_results([missing, missing])
    found.add_result(result("a"))
    assert found.results == (missing, missing, result("a"))


def test_each_text_is_added_without_its_secrets() -> None:
    found = LiveRecord(hide=lambda text: text.replace("hunter2", "***"))
    secret = Result("x", "a", Verdict.FAIL, "\x1bit is hunter2", "set hunter2", ROW, repeat="pytest --password hunter2")
    found.add_result(secret)
    found.add_run_results([replace(secret, nodeid="")])
    found.explain(ROW, "because of hunter2")
    for add in (found.note, found.note_detail, found.end, found.interrupt):
        add(f"{add.__name__} hunter2")
    assert "hunter2" not in repr(found)
    shown = replace(secret, reason="\\x1bit is ***; because of ***", remedy="set ***", repeat="pytest --password ***")
    assert found.results == (shown, replace(shown, nodeid=""))
    assert (found.ended, found.interrupted) == ("end ***", "interrupt ***")
    assert found.details == {"note_detail ***"} < set(found.notes)


def test_what_a_test_measured_is_kept_together_until_it_is_judged(found: LiveRecord) -> None:
    figures = [Figure(name, 1.0, "s") for name in ("one", "two", "three")]
    ratios = (RawRatio(ROW, 1e9, RawMeasurement("ucx_perftest", "ucp_put_bw", 2e9)),)
    found.add_figures("a", (figures[0], figures[1]))
    found.add_row("a", SUMMARY)
    found.add_ratios("a", ratios)
    found.add_figures("a", (figures[2],))
    assert found.begun("a") == Result("", "a", Verdict.UNKNOWN, summary=SUMMARY, ratios=ratios, measured=tuple(figures))
    assert found.begun("b") == Result("", "b", Verdict.UNKNOWN)


def test_an_explanation_follows_the_reason_of_its_row_only(found: LiveRecord) -> None:
    other = replace(result("b"), row=replace(ROW, block=4096))
    found.add_run_results([result("a"), other, Result("nixl-loads", "c", Verdict.PASS)])
    found.explain(replace(ROW), "NIXL is slow")
    assert [outcome.reason for outcome in found.results] == ["a reason; NIXL is slow", "a reason", ""]


def test_rows_stand_in_the_order_of_collection(found: LiveRecord) -> None:
    other = Result("nixl-loads", "other", Verdict.PASS)
    found.add_run_results([result("c"), other, result("unknown"), result("a"), result("b")])
    found.order_rows({"a": 0, "b": 1, "c": 2, "other": 3})
    assert [each.nodeid for each in found.results] == ["a", "other", "b", "c", "unknown"]


def test_a_note_is_not_repeated(found: LiveRecord) -> None:
    found.note("one", "two")
    found.note("two", "three")
    assert found.notes == ("one", "two", "three")


def test_the_first_interruption_stays(found: LiveRecord) -> None:
    found.interrupt("")
    assert found.interrupted == ""
    found.interrupt("INTERRUPTED after 1 of 2 checks: Ctrl-C")
    found.interrupt("INTERRUPTED after 2 of 2 checks: a rank was lost")
    assert found.interrupted == "INTERRUPTED after 1 of 2 checks: Ctrl-C"


def test_tests_that_follow_each_other_at_once_share_a_reading_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[Any] = []

    def load() -> Any:
        readings.append(SimpleNamespace(seconds=0.0))
        return readings[-1]

    monkeypatch.setattr(check_result, "HostLoad", load)
    session = SimpleNamespace(stash=pytest.Stash())
    items: list[Any] = [SimpleNamespace(session=session, stash=pytest.Stash()) for _ in range(3)]
    check_result.watch_load(items[0])
    check_result.watch_load(items[1])
    readings[0].seconds = 1.0
    check_result.watch_load(items[2])
    assert [readings.index(item.stash[check_result._LOAD]) for item in items] == [0, 0, 1]
