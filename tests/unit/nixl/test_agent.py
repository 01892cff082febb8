# SPDX-License-Identifier: Apache-2.0
"""What an agent does for another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.wire import Ref
from pytest_nixl.nixl.agent import NixlAgent


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
