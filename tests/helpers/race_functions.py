# SPDX-License-Identifier: Apache-2.0
"""Broken ways to claim a rank, as functions for claimants. Each one must be detected by a check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pytest_nixl.checks.rank_race.functions import TTL, WAIT, read_modify_write
from pytest_nixl.cluster.joining import join
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import encode


def seeds_own(endpoint: str, group: str, size: int, announce: Callable[[int], None], **_: Any) -> None:
    """Claim by the known race instead of pytest-nixl's membership."""
    read_modify_write(endpoint, group, size, announce)


def wants_rank_0(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Join as rank 0 from a distinct host, like a process of a launcher that gives all processes the same rank."""
    prefix, _, name = group.rstrip("/").rpartition("/")
    with connect(parse_endpoints(endpoint), timeout=60) as client:
        with join(client, name, size, ttl=120, timeout=60, prefix=prefix, host=f"of-{os.getpid()}", wanted=0) as member:
            announce(member.rank)


def asks_for_nothing(endpoint: str, group: str, size: int, announce: Callable[[int], None]) -> None:
    """Live without sending a request."""
    time.sleep(600)


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


def announces(ranks: list[int], announce: Callable[[int], None], error: str = "") -> None:
    """Announce these ranks, one after the other; then raise an error if there is one."""
    for rank in ranks:
        announce(rank)
    if error:
        raise ValueError(error)
