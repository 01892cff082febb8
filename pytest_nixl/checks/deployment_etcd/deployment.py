# SPDX-License-Identifier: Apache-2.0
"""Look at the etcd of a deployment, and print what it has: NIXL's agents, groups of ranks, and the etcd itself."""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pytest_nixl.checks.deployment_etcd.agents import NamespaceName, PublishedAgent, judge_agents, removing
from pytest_nixl.checks.deployment_etcd.groups import NIXLBENCH, OWN_GROUPS, KnownGroups, nixlbench_groups, own_groups
from pytest_nixl.checks.deployment_etcd.key_survey import SurveyedKey, survey
from pytest_nixl.checks.deployment_etcd.problem import DeadKeys, EtcdProblem, quoted
from pytest_nixl.checks.deployment_etcd.server_state import EtcdState, describe_state, judge_state, read_state
from pytest_nixl.core.sentences import plural
from pytest_nixl.core.strict import escape
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.maintenance import MemberStatus
from pytest_nixl.etcd.transaction import REQUEST_LIMIT
from pytest_nixl.model.verdicts import Judgement, Verdict

#: The most addresses that are tried, how many at a time, and the seconds for each.
MOST, AT_A_TIME, SECONDS = 256, 32, 2.0

Address = tuple[str, int]

#: The most problems that a verdict names.
_MOST_NAMED = 5
#: The most agents, and the most problems of one kind, that are printed unless all are asked for.
MOST_AGENTS, MOST_OF_A_KIND = 20, 50


def answering(addresses: Collection[Address]) -> dict[Address, str]:
    """Connect to each address.

    :returns: for each address that was tried, why it does not answer; an empty text if it does. Loopback addresses are
        of the agent's host, so they are not tried, and neither are those that no host has.
    """
    tried = [address for address in dict.fromkeys(addresses) if _can_be_tried(address[0])][:MOST]
    if not tried:
        return {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(tried, pool.map(_connection_error, tried), strict=True))


def _can_be_tried(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return not (ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_link_local)


def _connection_error(address: Address) -> str:
    try:
        socket.create_connection(address, timeout=SECONDS).close()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else (error.strerror or type(error).__name__).lower()
    return ""


def judge_addresses(
    agents: Collection[PublishedAgent], silent: dict[Address, str], command: str
) -> Iterator[EtcdProblem]:
    """Yield each agent of which an address was tried and none answered.

    :param silent: the result of :func:`answering`.
    :param command: ``pytest-nixl etcd`` with the etcd's URL, for remedies.
    """
    for agent in agents:
        tried = [address for address in agent.addresses if address in silent]
        if tried and all(silent[address] for address in tried):
            reasons = ", ".join(f"{_text(address)}: {silent[address]}" for address in tried[:4])
            yield EtcdProblem(
                "address-silent",
                f"agent {escape(agent.name)!r} published under {escape(agent.prefix)} an address that does not answer "
                f"from this host within {SECONDS:g} s ({reasons}): who loads it cannot reach it",
                f"if this host can reach the agents' network and the agent is dead, {removing(agent, command)}",
                (agent.prefix,),
            )


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class DeploymentEtcd:
    """What was found in an etcd.

    :param revision: its revision before the first key was read.
    :param silent: the addresses that were tried, and why each does not answer; empty if it does.
    """

    namespace: NamespaceName
    revision: int
    state: EtcdState
    agents: tuple[PublishedAgent, ...]
    silent: dict[tuple[str, int], str]
    nixlbench: KnownGroups
    our_groups: KnownGroups
    problems: tuple[EtcdProblem, ...]
    notes: tuple[str, ...]

    @property
    def dead(self) -> list[DeadKeys]:
        """The keys of groups whose members have lost their leases."""
        return [*self.nixlbench.dead, *self.our_groups.dead]


def survey_deployment(
    client: EtcdClient,
    namespace: NamespaceName,
    *,
    command: str = "pytest-nixl etcd",
    limit: int = REQUEST_LIMIT,
    connect: bool = True,
) -> DeploymentEtcd:
    """Read the keys of an etcd, judge them, and change nothing.

    :param namespace: the namespace of the agents.
    :param command: ``pytest-nixl etcd`` with the etcd's URL, for remedies.
    :param limit: the most bytes of a request that the etcd accepts.
    :param connect: whether to try the addresses that agents published.
    :raises EtcdError: if the etcd does not answer.
    """
    state = read_state(client)
    keys, revision, unread = _published(client, namespace)
    agents, foreign = namespace.agents(keys)
    silent = answering([address for agent in agents for address in agent.addresses]) if connect else {}
    bench = _groups(client, NIXLBENCH, nixlbench_groups, command)
    own_runs = _groups(client, OWN_GROUPS, own_groups, command)
    problems = (
        *judge_state(state, revision),
        *judge_agents(agents, foreign, limit=limit, command=command),
        *judge_addresses(agents, silent, command),
        *bench.problems,
        *own_runs.problems,
    )
    notes = (*state.unknown, *unread, *_agent_notes(agents), *bench.notes, *own_runs.notes)
    return DeploymentEtcd(namespace, revision, state, tuple(agents), silent, bench, own_runs, problems, notes)


def _published(client: EtcdClient, namespace: NamespaceName) -> tuple[list[SurveyedKey], int, list[str]]:
    """Read the keys of a namespace under every spelling that this user may read.

    :returns: the keys, the revision before the first one was read, and what could not be read, in sentences.
    :raises EtcdError: if etcd does not answer, or this user may not read the namespace as it is spelled.
    """
    first_prefix, *more_prefixes = namespace.prefixes
    first = survey(client, first_prefix, values=True, matches=namespace.has)
    keys, unread = list(first.keys), []
    for prefix in more_prefixes:
        try:
            keys += survey(client, prefix, values=True, matches=namespace.has).keys
        except EtcdError as error:
            if error.cause != "denied":
                raise
            unread.append(f"the keys under {escape(prefix)} are unknown: {error.reason}")
    return keys, first.revision, unread


def _groups(
    client: EtcdClient, prefix: str, judge: Callable[[Iterable[SurveyedKey], str], KnownGroups], command: str
) -> KnownGroups:
    """Judge the groups under a prefix, unless this user may not read them."""
    try:
        keys = survey(client, prefix, values=prefix == NIXLBENCH).keys
    except EtcdError as error:
        if error.cause != "denied":
            raise
        return KnownGroups(notes=[f"the keys under {prefix} are unknown: {error.reason}"])
    return judge(keys, command)


def judge_published(client: EtcdClient, namespace: NamespaceName, endpoint: str) -> Judgement:
    """Return the verdict on the keys of agents, from reading only their namespace.

    :param endpoint: the etcd's URL, without credentials, for the remedy.
    :raises EtcdError: if the etcd does not answer.
    """
    command = f"pytest-nixl etcd {endpoint}"
    agents, foreign = namespace.agents(_published(client, namespace)[0])
    problems = list(judge_agents(agents, foreign, limit=REQUEST_LIMIT, command=command))
    if not problems:
        keys = sum(len(agent.keys) for agent in agents)
        count_text = f"{plural(len(agents), 'agent')} with {plural(keys, 'key')} under {escape(namespace.text)}"
        return Judgement(Verdict.PASS, f"{count_text}: no split namespace, no agent twice, no oversize key")
    sentences = "; ".join(problem.sentence for problem in problems[:_MOST_NAMED])
    more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    option = f" --namespace={quoted(namespace.text)}"
    return Judgement(Verdict.WARN, sentences + more, f"run `{command}{option}`, which prints a remedy for each")


def _agent_notes(agents: list[PublishedAgent]) -> list[str]:
    """Return what cannot be known of agents."""
    notes = []
    unread = sum(agent.size is None for agent in agents)
    if unread:
        notes.append(f"the values of {plural(unread, 'agent')} were not all read, because there are too many bytes")
    bare = sum(not agent.labels for agent in agents)
    if bare:
        notes.append(
            f"{plural(bare, 'agent')} published no metadata, only the anchor: an agent that only fetches, or whose "
            "metadata etcd refused"
        )
    hidden = Counter(
        backend
        for agent in agents
        if not agent.addresses
        for backend in {name for key in agent.keys if key.metadata for name in key.metadata.backends}
    )
    if hidden:
        names = ", ".join(f"{name[:20]!a} ({number})" for name, number in hidden.most_common(5))
        notes.append(
            "whether these agents still live cannot be known from etcd: their keys have no lease, and the connection "
            f"info of their backends holds no readable address: {names}"
        )
    return notes


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
