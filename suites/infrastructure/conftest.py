# SPDX-License-Identifier: Apache-2.0
"""Fixtures with the facts of every rank's host, and functions that run a check on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from pytest_nixl import Cluster, EtcdFixture, Facts, Judgement, Profile, Requirements, Settings
from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.ranks import everywhere, gather_hosts, with_etcd

#: Runs a check by its id.
Ask = Callable[[str], Judgement]
#: The checks of the doctor that judge the etcd of this run, and those whose own test does more than read facts.
OF_ETCD = ("etcd-version", "etcd-latency", "etcd-clock")
OWN_TEST = ("nixl-loads", "backend-loads", "etcd-answers", "telemetry-in-process")
#: Checks that only the command asks, because the other suites move bytes themselves.
COMMAND_ONLY = ("transfers-arrive",)


def check_parameters(checks: Iterable[str]) -> list[Any]:
    """Return the parameters of a test that asks checks of the doctor by their ids."""
    return [pytest.param(id, id=id, marks=pytest.mark.nixl_check(id, level="quick")) for id in checks]


@pytest.fixture(scope="session")
def hosts(nixl_settings: Settings, nixl_cluster: Cluster) -> Sequence[Facts]:
    """The facts of each rank's host, and of the deployment's etcd if there is one."""
    return gather_hosts(nixl_settings, nixl_cluster)


@pytest.fixture(scope="session")
def facts(hosts: Sequence[Facts]) -> Facts:
    """The facts of this host."""
    return hosts[0]


@pytest.fixture(scope="session")
def requirements(nixl_settings: Settings, profile: Profile) -> Requirements:
    """The expected state of every host."""
    return Requirements(profile, nixl_settings.backend)


@pytest.fixture
def ask(hosts: Sequence[Facts], nixl_cluster: Cluster, requirements: Requirements) -> Ask:
    """A function that runs a check on the facts of every rank's host."""
    return lambda check: everywhere(nixl_cluster.names, [judge_by_id(check, host, requirements) for host in hosts])


@pytest.fixture
def ask_etcd(nixl_etcd: EtcdFixture, facts: Facts, requirements: Requirements) -> Ask:
    """A function that runs a check on the etcd of this run."""
    etcd_facts = with_etcd(facts, nixl_etcd.endpoint, nixl_etcd.client)
    return lambda check: judge_by_id(check, etcd_facts, requirements)
