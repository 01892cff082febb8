# SPDX-License-Identifier: Apache-2.0
"""Check what NIXL answers if a process dies or stops while transfers are in flight, and that the other agents go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl import Agents, Cluster, Judgement, NotApplicableError, Settings, between_agents
from pytest_nixl.checks.faults.scene import FaultOutcome, fault_reason, judge_faults, without
from pytest_nixl.checks.faults.transfers import WITHOUT_TRANSFERS, environments, make_fault

from .. import early

if TYPE_CHECKING:
    from suites.conftest import FindingFixture

Decide = Callable[[Judgement], None]
Make = Callable[..., list[FaultOutcome]]


@early.fixture
def make(nixl_settings: Settings, agent_backend: str, nixl_cluster: Cluster) -> Make:
    """Make a fault with each requested operation, each time with new agents.

    UCX is also tried over tcp, unless UCX_TLS names transports of RDMA.

    A fault without transfers is made once instead of once with each operation.

    With ``usual_transport`` only the first of these is made, unless the level is ``extended``.

    In a run of several ranks the target is on the second rank.

    :raises NotApplicableError: if only storage backends are requested.
    """
    if not between_agents(nixl_settings.backend):
        raise NotApplicableError(f"--nixl-backend={','.join(nixl_settings.backend)} has no second agent")
    settings, hosts = replace(nixl_settings, backend=(agent_backend,)), nixl_cluster.hosts[:2]

    def made_with(fault: str, *, usual_transport: bool = False) -> list[FaultOutcome]:
        outcomes = []
        ops = nixl_settings.op[:1] if fault in WITHOUT_TRANSFERS else nixl_settings.op
        for environment in environments(agent_backend, other_hosts=nixl_cluster.several):
            for op in ops:
                with Agents(hosts[0], settings) as agents:
                    outcomes.append(make_fault(fault, agents, agent_backend, op, environment, hosts))
                if usual_transport and not nixl_settings.extended:
                    return outcomes
        return outcomes

    return made_with


@pytest.mark.nixl_check("transfer-target-killed")
@pytest.mark.nixl_early
def test_the_initiator_is_told_that_its_target_died(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """Transfers to a target that is killed end in an error, and the initiator writes correct bytes to a third agent."""
    outcomes = make("target-killed", usual_transport=True)
    _fail_silence(finding, verdict, "LIBFABRIC-DEAD-TARGET-SILENT", outcomes)
    verdict(judge_faults(outcomes))


@pytest.mark.nixl_check("transfer-initiator-killed", level="extended")
def test_a_target_survives_the_death_of_its_initiator(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """A target whose initiator is killed keeps its memory unchanged, and writes correct bytes to a third agent."""
    outcomes = make("initiator-killed")
    aborts = [
        outcome
        for outcome in outcomes
        if (outcome.backend, outcome.op) == ("UCX", "READ") and "SIGABRT" in outcome.survivor
    ]
    remaining = [outcome for outcome in outcomes if outcome not in aborts] + without(aborts, survivor="", wrong_bytes=0)
    _conclude(finding, verdict, "NIXL-DEAD-INITIATOR-ABORTS", bool(aborts), outcomes, remaining)


@pytest.mark.nixl_check("transfer-target-paused", level="extended")
def test_transfers_go_on_when_a_stopped_target_goes_on(make: Make, verdict: Decide) -> None:
    """After a target was stopped for a second during transfers, the initiator writes correct bytes to it."""
    verdict(judge_faults(make("target-paused")))


@pytest.mark.nixl_check("transfer-initiator-paused", level="extended")
def test_transfers_go_on_when_a_stopped_initiator_goes_on(make: Make, verdict: Decide) -> None:
    """After an initiator was stopped for a second during its transfers, it writes correct bytes to its target."""
    verdict(judge_faults(make("initiator-paused")))


@pytest.mark.nixl_check("transfer-target-stopped", level="extended")
def test_the_initiator_is_told_that_its_target_stopped(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """Transfers to a stopped target end or report an error, and the initiator writes to a third agent."""
    outcomes = make("target-stopped")
    _conclude(
        finding, verdict, "NIXL-STOPPED-TARGET-SILENT", any(outcome.answer == "PROC" for outcome in outcomes), outcomes
    )


@pytest.mark.nixl_check("transfer-target-restarted", level="extended")
def test_a_target_that_died_during_transfers_comes_back(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """Transfers to a killed target end in an error, and a new target of the same name is written to."""
    outcomes = make("target-restarted")
    _fail_silence(finding, verdict, "LIBFABRIC-DEAD-TARGET-SILENT", outcomes)
    verdict(judge_faults(outcomes))


@pytest.mark.nixl_check("transfer-listener-restarted", level="extended")
def test_a_target_that_listens_comes_back_on_its_port(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """After a target was killed and started on the same address and port, a fetch from there loads its new metadata.

    NIXL's listeners exchange the metadata. The initiator then writes correct bytes to the new target.
    """
    outcomes = make("listener-restarted")
    lost, remaining = any(outcome.lost_requests for outcome in outcomes), without(outcomes, lost_requests=0)
    _conclude(finding, verdict, "NIXL-RESTARTED-LISTENER-LOSES-FETCH", lost, outcomes, remaining)


@pytest.mark.nixl_check("transfer-target-replaced", level="extended")
def test_a_target_is_replaced_during_transfers(make: Make, verdict: Decide) -> None:
    """An initiator that replaces its target during transfers by another of that name writes correct bytes to it."""
    verdict(judge_faults(make("target-replaced")))


@pytest.mark.nixl_check("transfer-target-unmapped", level="extended")
def test_an_initiator_survives_that_its_target_frees_memory_in_use(make: Make, verdict: Decide) -> None:
    """If a target frees registered memory during transfers, the initiator writes correct bytes to a third agent."""
    verdict(judge_faults(make("target-unmapped")))


@pytest.mark.nixl_check("transfer-notified-after-death", level="extended")
def test_a_notification_to_a_dead_agent_returns(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """Notifications to a dead agent return or raise an error, and the sender writes to a third agent."""
    outcomes = make("notified-after-death")
    hangs = [outcome for outcome in outcomes if outcome.backend == "LIBFABRIC" and "did not answer" in outcome.survivor]
    remaining = [outcome for outcome in outcomes if outcome not in hangs] + without(hangs, survivor="", wrong_bytes=0)
    _conclude(finding, verdict, "LIBFABRIC-NOTIFICATION-HANGS", bool(hangs), outcomes, remaining)


@pytest.mark.nixl_check("transfer-target-removed", level="extended")
def test_nothing_is_written_after_an_agent_is_removed(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """After remove_remote_agent during transfers, no byte is written once NIXL reported their end."""
    outcomes = make("target-removed")
    late = any(outcome.changed for outcome in outcomes)
    _conclude(finding, verdict, "NIXL-REMOVED-IN-FLIGHT", late, outcomes, without(outcomes, changed=0))


@pytest.mark.nixl_check("transfer-released", level="extended")
def test_nothing_is_written_after_a_handle_is_released(make: Make, verdict: Decide, finding: FindingFixture) -> None:
    """After release_xfer_handle of transfers in flight has returned or failed, no byte is written."""
    outcomes = make("transfer-released")
    late = any(outcome.changed for outcome in outcomes)
    _conclude(finding, verdict, "NIXL-RELEASED-IN-FLIGHT", late, outcomes, without(outcomes, changed=0))


@pytest.mark.nixl_check("transfer-source-deregistered", level="extended")
def test_an_agent_survives_that_memory_in_use_is_deregistered(make: Make, verdict: Decide) -> None:
    """An agent that deregisters memory during its transfers lives, and writes correct bytes to a third agent."""
    verdict(judge_faults(make("source-deregistered")))


def _fail_silence(finding: FindingFixture, verdict: Decide, id: str, outcomes: Sequence[FaultOutcome]) -> None:
    """Fail with the finding of LIBFABRIC if a death was not reported and nothing else is wrong; else return."""
    silent = [outcome for outcome in outcomes if outcome.backend == "LIBFABRIC" and outcome.answer == "PROC"]
    remaining = [outcome for outcome in outcomes if outcome not in silent] + without(silent, answer="told")
    if silent and judge_faults(remaining).verdict.value == "PASS":
        finding(id, True, fault_reason(outcomes), affects=True)


def _conclude(
    finding: FindingFixture,
    verdict: Decide,
    id: str,
    occurs: bool,
    outcomes: Sequence[FaultOutcome],
    other_outcomes: Sequence[FaultOutcome] = (),
) -> None:
    """End with the finding, or with the failure of whatever else is wrong."""
    other = judge_faults(other_outcomes or outcomes)
    if other.verdict.value == "FAIL":
        verdict(other)
    finding(id, occurs, fault_reason(outcomes))
