# SPDX-License-Identifier: Apache-2.0
"""An agent that copies bytes in its own process and notes each wrong call. A double: no NIXL notices all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest

from pytest_nixl.nixl.worker import nixl_api


class nixlInvalidParamError(Exception):  # noqa: N801 (as NIXL's own error is named)
    __module__ = "nixl_cu12._bindings"


class WatchingAgent:
    """An agent whose transfers are done, and their peer notified, at the first question after the post.

    :param agents: the agents that know each other by name; it adds itself.
    :param options: how it was created.
    """

    #: Whether a wrong call raises an error; else it is only noted.
    refuses = False
    #: Changes the bytes that arrive; what each poll finds of the notifications that arrived.
    arrive: Callable[[bytes], bytes] = bytes
    deliver: Callable[[list[bytes]], list[bytes]] = list

    def __init__(self, name: str, agents: dict[str, WatchingAgent], **options: object) -> None:
        self.name, self._agents, self.options = name, agents, options
        agents[name] = self
        self.log: list[str] = []
        self.faults: list[str] = []
        self.removed: list[str] = []
        self.regions: list[range] = []
        #: Those that were not released.
        self.handles: set[object] = set()
        self._made: dict[object, Any] = {}
        self.done = 0
        #: The regions of the peers when their metadata was added.
        self.loaded: dict[str, list[range]] = {}
        self._in_flight: set[object] = set()
        self._arrived: dict[str, list[bytes]] = {}

    def create_backend(self, plugin: str) -> None:
        self.log.append(f"create_backend {plugin}")

    def get_reg_descs(self, listed: Sequence[tuple[int, int, int, str]], memory: str) -> list[range]:
        return [range(address, address + size) for address, size, _, _ in listed]

    def get_xfer_descs(self, listed: Sequence[tuple[int, int, int]], memory: str) -> list[range]:
        return [range(address, address + size) for address, size, _ in listed]

    def register_memory(self, regions: list[range]) -> list[range]:
        self.log.append("register_memory")
        for region in regions:
            self._note(not region, "an empty region")
            self._note(region in self.regions, "registered twice")
            self._note(_overlap([*set(self.regions), region]) and region not in self.regions, "overlapping regions")
            self.regions.append(region)
        return regions

    def deregister_memory(self, regions: list[range]) -> None:
        self.log.append("deregister_memory")
        self._note(len(set(regions)) < len(regions), "named twice")
        for region in set(regions):
            self._note(region not in self.regions, "not registered")
            if region in self.regions:
                self.regions.remove(region)

    def initialize_xfer(self, op: str, local: list[range], remote: list[range], peer: str, token: bytes) -> object:
        self._note(not all([*local, *remote]), "an empty transfer")
        self._note([*map(len, local)] != [*map(len, remote)], "different lengths")
        self._note(_overlap(local) and _overlap(remote), "overlapping descriptors")
        self._note(not _held(self.regions, local), "own memory is not registered")
        self._note(peer not in self.loaded, "unknown agent")
        self._note(peer in self.loaded and not _held(self.loaded[peer], remote), "the peer's memory is not registered")
        self._made[handle := object()] = local, remote, peer, token
        self.handles.add(handle)
        self._note(len(self.handles) == 10_000, "10,000 handles")
        return handle

    def transfer(self, handle: object) -> str:
        self.log.append("transfer")
        self._note(handle not in self.handles, "posted after it was released")
        self._note(handle in self._in_flight, "posted in flight")
        self._note(not _held(self.regions, self._made[handle][0]), "posted after its memory was deregistered")
        self._in_flight.add(handle)
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        self._in_flight.remove(handle)
        self.done += 1
        local, remote, name, token = self._made[handle]
        peer = self._agents[name]
        for source, target in zip(local, remote, strict=False):
            if len(source) == len(target) and _held(self.regions, [source]) and _held(peer.regions, [target]):
                data = self.arrive(ctypes.string_at(source.start, len(source)))
                ctypes.memmove(target.start, data, len(data))
        peer._arrived.setdefault(self.name, []).append(token)
        return "DONE"

    def release_xfer_handle(self, handle: object) -> None:
        self.log.append("release_xfer_handle")
        self._note(handle in self._in_flight, "released in flight")
        self._note(handle not in self.handles, "released twice")
        self.handles.discard(handle)

    def remove_remote_agent(self, peer: str) -> None:
        self.log.append("remove_remote_agent")
        self.removed.append(peer)
        self.loaded.pop(peer, None)

    def send_notif(self, peer: str, message: bytes) -> None:
        self._note(peer not in self.loaded, "unknown agent")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived, self._arrived = self._arrived, {}
        return {name: self.deliver(messages) for name, messages in arrived.items()}

    def prep_xfer_dlist(self, peer: str, listed: Sequence[tuple[int, int, int]], memory: str) -> list[range]:
        blocks = self.get_xfer_descs(listed, memory)
        self._note(not _held(self.loaded[peer] if peer else self.regions, blocks), "memory is not registered")
        return blocks

    def make_prepped_xfer(
        self, op: str, local: list[range], local_indices: list[int], remote: list[range], remote_indices: list[int]
    ) -> None:
        for listed, chosen in ((local, local_indices), (remote, remote_indices)):
            self._note(max(chosen) >= len(listed), f"descriptor {max(chosen)} of {len(listed)}")

    def get_agent_metadata(self) -> bytes:
        return f"{self.name}.".encode()

    def add_remote_agent(self, metadata: bytes) -> None:
        self.log.append("add_remote_agent")
        self._note(not metadata.endswith(b"."), "cut metadata")
        name = metadata.decode().removesuffix(".")
        self.loaded[name] = list(self._agents[name].regions)

    def send_local_metadata(self) -> None:
        self.log.append("send_local_metadata")

    def invalidate_local_metadata(self) -> None:
        self.log.append("invalidate_local_metadata")

    def send_partial_agent_metadata(self, regions: list[range], connection: bool, *, label: str) -> None:
        self.log.append(f"send_partial_agent_metadata {sum(map(len, regions))} {connection} {label}")

    def _note(self, wrong: bool, fault: str) -> None:
        self.faults += [fault] if wrong else []
        if wrong and self.refuses:
            raise nixlInvalidParamError(fault)


def _held(regions: Sequence[range], parts: Sequence[range]) -> bool:
    return all(any(part[0] in region and part[-1] in region for region in regions) for part in parts if part)


def _overlap(parts: Sequence[range]) -> bool:
    return any(first.start < second.stop and second.start < first.stop for first, second in combinations(parts, 2))


def watching_agents(monkeypatch: pytest.MonkeyPatch) -> dict[str, WatchingAgent]:
    """Let every new agent of this process be a double; return them by name, with one named ``agent``."""
    agents: dict[str, WatchingAgent] = {}

    def make_agent(name: str, **options: object) -> WatchingAgent:
        return WatchingAgent(name, agents, **options)

    monkeypatch.setattr(nixl_api, "make_agent", make_agent)
    make_agent("agent")
    return agents
