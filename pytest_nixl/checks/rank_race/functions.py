# SPDX-License-Identifier: Apache-2.0
"""Ways to claim a rank, as functions for claimants: pytest-nixl's membership, and a known broken one.

Each takes ``endpoint``, ``group`` (the prefix of its keys), ``size`` and ``announce``, which it calls with its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_nixl.cluster.joining import join
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints

if TYPE_CHECKING:
    from pytest_nixl.cluster.membership import Membership

#: Seconds of a lease and of any wait. During an exploration no lease is refreshed or expires.
TTL, WAIT = 120, 60.0


@contextmanager
def _joined(
    endpoint: str, group: str, size: int, ttl: int, timeout: float = WAIT, ready: Callable[[], None] = lambda: None
) -> Iterator[Membership]:
    """Join a group; ``ready`` is called just before."""
    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=timeout) as client:
        ready()
        with join(client, name, size, ttl=ttl, timeout=WAIT, prefix=prefix) as member:
            yield member


def membership(endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL) -> None:
    """Claim a rank with :func:`pytest_nixl.cluster.joining.join`."""
    with _joined(endpoint, group, size, ttl) as member:
        announce(member.rank)


def membership_with_barrier(
    endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL
) -> None:
    """Join, pass a barrier so that the group has started, announce the rank, pass another barrier, and leave."""
    with _joined(endpoint, group, size, ttl, timeout=5) as member:
        member.barrier(WAIT)
        announce(member.rank)
        member.barrier(WAIT)


def read_modify_write(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Claim a rank by four requests without a lock. This race is known, and proves that races are detected.

    It reads ``size`` (0 if missing) as its rank, then writes the key of its rank with a lease, then ``size`` plus one.
    """
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        rank = int(client.get(f"{group}size") or b"0")
        lease = client.lease(TTL)
        if rank >= size:
            raise RuntimeError(f"Rank {rank} is greater than or equal to global size {size}")
        client.put(f"{group}rank/{rank}", b"", lease)
        client.put(f"{group}size", str(rank + 1).encode())
        announce(rank)


def membership_from_a_start(
    endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL
) -> None:
    """Announce -1 to say that it is ready; then join, pass a barrier, and announce the rank."""
    with _joined(endpoint, group, size, ttl, ready=lambda: announce(-1)) as member:
        member.barrier(WAIT)
        announce(member.rank)
