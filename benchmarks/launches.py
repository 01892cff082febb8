# SPDX-License-Identifier: Apache-2.0
"""Compare the figures of forked workers with those of workers that are started as a new Python.

Each comparison is one run of some rows with ``--nixl-compare-image``, which measures both kinds of workers in turn and
judges them as two images. Both move the same bytes with the same NIXL, so REGRESSED or IMPROVED is a false alarm, or a
difference between the two kinds. It needs SciPy: ``pip install -e '.[compare]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The other image: workers that are started by a command are never forked.
EXECUTED = "executed env"
ROWS = ("suites/bandwidth/test_bandwidth.py", "--nixl-backend=UCX", "--nixl-blocks=64KiB,1MiB,16MiB")


def compared() -> tuple[str, str]:
    """Return the verdict of one comparison and what it says of all rows together."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "verdict.json")
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ROWS,
            f"--nixl-compare-image={EXECUTED}", f"--nixl-report={report}",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        results = json.loads(report.read_text())["results"] if report.exists() else []
    for result in results:
        if result["check"] == "regression":
            return result["verdict"], result["reason"]
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Print each comparison and the number of false alarms; exit with 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="how many comparisons are made (default: 20)")
    verdicts: Counter[str] = Counter()
    for _ in range(parser.parse_args().repeats):
        verdict, reason = compared()
        verdicts[verdict] += 1
        print(f"{verdict}: {reason}", flush=True)
    alarms = verdicts["REGRESSED"] + verdicts["IMPROVED"]
    found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(f"forked workers and new Pythons, load {os.getloadavg()[0]:.1f}: {found}; {alarms} false alarms")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
