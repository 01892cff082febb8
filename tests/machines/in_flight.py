# SPDX-License-Identifier: Apache-2.0
"""Runs in a machine that has rxe0: make faults while transfers are in flight over rc, and print what followed each.

``python in_flight.py FAULT/OP…`` prints a line of JSON for each: a record for ``docs/reference/fault-runs.jsonl``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import slow_transfers  # noqa: F401  the faults are of small transfers
from agents import SETTINGS

from pytest_nixl.checks.faults.transfers import make_fault
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from fault_runs import FaultRun
from record_faults import machine


def main(names: list[str]) -> None:
    """Make each fault, and print what followed."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for name in names:
        fault, _, op = name.partition("/")
        with Agents(LocalHost(supervisor()), SETTINGS) as agents:
            outcome = make_fault(fault, agents, "UCX", op, {"UCX_TLS": os.environ["UCX_TLS"]})
        record = FaultRun.of_fault(today, f"{machine()}, emulated", outcome)
        print(json.dumps(asdict(record)), flush=True)
        print(f"{outcome}; {'; '.join(outcome.defects)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
