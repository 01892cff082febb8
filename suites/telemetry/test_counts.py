# SPDX-License-Identifier: Apache-2.0
"""Does NIXL's telemetry count what was moved, and what failed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Judgement, NotApplicableError
from pytest_nixl.checks.telemetry.accounting import count_failure, judge_counts, judge_failures, require_error
from pytest_nixl.checks.telemetry.exporters import BUFFER, EXPORTERS, PROMETHEUS, PROMETHEUS_MP

if TYPE_CHECKING:
    from pytest_nixl.checks.telemetry.measured_agents import MeasuredAgents

    from ..conftest import FindingFixture
    from .conftest import StartMeasured

OPS = ("WRITE", "READ")
Decide = Callable[[Judgement], None]


@pytest.mark.parametrize(
    "exporter",
    [
        pytest.param(BUFFER, marks=pytest.mark.nixl_check("telemetry-buffer", level="extended")),
        pytest.param(PROMETHEUS, marks=pytest.mark.nixl_check("telemetry-prometheus", level="extended")),
        pytest.param(PROMETHEUS_MP, marks=pytest.mark.nixl_check("telemetry-prometheus-mp", level="extended")),
    ],
)
def test_telemetry_counts_what_was_moved(start_measured: StartMeasured, exporter: str, verdict: Decide) -> None:
    """The exporter counts exactly the bytes, requests, times, registered memory and errors of known transfers."""
    pair = start_measured(exporter)
    pair.move("WRITE", count=8, size=64 << 10)
    pair.move("READ", count=5, size=4 << 10)
    pair.ask_an_unknown_agent()
    verdict(judge_counts(pair))


@pytest.mark.nixl_check("telemetry-failed-transfers", level="extended")
def test_telemetry_counts_a_transfer_with_a_dead_agent(
    start_measured: StartMeasured, agent_backend: str, verdict: Decide, finding: FindingFixture
) -> None:
    """Each exporter counts one error for each WRITE and READ that fails because the other agent has died.

    With LIBFABRIC most of these transfers report no error at all, which is a finding, too.
    """
    counts = [count_failure(pair, op, pair.transfer_to_dead_target) for pair in _measured(start_measured) for op in OPS]
    silent = agent_backend == "LIBFABRIC" and any(not count.failure.raised for count in counts)
    if not silent:
        require_error(counts, "transfers with a dead agent")
    failed, uncounted, description = judge_failures(counts)
    if failed is not None:
        verdict(failed)
    if silent and not uncounted:
        finding("LIBFABRIC-DEAD-TARGET-SILENT", True, description)
    else:
        finding("NIXL-TELEMETRY-DISCONNECT-UNCOUNTED", uncounted, description)


@pytest.mark.nixl_check("telemetry-refused-transfers", level="extended")
def test_telemetry_counts_a_transfer_that_is_refused(
    start_measured: StartMeasured, verdict: Decide, finding: FindingFixture
) -> None:
    """Each exporter counts one error for each WRITE and READ that NIXL refuses because its sides differ in length."""
    counts = [
        count_failure(pair, op, pair.transfer_of_other_lengths) for pair in _measured(start_measured) for op in OPS
    ]
    require_error(counts, "transfers whose two sides differ in length")
    failed, uncounted, description = judge_failures(counts)
    if failed is not None:
        verdict(failed)
    finding("NIXL-TELEMETRY-REFUSAL-UNCOUNTED", uncounted, description)


def _measured(start: StartMeasured) -> Iterator[MeasuredAgents]:
    """Yield two agents for each exporter that this NIXL has, after a transfer between them."""
    for exporter in EXPORTERS:
        try:
            pair = start(exporter)
        except NotApplicableError:
            continue  # the check of counts with this exporter says so
        pair.move("WRITE", count=1, size=4 << 10)
        yield pair
