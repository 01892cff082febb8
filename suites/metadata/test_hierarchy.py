# SPDX-License-Identifier: Apache-2.0
"""Do bytes stay right from an object through two agents' memory to a file?"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pytest_nixl import BACKENDS, Agents, Cluster, Judgement, Run, Settings
from pytest_nixl.checks.hierarchy import add_storage, judge_legs, move_through


@pytest.mark.nixl_check("hierarchy", level="extended")
def test_bytes_go_from_an_object_to_a_file(
    nixl_settings: Settings,
    nixl_cluster: Cluster,
    nixl_run: Run,
    agent_backend: str,
    request: pytest.FixtureRequest,
    verdict: Callable[[Judgement], None],
) -> None:
    """Two agents with several backends each move bytes: object, memory, other agent's memory, file."""
    bucket = request.getfixturevalue("nixl_s3")  # only now, because it may start a server
    environment: dict[str, str | None] = {**BACKENDS[agent_backend].environment(os.environ), **bucket.environment}
    with Agents(nixl_cluster.places[0], nixl_settings) as agents:
        reader, writer = agents.start_each(
            ["initiator", "target"], backends=[agent_backend], environment=environment,
            places=nixl_cluster.places[:2], progress_thread=None,
        )  # fmt: skip
        add_storage(reader, writer, bucket)
        legs = move_through(
            reader, writer, agent_backend, bucket, directory=nixl_settings.file_dir, seconds=nixl_settings.timeout
        )
    judged = judge_legs(legs)
    nixl_run.recorder.note(judged.reason)
    verdict(judged)
