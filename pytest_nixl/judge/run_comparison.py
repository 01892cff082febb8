# SPDX-License-Identifier: Apache-2.0
"""Compare two runs: row by row, all rows pooled, missing rows, and the differences that may explain a change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_nixl.core import units
from pytest_nixl.judge.regression import (
    PROOF,
    Effect,
    RegressionTest,
    change,
    compare_launches,
    compare_rows,
    launches_for,
    least_p,
    of_two_times,
)
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import COMPARED_LAUNCHES, MOST_LAUNCHES
from pytest_nixl.model.verdicts import NO_BANDWIDTH, Verdict
from pytest_nixl.store.provenance import Change, changes, other_machine
from pytest_nixl.store.record_reader import RecordedRun

#: The id of the check that a comparison is.
CHECK = "regression"

#: A row with one of these verdicts has no bandwidth to compare.

#: The environment variables that can change the transport of a backend, by the beginnings of their names.
_STEERED_BY = {"UCX": ("UCX_",), "LIBFABRIC": ("FI_",)}


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing the run ``now`` with the run ``before``.

    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    :param results: the verdict over all rows, and one result for each row that is REGRESSED, suspect, MISSING or new,
        and one for all rows that failed alike now.
    :param changes: what differs between the two runs and may explain a change.
    """

    before: RecordedRun
    now: RecordedRun
    margin: float
    comparison: RegressionTest[RowKey]
    results: tuple[Result, ...]
    changes: tuple[Change, ...]


def refuse_other_machine(before: RecordedRun, now: RecordedRun) -> None:
    """Refuse to compare runs of two kinds of machine. :raises ValueError: with the differences."""
    if different := other_machine(before.provenance, now.provenance):
        differing = "; ".join(f"{item.what} {item.before} there, {item.now} here" for item in different)
        raise ValueError(
            f"{before.source} was measured on another kind of machine ({differing}): expected a record of this kind of "
            "machine, because only then the image can explain a difference"
        )


def compare_runs(before: RecordedRun, now: RecordedRun, margin: float, *, in_turn: bool = False) -> RunComparison:
    """Compare a run with another one.

    Rows that an external program measured are left out, because they are measured only once.

    :param before: the baseline.
    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    :param in_turn: whether both images were measured now, in alternating launches.
    """
    before, now = _nixl_rows(before), _nixl_rows(now)
    old, new = usable_rows(before), usable_rows(now)
    comparison = _compared(old, new, margin, in_turn)
    # Workers report versions: a run in which none measured a row did not lose them.
    different = tuple(
        item
        for item in changes(before.provenance, now.provenance)
        if item.now or now.rows or not item.what.startswith("versions ")
    )
    results = (
        *_failed(before, now, different),
        *_missing(before, now, old, new),
        *_pooled(before, now, comparison, margin, different, in_turn, old, new),
        *_rows(before, old, new, comparison, margin, different, in_turn),
    )
    return RunComparison(before, now, margin, comparison, results, different)


def _compared(
    old: Mapping[RowKey, RowSummary], new: Mapping[RowKey, RowSummary], margin: float, in_turn: bool
) -> RegressionTest[RowKey]:
    before, now = ({key: row.values for key, row in rows.items()} for rows in (old, new))
    comparison = compare_rows(before, now, margin)
    if in_turn:
        return comparison
    quiet_before, quiet_now = _quiet(old, new), _quiet(new, old)
    losses = comparison if quiet_now == now else compare_rows(before, quiet_now, margin)
    gains = comparison if quiet_before == before else compare_rows(quiet_before, now, margin)
    return of_two_times(comparison, losses, gains)


def _quiet(
    rows: Mapping[RowKey, RowSummary], other_rows: Mapping[RowKey, RowSummary]
) -> dict[RowKey, tuple[float, ...]]:
    """Return the undisturbed launches of each row that has enough of them to prove a change, or was never disturbed.

    :param other_rows: the rows of the other run.
    """
    return {
        key: row.undisturbed
        for key, row in rows.items()
        if row.undisturbed == row.values
        or (key in other_rows and least_p(len(row.undisturbed), len(other_rows[key].values)) <= PROOF)
    }


def _nixl_rows(run: RecordedRun) -> RecordedRun:
    return replace(run, rows={key: row for key, row in run.rows.items() if not key.program})


def wants_launch(
    before: Sequence[float] | None,
    values: Sequence[float],
    margin: float,
    *,
    disturbed: bool = False,
    among_others: bool = False,
) -> bool:
    """Whether one more launch of a row could decide its comparison.

    :param before: bytes per second of each launch of the baseline; None: the baseline has no such row.
    :param values: bytes per second of each launch so far.
    :param margin: the loss up to which a row is unchanged: 0.05 is 5 %.
    :param disturbed: whether other processes used the row's cores in one of them, so that it proves no loss.
    :param among_others: whether other rows are compared too, so that these launches may prove no loss among theirs.
    """
    if before is None or len(values) >= MOST_LAUNCHES:
        return False
    if len(values) > COMPARED_LAUNCHES:
        return True  # the first test, after COMPARED_LAUNCHES, was inconclusive; the second is after MOST_LAUNCHES
    verdict = compare_launches(before, values, margin).verdict
    return verdict is Verdict.INCONCLUSIVE or ((disturbed or among_others) and verdict is Verdict.REGRESSED)


def usable_rows(run: RecordedRun) -> dict[RowKey, RowSummary]:
    """Return the rows whose bytes arrived correctly and over an accepted transport."""
    bad = {result.row for result in run.results if result.verdict in NO_BANDWIDTH}
    return {key: row for key, row in run.rows.items() if key not in bad}


def _missing(
    before: RecordedRun, now: RecordedRun, old: Mapping[RowKey, RowSummary], new: Mapping[RowKey, RowSummary]
) -> Iterator[Result]:
    for key in before.rows:
        if key not in old:
            reason = f"the row {key} of {before.name} is unusable as a baseline: the row failed there"
            yield _result(
                Verdict.INCONCLUSIVE, reason, "Use a run in which this row did not fail as the baseline.", key
            )
        elif key not in now.rows:
            reason = f"the row {key} of {before.name} is missing in this run: it was not measured, or its key changed"
            remedy = "Measure the rows of the baseline, or record a new baseline if this row is no longer wanted."
            yield _result(Verdict.MISSING, reason, remedy, key)
    for key in new:
        if key not in before.rows:
            reason = f"the row {key} is not in {before.name}: there is nothing to compare it with"
            yield _result(Verdict.NO_EXPECTATION, reason, "Record a new baseline with this row.", key)


def failed_rows(before: RecordedRun, now: RecordedRun) -> dict[RowKey, Result]:
    """Return the rows that both runs measured, and whose verdict now leaves no bandwidth to compare.

    :returns: by row, the result that says why.
    """
    bad = {result.row: result for result in now.results if result.verdict in NO_BANDWIDTH}
    return {key: bad[key] for key in before.rows if key in now.rows and key in bad}


def _failed(before: RecordedRun, now: RecordedRun, different: tuple[Change, ...]) -> Iterator[Result]:
    """Yield one result for all rows that failed alike, with the variables that differ and the figures of both runs."""
    alike: dict[tuple[Verdict, str], list[RowKey]] = {}
    for key, result in failed_rows(before, now).items():
        alike.setdefault((result.verdict, result.remedy), []).append(key)
    for (verdict, remedy), keys in alike.items():
        count = str(keys[0]) if len(keys) == 1 else f"{len(keys)} rows"
        subject = keys[0] if len(keys) == 1 else f"rows that are {verdict}"
        if verdict is not Verdict.WRONG_TRANSPORT:
            reason = f"{count} of {before.name} cannot be compared with this run, in which the verdict is {verdict}"
            yield _result(Verdict.MISSING, reason, remedy or "Follow the remedy of that verdict.", subject)
            continue
        prefixes = _STEERED_BY.get(keys[0].plain_backend, ())
        causes = [str(change) for change in different if change.variable.startswith(prefixes)] if prefixes else []
        transports_before, transports_now = (_transports_text([run.rows[key] for key in keys]) for run in (before, now))
        earlier = transports_before or "an unknown transport"
        went = f"{count} went over {transports_now} instead of {earlier} as in {before.name}"
        figures = f"{_rates([now.rows[key] for key in keys])} after {_rates([before.rows[key] for key in keys])}"
        yield _result(verdict, f"{'; '.join((*causes, went))}: {figures}", remedy, subject)


def _transports_text(rows: Sequence[RowSummary]) -> str:
    return " or ".join(dict.fromkeys("+".join(row.transports) for row in rows if row.transports))


def _rates(rows: Sequence[RowSummary]) -> str:
    least, most = (units.gigabytes(end(row.bandwidth for row in rows)) for end in (min, max))
    return f"{least} GB/s" if least == most else f"{least} to {most} GB/s"


def _pooled(
    before: RecordedRun,
    now: RecordedRun,
    comparison: RegressionTest[RowKey],
    margin: float,
    different: tuple[Change, ...],
    in_turn: bool,
    old: Mapping[RowKey, RowSummary],
    new: Mapping[RowKey, RowSummary],
) -> Iterator[Result]:
    effect = comparison.pooled
    if effect is None and failed_rows(before, now):
        return  # the rows that failed have their result
    if effect is None:
        reason = f"no row of {before.name} was measured in this run: there is nothing to compare"
        yield _result(Verdict.MISSING, reason, "Run the bandwidth suite with the rows of the baseline.")
        return
    if comparison.verdict is not effect.verdict:
        return  # single rows decided the verdict, and each of them has its own result
    count = len(comparison.rows)
    over = f"{count} rows together" if count > 1 else str(next(iter(comparison.rows)))
    reason, remedy = (
        f"{over} against {before.name}: {effect.text}",
        _remedy(effect, margin, different, before, in_turn),
    )
    if effect.verdict is Verdict.INCONCLUSIVE and not in_turn:
        disturbed_before, disturbed_now = (_disturbed(rows, comparison.rows) for rows in (old, new))
        if any(disturbed_before) and f"record {before.name} again" not in remedy:
            remedy = f"Record {before.name} again on an idle machine. {remedy}"
        if note := _taken(before, disturbed_before, disturbed_now):
            reason = f"{reason}; {note}"
        elif effect.p <= PROOF and effect.ratio < 1:
            reason = f"{reason}; no single row proves a loss, and what all rows of one run share may have made this one"
        if any(disturbed_before) and not any(
            disturbed_now
        ):  # another run of this image would decide no more: it needs another baseline
            yield _result(Verdict.NO_EXPECTATION, reason, remedy)
            return
    yield _result(effect.verdict, reason, remedy)


def _rows(
    before: RecordedRun,
    old: Mapping[RowKey, RowSummary],
    new: Mapping[RowKey, RowSummary],
    comparison: RegressionTest[RowKey],
    margin: float,
    different: tuple[Change, ...],
    in_turn: bool,
) -> Iterator[Result]:
    if len(comparison.rows) < 2:
        return  # the verdict over all rows is already that of the only row
    for key, effect in comparison.rows.items():
        figures = f"{_rate(new[key].bandwidth)} after {_rate(old[key].bandwidth)}"
        if old[key].transports != new[key].transports and old[key].transports:
            figures += f", over {'+'.join(new[key].transports) or 'unknown'} after {'+'.join(old[key].transports)}"
        reason = f"{key} against {before.name}: {figures}: {effect.text}"
        if effect.verdict is Verdict.REGRESSED:
            yield _result(Verdict.REGRESSED, reason, _remedy(effect, margin, different, before, in_turn), key)
        elif key in comparison.suspects and effect.p <= PROOF:
            # A row may be held by the launches of others, because all give as many as the one with the fewest.
            disturbed_now = _disturbed(new, [key])
            note = _taken(before, [], disturbed_now if any(disturbed_now) else _disturbed(new, comparison.rows))
            remedy = _remedy(effect, margin, different, before, in_turn)
            yield _result(Verdict.INCONCLUSIVE, f"{reason}; {note}", remedy, key)
        elif key in comparison.suspects:
            reason = (
                f"{reason}; if it were the only row, this would prove a loss; among {len(comparison.rows)} rows p is "
                f"larger, and must be at most {PROOF:g}"
            )
            yield _result(Verdict.INCONCLUSIVE, reason, _more_launches(effect, before, in_turn), key)


def _disturbed(rows: Mapping[RowKey, RowSummary], keys: Iterable[RowKey]) -> list[tuple[str, ...]]:
    """Return of each launch of these rows what other processes used of it; empty: nothing that counts."""
    return [launch for key in keys for launch in rows[key].used_by_others]


def _used(*launches: Sequence[tuple[str, ...]]) -> str:
    """Return what other processes used in some launches, as the beginning of a sentence."""
    used = sorted({transport for pair in launches for launch in pair for transport in launch}, reverse=True)
    return f"other processes used {' and '.join(used)} that {'were' if 'cores' in used else 'was'} needed in"


def _count(launches: Sequence[tuple[str, ...]]) -> str:
    return f"{sum(map(bool, launches))} of {len(launches)} launches"


def steadiness(rows: Mapping[RowKey, RowSummary]) -> tuple[str, bool]:
    """Return how good a baseline these rows are, as the end of a sentence, and whether no launch was disturbed."""
    spreads = {key: (max(row.values) - min(row.values)) / row.bandwidth for key, row in rows.items()}
    widest = max(spreads, key=spreads.__getitem__)
    spread = f"the launches of a row differ by up to {100 * spreads[widest]:.3g} % ({widest})"
    if all(len(row.values) == 1 for row in rows.values()):
        spread = "each row has one launch, so its spread is not known"
    used = disturbance(rows)
    return f"{spread}{used and f', and {used}'}", not used


def disturbance(rows: Mapping[RowKey, RowSummary]) -> str:
    """Return what other processes used in the launches of these rows, as a sentence; empty: nothing that counts."""
    disturbed = _disturbed(rows, rows)
    return f"{_used(disturbed)} {_count(disturbed)}" if any(disturbed) else ""


def _taken(before: RecordedRun, earlier: Sequence[tuple[str, ...]], current: Sequence[tuple[str, ...]]) -> str:
    """Return that other processes disturbed launches, which then prove nothing; empty: they disturbed none."""
    runs = [
        f"{_count(counts)} of {name}" for counts, name in ((current, "this run"), (earlier, before.name)) if any(counts)
    ]
    return f"{_used(current, earlier)} {' and in '.join(runs)}, which prove nothing" if runs else ""


def _remedy(effect: Effect, margin: float, different: tuple[Change, ...], before: RecordedRun, in_turn: bool) -> str:
    """Return what to do about an effect; empty unless it is ``REGRESSED`` or ``INCONCLUSIVE``."""
    if effect.verdict is Verdict.REGRESSED:
        differences = "; ".join(str(item) for item in different[:8]) or "nothing that is recorded"
        more = f" and {len(different) - 8} more" if len(different) > 8 else ""
        differs = f"Differences from {before.name}: {differences}{more}."
        if in_turn:
            return f"{differs} Both images were measured now, in turn: search for the cause among these differences."
        return (
            f"{differs} Measure the two images in turn with --nixl-compare-image, to exclude every other change "
            "between the two runs."
        )
    if effect.verdict is not Verdict.INCONCLUSIVE:
        return ""
    if effect.unprovable:
        return _more_launches(effect, before, in_turn)
    again = f"Stop other processes on the machine, and {_again(effect, before, in_turn)}"
    if not in_turn:
        again += ", or measure the two images in turn with --nixl-compare-image"
    return f"{again}; launches of one image that differ by more than {100 * margin:.3g} % decide nothing."


def _again(effect: Effect, before: RecordedRun, in_turn: bool) -> str:
    """Return how to measure with more launches than were measured; with as many, if there is no larger number."""
    if effect.now < MOST_LAUNCHES:
        return f"run again with --nixl-min-launches={MOST_LAUNCHES}"
    if effect.before < MOST_LAUNCHES and not in_turn:
        return f"record {before.name} again with --nixl-min-launches={MOST_LAUNCHES}: it has {effect.before} launches"
    return f"run again (with {MOST_LAUNCHES} launches, the most that are made)"


def _more_launches(effect: Effect, before: RecordedRun, in_turn: bool) -> str:
    needed = launches_for(effect.before, MOST_LAUNCHES)
    least = f"{effect.now} launches against {effect.before} give p = {least_p(effect.before, effect.now):.2g} at best"
    if needed is not None and needed > effect.now:
        return f"{least}: run with --nixl-min-launches={needed}."
    if needed is None:
        return f"{least}: record the baseline with --nixl-min-launches={MOST_LAUNCHES}."
    again = _again(effect, before, in_turn)
    return f"{again[0].upper()}{again[1:]}, or measure this row alone."


def _result(verdict: Verdict, reason: str, remedy: str, subject: RowKey | str = "") -> Result:
    return Result(CHECK, "", verdict, reason, remedy, subject=str(subject))


def _rate(value: float) -> str:
    return f"{units.gigabytes(value)} GB/s"


def change_text(effect: Effect) -> str:
    """Return an effect as the text of a table cell: ``-10.2 % [-10.9, -9.6]``."""
    if effect.interval is None:
        return change(effect.ratio)
    low, high = (100 * (end - 1) for end in effect.interval)
    return f"{change(effect.ratio)} [{low:+.1f}, {high:+.1f}]"
