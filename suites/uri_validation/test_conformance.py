# SPDX-License-Identifier: Apache-2.0
"""Does the installed NIXL read endpoints as pytest-nixl predicts? Tested on a private etcd."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement, PrivateEtcd, Settings, free_ports, parse_endpoints, supervisor
from pytest_nixl.checks.endpoints.trial import judge_readings, judge_suggestions, suggestions

from .. import early
from .corpus import load_corpus


@early.fixture
def texts(nixl_private_etcd: PrivateEtcd) -> list[str]:
    """The values of the corpus, with the address of the test's etcd and of a port on which nothing listens."""
    (endpoint,) = parse_endpoints(nixl_private_etcd.endpoint)
    (dead,) = free_ports(1)
    return [entry.at(endpoint.port, dead, endpoint.host).text for entry in load_corpus()]


@pytest.mark.nixl_check("endpoints-conform")
@pytest.mark.nixl_early
def test_nixl_reads_every_text_as_predicted(
    texts: list[str],
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """Each value of the corpus, given to a real agent, has the outcome that `pytest-nixl endpoint` predicts."""
    verdict(judge_readings(texts, nixl_private_etcd.client, nixl_settings, supervisor()))


@pytest.mark.nixl_check("endpoint-rewrites-work")
@pytest.mark.nixl_early(waits=5)
def test_suggested_rewrites_work(
    texts: list[str],
    nixl_private_etcd: PrivateEtcd,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """A real agent publishes with every suggested rewrite that names this test's etcd and no other etcd."""
    (endpoint,) = parse_endpoints(nixl_private_etcd.endpoint)
    rewrites = suggestions(texts, endpoint.port)
    verdict(judge_suggestions(rewrites, nixl_private_etcd.client, nixl_settings, supervisor()))
