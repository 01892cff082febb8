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
from typing import NoReturn

from pytest_nixl.cli import clean, compare, doctor, endpoint, facts, findings, history, profile, report
from pytest_nixl.errors import NixlPluginError

PASSED, FAILED, COULD_NOT_RUN = 0, 1, 2

COMMANDS = (clean, compare, doctor, endpoint, facts, findings, history, profile, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain of it once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _refuse(f"{error.filename} cannot be read ({error.strerror})")
    except (ValueError, NixlPluginError) as error:
        return _refuse(str(error))


def _refuse(sentence: str) -> int:
    print(f"pytest-nixl: {sentence}", file=sys.stderr)
    return COULD_NOT_RUN


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
