# SPDX-License-Identifier: Apache-2.0
"""The methods of our agent beside those of the installed NIXL's: names, parameters, and what they take and return."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_nixl.core.wire import Ref
from pytest_nixl.model.nixl_releases import numbers
from pytest_nixl.nixl.agent import Agents, NixlAgent
from pytest_nixl.nixl.agent_calls import AgentCalls, DescriptorList, TransferTelemetry
from pytest_nixl.nixl.worker.nixl_api import REFERENCES
from pytest_nixl.processes.worker_errors import NixlError, WorkerError

#: The methods that a release of NIXL was the first to have. All others are in every release since 0.7.1.
SINCE = {"get_remote_descs": (1, 5), "prep_mem_view": (1, 5), "release_mem_view": (1, 5)}


def public_methods(kind: type) -> dict[str, list[tuple[str, str, bool]]]:
    """Return the name, the kind and whether it has a default of each parameter of each public method."""
    return {
        name: [
            (parameter.name, parameter.kind.name, parameter.default is not parameter.empty)
            for parameter in list(inspect.signature(function).parameters.values())[1:]
        ]
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def of_nixl(agent: Any) -> dict[str, Any]:
    """Return what the installed NIXL has; it runs in a worker."""
    import nixl._bindings as bindings

    lists = {name: sorted(vars(getattr(bindings, name))) for name in dir(bindings) if name.endswith("DList")}
    telemetry = [name for name in vars(bindings.nixlXferTelemetry) if not name.startswith("_")]
    return {"methods": public_methods(type(agent)), "lists": lists, "telemetry": telemetry}


@pytest.fixture
def agent(agents: Agents) -> NixlAgent:
    return agents.start("a", backends=["UCX"], telemetry=True)


def test_our_methods_are_those_of_the_installed_nixl(agent: NixlAgent) -> None:
    theirs = agent.run(f"{__name__}:of_nixl")
    ours: dict[str, Any] = {
        name: [list(parameter) for parameter in parameters] for name, parameters in public_methods(AgentCalls).items()
    }
    version = numbers(str(agent.worker.versions["nixl"]))
    assert theirs["methods"] == {name: ours[name] for name in ours if SINCE.get(name, ()) <= version}
    methods = {name for name in vars(DescriptorList) if not name.startswith("_")} | {"__getitem__", "__setitem__"}
    of_lists = {name for names in theirs["lists"].values() for name in names}
    assert {name for name in of_lists if not name.startswith("_")} | {"__getitem__", "__setitem__"} == methods
    assert set(theirs["telemetry"]) == set(TransferTelemetry.__dataclass_fields__)


def test_each_argument_reaches_its_parameter_of_nixl() -> None:
    sent: dict[str, Any] = {}
    answer = dict.fromkeys(TransferTelemetry.__dataclass_fields__, 0)
    calls = AgentCalls()
    calls.ref = Ref(1, "agent")
    calls.worker = cast(Any, SimpleNamespace(call=lambda _, **given: sent.update(given) or answer))
    values: dict[str, Any] = {
        "backend": "UCX", "backends": ["UCX"], "initParams": {"a": "1"}, "local_indices": [1], "remote_indices": [2]
    }  # fmt: skip
    for name, parameters in public_methods(AgentCalls).items():
        given = {parameter: values.get(parameter, Ref(2, parameter)) for parameter, *_ in parameters}
        getattr(calls, name)(**given)
        assert (sent["method"], dict(zip(given, sent["arguments"], strict=False)) | sent["keywords"]) == (name, given)


def test_each_reference_that_a_method_takes_is_checked_by_its_kind() -> None:
    """NIXL reads the memory of an object of another kind, so a worker has to know where a reference may stand."""
    places = {
        name: [place for place, parameter in enumerate(list(inspect.signature(function).parameters.values())[1:])
               if parameter.annotation in ("Ref", "Descriptors")]
        for name, function in inspect.getmembers(AgentCalls, inspect.isfunction)
        if not name.startswith("_")
    }  # fmt: skip
    assert {name: list(kinds) for name, kinds in REFERENCES.items()} == {
        **{name: numbers for name, numbers in places.items() if numbers}, "check_remote_metadata": [1]
    }  # fmt: skip
    transfer, prepared, registered = ("nixl_xfer_handle",), ("nixl_prepped_dlist_handle",), ("nixlRegDList",)
    descriptors, remote = ("nixlXferDList",), ("nixlRemoteDList",)
    kinds: dict[str, tuple[tuple[str, ...], ...]] = {}
    kinds |= dict.fromkeys(["check_xfer_state", "estimate_xfer_cost", "get_xfer_telemetry"], (transfer,))
    kinds |= dict.fromkeys(["query_xfer_backend", "release_xfer_handle", "transfer"], (transfer,))
    kinds |= dict.fromkeys(["deregister_memory", "get_partial_agent_metadata", "get_reg_descs"], (registered,))
    kinds |= dict.fromkeys(["query_memory", "register_memory", "send_partial_agent_metadata"], (registered,))
    kinds |= dict.fromkeys(["check_remote_metadata", "get_xfer_descs", "prep_xfer_dlist"], (descriptors,))
    kinds |= {"initialize_xfer": (descriptors,) * 2, "make_prepped_xfer": (prepared,) * 2}
    kinds |= {"release_dlist_handle": (prepared,), "get_remote_descs": (remote,)}
    kinds |= {"get_serialized_descs": (descriptors + registered,), "prep_mem_view": (descriptors + remote,)}
    assert {name: tuple(places.values()) for name, places in REFERENCES.items()} == kinds


def test_descriptor_lists_have_the_methods_of_nixl_s(agent: NixlAgent) -> None:
    buffer = agent.allocate(4096)
    registered = agent.register(buffer)
    assert isinstance(registered, DescriptorList)
    assert (registered.descCount(), registered.isEmpty(), registered.getType()) == (1, False, "DRAM_SEG")
    places = registered.trim()
    assert (places.kind, places[0]) == ("nixlXferDList", buffer.descriptor())
    places[0] = buffer.descriptor(0, 64)
    places.append(buffer.descriptor(64, 64))
    places.addDesc(buffer.descriptor(128, 64))
    assert (places.descCount(), places.index(buffer.descriptor(64, 64))) == (3, 1)
    places.remDesc(2)
    assert agent.get_serialized_descs(places) == agent.get_serialized_descs(
        agent.get_xfer_descs([buffer.descriptor(0, 64), buffer.descriptor(64, 64)], "DRAM")
    )
    places.print()
    places.clear()
    assert places.isEmpty()
    with pytest.raises(NixlError, match="during 'remDesc'"):
        places.remDesc(7)
    with pytest.raises(WorkerError, match="a nixlXferDList has no method 'trim'"):
        places.trim()
    with pytest.raises(WorkerError, match="'__reduce__' is not a method of a descriptor list"):
        places._call("__reduce__")


def test_the_telemetry_of_a_transfer_has_its_fields(agent: NixlAgent) -> None:
    buffer = agent.allocate(4096)
    agent.register(buffer)
    first, second = (agent.get_xfer_descs([buffer.descriptor(offset, 64)], "DRAM") for offset in (0, 64))
    handle = agent.initialize_xfer("WRITE", first, second, "a")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    telemetry = agent.get_xfer_telemetry(handle)
    assert (telemetry.totalBytes, telemetry.descCount) == (64, 1)
    assert telemetry.xferDuration >= telemetry.postDuration >= 0
    assert telemetry.startTime > 0


def test_remote_descriptors_name_their_agent(agent: NixlAgent) -> None:
    if numbers(str(agent.worker.versions["nixl"])) < SINCE["get_remote_descs"]:
        pytest.skip("NIXL before 1.5 has no remote descriptors")
    buffer = agent.allocate(4096)
    agent.register(buffer)
    remote = agent.get_remote_descs([(*buffer.descriptor(0, 64), "a")], "DRAM")
    assert (remote.kind, remote.descCount(), remote[0][3]) == ("nixlRemoteDList", 1, "a")
    assert agent.get_remote_descs(remote).descCount() == 1
    # UCX has no kernels that transfer without a GPU, and says so.
    with pytest.raises(NixlError, match="during 'prep_mem_view' of"):
        agent.release_mem_view(agent.prep_mem_view(remote, backends=["UCX"]))


def test_an_empty_name_is_refused_in_nixl_s_words(agents: Agents) -> None:
    with pytest.raises(NixlError, match="Agent needs a non-empty name"):
        agents.start("", backends=["UCX"])
