# SPDX-License-Identifier: Apache-2.0
"""Rank 0 and a rank 1 that serves, as two threads and one real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.fixtures.opened_etcd import PrivateEtcd
from pytest_nixl.processes.supervisor import supervisor

TOKEN = "of this group"
#: Seconds of a lease, and for each step: a busy machine may stop the threads for many seconds.
TTL, SECONDS = 20, 60


class Two:
    """Rank 0 as the driver, and rank 1 as a peer that serves it."""

    def __init__(self, etcd: PrivateEtcd, pool: ThreadPoolExecutor) -> None:
        self._etcd = etcd
        joining = [pool.submit(self._join) for _ in range(2)]
        first, second = sorted((place.result() for place in joining), key=lambda place: place.rank)
        self.membership, self.other = first, second
        self.serving: Future[Ending] = pool.submit(serve, second, self._connect, supervisor())
        self.driver = RankDriver(first, self._connect, timeout=SECONDS)
        self.peer = self.driver.peers[1]

    def _connect(self) -> EtcdClient:
        return self._etcd.server.client()

    def _join(self) -> Membership:
        return join(self._connect(), "two", 2, prefix="/test", ttl=TTL, timeout=SECONDS, token=TOKEN)


@contextmanager
def two(etcd: PrivateEtcd) -> Iterator[Two]:
    with ThreadPoolExecutor() as pool:
        ranks = Two(etcd, pool)
        try:
            yield ranks
        finally:
            ranks.driver.end(Ending(0))
            ranks.serving.exception(timeout=SECONDS)
            for membership in (ranks.other, ranks.membership):
                membership.leave()
