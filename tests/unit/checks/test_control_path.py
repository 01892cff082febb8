# SPDX-License-Identifier: Apache-2.0
"""The words of the checks of the control path, and what they measure by."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.control_path.check import ControlPath, describe_oversize, refusal_of, regions_of
from pytest_nixl.model.kv_cache import KvPlan, kv_model

REFUSED = "E1122 nixl_etcd_metadata_backend.cpp:126] Failed to store metadata in etcd: etcdserver: request is too large"


def test_an_engine_registers_a_region_for_each_tensor() -> None:
    assert regions_of(KvPlan.of(kv_model("llama-3-8b"), tokens=64)) == 64
    assert regions_of(KvPlan.of(kv_model("deepseek-r1"), tokens=64)) == 61  # MLA has one tensor in each layer


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (f"Initialized\n{REFUSED}\nlater", REFUSED),
        ("E1 Received message larger than max (2200000 vs. 2097152)",
         "E1 Received message larger than max (2200000 vs. 2097152)"),
        ("E1 failed to connect to all addresses", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_only_a_refusal_for_the_size_is_one(output: str, line: str) -> None:
    assert refusal_of(output) == line


@pytest.mark.parametrize("measure", [ControlPath.connection, ControlPath.notifications])
def test_each_agent_knows_the_other_before_it_is_timed(measure: Callable[[ControlPath], object]) -> None:
    agents = [MagicMock(**{"get_agent_metadata.return_value": f"metadata {number}"}) for number in range(2)]
    times = {"connect": 1.0, "transfers": [3.0, 2.0], "round_trips": [1.0], "burst": 2.0}
    for agent in agents:
        agent.worker.request.return_value.result.return_value = times
    measure(ControlPath("UCX", agents[0], agents[1], 5.0))
    assert [agent.add_remote_agent.call_args.args for agent in agents] == [("metadata 1",), ("metadata 0",)]


def test_metadata_that_etcd_refused_is_described_with_sizes_and_what_etcd_still_has() -> None:
    assert describe_oversize(40_000, 1_760_407, b"x" * 331, REFUSED) == (
        "metadata of 40000 regions (1.76 MB) exceeds etcd's request limit of 1.5 MiB: etcd still has the 331 B of an "
        f"earlier publication; on stderr NIXL wrote: {REFUSED}"
    )
    assert "limit: etcd still has nothing" in describe_oversize(100, 4800, None, "")


def test_metadata_that_etcd_has_is_described_with_its_size() -> None:
    assert describe_oversize(64, 3300, b"x" * 3300, "") == (
        "metadata of 64 regions (3.3 KB) was published to etcd, which by default accepts requests of up to 1.5 MiB"
    )
