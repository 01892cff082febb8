# SPDX-License-Identifier: Apache-2.0
"""Can one agent have several backends, and does each transfer go by the one that was chosen for it?"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pytest_nixl import BACKENDS, Agents, Cluster, Judgement, Run, Settings
from pytest_nixl.checks.metadata.several_backends import add_storage, backends_of, judge_uses, use_each


@pytest.mark.nixl_check("several-backends", level="extended")
def test_each_transfer_goes_by_the_backend_that_was_chosen(
    nixl_settings: Settings, nixl_cluster: Cluster, nixl_run: Run, verdict: Callable[[Judgement], None]
) -> None:
    """An agent with several backends moves host memory to another agent by one and to a file by another, as chosen."""
    backends = backends_of(nixl_settings.backend)
    environment: dict[str, str | None] = {}
    for name in backends:
        environment |= BACKENDS[name].environment(os.environ)
    with Agents(nixl_cluster.hosts[0], nixl_settings) as agents:
        initiator, target = agents.start_each(
            ["initiator", "target"],
            backends=backends[:-1],
            environment=environment,
            hosts=nixl_cluster.hosts[:2],
            progress_thread=None,
        )
        add_storage(initiator)
        uses = use_each(initiator, target, backends, directory=nixl_settings.file_dir, seconds=nixl_settings.timeout)
    judged = judge_uses(uses)
    nixl_run.record.note(judged.reason)
    verdict(judged)
