# SPDX-License-Identifier: Apache-2.0
"""The checks ``endpoints-conform`` and ``endpoint-rewrites-work``: does NIXL read endpoints as pytest-nixl predicts?"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from pytest_nixl.checks.endpoints.trial import EndpointTrial, try_texts
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.endpoint_explanation import explain
from pytest_nixl.nixl.endpoint_reading import Address, ReadOutcome
from pytest_nixl.processes.supervisor import SupervisorClient

#: The namespace of the agents in the test's etcd.
NAMESPACE = "/conformance"
REMEDY = "report this output with the version of NIXL to pytest-nixl: NIXL reads endpoints differently than predicted"


def judge_readings(
    texts: Sequence[str], client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> Judgement:
    """Give each text to a real agent, and judge whether the outcome is the predicted one.

    :param texts: values of NIXL_ETCD_ENDPOINTS, at least one.
    :param client: a client of the etcd that some of the texts name.
    """
    expected = {text: explain(text).predict(answers) for text in texts}
    trials = list(try_texts(expected, client, settings, supervisor, namespace=NAMESPACE))
    differences = [line for trial in trials if (line := _difference(trial))]
    if differences:
        description = f"{len(differences)} of {len(texts)} texts are not read as predicted: {'; '.join(differences)}"
        return Judgement(Verdict.FAIL, description, REMEDY)
    return Judgement(Verdict.PASS, f"NIXL {trials[0].version} reads {len(texts)} texts as predicted")


def suggestions(texts: Sequence[str], port: int) -> list[str]:
    """Return the values that ``pytest-nixl endpoint`` suggests for these texts and that name one etcd and no other.

    :param port: the port of that etcd, on this host.
    """
    rewrites = dict.fromkeys(rewrite for text in texts if (rewrite := explain(text).rewrite))
    return [rewrite for rewrite in rewrites if _answering_ports(rewrite) == {port}]


def judge_suggestions(
    rewrites: Sequence[str], client: EtcdClient, settings: Settings, supervisor: SupervisorClient
) -> Judgement:
    """Give each suggested value to a real agent, and judge whether the agent publishes with it.

    :param rewrites: what :func:`suggestions` returned.
    :param client: a client of the etcd that they name.
    """
    expected = dict.fromkeys(rewrites, ReadOutcome.PUBLISHES)
    trials = list(try_texts(expected, client, settings, supervisor, namespace=NAMESPACE))
    broken = [
        f"{trial.text}: {trial.outcome} ({trial.words})"
        for trial in trials
        if trial.outcome is not ReadOutcome.PUBLISHES
    ]
    if broken:
        return Judgement(Verdict.FAIL, f"suggested values that do not work: {'; '.join(broken)}", REMEDY)
    return Judgement(Verdict.PASS, f"{len(rewrites)} rewrites work")


def answers(address: Address) -> bool:
    """Whether something accepts a TCP connection at this address."""
    try:
        socket.create_connection((address.host, address.port), timeout=2).close()
    except OSError:
        return False
    return True


def _difference(trial: EndpointTrial) -> str:
    explanation = explain(trial.text)
    predicted = explanation.predict(answers, trial.version)
    if trial.agrees(predicted):
        return ""
    answer = f" ({trial.words})" if trial.words else ""
    return f"{explanation.text!r}: predicted: {predicted}; NIXL {trial.version}: {trial.outcome}{answer}"


def _answering_ports(text: str) -> set[int]:
    members = [Address(endpoint.host, endpoint.port) for endpoint in parse_endpoints(text)]
    return {member.port for member in members if answers(member)}
