# SPDX-License-Identifier: Apache-2.0
"""A namespace of an etcd where agents publish: what they do there, and our own view of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_nixl import Agents, Buffer, EtcdClient, Host, NixlAgent, NixlPluginError, Ref, wait_until

if TYPE_CHECKING:
    from pytest_nixl import ProxyClient

#: What NIXL itself takes where NIXL_ETCD_NAMESPACE is not set, and what its documentation says that it takes.
DEFAULT, DOCUMENTED = "/nixl/agents/", "/nixl/agents"

#: Lines of NIXL's own logger that are of warnings and errors, of UCX, or speak of etcd.
_COMPLAINT = re.compile(r"^[EW]\d{4} |UCX +(ERROR|WARN)|etcd", re.IGNORECASE)
_SAME_NAMESPACE = "compare NIXL_ETCD_ENDPOINTS and NIXL_ETCD_NAMESPACE of both, slash for slash"
_numbers = itertools.count()


class Namespace:
    """Agents that publish under one NIXL_ETCD_NAMESPACE of one etcd.

    :param client: our own way to that etcd: the agents' is ``endpoint``.
    :param name: the value of NIXL_ETCD_NAMESPACE; None leaves it unset.
    :param seconds: how long any step may take.
    :param places: where the first agent, the second, … start; none: all of them on this host.
    """

    def __init__(
        self,
        agents: Agents,
        client: EtcdClient,
        endpoint: str,
        name: str | None,
        seconds: float,
        places: Sequence[Host] = (),
    ) -> None:
        self.client = client
        self.endpoint = endpoint
        self.name = name
        self.seconds = seconds
        self._agents = agents
        self._places = places

    def start(self, *names: str) -> list[NixlAgent]:
        """Start agents in a worker each.

        They have a progress thread, which spins, only where their backend needs one; else they progress when asked.
        """
        environment = {"NIXL_ETCD_ENDPOINTS": self.endpoint, "NIXL_ETCD_NAMESPACE": self.name}
        return self._agents.start_each(
            names, environment=environment, places=self._places, listen_thread=True, progress_thread=None
        )

    def reached_by(self, endpoint: str) -> Namespace:
        """Return the same namespace for agents that reach the etcd by other endpoints."""
        return Namespace(self._agents, self.client, endpoint, self.name, self.seconds)

    def part(self, name: str) -> Namespace:
        """Return a namespace inside of this one."""
        return Namespace(self._agents, self.client, self.endpoint, f"{self.name}/{name}", self.seconds, self._places)

    def key(self, agent: NixlAgent, label: str = "metadata") -> str:
        """Return the key of an agent's metadata; the label is empty for the anchor, which every agent puts."""
        return f"{DEFAULT if self.name is None else self.name}/{agent.name}/{label}"

    def labels(self, agent: NixlAgent) -> list[str]:
        """Return the labels under which etcd has something of this agent, but for the anchor."""
        anchor = self.key(agent, "")
        return [key.removeprefix(anchor) for key in self.client.get_prefix(anchor) if key != anchor]

    def publish(self, agent: NixlAgent) -> None:
        """Have an agent publish all that it has, and see it in etcd byte for byte."""
        agent.send_local_metadata()
        self.await_key(agent, "metadata", agent.get_agent_metadata())

    def publish_part(self, agent: NixlAgent, label: str, *memory: Buffer, connections: bool) -> None:
        """Have an agent publish some memory, its connections, or both under a label, and see it in etcd."""
        part = registration(agent, *memory)
        agent.send_partial_agent_metadata(part, connections, label=label)
        self.await_key(agent, label, agent.get_partial_agent_metadata(part, connections))

    def await_key(self, agent: NixlAgent, label: str, metadata: bytes) -> None:
        """Wait until etcd has these bytes under a label of an agent."""
        key = self.key(agent, label)
        wait_until(
            lambda: self.client.get(key) == metadata,
            f"{agent.worker.name} to publish its metadata under {key}: NIXL reported no error to Python",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def publish_anywhere(self, agent: NixlAgent) -> None:
        """Have an agent publish, and see that in etcd under whatever key: for an etcd that nobody else uses."""
        agent.send_local_metadata()
        metadata = agent.get_agent_metadata()
        wait_until(
            lambda: metadata in self.client.get_prefix("/").values(),
            f"{agent.worker.name} to publish its metadata under any key: NIXL reported no error to Python",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def find(self, finder: NixlAgent, owner: NixlAgent, *memory: Buffer, label: str = "") -> None:
        """Have an agent fetch another one's metadata, and wait until it is loaded, with the memory given."""
        finder.fetch_remote_metadata(owner.name, label=label)
        self.await_found(finder, owner, *memory, label=label)

    def await_found(self, finder: NixlAgent, owner: NixlAgent, *memory: Buffer, label: str = "") -> None:
        """Wait until an agent has loaded what it fetched."""
        key = self.key(owner, label or "metadata")
        wait_until(
            lambda: knows(finder, owner, *memory),
            f"{finder.worker.name} to load the metadata of {owner.name} that is in etcd under {key}",
            seconds=self.seconds,
            remedy=lambda: f"{_SAME_NAMESPACE}; what NIXL wrote last: {complaint(finder) or 'nothing'}",
        )

    def await_gone(self, agent: NixlAgent) -> None:
        """Wait until etcd has nothing of an agent that withdrew."""
        anchor = self.key(agent, "")
        wait_until(
            lambda: self.client.count_prefix(anchor) == 0,
            f"etcd to have no key under {anchor}, which {agent.worker.name} withdrew",
            seconds=self.seconds,
            remedy=lambda: f"read what NIXL wrote: {complaint(agent) or 'nothing'}",
        )

    def await_forgotten(self, finder: NixlAgent, owner: NixlAgent) -> None:
        """Wait until an agent does not know another one any more."""
        wait_until(
            lambda: not knows(finder, owner),
            f"{finder.worker.name} to forget {owner.name}, which withdrew its metadata from etcd",
            seconds=self.seconds,
            remedy=lambda: (
                "see whether its watch reaches etcd (a proxy that ends idle streams?), and until then call "
                f"remove_remote_agent; what NIXL wrote last: {complaint(finder) or 'nothing'}"
            ),
        )

    def await_watch(self, way: ProxyClient, finder: NixlAgent, owner: NixlAgent) -> None:
        """Wait until an agent watches another one's anchor: it does so a moment after it loaded the other's metadata,
        and never hears of what was withdrawn in that moment.
        """
        self._await_watch(way, finder, self.key(owner, ""), "so as to hear when it is withdrawn")

    def await_search(self, way: ProxyClient, finder: NixlAgent, owner: NixlAgent) -> None:
        """Wait until an agent watches for another one's metadata, which is not there yet."""
        self._await_watch(way, finder, self.key(owner), "which is not there yet")

    def _await_watch(self, way: ProxyClient, finder: NixlAgent, key: str, why: str) -> None:
        way.path.wait(
            lambda: any(request.method == "Watch" and request.key == key for request in way.requests),
            f"{finder.worker.name} to watch {key}, {why}",
            seconds=self.seconds,
        )
        self.client.get(key)  # a round trip: the etcd has seen the watch before what comes after this

    def await_fetches(self, finder: NixlAgent) -> None:
        """Wait until an agent has done every fetch it was asked for, well or not: NIXL tells nobody.

        NIXL takes them in turn, so they are done when the metadata of one more agent is there, made for that.
        """
        last = finder.beside(f"last-{next(_numbers)}")
        self.publish(last)
        self.find(finder, last)


def knows(finder: NixlAgent, owner: NixlAgent, *memory: Buffer) -> bool:
    """Whether an agent has loaded another one's metadata, with the memory given."""
    if not memory:
        return finder.check_remote_metadata(owner.name)
    descriptors = finder.get_xfer_descs([buffer.descriptor() for buffer in memory], memory[0].memory)
    return finder.check_remote_metadata(owner.name, descriptors)


def registration(agent: NixlAgent, *memory: Buffer) -> Ref:
    """Return the descriptors that partial metadata of some memory, or of none, is asked for by."""
    kind = memory[0].memory if memory else "DRAM"
    return agent.get_reg_descs([(*buffer.descriptor(), "") for buffer in memory], kind)


def complaint(agent: NixlAgent) -> str:
    """The last line in which a worker warned of something, or spoke of etcd."""
    lines = [line for line in agent.worker.output().splitlines() if _COMPLAINT.search(line)]
    return lines[-1] if lines else ""


def comes_true(condition: Callable[[], bool], *, seconds: float) -> bool:
    """Whether a condition comes true in some seconds, where both answers are good ones."""
    try:
        return wait_until(condition, "it", seconds=seconds)
    except NixlPluginError:
        return False
