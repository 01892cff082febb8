# SPDX-License-Identifier: Apache-2.0
"""Does the installed NIXL read endpoints as pytest-nixl predicts? Tested on a private etcd."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import pytest

from pytest_nixl import Judgement, PrivateEtcd, Settings, Verdict, free_ports, parse_endpoints, supervisor
from pytest_nixl.checks.endpoints.trial import EndpointTrial, try_texts
from pytest_nixl.nixl.endpoint_readers import Address, ReadOutcome, explain

from .corpus import Entry

REMEDY = "report this output with the version of NIXL to pytest-nixl: NIXL reads endpoints differently than predicted"


@pytest.mark.nixl_check("endpoints-conform")
def test_nixl_reads_every_text_as_predicted(
    corpus: tuple[Entry, ...],
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """Each value of the corpus, given to a real agent, has the outcome that `pytest-nixl endpoint` predicts."""
    texts = [entry.text for entry in _filled(corpus, nixl_private_etcd)]
    expected = {text: explain(text).predict(_answers) for text in texts}
    trials = _tried(expected, nixl_private_etcd, nixl_settings)
    differences = [line for trial in trials if (line := _difference(trial))]
    if differences:
        said = f"{len(differences)} of {len(texts)} texts are not read as predicted: {'; '.join(differences)}"
        verdict(Judgement(Verdict.FAIL, said, REMEDY))
    else:
        verdict(Judgement(Verdict.PASS, f"NIXL {trials[0].version} reads {len(texts)} texts as predicted"))


def _difference(trial: EndpointTrial) -> str:
    explanation = explain(trial.text)
    predicted = explanation.predict(_answers, trial.version)
    if trial.agrees(predicted):
        return ""
    words = f" ({trial.words})" if trial.words else ""
    return f"{explanation.text!r}: predicted: {predicted}; NIXL {trial.version}: {trial.outcome}{words}"


@pytest.mark.nixl_check("endpoint-rewrites-work")
def test_suggested_rewrites_work(
    corpus: tuple[Entry, ...],
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """A real agent publishes with every suggested rewrite that names this test's etcd and no other etcd."""
    (own,) = parse_endpoints(nixl_private_etcd.endpoint)
    rewrites = {
        rewrite: ReadOutcome.PUBLISHES
        for entry in _filled(corpus, nixl_private_etcd)
        if (rewrite := explain(entry.text).rewrite)
        and {address.port for address in _members(rewrite) if _answers(address)} == {own.port}
    }
    broken = [
        f"{trial.text}: {trial.outcome} ({trial.words})"
        for trial in _tried(rewrites, nixl_private_etcd, nixl_settings)
        if trial.outcome is not ReadOutcome.PUBLISHES
    ]
    if broken:
        verdict(Judgement(Verdict.FAIL, f"suggested values that do not work: {'; '.join(broken)}", REMEDY))
    else:
        verdict(Judgement(Verdict.PASS, f"{len(rewrites)} rewrites work"))


def _filled(corpus: tuple[Entry, ...], etcd: PrivateEtcd) -> list[Entry]:
    (endpoint,) = parse_endpoints(etcd.endpoint)
    (dead,) = free_ports(1)
    return [entry.at(endpoint.port, dead, endpoint.host) for entry in corpus]


def _tried(texts: Mapping[str, ReadOutcome], etcd: PrivateEtcd, settings: Settings) -> list[EndpointTrial]:
    return list(
        try_texts(
            texts,
            supervisor=supervisor(),
            client=etcd.client,
            namespace="/conformance",
            timeout=settings.timeout,
            start_timeout=settings.start_timeout,
        )
    )


def _members(text: str) -> list[Address]:
    return [Address(endpoint.host, endpoint.port) for endpoint in parse_endpoints(text)]


def _answers(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=2).close()
    except OSError:
        return False
    return True
