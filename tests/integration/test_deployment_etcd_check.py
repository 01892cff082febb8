# SPDX-License-Identifier: Apache-2.0
"""The suite names what is wrong in the etcd that a user gives, and does not ask it of an etcd of the run's own."""

from __future__ import annotations

import pytest
from helpers.cli_run import run
from helpers.etcd import Etcd
from helpers.published import DEFAULT, DOCUMENTED, publish

from pytest_nixl.etcd.client import connect

CHECK = "suites/metadata/test_namespaces.py::test_the_keys_in_the_etcd_of_this_deployment_are_sound"


@pytest.mark.long
def test_the_keys_of_a_given_etcd_are_judged(etcd: Etcd) -> None:
    options = f"--nixl-etcd={etcd.url}"
    with connect([etcd.endpoint]) as client:
        publish(client, "prefill-0", DOCUMENTED)
        fine = run(CHECK, options, "-rA", env={"NIXL_ETCD_NAMESPACE": DOCUMENTED})
        publish(client, "prefill-0", DEFAULT)
        publish(client, "empty", DEFAULT, value=b"")
        split = run(CHECK, options, "-rA")
        remaining = sorted(client.get_prefix("/"))
    assert fine.code == 0, fine.output
    assert "PASS (1 PASS" in fine.output or "1 passed" in fine.output
    assert split.code == 0, split.output
    assert "the namespace is split by a slash: 1 agent under /nixl/agents/AGENT/, 2 agents under" in split.output
    assert "agent 'prefill-0' is published 2 times" in split.output
    assert "no agent can load /nixl/agents//empty/metadata" in split.output
    assert f"run `pytest-nixl etcd {etcd.url} --namespace=/nixl/agents/`" in split.output
    assert len(remaining) == 6, "the check changed the etcd"
