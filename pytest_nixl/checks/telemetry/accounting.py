# SPDX-License-Identifier: Apache-2.0
"""Compare what NIXL's telemetry counts with what is known to have been done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.checks.telemetry.exporters import EVENTS, TelemetrySink, UnreadableTelemetryError
from pytest_nixl.checks.telemetry.measured_agents import KnownTransfers, MeasuredAgents, TransferFailure
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent

_ERROR = "agent_err_"
#: NIXL's times may exceed ours by this factor and these microseconds a transfer, because NIXL estimates the rate of a
#: counter of the CPU. A wrong unit differs by 1000.
_FACTOR, _MICROSECONDS = 1.5, 100
_REMEDY = (
    "do not trust this metric in alerts and dashboards; report it with NIXL's release at "
    "https://github.com/ai-dynamo/nixl/issues"
)
_UNREAD = "read what the agent wrote to stderr, and check that NIXL_TELEMETRY_EXPORTER is the exporter of your release"


def judge_counts(pair: MeasuredAgents) -> Judgement:
    """Judge whether the telemetry of both agents is what they are known to have done."""
    try:
        wrong = [message for agent in (pair.initiator, pair.target) for message in _wrong(pair, agent)]
    except UnreadableTelemetryError as error:
        return Judgement(Verdict.FAIL, f"{pair.sink.exporter}: {error}", _UNREAD)
    if wrong:
        return Judgement(Verdict.FAIL, f"{pair.sink.exporter} of NIXL {pair.nixl}: {'; '.join(wrong)}", _REMEDY)
    counts, transfers = pair.known[pair.initiator.name].counts, pair.known[pair.initiator.name]
    moved = counts["agent_tx_bytes"] + counts["agent_rx_bytes"]
    return Judgement(
        Verdict.PASS,
        f"{pair.sink.exporter} of NIXL {pair.nixl} counts the {moved} bytes of {transfers.transfers} transfers "
        "exactly, their times, the registered memory and the refused request",
    )


def _wrong(pair: MeasuredAgents, agent: NixlAgent) -> list[str]:
    return [*differences(pair.sink, agent.name, pair.counts(agent), pair.known[agent.name])]


def differences(
    sink: TelemetrySink, agent: str, counts: Mapping[str, float], transfers: KnownTransfers
) -> Iterator[str]:
    """Yield a phrase for each count of an agent that is not what is known.

    :param counts: the exported counts by metric.
    """
    for metric in EVENTS:
        expected = transfers.counts[metric]
        if metric not in counts:
            # A release without a status of errors, or without a count of lost events, counts none.
            if expected or not metric.startswith((_ERROR, "agent_telemetry_")):
                yield f"{sink.spelled(metric)} of agent {agent} is missing, expected {expected}"
        elif counts[metric] != expected:
            yield f"{sink.spelled(metric)} of agent {agent} is {counts[metric]:.15g}, expected {expected}"
    for histogram in ("agent_xfer_time", "agent_xfer_post_time"):
        for name, expected in (("count", transfers.transfers), ("sum", transfers.counts[histogram])):
            metric = f"{histogram}_us_{name}"
            if metric in counts and counts[metric] != expected:
                yield f"{metric} of agent {agent} is {counts[metric]:.15g}, expected {expected}"
    yield from _wrong_times(sink, agent, counts, transfers)


def _wrong_times(
    sink: TelemetrySink, agent: str, counts: Mapping[str, float], transfers: KnownTransfers
) -> Iterator[str]:
    xfer, post = (counts.get(metric, 0) for metric in ("agent_xfer_time", "agent_xfer_post_time"))
    most = _FACTOR * transfers.took + _MICROSECONDS * transfers.transfers
    if transfers.transfers and not 0 < xfer <= most:
        yield (
            f"{sink.spelled('agent_xfer_time')} of agent {agent} is {xfer:.15g} µs, expected more than 0 and at most "
            f"{most:.0f} for transfers that took {transfers.took:.0f} µs"
        )
    if post > xfer:
        yield (
            f"{sink.spelled('agent_xfer_post_time')} of agent {agent} is {post:.15g} µs, expected at most the "
            f"{xfer:.15g} µs of the whole transfers"
        )


@dataclass(frozen=True)
class FailureCount:
    """What an exporter counted when one transfer failed.

    :param counted: how much each count of errors grew, by status; those that did not grow are left out.
    """

    exporter: str
    op: str
    failure: TransferFailure
    counted: Mapping[str, float]

    @property
    def status(self) -> str:
        """The status under which NIXL should count the error: ``remote_disconnect`` for nixlRemoteDisconnectError."""
        name = self.failure.raised.removeprefix("nixl").removesuffix("Error")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    def __str__(self) -> str:
        if not self.failure.raised:
            return f"{self.exporter}: a {self.op} reported no error (its state is {self.failure.state})"
        grown = ", ".join(f"{value:.15g} of status {status}" for status, value in sorted(self.counted.items()))
        return f"{self.exporter}: a {self.op} raised {self.failure.raised}, and telemetry counts {grown or 'no error'}"


def count_failure(pair: MeasuredAgents, op: str, fail: Callable[[str], TransferFailure]) -> FailureCount:
    """Let a transfer fail, and return what was counted.

    :param fail: makes the transfer, from the operation: a method of ``pair``.
    :raises UnreadableTelemetryError: the telemetry of the initiator cannot be read.
    """
    before = pair.counts(pair.initiator)
    failure = fail(op)
    after = pair.counts(pair.initiator)
    grown = {
        metric.removeprefix(_ERROR): value - before.get(metric, 0)
        for metric, value in after.items()
        if metric.startswith(_ERROR) and value != before.get(metric, 0)
    }
    return FailureCount(pair.sink.exporter, op, failure, grown)


def require_error(failures: Sequence[FailureCount], description: str) -> None:
    """Refuse to judge transfers of which NIXL reports no error, so that there is nothing to count.

    :param description: the transfers, such as ``transfers with a dead agent``.
    :raises NotApplicableError: none of them reported an error.
    """
    if not any(failure.failure.raised for failure in failures):
        raise NotApplicableError(f"NIXL reports no error of {description}: {'; '.join(map(str, failures))}")


def judge_failures(failures: Sequence[FailureCount]) -> tuple[Judgement | None, bool, str]:
    """Judge what was counted for failed transfers.

    :returns: a failure, if an error was counted wrongly; whether one was not counted at all; and what was seen.
    """
    listing = "; ".join(map(str, failures))
    raised = [failure for failure in failures if failure.failure.raised]
    wrong = [failure for failure in raised if failure.counted and dict(failure.counted) != {failure.status: 1}]
    if wrong:
        expected = "; ".join(f"{failure}, expected 1 of status {failure.status}" for failure in wrong)
        return Judgement(Verdict.FAIL, expected, _REMEDY), False, listing
    return None, any(not failure.counted for failure in raised), listing
