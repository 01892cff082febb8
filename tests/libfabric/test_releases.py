# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC of other NIXL releases over TCP: the bytes arrive, and the provider is reported.

``PYTEST_NIXL_RELEASES`` is a folder with one folder per release, named after its version. ``tox -e libfabric`` installs
two of them, and ``tox -e soak`` all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, profile
from helpers.namespaces import Host, one_host, require_tools
from helpers.torch_for_nixl import DOUBLE
from test_real_libfabric import run_in

from pytest_nixl.model.nixl_releases import imports_torch

#: Each with the provider that it takes here: libfabric's older one for TCP before 1.0.
RELEASES = [
    pytest.param("0.7.1", "sockets", marks=pytest.mark.soak),
    pytest.param("0.9.0", "sockets", marks=pytest.mark.soak),
    pytest.param("0.10.1", "sockets"),
    pytest.param("1.0.1", "tcp"),
    pytest.param("1.4.1", "tcp", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    require_tools()
    with one_host() as namespace:
        yield namespace


@pytest.mark.parametrize(("version", "provider"), RELEASES)
def test_bytes_arrive_and_the_provider_is_reported(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, provider: str
) -> None:
    release = Path(os.environ.get("PYTEST_NIXL_RELEASES", "")) / version
    if not os.environ.get("PYTEST_NIXL_RELEASES") and not os.environ.get("CI"):
        pytest.skip("PYTEST_NIXL_RELEASES names no folder with other releases: run tox -e libfabric")
    assert release.is_dir(), f"{release} does not exist"
    path = [str(release)]
    if imports_torch(version):
        # A double of torch, which NIXL only asks whether something is one of its tensors.
        (tmp_path / "torch.py").write_text(DOUBLE)
        path.append(str(tmp_path))
    accepted = profile(tmp_path / "p.toml", f"transports = ['{provider}']\nfloor = '0.0001 GB/s'")
    written = tmp_path / "run.json"
    done = run_in(
        host, BANDWIDTH, "--nixl-backend=LIBFABRIC", "--nixl-blocks=64KiB", "--nixl-gate",
        f"--nixl-profile={accepted}", f"--benchmark-json={written}", PYTHONPATH=os.pathsep.join(path),
    )  # fmt: skip
    assert done.verdicts == {"WRITE 64KiB": "PASS", "READ 64KiB": "PASS"}, done.output
    assert f"{provider}/veth0" in done.output
    assert done.code == 0, done.output
    ends = [row["extra_info"] for row in json.loads(written.read_text())["benchmarks"]]
    assert [(end["initiator_nixl"], end["target_nixl"]) for end in ends] == [(version, version)] * 2
