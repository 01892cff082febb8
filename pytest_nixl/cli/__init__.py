# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl``: what can be said without running a test.

It exits with 0 where all is good, 1 where a verdict fails, and 2, with one sentence on stderr, where it could not run.
One module for each command: its ``add`` gives it a parser, whose default ``run`` takes the arguments and returns the
exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pytest_nixl.cli import clean, compare, doctor, endpoint, facts, findings, history, profile, report
from pytest_nixl.core.errors import NixlPluginError

PASSED, FAILED, COULD_NOT_RUN = 0, 1, 2

COMMANDS = (clean, compare, doctor, endpoint, facts, findings, history, profile, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    if sys.stdout is None:
        return _refuse("standard output is closed, so nobody can read the answer: give it one, such as >answer.txt")
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _lead_nowhere()
        _refuse("standard output cannot be written: the program that read it has ended")
        return FAILED
    except OSError as error:
        return _refuse(_words(error))
    except (ValueError, NixlPluginError) as error:
        return _refuse(str(error))


def _refuse(sentence: str) -> int:
    with suppress(OSError):
        print(f"pytest-nixl: {sentence}", file=sys.stderr)
    return COULD_NOT_RUN


def _words(error: OSError) -> str:
    """Say in one sentence what the system refused."""
    if error.filename is not None:
        return f"{error.filename} cannot be read ({error.strerror})"
    try:
        os.getcwd()
    except OSError:
        return "the working directory has been deleted: change to another one, and run the command again"
    _lead_nowhere()
    return f"standard output cannot be written ({error.strerror or type(error).__name__})"


def _lead_nowhere() -> None:
    """Have standard output lead nowhere: Python would fail once more, on what is left in its buffer, when it ends."""
    from pytest_nixl.core.terminal_output import lead_nowhere

    lead_nowhere()


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(COULD_NOT_RUN, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pytest-nixl", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
