# SPDX-License-Identifier: Apache-2.0
"""Declare the options to pytest, and see whether one is given.

pytest loads this module in every project in which the plugin is installed, so it imports little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.session.option_table import OPTION_TABLE

if TYPE_CHECKING:
    import pytest
else:  # the commands that read values of options do without it
    pytest = lazy_module("pytest")

#: The option whose value is a list of flags of another program.
TAKES_FLAGS = "--nixl-nixlbench-args"
#: Matches one flag of that program on pytest's command line. No option of pytest matches: it has neither ``_`` nor,
#: as a separate word, ``=``.
_FLAG_AS_VALUE = r"--[a-z][a-z0-9]*(?:_[a-z0-9_]*(?:=.*)?|=.*)"


def report_ending(name: str, endings: Iterable[str]) -> str:
    """Return the longest of these endings that the name of a file has; empty: it has none of them.

    :param name: such as ``report.html``.
    """
    matches = [ending for ending in endings if name.endswith(ending) and (name != ending or not ending.startswith("."))]
    return max(matches, key=len, default="")


def join_flags(arguments: list[str]) -> None:
    """Join ``--nixl-nixlbench-args '--flag=1'`` into one word, in place, because argparse takes ``--flag=1`` for an
    option.

    :param arguments: the command line.
    :raises pytest.UsageError: if no value follows the option.
    """
    place = 0
    while place < len(arguments) and arguments[place] != "--":
        if arguments[place] == TAKES_FLAGS:
            value = arguments[place + 1] if place + 1 < len(arguments) else None
            # argparse takes a word with a space for a value, even if it begins with a dash.
            option = value is not None and value.startswith("-") and " " not in value
            if value is None or (option and not re.fullmatch(_FLAG_AS_VALUE, value, re.DOTALL)):
                raise pytest.UsageError(
                    f"{TAKES_FLAGS} is followed by {'nothing' if value is None else repr(value)}: expected flags of "
                    f"nixlbench, such as {TAKES_FLAGS}='--check_consistency=1'"
                )
            arguments[place : place + 2] = [f"{TAKES_FLAGS}={value}"]
        place += 1


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value to pytest."""
    group = parser.getgroup("nixl", "NIXL validation")
    for field, metavar, text in OPTION_TABLE:
        flag, name = f"--nixl-{field.replace('_', '-')}", f"nixl_{field}"
        if metavar is None:
            group.addoption(flag, dest=name, action="store_const", const="yes", default=None, help=text)
        else:
            # The value of this option looks like an option itself: see join_flags.
            more = {"nargs": "?"} if flag == TAKES_FLAGS else {}
            group.addoption(flag, dest=name, metavar=metavar, default=None, help=text, **more)
        parser.addini(name, help=f"the same as {flag}", default=None)


def uses_options(config: pytest.Config) -> bool:
    """Whether an option or ini value of the plugin is given."""
    names = [f"nixl_{field}" for field, _, _ in OPTION_TABLE]
    return any(config.getoption(name, None) is not None or config.getini(name) for name in names)
