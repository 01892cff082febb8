# SPDX-License-Identifier: Apache-2.0
"""A namespace in etcd in which agents publish metadata, with functions that wait for its state in etcd."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_nixl import Agents, Buffer, EtcdClient, Host, NixlAgent, NixlPluginError, Ref, wait_until

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient

#: NIXL's actual default of NIXL_ETCD_NAMESPACE, and the default in its documentation.
DEFAULT, DOCUMENTED = "/nixl/agents/", "/nixl/agents"

#: NIXL's log lines with warnings and errors, those of UCX, and those that mention etcd.
_COMPLAINT = re.compile(r"^[EW]\d{4} |UCX +(ERROR|WARN)|etcd", re.IGNORECASE)
_SAME_NAMESPACE = "compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both agents, including slashes"
_numbers = itertools.count()


class Namespace:
    """Agents that publish under one NIXL_ETCD_NAMESPACE of one etcd.

    :param agents: starts the agents.
    :param client: the test's own client of that etcd.
    :param endpoint: the agents' NIXL_ETCD_ENDPOINTS.
    :param name: the agents' NIXL_ETCD_NAMESPACE; None leaves it unset.
    :param seconds: the deadline of each step.
    :param hosts: the ranks of the first agent, the second, …; empty for this host.
    """

    def __init__(
        self,
        agents: Agents,
        client: EtcdClient,
        endpoint: str,
        name: str | None,
        seconds: float,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.client = client
        self.endpoint = endpoint
        self.name = name
        self.seconds = seconds
        self._agents = agents
        self._hosts = hosts

    def start(self, *names: str) -> list[NixlAgent]:
        """Start agents, each in its own worker.

        They have a spinning progress thread only if their backend needs one; otherwise they progress when polled.
        """
        environment = {"NIXL_ETCD_ENDPOINTS": self.endpoint, "NIXL_ETCD_NAMESPACE": self.name}
        return self._agents.start_each(
            names, environment=environment, hosts=self._hosts, listen_thread=True, progress_thread=None
        )

    def reached_by(self, endpoint: str) -> Namespace:
        """Return the same namespace for agents with other endpoints."""
        return Namespace(self._agents, self.client, endpoint, self.name, self.seconds)

    def part(self, name: str) -> Namespace:
        """Return a namespace below this one."""
        return Namespace(self._agents, self.client, self.endpoint, f"{self.name}/{name}", self.seconds, self._hosts)

    def key(self, agent: NixlAgent, label: str = "metadata") -> str:
        """Return the key of an agent's metadata; an empty label gives the anchor, which every agent writes."""
        return f"{DEFAULT if self.name is None else self.name}/{agent.name}/{label}"

    def labels(self, agent: NixlAgent) -> list[str]:
        """Return the labels under which etcd has keys of this agent, except for the anchor."""
        anchor = self.key(agent, "")
        return [key.removeprefix(anchor) for key in self.client.get_prefix(anchor) if key != anchor]

    def publish(self, agent: NixlAgent) -> None:
        """Let an agent publish all its metadata, and wait until etcd has the same bytes."""
        agent.send_local_metadata()
        self.await_key(agent, "metadata", agent.get_agent_metadata())

    def publish_part(self, agent: NixlAgent, label: str, *memory: Buffer, connections: bool) -> None:
        """Let an agent publish some memory, its connections, or both under a label, and wait until etcd has them."""
        part = registration(agent, *memory)
        agent.send_partial_agent_metadata(part, connections, label=label)
        self.await_key(agent, label, agent.get_partial_agent_metadata(part, connections))

    def await_key(self, agent: NixlAgent, label: str, metadata: bytes) -> None:
        """Wait until etcd has these bytes under a label of an agent."""
        key = self.key(agent, label)
        wait_until(
            _patient(lambda: self.client.get(key) == metadata),
            f"{agent.worker.name} to publish its metadata under {key}: NIXL reported no error to Python",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def publish_anywhere(self, agent: NixlAgent) -> None:
        """Let an agent publish, and wait until etcd has it under any key. Use it only with a private etcd."""
        agent.send_local_metadata()
        metadata = agent.get_agent_metadata()
        wait_until(
            _patient(lambda: metadata in self.client.get_prefix("/").values()),
            f"{agent.worker.name} to publish its metadata under any key: NIXL reported no error to Python",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def find(self, finder: NixlAgent, owner: NixlAgent, *memory: Buffer, label: str = "") -> None:
        """Let an agent fetch another agent's metadata, and wait until it is loaded with the given memory."""
        finder.fetch_remote_metadata(owner.name, label=label)
        self.await_loaded(finder, owner, *memory, label=label)

    def await_loaded(self, finder: NixlAgent, owner: NixlAgent, *memory: Buffer, label: str = "") -> None:
        """Wait until an agent has loaded the metadata that it fetched."""
        key = self.key(owner, label or "metadata")
        with owner.polled():
            wait_until(
                lambda: knows(finder, owner, *memory),
                f"{finder.worker.name} to load the metadata of {owner.name} that is in etcd under {key}",
                seconds=self.seconds,
                remedy=lambda: f"{_SAME_NAMESPACE}; what NIXL wrote last: {complaint(finder) or 'nothing'}",
            )

    def await_gone(self, agent: NixlAgent) -> None:
        """Wait until etcd has no key of an agent that removed its metadata."""
        anchor = self.key(agent, "")
        wait_until(
            _patient(lambda: self.client.count_prefix(anchor) == 0),
            f"etcd to have no key under {anchor}, which {agent.worker.name} removed",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def await_forgotten(self, finder: NixlAgent, owner: NixlAgent) -> None:
        """Wait until an agent has forgotten another agent."""
        wait_until(
            lambda: not knows(finder, owner),
            f"{finder.worker.name} to forget {owner.name}, which removed its metadata from etcd",
            seconds=self.seconds,
            remedy=lambda: (
                "check whether its watch reaches etcd (a proxy may end idle streams); as a workaround call "
                f"remove_remote_agent; what NIXL wrote last: {complaint(finder) or 'nothing'}"
            ),
        )

    def await_watch(
        self,
        proxy_client: ProxyClient,
        finder: NixlAgent,
        owner: NixlAgent,
        label: str = "",
        purpose: str = "so as to hear when it is withdrawn",
    ) -> None:
        """Wait until etcd has confirmed that an agent watches a key of another agent, by default its anchor.

        The watch begins a moment after the metadata is loaded. The agent never learns of a removal in that moment.
        """
        key = self.key(owner, label)
        proxy_client.path.wait(
            lambda: any(request.confirmed and request.key == key for request in proxy_client.requests),
            f"{finder.worker.name} to watch {key}, {purpose}",
            seconds=self.seconds,
        )

    def await_fetches(self, finder: NixlAgent) -> None:
        """Wait until an agent has finished all its fetches, successful or not. NIXL does not report their end.

        NIXL runs fetches one after the other, so they are finished when the metadata of an additional agent is loaded.
        """
        last = finder.beside(f"last-{next(_numbers)}", progress_thread=None)  # nothing else polls in this worker
        self.publish(last)
        self.find(finder, last)


def knows(finder: NixlAgent, owner: NixlAgent, *memory: Buffer) -> bool:
    """Return whether an agent has loaded another agent's metadata with the given memory."""
    if not memory:
        return finder.check_remote_metadata(owner.name)
    descriptors = finder.get_xfer_descs([buffer.descriptor() for buffer in memory], memory[0].memory)
    return finder.check_remote_metadata(owner.name, descriptors)


def registration(agent: NixlAgent, *memory: Buffer) -> Ref:
    """Return the descriptors for partial metadata of the given memory, which may be none."""
    kind = memory[0].memory if memory else "DRAM"
    return agent.get_reg_descs([(*buffer.descriptor(), "") for buffer in memory], kind)


def _patient(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return a condition that is false while an answer of etcd is only late."""

    def ask() -> bool:
        try:
            return condition()
        except NixlPluginError as error:
            if not error.late:
                raise
            return False

    return ask


def complaint(agent: NixlAgent) -> str:
    """Return the last output line of a worker with a warning, an error or a mention of etcd."""
    lines = [line for line in agent.worker.output().splitlines() if _COMPLAINT.search(line)]
    return lines[-1] if lines else ""


def comes_true(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Return whether a condition becomes true within some seconds; both answers are allowed."""
    try:
        return wait_until(condition, "it", seconds=seconds)
    except NixlPluginError:
        return False
