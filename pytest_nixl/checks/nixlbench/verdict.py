# SPDX-License-Identifier: Apache-2.0
"""Judge a recorded run of nixlbench by a profile, with the same gate as a measured run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_nixl.core import units
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.judge.row import judge, percentage, rate
from pytest_nixl.model.expectation import Expectation, Machine
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.nixlbench_output import STORAGE, Configuration, NixlbenchOutput, NixlbenchRow, Trouble
from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import BASE, EACH, HUGE, LAST, RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.transports import WITHIN_A_HOST
from pytest_nixl.model.verdicts import Judgement, Outcome, Verdict, outcome
from pytest_nixl.nixl.backends import BACKENDS

_RANKS_REMEDY = "Judge the output of rank 0, with stdout and stderr in one file (nixlbench ... > FILE 2>&1)."
_WHOLE_REMEDY = (
    "Judge the whole output of rank 0 as nixlbench printed it, with stdout and stderr in one file "
    "(nixlbench ... > FILE 2>&1)."
)
_QUIET_REMEDY = (
    "Run nixlbench again on a quiet machine (`uptime` on each host), and judge that output; or measure the row with "
    "pytest --nixl-backend, which sees the load."
)
#: From which spread of its transfers a row that is too slow may be slow because of other processes.
_DISTURBED_SPREAD = 5
#: Below which share of its floor a row is slower than one program's figures differ from another's on the same host.
_FAR_BELOW = 0.8
_OUTPUTS_REMEDY = (
    "Give the output of each rank, its stdout and its stderr in one file (nixlbench ... > FILE 2>&1): "
    "pytest-nixl profile judge --nixlbench RANK0 --nixlbench RANK1 PROFILE."
)
_EXIT_REMEDY = (
    'Record the exit code of each rank at the end of its output: nixlbench ... > FILE 2>&1; echo "exit code $?" >> '
    "FILE. If nixlbench crashes at its exit (two copies of libnl-route), run it with UCX_MODULES=^ib."
)
_TRANSPORT_REMEDY = (
    "Run nixlbench with UCX_PROTO_INFO=y (LIBFABRIC: NIXL_LOG_LEVEL=info) and without UCX_LOG_FILE, so that the "
    "initiator's output names its transports."
)
_LATENCY_REMEDY = (
    "Give the unchanged output of one run: this row was edited, or the clock of its host was set during it."
)
_CRASH_REMEDY = (
    "Read the lines before it in every rank's output, and `dmesg` on its host; run this row alone "
    "(--start_block_size, --max_block_size) to see whether it crashes again."
)
_LOSS_REMEDY = (
    "Read the output of the other ranks: one of them died, or one process too many joined the group. Such a process is "
    "refused and deletes the keys of all ranks. Use a new --benchmark_group for each run."
)


@dataclass(frozen=True)
class JudgedRun:
    """The judgement of a recorded run: results for the table, and notes to print above it."""

    results: tuple[Result, ...]
    notes: tuple[str, ...]


def judge_run(output: NixlbenchOutput, profile: Profile) -> JudgedRun:
    """Judge each row of a run, its missing rows and its failures.

    :param output: parsed output of the run.
    :param profile: the profile to judge by.
    :raises ValueError: if the output contains no run or more than one, or lacks the configuration; one sentence.
    """
    _check(output)
    configuration = output.configuration
    if output.tables and (lacking := configuration.lacking()):
        options = " and ".join((", ".join(lacking[:-1]), lacking[-1])) if len(lacking) > 1 else lacking[0]
        reason = (
            f"the output is incomplete, and none of its {len(output.rows)} rows is judged: its configuration has no "
            f"{options}"
        )
        incomplete = _result("nixlbench", Judgement(Verdict.INCONCLUSIVE, reason, _WHOLE_REMEDY))
        return JudgedRun((incomplete, *_crashed(output, None, []), *_faults(output)), tuple(_described(output)))
    planned = configuration.planned()
    printed = {(row.block, row.batch) for row in output.rows}
    missing = [planned_row for planned_row in planned or () if planned_row not in printed]
    results: list[Result] = list(_crashed(output, planned, missing))
    unheard = _unheard(output) or _unended(output)
    by_size: dict[tuple[int, int], dict[NixlbenchRow, None]] = {}
    for row in output.rows:
        by_size.setdefault((row.block, row.batch), {})[row] = None
    rows: list[Result] = []
    for alike in by_size.values():
        judged = []
        for row in alike:
            result = _unproven(_judged(row, configuration, profile, _reported(output, row)), unheard)
            judged.append(_contradicted(result, configuration.contradiction(row)))
        rows.append(judged[0] if len(judged) == 1 else _doubted(judged))
    spreads = [max(row.spread for row in alike) for alike in by_size.values()]
    results.extend(_disturbed(rows, spreads))
    results.extend(_missing(output, missing))
    results.extend(_faults(output))
    return JudgedRun(tuple(results), (*_described(output), *_exit(output, missing)))


def _check(output: NixlbenchOutput) -> None:
    if not output.recognised:
        raise ValueError("contains no output of nixlbench: expected the output of its rank 0")
    if output.tables > 1:
        raise ValueError(f"contains {output.tables} tables: expected the output of one run")
    configuration = output.configuration
    required = (configuration.backend, configuration.op, configuration.initiator_memory, configuration.target_memory)
    if output.tables and not all(required):
        raise ValueError(
            "contains a table, but no configuration with backend, operation and memory types above it: "
            "expected the whole output of rank 0"
        )
    planned = configuration.planned()
    for row in output.rows:
        if planned is not None and (row.block, row.batch) not in planned:
            raise ValueError(
                f"contains a row of {units.format_size(row.block)} with batch {row.batch}, which the configuration "
                "above it does not have: expected the unchanged output of one run"
            )


def _disturbed(results: list[Result], spreads: list[float]) -> Iterator[Result]:
    """Change FAIL to INCONCLUSIVE for a row that other processes may have slowed down: the load of the run is unknown.

    Each row is a single average. So a row below its floor fails only if other rows confirm it: at least half of the
    rows that have a floor are steadily below it, or a row next to it is, like itself, steadily far below its own.

    :param results: the rows in the order in which they were measured.
    :param spreads: of each row, how many times longer its slowest transfers took than the average.
    """
    shares = [_share_of_floor(result) for result in results]
    steady = [spread < _DISTURBED_SPREAD for spread in spreads]
    with_floor = sum(result.summary is not None and result.summary.floor > 0 for result in results)
    everywhere = 2 * sum(share < 1 and even for share, even in zip(shares, steady, strict=True)) >= with_floor
    far_below = [share < _FAR_BELOW and even for share, even in zip(shares, steady, strict=True)]
    # A row whose transfers differ shows nothing, but it is not faster than two slow rows on both sides of it.
    far_below = [
        far or (share < _FAR_BELOW and neighbours == (True, True))
        for far, share, neighbours in zip(far_below, shares, _neighbours(far_below), strict=True)
    ]
    confirmed = [far and any(neighbours) for far, neighbours in zip(far_below, _neighbours(far_below), strict=True)]
    for place, (result, spread) in enumerate(zip(results, spreads, strict=True)):
        if shares[place] >= 1 or everywhere or confirmed[place]:
            yield result
            continue
        reason = (
            f"the slowest hundredth of its transfers took {spread:.2g} times as long as the average"
            if spread >= _DISTURBED_SPREAD
            else "the rows next to it do not confirm that"
        )
        yield replace(
            result,
            verdict=Verdict.INCONCLUSIVE,
            remedy=_QUIET_REMEDY,
            reason=f"{result.reason}, but {reason}, and the load of the host during the run is unknown",
        )


def _neighbours(flags: list[bool]) -> list[tuple[bool, bool]]:
    """Return for each flag the ones before and after it; beyond the ends they are false."""
    padded = [False, *flags, False]
    return list(zip(padded[:-2], padded[2:], strict=True))


def _share_of_floor(result: Result) -> float:
    """Return the share of its floor that a row reached if it failed by that; otherwise 1."""
    summary = result.summary
    if result.verdict is not Verdict.FAIL or summary is None or not 0 < summary.bandwidth < summary.floor:
        return 1.0
    return summary.bandwidth / summary.floor


def _judged(row: NixlbenchRow, configuration: Configuration, profile: Profile, transports: tuple[str, ...]) -> Result:
    key = configuration.key(row.block, row.batch)
    if not 0 < row.bandwidth < math.inf:
        reason = f"{key.words}: nixlbench printed a bandwidth of {row.bandwidth / 1e9:g} GB/s, which is not valid"
        return _result("bandwidth", Judgement(Verdict.ERROR, reason, "Run it again with a larger --num_iter."), key)
    times = (
        row.latency_avg,
        row.latency_p99,
        row.prep_avg,
        row.prep_p99,
        row.post_avg,
        row.post_p99,
        row.transfer_avg,
        row.transfer_p99,
    )
    if any(value is not None and value < 0 for value in times):
        reason = f"{key.words}: nixlbench printed a time below zero: the clock of its host was set back during the run"
        return _result("bandwidth", Judgement(Verdict.ERROR, reason, "Run it again."), key)
    judgement, samples, expectation = judge_figures(row, key, configuration, profile, transports)
    if judgement.verdict is Verdict.UNKNOWN and expectation is not None and expectation.floor is not None:
        # A row below its floor fails with any transport.
        slow = judge(samples, replace(expectation, transports=None, p50=None, p99=None))
        judgement = slow if slow.verdict is Verdict.FAIL else judgement
    limit = _card_limit(key, expectation, profile.machine, transports)
    judgement = _implausible(row, key.words, judgement, expectation, limit)
    ceilings = [value for value in ((expectation and expectation.ceiling), limit) if value]
    summary = RowSummary(
        bandwidth=row.bandwidth,
        p50=math.nan,
        p99=math.nan,
        transfers=sum(samples.transfers),
        floor=(expectation and expectation.floor) or 0.0,
        ceiling=min(ceilings, default=0.0),
        transports=transports,
    )
    return _result("bandwidth", judgement, key, summary)


def _card_limit(
    key: RowKey, expectation: Expectation | None, machine: Machine | None, transports: tuple[str, ...]
) -> float | None:
    """Return the line rate in bytes per second of the network cards that limit a row; None if none is known."""
    if machine is None or key.backend in STORAGE:
        return None
    if transports and all(name.partition("/")[0] in WITHIN_A_HOST for name in transports):
        return None
    if expectation is not None and expectation.transports and WITHIN_A_HOST & set(expectation.transports):
        return None
    # The rate that one GPU reaches does not limit rows between host memories, which may use every card.
    return machine.ceiling(None) if key.memory.on_gpu or machine.nics == 1 else None


def _reported(output: NixlbenchOutput, row: NixlbenchRow) -> tuple[str, ...]:
    """Return the transports of a row that UCX or libfabric report in the output; empty if none."""
    configuration = output.configuration
    backend = BACKENDS.get(configuration.backend)
    if backend is None or configuration.op not in ("WRITE", "READ") or configuration.backend in STORAGE:
        return ()
    memory = MemoryPair(configuration.initiator_memory, configuration.target_memory)
    try:
        return backend.transports(output.report, configuration.op, row.block, memory)
    except ValueError:
        return ()  # a malformed address


def _unheard(output: NixlbenchOutput) -> str:
    """Return a sentence if the process that compares the bytes has no output here; otherwise empty."""
    configuration = output.configuration
    if configuration.values.get("check_consistency") != "1":
        return ""
    role = "target" if configuration.op == "WRITE" and configuration.backend not in STORAGE else "initiator"
    devices = configuration.count(f"num_{role}_dev") if configuration.values.get("mode") == "SG" else 1
    expected = output.expected.get(role) or devices or 1
    present = len({rank for rank, its in output.roles if its == role})
    if present >= expected:
        return ""
    whose = f"the {role}" if expected == 1 else f"{expected} {role}s"
    absence = "whose output is missing" if expected == 1 else f"and the output of only {present} is here"
    return f"only {whose} compare{'s' if expected == 1 else ''} the bytes of a {configuration.op}, {absence}"


def _unended(output: NixlbenchOutput) -> str:
    """Return a sentence if targets should have compared the bytes, but nothing shows that they did; otherwise empty.

    nixlbench prints nothing if the bytes are right, so that only the exit code tells a whole output from one that was
    cut, and a target that compared from one that died before. An initiator prints a row after it has compared.
    """
    configuration = output.configuration
    if configuration.values.get("check_consistency") != "1" or configuration.op != "WRITE":
        return ""
    codes = dict(output.endings)
    for rank in sorted(
        rank for rank, role in output.roles if role == "target" and configuration.backend not in STORAGE
    ):
        if rank not in codes:
            return f"only the target compares the bytes of a WRITE, and the output of rank {rank} has no exit code"
        if codes[rank]:
            return f"only the target compares the bytes of a WRITE, and rank {rank} ended with exit code {codes[rank]}"
    return ""


def _contradicted(result: Result, contradiction: str) -> Result:
    """Change a result that accepts a bandwidth to INCONCLUSIVE if the row itself contradicts it."""
    if not contradiction or outcome(result.verdict, gate=False) is Outcome.FAIL:
        return result
    reason = f"the row {result.row}: {contradiction}"
    return replace(result, verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=_LATENCY_REMEDY)


def _unproven(result: Result, unheard: str) -> Result:
    """Change PASS to UNKNOWN if the bytes should have been compared, and nothing shows that they were."""
    if not unheard or result.verdict is not Verdict.PASS:
        return result
    name = f"the row {result.row}" if result.row else "the row"
    return replace(
        result,
        verdict=Verdict.UNKNOWN,
        reason=f"{name}: {unheard}: it is unknown whether they were right",
        remedy=_EXIT_REMEDY if "exit code" in unheard else _OUTPUTS_REMEDY,
    )


def _doubted(judged: list[Result]) -> Result:
    """Return the result of a row that was printed several times with different figures: a failure or INCONCLUSIVE."""
    bad = [result for result in judged if outcome(result.verdict, gate=False) is Outcome.FAIL]
    if bad:
        return bad[0]
    rates = ", ".join(rate(result.summary.bandwidth) for result in judged[:4] if result.summary is not None)
    reason = f"the row {judged[0].row} was printed {len(judged)} times with different figures: {rates}"
    remedy = "Give the unchanged output of one run: this output was edited, or contains parts of several runs."
    return replace(judged[0], verdict=Verdict.INCONCLUSIVE, reason=reason, remedy=remedy)


def _crashed(
    output: NixlbenchOutput, planned: tuple[tuple[int, int], ...] | None, missing: list[tuple[int, int]]
) -> Iterator[Result]:
    """Yield a result if a crash or a lost rank ended the run early, with the row and the message."""
    causes = output.crashes or output.losses
    if not causes or (planned and not missing):
        return
    at = "before its first row"
    if missing:
        key = output.configuration.key(*missing[0])
        at = f"in the row {key}, after {len(planned or ()) - len(missing)} of {len(planned or ())} rows"
    elif output.rows:
        at = f"after the row {output.configuration.key(output.rows[-1].block, output.rows[-1].batch)}"
    if output.crashes:
        reason, remedy = f"nixlbench crashed {at}: {causes[0]}", _CRASH_REMEDY
    else:
        reason, remedy = f"nixlbench lost one of its ranks, or the key of a rank, {at}: {causes[0]}", _LOSS_REMEDY
    yield _result("nixlbench", Judgement(Verdict.ERROR, reason, remedy))


def _exit(output: NixlbenchOutput, missing: list[tuple[int, int]]) -> Iterator[str]:
    """Yield a note about a crash after all rows were printed."""
    causes = output.crashes or output.losses
    if causes and output.rows and not missing and output.configuration.planned():
        last = output.configuration.key(output.rows[-1].block, output.rows[-1].batch)
        yield f"nixlbench: after its last row, {last}, so the figures are not affected: {causes[0]}"


def judge_figures(
    row: NixlbenchRow,
    key: RowKey,
    configuration: Configuration,
    profile: Profile,
    transports: tuple[str, ...],
    machine: Machine | None = None,
    contention: tuple[float, ...] = (),
) -> tuple[Judgement, Samples, Expectation | None]:
    """Judge a row by what the profile expects of such a row of ours with nixlbench's notifications and pages.

    :param key: the key of the same row as pytest-nixl measures it by default.
    :param machine: the machine whose network cards limit the row; None: they are not considered.
    :return: also its samples, and what the profile expects.
    """
    transfers = (configuration.transfers(row.block) or (1, 0))[0]
    seconds = transfers * row.block * row.batch / row.bandwidth
    samples = Samples(key, (seconds,), (transfers,), latencies=(), transports=transports, contention=contention)
    pages = HUGE if configuration.values.get("use_hugepages") == "1" else BASE
    similar = key.under(LAST if key.memory.stored else EACH, pages if key.pages else "")
    expectation = profile.expectation(similar)
    # The table has no percentiles of whole transfers. Their bounds are judged by the parts.
    bare = replace(expectation, p50=None, p99=None) if expectation is not None else None
    judgement = _name_conditions(judge(samples, bare, machine), similar, profile)
    if judgement.verdict is Verdict.UNKNOWN and not transports:  # nixlbench has no worker whose log could be read
        judgement = replace(judgement, remedy=_TRANSPORT_REMEDY)
    return _judge_latency(row, judgement, key.words, expectation), samples, expectation


def _name_conditions(judgement: Judgement, key: RowKey, profile: Profile) -> Judgement:
    """Say why a profile expects nothing of a row of nixlbench, if it does so of rows that are measured otherwise.

    :param key: the key of a row of ours with nixlbench's notifications and pages.
    """
    condition_pairs = [(notify, pages) for notify in (EACH, LAST) for pages in (HUGE, BASE)]
    conditions = {
        _conditions(other) for pair in condition_pairs if profile.expectation(other := key.under(*pair)) is not None
    }
    if judgement.verdict is not Verdict.NO_EXPECTATION or not conditions:
        return judgement
    reason = (
        f"{key.under(LAST, HUGE).words}: the profile expects something of rows with {' or '.join(sorted(conditions))} "
        f"only, and those of nixlbench have {_conditions(key)}, which takes another time"
    )
    options = [f"--nixl-notify={key.notify}", *([f"--nixl-pages={key.pages}"] if key.pages else [])]
    remedy = (
        "Learn a profile (pytest-nixl profile learn) from three runs of `pytest --pyargs pytest_nixl.suites.bandwidth "
        f"{' '.join(options)} --benchmark-json=FILE`."
    )
    return replace(judgement, reason=reason, remedy=remedy)


def _conditions(key: RowKey) -> str:
    return f"notify = {key.notify}" + (f" and {key.pages} pages" if key.pages else "")


def _judge_latency(row: NixlbenchRow, judgement: Judgement, name: str, expectation: Expectation | None) -> Judgement:
    """Judge latency bounds by the table: FAIL if a part exceeds the bound on the whole; otherwise UNKNOWN."""
    if expectation is None or judgement.verdict not in (Verdict.PASS, Verdict.NO_EXPECTATION):
        return judgement
    bounds = [percentile for percentile in ("p50", "p99") if getattr(expectation, percentile) is not None]
    parts = [value for value in (row.post_p99, row.transfer_p99, row.latency_p99) if value is not None]
    part = max(parts, default=0.0)
    if expectation.p99 is not None and part > expectation.p99:
        return Judgement(
            Verdict.FAIL,
            f"{name}: the p99 latency of one part of the transfer, {units.microseconds(part)} us, is "
            f"{percentage(part, expectation.p99)} of the bound on the whole, {units.microseconds(expectation.p99)} us",
            "Check that the machine is idle and has a core for each polling process, then run it again.",
        )
    if not bounds:
        return judgement
    return Judgement(
        Verdict.UNKNOWN,
        f"{name}: the profile bounds {' and '.join(bounds)}, but nixlbench prints no percentiles of whole transfers",
        "Measure this row with pytest --nixl-backend, or judge by a profile without latency bounds.",
    )


def _implausible(
    row: NixlbenchRow, name: str, judgement: Judgement, expectation: Expectation | None, limit: float | None
) -> Judgement:
    """Return IMPLAUSIBLE if a row exceeds a ceiling, even if the judgement so far is UNKNOWN."""
    if judgement.verdict in (Verdict.CORRUPT, Verdict.WRONG_TRANSPORT, Verdict.IMPLAUSIBLE):
        return judgement
    remedy = (
        "Do not use this figure: the clock stopped before the bytes were delivered, or other devices carried them. "
        "Read the counters of every device before and after a run, and compare the profile's machine with the hardware."
    )
    if limit is not None and row.bandwidth > limit:
        over = (
            f"{name}: {rate(row.bandwidth)} is over the ceiling of {rate(limit)}, the line rate of the network cards "
            "that one GPU there reaches"
        )
        return Judgement(Verdict.IMPLAUSIBLE, over, remedy)
    if expectation is not None and expectation.ceiling is not None and row.bandwidth > expectation.ceiling:
        over = (
            f"{name}: {rate(row.bandwidth)} is over the ceiling of {rate(expectation.ceiling)} that the profile gives"
        )
        return Judgement(Verdict.IMPLAUSIBLE, over, remedy)
    return judgement


def _missing(output: NixlbenchOutput, missing: list[tuple[int, int]]) -> Iterator[Result]:
    configuration = output.configuration
    cut = "the text ends within a line" if output.unfinished else "the text ends before it"
    if output.rows or output.tables:
        for block, batch in missing:
            key = configuration.key(block, batch)
            reason = f"{key.words}: nixlbench was to print this row, but did not: {cut}"
            yield _result("bandwidth", Judgement(Verdict.MISSING, reason, _RANKS_REMEDY), key)
    if not output.rows:
        ranks = sorted({registration.rank for registration in output.registrations})
        whose = f": this is the output of rank {ranks[0]}, but rank 0 prints the table" if ranks and ranks[0] else ""
        yield _result("bandwidth", Judgement(Verdict.MISSING, f"nixlbench printed no row{whose}", _RANKS_REMEDY))


def _faults(output: NixlbenchOutput) -> Iterator[Result]:
    known_faults = [fault for fault in output.faults if fault.trouble is not Trouble.OTHER]
    stranger = any(fault.trouble is Trouble.STALE_GROUP for fault in known_faults)
    for fault in dict.fromkeys(known_faults or output.faults):
        verdict = Verdict.CORRUPT if fault.trouble is Trouble.INCONSISTENT else Verdict.ERROR
        reason = f"nixlbench says: {fault.text}"
        if fault.trouble is Trouble.STALE_GROUP:
            reason += (
                ": this process joined a group that was full, or full of keys of an earlier run, and deleted the keys "
                "of all its ranks"
            )
        elif stranger and fault.trouble is Trouble.DUPLICATE_RANK:
            reason += ": the second process joined after the keys had been deleted"
        yield _result("nixlbench", Judgement(verdict, reason, fault.remedy))


def _described(output: NixlbenchOutput) -> Iterator[str]:
    configuration = output.configuration
    if configuration.backend:
        key = configuration.key(1, 1)
        size = max((registration.size for registration in output.registrations), default=0)
        ranks = f", {size} ranks" if size else ""
        yield f"nixlbench: {key.backend} {key.op} {key.memory}{ranks}, --device_list={','.join(configuration.devices)}"
    if configuration.values.get("check_consistency") == "0":
        yield "nixlbench: the received bytes were not checked (--check_consistency=0)"
    elif unheard := _unheard(output) or _unended(output):
        yield f"nixlbench: {unheard}"
    for warning in output.warnings:
        yield f"nixlbench: {warning}"


def _result(check: str, judgement: Judgement, key: RowKey | None = None, summary: RowSummary | None = None) -> Result:
    return Result(check, "", judgement.verdict, judgement.reason, judgement.remedy, row=key, summary=summary)
