# SPDX-License-Identifier: Apache-2.0
"""Print what was found in a deployment's etcd, as lines or as JSON. Everything from etcd is escaped."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pytest_nixl.checks.deployment_etcd.agents import PublishedAgent
from pytest_nixl.checks.deployment_etcd.deployment import DeploymentEtcd
from pytest_nixl.checks.deployment_etcd.groups import KnownGroups
from pytest_nixl.checks.deployment_etcd.server_state import describe_state
from pytest_nixl.core.sentences import plural
from pytest_nixl.core.strict import escape
from pytest_nixl.etcd.maintenance import MemberStatus

#: The most agents, and the most problems of one kind, that are printed unless all are asked for.
MOST_AGENTS, MOST_OF_A_KIND = 20, 50


def lines(deployment: DeploymentEtcd, *, everything: bool = False) -> Iterator[str]:
    """Yield the lines of the report.

    :param everything: print all agents and all problems.
    """
    yield from describe_state(deployment.state, deployment.revision)
    yield from _agent_lines(deployment, everything)
    yield _group_line("nixlbench", deployment.nixlbench)
    yield _group_line("pytest-nixl", deployment.our_groups)
    for note in deployment.notes:
        yield f"note: {note}"
    counts: Counter[str] = Counter()
    for problem in deployment.problems:
        counts[problem.kind] += 1
        if everything or counts[problem.kind] <= MOST_OF_A_KIND:
            yield str(problem)
    for kind, number in counts.items():
        if not everything and number > MOST_OF_A_KIND:
            yield f"{kind}: {number - MOST_OF_A_KIND} more; --all prints them"
    yield f"{plural(len(deployment.problems), 'problem')} found" if deployment.problems else "no problem found"


def _agent_lines(deployment: DeploymentEtcd, everything: bool) -> Iterator[str]:
    if not deployment.agents:
        yield f"no agent has keys under {escape(deployment.namespace.text)}"
        return
    keys = sum(len(agent.keys) for agent in deployment.agents)
    size = sum(agent.size or 0 for agent in deployment.agents)
    yield (
        f"{plural(len(deployment.agents), 'agent')}, {plural(keys, 'key')}, {size:,} bytes; the oldest write comes "
        "first (etcd stores no times, only revisions)"
    )
    oldest = sorted(deployment.agents, key=lambda agent: agent.written)
    for agent in oldest if everything else oldest[:MOST_AGENTS]:
        yield f"  {_agent_line(agent, deployment)}"
    if not everything and len(oldest) > MOST_AGENTS:
        yield f"  {len(oldest) - MOST_AGENTS:,} more; --all prints them"


def _agent_line(agent: PublishedAgent, deployment: DeploymentEtcd) -> str:
    labels = ", ".join(escape(label, 30) for label in agent.labels[:4]) or "no metadata"
    more = f", {len(agent.labels) - 4} more" if len(agent.labels) > 4 else ""
    size = "size not read" if agent.size is None else f"{agent.size:,} bytes"
    ago = max(0, deployment.revision - agent.written)
    writes = max(key.version for key in agent.keys)
    lease = ", with a lease" if agent.leased else ""
    return (
        f"{escape(agent.prefix)}: {labels}{more}; {size}; last written at revision {agent.written}, "
        f"{plural(ago, 'revision')} before the newest; written {plural(writes, 'time')}{lease}; "
        f"{_address_text(agent, deployment)}"
    )


def _address_text(agent: PublishedAgent, deployment: DeploymentEtcd) -> str:
    if not agent.addresses:
        return "address not readable"
    tried = [deployment.silent[address] for address in agent.addresses if address in deployment.silent]
    state = "not tried" if not tried else "answers" if not all(tried) else "does not answer"
    return f"{', '.join(f'{host} port {port}' for host, port in agent.addresses[:3])} {state}"


def _group_line(whose: str, groups: KnownGroups) -> str:
    return f"groups of {whose}: {groups.living} with a lease, {len(groups.dead)} dead"


def plain(deployment: DeploymentEtcd) -> dict[str, Any]:
    """Return the report for JSON. Keys are given escaped and, byte for byte, in base64."""
    state = deployment.state
    return {
        "revision": deployment.revision,
        "namespace": deployment.namespace.text,
        "etcd": {
            "members": [
                {
                    "endpoint": endpoint,
                    "version": status.version,
                    "name": state.name(status.member),
                    "learner": status.learner,
                    "leader": status.leader == status.member,
                    "raft_term": status.raft_term,
                    "db_size": status.db_size,
                    "db_in_use": status.db_in_use,
                }
                if isinstance(status, MemberStatus)
                else {"endpoint": endpoint, "error": status.reason}
                for endpoint, status in state.statuses.items()
            ],
            "alarms": None if state.alarms is None else [alarm.kind for alarm in state.alarms],
            "quota": state.quota,
            "leader_changes": state.leader_changes,
            "compacted": state.compacted,
        },
        "agents": [
            {
                "namespace": escape(agent.namespace),
                "name": escape(agent.name),
                **key_fields(agent.prefix),
                "labels": [escape(label) for label in agent.labels],
                "size": agent.size,
                "written": agent.written,
                "lease": agent.leased,
                "addresses": [
                    {"host": host, "port": port, "silent": deployment.silent.get((host, port))}
                    for host, port in agent.addresses
                ],
            }
            for agent in deployment.agents
        ],
        "groups": {
            name: {"living": groups.living, "dead": [escape(status.prefix) for status in groups.dead]}
            for name, groups in (("nixlbench", deployment.nixlbench), ("pytest-nixl", deployment.our_groups))
        },
        "notes": list(deployment.notes),
        "problems": [
            {
                "kind": problem.kind,
                "text": problem.sentence,
                "remedy": problem.remedy,
                "finding": problem.finding,
                "keys": [key_fields(key) for key in problem.keys],
            }
            for problem in deployment.problems
        ],
    }


def key_fields(key: str) -> dict[str, str]:
    """Return a key for JSON: readable, and its bytes in base64."""
    return {"key": escape(key), "key_base64": base64.b64encode(key.encode(errors="surrogateescape")).decode()}
