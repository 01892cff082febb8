# SPDX-License-Identifier: Apache-2.0
"""Processes get the ranks 0 to n-1, each once, while answers are lost, etcd restarts, and others come late."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import pytest
from helpers.three_node import ThreeNodeEtcd

from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.race import Race
from pytest_nixl.core.polling import wait_until
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy, Request, State
from pytest_nixl.etcd_servers.embedded import EmbeddedServer
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.long

#: Seconds of a lease that does not expire on a busy machine, of one whose end a late process waits for, and of a wait.
TTL, SHORT, SECONDS = 60, 6, 120.0


@pytest.fixture
def race() -> Iterator[Race]:
    """An etcd to disturb, a proxy to it, and claimants, which end with the test."""
    server = EmbeddedServer.start(supervisor())
    prefix = f"/pytest-nixl/{secrets.token_hex(8)}/"
    try:
        with connect(parse_endpoints(server.endpoint)) as etcd, EtcdProxy(server.endpoint) as path:
            opened = Race(server, etcd, path, prefix)
            try:
                yield opened
            finally:
                for claimant in opened.claimants:
                    claimant.close()
    finally:
        server.discard()


def assert_each_rank_once(race: Race, claimants: Sequence[Claimant], group: str) -> None:
    assert (race.faults(claimants, len(claimants), group, SECONDS), race.late) == ([], [])


def wait_for_members(etcd: EtcdClient, prefix: str, count: int) -> None:
    wait_until(lambda: etcd.count_prefix(f"{prefix}members/") == count, f"{count} registrations", seconds=SECONDS)


def is_transaction(request: Request) -> bool:
    return request.method == "Txn"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_claim_whose_answer_is_lost_is_not_made_twice(race: Race, nth: int) -> None:
    """The second attempt of an executed write finds the first. The membership has three writes."""
    proxy_clients = [race.path.client(f"claimant {number}") for number in range(2)]
    for proxy_client in proxy_clients:
        proxy_client.lose_answer(is_transaction, nth=nth)
    assert_each_rank_once(
        race, [race.claim("lost", 2, endpoint=proxy_client.endpoint, ttl=TTL) for proxy_client in proxy_clients], "lost"
    )
    assert any(
        request.state is State.ANSWER_LOST for proxy_client in proxy_clients for request in proxy_client.requests
    )
    assert race.etcd.count_prefix(f"{race.prefix}lost/members/") == 2


def test_a_group_starts_although_etcd_restarts(race: Race) -> None:
    early = [race.claim("restarted", 4, ttl=TTL) for _ in range(3)]
    wait_for_members(race.etcd, f"{race.prefix}restarted/", 3)
    race.server.kill()
    race.server.restart()
    assert_each_rank_once(race, [*early, race.claim("restarted", 4, ttl=TTL)], "restarted")


def test_a_group_starts_although_etcd_changes_its_leader_and_loses_it(race: Race) -> None:
    with ThreeNodeEtcd(supervisor()) as trio, trio.client() as client:
        claimants = []
        for count, disturb in enumerate((trio.change_leader, trio.kill_leader), 1):
            claimants.append(race.claim("leaders", 3, endpoint=trio.endpoint, ttl=TTL))
            wait_for_members(client, f"{race.prefix}leaders/", count)
            disturb()
        claimants.append(race.claim("leaders", 3, endpoint=trio.endpoint, ttl=TTL))
        assert_each_rank_once(race, claimants, "leaders")


def test_late_processes_are_refused_and_harm_no_member(race: Race) -> None:
    """A third process of a group of two, and a second job of the same name, are refused with the members' names."""
    members = [race.claim("live", 2, ttl=SHORT) for _ in range(2)]
    assert_each_rank_once(race, members, "live")
    for outcome in race.outcomes([race.claim("live", size, ttl=TTL) for size in (2, 2, 2, 3)], SECONDS):
        assert outcome.rank is None
        for text in ("'live'", f"rank 0 on {outcome.host} (pid", f"rank 1 on {outcome.host} (pid"):
            assert text in outcome.error
    for member in members:
        member.go_on()  # it passes one more barrier and leaves
    for member in members:
        assert member.wait_until_ended(SECONDS)
        assert member.message is not None
        assert "rank" in member.message, "no member fails because of the late processes"
    assert race.etcd.get_prefix(race.prefix) == {}
