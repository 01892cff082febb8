# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run as its tests see them: their hosts, their names, and what is asked of them together."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.session.cluster import Cluster

GPU = (MemoryPair("VRAM", "DRAM"),)


@pytest.fixture
def local_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the host of this process by what it is made of, and start no supervisor."""
    monkeypatch.setattr("pytest_nixl.session.cluster.supervisor", lambda: "supervisor")
    monkeypatch.setattr("pytest_nixl.session.cluster.LocalHost", lambda *values, **named: (*values, named))


def a_session(*, driver: bool = True) -> Any:
    """Return the session of rank 0 of three ranks on two hosts."""
    members = [SimpleNamespace(host=host) for host in ("node-a", "node-b", "node-b")]
    requests: list[object] = []

    def ask_all(request: str, **arguments: Any) -> dict[int, Any]:
        requests.append((request, arguments))
        return {2: "of 2", 1: "of 1"}

    return SimpleNamespace(
        membership=SimpleNamespace(size=3, members=members), requests=requests, agents_etcd=lambda: "the group's etcd",
        name_of=lambda rank: f"rank {rank} on {members[rank].host}",
        services=SimpleNamespace(by_name=lambda: {"count": lambda **arguments: ("of 0", arguments)}),
        driver=SimpleNamespace(peers={2: "peer 2", 1: "peer 1"}, ask_all=ask_all) if driver else None,
    )  # fmt: skip


def a_run(settings: Settings, session: Any) -> Any:
    return SimpleNamespace(settings=settings, rank_session=session)


@pytest.mark.usefixtures("local_host")
def test_a_run_of_one_rank_has_two_places_on_this_host(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings(nixlbench="/bin/sh", memory=GPU)
    named = {"own": own_variables(settings.programs, memory=GPU)}
    for session in (None, a_session(driver=False)):  # a peer drives nobody
        cluster: Any = Cluster.of(a_run(settings, session))
        assert cluster.hosts == [("supervisor", 0, named), ("supervisor", 1, named)]
        assert (cluster.ranks, cluster.several, cluster.names) == (1, False, ["rank 0"])
        assert (cluster.host_names, cluster.etcd(), cluster.ask("count")) == (frozenset(), None, [])


@pytest.mark.usefixtures("local_host")
def test_the_ranks_of_a_run_are_named_and_asked_in_their_order(make_settings: Callable[..., Settings]) -> None:
    session = a_session()
    cluster: Any = Cluster.of(a_run(make_settings(), session))
    assert cluster.hosts == [("supervisor", 0, {"own": own_variables({})}), "peer 1", "peer 2"]
    assert (cluster.ranks, cluster.several) == (3, True)
    assert cluster.names == ["rank 0 on node-a", "rank 1 on node-b", "rank 2 on node-b"]
    assert (cluster.host_names, cluster.etcd()) == ({"node-a", "node-b"}, "the group's etcd")
    assert cluster.ask("count", of=7) == [("of 0", {"of": 7}), "of 1", "of 2"]
    assert session.requests == [("count", {"of": 7})]


def test_a_rank_that_is_not_the_driver_asks_nobody() -> None:
    session = a_session(driver=False)
    session.membership.size = 2
    cluster = Cluster([], session)
    assert (cluster.ask("count"), cluster.ranks, cluster.several) == ([], 2, True)
