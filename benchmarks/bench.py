# SPDX-License-Identifier: Apache-2.0
"""Measure each figure of the README five times, and print the median.

* the time of a sweep: the whole command with 15 sizes from 4 KiB to 64 MiB, WRITE and READ, and the time that one more
  size adds;
* the ratio of the bandwidth that pytest-nixl measures to that of a bare NIXL loop with the same pattern of transfers;
* the time that the installed but unused plugin adds to the start of pytest;
* the time of ``pytest-nixl doctor``, which loads NIXL and makes a backend.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SWEEP = "4KiB..64MiB"
#: The sizes of the sweep and one more from the middle.
ONE_MORE = "4KiB,8KiB,16KiB,32KiB,64KiB,128KiB,256KiB,512KiB,768KiB,1MiB,2MiB,4MiB,8MiB,16MiB,32MiB,64MiB"
COMPARED = ("64KiB", "1MiB", "16MiB")


def pytest(*arguments: str, directory: Path = ROOT) -> float:
    """Run pytest and return its wall time in seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 5):
        raise SystemExit(f"pytest {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def alternate(repeats: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Call the measures in turn, forwards and backwards (ABBA), and return the values of each."""
    found: list[list[float]] = [[] for _ in measures]
    for repeat in range(repeats):
        order = list(enumerate(measures))
        for number, measure in order if repeat % 2 == 0 else reversed(order):
            found[number].append(measure())
    return found


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text."""
    return f"(min {min(values):.3f}, max {max(values):.3f})"


def sweep(repeats: int) -> None:
    """Measure the time of the whole command, with and without one more size."""
    suite = "suites/bandwidth"
    whole, more = alternate(
        repeats,
        lambda: pytest(suite, f"--nixl-blocks={SWEEP}"),
        lambda: pytest(suite, f"--nixl-blocks={ONE_MORE}"),
    )
    print(f"sweep of 15 sizes, WRITE and READ, whole command: {median(whole):.2f} s {spread(whole)}")
    added = [b - a for a, b in zip(whole, more, strict=True)]
    print(f"one more size adds {median(added):.2f} s {spread(added)}")


def rows(op: str) -> list[dict[str, Any]]:
    """Measure some rows with pytest-nixl, and return their pytest-benchmark records."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.json")
        pytest("suites/bandwidth", f"--nixl-op={op}", f"--nixl-blocks={','.join(COMPARED)}", f"--benchmark-json={path}")
        records: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return records


def bare(op: str, records: Sequence[dict[str, Any]]) -> list[float]:
    """Measure the same rows with the bare loop, with as many transfers in a window; return bytes per second."""
    plan = []
    for record in records:
        size, rounds = record["extra_info"]["transfer_bytes"], record["stats"]["rounds"]
        plan.append(f"{size}:{record['extra_info']['transfers'] // rounds}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bare_loop.py"), op, *plan],
        capture_output=True,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rates:")]
    return [float(word) for word in line.split()[1:]]


def beside_bare_loop(repeats: int) -> None:
    """Print the ratio of the bandwidth that pytest-nixl measures to that of the bare loop, for each row."""
    for op in ("WRITE", "READ"):
        ratios: dict[str, list[float]] = {}
        for _ in range(repeats):
            records = rows(op)
            for record, rate in zip(records, bare(op, records), strict=True):
                ratios.setdefault(record["extra_info"]["key"], []).append(record["extra_info"]["GB/s"] * 1e9 / rate)
        for key, values in ratios.items():
            print(f"measured : bare loop, {key}: {median(values):.3f} {spread(values)}")
        pooled = [value for values in ratios.values() for value in values]
        print(f"measured : bare loop, {op}, all rows: {median(pooled):.3f}")


def startup(repeats: int) -> None:
    """Print the time that the unused plugin adds to the start of pytest."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "test_nothing.py").write_text("def test_nothing(): pass\n")
        without, with_ = alternate(
            4 * repeats,
            lambda: pytest("-p", "no:nixl", directory=Path(directory)),
            lambda: pytest(directory=Path(directory)),
        )
    added = [(b - a) * 1000 for a, b in zip(without, with_, strict=True)]
    print(f"start of pytest, plugin installed and unused: {median(added):+.1f} ms (of {median(without) * 1000:.0f} ms)")


def doctor(repeats: int) -> None:
    """Print the time of the whole command ``pytest-nixl doctor``."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest_nixl.cli", "doctor"], capture_output=True, text=True, check=False
        )
        taken.append(time.perf_counter() - start)
        if "NIXL doctor: " not in done.stdout:
            raise SystemExit(f"pytest-nixl doctor failed:\n{done.stdout}{done.stderr}")
    print(f"pytest-nixl doctor: {median(taken):.2f} s {spread(taken)}")


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="how often each figure is measured (default: 5)")
    parser.add_argument("figures", nargs="*", help="sweep, bare, startup or doctor (default: all)")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; medians of {arguments.repeats}", flush=True)
    chosen = {"startup": startup, "doctor": doctor, "sweep": sweep, "bare": beside_bare_loop}
    for name in arguments.figures or chosen:
        chosen[name](arguments.repeats)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
