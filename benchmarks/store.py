# SPDX-License-Identifier: Apache-2.0
"""Measure the time of the commands that read a store: history, report, and comparison with a baseline.

The stores are generated: 1,000 and 10,000 runs of 30 rows in the format of real runs, with a change in the middle. The
first command that reads a store reads every file and writes an index. Later commands read the index.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.provenance import ImageIdentity, Provenance, host
from pytest_nixl.store.record_reader import FORM, OURS

COMMAND = (sys.executable, "-m", "pytest_nixl.cli")
BLOCKS = [f"{size}KiB" for size in (4, 8, 16, 32, 64, 128, 256, 512)] + [
    f"{size}MiB" for size in (1, 2, 4, 8, 16, 32, 64)
]
KEYS = [f"UCX/{op}/DRAM:DRAM/{block}/batch1/depth1/0-1" for op in ("WRITE", "READ") for block in BLOCKS]


def records(count: int) -> Iterator[str]:
    """Yield the text of each record, oldest first. Half of the rows vary little, the other half much."""
    chance = random.Random(1)
    measured_host = host()
    for number in range(count):
        slow = 0.9 if number > count // 2 else 1.0
        rows = {
            key: [2e9 * slow * chance.lognormvariate(0, 0.01 if place % 2 else 0.1) for _ in range(3)]
            for place, key in enumerate(KEYS)
        }
        results = [
            Result(
                "bandwidth", f"test_bandwidth.py::test_bandwidth[{key}]", Verdict.PASS, row=RowKey.parse(key),
                summary=RowSummary(
                    values[1], 1e-5, 3e-5, 1000, 6e7, 6.4e11, ("cma/memory",), tuple(values), 2e-5, 9e-5
                ),
            )
            for key, values in rows.items()
        ]  # fmt: skip
        provenance = Provenance(
            ImageIdentity(f"nixl:{number // 50}", "", "benchmark"), {"nixl": "1.5.1"}, {}, measured_host
        )
        benchmarks = [
            {
                "fullname": key,
                "name": key,
                "stats": {"min": 1e-5, "max": 3e-5, "mean": 2e-5, "median": 2e-5, "rounds": 30},
                "extra_info": {"key": key, "GB/s": values[1] / 1e9, "launches": values, "p50_us": 10.0, "p90_us": 20.0,
                               "p99_us": 30.0, "p99.9_us": 90.0, "transports": ["cma/memory"]},
            }
            for key, values in rows.items()
        ]  # fmt: skip
        ours = {
            "form": FORM,
            "provenance": provenance.plain(),
            "results": [result.plain() for result in results],
            "notes": [],
        }
        when = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(hours=number)
        yield json.dumps({"datetime": when.isoformat(), "version": "5.3", "machine_info": {}, "commit_info": {},
                          "benchmarks": benchmarks, OURS: ours}, indent=1)  # fmt: skip


def timed(*arguments: str) -> float:
    """Run a command of pytest-nixl and return its wall time in seconds."""
    start = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1_000, 10_000], help="runs in each store")
    for count in parser.parse_args().runs:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store")
            store.mkdir()
            for number, text in enumerate(records(count)):
                (store / f"{number:06d}.json").write_text(text)
            time.sleep(5)  # the index contains only files that are at least a few seconds old
            page = f"{folder}/report.html"
            image = f"nixl:{(count - 1) // 50}"
            for parts, arguments in (
                ("a command that reads no store", ("profile", "show", "loopback")),
                ("history, without an index", ("history", str(store))),
                ("history", ("history", str(store))),
                ("report", ("report", image, page, "--store", str(store))),
                ("compare with a baseline", ("compare", image, image, "--store", str(store))),
            ):
                print(f"{count} runs: {parts}: {timed(*arguments):.1f} s", flush=True)


if __name__ == "__main__":
    main()
