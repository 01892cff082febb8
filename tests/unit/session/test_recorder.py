# SPDX-License-Identifier: Apache-2.0
"""What a run found: how the recorder adds to it, and that nothing else can."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from helpers.records import ROW

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.recorder import Recorder
from pytest_nixl.session.run import Run

SUMMARY = RowSummary(1e9, 1e-6, 1e-6, 10, 0.0, 0.0, ("tcp/eth0",))


def result(nodeid: str, verdict: Verdict = Verdict.PASS) -> Result:
    return Result("bandwidth", nodeid, verdict, "a reason", row=ROW, figures=SUMMARY)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_the_result_of_a_teardown_replaces_that_of_the_call(recorder: Recorder) -> None:
    for one in (result("a"), result("b"), result("a", Verdict.ERROR)):
        recorder.add_result(one)
    assert [(one.nodeid, one.verdict) for one in recorder.found.results] == [("b", Verdict.PASS), ("a", Verdict.ERROR)]


def test_results_of_no_test_do_not_replace_each_other(recorder: Recorder) -> None:
    missing = Result("nixl-loads", "", Verdict.MISSING)
    recorder.add_run_results([missing, missing])
    recorder.add_result(result("a"))
    assert recorder.found.results == (missing, missing, result("a"))


def test_an_explanation_follows_the_reason_of_its_row_only(recorder: Recorder) -> None:
    other = replace(result("b"), row=replace(ROW, block=4096))
    recorder.add_run_results([result("a"), other, Result("nixl-loads", "c", Verdict.PASS)])
    recorder.explain(replace(ROW), "NIXL is slow")
    assert [one.reason for one in recorder.found.results] == ["a reason; NIXL is slow", "a reason", ""]


def test_a_note_is_not_repeated(recorder: Recorder) -> None:
    recorder.note("one", "two")
    recorder.note("two", "three")
    assert recorder.found.notes == ("one", "two", "three")


def test_the_first_interruption_stays(recorder: Recorder) -> None:
    recorder.interrupt("")
    assert recorder.found.interrupted == ""
    recorder.interrupt("INTERRUPTED after 1 of 2 checks: Ctrl-C")
    recorder.interrupt("INTERRUPTED after 2 of 2 checks: a rank was lost")
    assert recorder.found.interrupted == "INTERRUPTED after 1 of 2 checks: Ctrl-C"


def test_versions_and_samples_of_both_images_are_kept_apart(recorder: Recorder) -> None:
    samples = Samples(ROW, (1.0,), (10,), (1e-6,))
    recorder.add_versions({"nixl": "1.5.1"})
    recorder.add_other_versions({"nixl": "1.4.0"})
    recorder.add_other_samples(samples)
    recorder.add_other_samples(samples.with_launch(samples))
    assert (recorder.found.versions, recorder.found.other_versions) == ({"nixl": "1.5.1"}, {"nixl": "1.4.0"})
    assert {key: len(each.windows) for key, each in recorder.found.other_samples.items()} == {ROW: 2}


def test_only_the_recorder_changes_what_was_found(recorder: Recorder, pytestconfig: pytest.Config) -> None:
    before = recorder.found
    recorder.note("a note")
    assert before.notes == ()
    with pytest.raises(FrozenInstanceError):
        recorder.found.ended = "a check failed"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Run(pytestconfig).recorder = recorder
