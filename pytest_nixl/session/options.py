# SPDX-License-Identifier: Apache-2.0
"""Declare the options to pytest, and read what was given on the command line.

pytest loads this module in every project in which the plugin is installed, so it imports little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_nixl.model.settings import OPTIONS

if TYPE_CHECKING:
    import pytest

#: The option whose value is a list of flags of another program.
TAKES_FLAGS = "--nixl-nixlbench-args"
#: Matches one flag of that program on pytest's command line. No option of pytest matches: it has neither ``_`` nor,
#: as a separate word, ``=``.
_FLAG_AS_VALUE = r"--[a-z][a-z0-9]*(?:_[a-z0-9_]*(?:=.*)?|=.*)"


def report_ending(name: str, endings: Iterable[str]) -> str:
    """Return the longest of these endings that the name of a file has; empty: it has none of them.

    :param name: such as ``report.html``.
    """
    found = [ending for ending in endings if name.endswith(ending) and (name != ending or not ending.startswith("."))]
    return max(found, key=len, default="")


def join_flags(words: list[str]) -> None:
    """Join ``--nixl-nixlbench-args '--flag=1'`` into one word, in place, because argparse takes ``--flag=1`` for an
    option.

    :param words: the command line.
    :raises pytest.UsageError: if no value follows the option.
    """
    import pytest

    place = 0
    while place < len(words) and words[place] != "--":
        if words[place] == TAKES_FLAGS:
            value = words[place + 1] if place + 1 < len(words) else None
            # argparse takes a word with a space for a value, even if it begins with a dash.
            option = value is not None and value.startswith("-") and " " not in value
            if value is None or (option and not re.fullmatch(_FLAG_AS_VALUE, value, re.DOTALL)):
                raise pytest.UsageError(
                    f"{TAKES_FLAGS} is followed by {'nothing' if value is None else repr(value)}: expected flags of "
                    f"nixlbench, such as {TAKES_FLAGS}='--check_consistency=1'"
                )
            words[place : place + 2] = [f"{TAKES_FLAGS}={value}"]
        place += 1


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value to pytest."""
    group = parser.getgroup("nixl", "NIXL validation")
    for item in OPTIONS:
        if item.switch:
            group.addoption(item.flag, dest=item.ini, action="store_const", const="yes", default=None, help=item.help)
        else:
            text = f"{item.help}; {item.form} (default: {item.default or 'none'})"
            shown = text.replace("%", "%%")  # argparse formats help texts with %
            # The value of this option looks like an option itself: see join_flags.
            more = {"nargs": "?"} if item.flag == TAKES_FLAGS else {}
            group.addoption(item.flag, dest=item.ini, metavar=item.metavar, default=None, help=shown, **more)
        parser.addini(item.ini, help=f"the same as {item.flag}", default=None)


def hider_of(config: pytest.Config) -> Callable[[str], str]:
    """Return a function that hides the secrets of the options and of the environment variables in any text."""
    from pytest_nixl.core.redaction import hider

    values = {item: config.getoption(item.ini, None) or config.getini(item.ini) for item in OPTIONS}
    typed = {item: str(text) for item, text in values.items() if text}
    # An option may differ from its variable: hide both.
    secret = {f"{item.environment[0]}_OPTION": text for item, text in typed.items() if item.secret}
    return hider({**os.environ, **secret}, *typed.values())


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were given on the command line, by flag, with passwords hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.ini, None)) is not None}
    return {item.flag: item.show(text) if item.secret or item.hidden else text for item, text in typed.items()}
