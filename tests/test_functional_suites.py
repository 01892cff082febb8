# SPDX-License-Identifier: Apache-2.0
"""The functional suites, each check with the fault that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run

DEPLOYMENT = "suites/uri_validation/test_deployment.py"


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ("http://etcd.default:2379/", "ends with a slash"),
        ("http://etcd.default", "names no port"),
        ("http://etcd.default:2379/v3", "has the path '/v3'"),
        ("http://a:2379 http://b:2379", "has a space in it"),
    ],
)
def test_a_malformed_endpoint_of_the_deployment_is_named(endpoints: str, words: str) -> None:
    done = run(DEPLOYMENT, env={"NIXL_ETCD_ENDPOINTS": endpoints})
    assert (
        f"FAIL endpoints-well-formed: NIXL_ETCD_ENDPOINTS: etcd endpoint '{endpoints}' {words}: expected" in done.output
    )
    assert "remedy: correct the variable in the deployment: NIXL publishes nothing with it" in done.output
    assert done.code == 1


def test_an_endpoint_with_https_is_a_warning_for_nixl_speaks_plaintext() -> None:
    done = run(DEPLOYMENT, env={"NIXL_ETCD_ENDPOINTS": "https://etcd.default:2379"})
    assert "WARN endpoints-well-formed: NIXL_ETCD_ENDPOINTS asks for https" in done.output
    assert done.code == 0


def test_an_etcd_that_is_not_there_is_an_error_of_its_check() -> None:
    done = run("suites/infrastructure/test_etcd.py", "--nixl-etcd=http://127.0.0.1:1")
    assert "ERROR etcd-answers: etcd at http://127.0.0.1:1: connection refused, nothing listens there" in done.output
    assert "Traceback" not in done.output
    assert done.code == 1


def test_a_nixl_without_its_plugins_is_named_with_where_it_looked(tmp_path: Path) -> None:
    # NIXL looks for its plugins there, and there is none.
    done = run("suites/infrastructure/test_nixl.py", env={"NIXL_PLUGIN_DIR": str(tmp_path)})
    for check in ("nixl-loads", "backend-loads"):
        assert f"ERROR {check}: NIXL makes no agent: No plugins available for NIXL" in done.output
    assert f"remedy: NIXL_PLUGIN_DIR={tmp_path}: unset it" in done.output
    assert "Traceback" not in done.output
    assert done.code == 1


#: A plugin that gives NIXL, and only NIXL, the address of a healthy etcd with a slash behind it.
SLASH = """
from dataclasses import replace
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    value = yield
    if fixturedef.argname == "nixl_etcd":
        value = replace(value, endpoint=value.endpoint + "/")
        fixturedef.cached_result = (value, *fixturedef.cached_result[1:])
    return value
"""


def test_an_agent_that_cannot_publish_is_named_with_nixls_own_words(tmp_path: Path) -> None:
    (tmp_path / "slash.py").write_text(SLASH)
    done = run("suites/metadata", "-p", "slash", "--nixl-timeout=5s", "--nixl-etcd-server=embedded",
               env={"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert "ERROR metadata-by-etcd: waited 5 s for rank 0 (agent worker, pid " in done.output
    assert "to publish its metadata under /pytest-nixl/" in done.output
    assert "remedy: read what NIXL wrote: " in done.output
    assert "the target uri is not valid" in done.output
    assert "1 PASS" in done.output, "the side channel needs no etcd"
    assert done.code == 1


#: A plugin that overwrites some of what arrived before it is compared.
CORRUPT = """
import pytest
from pytest_nixl.agent import Buffer

def pytest_configure():
    compare = Buffer.compare
    def spoiled(self, *arguments, **named):
        self.write(b"\\\\x00" * 16, 100)
        return compare(self, *arguments, **named)
    Buffer.compare = spoiled
"""


def test_wrong_bytes_after_an_exchange_fail_both_ways_of_it(tmp_path: Path) -> None:
    (tmp_path / "corrupt.py").write_text(CORRUPT)
    done = run("suites/metadata", "-p", "corrupt", "--nixl-etcd-server=embedded", env={"PYTHONPATH": str(tmp_path)})
    for check in ("metadata-by-etcd", "metadata-by-side-channel"):
        assert f"FAIL {check}: the bytes that arrived at" in done.output
    assert done.code == 1
