# SPDX-License-Identifier: Apache-2.0
"""Comparison of two recorded runs: missing, new and failed rows, and the differences between the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import scipy.stats  # noqa: F401 - its import takes seconds: let no test wait for it
from helpers.records import KEY, ROW, key, record

from pytest_nixl.judge.regression import Effect
from pytest_nixl.judge.run_comparison import (
    change_text,
    compare_runs,
    refuse_other_machine,
    steadiness,
    wants_launch,
)
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import COMPARED_LAUNCHES, MOST_LAUNCHES
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

QUIET = [1.0, 1.001, 0.999, 1.002, 0.998]
LOST = [0.85 * value for value in QUIET]


def run(
    image: str, rows: dict[str, list[float]], more: Mapping[str, Mapping[str, Any]] | None = None, **facts: Any
) -> RecordedRun:
    """Return a run with the launches of each row in GB/s.

    :param more: further values that a row recorded, by row.
    """
    data = record(image, rows, **facts)
    for benchmark in data["benchmarks"]:
        benchmark["extra_info"] |= (more or {}).get(benchmark["fullname"], {})
    return parse_recorded(data, f"{image}.json")


def failed(row: str, verdict: Verdict, remedy: str = "") -> Result:
    return Result("bandwidth", "x", verdict, "r", remedy, row=RowKey.parse(row))


HALF, NOISE = [0.5 * value for value in QUIET], [1.0, 1.4, 0.6, 1.5, 0.7, 1.3, 0.8]
SMALL, LARGE, BENCH = key("4KiB"), key("1MiB"), str(ROW.measured_by("nixlbench"))
#: A launch counts while other processes used at most 0.3 of its cores, and a kernel over 8 bytes took half a ms.
BUSY, IDLE = [0.0, 0.31, 1.8, 0.3, 0.1], [0.0, 0.3, 0.1, 0.3, 0.0]
BUSY_GPU_US = [15.0, 2100.0, 100.0, 327.0, 31.0]
CORES = {KEY: {"others_cores": BUSY}}
BEFORE, BOTH = run("a:1", {KEY: QUIET}), run("a:1", {KEY: QUIET, LARGE: QUIET})

PROVEN = "5 launches against 5, p = 0.004"
OF_ROW = f"{KEY} against a:1: "
LOSS, HALVED = f"-15.0 % (between -15.2 % and -14.8 %), {PROVEN}", f"-50.0 % (between -50.1 % and -49.9 %), {PROVEN}"
SAME = ("UNCHANGED", "", f"{OF_ROW}+0.0 % (between -0.2 % and +0.2 %), 5 launches against 5, p = 0.73", "")
SAME_LARGE = ("UNCHANGED", "", SAME[2].replace(KEY, LARGE), "")
TURN = ", or measure the two images in turn with --nixl-compare-image"
DECIDE = "; launches of one image that differ by more than 5 % decide nothing."
SEVEN = "Stop other processes on the machine, and run again with --nixl-min-launches=7"
LAST = "Stop other processes on the machine, and run again (with 7 launches, the most that are made)"
NOTHING = (
    "Differences from a:1: nothing that is recorded. Measure the two images in turn with --nixl-compare-image, to "
    "exclude every other change between the two runs."
)
IN_TURN = "Both images were measured now, in turn: search for the cause among these differences."
CHANGED = (
    "image: a:1 -> a:2; versions ucx: 1.19.0 -> 1.20.0; UCX_TLS=rc was set before, and is not set in this run; "
    "UCX_RNDV_THRESH=1 is set in this run, and was not set before"
)
NOISY = f"{OF_ROW}+0.0 % (between "
MISSING_REMEDY = "Measure the rows of the baseline, or record a new baseline if this row is no longer wanted."
NOT_MEASURED = "of a:1 is missing in this run: it was not measured, or its key changed"
NO_COMPARISON = "of a:1 cannot be compared with this run, in which the verdict is"
OTHERS = "; other processes used"


@pytest.mark.parametrize(
    ("before", "now", "in_turn", "results"),
    [
        (run("a:1", {KEY: QUIET}, versions={"ucx": "1.19.0", "nixl": "1.5.1"}, environment={"UCX_TLS": "rc"}),
         run("a:2", {KEY: LOST}, versions={"ucx": "1.20.0", "nixl": "1.5.1"}, environment={"UCX_RNDV_THRESH": "1"}),
         False,
         [("REGRESSED", "", f"{OF_ROW}{LOSS}", NOTHING.replace("nothing that is recorded", CHANGED))]),
        (BEFORE, run("a:2", {KEY: LOST}), True,
         [("REGRESSED", "", f"{OF_ROW}{LOSS}", f"Differences from a:1: image: a:1 -> a:2. {IN_TURN}")]),
        # Too few launches, or too wide a spread: no number that was measured is advised.
        (run("a:1", {KEY: QUIET[:4]}), run("a:1", {KEY: LOST[:4]}), False,
         [("INCONCLUSIVE", "", f"{OF_ROW}{LOSS}".replace(PROVEN, "4 launches against 4, p = 0.014"),
           "4 launches against 4 give p = 0.014 at best: run with --nixl-min-launches=6.")]),
        (run("a:1", {KEY: QUIET[:1]}), run("a:1", {KEY: LOST}), False,
         [("INCONCLUSIVE", "", f"{OF_ROW}-15.0 %, 5 launches against 1, p = 0.17", "5 launches against 1 give p = 0.17 "
           "at best: record the baseline with --nixl-min-launches=7.")]),
        *((BEFORE, run("a:1", {KEY: NOISE[:5]}), in_turn,
           [("INCONCLUSIVE", "", f"{NOISY}-39.9 % and +49.7 %), 5 launches against 5, p = 0.58",
             f"{SEVEN}{turn}{DECIDE}")])
          for in_turn, turn in ((False, TURN), (True, ""))),
        (BEFORE, run("a:1", {KEY: NOISE}), False,
         [("INCONCLUSIVE", "", f"{NOISY}-30.1 % and +40.1 %), 7 launches against 5, p = 0.56",
           "Stop other processes on the machine, and record a:1 again with --nixl-min-launches=7: it has 5 launches"
           f"{TURN}{DECIDE}")]),
        (BEFORE, run("a:1", {KEY: NOISE}), True,
         [("INCONCLUSIVE", "", f"{NOISY}-30.1 % and +40.1 %), 7 launches against 5, p = 0.56", f"{LAST}{DECIDE}")]),
        (run("a:1", {KEY: [*QUIET, 1.0, 1.0]}), run("a:1", {KEY: NOISE}), False,
         [("INCONCLUSIVE", "", f"{NOISY}-30.0 % and +40.0 %), 7 launches against 7, p = 0.6",
           f"{LAST}{TURN}{DECIDE}")]),
        # No loss. Rows of other programs are not compared.
        (BEFORE, BEFORE, False, [SAME]),
        (BOTH, BOTH, False, [("UNCHANGED", "", "2 rows together against a:1: +0.0 % (between -0.2 % and +0.2 %), 5 "
                              "launches against 5, p = 0.55", "")]),
        (run("a:1", {KEY: LOST}), BEFORE, False,
         [("IMPROVED", "", f"{OF_ROW}+17.6 % (between +17.4 % and +17.9 %), {PROVEN}", "")]),
        *((run("a:1", {KEY: QUIET, **old}), run("a:1", {KEY: QUIET, **new}), False, [SAME])
          for old, new in (({BENCH: QUIET}, {BENCH: LOST}), ({BENCH: QUIET}, {}), ({}, {BENCH: QUIET}))),
        # Rows of one run only. A worker that measured nothing reported no version.
        (BOTH, run("a:1", {KEY: QUIET, SMALL: QUIET}), False,
         [("MISSING", LARGE, f"the row {LARGE} {NOT_MEASURED}", MISSING_REMEDY),
          ("NO-EXPECTATION", SMALL, f"the row {SMALL} is not in a:1: there is nothing to compare it with",
           "Record a new baseline with this row."), SAME]),
        (run("a:1", {KEY: QUIET}, versions={"ucx": "1.23.0"}),
         run("a:1", {}, results=[Result("x", "x", Verdict.PASS)]), False,
         [("MISSING", KEY, f"the row {KEY} {NOT_MEASURED}", MISSING_REMEDY),
          ("MISSING", "", "no row of a:1 was measured in this run: there is nothing to compare",
           "Run the bandwidth suite with the rows of the baseline.")]),
        # A row has its transports only if they changed, and those before are known.
        (run("a:1", {KEY: QUIET, LARGE: QUIET, SMALL: QUIET}, {KEY: {"transports": ["rc", "cma"]},
                                                               SMALL: {"transports": []}}),
         run("a:1", {KEY: HALF, LARGE: HALF, SMALL: HALF}, {KEY: {"transports": ["tcp"]}}), False,
         [("REGRESSED", "", f"3 rows together against a:1: {HALVED}", NOTHING),
          ("REGRESSED", KEY, f"{OF_ROW}0.5 GB/s after 1 GB/s, over tcp after rc+cma: {HALVED}", NOTHING),
          *(("REGRESSED", row, f"{row} against a:1: 0.5 GB/s after 1 GB/s: {HALVED}", NOTHING)
            for row in (LARGE, SMALL))]),
        # A row that failed on either side has no bandwidth. Those that failed alike are one result.
        *((run("a:1", {KEY: QUIET, LARGE: QUIET}, results=[failed(KEY, verdict)]), BOTH, False,
           [("INCONCLUSIVE", KEY, f"the row {KEY} of a:1 is unusable as a baseline: the row failed there",
             "Use a run in which this row did not fail as the baseline."), SAME_LARGE])
          for verdict in (Verdict.CORRUPT, Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE, Verdict.ERROR)),
        *((BOTH, run("a:1", {KEY: QUIET, LARGE: QUIET}, results=[failed(KEY, verdict)]), False,
           [("MISSING", KEY, f"{KEY} {NO_COMPARISON} {verdict}", "Follow the remedy of that verdict."), SAME_LARGE])
          for verdict in (Verdict.CORRUPT, Verdict.IMPLAUSIBLE, Verdict.ERROR)),
        (BOTH, run("a:1", {KEY: QUIET, LARGE: QUIET}, results=[failed(KEY, Verdict.ERROR, "r"),
                                                               failed(LARGE, Verdict.ERROR, "r")]), False,
         [("MISSING", "rows that are ERROR", f"2 rows {NO_COMPARISON} ERROR", "r")]),
        (BOTH, run("a:1", {KEY: QUIET, LARGE: QUIET}, results=[failed(KEY, Verdict.ERROR, "r"),
                                                               failed(LARGE, Verdict.ERROR, "s")]), False,
         [("MISSING", KEY, f"{KEY} {NO_COMPARISON} ERROR", "r"),
          ("MISSING", LARGE, f"{LARGE} {NO_COMPARISON} ERROR", "s")]),
        # Launches that other processes disturbed prove no loss of two runs of different times.
        (BEFORE, run("a:1", {KEY: LOST}, CORES), True,
         [("REGRESSED", "", f"{OF_ROW}{LOSS}", f"Differences from a:1: nothing that is recorded. {IN_TURN}")]),
        (BEFORE, run("a:1", {KEY: LOST}, {KEY: {"others_cores": IDLE, "gpu_waits_us": [31.0] * 5}}), False,
         [("REGRESSED", "", f"{OF_ROW}{LOSS}", NOTHING)]),
        *((BEFORE, run("a:1", {KEY: LOST}, {KEY: used}), False,
           [("INCONCLUSIVE", "", f"{OF_ROW}{LOSS}{OTHERS} {which} of 5 launches of this run, which prove nothing",
             f"{SEVEN}{TURN}{DECIDE}")])
          for used, which in (({"others_cores": BUSY}, "cores that were needed in 2"),
                              ({"gpu_waits_us": BUSY_GPU_US}, "a GPU that was needed in 2"),
                              ({"others_cores": [0.4, 0, 0, 0, 0], "gpu_waits_us": BUSY_GPU_US},
                               "cores and a GPU that were needed in 3"))),
        (BOTH, run("a:1", {KEY: LOST, LARGE: QUIET}, CORES), False,
         [("INCONCLUSIVE", "", f"2 rows together against a:1: -7.8 % (between -8.0 % and -7.6 %), {PROVEN}{OTHERS} "
           "cores that were needed in 2 of 10 launches of this run, which prove nothing", f"{SEVEN}{TURN}{DECIDE}"),
          ("INCONCLUSIVE", KEY, f"{OF_ROW}0.85 GB/s after 1 GB/s: {LOSS}{OTHERS} cores that were needed in 2 of 5 "
           "launches of this run, which prove nothing", f"{SEVEN}{TURN}{DECIDE}")]),
        # A disturbed baseline proves no gain, and not that nothing was lost: it needs another baseline, no other run.
        *((run("a:1", {KEY: QUIET}, CORES), run("a:1", {KEY: QUIET}, used), False,
           [(verdict, "",
             f"{SAME[2]}{OTHERS} cores that were needed in {which}2 of 5 launches of a:1, which prove nothing",
             f"Record a:1 again on an idle machine. {SEVEN}{TURN}{DECIDE}")])
          for used, verdict, which in (
              ({}, "NO-EXPECTATION", ""),
              ({KEY: {"others_cores": [0, 0, 0, 0, 1.0]}}, "INCONCLUSIVE", "1 of 5 launches of this run and in "))),
        (run("a:1", {KEY: QUIET}, CORES), run("a:1", {KEY: LOST}), False,
         [("REGRESSED", "", f"{OF_ROW}{LOSS}", NOTHING)]),
    ],
)  # fmt: skip
def test_the_results_of_two_runs(
    before: RecordedRun, now: RecordedRun, in_turn: bool, results: list[tuple[str, str, str, str]]
) -> None:
    compared = compare_runs(before, now, 0.05, in_turn=in_turn)
    shown = [(str(result.verdict), result.subject, result.reason, result.remedy) for result in compared.results]
    assert shown == results
    # JUnit had the cases regression, regression#2 …, so that a row's case was another one in each run.
    names = [f"regression[{subject}]" if subject else "regression" for _, subject, _, _ in results]
    assert [result.name for result in compared.results] == names
    assert compared.changes == () or now.name == "a:2"


def test_of_many_differences_eight_are_named() -> None:
    environment = {f"UCX_{number}": "1" for number in range(10)}
    for count, more in ((8, ""), (10, " and 2 more")):
        before = run("a:1", {KEY: QUIET}, environment=dict(list(environment.items())[:count]))
        [result] = compare_runs(before, run("a:1", {KEY: LOST}), 0.05).results
        assert f"UCX_7=1 was set before, and is not set in this run{more}. Measure the two images" in result.remedy
        assert result.remedy.count("was set before") == 8


def contended(image: str, rows: dict[str, list[float]], cores: dict[str, list[float]]) -> RecordedRun:
    """Return a run during whose launches other processes used cores, by row; no other row had any."""
    return run(image, rows, {row: {"others_cores": used} for row, used in cores.items()})


def test_a_row_that_the_disturbed_launches_of_another_hold_names_those() -> None:
    """All rows give as many launches as the row with the fewest undisturbed ones."""
    other = key("1MiB")
    old = {
        KEY: [1.064, 1.072, 1.003, 0.962, 0.945, 1.002, 0.949],
        other: [0.928, 1.01, 1.007, 1.027, 0.954, 1.0, 0.997],
    }
    new = {
        KEY: [0.795, 0.897, 0.886, 0.989, 0.88, 0.863, 0.932],
        other: [1.01, 1.045, 0.982, 1.011, 1.051, 1.035, 1.006],
    }
    compared = compare_runs(run("a:1", old), contended("a:2", new, {other: [0.0] * 5 + [1.0] * 2}), 0.05)
    [result_of_row] = [result for result in compared.results if result.subject == KEY]
    assert result_of_row.verdict is Verdict.INCONCLUSIVE
    assert result_of_row.reason.endswith(
        "used cores that were needed in 2 of 14 launches of this run, which prove nothing"
    )


def test_a_disturbed_baseline_proves_no_gain_and_enough_undisturbed_launches_a_loss() -> None:
    """The launches of a disturbed baseline may have been slower than its image is."""
    better = run("a:2", {KEY: [1.5 * value for value in [*QUIET, 1.0, 1.0]]})
    apart, cores = {KEY: [1.1, *QUIET, 1.0]}, {KEY: [0.0] * 5 + [1.0] * 2}
    for before, now, verdict in (
        (BEFORE, better, Verdict.IMPROVED),
        (contended("a:1", {KEY: QUIET}, {KEY: BUSY}), better, Verdict.INCONCLUSIVE),
        (run("a:1", apart), run("a:2", {KEY: QUIET}), Verdict.UNCHANGED),
        (contended("a:1", apart, cores), run("a:2", {KEY: QUIET}), Verdict.INCONCLUSIVE),
        (BEFORE, contended("a:2", {KEY: [*LOST, 0.1, 0.2]}, cores), Verdict.REGRESSED),
    ):
        assert compare_runs(before, now, 0.05).comparison.verdict is verdict


def test_a_loss_that_no_row_proves_is_none_of_two_runs_of_different_times() -> None:
    """What all rows of one run share slows them together: a recorded run was REJECTED for the load of its host."""
    blocks = ("64KiB", "256KiB", "1MiB", "4MiB")
    wide = [0.86, 0.93, 1.0, 1.08, 1.16]
    old = {key(block): [*wide[place:], *wide[:place]] for place, block in enumerate(blocks)}
    new = {name: [0.86 * value for value in reversed(values)] for name, values in old.items()}
    before, now = run("a:1", old), run("a:2", new)
    turned = compare_runs(before, now, 0.05, in_turn=True).comparison
    assert turned.verdict is Verdict.REGRESSED
    assert all(effect.verdict is Verdict.INCONCLUSIVE for effect in turned.rows.values())
    [result] = compare_runs(before, now, 0.05).results
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reason.endswith(
        "; no single row proves a loss, and what all rows of one run share may have made this one"
    )
    assert "measure the two images in turn with --nixl-compare-image" in result.remedy


def test_a_first_baseline_is_told_to_be_as_good_as_its_launches_are() -> None:
    wide = {KEY: QUIET, key("1MiB"): [1.0, 0.9, 1.3]}
    expected = f"the launches of a row differ by up to 40 % ({key('1MiB')})"
    assert steadiness(run("a:1", wide).rows) == (expected, True)
    description, idle = steadiness(contended("a:1", wide, {KEY: BUSY}).rows)
    assert (description, idle) == (
        f"{expected}, and other processes used cores that were needed in 2 of 8 launches",
        False,
    )
    assert steadiness(run("a:1", {KEY: [1.0]}).rows) == ("each row has one launch, so its spread is not known", True)
    for rows in ({KEY: [1.0], **wide}, {key("4KiB"): [1.0], **wide}, {**wide, key("4KiB"): [1.0]}):
        assert "is not known" not in steadiness(run("a:1", rows).rows)[0]
    few = {key("4KiB"): [1.0, 1.1], KEY: [1.0]}
    assert "is not known" not in steadiness(run("a:1", few).rows)[0]


def test_rows_that_failed_alike_are_one_result_and_one_row_is_named() -> None:
    small, large, corrupt = key("4KiB"), key("1MiB"), key("2MiB")
    old = {small: [2.0] * 5, large: [9.0] * 5, corrupt: QUIET, key("8KiB"): QUIET}
    wrong = [Result("bandwidth", "x", Verdict.WRONG_TRANSPORT, "r", remedy, row=RowKey.parse(name))
             for name, remedy in ((small, "a"), (large, "a"), (key("8KiB"), "b"))]  # fmt: skip
    bad = Result("bandwidth", "x", Verdict.CORRUPT, "r", row=RowKey.parse(corrupt))
    over_rc = {name: {"transports": ["dc" if name == small else "rc"]} for name in old}
    over_tcp = {name: {"transports": ["cma" if name == large else "tcp"]} for name in old}
    before = run("a:1", old, over_rc, environment={"HOME": "/x"})
    new = {**old, small: [1.0] * 5, large: [4.0] * 5}
    now = run("a:2", new, over_tcp, results=[*wrong, bad], environment={"UCX_TLS": "tcp"})
    cause = "UCX_TLS=tcp is set in this run, and was not set before; "
    alone = key("8KiB")
    results = compare_runs(before, now, 0.05).results
    assert [(str(result.verdict), result.subject, result.reason, result.remedy) for result in results] == [
        ("WRONG-TRANSPORT", "rows that are WRONG-TRANSPORT", f"{cause}2 rows went over tcp or cma instead of dc or rc "
         "as in a:1: 1 to 4 GB/s after 2 to 9 GB/s", "a"),
        ("MISSING", corrupt, f"{corrupt} of a:1 cannot be compared with this run, in which the verdict is CORRUPT",
         "Follow the remedy of that verdict."),
        ("WRONG-TRANSPORT", alone, f"{cause}{alone} went over tcp instead of rc as in a:1: 1 GB/s after 1 GB/s", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "text"),
    [((0.891, 0.904), "-10.0 % [-10.9, -9.6]"), (None, "-10.0 %"), ((0.9, 1.1), "-10.0 % [-10.0, +10.0]")],
)
def test_a_cell_has_the_change_and_its_interval(interval: tuple[float, float] | None, text: str) -> None:
    assert change_text(Effect(Verdict.UNCHANGED, 0.9, interval, 0.5, 5, 5)) == text


def test_which_rows_get_a_result_of_their_own_and_why() -> None:
    """One that REGRESSED, one that is MISSING, one that is new, and one that lost clearly only if it were alone."""
    before = {
        "1KiB": QUIET,
        "64KiB": QUIET,
        "256KiB": [0.932, 1.033, 1.006, 1.041, 0.985],
        "1MiB": [1.012, 0.991, 0.978, 1.004, 0.962],
        "4MiB": [0.989, 1.021, 1.002, 0.988, 1.066],
        "16MiB": [1.002, 0.982, 1.005, 0.984, 0.988],
        "64MiB": [0.989, 1.061, 1.001, 1.005, 1.02],
    }
    after = {
        "64KiB": LOST,
        "256KiB": [0.86, 0.887, 0.93, 0.846, 0.806],  # each is below each of the baseline, but the spread is wide
        "1MiB": [1.02, 0.984, 0.988, 1.014, 1.007],
        "4MiB": [1.009, 0.987, 1.039, 1.045, 1.001],
        "16MiB": [0.986, 1.022, 1.014, 0.969, 0.986],
        "64MiB": [1.031, 0.997, 0.99, 1.006, 0.999],
        "1GiB": QUIET,
    }
    old, now = (run(name, {key(size): rates for size, rates in rows.items()})
                for name, rows in (("a:1", before), ("a:2", after)))  # fmt: skip
    results = {result.subject: result for result in compare_runs(old, now, 0.05).results}
    assert {name: str(result.verdict) for name, result in results.items() if name} == {
        key("1KiB"): "MISSING",
        key("64KiB"): "REGRESSED",
        key("256KiB"): "INCONCLUSIVE",
        key("1GiB"): "NO-EXPECTATION",
    }
    assert results[key("256KiB")].reason.endswith(
        "; if it were the only row, this would prove a loss; among 6 rows p is larger, and must be at most 0.005"
    )


def test_another_kind_of_machine_is_refused_with_each_difference() -> None:
    hosts = ({"cpu": "Xeon", "cores": 8, "gpus": 0}, {"cpu": "EPYC", "cores": 8, "gpus": 8})
    before, now = (run("a:1", {KEY: QUIET}, None, nics={}, **host) for host in hosts)
    with pytest.raises(ValueError) as caught:
        refuse_other_machine(before, now)
    assert str(caught.value) == (
        "a:1.json was measured on another kind of machine (cpu Xeon there, EPYC here; gpus 0 there, 8 here): expected "
        "a record of this kind of machine, because only then the image can explain a difference"
    )


def test_a_further_launch_is_wanted_only_while_it_could_decide() -> None:
    apart, noisy = [0.5 * value for value in QUIET], [0.5, 1.5, 0.6, 1.4, 1.0]
    assert not wants_launch(None, noisy, 0.05), "the baseline has no such row"
    assert not wants_launch(QUIET, QUIET, 0.05)
    assert not wants_launch(QUIET, LOST, 0.05)
    assert wants_launch(QUIET, LOST, 0.05, disturbed=True), "undisturbed launches may prove the loss"
    assert wants_launch(QUIET, LOST, 0.05, among_others=True), "five may prove no loss in one row of several"
    assert not wants_launch(QUIET, QUIET, 0.05, disturbed=True, among_others=True)
    assert not wants_launch(QUIET, apart, 0.05)
    assert wants_launch(QUIET, noisy, 0.05)
    assert wants_launch(QUIET, [1.0] * (COMPARED_LAUNCHES + 1), 0.05), "the second test comes after the last launch"
    assert wants_launch(QUIET, [1.0] * (MOST_LAUNCHES - 1), 0.05)
    assert not wants_launch(QUIET, noisy[:1] * MOST_LAUNCHES, 0.05)
