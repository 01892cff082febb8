# SPDX-License-Identifier: Apache-2.0
"""Ways to claim a rank, as functions that claimants call: our membership, and the seed's, which is broken.

Each takes ``endpoint``, ``group`` (the prefix of its keys), ``size`` and ``announce``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

#: Seconds of a lease, and of any wait. In no order of requests is a lease refreshed, or comes to its end by itself.
TTL, WAIT = 120, 60.0


def membership(endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL) -> None:
    """Join by :func:`pytest_nixl.cluster.joining.join`."""
    from pytest_nixl.cluster.joining import join
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        with join(client, name, size, ttl=ttl, timeout=WAIT, prefix=prefix) as member:
            announce(member.rank)


def membership_with_barrier(
    endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL
) -> None:
    """Join, and pass a barrier: the group has started when the rank is announced. Then pass another one, and leave."""
    from pytest_nixl.cluster.joining import join
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=5) as client:
        with join(client, name, size, ttl=ttl, timeout=WAIT, prefix=prefix) as member:
            member.barrier(WAIT)
            announce(member.rank)
            member.barrier(WAIT)


def read_modify_write(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Claim as the second seed did, by four requests and no lock: known to be bad, so that we see that we see it.

    ``size`` is read; who finds none is rank 0; the own rank's key is written with a lease, and the size, one more.
    """
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        rank = int(client.get(f"{group}size") or b"0")
        lease = client.lease(TTL)
        if rank >= size:
            raise RuntimeError(f"Rank {rank} is greater than or equal to global size {size}")
        client.put(f"{group}rank/{rank}", b"", lease)
        client.put(f"{group}size", str(rank + 1).encode())
        announce(rank)


def locked_read_modify_write(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Claim as released nixlbench does: the same read-modify-write under etcd's lock, and no look at what fails.

    Whoever asks finds no fault in any order of requests; one answer that is lost, and a rank is given twice.
    """
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints
    from pytest_nixl.etcd.errors import EtcdError
    from pytest_nixl.etcd.transaction import encode

    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        lock_lease = client.lease(TTL)
        held = client.raw.post(client.raw.get_url("/lock/lock"), json={"name": encode(f"{group}lock"),
                                                                      "lease": lock_lease.id})  # fmt: skip
        try:
            rank = int(client.get(f"{group}size") or b"0")
        except EtcdError:
            rank = 0  # an answer that is lost is read as "there is none"
        if rank >= size:
            raise RuntimeError(f"Rank {rank} is greater than or equal to global size {size}")
        lease = client.lease(TTL)
        client.put(f"{group}rank/{rank}", b"", lease)
        with suppress(EtcdError):  # a failure of it is not looked at
            client.put(f"{group}size", str(rank + 1).encode())
        client.raw.post(client.raw.get_url("/lock/unlock"), json={"key": held["key"]})
        announce(rank)


def create_without_token(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Take the first rank whose key can be created, trying again after a lost answer: bad only when one is lost.

    The second attempt finds the key of the first, takes it for somebody else's, and a rank stays with nobody.
    """
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints
    from pytest_nixl.etcd.errors import EtcdError

    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        rank = 0
        while rank < size:
            try:
                if client.create(f"{group}rank/{rank}", b""):
                    announce(rank)
                    return
            except EtcdError as error:
                if error.cause != "closed":
                    raise
                continue
            rank += 1
    raise RuntimeError(f"all {size} ranks are taken")


def membership_from_a_start(
    endpoint: str, group: str, size: int, announce: Callable[[int], None], ttl: int = TTL
) -> None:
    """Say that it is ready, by announcing -1; then join, pass a barrier, and announce the rank."""
    from pytest_nixl.cluster.joining import join
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        announce(-1)
        with join(client, name, size, ttl=ttl, timeout=WAIT, prefix=prefix) as member:
            member.barrier(WAIT)
            announce(member.rank)
