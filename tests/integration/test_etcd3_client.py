# SPDX-License-Identifier: Apache-2.0
"""The fixture etcd3_client: a working client of the package etcd3, or a skip with the real reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.etcd import environment, start_pytest

USE = """
def test_it(etcd3_client, nixl_etcd):
    etcd3_client.put(nixl_etcd.prefix + "x", "1")
    assert nixl_etcd.client.get(nixl_etcd.prefix + "x") == b"1"
    assert etcd3_client.get(nixl_etcd.prefix + "x")[0] == b"1"
"""


def outcome(folder: Path, *path: Path) -> str:
    """Run a test that uses the fixture, with ``path`` first on ``sys.path``; return the output of pytest."""
    more = {"PYTHONPATH": ":".join(map(str, [*path, environment()["PYTHONPATH"]]))} if path else {}
    process = start_pytest(folder, USE, "-rs", "--nixl-etcd-server=embedded", **more)
    return process.communicate(timeout=300)[0]


def test_it_works_if_etcd3_is_installed_and_skips_if_not(tmp_path: Path) -> None:
    """etcd3 is installed in the tox environment ``plugins``, and not in ``test``."""
    output = outcome(tmp_path)
    if importlib.util.find_spec("etcd3") is not None:
        assert "1 passed" in output
    else:
        assert "1 skipped" in output
        assert "etcd3 is not installed: `pip install etcd3==0.12.0 " in output


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "raise TypeError('Descriptors cannot be created directly.\\nIf this call came from a _pb2.py file, …')",
            "etcd3 cannot be imported: TypeError: Descriptors cannot be created directly. "
            "(etcd3 0.12.0 needs protobuf <= 3.20, and a newer one is installed)",
        ),
        ("import no_such_module", "etcd3 cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_an_import_error_skips_with_its_reason(tmp_path: Path, body: str, reason: str) -> None:
    """Use a stand-in for etcd3 that fails like the real package with protobuf 4 to 7."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "etcd3.py").write_text(body)
    output = outcome(tmp_path, tmp_path / "site")
    assert "1 skipped" in output
    assert reason in output
