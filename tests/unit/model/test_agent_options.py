# SPDX-License-Identifier: Apache-2.0
"""How agents are created: what of it is in the keys of rows, and what engines do."""

from __future__ import annotations

import pytest

from pytest_nixl.model.agent_options import (
    AgentOptions,
    BackendParameter,
    ThreadCounts,
    engine_agent,
    parse_parameters,
    parse_threads,
)
from pytest_nixl.model.settings import ENGINES

PARAMETERS = (BackendParameter("POSIX", "use_aio", "true"), BackendParameter("UCX", "num_workers", "4"))


def test_the_key_of_a_row_has_what_differs() -> None:
    # Rows are measured without a progress thread and without a listener, and so this is their default.
    for same in (AgentOptions(), AgentOptions(progress_thread=False, sync_mode="none", telemetry=True)):
        assert same.variant("UCX", "UCX") == ()
    options = AgentOptions(True, ThreadCounts(8, 0), "rw", PARAMETERS)
    changed = (("progress-thread", "on"), ("sync-mode", "rw"))
    assert options.variant("UCX", "UCX") == (("num_workers", "4"), *changed, ("threads", "8:0"))
    assert options.variant("POSIX", "POSIX") == (*changed, ("use_aio", "true")), "it has no threads"
    assert options.variant("LIBFABRIC", "LIBFABRIC") == (*changed, ("threads", "8:0"))
    assert options.variant("UCX_OTHER", "UCX") == (*changed, ("threads", "8:0")), "a backend of its own name"


def test_each_side_has_its_threads() -> None:
    options = AgentOptions(threads=ThreadCounts(8, 0))
    assert [options.threads_of(role) for role in ("initiator", "target", "agent")] == [8, 0, 8]
    assert AgentOptions().threads_of("initiator") == 0


def test_each_engine_creates_its_agents_in_its_way() -> None:
    assert {name: str(engine_agent(name, ("UCX",))) for name in ENGINES} == {
        "default": "default",
        "vllm": "progress-thread=on,threads=4,telemetry=on",
        "dynamo": "progress-thread=on",
        "sglang": "progress-thread=on,threads=8:0,sync-mode=strict",
    }
    assert engine_agent("vllm", ("UCX", "LIBFABRIC")).threads is None, "only UCX alone has threads"
    assert str(AgentOptions(False, parameters=PARAMETERS)) == (
        "progress-thread=off,POSIX:use_aio=true,UCX:num_workers=4"
    )


def test_parameters_of_backends_are_read() -> None:
    assert parse_parameters(" UCX:b=1 , ucx:a=b=2:c,POSIX:c=3") == (
        BackendParameter("POSIX", "c", "3"), BackendParameter("UCX", "a", "b=2:c"), BackendParameter("UCX", "b", "1")
    )  # fmt: skip
    for value in ("b c", "b\x7f", "b" * 201):
        with pytest.raises(ValueError, match="has a space or a /, or over 200 characters, which a row key cannot hold"):
            parse_parameters(f"UCX:a={value}")
    # Test ids show them.
    for text in ("obj:secret_key=X", "POSIX:api_token=X", "UCX:a=hf_0123456789abcdefghij"):
        with pytest.raises(ValueError, match="may hold a secret, and parameters are recorded"):
            parse_parameters(text)


def test_threads_as_typed() -> None:
    assert [parse_threads(text) for text in ("4", " 8 : 0", " none ", "004")] == [(4, 4), (8, 0), None, (4, 4)]
