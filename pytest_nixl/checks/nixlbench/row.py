# SPDX-License-Identifier: Apache-2.0
"""Judge one row that nixlbench measured in this run, like a row of pytest-nixl itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_nixl.checks.nixlbench.driver import Ran
from pytest_nixl.checks.nixlbench.verdict import judge_figures
from pytest_nixl.core import units
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.judge.row import percentage, rate
from pytest_nixl.model.expectation import Ceiling, row_ceiling
from pytest_nixl.model.nixlbench_output import REMEDIES, NixlbenchRow, Trouble
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.transports import cards, is_network
from pytest_nixl.model.verdicts import Judgement, Outcome, Verdict, outcome
from pytest_nixl.nixl.backends import BACKENDS

_UNCOMPARED_REMEDY = (
    "Run it again; if nixlbench crashes at its exit (two copies of libnl-route), set UCX_MODULES=^ib in its "
    "environment."
)
_CONTRADICTED_REMEDY = "Run it again, and read what nixlbench prints when run by hand: its clock may have been set."


@dataclass(frozen=True)
class JudgedRow:
    """The judgement of a row. ``samples`` and ``summary`` are None if nothing was measured.

    :param notes: sentences to print with the table.
    """

    judgement: Judgement
    samples: Samples | None = None
    summary: RowSummary | None = None
    notes: tuple[str, ...] = ()


def judge_row(ran: Ran, plain: RowKey, key: RowKey, profile: Profile, rates: Mapping[str, float]) -> JudgedRow:
    """Judge the only row of a run.

    :param ran: result of the run.
    :param plain: key of the row in the profile.
    :param key: key under which the row is recorded; it contains the name of the program.
    :param profile: the profile to judge by.
    :param rates: known line rates of the initiator's network cards in bytes per second, by name.
    """
    name = f"nixlbench {plain.words}"
    if ran.inconsistent:
        reason = f"{name}: {ran.inconsistent}"
        return JudgedRow(Judgement(Verdict.CORRUPT, reason, REMEDIES[Trouble.INCONSISTENT]))
    row = next((row for row in ran.output.rows if (row.block, row.batch) == (plain.block, plain.batch)), None)
    configuration = ran.output.configuration
    if row is None or configuration.transfers(plain.block) is None or not 0 < row.bandwidth < math.inf:
        description = (
            "did not print this row" if row is None else f"printed a bandwidth of {row.bandwidth / 1e9:g} GB/s"
        )
        remedy = "Increase --nixl-iterations, and read what nixlbench prints when run by hand."
        return JudgedRow(Judgement(Verdict.ERROR, f"{name}: nixlbench {description}", remedy))
    transports = BACKENDS[plain.backend].transports(ran.log, plain.op, plain.block)
    contention = () if ran.contention is None else (ran.contention,)
    judgement, samples, expectation = judge_figures(
        row, plain, configuration, profile, transports, profile.machine, contention
    )
    if judgement.verdict is Verdict.PASS and ran.uncompared:
        judgement = Judgement(Verdict.UNKNOWN, f"{plain.words}: {ran.uncompared}", _UNCOMPARED_REMEDY)
    contradiction = configuration.contradiction(row)
    if contradiction and outcome(judgement.verdict, gate=False) is not Outcome.FAIL:
        judgement = Judgement(Verdict.INCONCLUSIVE, f"{plain.words}: {contradiction}", _CONTRADICTED_REMEDY)
    ceiling = row_ceiling(samples, expectation, profile.machine)
    summary = replace(
        RowSummary.of(samples, expectation, profile.machine), bandwidth=row.bandwidth, values=(row.bandwidth,)
    )
    notes = [*_utilisation(name, row, transports, ceiling, rates), *ran.remarks]
    return JudgedRow(
        replace(judgement, reason=f"nixlbench {judgement.reason}"), replace(samples, key=key), summary, tuple(notes)
    )


def _utilisation(
    name: str, row: NixlbenchRow, transports: tuple[str, ...], ceiling: Ceiling | None, rates: Mapping[str, float]
) -> Iterator[str]:
    """Yield the share of the real line rate that a row reaches; nixlbench assumes 50 GB/s on every machine."""
    used = [card for card in cards(transports) or () if card != "lo"]
    if ceiling is not None and ceiling.why:
        limit, of = ceiling.value, ceiling.why
    elif used and all(card in rates for card in used) and all(map(is_network, transports)):
        limit = sum(rates[card] for card in used)
        of = f"the line rate of {' and '.join(used)} according to the driver"
    else:
        return
    yield f"{name}: {rate(row.bandwidth)} is {percentage(row.bandwidth, limit)} of {units.gigabytes(limit)} GB/s, {of}"
