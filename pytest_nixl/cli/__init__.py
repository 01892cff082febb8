# SPDX-License-Identifier: Apache-2.0
"""Check machines, endpoints and recorded runs without running a test, or start a run.

The command exits with 0 if all is good, with 1 if a verdict fails, with 2 and one sentence on stderr if it cannot
run, and with 130 after Ctrl-C. Each subcommand is one module. Its function ``add`` adds a parser, and the parser's
default ``run`` is a function that takes the arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, TextIO

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import own_version
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import hider
from pytest_nixl.core.resource_limits import file_fault
from pytest_nixl.core.strict import error_text, printable

if TYPE_CHECKING:
    from pytest_nixl.cli import run
    from pytest_nixl.core import terminal_output
else:  # the second imports pytest: 60 ms that no command needs
    run = lazy_module("pytest_nixl.cli.run")
    terminal_output = lazy_module("pytest_nixl.core.terminal_output")

PASSED, FAILED, COULD_NOT_RUN = 0, 1, 2
_CTRL_C = 128 + signal.SIGINT
#: The most characters of a value that is too short for a secret.
_SHORT_VALUE = 3

#: The subcommands, in the order of the help text. Each is a module of this package.
COMMANDS = (
    "clean",
    "compare",
    "connector",
    "doctor",
    "endpoint",
    "etcd",
    "explain",
    "facts",
    "history",
    "init",
    "profile",
    "report",
    "run",
    "telemetry",
)


#: What the command prints without arguments.
_FIRST = """pytest-nixl: can NIXL move data here, correctly and as fast as it should?

  pytest-nixl doctor                      what is wrong with this machine, in a second
  pytest-nixl run                         start NIXL agents, move bytes, and judge what arrived
  pytest-nixl connector PREFILL DECODE    do two engines' configurations fit each other?
  pytest-nixl explain LOG                 what the errors in a log mean, and what to do
  pytest-nixl init FOLDER                 the files for a cluster: profile, Slurm job, manifests

All commands: pytest-nixl --help"""


class PrintableStream(io.TextIOBase):
    """A text stream that writes control characters as escapes, so that no text can control the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: The error with which it could not be written; None if it could.
        self.failure: OSError | None = None

    def write(self, text: str, /) -> int:
        self.write_raw(printable(text))
        return len(text)

    def write_raw(self, text: str) -> None:
        """Write a text with its control characters."""
        with self._noting_failure():
            self._stream.write(text)

    def flush(self) -> None:
        with self._noting_failure():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    :param argv: the arguments after the name of the program; None for those of this process.
    """
    if sys.stdout is None:
        return _refuse("standard output is closed: redirect it to a file, such as >answer.txt")
    if sys.stdin is None or sys.stderr is None:
        terminal_output.fill_closed_descriptors()
    output = PrintableStream(sys.stdout)
    try:
        with redirect_stdout(output):
            try:
                return _run(sys.argv[1:] if argv is None else argv)
            finally:
                output.flush()
                if output.failure is not None:  # argparse ignores it
                    raise output.failure
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C again ends the clean-up at exit, and prints nothing
        _refuse("ended by Ctrl-C (SIGINT)")
        return _CTRL_C
    except OSError as error:
        if error is not output.failure:
            return _refuse(_one_line(_system_error_text(error)))
        terminal_output.discard_stdout()  # Python would fail again at exit, when it flushes its buffer
        if isinstance(error, BrokenPipeError):
            _refuse("standard output cannot be written: the program that was reading it has ended")
            return FAILED
        return _refuse(f"standard output cannot be written ({error.strerror or type(error).__name__})")
    except ValueError as error:
        return _refuse(_one_line(str(error)))
    except NixlPluginError as error:
        return _refuse(str(error))


def _run(argv: Sequence[str]) -> int:
    if not argv:
        print(_FIRST)
        return PASSED
    our_arguments, pytest_arguments = _split(argv)
    parser = _parser(our_arguments[0] if our_arguments else "")
    for argument in our_arguments:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse would drop the value
            parser.error(f"argument {argument[:-3]}: expected a value other than --")
    arguments, unknown = parser.parse_known_args(our_arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(_without_values(unknown))}")
    if pytest_arguments:
        arguments.pytest_arguments = pytest_arguments
    code: int = arguments.run(arguments)
    return code


def _refuse(sentence: str) -> int:
    with suppress(OSError):
        print(f"pytest-nixl: {_hide(sentence)}", file=sys.stderr)
    return COULD_NOT_RUN


def _hide(sentence: str) -> str:
    """Hide the secrets and escape the control characters of a sentence that may quote what a user typed."""
    return error_text(hider(os.environ)(sentence))


def _one_line(sentence: str) -> str:
    """Escape the line breaks of a sentence that may quote what a user typed."""
    return "\\n".join(sentence.splitlines())


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Hide the values of unknown flags: they may be secrets of any shape. A value of a few characters is none."""
    hidden: list[str] = []
    for argument, before in zip(arguments, ("", *arguments), strict=False):
        flag, _, value = argument.partition("=")
        if argument.startswith("-"):
            hidden.append(f"{flag}=***" if len(value) > _SHORT_VALUE else argument)
        else:
            after_flag = before.startswith("-") and "=" not in before
            hidden.append("***" if after_flag and len(argument) > _SHORT_VALUE else argument)
    return hidden


def _system_error_text(error: OSError) -> str:
    """Say in one sentence which operation the system refused."""
    if error.filename is not None:
        return f"{error.filename} cannot be read ({error.strerror})"
    return "; remedy: ".join(file_fault(error))


class _Parser(argparse.ArgumentParser):
    """A parser that prints an error as one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(COULD_NOT_RUN, f"{self.prog}: {_hide(_one_line(message))} (see {self.prog} --help)\n")


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Separate the arguments of pytest, which ``pytest-nixl run`` passes on, from ours."""
    if arguments and arguments[0] == "run":
        return run.split(arguments)
    return arguments, ()


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Return the command's parser, with the subcommand that a word names, or with all if it names none.

    What the others import takes half a second.
    """
    parser = _Parser(prog="pytest-nixl", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"pytest-nixl {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"pytest_nixl.cli.{name}").add(commands)
    return parser
