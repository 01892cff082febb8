# SPDX-License-Identifier: Apache-2.0
"""A group of nixlbench in an etcd: its keys, from before its first process starts until after its last has ended."""

from __future__ import annotations

import secrets
from contextlib import suppress
from types import TracebackType

from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.keeper import Keeper
from pytest_nixl.nixlbench.command import Meeting


class Group:
    """A group with a name that was never used: no key of another run can be in it.

    Its keys have no lease, but for the ranks', so that nobody else would remove them after a crash. Those of other
    groups are never touched.

    :param endpoint: the etcd's URLs, without credentials: nixlbench sends none.
    :param keeper: removes the keys where this process is killed.
    """

    def __init__(self, client: EtcdClient, endpoint: str, keeper: Keeper) -> None:
        self.name = f"pytest-nixl-{secrets.token_hex(8)}"
        #: What each of its keys begins with.
        self.prefix = f"xferbench/{self.name}/"
        self.meeting = Meeting(
            "ETCD", {"runtime_type": "ETCD", "etcd_endpoints": endpoint, "benchmark_group": self.name}
        )
        self._client = client
        self._endpoints = parse_endpoints(endpoint)
        self._keeper = keeper

    def __enter__(self) -> Group:
        self._keeper.watch_prefix(self.prefix, self._endpoints)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._client.delete_prefix(self.prefix)
        except EtcdError:
            # It stays with the keeper, which tries at the end. What went wrong before says more than this.
            if error is None:
                raise
            return
        self._keeper.unwatch_prefix(self.prefix, self._endpoints)

    def registered(self, rank: int) -> bool:
        """Whether a process has registered as this rank; False also where the etcd does not answer now."""
        with suppress(EtcdError):
            return self._client.get(f"{self.prefix}/rank/{rank}") is not None
        return False
