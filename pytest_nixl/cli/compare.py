# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl compare``: compare a recorded run with an earlier one, and judge each row."""

from __future__ import annotations

import argparse
import importlib.util

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.units import parse_share
from pytest_nixl.judge.run_comparison import compare_runs, refuse_other_machine
from pytest_nixl.model.verdicts import GOOD, Outcome, outcome
from pytest_nixl.report.comparison import lines
from pytest_nixl.store.store import find_baseline


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare two recorded runs; exits with 0 if B is as good as A, and with 1 if a row is worse or missing",
    )
    text = "a record, a directory (its newest record), or an image of --store"
    compare.add_argument("before", metavar="A", help=f"the run to compare with: {text}")
    compare.add_argument("now", metavar="B", help="the run to judge, given in the same way")
    compare.add_argument("--store", metavar="DIR", default="", help="the directory in which images are looked up")
    compare.add_argument(
        "--max-regression",
        metavar="SHARE",
        default="5%",
        help="a row that loses no more than this is unchanged (default: 5%%)",
    )
    compare.add_argument("--gate", action="store_true", help="also fail undecided rows, as --nixl-gate does")
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    need_scipy()
    try:
        margin = parse_share(arguments.max_regression)
    except ValueError as error:
        raise ValueError(f"--max-regression: {error}: expected a percentage, such as 5%") from None
    (before, skipped), (now, more) = (
        find_baseline(name, arguments.store or ".", whole=name is arguments.before)
        for name in (arguments.before, arguments.now)
    )
    refuse_other_machine(before, now)
    compared = compare_runs(before, now, margin)
    for note in dict.fromkeys((*skipped, *more)):
        print(note)
    for result in compared.results:
        if result.verdict not in GOOD:
            print(f"{result.verdict} {result.reason}")
            print(f"    remedy: {result.remedy}")
    print(f"{now.name} of {now.when:%Y-%m-%d %H:%M} UTC", end="")
    for line in lines(compared, gate=arguments.gate):
        print(line.text)
    if now.interrupted:
        print(f"{now.source}: {now.interrupted}")
        return 1
    return int(any(outcome(result.verdict, gate=arguments.gate) is Outcome.FAIL for result in compared.results))


def need_scipy() -> None:
    """Check that scipy is installed, which compares runs. :raises NixlPluginError: it is not."""
    if importlib.util.find_spec("scipy") is None:
        raise NixlPluginError("this command needs scipy, which is not installed", pip_install("compare"))
