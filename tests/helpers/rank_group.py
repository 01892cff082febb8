# SPDX-License-Identifier: Apache-2.0
"""All ranks of a group as threads of a test, each with a proxy of its own that counts its requests to a real etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from pytest_nixl.cluster.driver import RankDriver, serve
from pytest_nixl.cluster.joining import join
from pytest_nixl.cluster.membership import Membership
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.proxy import EtcdProxy, Request
from pytest_nixl.processes.supervisor import supervisor

#: Seconds for each step, and of a lease, which no thread has to refresh.
SECONDS = LEASE = 120


class RankGroup:
    """A group whose ranks go through the phases of a run, each when the test says so.

    :param path: a proxy of the etcd.
    :param size: the number of ranks.
    :param token: the group's token; empty for none.
    """

    def __init__(self, path: EtcdProxy, size: int, token: str, pool: ThreadPoolExecutor, stack: ExitStack) -> None:
        self._ways = [path.client() for _ in range(size)]
        self._pool, self._stack = pool, stack
        self._size, self._token = size, token
        self._counted = [0] * size
        self.members: Sequence[Membership] = ()
        self.driver: RankDriver
        self._serving: list[Future[Ending]] = []

    def requests(self, *watched: str) -> list[int]:
        """Return the number of requests of each rank since the last call of :meth:`count_again`.

        A busy machine refreshes leases and renews watches at any moment: these requests are not counted.

        :param watched: parts of the keys that this phase watches; the watch of a key counts once.
        """
        return [
            _count(proxy_client.requests[before:], watched)
            for proxy_client, before in zip(self._ways, self._counted, strict=True)
        ]

    def count_again(self) -> None:
        """Count from here on."""
        self._counted = [len(proxy_client.requests) for proxy_client in self._ways]

    def join(self) -> None:
        """Let all ranks join."""
        joining = [
            self._pool.submit(
                join, self._stack.enter_context(self.client(rank)()), "counted", self._size,
                wanted=rank, token=self._token, ttl=LEASE, timeout=SECONDS, host=f"node-{rank:06d}",
            )
            for rank in range(self._size)
        ]  # fmt: skip
        self.members = [future.result(SECONDS) for future in joining]

    def barrier(self) -> None:
        """Let all ranks pass a barrier."""
        self._all([partial(member.barrier, SECONDS) for member in self.members])

    def serve(self) -> None:
        """Connect rank 0 with its peers, which answer ``echo``. All have read their mail and watch the members."""
        for member in self.members[1:]:
            services = {"echo": lambda text: text}
            client = self.client(member.rank)
            self._serving.append(self._pool.submit(serve, member, client, supervisor(), services=services))
        self.driver = RankDriver(self.members[0], self.client(0), timeout=SECONDS)

    def end(self) -> None:
        """End the run of the peers."""
        self.driver.end(Ending(0))
        for thread in self._serving:
            assert thread.result(SECONDS).code == 0

    def leave(self) -> None:
        """Let all ranks leave."""
        self._all([member.leave for member in self.members])

    def client(self, rank: int) -> Callable[[], EtcdClient]:
        """Return a function that makes a client of a rank, whose requests are counted."""
        return lambda: connect(parse_endpoints(self._ways[rank].endpoint), timeout=SECONDS)

    def _all(self, tasks: Sequence[Callable[[], None]]) -> None:
        for future in [self._pool.submit(task) for task in tasks]:
            future.result(SECONDS)


def _count(requests: Sequence[Request], watched: tuple[str, ...]) -> int:
    keys = {request.key for request in requests if request.method == "Watch"}
    counted = [request for request in requests if request.method not in ("Watch", "LeaseKeepAliveOnce")]
    return len(counted) + sum(any(part in key for part in watched) for key in keys)


@contextmanager
def rank_group(etcd: str, size: int, token: str = "") -> Iterator[RankGroup]:
    """Yield a group of ranks that have not joined yet.

    :param etcd: the URL of an etcd that nothing else uses.
    """
    with ThreadPoolExecutor(2 * size) as pool, EtcdProxy(etcd) as path, ExitStack() as stack:
        yield RankGroup(path, size, token, pool, stack)
