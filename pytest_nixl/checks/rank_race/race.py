# SPDX-License-Identifier: Apache-2.0
"""The setting of a rank race check: claimants, an etcd to disturb, and a proxy to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.checks.rank_race.system_under_test import (
    ClaimOutcome,
    FunctionSubject,
    MembershipSubject,
    faults,
    outcome_of,
)
from pytest_nixl.core.cpu_contention import HostLoad
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.proxy import EtcdProxy, ProxyClient, Request, State
from pytest_nixl.etcd_servers.sources import OwnServer

FUNCTIONS = "pytest_nixl.checks.rank_race.functions"
#: A way to claim ranks with a known race.
KNOWN_BAD = f"{FUNCTIONS}:read_modify_write"
#: Start of error messages that a busy machine may cause too, because a claimant or its lease was late.
_LATE = ("MissingRanksError", "MemberLostError", "LeaseLostError", "EtcdError: etcd at")
_IN_TIME = "has no rank in time"


@dataclass
class Race:
    """An etcd to disturb, a proxy to it, and claimants."""

    server: OwnServer
    #: A client that does not use the proxy.
    etcd: EtcdClient
    path: EtcdProxy
    #: Prefix of the keys of this test.
    prefix: str
    claimants: list[Claimant] = field(default_factory=list)
    #: One sentence for each event that came too late. On a busy host that proves nothing.
    late: list[str] = field(default_factory=list)
    load: HostLoad = field(default_factory=HostLoad)

    @property
    def membership(self) -> MembershipSubject:
        """The membership of pytest-nixl."""
        return MembershipSubject()

    @property
    def known_bad(self) -> FunctionSubject:
        """A way to claim ranks with a known race."""
        return FunctionSubject(KNOWN_BAD)

    def claim(
        self, group: str, size: int, *, endpoint: str = "", function: str = "membership_with_barrier", **more: Any
    ) -> Claimant:
        """Start a claimant as a process. ``group`` is without the test's prefix."""
        arguments = {"endpoint": endpoint or self.server.endpoint, "group": f"{self.prefix}{group}/", "size": size}
        claimant = Claimant(f"{FUNCTIONS}:{function}", {**arguments, **more})
        self.claimants.append(claimant)
        return claimant

    def let_through(self, proxy_client: ProxyClient, count: int, *, seconds: float) -> bool:
        """Let ``count`` requests of a claimant pass through the proxy, and wait for the answer to each.

        :returns: whether it made them; False if it leaves before, as one does that was too slow to keep its lease.
        """
        for _ in range(count):
            [request] = self.path.wait(lambda: proxy_client.held, f"a request of {proxy_client.name}", seconds=seconds)
            if request.method == "LeaseRevoke":
                return False
            proxy_client.release(request)
            self.path.wait(partial(_answered, request), f"the answer to {request}", seconds=seconds)
        return True

    def outcomes(self, claimants: Sequence[Claimant], seconds: float) -> list[ClaimOutcome]:
        """Return the results of claims; wait up to ``seconds`` for all together."""
        deadline = time.monotonic() + seconds
        return [
            _outcome(number, claimant, max(0.0, deadline - time.monotonic()))
            for number, claimant in enumerate(claimants)
        ]

    def faults(self, claimants: Sequence[Claimant], size: int, group: str, seconds: float) -> list[str]:
        """Wait for claims and return the faults of their ranks; faults that are only late go to ``late``."""
        outcomes = self.outcomes(claimants, seconds)
        wrong = faults(outcomes, size, self.etcd.get_prefix(f"{self.prefix}{group}/"))
        ranks = [outcome.rank for outcome in outcomes if outcome.rank is not None]
        sound = len(set(ranks)) == len(ranks) and set(ranks) <= set(range(size))
        if sound and any(is_late(outcome) for outcome in outcomes):
            self.late += wrong
            return []
        return wrong


def _answered(request: Request) -> bool:
    return request.state is State.ANSWERED


def is_late(outcome: ClaimOutcome) -> bool:
    """Whether a claim failed only because of a timeout."""
    error = outcome.error
    return outcome.rank is None and (
        error == _IN_TIME or (error.startswith(_LATE) and (not error.startswith("EtcdError") or ": timeout, " in error))
    )


def _outcome(number: int, claimant: Claimant, seconds: float) -> ClaimOutcome:
    claimant.wait(seconds)
    name = f"claimant {number}"
    return outcome_of(name, claimant) or ClaimOutcome(name, pid=claimant.pid, error=_IN_TIME)
