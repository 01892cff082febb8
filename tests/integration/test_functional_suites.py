# SPDX-License-Identifier: Apache-2.0
"""The functional suites, each check with the fault that it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_run import run

pytestmark = pytest.mark.long

DEPLOYMENT = "suites/uri_validation/test_deployment.py"


def test_a_malformed_endpoint_of_the_deployment_is_named() -> None:
    """The other forms are judged without a run, in test_uri_suite.py."""
    endpoints = "http://a:2379 http://b:2379"
    done = run(DEPLOYMENT, "-k", "well_formed", env={"NIXL_ETCD_ENDPOINTS": endpoints})
    assert (
        f"FAIL endpoints-well-formed: NIXL_ETCD_ENDPOINTS={endpoints}: {endpoints!r} has a space in it" in done.output
    )
    assert "remedy: in the deployment, write http://a:2379,http://b:2379" in done.output
    assert done.code == 1


def test_an_endpoint_with_https_fails_for_nixl_speaks_plaintext() -> None:
    done = run(DEPLOYMENT, "-k", "HTTPS", env={"NIXL_ETCD_ENDPOINTS": "https://127.0.0.1:2379"})
    assert "FAIL NIXL-ETCD-HTTPS-PLAINTEXT: " in done.output
    assert done.code == 1


def test_an_etcd_that_is_not_there_is_an_error_of_its_check() -> None:
    done = run("suites/infrastructure/test_etcd.py", "--nixl-etcd=http://127.0.0.1:1")
    refused = "etcd at http://127.0.0.1:1: connection refused, nothing listens there"
    assert re.search(rf"^ERROR etcd-answers\S*(, \S+)*: {refused}", done.output, re.MULTILINE), done.output
    assert "Traceback" not in done.output
    assert done.code == 1


def test_a_nixl_without_its_plugins_is_named_with_where_it_looked(tmp_path: Path) -> None:
    # NIXL looks for its plugins there, and there is none.
    done = run("suites/infrastructure/test_nixl.py", "--nixl-keep-going", env={"NIXL_PLUGIN_DIR": str(tmp_path)})
    for check in ("nixl-loads", "backend-loads"):
        assert f"ERROR {check}: NIXL cannot create an agent: No plugins available for NIXL" in done.output
    assert f"remedy: unset NIXL_PLUGIN_DIR (now {tmp_path})" in done.output
    assert "Traceback" not in done.output
    assert done.code == 1
