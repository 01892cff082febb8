# SPDX-License-Identifier: Apache-2.0
"""Make the faults of the suite ``faults`` with the NIXL that is installed, and record what followed for the docs.

``python docs/record_faults.py --nixl-backend=UCX`` takes pytest's options, such as ``-k target_died``. To use another
release, install it into a folder with ``pip install --no-deps --target``, and set PYTHONPATH to that folder. Run
``python docs/generate.py`` afterwards.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import RECORDS, FaultRun, add_runs

ROOT = Path(__file__).resolve().parents[1]
SUITES = [str(ROOT / "suites" / "faults" / name) for name in ("test_transfers.py", "test_misuse.py")]


def machine() -> str:
    """Return the operating system, the architecture and the number of processors, without the host's name."""
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return f"{system}, {platform.machine()}, {os.cpu_count()} processors"


class OutcomeRecorder:
    """A pytest plugin that keeps the outcomes of the suite's faults and misuses."""

    def __init__(self) -> None:
        self.runs: list[FaultRun] = []

    def pytest_configure(self) -> None:
        """Let the functions that make faults tell their outcomes, before the suites import them."""
        from pytest_nixl.checks.faults import misuse
        from pytest_nixl.checks.faults import transfers as transfer_faults

        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

        def telling(function: Callable[..., Any], record: Callable[[str, str, Any], FaultRun]) -> Callable[..., Any]:
            def with_output(*arguments: Any, **named: Any) -> Any:
                outcome = function(*arguments, **named)
                self.runs.append(record(today, machine(), outcome))
                return outcome

            return with_output

        vars(transfer_faults)["make_fault"] = telling(transfer_faults.make_fault, FaultRun.of_fault)
        vars(misuse)["misuse_outcome"] = telling(misuse.misuse_outcome, FaultRun.of_misuse)


def main(arguments: list[str]) -> int:
    """Run the suite, and add the records to those of the docs. Return 0 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", metavar="FILE", type=Path, default=RECORDS, help="add the records to this file")
    pytest_options, options = parser.parse_known_args(arguments)
    records, recorder = pytest_options.records.resolve(), OutcomeRecorder()
    os.chdir(ROOT)
    code = pytest.main([*SUITES, "-p", "no:cacheprovider", "--nixl-level=extended", *options], plugins=[recorder])
    add_runs(recorder.runs, records)
    print(f"{len(recorder.runs)} records were added to {records}")
    return 0 if recorder.runs else int(code) or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
