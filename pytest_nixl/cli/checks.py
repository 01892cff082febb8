# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl checks``: list the checks of the suites: what each proves, from which level on, and how to run it."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from difflib import get_close_matches

from pytest_nixl.cli.shipped_docs import faults
from pytest_nixl.model.settings import LEVELS
from pytest_nixl.session.suites import SuiteCheck, suite_checks, suites_folder


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    checks = commands.add_parser("checks", help="list the checks of the suites: what each proves, and how to run it")
    checks.add_argument("ids", metavar="ID", nargs="*", help="list only these checks, with the faults that each finds")
    checks.add_argument("--suite", metavar="NAME", help="list only the checks of this suite")
    checks.add_argument(
        "--level",
        choices=LEVELS,
        default=LEVELS[-1],
        help="list only the checks that a run of this level makes (default: extended, which makes all)",
    )
    checks.add_argument("--json", action="store_true", help="print a list of JSON objects")
    checks.set_defaults(run=_checks)


def _checks(arguments: argparse.Namespace) -> int:
    found = _chosen(suite_checks(), arguments)
    if arguments.json:
        print(json.dumps([_plain(check) for check in found], indent=2))
        return 0
    suite, known = "", faults() if arguments.ids else []
    for check in found:
        if check.suite != suite:
            suite = check.suite
            print(f"suite {suite}")
        print(f"  {check.id} ({check.level})")
        print(f"      proves: {check.proves}")
        print(f"      run it: {_command(check)}")
        for fault in (one for one in known if check.id in one["checks"]):
            print(f"      fault:  {fault['fault']}")
            print(f"        sign:   {fault['sign']}")
            print(f"        remedy: {fault['remedy']}")
    return 0


def _chosen(found: Sequence[SuiteCheck], arguments: argparse.Namespace) -> list[SuiteCheck]:
    """Return the checks that are asked for. :raises ValueError: an id or the suite is not known."""
    for kind, known, wanted in (
        ("check", [check.id for check in found], arguments.ids),
        ("suite", [check.suite for check in found], [arguments.suite] if arguments.suite else []),
    ):
        for name in wanted:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f": did you mean {near[0]}?" if near else f": expected one of {', '.join(dict.fromkeys(known))}"
                raise ValueError(f"{name!r} is not a {kind}{hint}")
    levels = LEVELS[: LEVELS.index(arguments.level) + 1]
    return [
        check
        for check in found
        if check.level in levels
        and (not arguments.ids or check.id in arguments.ids)
        and arguments.suite in (None, check.suite)
    ]


def _plain(check: SuiteCheck) -> dict[str, object]:
    fields = ("id", "suite", "test", "findings", "level", "proves")
    return {**{name: getattr(check, name) for name in fields}, "command": _command(check)}


def _command(check: SuiteCheck) -> str:
    """Return a command that runs the check: from the root of a clone, or where the plugin is installed."""
    level = [] if check.level != LEVELS[-1] else [f"--nixl-level={check.level}"]
    if suites_folder().parent.name != "pytest_nixl":
        return shlex.join(["pytest", check.test, *level])
    file, _, test = check.test.partition("::")
    return shlex.join(
        ["pytest", "--pyargs", f"pytest_nixl.{file.removesuffix('.py').replace('/', '.')}::{test}", *level]
    )
