# SPDX-License-Identifier: Apache-2.0
"""Do many agents find each other: 40, and 200 at the level ``extended``?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_nixl import Judgement, NixlAgent, NotApplicableError, Settings, Verdict, shake_hands, wait_until

from .moving import registered, write_and_compare
from .namespace import Namespace, complaint, knows

WORKERS = 4
#: Agents of each worker, and at the level ``extended``.
PER_WORKER, EXTENDED = 10, 50


@pytest.mark.nixl_check("metadata-of-200-agents")
@pytest.mark.nixl_early
def test_many_agents_find_each_other(
    namespace: Namespace,
    agent_backend: str,
    agent_progress: str,
    nixl_settings: Settings,
    verdict: Callable[[Judgement], None],
) -> None:
    """All agents publish, one agent per worker finds all others and writes to the next worker, and all are removed.

    There are 200 agents at the level extended, and 40 at the level standard.
    """
    count = EXTENDED if nixl_settings.extended else PER_WORKER
    if agent_progress == "on" or shake_hands([agent_backend]):
        verb = "has" if agent_progress == "on" else "needs"
        raise NotApplicableError(
            f"each agent with {agent_backend} {verb} a progress thread, which uses a whole core, and {WORKERS * count} "
            "of them would overload the host"
        )
    finders = namespace.start(*(f"finder-{number}" for number in range(WORKERS)))
    with ThreadPoolExecutor(WORKERS) as pool:  # one thread per worker, because a worker runs one command at a time
        crews = list(
            pool.map(
                lambda finder: [finder, *(finder.beside(f"{finder.name}-{number}") for number in range(1, count))],
                finders,
            )
        )
        everybody = [agent for crew in crews for agent in crew]
        targets = [registered(crew[-1]) for crew in crews]
        list(pool.map(lambda crew: [agent.send_local_metadata() for agent in crew], crews))
        _await_keys(namespace, everybody, present=True)
        list(pool.map(lambda finder: _fetch_others(finder, everybody), finders))
        list(pool.map(lambda finder: _await_others(namespace, finder, everybody), finders))
    for number, finder in enumerate(finders):
        following = (number + 1) % WORKERS
        write_and_compare(finder, crews[following][-1], targets[following], namespace.seconds)
    for finder in finders:
        namespace.await_fetches(finder)  # each also watches the agents that it found
    for agent in everybody:
        agent.invalidate_local_metadata()
    _await_keys(namespace, everybody, present=False)
    for number, finder in enumerate(finders):
        namespace.await_forgotten(finder, crews[number - 1][-1])
    more = "" if nixl_settings.extended else f"; --nixl-level=extended tries {WORKERS * EXTENDED}"
    verdict(Judgement(Verdict.PASS, f"{len(everybody)} agents in {WORKERS} processes found each other{more}"))


def _fetch_others(finder: NixlAgent, everybody: Sequence[NixlAgent]) -> None:
    for agent in everybody:
        if agent is not finder:
            finder.fetch_remote_metadata(agent.name)


def _await_others(namespace: Namespace, finder: NixlAgent, everybody: Sequence[NixlAgent]) -> None:
    missing = [agent for agent in everybody if agent is not finder]

    def all_loaded() -> bool:
        while missing and knows(finder, missing[0]):
            del missing[0]
        return not missing

    wait_until(
        all_loaded,
        f"{finder.worker.name} to load the metadata of {len(missing)} agents",
        seconds=namespace.seconds,
        remedy=lambda: (
            f"{len(missing)} are missing, first {missing[0].name}; NIXL wrote: {complaint(finder) or 'nothing'}"
        ),
    )


def _await_keys(namespace: Namespace, everybody: Sequence[NixlAgent], *, present: bool) -> None:
    expected = {namespace.key(agent) for agent in everybody} if present else set()

    def stored_keys() -> set[str]:
        return {key for key, value in namespace.client.get_prefix(f"{namespace.name}/finder").items() if value}

    wait_until(
        lambda: stored_keys() == expected,
        f"etcd to have the metadata of {len(expected)} agents under {namespace.name}/",
        seconds=namespace.seconds,
        remedy=lambda: f"etcd has {len(stored_keys())}: read what NIXL wrote: {complaint(everybody[0]) or 'nothing'}",
    )
