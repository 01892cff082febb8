# SPDX-License-Identifier: Apache-2.0
"""What an agent does for another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.wire import Ref
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.nixl.agent import Agents, NixlAgent


class NotedAgent(NixlAgent):
    """An agent without a worker, which notes what is done."""

    def __init__(self, name: str, backend: str, noted: list[str]) -> None:
        super().__init__(cast("Any", SimpleNamespace(agent_names={})), Ref(1, "agent"), name)
        self._made_with = {"backends": [backend]}
        self.noted = noted

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        self.noted.append(f"{self.name} connects to {remote_agent}")

    @contextlib.contextmanager
    def polled(self) -> Iterator[None]:
        self.noted.append(f"{self.name} is polled")
        yield
        self.noted.append("until here")


@pytest.mark.parametrize(
    ("backend", "expected"), [("LIBFABRIC", ["b is polled", "a connects to b", "until here"]), ("UCX", [])]
)
def test_agents_that_wait_for_each_other_connect_while_the_other_is_polled(backend: str, expected: list[str]) -> None:
    noted: list[str] = []
    first, other = (NotedAgent(name, backend, noted) for name in "ab")
    first.connect_to(other)
    assert noted == expected


@pytest.mark.parametrize(
    ("memory", "pages", "sent"), [("DRAM", "base", "base"), ("DRAM", "huge", None), ("FILE", "", None)]
)
def test_only_a_buffer_in_host_memory_is_requested_with_pages(memory: str, pages: str, sent: str | None) -> None:
    agent = NotedAgent("one", "UCX", [])
    requests: list[dict[str, Any]] = []
    agent.worker = cast("Any", SimpleNamespace(request=lambda _, **arguments: requests.append(arguments)))
    agent.request_buffer(64, memory, pages=pages)
    assert requests[0].get("pages") == sent


def test_a_requested_buffer_is_that_of_its_side(
    agents: Agents, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent: Any = agents.start("one")
    monkeypatch.setattr(agent, "allocate", lambda size, memory, *, device: (memory, device))
    for pairs, initiator, expected in (
        ("DRAM:VRAM", True, ("DRAM", 1)), ("DRAM:VRAM", False, ("VRAM", 2)), ("DRAM:FILE", False, ("DRAM", 2)),
        ("DRAM:DRAM VRAM:DRAM VRAM:VRAM", True, ("VRAM", 1)), ("DRAM:DRAM VRAM:DRAM VRAM:VRAM", False, ("DRAM", 2)),
    ):  # fmt: skip
        agents.settings = make_settings(memory=tuple(map(MemoryPair.parse, pairs.split())), devices=DevicePair(1, 2))
        assert agent.allocate_asked(64, initiator=initiator) == expected
    agents.settings = make_settings(memory=(MemoryPair("VRAM", "VRAM"),), devices=None)
    assert agent.allocate_asked(64) == ("VRAM", 0)
