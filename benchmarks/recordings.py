# SPDX-License-Identifier: Apache-2.0
"""Measure the time of ``pytest-nixl profile judge`` for 100 MB of recorded output: UCX's tables, a log, long lines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDING = Path(__file__).resolve().parents[1] / "fixtures" / "nixlbench" / "20_asio.rank_a.out"
SIZE = 100_000_000
FILLERS = {
    "UCX's tables": "[1795263438.149358] [vm:9447 :0]   | 0..inf | zero-copy | cma/memory                    |\n",
    "a log": "[1795263438.149358] [vm:9447 :0]   mm_ep.c:12  UCX  DEBUG a line of which there are very many\n",
    "long lines": "x" * 99_999 + "\n",
}


def main() -> None:
    for name, filler in FILLERS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rank0.out")
            head, row, tail = RECORDING.read_text().partition("65536               1 ")
            with path.open("w") as file:
                file.write(head)
                for _ in range(SIZE // len(filler)):
                    file.write(filler)
                file.write(row + tail)
            command = [
                sys.executable,
                "-m",
                "pytest_nixl.cli",
                "profile",
                "judge",
                "loopback",
                "--nixlbench",
                str(path),
            ]
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            print(f"100 MB of {name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
