# SPDX-License-Identifier: Apache-2.0
"""Whole runs over OBJ whose bucket is named by parameters, on the real NIXL and the embedded S3 server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, run, undisturbed

from pytest_nixl.nixl.s3_server import open_bucket
from pytest_nixl.processes.supervisor import supervisor

pytestmark = pytest.mark.long

#: Parameters that hold secrets: pytest-nixl takes them from AWS's variables only, because parameters are recorded.
SECRET = ("access_key", "secret_key", "session_token")
#: A row of READ is fast enough, and a row of WRITE is not.
PROFILE = """
[profile]
name = "test"
summary = "made by a test"
[[expect]]
backend = ["OBJ"]
op = ["READ"]
transports = ["http"]
floor = "0.001 MB/s"
source = "made by a test"
[[expect]]
backend = ["OBJ"]
op = ["WRITE"]
transports = ["http"]
floor = "1000 GB/s"
source = "made by a test"
"""


def test_a_run_whose_bucket_is_named_by_parameters_is_measured_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    written, profile = tmp_path / "run.json", tmp_path / "p.toml"
    profile.write_text(PROFILE)
    with open_bucket("embedded", supervisor) as bucket:
        parameters = {name: value for name, value in bucket.parameters.items() if name not in SECRET}
        assert {"bucket", "endpoint_override", "region", "scheme", "use_virtual_addressing"} == set(parameters)
        text = ",".join(f"OBJ:{name}={value}" for name, value in {**parameters, "req_checksum": "required"}.items())
        keys = {name: bucket.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        done = run(
            BANDWIDTH, "-v", "--nixl-backend=obj", "--nixl-blocks=64KiB", "--nixl-batch=2", f"--nixl-profile={profile}",
            f"--nixl-backend-params={text}", "--nixl-gate", f"--benchmark-json={written}", **undisturbed(keys),
        )  # fmt: skip
        assert bucket.client.keys() == []
    assert done.code == 1, done.output
    assert done.verdicts == {"READ 64KiB": "PASS", "WRITE 64KiB": "FAIL"}, done.output
    assert "of the floor of 1000 GB/s" in done.output
    rows = {load["fullname"]: load for load in json.loads(written.read_text())["benchmarks"]}
    # What says where the objects are is no part of a row's key; how they are moved is.
    how = "DRAM:OBJ/64KiB/batch2/depth1/0-0/req_checksum=required,use_virtual_addressing=false"
    assert set(rows) == {f"OBJ/{op}/{how}" for op in ("READ", "WRITE")}
    for row in rows.values():
        assert bucket.endpoint.replace("://", "/") in row["extra_info"]["transports"]
    assert keys["AWS_SECRET_ACCESS_KEY"] not in done.output + written.read_text()
