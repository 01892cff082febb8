# SPDX-License-Identifier: Apache-2.0
"""Leases of an etcd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_nixl.etcd.errors import EtcdError, error_at
from pytest_nixl.etcd.members import EtcdMembers
from pytest_nixl.etcd.transaction import number


class Lease:
    """A lease. It ends if it is not refreshed in time or is revoked; etcd then deletes the keys stored with it."""

    def __init__(self, members: EtcdMembers, id: int, ttl: int) -> None:
        self._members = members
        #: etcd's id of the lease.
        self.id = id
        #: Seconds that the lease lives without a refresh, as granted by etcd.
        self.ttl = ttl

    def refresh(self) -> int:
        """Restart the lease's time; return its remaining seconds.

        :raises EtcdError: with cause ``no-lease`` if it has ended.
        """

        def read(answer: Mapping[str, Any]) -> int:
            return number(answer.get("result", answer), "TTL")

        remaining = self._members.post("/lease/keepalive", {"ID": self.id}, read)
        if remaining < 1:
            what = "the lease does not exist: it expired or was revoked"
            raise error_at(self._members.last, "no-lease", what, "refresh a lease before it expires")
        return remaining

    def revoke(self) -> None:
        """End the lease now, which deletes its keys. Does nothing if it has already ended."""
        try:
            self._members.post("/lease/revoke", {"ID": self.id}, dict)
        except EtcdError as error:
            if error.cause != "no-lease":
                raise
