# SPDX-License-Identifier: Apache-2.0
"""Fixtures that users make with our functions: several in one test, and for a whole module or session."""

from __future__ import annotations

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl import Agents, Settings

TESTS = """
import pytest
from pytest_nixl import Agents, agent_fixture, etcd_fixture, s3_fixture

decode = agent_fixture("decode", scope="module", backends=["UCX"], environment={"MARK": "7"})
second_etcd = etcd_fixture()
module_etcd = etcd_fixture(scope="module")
session_etcd = etcd_fixture(scope="session")
second_bucket = s3_fixture()
pids, prefixes = [], {}

@pytest.fixture(scope="class")
def pair(nixl_settings):
    with Agents(settings=nixl_settings) as agents:
        yield agents.start_each(["a", "b"])

def mark(agent):
    import os
    return os.environ["MARK"]

@pytest.mark.parametrize("number", [1, 2])
def test_an_agent_of_the_module(decode, number):
    pids.append(decode.worker.pid)
    assert decode.name == "decode"
    assert "DRAM_SEG" in decode.get_backend_mem_types("UCX")
    assert decode.run(f"{__name__}:mark") == "7"
    if number == 2:
        assert len(set(pids)) == 1
        assert decode.another("more").worker.alive

class TestPair:
    def test_a_pair(self, pair):
        assert [agent.name for agent in pair] == ["a", "b"]

def test_several_etcds(nixl_etcd, second_etcd, module_etcd, session_etcd):
    etcds = nixl_etcd, second_etcd, module_etcd, session_etcd
    for number, etcd in enumerate(etcds):
        etcd.client.put(etcd.prefix + "key", str(number))
    assert len({etcd.prefix for etcd in etcds}) == 4
    prefixes.update(second=second_etcd.prefix, module=module_etcd.prefix)

def test_keys_end_with_their_scope(nixl_etcd, module_etcd):
    assert nixl_etcd.client.count_prefix(prefixes["second"]) == 0
    assert module_etcd.prefix == prefixes["module"]
    assert nixl_etcd.client.count_prefix(prefixes["module"]) == 1

def test_several_buckets(nixl_s3, second_bucket):
    nixl_s3.client.put("key", b"1")
    assert second_bucket.client.keys() == []
"""


def test_factories_make_fixtures_of_any_scope(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=TESTS)
    result = run_pytest(pytester, "--nixl-backend=UCX", "-p", "no:xdist")
    result.assert_outcomes(passed=6)


def test_agents_say_what_they_need() -> None:
    with pytest.raises(TypeError, match=r"Agents\(\) needs settings=nixl_settings, the value of the fixture"):
        Agents()


def test_agents_start_here_by_default(nixl_settings: Settings) -> None:
    with Agents(settings=nixl_settings) as agents:
        assert agents.start(backends=["UCX"]).worker.rank == 0
        assert len(agents.workers) == 1
