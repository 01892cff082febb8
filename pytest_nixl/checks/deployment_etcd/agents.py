# SPDX-License-Identifier: Apache-2.0
"""The agents that published under a namespace of NIXL, under every spelling of it, and what is wrong with their keys.

NIXL writes ``NAMESPACE/AGENT/`` without a value when an agent is created, and ``NAMESPACE/AGENT/LABEL`` when it
publishes. Its default namespace ends with a slash, so that its keys have two: ``/nixl/agents//AGENT/metadata``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from pytest_nixl.checks.deployment_etcd.key_survey import SurveyedKey
from pytest_nixl.checks.deployment_etcd.problem import EtcdProblem, quoted
from pytest_nixl.core.sentences import plural
from pytest_nixl.core.strict import escape

#: NIXL's default of NIXL_ETCD_NAMESPACE.
DEFAULT_NAMESPACE = "/nixl/agents/"
#: The share of the limit from which on a key is reported.
NEAR = 0.8


@dataclass(frozen=True)
class PublishedAgent:
    """The keys of one agent under one spelling of a namespace."""

    namespace: str
    name: str
    keys: tuple[SurveyedKey, ...]

    @property
    def prefix(self) -> str:
        """The prefix of its keys, which is also the key of its anchor."""
        return f"{self.namespace}/{self.name}/"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels under which it published, without the anchor."""
        return tuple(key.key.removeprefix(self.prefix) for key in self.keys if key.key != self.prefix)

    @property
    def size(self) -> int | None:
        """The bytes of all its keys and values; None if a value was not read."""
        sizes = [key.size for key in self.keys]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def written(self) -> int:
        """The revision of its last write."""
        return max(key.mod_revision for key in self.keys)

    @property
    def leased(self) -> bool:
        """Whether a key of it has a lease, so that its owner lives."""
        return any(key.lease for key in self.keys)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The addresses that could be read from its metadata."""
        addresses = (address for key in self.keys if key.metadata for address in key.metadata.addresses)
        return tuple(dict.fromkeys(addresses))


@dataclass(frozen=True)
class NamespaceName:
    """A namespace, whatever slashes it is written with.

    :raises ValueError: if it consists of slashes only.
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text.strip("/"):
            raise ValueError(f"--namespace {self.text!r} names no namespace: expected a name such as /nixl/agents")

    @property
    def bare(self) -> str:
        """The name without slashes at its ends."""
        return self.text.strip("/")

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes under which every spelling of it lies, its own first; none of them begins with another."""
        stripped = self.text.rstrip("/")
        return tuple(dict.fromkeys((stripped, *(f"{slashes}{self.bare}" for slashes in ("/", "", "//")))))

    def has(self, key: str) -> bool:
        """Whether a key lies in it, not only in one whose name begins alike."""
        relative = key.lstrip("/").removeprefix(self.bare)
        return relative == "" or relative.startswith("/")

    def agents(self, keys: Iterable[SurveyedKey]) -> tuple[list[PublishedAgent], list[SurveyedKey]]:
        """Return the agents that the keys belong to, and the keys that have not the form of a key of NIXL."""
        form = re.compile(rf"(?P<spelling>/*{re.escape(self.bare)}/*)/(?P<agent>[^/].*)/[^/]*", re.DOTALL)
        by_name: dict[tuple[str, str], list[SurveyedKey]] = defaultdict(list)
        foreign = []
        for key in keys:
            match = form.fullmatch(key.key)
            if match is None:
                foreign.append(key)
            else:
                by_name[match["spelling"], match["agent"]].append(key)
        return [PublishedAgent(*name, tuple(agent_keys)) for name, agent_keys in by_name.items()], foreign


def judge_agents(
    agents: Collection[PublishedAgent], other_keys: Iterable[SurveyedKey], *, limit: int, command: str
) -> Iterator[EtcdProblem]:
    """Yield what is wrong with the keys of agents.

    :param other_keys: keys under the namespace that have not the form of a key of NIXL.
    :param limit: the most bytes of a request that the etcd accepts.
    :param command: ``pytest-nixl etcd`` with the etcd's URL, for remedies.
    """
    yield from _split(agents)
    yield from _twice(agents, command)
    for agent in agents:
        for key in agent.keys:
            yield from _oversize(key, limit)
            yield from _unusable(agent, key, command)
    for key in other_keys:
        yield EtcdProblem(
            "foreign-key",
            f"{escape(key.key)} is in the namespace, but is not NAMESPACE/AGENT/LABEL: NIXL did not write it",
            f"if nothing of yours wrote it, `etcdctl del -- {quoted(key.key)}`",
            (key.key,),
        )


def _split(agents: Collection[PublishedAgent]) -> Iterator[EtcdProblem]:
    spellings: dict[str, list[PublishedAgent]] = defaultdict(list)
    for agent in agents:
        spellings[agent.namespace].append(agent)
    if len(spellings) < 2:
        return
    parts = [
        f"{plural(len(agents_there), 'agent')} under {escape(spelling)}/AGENT/"
        for spelling, agents_there in sorted(spellings.items())
    ]
    bare = next(iter(spellings)).strip("/")
    yield EtcdProblem(
        "split-namespace",
        f"the namespace is split by a slash: {', '.join(parts)}; agents of one part never find those of another",
        f"set NIXL_ETCD_NAMESPACE={quoted(f'/{bare}')} for every agent of the deployment, and start them again",
        tuple(agents_there[0].prefix for agents_there in spellings.values()),
        "NIXL-ETCD-NAMESPACE-SLASH" if bare == DEFAULT_NAMESPACE.strip("/") else "",
    )


def _twice(agents: Collection[PublishedAgent], command: str) -> Iterator[EtcdProblem]:
    names: dict[str, list[PublishedAgent]] = defaultdict(list)
    for agent in agents:
        names[agent.name].append(agent)
    for name, same in names.items():
        if len(same) > 1:
            same.sort(key=lambda agent: agent.written)
            where = " and ".join(f"{escape(copy.prefix)} (last written at revision {copy.written})" for copy in same)
            oldest = same[0]
            yield EtcdProblem(
                "agent-twice",
                f"agent {escape(name)!r} is published {len(same)} times, as {where}: a peer loads the one that its own "
                "spelling of the namespace leads to, dead or not",
                f"if the older one is dead, {removing(oldest, command)}",
                tuple(copy.prefix for copy in same),
            )


def removing(agent: PublishedAgent, command: str) -> str:
    """Return the command that prints what of an agent would be removed."""
    return f"`{command} --namespace={quoted(agent.namespace)} --agent={quoted(agent.name)} --remove-dead`"


def _oversize(key: SurveyedKey, limit: int) -> Iterator[EtcdProblem]:
    if key.size is None or key.size < NEAR * limit:
        return
    over = key.size > limit
    yield EtcdProblem(
        "oversize" if over else "near-limit",
        f"{escape(key.key)} has {key.size:,} bytes, {'more than' if over else f'{key.size / limit:.0%} of'} the "
        f"{limit:,} bytes that a request may have: etcd refuses what is larger, NIXL reports nothing, and peers go on "
        "loading the old value",
        "start etcd with --max-request-bytes=16777216 and give it to this command, too; or register fewer, larger "
        "regions",
        (key.key,),
        "NIXL-ETCD-OVERSIZE" if over else "",
    )


def _unusable(agent: PublishedAgent, key: SurveyedKey, command: str) -> Iterator[EtcdProblem]:
    if key.metadata is None:
        return
    if key.key == agent.prefix:
        if key.short != b"":
            yield EtcdProblem(
                "anchor-with-value",
                f"{escape(key.key)} is the anchor of an agent, which NIXL writes without a value, but it has "
                f"{key.size or 0:,} bytes with its key: NIXL did not write it",
                f"if the agent is dead, {removing(agent, command)}",
                (key.key,),
            )
    elif key.metadata.fault:
        yield EtcdProblem(
            "bad-metadata",
            f"no agent can load {escape(key.key)} ({key.size or 0:,} bytes with its key): {key.metadata.fault}",
            f"let the agent publish again; if it is dead, {removing(agent, command)}",
            (key.key,),
        )
    elif key.metadata.agent != agent.name:
        yield EtcdProblem(
            "other-agent",
            f"{escape(key.key)} holds the metadata of agent {escape(key.metadata.agent)!r}: who fetches "
            f"{escape(agent.name)!r} loads that one",
            f"let the agent publish again; if it is dead, {removing(agent, command)}",
            (key.key,),
        )
