# SPDX-License-Identifier: Apache-2.0
"""With which earlier run a run is compared, when one more launch could decide that, and how the first one is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.records import KEY, ROW, key, record, write

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import AlternateImage, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.baseline import another_to_compare, compare, find, note_missing_baseline
from pytest_nixl.session.run import LiveRecord
from pytest_nixl.store.record_reader import parse_recorded

MakeSettings = Callable[..., Settings]
OTHER = replace(ROW, block=4096)
#: GB/s of launches: alike, and of half that speed.
FAST, SLOW = (1.0, 1.01, 0.99, 1.02, 0.98), (0.5, 0.505, 0.495, 0.51, 0.49)
#: Of launches that differ too much to decide anything.
UNSTEADY = (0.5, 1.5)


def summary(values: Sequence[float], **more: Any) -> RowSummary:
    return RowSummary.of_launches(tuple(value * 1e9 for value in values), ("tcp/eth0",), **more)


def measured(*rows: tuple[Any, Sequence[float]], verdict: Verdict = Verdict.PASS, **more: Any) -> tuple[Result, ...]:
    """Return the results of rows with the GB/s of each launch."""
    return tuple(Result("bandwidth", f"t[{row}]", verdict, row=row, summary=summary(gb, **more)) for row, gb in rows)


def a_run(settings: Settings, *results: Result, json_file: Any = None, **found: Any) -> Any:
    """Return a run, with a configuration whose record is what pytest-benchmark's hooks are called with."""
    hook = SimpleNamespace(
        **{
            f"pytest_benchmark_{name}": lambda *, of=name, **_: {"made by": of}
            for name in ("generate_machine_info", "update_machine_info", "generate_commit_info", "update_commit_info",
                         "generate_json", "update_json")
        }
    )  # fmt: skip
    config = SimpleNamespace(hook=hook, getoption={"benchmark_json": json_file}.get)
    return SimpleNamespace(
        settings=settings, record=LiveRecord(results=results, **found), rank_session=None, config=config
    )


def samples(values: Sequence[float], row: Any = ROW, contention: Sequence[float] = ()) -> Samples:
    """Return launches of one window each."""
    seconds = tuple(row.block / (value * 1e9) for value in values)
    each = (1,) * len(values)
    return Samples(row, seconds, each, seconds, ("tcp/eth0",), windows_of_launches=each, contention=tuple(contention))


def test_the_baseline_is_read_before_anything_is_measured(tmp_path: Path, make_settings: MakeSettings) -> None:
    write(tmp_path / "old.json", record("nixl:0", {KEY: FAST}, week=0))
    path = write(tmp_path / "new.json", record("nixl:1", {KEY: FAST}, week=1))
    (tmp_path / "torn.json").write_text("{")
    for baseline, store, name in (
        (str(path), "", "nixl:1"),
        (str(tmp_path), "", "nixl:1"),
        ("nixl:0", str(tmp_path), "nixl:0"),
        (str(tmp_path / "none.json"), "", None),  # this run makes the first one
        ("", "", None),
    ):
        run = a_run(make_settings(baseline=baseline, store=store))
        find(run)
        assert (run.record.baseline and run.record.baseline.name) == name
        torn = [note.partition(" is incomplete")[0] for note in run.record.notes]
        assert torn == ([f"skipped: {tmp_path}/torn.json"] if name and baseline != str(path) else [])
    run.settings = make_settings(baseline=str(tmp_path / "torn.json"))
    run.record.baseline = parse_recorded(record("nixl:7", {KEY: FAST}), "r.json")
    find(run)
    assert run.record.baseline.name == "nixl:7", "it is read once"


def test_a_baseline_that_cannot_be_compared_with_is_refused(tmp_path: Path, make_settings: MakeSettings) -> None:
    empty = write(tmp_path / "empty.json", record("nixl:0", {}, results=[Result("nixl-loads", "a", Verdict.PASS)]))
    foreign = write(tmp_path / "foreign.json", record("nixl:0", {KEY: FAST}, cpu="Imaginary 9000"))
    (tmp_path / "store").mkdir()
    for path, refusal in (
        (empty, f"{empty} has no row to compare with: expected the record of a run that measured"),
        (foreign, f"{foreign} was measured on another kind of machine (cpu Imaginary 9000 there, "),
        (tmp_path / "store", f"{tmp_path}/store has no record: expected the record of an earlier run"),
    ):
        run = a_run(make_settings(baseline=str(path)))
        with pytest.raises(pytest.UsageError) as refused:
            find(run)
        assert str(refused.value).startswith(f"--nixl-baseline: {refusal}")
        assert run.record.baseline is None


@pytest.mark.parametrize(
    ("before", "launches", "wanted"),
    [
        ({KEY: FAST}, FAST, False),
        ({KEY: FAST}, UNSTEADY, True),
        ({KEY: FAST}, SLOW, False),
        ({KEY: FAST, key("4KiB"): FAST}, SLOW, True),  # among others this may prove no loss
        ({key("4KiB"): FAST}, UNSTEADY, False),
    ],
    ids=["decided", "undecided", "a-loss", "a-loss-among-others", "not-in-the-baseline"],
)
def test_one_more_launch_is_made_if_it_could_decide(
    make_settings: MakeSettings, before: dict[str, Sequence[float]], launches: Sequence[float], wanted: bool
) -> None:
    baseline = parse_recorded(record("nixl:0", before), "r.json")
    compared = a_run(make_settings(baseline="nixl:0"), baseline=baseline)
    assert another_to_compare(samples(launches), compared) is wanted
    assert not another_to_compare(samples(launches), a_run(make_settings(), baseline=baseline))
    narrow = a_run(make_settings(baseline="nixl:0", max_regression=0.001), baseline=baseline)
    assert another_to_compare(samples(FAST), narrow) is (KEY in before)
    # The same with an image that is measured in turn.
    others = {row: samples(values, row) for row, values in ((ROW, before.get(KEY)), (OTHER, before.get(key("4KiB"))))
              if values}  # fmt: skip
    in_turn = a_run(make_settings(compare_image=AlternateImage("nixl:1", ("env",))), other_samples=others)
    assert another_to_compare(samples(launches), in_turn) is wanted


def test_a_disturbed_launch_proves_no_loss_to_a_baseline(make_settings: MakeSettings) -> None:
    slow = samples(SLOW, contention=(0.0, 0.0, 9.0, 0.0, 0.0))
    recorded = a_run(make_settings(baseline="b"), baseline=parse_recorded(record("nixl:0", {KEY: FAST}), "r.json"))
    in_turn = a_run(make_settings(compare_image=AlternateImage("nixl:1", ("env",))), other_samples={ROW: samples(FAST)})
    assert (another_to_compare(slow, recorded), another_to_compare(slow, in_turn)) == (True, False)


def test_a_row_that_failed_in_the_baseline_is_compared_with_nothing(make_settings: MakeSettings) -> None:
    failed = Result("bandwidth", "a", Verdict.WRONG_TRANSPORT, row=ROW)
    baseline = parse_recorded(record("nixl:0", {KEY: FAST}, results=[failed]), "r.json")
    assert not another_to_compare(samples(UNSTEADY), a_run(make_settings(baseline="b"), baseline=baseline))


def test_a_run_is_compared_with_its_baseline_once(make_settings: MakeSettings) -> None:
    baseline = parse_recorded(record("nixl:0", {KEY: FAST}), "r.json")
    run = a_run(make_settings(baseline="b", max_regression=0.05), *measured((ROW, SLOW)), baseline=baseline)
    for _ in range(2):
        compare(run)
        assert [result.verdict for result in run.record.results] == [Verdict.PASS, Verdict.REGRESSED]
    assert (run.record.comparison.before, run.record.comparison.margin) == (baseline, 0.05)
    assert run.record.results[1].reason.startswith(f"{KEY} against nixl:0: -50.0 %")
    assert "to exclude every other change between the two runs" in run.record.results[1].remedy, "not in turn"
    alone = a_run(make_settings(baseline="image:1"), *measured((ROW, SLOW)))  # none was read
    compare(alone)
    assert (alone.record.comparison, len(alone.record.results), alone.record.notes) == (None, 1, ())


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ({"ucx": "2", "nixl": "1", "python": "3"}, {"ucx": "2", "nixl": "1", "python": "3"}, "nixl 1, ucx 2"),
        ({"ucx": "2"}, {"ucx": "2"}, "ucx 2"),
        ({"ucx": "2", "nixl": "1"}, {"ucx": "2", "nixl": "0"}, None),
    ],
    ids=["alike", "alike-as-far-as-known", "another-nixl"],
)
def test_two_images_that_are_measured_in_turn_should_differ(
    make_settings: MakeSettings, ours: dict[str, str], theirs: dict[str, str], same: str | None
) -> None:
    run = a_run(
        make_settings(compare_image=AlternateImage("nixl:1", ("env", "UCX_TLS=tcp"))), *measured((ROW, SLOW)),
        other_samples={ROW: samples(FAST)}, versions=ours, other_versions=theirs,
    )  # fmt: skip
    compare(run)
    assert run.record.comparison.before.name == "nixl:1"
    assert "Both images were measured now, in turn" in run.record.results[1].remedy
    note = f"both images report the same versions ({same}): if they should be two builds, see that the command of "
    assert run.record.notes == (() if same is None else (f"{note}--nixl-compare-image loads the other one",))


STEADY = "the launches of a row differ by up to 4 % (UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1)"
DISTURBED = "other processes used cores that were needed in 1 of 5 launches"
AGAIN = " Better record it again on an idle machine: such launches prove nothing later."
NEXT = "the next run is compared with it."
CANNOT = "; this run cannot be the first baseline, because "
REPAIR = "repair that, and run again"
WRITTEN = "; this run is the first baseline, and was written there: "


@pytest.mark.parametrize(
    ("results", "gate", "json_file", "reason", "remedy"),
    [
        (measured((ROW, FAST)), False, None, f"{WRITTEN}{STEADY}", f"review it and keep it: {NEXT}"),
        (measured((ROW, FAST), contention=(0.0, 9.0, 0.0, 0.0, 0.0)), False, None,
         f"{WRITTEN}{STEADY}, and {DISTURBED}", f"review it and keep it: {NEXT}{AGAIN}"),
        *((measured((ROW, FAST)), False, file, f"; the record of this run can be the first baseline: {STEADY}",
           f"review out.json, and put it at BASELINE: {NEXT}")
          for file in (Path("out.json"), SimpleNamespace(name="out.json"))),
        (measured((ROW, FAST), contention=(0.0, 9.0, 0.0, 0.0, 0.0)), False, Path("out.json"),
         f"; the record of this run can be the first baseline: {STEADY}, and {DISTURBED}",
         f"review out.json, and put it at BASELINE: {NEXT}{AGAIN}"),
        ((), False, None, f"{CANNOT}no row was recorded", REPAIR),
        (measured((ROW, FAST), verdict=Verdict.FAIL), False, None, f"{CANNOT}a check failed", REPAIR),
        (measured((ROW, FAST), verdict=Verdict.UNKNOWN), True, None, f"{CANNOT}a check failed", REPAIR),
        (measured((ROW, FAST), verdict=Verdict.UNKNOWN), False, None, f"{WRITTEN}{STEADY}",
         f"review it and keep it: {NEXT}"),
    ],
    ids=["written", "disturbed", "a-record-elsewhere", "an-older-pytest-benchmark", "elsewhere-and-disturbed", "no-row",
         "failed", "undecided-with-the-gate", "undecided"],
)  # fmt: skip
def test_the_first_run_makes_the_baseline_and_says_so(
    tmp_path: Path, make_settings: MakeSettings, results: tuple[Result, ...], gate: bool, json_file: Any, reason: str,
    remedy: str,
) -> None:  # fmt: skip
    path = tmp_path / "baseline.json"
    run = a_run(make_settings(baseline=str(path), gate=gate), *results, json_file=json_file)
    compare(run)
    told = f"{path} does not exist, so no row was compared with an earlier run{reason}"
    expected = Result("regression", "", Verdict.NO_EXPECTATION, told, remedy.replace("BASELINE", str(path)))
    assert run.record.results == (*results, expected)
    assert run.record.comparison is None
    written = json.loads(path.read_text()) if path.exists() else None
    assert written == ({"made by": "generate_json"} if reason.startswith(WRITTEN) else None)


def test_a_baseline_that_cannot_be_written_is_kept_by_the_user(make_settings: MakeSettings) -> None:
    run = a_run(make_settings(baseline="/proc/no/baseline.json"), *measured((ROW, FAST)))
    compare(run)
    assert run.record.results[1:] == (
        Result(
            "regression", "", Verdict.NO_EXPECTATION,
            "/proc/no/baseline.json does not exist, so no row was compared with an earlier run; it cannot be written "
            "there",
            "keep this run's record (--benchmark-json FILE, or --nixl-store DIR), review it, and put it at "
            "/proc/no/baseline.json",
        ),
    )  # fmt: skip


def test_an_interrupted_first_run_says_that_there_is_still_no_baseline(make_settings: MakeSettings) -> None:
    for baseline, notes in (
        ("none.json", ("still no baseline: none.json does not exist, and the record of an interrupted run cannot be "
                       "one: run again to the end",)),
        ("image:1", ()),
    ):  # fmt: skip
        run = a_run(make_settings(baseline=baseline))
        note_missing_baseline(run)
        assert run.record.notes == notes
