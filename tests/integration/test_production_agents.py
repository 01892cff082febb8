# SPDX-License-Identifier: Apache-2.0
"""Whole runs with the agents of engines: each suite with and without a progress thread, records, repeat commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli_run import bandwidth, run

pytestmark = pytest.mark.long

BOTH = "--nixl-progress-thread=off,on"
ROW = "UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1"
#: A profile without a floor, because agents of several threads share the two cores of a CI machine with their pair.
NO_FLOOR = '[profile]\nname = "any"\n[[expect]]\nbackend = ["UCX"]\ntransports = ["cma"]\nsource = "made by a test"\n'


@pytest.fixture
def no_floor(tmp_path: Path) -> str:
    path = tmp_path / "any.toml"
    path.write_text(NO_FLOOR)
    return f"--nixl-profile={path}"


def record_of(folder: Path) -> Any:
    [path] = folder.rglob("*.json")
    return json.loads(path.read_text())


@pytest.mark.whole
def test_every_suite_of_agents_is_run_with_and_without_a_progress_thread(no_floor: str) -> None:
    done = run(
        "suites/bandwidth/test_bandwidth.py", "suites/faults", "suites/kv_cache", "suites/metadata/test_exchange.py",
        BOTH, no_floor, "--nixl-blocks=64KiB", "--nixl-kv-tokens=64", "--nixl-op=WRITE", "-v", timeout=600,
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "NIXL verdict: PASS" in done.output
    ended = re.findall(r"^suites/(\w+)/\S*progress-thread=(\w+)\S* (?:PASS(?:ED)?|NO-EXPECTATION)\b", done.output, re.M)
    for suite in ("faults", "metadata"):
        results = [progress for name, progress in ended if name == suite]
        assert results.count("off") == results.count("on") > 0, done.output
    assert "KV requests UCX WRITE DRAM:DRAM scattered-prepped: " in done.output
    assert "KV requests UCX WRITE DRAM:DRAM scattered-prepped progress-thread=on: " in done.output
    assert re.search(r"^UCX +WRITE +DRAM:DRAM +64KiB +1 +1 +[\d.]+ ", done.output, re.M), done.output
    assert re.search(r"^UCX +WRITE +DRAM:DRAM +64KiB +1 +1 +progress-thread=on ", done.output, re.M), done.output


def test_agents_of_an_engine_are_in_header_key_record_and_repeat_command(tmp_path: Path) -> None:
    profile = tmp_path / "fast.toml"
    profile.write_text(NO_FLOOR.replace('transports = ["cma"]', 'transports = ["rc"]'))
    store = tmp_path / "runs"
    done = bandwidth(
        "-vv", "--nixl-agent=vllm", BOTH, "--nixl-backend-params=UCX:num_workers=2", "--nixl-op=WRITE",
        f"--nixl-profile={profile}", f"--nixl-store={store}",
    )  # fmt: skip
    header = {
        "--nixl-agent=vllm (option)",
        "--nixl-progress-thread=off,on (option)",
        "--nixl-threads=4 (--nixl-agent=vllm)",
        "--nixl-backend-params=UCX:num_workers=2 (option)",
    }
    assert header <= {line.strip() for line in done.output.splitlines()}
    record = record_of(store)
    variants = ("num_workers=2,threads=4", "num_workers=2,progress-thread=on,threads=4")
    assert {entry["fullname"] for entry in record["benchmarks"]} == {f"{ROW}/{variant}" for variant in variants}
    variables = record["nixl"]["provenance"]["environment"]["(agents)"]
    assert variables == (
        "progress-thread=off,threads=4,telemetry=on,UCX:num_workers=2; "
        "progress-thread=on,threads=4,telemetry=on,UCX:num_workers=2"
    )
    # The rows fail because of their transport, and so each has a command that repeats it.
    assert done.code == 1
    repeats = [line for line in done.output.splitlines() if "pytest suites/bandwidth" in line]
    assert any("--nixl-progress-thread=on" in line and "--nixl-agent=vllm" in line for line in repeats), done.output
