# SPDX-License-Identifier: Apache-2.0
"""What a run found: how each kind of result is added to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.records import KEY, ROW

from pytest_nixl.model.figure import Figure
from pytest_nixl.model.results import RawMeasurement, RawRatio, Result, RowSummary
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import AlternateImage
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session import check_result
from pytest_nixl.session.record_writer import other_record, other_run, record_of
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
    secret = Result("x", "a", Verdict.FAIL, "it is hunter2", "set hunter2", ROW, repeat="pytest --password hunter2")
    found.add_result(secret)
    found.add_run_results([replace(secret, nodeid="")])
    found.explain(ROW, "because of hunter2")
    for add in (found.note, found.note_detail, found.end, found.interrupt):
        add(f"{add.__name__} hunter2")
    assert "hunter2" not in repr(found)
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


def test_the_other_image_has_its_own_variables_and_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "info", "NIXL_IMAGE_DIGEST": "sha256:88"}.items():
        monkeypatch.setenv(name, value)
    run: Any = SimpleNamespace(record=LiveRecord())
    against = AlternateImage("nixl:1", ("env", "UCX_TLS=rc=x", "MY_TOKEN=hunter22", "python"))
    provenance = other_run(run, against).provenance
    assert (provenance.image.reference, provenance.image.digest) == ("nixl:1", "")
    assert {"UCX_TLS": "rc=x", "UCX_LOG_LEVEL": "info"}.items() <= provenance.environment.items()
    assert provenance.environment["(started with)"] == "env UCX_TLS=rc=x 'MY_TOKEN=***' python"


def test_the_record_of_the_other_image_has_its_own_samples() -> None:
    run: Any = SimpleNamespace(record=LiveRecord())
    run.record.other_samples[ROW] = Samples(ROW, (1.0, 4.0, 2.0), (10, 20, 40), (1e-6,), ("tcp/eth0",))
    ours = {"version": "5", "benchmarks": [{"fullname": name, "name": "n", "stats": {}} for name in (KEY, f"{KEY}-x")]}
    record = other_record(ours, run, other_run(run, AlternateImage("nixl:1", ("python",))))
    [row] = record["benchmarks"]
    assert (record["version"], row["name"], row["extra_info"]["image"]) == ("5", "n", "nixl:1")
    assert [row["stats"][name] for name in ("min", "max", "rounds", "data")] == [0.05, 0.2, 3, [0.1, 0.2, 0.05]]


def test_a_record_is_made_by_the_hooks_of_pytest_benchmark() -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hooks:
        def __getattr__(self, name: str) -> Any:
            def call(**given: Any) -> str:
                calls.append((name.removeprefix("pytest_benchmark_"), given))
                return calls[-1][0]

            return call

    config: Any = SimpleNamespace(hook=Hooks())
    run: Any = SimpleNamespace(record=LiveRecord())
    first, again = (SimpleNamespace(extra_info={"key": KEY}, fullname="", number=number) for number in range(2))
    run.record.benchmarks = [first, again]
    machine, commit = "generate_machine_info", "generate_commit_info"
    values: dict[str, Any] = {"include_data": True, "machine_info": machine, "commit_info": commit}
    record: Any = record_of(config, run)
    assert (record, [given.pop("config") for _, given in calls]) == ("generate_json", [config] * 6)
    assert calls == [
        (machine, {}),
        ("update_machine_info", {"machine_info": machine}),
        (commit, {}),
        ("update_commit_info", {"commit_info": commit}),
        (record, {"benchmarks": [again], **values}),
        ("update_json", {"benchmarks": [first, again], "output_json": record}),
    ]
    assert [note[:17] for note in run.record.notes] == ["2 measurements of"]
