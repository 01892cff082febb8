# SPDX-License-Identifier: Apache-2.0
"""The model of what a group costs its etcd, against counted requests of real groups; and what it says of large ones."""

from __future__ import annotations

import sys

import pytest
from helpers.cli_run import ROOT
from helpers.etcd import Etcd, wait_until
from helpers.rank_group import RankGroup, rank_group

from pytest_nixl.cluster.group import TTL, Member
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.messages import LARGEST
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import TransactionResult, get, put, txn

sys.path.insert(0, str(ROOT / "benchmarks"))

from group_load import (
    PhaseLoad,
    barrier,
    exchanges,
    joining,
    kept,
    leaving,
    messages_of_a_window,
    most_ranks,
    roster_bytes,
    serving,
    waited,
    whole_run,
)

#: The requests that rank 0 sends to all peers, one after another.
COUNT = 11
SIZES = [2, 4, 8]
#: The largest group that the documentation speaks of.
LARGE = 1024
SENT = "etcd_network_client_grpc_sent_bytes_total"


def sorted_as(load: PhaseLoad, size: int) -> list[int]:
    """Return the requests of the ranks of a phase, sorted."""
    return [*[load.each] * (size - 1), load.one]


def settled(group: RankGroup, total: int, *watched: str) -> list[int]:
    """Return the requests of each rank once they are as many as the model says: a thread may send one later."""
    wait_until(lambda: sum(group.requests(*watched)) >= total, 60, f"{total} requests: {group.requests(*watched)}")
    results = group.requests(*watched)
    group.count_again()
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("token", ["", "t"], ids=["open", "sealed"])
def test_each_phase_has_the_requests_of_the_model(etcd: Etcd, size: int, token: str) -> None:
    sealed = bool(token)
    everything = 0

    def check(load: PhaseLoad, *watched: str) -> list[int]:
        nonlocal everything
        results = settled(group, load.total, *watched)
        everything += sum(results)
        assert sorted(results) == sorted_as(load, size)
        return results

    with rank_group(etcd.url, size, token) as group:
        group.join()
        check(joining(size, sealed=sealed), "/run/frozen")
        group.barrier()
        check(barrier(size, sealed=sealed), "/run/")
        group.serve()
        check(serving(size), "/mail/", "/members/")
        for number in range(COUNT):
            assert group.driver.ask_all("echo", text=str(number)) == dict.fromkeys(range(1, size), str(number))
            assert not any(peer._answers for peer in group.driver.peers.values()), "no answer is expected any more"
        results = check(exchanges(size, COUNT))
        assert results[0] == exchanges(size, COUNT).one
        group.end()
        before, after = exchanges(size, COUNT), exchanges(size, COUNT + 1)
        assert sum(settled(group, after.total - before.total)) == after.total - before.total
        everything += after.total - before.total
        group.barrier()
        check(barrier(size, sealed=sealed), "/run/")
        group.leave()
        check(leaving(size))
    assert everything == whole_run(size, COUNT + 1, sealed=sealed).total


@pytest.mark.long
def test_the_bytes_that_etcd_sends_grow_with_the_rosters_alone(etcd: Etcd) -> None:
    """Each rank receives one roster. Nothing else that it receives grows with the number of ranks."""
    remainder = {}
    with connect([etcd.endpoint], timeout=60) as client:
        for size in SIZES:
            before = client.maintenance.counters()[SENT]
            with rank_group(etcd.url, size) as group:
                group.join()
                for _ in range(3):
                    group.barrier()
                sent = client.maintenance.counters()[SENT] - before
                group.leave()
            remainder[size] = (sent - size * roster_bytes(size, len("node-000000"), sealed=False)) / size
    assert remainder[8] <= 1.25 * remainder[2], remainder


def test_requests_of_a_rank_do_not_grow_with_the_group() -> None:
    small, large = (whole_run(size, COUNT, sealed=True) for size in (2, LARGE))
    assert small.each == large.each
    assert large.total / LARGE < small.total / 2 + 1
    # Rank 0 writes and removes 32 messages with one request each.
    assert exchanges(LARGE).one == 2 * -(-(LARGE - 1) // 32) - 1
    assert exchanges(33).one == 2
    assert kept(LARGE) == LARGE * kept(1)
    assert waited(64) == 64 * waited(1)
    # Each rank reads all members for a sentence, and a rank of a larger group says it less often.
    assert waited(LARGE) < LARGE * waited(1)
    assert messages_of_a_window(LARGE) == 4 * (LARGE - 1)


def test_the_roster_of_1024_ranks_with_long_names_is_one_value_that_etcd_accepts(etcd: Etcd) -> None:
    host, pid = "h" * 253, 4_194_304
    members = [Member(rank, f"{rank:016x}", host, pid) for rank in range(LARGE)]
    values = GroupValues("/large/", "t")
    value = values.frozen("/large/run/frozen", TTL, [(member.token, member.host, member.pid) for member in members])
    assert len(value) == roster_bytes(LARGE, len(host))
    with connect([etcd.endpoint], timeout=60) as client:
        done = client.transaction(txn([], [put("/large/run/frozen", value), get("/large/run/frozen")]))
        item = TransactionResult.of(done).range_result(1).first
        assert item is not None
        roster = values.read_frozen(item)
        assert roster is not None
        assert roster.members == tuple(members)
        client.delete("/large/run/frozen")


def test_the_model_says_how_many_ranks_a_roster_can_name(etcd: Etcd) -> None:
    most = most_ranks(253)
    assert most > 5 * LARGE
    assert roster_bytes(most, 253) > LARGEST
    with connect([etcd.endpoint], timeout=60) as client:
        client.put("/large", b"x" * roster_bytes(most, 253))
        with pytest.raises(EtcdError):
            client.put("/large", b"x" * roster_bytes(most + 8, 253))
        client.delete("/large")
