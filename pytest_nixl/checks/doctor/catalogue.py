# SPDX-License-Identifier: Apache-2.0
"""All checks of the doctor, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nixl.checks.doctor.check import REGISTERED, Check, Requirements
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement


def checks() -> Mapping[str, Check]:
    """Return all checks by id, in the order in which they run."""
    from pytest_nixl.checks.doctor import environment, etcd, gpu, libraries, limits, network, rdma

    order = (libraries, limits, rdma, network, gpu, etcd, environment)
    place = {module.__name__: number for number, module in enumerate(order)}
    return dict(sorted(REGISTERED.items(), key=lambda item: place[item[1].judge.__module__]))


def judge(id: str, facts: Facts, wanted: Requirements) -> Judgement:
    """Run one check.

    :raises KeyError: no check has this id.
    """
    return checks()[id].judge(facts, wanted)
