# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl history``: show the history of each row over the runs of a store, and where its level changed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.core.lazy_module import lazy_module

if TYPE_CHECKING:
    from pytest_nixl.report import history
    from pytest_nixl.store import store
else:  # the help text needs none of them
    history = lazy_module("pytest_nixl.report.history")
    store = lazy_module("pytest_nixl.store.store")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("history", help="show the history of each row over the runs of a store")
    parser.add_argument("store", metavar="DIR", type=Path, help="the directory of --nixl-store")
    parser.add_argument("--row", metavar="TEXT", default="", help="only rows whose key or name contains this text")
    parser.add_argument("--last", metavar="N", type=int, default=0, help="only the newest N runs")
    parser.set_defaults(run=_history)


def _history(arguments: argparse.Namespace) -> int:
    if arguments.store.is_file():
        raise ValueError(f"{arguments.store} is a file: give the directory of --nixl-store")
    runs, skipped = store.Store(arguments.store).summaries()
    runs, left_out = history.of_one_machine(runs[-arguments.last :])
    for note in (*skipped, *left_out):
        print(note)
    if not runs:
        raise ValueError(f"{arguments.store} has no record of a run: give the directory of --nixl-store")
    text = arguments.row.replace(" of ", "/").replace(" ", "/")  # as the terminal and the page write a row
    matches = [course for course in history.courses(runs) if text in str(course.key)]
    if not matches:
        raise ValueError(f"no row key contains {arguments.row!r}")
    for line in history.lines(runs, matches):
        print(line.text)
    return 0
