# SPDX-License-Identifier: Apache-2.0
"""The suite kv_cache with the real NIXL: healthy, with a corrupted block, and over a transport that is not accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.cli_run import Finished, run

pytestmark = pytest.mark.long

SUITE = "suites/kv_cache"
#: A small cache: 32 layers with K and V, 4 blocks in each request.
SMALL = "--nixl-kv-tokens=64"
#: A plugin that changes a byte of the cache that receives blocks, through the kernel, after the timed requests.
POKER = """
import os
from pytest_nixl.checks.kv_cache.link import KvLink

request = KvLink._request

def poke(self, *arguments):
    found = request(self, *arguments)
    buffer = self.destination
    memory = os.open(f"/proc/{buffer.worker.pid}/mem", os.O_RDWR)
    place = buffer.address + 3 * 8 * 32768 + 5 * 32768 + 77
    byte = os.pread(memory, 1, place)[0]
    os.pwrite(memory, bytes([byte ^ 1]), place)
    os.close(memory)
    return found

KvLink._request = poke
"""


def results(done: Finished) -> dict[str, tuple[float, int]]:
    """Return GB/s and the number of descriptors of each operation and way that the run printed."""
    lines = re.findall(
        r"^KV requests UCX (\S+) DRAM:DRAM (\S+): ([\d.]+) GB/s, (\d+) x 32KiB; notified after [\d.]+ ms \(make ",
        done.output,
        re.MULTILINE,
    )
    return {f"{op} {method}": (float(rate), int(count)) for op, method, rate, count in lines}


def test_all_ways_to_make_a_request_are_measured_and_verified() -> None:
    done = run(f"{SUITE}/test_requests.py", SMALL, "--nixl-level=extended")
    methods = (
        "scattered-prepped", "scattered-unmerged", "scattered-initialized", "contiguous-merged", "contiguous-unmerged",
        "contiguous-initialized", "scattered-strided", "repeated-prepped",
    )  # fmt: skip
    result = results(done)
    assert set(result) == {f"{op} {method}" for op in ("WRITE", "READ") for method in methods}
    assert {count for _, count in result.values()} == {4 * 64}
    assert all(rate > 0 for rate, _ in result.values())
    done.expect(0, "NIXL verdict: PASS (16 PASS; 16 rows measured)")


def test_a_changed_byte_is_reported_with_its_layer_block_and_offset() -> None:
    done = run(SUITE, SMALL, "--nixl-op=READ", fault=POKER)
    done.expect(1, "CORRUPT: KV requests UCX READ ...layer 1 V, block 5, offset 77: expected 0x")


def test_a_model_of_mla_has_one_tensor_in_each_layer_and_tcp_is_not_accepted() -> None:
    done = run(SUITE, "--nixl-kv-model=deepseek-r1", SMALL, "--nixl-op=READ", env={"UCX_TLS": "tcp"})
    done.expect(
        1,
        f"READ DRAM:DRAM scattered-prepped: ... {4 * 61} x 18KiB",
        f"WRONG-TRANSPORT: UCX READ DRAM:DRAM of 18KiB (batch {4 * 61}...tcp/lo",
    )


def test_pieces_of_blocks_in_flight_at_a_rate_are_a_row_of_their_own() -> None:
    options = ("--nixl-kv-tp=2:4", "--nixl-kv-requests=3", "--nixl-kv-rate=100/s", "--nixl-duration=0.3s")
    run(SUITE, SMALL, "-v", "--nixl-op=READ", *options).expect(
        0,
        "kv=scattered-prepped,model=generic,rate=100,requests=3,tokens=64,tp=2:4 ",
        "READ DRAM:DRAM scattered-prepped: ... 256 x 8KiB; "
        "...3 in flight, 100 each second; p99 ... ms from the intended start",
    )


def test_requests_are_recorded_as_rows_and_compared(tmp_path: Path) -> None:
    store, report = tmp_path / "store", tmp_path / "run.csv"
    # Twelve launches: one block in each request, and one way to make it.
    arguments = ("--nixl-kv-tokens=16", "--nixl-op=WRITE", "-k", "scattered-prepped")
    options = (SUITE, *arguments, f"--nixl-store={store}")
    first = run(*options, "--nixl-min-launches=5", "--nixl-image=nixl:1", f"--nixl-report={report}")
    assert first.code == 0, first.output
    [path] = store.glob("*.json")
    key = "UCX/WRITE/DRAM:DRAM/32KiB/batch64/depth1/0-1/kv=scattered-prepped,model=generic,tokens=16"
    rows = {row["fullname"]: row for row in json.loads(path.read_text())["benchmarks"]}
    assert set(rows) == {key}
    extra = rows[key]["extra_info"]
    assert extra["key"] == key
    assert len(extra["launches"]) == 5
    assert list(extra["steps_us"]) == ["prepare", "make", "post", "transfer", "notify", "release"]
    assert extra["descriptors"] == 64
    assert extra["descriptors_per_second"] == pytest.approx(extra["GB/s"] * 1e9 / 32768)
    assert rows[key]["stats"]["rounds"] == extra["transfers"] >= 50
    assert key in report.read_text()
    again = run(*options, f"--nixl-baseline={path}", "--nixl-max-regression=90%")
    assert re.search(r"kv=scattered-prepped,\S+ .* [57]:5 ", again.output), again.output
    assert "MISSING" not in again.output


@pytest.mark.whole
def test_both_images_are_measured_in_turn() -> None:
    done = run(SUITE, SMALL, "--nixl-op=WRITE", "--nixl-max-regression=90%", "--nixl-compare-image=nixl:2 env A=b")
    assert re.search(r"kv=scattered-prepped,\S+ .* ([57]):\1 ", done.output), done.output
    assert "NO-EXPECTATION" not in done.output


def test_blocks_move_to_a_file_and_back_in_fragments_and_in_pieces(tmp_path: Path) -> None:
    done = run(SUITE, SMALL, "-v", "--nixl-level=extended", "--nixl-backend=POSIX", f"--nixl-file-dir={tmp_path}")
    line = "KV blocks in storage: POSIX {} DRAM:FILE over ... in 256 fragments of 32KiB, ... in 64 pieces of 128KiB"
    done.expect(
        0,
        line.format("WRITE"),
        line.format("READ"),
        "NOT-APPLICABLE kv-requests, kv-requests-compared: no requested backend moves bytes between",
        "NIXL verdict: PASS (2 PASS, 3 NOT-APPLICABLE; 0 rows measured)",
    )


def test_a_byte_that_a_file_changes_is_reported(tmp_path: Path) -> None:
    options = ("--nixl-level=extended", "--nixl-backend=POSIX", "--nixl-op=READ", f"--nixl-file-dir={tmp_path}")
    run(f"{SUITE}/test_storage.py", SMALL, *options, fault=POKER).expect(
        1,
        "CORRUPT kv-storage: KV requests POSIX READ DRAM:FILE scattered-prepped: ...layer 1 V, block 5, offset 77: ",
    )
