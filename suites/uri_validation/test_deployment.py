# SPDX-License-Identifier: Apache-2.0
"""Do the etcd endpoints of this deployment (by default, those of this run's etcd) work with NIXL?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, Settings, Verdict, supervisor
from pytest_nixl.checks.endpoints.deployment import (
    Deployment,
    judge_connection,
    judge_form,
    judge_health,
    judge_publication,
    judge_resolution,
    notes_about,
)

from ..conftest import FindingFixture


@pytest.mark.nixl_check("endpoints-well-formed", level="quick")
def test_endpoints_are_well_formed(deployment: Deployment, verdict: Callable[[Judgement], None]) -> None:
    """NIXL can read the endpoints. It ignores a malformed one without an error in Python."""
    verdict(judge_form(deployment))


@pytest.mark.nixl_check("endpoints-resolve", level="quick")
def test_endpoints_resolve(deployment: Deployment, verdict: Callable[[Judgement], None]) -> None:
    """Their host names resolve on this host, as NIXL's client resolves them: to IPv4 first."""
    verdict(judge_resolution(deployment))


@pytest.mark.nixl_check("endpoints-connect", level="quick")
def test_endpoints_answer_tcp(deployment: Deployment, verdict: Callable[[Judgement], None]) -> None:
    """Something listens at each address that NIXL reads from them."""
    verdict(judge_connection(deployment))


@pytest.mark.nixl_check("endpoints-healthy", level="quick")
def test_endpoints_are_those_of_an_etcd(deployment: Deployment, verdict: Callable[[Judgement], None]) -> None:
    """The server at each endpoint is an etcd and answers pytest-nixl's client."""
    verdict(judge_health(deployment))


@pytest.mark.nixl_check("endpoints-publish", level="quick")
def test_an_agent_publishes_through_the_endpoints(
    deployment: Deployment, nixl_settings: Settings, verdict: Callable[[Judgement], None]
) -> None:
    """A real agent that gets the unchanged value publishes its metadata, and the key is in etcd."""
    verdict(judge_publication(deployment, nixl_settings, supervisor()))


@pytest.mark.parametrize(
    "id",
    [
        pytest.param("NIXL-ETCD-HTTPS-PLAINTEXT", marks=pytest.mark.nixl_check("endpoints-encrypted", level="quick")),
        pytest.param(
            "NIXL-ETCD-CREDENTIALS-DROPPED", marks=pytest.mark.nixl_check("endpoints-authenticated", level="quick")
        ),
        pytest.param("NIXL-ETCD-MEMBER-DROPPED", marks=pytest.mark.nixl_check("endpoints-all-used", level="quick")),
    ],
)
def test_endpoints_meet_no_known_defect(
    id: str, deployment: Deployment, finding: FindingFixture, verdict: Callable[[Judgement], None]
) -> None:
    """They need nothing that NIXL is known to ignore: encryption, credentials, or one of several members."""
    met = notes_about(deployment, id)
    if met:
        finding(id, True, f"{deployment}: {'; '.join(met)}; {deployment.explanation.remedy}", affects=True)
    else:
        verdict(Judgement(Verdict.PASS, f"{deployment} is not affected by {id}"))
