# SPDX-License-Identifier: Apache-2.0
"""The variables of a process that are recorded, as the checks read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_sysfs import p5

from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.checks.doctor.environment import variables_agree
from pytest_nixl.host.environment import read_environment
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Verdict


@pytest.mark.parametrize("variable", ["no_grpc_proxy", "no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(("exempt", "verdict"), [("etcd.local", Verdict.PASS), ("other.local", Verdict.FAIL)])
def test_host_that_is_exempt_from_the_proxy_of_grpc_is_recorded_and_read(
    tmp_path: Path, variable: str, exempt: str, verdict: Verdict
) -> None:
    environ = {"grpc_proxy": "http://proxy:3128", "NIXL_ETCD_ENDPOINTS": "http://etcd.local:2379", variable: exempt}
    environment = read_environment(FactsRoot(), environ)
    assert environment.steering[variable] == exempt
    facts = replace(gather(FactsRoot(p5(tmp_path / "tree").folder)), environment=environment)
    assert variables_agree(facts, Requirements(load_profile("loopback"), ("UCX",))).verdict is verdict
