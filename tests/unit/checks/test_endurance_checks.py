# SPDX-License-Identifier: Apache-2.0
"""The checks of the suite ``endurance`` repeat their cycle in the right worker, and end as its figures demand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.endurance.check import CYCLES
from pytest_nixl.core.errors import LateError, NotApplicableError
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.endurance import conftest, test_cycles

SOCKETS, KEEPS = "NIXL-REMOVED-AGENT-KEEPS-SOCKETS", "LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY"


@pytest.mark.parametrize(
    ("check", "cycle", "backend", "grown", "conclusion"),
    [
        (test_cycles.test_nothing_grows_with_transfers, "transfer", "UCX", {}, "{}"),
        (test_cycles.test_nothing_grows_with_registrations, "registration", "UCX", {}, "{}"),
        (test_cycles.test_nothing_grows_with_publications, "publication", "UCX", {}, "{}"),
        (test_cycles.test_nothing_grows_with_connections, "connection", "UCX", {}, f"{SOCKETS} does not occur"),
        (test_cycles.test_nothing_grows_with_connections, "connection", "UCX", {"sockets": 2}, f"{SOCKETS} occurs"),
        (test_cycles.test_nothing_grows_with_agents, "agent", "UCX", {"heap": 2000}, "{}"),
        (test_cycles.test_nothing_grows_with_agents, "agent", "LIBFABRIC", {"heap": 300}, f"{KEEPS} does not occur"),
        (test_cycles.test_nothing_grows_with_agents, "agent", "LIBFABRIC", {"heap": 2000}, f"{KEEPS} occurs"),
    ],
)
def test_a_check_ends_with_the_verdict_or_the_finding(
    check: Callable[..., None], cycle: str, backend: str, grown: dict[str, float], conclusion: str
) -> None:
    labels = {"backend": backend, "cycle": cycle}
    figures = tuple(Figure.of(f"growth-{name}", value, labels) for name, value in grown.items())
    arguments: dict[str, Any] = {"agent_backend": backend} if cycle in ("connection", "agent") else {}
    namespace = {"namespace": "a namespace"} if cycle == "publication" else {}
    for verdict in (Verdict.PASS, Verdict.FAIL):
        endured = MagicMock(return_value=(figures, Judgement(verdict, "reason")))
        expected = verdict.value if verdict is Verdict.FAIL else conclusion.format("PASS")
        assert conclusion_of(check, endured=endured, **arguments, **namespace) == f"{expected}: reason"
        assert endured.mock_calls == [call(cycle, *namespace.values())]


def test_a_backend_that_cannot_connect_again_has_no_cycle_of_connections() -> None:
    with pytest.raises(NotApplicableError, match=r"^LIBFABRIC cannot connect again to an agent that was removed$"):
        conclusion_of(test_cycles.test_nothing_grows_with_connections, endured=None, agent_backend="LIBFABRIC")


@pytest.mark.parametrize(
    ("cycle", "devices", "memory", "activated", "heap"),
    [
        ("agent", [0], "VRAM", True, 768),
        ("agent", [0], "DRAM", False, 768 + 18 * 48),
        ("agent", [], "VRAM", False, 768),
        ("publication", [0], "VRAM", False, CYCLES["publication"].heap),
    ],
)
def test_a_cycle_runs_in_its_worker_and_agents_beside_a_gpu_have_its_context_or_another_limit(
    cycle: str,
    devices: list[int],
    memory: str,
    activated: bool,
    heap: int,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubles = {name: MagicMock() for name in ("Agents", "Endurance", "endure", "judge_endurance")}
    for name, double in doubles.items():
        monkeypatch.setattr(conftest, name, double)
    agents, endurance, endure, judge = doubles.values()
    memories = MemoryPair("DRAM", "DRAM"), MemoryPair("DRAM", memory)
    settings = make_settings(duration=7.0, backend=("LIBFABRIC", "UCX"), memory=memories)
    record, profile, namespace = MagicMock(), SimpleNamespace(bounds=("bound",)), MagicMock(seconds=60.0)
    published = cycle == "publication"
    start = agents.return_value.__enter__.return_value.start
    agent = MagicMock() if published else start.return_value
    namespace.name, namespace.start.return_value = "/a", [agent]
    agent.worker.name, agent.worker.call.return_value = "rank 0", {"devices": devices}
    endured = value_of(
        conftest.endured, ExitStack(), nixl_settings=settings, agent_backend="UCX", profile=profile,
        record_figures=record,
    )  # fmt: skip
    assert endured(cycle, *[namespace] * published) == (endure.return_value, judge.return_value)
    kind = replace(CYCLES[cycle], heap=heap)
    *given, wait = endurance.call_args.args
    assert given == [agent, kind, "UCX", 7.0]
    assert agents.call_args.args[1].backend == ("UCX",)
    endure.assert_called_once_with(endurance.return_value, ("bound",))
    record.assert_called_once_with(endure.return_value, kind.limits)
    judge.assert_called_once_with(record.return_value, endurance.return_value)
    activations = [made for made in agent.worker.call.mock_calls if made.args == ("activate",)]
    assert activations == [call("activate", device=0)] * activated
    if not published:
        start.assert_called_once_with(progress_thread=None)
        assert wait is None
        return
    namespace.start.assert_called_once_with("publisher")
    namespace.key.return_value = "/a/key"
    namespace.client.get.side_effect = [None, b"published"]
    assert wait("a label") == namespace.client.count_prefix.return_value
    namespace.key.assert_called_once_with(agent, "a label")
    assert namespace.client.get.mock_calls == [call("/a/key")] * 2
    namespace.client.count_prefix.assert_called_once_with("/a/")
    namespace.client.get.side_effect, namespace.seconds = lambda _: None, 0.01
    with pytest.raises(LateError, match=r"^waited 0\.01 s for etcd to have /a/key, which rank 0 publishes$"):
        wait("a label")
