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
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import ENGINES

PARAMETERS = (BackendParameter("POSIX", "use_aio", "true"), BackendParameter("UCX", "num_workers", "4"))


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        (AgentOptions(), ()),
        # Rows are measured without a progress thread and without a listener, and so this is their default.
        (AgentOptions(progress_thread=False, sync_mode="none"), ()),
        (AgentOptions(telemetry=True), ()),
        (AgentOptions(progress_thread=True), (("progress-thread", "on"),)),
        (AgentOptions(threads=ThreadCounts(4, 4)), (("threads", "4"),)),
        (AgentOptions(threads=ThreadCounts(8, 0)), (("threads", "8:0"),)),
        (AgentOptions(sync_mode="strict"), (("sync-mode", "strict"),)),
        (AgentOptions(parameters=PARAMETERS), (("num_workers", "4"),)),
        (
            AgentOptions(True, ThreadCounts(4, 4), "rw", PARAMETERS),
            (("num_workers", "4"), ("progress-thread", "on"), ("sync-mode", "rw"), ("threads", "4")),
        ),
    ],
)
def test_the_key_of_a_row_has_what_differs(options: AgentOptions, variant: tuple[tuple[str, str], ...]) -> None:
    row_variant = options.variant("UCX", "UCX")
    assert row_variant == variant
    key = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 4096, variant=row_variant)
    assert RowKey.parse(str(key)).variant == variant


def test_a_backend_without_threads_has_none_in_its_keys() -> None:
    options = AgentOptions(threads=ThreadCounts(4, 4), parameters=PARAMETERS)
    assert options.variant("POSIX", "POSIX") == (("use_aio", "true"),)
    assert options.variant("LIBFABRIC", "LIBFABRIC") == (("threads", "4"),)
    assert options.variant("UCX_OTHER", "UCX") == (("threads", "4"),), "a backend of its own name that drives UCX"


def test_each_side_has_its_threads() -> None:
    options = AgentOptions(threads=ThreadCounts(8, 0))
    assert [options.threads_of(role) for role in ("initiator", "target", "agent")] == [8, 0, 8]
    assert AgentOptions().threads_of("initiator") == 0


def test_options_as_text() -> None:
    assert str(AgentOptions()) == "default"
    every = AgentOptions(False, ThreadCounts(8, 0), "strict", PARAMETERS)
    text = "progress-thread=off,threads=8:0,sync-mode=strict,POSIX:use_aio=true,UCX:num_workers=4"
    assert str(every) == text


def test_each_engine_creates_its_agents_in_its_way() -> None:
    assert {name: str(engine_agent(name, ("UCX",))) for name in ENGINES} == {
        "default": "default",
        "vllm": "progress-thread=on,threads=4,telemetry=on",
        "dynamo": "progress-thread=on",
        "sglang": "progress-thread=on,threads=8:0,sync-mode=strict",
    }


@pytest.mark.parametrize("backends", [("LIBFABRIC",), ("UCX", "LIBFABRIC"), ("POSIX",)])
def test_engines_give_threads_only_to_ucx_alone(backends: tuple[str, ...]) -> None:
    assert [engine_agent(name, backends).threads for name in ENGINES] == [None] * len(ENGINES)


def test_the_order_of_parameters_does_not_count() -> None:
    assert parse_parameters("UCX:b=1, UCX:a=2,POSIX:c=3") == parse_parameters("POSIX:c=3,UCX:a=2,UCX:b=1")


@pytest.mark.parametrize(
    "text",
    ["UCX:secret_key=X", "obj:secret_key=X", "POSIX:api_token=X", "GDS_MT:db_pw=X", "UCX:a=hf_0123456789abcdefghij"],
)
def test_a_parameter_that_may_hold_a_secret_is_refused_because_test_ids_show_it(text: str) -> None:
    with pytest.raises(ValueError, match="may hold a secret, and parameters are recorded"):
        parse_parameters(text)


def test_the_value_of_a_parameter_has_no_slash_and_no_space() -> None:
    assert parse_parameters(" ucx:a=b=2:c , UCX:b=1") == (
        BackendParameter("UCX", "a", "b=2:c"), BackendParameter("UCX", "b", "1")
    )  # fmt: skip
    for text in ("UCX:a=/tmp", "UCX:a=b c", "UCX:a=b\x7f", f"UCX:a={'b' * 201}"):
        with pytest.raises(ValueError, match="has a space or a /, or over 200 characters, which a row key cannot hold"):
            parse_parameters(text)


def test_threads_as_typed() -> None:
    with pytest.raises(ValueError, match=r"^'0:0' does not give threads to one side or both$"):
        parse_threads("0:0")
    assert [parse_threads(text) for text in ("4", " 8 : 0", " none ", "004")] == [(4, 4), (8, 0), None, (4, 4)]
