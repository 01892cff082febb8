# SPDX-License-Identifier: Apache-2.0
"""Under pytest-xdist: functional suites run in parallel against one etcd, and bandwidth is not measured."""

from __future__ import annotations

import re

import pytest
from helpers.cli_run import run

pytestmark = pytest.mark.long

_EXCHANGE = "suites/metadata/test_exchange.py"
#: Of the tests of the metadata two that use the etcd: the others need it as little as those of the machine.
FUNCTIONAL = (
    "suites/infrastructure", "suites/uri_validation/test_deployment.py",
    f"{_EXCHANGE}::test_an_agent_finds_another_through_etcd",
    f"{_EXCHANGE}::test_an_agent_publishes_again_what_has_changed",
)  # fmt: skip


def test_functional_suites_run_in_parallel() -> None:
    done = run(*FUNCTIONAL, "-n", "2")
    assert re.search(
        # A host whose own libibverbs is installed beside that of the wheel is warned of it.
        r"^NIXL verdict: PASS(, with warnings)? \(\d+ PASS(, 1 WARN)?(, \d+ NOT-APPLICABLE)?; 0 rows measured\)$",
        done.output,
        re.M,
    )
    assert done.code == 0


def test_bandwidth_reports_that_it_was_not_measured_in_parallel() -> None:
    done = run("suites/bandwidth/test_bandwidth.py", "-n", "2", "--nixl-blocks=64KiB", "-rs")
    assert done.verdicts == {"WRITE 64KiB": "NOT-APPLICABLE", "READ 64KiB": "NOT-APPLICABLE"}
    unmeasured = "the suite bandwidth measured nothing: bandwidth is never measured in parallel"
    assert f"MISSING unmeasured-suite: {unmeasured}\n    remedy: run it without pytest-xdist (-n)" in done.output
    assert f"NIXL verdict: NOTHING CHECKED, because {unmeasured} (1 MISSING, 2 NOT-APPLICABLE; 0 rows" in done.output
    assert "bandwidth is never measured in parallel: run it without pytest-xdist (-n)" in done.output
    assert done.code == 1


def test_a_bad_variable_is_reported_as_a_usage_error() -> None:
    done = run("suites/infrastructure", "-n", "2", env={"NIXL_BACKEND": "banana"})
    assert "environment variable NIXL_BACKEND: 'banana' is not a supported backend" in done.output
    assert "INTERNALERROR" not in done.output
    assert "Traceback" not in done.output
    assert done.code == pytest.ExitCode.USAGE_ERROR
