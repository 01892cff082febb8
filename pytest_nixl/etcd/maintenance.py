# SPDX-License-Identifier: Apache-2.0
"""Ask an etcd about itself: its members and their state, its alarms, and the counters of one member."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nixl.etcd.errors import EtcdError, printable
from pytest_nixl.etcd.members import EtcdMembers
from pytest_nixl.etcd.transaction import items, number

#: The alarms of etcd by the number that some releases send instead of the name.
_ALARMS = {"1": "NOSPACE", "2": "CORRUPT"}
#: A line of etcd's metrics without labels: name and value.
_SAMPLE = re.compile(r"^(etcd_\w{1,100}) ([0-9.e+-]{1,30})$", re.MULTILINE)
_SHOWN = 60


@dataclass(frozen=True)
class MemberStatus:
    """The state of one member of an etcd. Sizes are in bytes.

    :param leader: id of the leader; 0 if the member knows none.
    :param quota: the quota of the database, which etcd reports from 3.6 on; None if it does not.
    """

    cluster: int
    member: int
    version: str
    leader: int
    raft_term: int
    db_size: int
    db_in_use: int
    quota: int | None
    learner: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> MemberStatus:
        """Read it from the gateway's JSON. :raises ValueError, KeyError, TypeError: if it has another form."""
        return cls(
            cluster=number(answer["header"], "cluster_id"),
            member=number(answer["header"], "member_id"),
            version=printable(str(answer.get("version", "unknown")), 40),
            leader=number(answer, "leader"),
            raft_term=number(answer, "raftTerm"),
            db_size=number(answer, "dbSize"),
            db_in_use=number(answer, "dbSizeInUse"),
            quota=number(answer, "dbSizeQuota") or None,
            learner=answer.get("isLearner", False) is True,
        )


@dataclass(frozen=True)
class ListedMember:
    """A member in etcd's list of members. Its name is printable."""

    id: int
    name: str
    learner: bool


@dataclass(frozen=True)
class Alarm:
    """An active alarm: ``NOSPACE``, ``CORRUPT`` or the name of another one, and the id of the member that raised it."""

    kind: str
    member: int


class Maintenance:
    """Requests about an etcd itself. With authentication on, etcd answers some of them to the user root only.

    :param members: the members as the client reaches them.
    """

    def __init__(self, members: EtcdMembers) -> None:
        self._members = members

    def each_status(self) -> dict[str, MemberStatus | EtcdError]:
        """Return the state of the member at each endpoint of the client, or why that member does not answer."""
        statuses = self._members.post_each("/maintenance/status", {}, MemberStatus.of)
        return {str(endpoint): answer for endpoint, answer in statuses.items()}

    def listed(self) -> tuple[ListedMember, ...]:
        """Return etcd's list of its members."""

        def read(answer: Mapping[str, Any]) -> tuple[ListedMember, ...]:
            return tuple(
                ListedMember(
                    number(item, "ID"), printable(str(item.get("name", "")), _SHOWN), item.get("isLearner") is True
                )
                for item in items(answer, "members")
            )

        return self._members.post("/cluster/member/list", {}, read)

    def alarms(self) -> tuple[Alarm, ...]:
        """Return the active alarms."""

        def read(answer: Mapping[str, Any]) -> tuple[Alarm, ...]:
            kinds = [(str(item.get("alarm", "")), number(item, "memberID")) for item in items(answer, "alarms")]
            return tuple(Alarm(printable(_ALARMS.get(kind, kind), _SHOWN), member) for kind, member in kinds)

        return self._members.post("/maintenance/alarm", {"action": "GET"}, read)

    def transfer_leadership(self, member: int) -> None:
        """Make another member the leader. ``member`` is its id. The member that is asked must be the leader."""
        self._members.post("/maintenance/transfer-leadership", {"targetID": member}, dict, repeatable=False)

    def metrics(self) -> str:
        """Return the page of metrics of the member that answered last; empty if it serves none here."""
        return self._members.get_text("/metrics") or ""

    def counters(self) -> dict[str, float]:
        """Return the metrics without labels of the member that answered last; empty if it serves none here."""
        counters = {}
        for name, value in _SAMPLE.findall(self.metrics()):
            try:
                sample = float(value)
            except ValueError:
                continue
            if math.isfinite(sample):
                counters[name] = sample
        return counters
