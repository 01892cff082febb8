# SPDX-License-Identifier: Apache-2.0
"""The suite ``infrastructure`` asks the doctor about every rank's host, and ends as the doctor judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, value_of

from pytest_nixl.checks.doctor import catalogue
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.infrastructure import (
    conftest,
    test_engine,
    test_etcd,
    test_gpu,
    test_machine,
    test_nixl,
    test_object_store,
    test_ranks,
)

JUDGED = Judgement(Verdict.WARN, "reason")


def test_a_check_of_the_doctor_is_asked_of_every_host_and_of_the_etcd_of_the_run(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gather_hosts", "judge_by_id", "everywhere", "with_etcd"):
        monkeypatch.setattr(conftest, name, lambda *arguments, name=name: (name, *arguments))
    settings, cluster, profile = make_settings(backend=("UCX", "OBJ")), SimpleNamespace(names=["rank 0"]), MagicMock()
    stack, hosts = ExitStack(), ["first", "second"]
    gathered = value_of(conftest.hosts, stack, nixl_settings=settings, nixl_cluster=cluster)
    assert gathered == ("gather_hosts", settings, cluster)
    assert value_of(conftest.facts, stack, hosts=hosts) == "first"
    requirements = value_of(conftest.requirements, stack, nixl_settings=settings, profile=profile)
    assert requirements == Requirements(profile, ("UCX", "OBJ"))
    ask = value_of(conftest.ask, stack, hosts=hosts, nixl_cluster=cluster, requirements=requirements)
    judgements = [("judge_by_id", "memlock", host, requirements) for host in hosts]
    assert ask("memlock") == ("everywhere", ["rank 0"], judgements)
    etcd = SimpleNamespace(endpoint="http://e:1", client="a client")
    ask = value_of(conftest.ask_etcd, stack, nixl_etcd=etcd, facts="first", requirements=requirements)
    facts = ("with_etcd", "first", "http://e:1", "a client")
    assert ask("etcd-clock") == ("judge_by_id", "etcd-clock", facts, requirements)


def parameters(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the values, the id and the markers of each parameter of a test."""
    return [
        (value.values, value.id, *((mark.name, mark.args, mark.kwargs) for mark in value.marks)) for value in values
    ]


def test_each_check_of_the_doctor_is_a_parameter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of etcd, those with a test of their own, and that which moves bytes are not asked of a machine."""
    assert parameters(conftest.check_parameters(iter(["a", "b"]))) == [
        ((id,), id, ("nixl_check", (id,), {"level": "quick"})) for id in "ab"
    ]
    others = {
        "etcd-version",
        "etcd-latency",
        "etcd-clock",
        "nixl-loads",
        "backend-loads",
        "etcd-answers",
        "telemetry-in-process",
        "transfers-arrive",
    }
    own_checks = list(catalogue.own_checks())
    assert [id for id in own_checks if id not in others] == test_machine.MACHINE
    assert conftest.OF_ETCD == ("etcd-version", "etcd-latency", "etcd-clock")
    monkeypatch.setattr(catalogue, "other_checks", lambda: {"vendor-switch": None})
    spec: Any = spec_from_file_location("suites.infrastructure.with_other_checks", Path(test_machine.__file__))
    spec.loader.exec_module(module := module_from_spec(spec))
    assert parameters(module.OTHER_CHECKS) == [
        (("vendor-switch",), "vendor-switch", ("nixl_check", ("vendor-switch",), {}))
    ]


@pytest.mark.parametrize(("check", "fixture"), [(test_machine.test_machine, "ask"), (test_etcd.test_etcd, "ask_etcd")])
def test_a_check_of_the_doctor_ends_as_it_is_judged(check: Callable[..., None], fixture: str) -> None:
    ask = MagicMock(return_value=JUDGED)
    assert conclusion_of(check, check="an-id", **{fixture: ask}) == "WARN: reason"
    ask.assert_called_once_with("an-id")


def test_ranks_and_the_object_store_are_judged_by_their_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    agree, judge, agents = MagicMock(return_value=JUDGED), MagicMock(return_value=JUDGED), MagicMock()
    monkeypatch.setattr(test_ranks, "ranks_agree", agree)
    assert conclusion_of(test_ranks.test_ranks_agree, hosts="hosts") == "WARN: reason"
    agree.assert_called_once_with("hosts")
    monkeypatch.setattr(test_object_store, "judge_object_store", judge)
    monkeypatch.setattr(test_object_store, "Agents", agents)
    check, cluster = test_object_store.test_object_store_can_be_used, SimpleNamespace(hosts=["first", "second"])
    assert conclusion_of(check, nixl_settings="settings", nixl_cluster=cluster) == "WARN: reason"
    agents.assert_called_once_with("first", "settings")
    judge.assert_called_once_with(agents.return_value.__enter__.return_value, "settings")


@pytest.mark.parametrize(
    ("value", "deleted", "passes"), [(b"value", 1, True), (b"old", 1, False), (b"value", 0, False)]
)
def test_an_etcd_answers_if_it_returns_and_deletes_what_was_put(value: bytes, deleted: int, passes: bool) -> None:
    client = MagicMock()
    client.get.return_value, client.delete_prefix.return_value = value, deleted
    etcd = SimpleNamespace(client=client, prefix="/a/")
    if not passes:
        with pytest.raises(AssertionError):
            conclusion_of(test_etcd.test_etcd_answers, nixl_etcd=etcd)
        return
    assert conclusion_of(test_etcd.test_etcd_answers, nixl_etcd=etcd) == "no conclusion"
    assert client.mock_calls == [call.put("/a/key", b"value"), call.get("/a/key"), call.delete_prefix("/a/")]


TELEMETRY = "NIXL-TELEMETRY-OFF-RAISES {} and affects: {}"
RAISES = "get_xfer_telemetry() raises nixlNoTelemetryError"


@pytest.mark.parametrize(
    ("verdict", "reason", "conclusion"),
    [
        (Verdict.PASS, "it returns it", TELEMETRY.format("does not occur", "it returns it")),
        (Verdict.FAIL, RAISES, TELEMETRY.format("occurs", RAISES)),
        (Verdict.PASS, RAISES, TELEMETRY.format("occurs", RAISES)),
        (Verdict.FAIL, "no transfer", "FAIL: no transfer"),
        (Verdict.WARN, "it differs", "WARN: it differs"),
    ],
)
def test_a_transfer_without_telemetry_is_a_finding_and_what_else_is_wrong_a_verdict(
    verdict: Verdict, reason: str, conclusion: str
) -> None:
    ask = MagicMock(return_value=Judgement(verdict, reason))
    assert conclusion_of(test_engine.test_engines_can_read_the_telemetry_of_a_transfer, ask=ask) == conclusion
    ask.assert_called_once_with("telemetry-in-process")


@pytest.mark.parametrize(
    ("plugins", "version", "error"),
    [
        (["UCX"], "1.5.1", None),
        ([], "1.5.1", "the agent finds no plugin"),
        (["UCX"], "", "the NIXL package does not report its version"),
    ],
)
def test_nixl_loads_if_its_agent_finds_plugins_and_its_package_has_a_version(
    plugins: list[str], version: str, error: str | None
) -> None:
    agent = MagicMock(worker=SimpleNamespace(versions={"nixl": version}))
    agent.get_plugin_list.return_value = plugins
    if error is None:
        assert conclusion_of(test_nixl.test_nixl_loads, nixl_agent=agent) == "no conclusion"
        return
    with pytest.raises(AssertionError, match=f"^{error}"):
        conclusion_of(test_nixl.test_nixl_loads, nixl_agent=agent)


@pytest.mark.parametrize(
    ("backends", "others", "without_dram"),
    [
        (("POSIX", "UCX", "LIBFABRIC"), ["POSIX", "LIBFABRIC"], None),
        (("POSIX", "OBJ"), ["OBJ"], None),
        (("UCX", "LIBFABRIC"), ["LIBFABRIC"], "LIBFABRIC"),
        (("UCX",), [], "UCX"),
    ],
)
def test_each_backend_loads_in_an_agent_and_supports_host_memory(
    backends: tuple[str, ...], others: list[str], without_dram: str | None, make_settings: Callable[..., Settings]
) -> None:
    """The agent of the fixture has the first backend between agents, or else the first."""

    def types(backend: str) -> list[str]:
        return ["VRAM_SEG"] if backend == without_dram else ["DRAM_SEG"]

    agent = MagicMock(**{"get_backend_mem_types.side_effect": types})
    agent.another.return_value.get_backend_mem_types.side_effect = types
    arguments: dict[str, Any] = {"nixl_agent": agent, "nixl_settings": make_settings(backend=backends)}
    if without_dram:
        with pytest.raises(
            AssertionError, match=rf"^{without_dram} was created, but supports \['VRAM_SEG'\], not DRAM"
        ):
            conclusion_of(test_nixl.test_every_requested_backend_loads, **arguments)
    else:
        assert conclusion_of(test_nixl.test_every_requested_backend_loads, **arguments) == "no conclusion"
        [own] = {*backends} - {*others}
        assert agent.get_backend_mem_types.mock_calls == [call(own)]
        assert agent.another.return_value.get_backend_mem_types.mock_calls == [*map(call, others)]
    assert agent.another.call_args_list == [call(backends=[backend]) for backend in others]


@pytest.mark.parametrize(
    ("of_doctor", "conclusion"), [(Verdict.NOT_APPLICABLE, "NOT-APPLICABLE: no GPU"), (Verdict.FAIL, None)]
)
def test_a_host_without_a_usable_gpu_is_not_applicable_only_if_it_has_none(
    of_doctor: Verdict, conclusion: str | None
) -> None:
    agent, ask = MagicMock(), MagicMock(return_value=Judgement(of_doctor, "no GPU"))
    agent.gpus.side_effect = NotApplicableError("it cannot be used")
    arguments = {"ask": ask, "nixl_agent": agent, "nixl_cluster": None, "nixl_settings": None, "nixl_buffer": None}
    if conclusion is None:
        with pytest.raises(NotApplicableError, match=r"^it cannot be used$"):
            conclusion_of(test_gpu.test_gpu_memory_is_taken_for_gpu_memory, **arguments)
    else:
        assert conclusion_of(test_gpu.test_gpu_memory_is_taken_for_gpu_memory, **arguments) == conclusion
    ask.assert_called_once_with("gpus")


@pytest.mark.parametrize(
    ("ranks", "without_vram", "taken", "conclusion"),
    [
        (
            2,
            {"LIBFABRIC"},
            set(),
            "does not occur and affects: GPU memory is registered as GPU memory by UCX of rank 0, UCX of rank 1",
        ),
        (
            1,
            set(),
            set(),
            "does not occur and affects: GPU memory is registered as GPU memory by UCX of rank 0, LIBFABRIC of rank 0",
        ),
        (2, set(), {("UCX", 1), ("LIBFABRIC", 0)}, "occurs and affects: LIBFABRIC on 0; UCX on 1"),
        (1, {"UCX"}, {("LIBFABRIC", 0)}, "occurs and affects: LIBFABRIC on 0"),
        (2, {"UCX", "LIBFABRIC"}, set(), None),
    ],
)
def test_gpu_memory_of_every_backend_and_rank_is_registered_and_named_if_it_is_taken_for_host_memory(
    ranks: int,
    without_vram: set[str],
    taken: set[tuple[str, int]],
    conclusion: str | None,
    make_settings: Callable[..., Settings],
) -> None:
    agent, buffers = MagicMock(), list[tuple[Any, ...]]()

    def another(*, backends: list[str], host: Any) -> Any:
        [backend] = backends
        types = {backend: ["DRAM_SEG", *(["VRAM_SEG"] if backend not in without_vram else [])]}
        return SimpleNamespace(backend=backend, rank=host.rank, get_backend_mem_types=types.__getitem__)

    def allocate(agent: Any, size: int, memory: str) -> None:
        buffers.append((agent.backend, agent.rank, size, memory))
        if (agent.backend, agent.rank) in taken:
            raise FindingError("VRAM-AS-HOST-MEMORY", f"{agent.backend} on {agent.rank}")

    agent.another.side_effect = another
    cluster = SimpleNamespace(hosts=[SimpleNamespace(rank=rank) for rank in range(3)], ranks=ranks)
    arguments: dict[str, Any] = {
        "ask": None,
        "nixl_agent": agent,
        "nixl_cluster": cluster,
        "nixl_buffer": allocate,
        "nixl_settings": make_settings(backend=("POSIX", "UCX", "LIBFABRIC")),
    }
    if conclusion is None:
        with pytest.raises(NotApplicableError, match=r"^--nixl-backend=POSIX,UCX,LIBFABRIC supports no GPU memory$"):
            conclusion_of(test_gpu.test_gpu_memory_is_taken_for_gpu_memory, **arguments)
    else:
        done = conclusion_of(test_gpu.test_gpu_memory_is_taken_for_gpu_memory, **arguments)
        assert done == f"VRAM-AS-HOST-MEMORY {conclusion}"
    assert buffers == [
        (backend, rank, 1 << 16, "VRAM")
        for rank in range(ranks)
        for backend in ("UCX", "LIBFABRIC")
        if backend not in without_vram
    ]
