# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl report``: write a recorded run as a page, a table, metrics or files for programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_nixl.cli.compare import need_scipy
from pytest_nixl.judge.run_comparison import compare_runs, refuse_other_machine
from pytest_nixl.report.files import write_report
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.parsers import parse_reports
from pytest_nixl.store.store import Store, find_baseline


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="write a recorded run in the forms of --nixl-report")
    report.add_argument("run_", metavar="RUN", help="a record, a directory (its newest record), or an image of --store")
    report.add_argument("output", metavar="FILE", nargs="+", help="the file to write; its suffix sets the format")
    report.add_argument("--store", metavar="DIR", default="", help="the directory of images and of the history")
    report.add_argument("--baseline", metavar="A", default="", help="the run to compare with, as for compare")
    report.add_argument("--gate", action="store_true", help="count undecided rows as failed")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    paths = parse_reports(",".join(arguments.output))
    store = arguments.store or (arguments.run_ if Path(arguments.run_).is_dir() else "")
    run, skipped = find_baseline(arguments.run_, store or ".", whole=False)
    history = Store(Path(store)).summaries()[0] if store else []
    compared = None
    if arguments.baseline:
        need_scipy()
        before, more = find_baseline(arguments.baseline, store or ".")
        skipped += [note for note in more if note not in skipped]
        refuse_other_machine(before, run)
        compared = compare_runs(before, run, 0.05)
    for note in skipped:
        print(note)
    for path in paths:
        write_report(RunReport(run, compared, tuple(history), gate=arguments.gate), Path(path))
        print(f"wrote {path}")
    return 0
