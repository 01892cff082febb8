# SPDX-License-Identifier: Apache-2.0
"""Broken ways to claim a rank, as functions for claimants. Each one must be detected by a check."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pytest_nixl.checks.rank_race.functions import TTL, WAIT, read_modify_write
from pytest_nixl.cluster.joining import join
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import encode


def seeds_own(endpoint: str, group: str, size: int, announce: Callable[[int], None], **_: Any) -> None:
    """Claim by the known race instead of pytest-nixl's membership."""
    read_modify_write(endpoint, group, size, announce)


def ends(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """End without a message."""
    os._exit(3)


def wants_rank_0(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Join as rank 0 from a distinct host, like a process of a launcher that gives all processes the same rank."""
    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=60) as client:
        with join(client, name, size, ttl=120, timeout=60, prefix=prefix, host=f"of-{os.getpid()}", wanted=0) as member:
            announce(member.rank)


def asks_for_nothing(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Live without sending a request."""
    time.sleep(600)


def only_reads(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Read, then do nothing more."""
    with connect(parse_endpoints(endpoint), timeout=60) as client:
        client.get(f"{group}size")
        time.sleep(600)


def tries_again(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Create the key of a rank, and repeat that after each broken connection. This is correct."""

    def claim(client: EtcdClient, rank: int) -> bool:
        while True:
            try:
                mine = client.create(f"{group}rank/{rank}", str(os.getpid()).encode())
                return mine or client.get(f"{group}rank/{rank}") == str(os.getpid()).encode()
            except EtcdError:
                time.sleep(0.01)

    with connect(parse_endpoints(endpoint), timeout=60) as client:
        announce(next(rank for rank in range(size) if claim(client, rank)))


def looks_and_tries_again(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Read a key, and claim as :func:`tries_again` does. This is correct."""
    with connect(parse_endpoints(endpoint), timeout=60) as client:
        client.get(f"{group}a")
    tries_again(endpoint, group, size, announce)


def present_then_early(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write that it is there, then claim by the known race."""
    _present(endpoint, group)
    read_modify_write(endpoint, group, size, announce)


def present_then_late(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write that it is there, and claim by the known race after a pause, in which others have claimed."""
    _present(endpoint, group)
    time.sleep(3.0)
    read_modify_write(endpoint, group, size, announce)


def locked_read_modify_write(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Claim a rank as released nixlbench does: read-modify-write under etcd's lock, without checking for errors.

    No order of requests gives a rank twice, but a single lost answer does.
    """
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        lock_lease = client.lease(TTL)
        request = {"name": encode(f"{group}lock"), "lease": lock_lease.id}
        held = client._members.post("/lock/lock", request, dict, repeatable=False)
        try:
            rank = int(client.get(f"{group}size") or b"0")
        except EtcdError:
            rank = 0  # a lost answer is read as "no key"
        if rank >= size:
            raise RuntimeError(f"Rank {rank} is greater than or equal to global size {size}")
        lease = client.lease(TTL)
        client.put(f"{group}rank/{rank}", b"", lease)
        with suppress(EtcdError):  # it ignores a failure
            client.put(f"{group}size", str(rank + 1).encode())
        client._members.post("/lock/unlock", {"key": held["key"]}, dict, repeatable=False)
        announce(rank)


def create_without_token(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Take the first rank whose key can be created; after a lost answer, try again. Wrong only after a lost answer.

    The second attempt finds the key of the first attempt and takes it for another claimant's. So a rank stays unused.
    """
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


def present_then_locked(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write that it is there, then claim behind etcd's lock. This is correct."""
    _present(endpoint, group)
    locked_read_modify_write(endpoint, group, size, announce)


def announces_and_lists(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write a token, list the tokens, and take the place of the own one among them. Wrong if one lists too early.

    That shows only if the one whose token sorts first, which is the first that started, comes second.
    """
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        token = f"{group}tokens/{os.getpid():08d}"
        client.put(token, b"", client.lease(TTL))
        rank = sorted(client.get_prefix(f"{group}tokens/")).index(token)
        client.put(f"{group}rank/{rank}", b"", client.lease(TTL))
        announce(rank)


def announces_and_lists_by_age(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write a token, list the tokens, the oldest first, and take the place of the own one. This is correct."""
    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        token = f"{group}tokens/{secrets.token_hex(8)}"
        client.put(token, b"", client.lease(TTL))
        rank = [item.key for item in client.by_creation(f"{group}tokens/")].index(token)
        client.put(f"{group}rank/{rank}", b"", client.lease(TTL))
        announce(rank)


def announces_and_counts(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write a token, and take the number of the other tokens. Wrong if both are written before either is counted."""
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        client.put(f"{group}tokens/{os.getpid():08d}", b"", client.lease(TTL))
        announce(client.count_prefix(f"{group}tokens/") - 1)


def announces_and_waits(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Write a token, list the tokens until all are there, and take the place of the own one. This is correct."""
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import parse_endpoints

    with connect(parse_endpoints(endpoint), timeout=WAIT) as client:
        token = f"{group}tokens/{os.getpid():08d}"
        client.put(token, b"", client.lease(TTL))
        while len(tokens := sorted(client.get_prefix(f"{group}tokens/"))) < size:
            time.sleep(0.02)
        announce(tokens.index(token))


def _present(endpoint: str, group: str) -> None:
    with connect(parse_endpoints(endpoint), timeout=60) as client:
        client.put(f"{group}present/{os.getpid()}", b"")
