# SPDX-License-Identifier: Apache-2.0
"""What ``--log-cli-level=INFO`` shows of a run, by the logger ``pytest_nixl`` and those below it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl import Settings, supervisor
from pytest_nixl.etcd_servers.sources import SessionEtcd

ROW = """
    import pytest

    def test_row(nixl_link):
        nixl_link.measure(65536)
"""
PASSWORD = "not-to-be-shown"


@pytest.mark.long
def test_workers_profile_and_rows_are_logged(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ROW)
    run = run_pytest(pytester, "--log-cli-level=INFO", "--nixl-op=WRITE", "-p", "no:benchmark")
    assert run.ret == 0
    run.stdout.re_match_lines_random(
        [
            r"INFO +pytest_nixl\.run_hooks:.* profile loopback\.toml of pytest-nixl: \d+ required checks",
            r"INFO +pytest_nixl\.processes\.\w+:.* rank 0 \(initiator worker, pid \d+\) started",
            r"INFO +pytest_nixl\.processes\.\w+:.* rank 1 \(target worker, pid \d+\) started",
            r"INFO +pytest_nixl\.measure\.link:.* UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1: [\d.]+ GB/s over \S+",
            r"INFO +pytest_nixl\.processes\.\w+:.* rank 0 \(initiator worker, pid \d+\) ended",
        ]
    )


@pytest.mark.long
def test_nothing_is_logged_by_default(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ROW)
    run = run_pytest(pytester, "-p", "no:benchmark", "-o", "log_cli=true", "--nixl-op=WRITE")
    assert run.ret == 0
    run.stdout.no_fnmatch_line("*pytest_nixl.*")


def test_chosen_etcd_is_logged_without_its_password(
    caplog: pytest.LogCaptureFixture, make_settings: Callable[..., Settings]
) -> None:
    """No request is made: nothing listens there."""
    settings = make_settings(etcd=f"http://user:{PASSWORD}@127.0.0.1:9", etcd_server="external")
    with caplog.at_level(logging.INFO, "pytest_nixl"):
        SessionEtcd(settings, supervisor).server()
    [line] = [record.getMessage() for record in caplog.records if record.name == "pytest_nixl.etcd_servers.sources"]
    assert "external" in line
    assert "127.0.0.1:9" in line
    assert PASSWORD not in caplog.text
