# SPDX-License-Identifier: Apache-2.0
"""Are the etcd endpoints that this deployment uses of a form that NIXL accepts?"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pytest_nixl.etcd.endpoints import parse_endpoints, redact
from pytest_nixl.gate.verdicts import Judgement, Verdict
from pytest_nixl.settings import Settings


@pytest.mark.nixl_check("endpoints-well-formed")
def test_endpoints_are_well_formed(nixl_settings: Settings, verdict: Callable[[Judgement], None]) -> None:
    """NIXL_ETCD_ENDPOINTS, or what stands for it, is a list of http://HOST:PORT: NIXL ignores others without a word."""
    if not nixl_settings.etcd:
        verdict(Judgement(Verdict.PASS, "no etcd is given, and that of this run is well-formed"))
        return
    source = nixl_settings.sources["etcd"].removeprefix("environment ")
    try:
        endpoints = parse_endpoints(nixl_settings.etcd)
    except ValueError as error:
        remedy = "correct the variable in the deployment: NIXL publishes nothing with it, and says so only on stderr"
        verdict(Judgement(Verdict.FAIL, f"{source}: {error}", remedy))
        return
    encrypted = [str(endpoint) for endpoint in endpoints if endpoint.scheme == "https"]
    if encrypted:
        reason = f"{source} asks for https ({', '.join(encrypted)}), and NIXL speaks plaintext to it"
        remedy = "give NIXL a plaintext address: `etcd grpc-proxy start` beside the agent reaches an etcd behind TLS"
        verdict(Judgement(Verdict.WARN, reason, remedy))
        return
    verdict(Judgement(Verdict.PASS, redact(os.environ.get(source, nixl_settings.etcd))))
