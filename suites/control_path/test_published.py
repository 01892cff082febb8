# SPDX-License-Identifier: Apache-2.0
"""How long does it take until agents find each other through etcd, and does their metadata fit into it?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from pytest_nixl import Figure, Judgement, NixlPluginError, Settings, wait_until
from pytest_nixl.checks.control_path.check import describe_oversize, find_all, refusal_of, regions_of, register_regions

from ..conftest import FindingFixture
from ..metadata.namespace import Namespace, complaint

#: The numbers of agents at the level ``standard``, and at the level ``extended``.
FEW, MANY = 2, (4, 16)
#: The workers of many agents; the other agents are in the processes of these.
WORKERS = 2
ROUNDS = 3


@pytest.mark.nixl_check("publish-to-found")
def test_an_agent_is_found_soon_after_it_published(
    namespace: Namespace,
    agent_backend: str,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Another agent has loaded the metadata as soon after its publication to etcd as the profile demands."""
    verdict(record_figures([_publish_and_find(namespace, agent_backend, FEW)]))


@pytest.mark.nixl_check("publish-to-found-of-many", level="extended")
def test_many_agents_are_found_soon_after_they_published(
    namespace: Namespace,
    agent_backend: str,
    record_figures: Callable[[Sequence[Figure]], Judgement],
    verdict: Callable[[Judgement], None],
) -> None:
    """Of 4 and of 16 agents, one has loaded the metadata of all others as soon as the profile demands.

    The check ``metadata-of-200-agents`` has more of them.
    """
    verdict(record_figures([_publish_and_find(namespace, agent_backend, count) for count in MANY]))


def _publish_and_find(namespace: Namespace, backend: str, count: int) -> Figure:
    """Time, in several rounds with new agents, until one agent has loaded the metadata of all others."""
    first, *finders = namespace.start(*(f"of-{count}-{number}" for number in range(WORKERS)))
    times = []
    for number in range(ROUNDS):
        publishers = [
            finders[place % len(finders)].beside(f"of-{count}-{number}-{place}") for place in range(count - 1)
        ]
        start = time.perf_counter()
        for publisher in publishers:
            publisher.send_local_metadata()
        missing = find_all(first, publishers, namespace.seconds)
        times.append(time.perf_counter() - start)
        if missing:
            raise NixlPluginError(
                f"{first.worker.name} did not load the metadata of {len(missing)} of {count - 1} agents within "
                f"{namespace.seconds:g} s, for example of {missing[0]}; NIXL wrote: {complaint(first) or 'nothing'}",
                "check NIXL_ETCD_ENDPOINTS with `pytest-nixl endpoint URL`, and run suites/metadata",
            )
    return Figure.of(
        "publish-to-found", sorted(times)[len(times) // 2], {"backend": backend, "agents": count}, tuple(times)
    )


@pytest.mark.nixl_check("metadata-fits-etcd")
def test_the_metadata_of_a_kv_cache_fits_into_etcd(
    namespace: Namespace, nixl_settings: Settings, finding: FindingFixture
) -> None:
    """An agent that has registered each tensor of the requested KV cache publishes its metadata, and etcd has it."""
    regions = regions_of(nixl_settings.kv_plan)
    (agent,) = namespace.start("publisher")
    namespace.publish(agent)
    metadata = register_regions(agent, regions)
    agent.send_local_metadata()
    key = namespace.key(agent)
    wait_until(
        lambda: namespace.client.get(key) == metadata or refusal_of(agent.worker.output()),
        f"etcd to have the metadata of {regions} regions under {key}, or to refuse it",
        seconds=namespace.seconds,
        remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
    )
    published = namespace.client.get(key)
    description = describe_oversize(regions, len(metadata), published, refusal_of(agent.worker.output()))
    finding("NIXL-ETCD-OVERSIZE", published != metadata, description, affects=True)
