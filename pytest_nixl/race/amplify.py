# SPDX-License-Identifier: Apache-2.0
"""Make claims overlap every time: nobody's first write reaches etcd before everybody has made one.

What is read before a write, and written back, is then read by all before anyone writes.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from pytest_nixl.etcd.client import EtcdClient, Lease
from pytest_nixl.etcd.path import EtcdPath, Request
from pytest_nixl.race.oracle import faults
from pytest_nixl.race.subject import Outcome, Subject, leases

#: Seconds after which writes go on though some client has made none: a lock lets one client in at a time.
FALLBACK = 2.0
_WRITES = {"Put", "Txn", "DeleteRange"}


@dataclass(frozen=True)
class Amplified:
    """What came of one amplified run."""

    outcomes: tuple[Outcome, ...]
    faults: tuple[str, ...]
    #: Whether every client's first write was held until all had one; False: the fallback ended the wait.
    met: bool
    seconds: float


def amplify(
    path: EtcdPath,
    etcd: EtcdClient,
    subject: Subject,
    clients: int,
    *,
    group: str,
    fallback: float = FALLBACK,
    seconds: float = 60.0,
) -> Amplified:
    """Let ``clients`` claim at once, their first writes held until each has one.

    :param etcd: a client that goes to the same etcd by another way.
    :param group: the start of a name that is made new for this run.
    :param seconds: for everybody to have a rank, or to fail.
    :raises PathError: where that is not enough.
    """
    start = time.monotonic()
    group = f"{group}{secrets.token_hex(4)}/"
    ways = [path.client(f"claimant {number}") for number in range(clients)]
    running = []
    try:
        for way in ways:
            way.hold(_is_write)
            running.append(subject.start(way, group, clients))

        def all_write() -> bool:
            ready = [bool(way.held) or one.outcome() is not None for way, one in zip(ways, running, strict=True)]
            return all(ready)

        met = path.wait_quietly(all_write, seconds=fallback)
        for way in ways:
            way.release()
        path.wait(lambda: all(one.outcome() is not None for one in running), "every claimant", seconds=seconds)
        outcomes = tuple(outcome for one in running if (outcome := one.outcome()) is not None)
        found = faults(outcomes, clients, etcd.get_prefix(subject.keys(group)))
        return Amplified(outcomes, tuple(found), met, time.monotonic() - start)
    finally:
        for one in running:
            one.kill()
        granted = [lease for way in ways for lease in leases(way)]
        for way in ways:
            way.close()
        for lease in granted:
            Lease(etcd, lease, 0).revoke()
        etcd.delete_prefix(subject.keys(group))


def _is_write(request: Request) -> bool:
    return request.method in _WRITES and request.writes
