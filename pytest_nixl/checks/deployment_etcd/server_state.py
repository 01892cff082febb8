# SPDX-License-Identifier: Apache-2.0
"""The state of an etcd itself: members, leader, alarms, the size of its database against its quota, compaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_nixl.checks.deployment_etcd.problem import EtcdProblem
from pytest_nixl.core.units import format_size
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import START_MEMBERS, EtcdError
from pytest_nixl.etcd.maintenance import Alarm, ListedMember, MemberStatus

#: The share of the quota from which on the size of the database is reported.
NEAR_QUOTA = 0.8
_QUOTA, _LEADERS = "etcd_server_quota_backend_bytes", "etcd_server_leader_changes_seen_total"
_COMPACTED = "etcd_debugging_mvcc_compact_revision"


@dataclass(frozen=True)
class EtcdState:
    """The state of an etcd. What it does not report is None.

    :param statuses: the state of the member at each endpoint, or why it does not answer.
    :param members: etcd's list of its members.
    :param quota: the most bytes of its database.
    :param leader_changes: the leaders that one member has seen since it started.
    :param compacted: the last revision that was compacted away; 0 for none.
    :param unknown: what etcd did not tell, one sentence each.
    """

    statuses: dict[str, MemberStatus | EtcdError]
    members: tuple[ListedMember, ...] | None
    alarms: tuple[Alarm, ...] | None
    quota: int | None
    leader_changes: int | None
    compacted: int | None
    unknown: tuple[str, ...]

    @property
    def answered(self) -> list[MemberStatus]:
        """The states of the members that answered."""
        return [status for status in self.statuses.values() if isinstance(status, MemberStatus)]

    def name(self, member: int) -> str:
        """Return the name of a member in words."""
        listed = next(
            (
                member_entry.name
                for member_entry in self.members or ()
                if member_entry.id == member and member_entry.name
            ),
            "",
        )
        return f"member {listed!r}" if listed else f"member {member:x}"


def read_state(client: EtcdClient) -> EtcdState:
    """Ask an etcd about itself.

    :raises EtcdError: if no member answers, or none knows a leader: the etcd then answers no request for a key.
    """
    unknown = []
    members: tuple[ListedMember, ...] | None = None
    alarms: tuple[Alarm, ...] | None = None
    client.status()  # fails if no member answers
    maintenance = client.maintenance
    statuses = maintenance.each_status()
    if not any(isinstance(status, MemberStatus) and status.leader for status in statuses.values()):
        raise _leaderless(statuses)
    try:
        members = maintenance.listed()
    except EtcdError as error:
        unknown.append(f"its list of members is unknown: {error.reason}")
    try:
        alarms = maintenance.alarms()
    except EtcdError as error:
        unknown.append(f"its alarms are unknown: {error.reason}")
    count = len(members or ())
    if count > len(statuses):
        unknown.append(f"{count - len(statuses)} of its {count} members were not asked: give the URLs of all")
    counters = maintenance.counters()
    quotas = [status.quota for status in statuses.values() if isinstance(status, MemberStatus) and status.quota]
    quota = min(quotas) if quotas else int(counters.get(_QUOTA, 0)) or None
    if quota is None:
        unknown.append("its quota is unknown: it serves no /metrics at this address, and reports it only from 3.6 on")
    return EtcdState(
        statuses,
        members,
        alarms,
        quota,
        int(counters[_LEADERS]) if _LEADERS in counters else None,
        max(0, int(counters[_COMPACTED])) if _COMPACTED in counters else None,
        tuple(unknown),
    )


def _leaderless(statuses: dict[str, MemberStatus | EtcdError]) -> EtcdError:
    silent = [status.reason.removeprefix("etcd at ") for status in statuses.values() if isinstance(status, EtcdError)]
    detail = f": {len(silent)} of {len(statuses)} members do not answer: {'; '.join(silent)}" if silent else ""
    return EtcdError(
        f"the etcd at {','.join(statuses)} has no leader, and so reads and writes no key{detail}",
        START_MEMBERS,
        cause="no-leader",
    )


def judge_state(state: EtcdState, revision: int) -> Iterator[EtcdProblem]:
    """Yield what is wrong with an etcd. ``revision`` is its current one, for the remedies."""
    freeing = (
        f"`etcdctl compact {revision} && etcdctl defrag --cluster && etcdctl alarm disarm`; or raise "
        "--quota-backend-bytes"
    )
    for endpoint, status in state.statuses.items():
        if isinstance(status, EtcdError):
            yield EtcdProblem(
                "member-silent",
                f"the member at {endpoint} does not answer: {status.reason}",
                status.remedy or "start that member",
            )
    for alarm in state.alarms or ():
        where = state.name(alarm.member)
        if alarm.kind == "NOSPACE":
            yield EtcdProblem(
                "alarm",
                f"{where} raised the alarm NOSPACE: its database is full, and etcd accepts no "
                "write until the alarm is disarmed, so that no agent can publish",
                freeing,
            )
        else:
            yield EtcdProblem(
                "alarm",
                f"{where} raised the alarm {alarm.kind}: its data differs from the others'",
                f"remove it with `etcdctl member remove {alarm.member:x}`, and add it again without data",
            )
    answered = state.answered
    largest = max((status.db_size for status in answered), default=0)
    if state.quota and largest >= NEAR_QUOTA * state.quota:
        in_use = max(status.db_in_use for status in answered)
        yield EtcdProblem(
            "near-quota",
            f"the database has {largest:,} bytes ({in_use:,} in use), {largest / state.quota:.0%} of the quota of "
            f"{state.quota:,}: when it is full, etcd accepts no more writes",
            freeing,
        )
    yield from _leaders(state, answered)


def _leaders(state: EtcdState, answered: list[MemberStatus]) -> Iterator[EtcdProblem]:
    for status in answered:
        if not status.leader:
            yield EtcdProblem(
                "no-leader", f"{state.name(status.member)} knows no leader: etcd accepts no writes", START_MEMBERS
            )
    if len({status.cluster for status in answered}) > 1:
        clusters = ", ".join(
            f"{endpoint} ({status.cluster:x})"
            for endpoint, status in state.statuses.items()
            if isinstance(status, MemberStatus)
        )
        yield EtcdProblem(
            "several-etcds",
            f"the endpoints belong to different etcds: {clusters}",
            "give NIXL_ETCD_ENDPOINTS the members of one etcd: agents that reach different ones never meet",
        )
    elif len({status.leader for status in answered if status.leader}) > 1:
        yield EtcdProblem(
            "leader-disputed",
            "the members name different leaders: "
            + ", ".join(
                f"{state.name(answer.member)} names {state.name(answer.leader)} in term {answer.raft_term}"
                for answer in answered
            ),
            "run this command again: an election takes a second; if it stays, check the network between the members",
        )


def describe_state(state: EtcdState, revision: int) -> Iterator[str]:
    """Yield the lines that describe an etcd."""
    answered = state.answered
    if not answered:
        return
    first = answered[0]
    listed = (
        ", ".join(
            f"{member.name or f'{member.id:x}'}{' (learner)' if member.learner else ''}"
            for member in state.members or ()
        )
        or "not known"
    )
    leader = state.name(first.leader) if first.leader else "none"
    yield f"etcd {first.version}: members {listed}; leader {leader}, raft term {first.raft_term}"
    if state.leader_changes is not None:
        yield f"  leaders seen by one member since it started: {state.leader_changes}"
    quota = "not known" if state.quota is None else f"{format_size(state.quota)}"
    yield (
        f"  database {max(of.db_size for of in answered):,} bytes, {max(of.db_in_use for of in answered):,} in "
        f"use; quota {quota}; revision {revision}, "
        + ("compaction not known" if state.compacted is None else f"compacted up to {state.compacted}")
    )
    alarms = "not known" if state.alarms is None else ", ".join(alarm.kind for alarm in state.alarms) or "none"
    yield f"  alarms: {alarms}"
