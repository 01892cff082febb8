# SPDX-License-Identifier: Apache-2.0
"""Do bytes stay right from an object through the memory of agents to a file?"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from pytest_nixl import BACKENDS, Agents, Cluster, Judgement, Run, Settings
from pytest_nixl.checks.metadata.hierarchy import add_storage, judge_legs, move_through


@pytest.mark.nixl_check("hierarchy", level="extended")
@pytest.mark.parametrize("count", [2, 1], ids=["two-agents", "one-agent"])
def test_bytes_go_from_an_object_to_a_file(
    count: int,
    nixl_settings: Settings,
    nixl_cluster: Cluster,
    nixl_run: Run,
    agent_backend: str,
    request: pytest.FixtureRequest,
    verdict: Callable[[Judgement], None],
) -> None:
    """Agents with several backends each move bytes from an object to memory, to other memory and to a file."""
    bucket = request.getfixturevalue("nixl_s3")  # only now, because it may start a server
    environment: dict[str, str | None] = {**BACKENDS[agent_backend].environment(os.environ)}
    with Agents(nixl_cluster.hosts[0], nixl_settings) as agents:
        start = partial(agents.start, backends=[agent_backend], progress_thread=None)
        # Only the reader uses the object store, and its variables may not be given to the worker of another rank.
        reader = writer = start("initiator", environment={**environment, **bucket.environment})
        if count > 1:
            writer = start("target", environment=environment, host=nixl_cluster.hosts[1])
        add_storage(reader, writer, bucket)
        legs = move_through(
            reader, writer, agent_backend, bucket, directory=nixl_settings.file_dir, seconds=nixl_settings.timeout
        )
    judged = judge_legs(legs)
    nixl_run.record.note(f"{count} {'agents' if count > 1 else 'agent'}: {judged.reason}")
    verdict(judged)
