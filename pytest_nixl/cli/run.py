# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl run``: the shortest way to a verdict. It chooses the options, prints the command and runs it.

Level, backend and profile are chosen from the facts of a host, each with the reason.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pytest_nixl.core.redaction import redact
from pytest_nixl.core.sentences import plural
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.engine_backends import ENGINE_BACKENDS, GENERAL_VARIABLE
from pytest_nixl.model.settings import LEVELS, OPTIONS
from pytest_nixl.processes.supervisor import close_supervisor
from pytest_nixl.session.default_profile import default_profile, gpu_profile
from pytest_nixl.session.ending import ENDING, read_ending
from pytest_nixl.session.parsers import parse_backends
from pytest_nixl.session.selection import check_ids_by_suite, suites_folder

if TYPE_CHECKING:
    from pytest_nixl.host.facts import Facts


#: The reason if the user named a value.
EXPLICIT = "given"
_BACKEND_OPTION = next(option for option in OPTIONS if option.field == "backend")

#: The page that the run writes in the current directory.
PAGE = "nixl-report.html"
#: Separates the arguments of this command from those of pytest, where a reader wants to see it.
SEPARATOR = "--"
#: Runs pytest with the arguments after ``--`` alone.
AS_GIVEN = "--as-given"
#: The options of this command that take a value, and those that take none. Every other option is pytest's.
_VALUED = ("--backend", "--nixl-backend", "--profile", "--nixl-profile", "--nixl-level", "--suite")
_SWITCHES = (AS_GIVEN, "--no-gate", "--print", "-h", "--help")
#: The short options of pytest and its common plugins that take a value. Other short ones, such as -x, take none.
_SHORT_VALUED = ("-c", "-k", "-m", "-n", "-o", "-p", "-r", "-W")
_PR_SET_PDEATHSIG = 1
_NOT_JUDGED = (
    "the run ended before it was judged: pytest ended with exit code 0, but no verdict of this run has that code; a "
    "conftest.py or another plugin of pytest ended it, or an option by which pytest runs no test"
)


@dataclass(frozen=True)
class Choice:
    """A value of an option, and the reason for it."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


@dataclass(frozen=True)
class RunChoice:
    """The choices of one run.

    :param gpus: the models of the host's GPUs; empty too if nothing needed the facts.
    """

    level: Choice
    backend: Choice
    profile: Choice
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"level {self.level}, backend {self.backend}, profile {self.profile}"

    def for_gpu_memory(self) -> str:
        """Return how to measure GPU memory, because a run measures host memory; empty without a GPU."""
        if not self.gpus:
            return ""
        profile = gpu_profile(self.gpus) or "YOURS"
        return f"it measures host memory; for GPU memory: pytest-nixl run --profile {profile} --nixl-memory=VRAM:VRAM"


def choose(
    facts: Facts | None,
    *,
    level: str | None = None,
    backend: str | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> RunChoice:
    """Choose what was not given.

    :param facts: the facts of the host; None only if level and backend are given.
    :param environ: the environment, in which NIXL_BACKEND names the backend.
    :param root: the directory that contains the host's ``sys``.
    :raises ValueError: a backend is not supported.
    """
    named = next((name for name in _BACKEND_OPTION.environment if environ.get(name)), "")
    if backend is not None:
        backend_choice = Choice(_parsed(backend), EXPLICIT)
    elif named:
        backend_choice = Choice(_parsed(environ[named]), named)
    else:
        assert facts is not None
        backend_choice = _choose_backend(facts)
    if level is not None:
        level_choice = Choice(level, EXPLICIT)
    else:
        assert facts is not None
        level_choice = _choose_level(facts)
    if profile is not None:
        profile_choice = Choice(profile, EXPLICIT)
    else:
        name, reason = default_profile(backend_choice.value.split(","), root)
        profile_choice = Choice(name, reason or "the default")
    models = () if facts is None else tuple(gpu.name for gpu in facts.gpu.gpus)
    return RunChoice(level_choice, backend_choice, profile_choice, models)


def needs_facts(level: str | None, backend: str | None) -> bool:
    """Return whether :func:`choose` needs the facts of the host."""
    return level is None or (backend is None and not any(os.environ.get(name) for name in _BACKEND_OPTION.environment))


def _parsed(backends: str) -> str:
    try:
        return ",".join(parse_backends(backends))
    except ValueError as error:
        raise ValueError(f"{error}: expected {_BACKEND_OPTION.form}") from None


def _choose_level(facts: Facts) -> Choice:
    devices = _devices(facts)
    if devices:
        return Choice("standard", devices)
    return Choice("quick", "no GPU and no RDMA device")


def _choose_backend(facts: Facts) -> Choice:
    plugins = facts.software.plugins
    if facts.efa and "LIBFABRIC" in (plugins or ("LIBFABRIC",)):
        return Choice("LIBFABRIC", plural(len(facts.efa), "EFA device"))
    if plugins and "UCX" not in plugins and "LIBFABRIC" in plugins:
        return Choice("LIBFABRIC", "this NIXL has no plugin UCX")
    if facts.efa:
        return Choice("UCX", "this NIXL has no plugin LIBFABRIC")
    return Choice("UCX", "no EFA device")


def _devices(facts: Facts) -> str:
    rdma = [device for device in facts.rdma if not device.manages_nvlink]
    counts = [(len(facts.gpu.gpus), "GPU"), (len(rdma), "RDMA device")]
    return " and ".join(plural(number, noun) for number, noun in counts if number)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run the suites with a level, a backend and a profile that fit this host: the shortest way to a verdict",
        usage="pytest-nixl run [LEVEL] [--backend NAME] [--profile NAME] [--suite NAME] [--print] [OPTION OF PYTEST…]\n"
        "       pytest-nixl run --as-given -- ARGUMENT…",
        description="Choose from the facts of this host what is not given, print the choice and the pytest command, "
        f"and run it with --nixl-gate. The run writes the page {PAGE}, or the next number of it that is free. Nothing "
        "is installed. Every other option goes to pytest, such as --nixl-memory=VRAM:VRAM or -k NAME. The exit code is "
        "pytest's; 1 if pytest ended with 0 before the run was judged.",
    )
    run.add_argument(
        "level",
        metavar="LEVEL",
        nargs="?",
        choices=LEVELS,
        help="quick, standard or extended (or --nixl-level=LEVEL); without it, standard on a host with a GPU or an "
        "RDMA device, else quick",
    )
    run.add_argument("--nixl-level", dest="named_level", choices=LEVELS, help=argparse.SUPPRESS)
    run.add_argument(
        "--backend",
        "--nixl-backend",
        metavar="NAME[,NAME]",
        help="NIXL backends to validate (default: NIXL_BACKEND; else LIBFABRIC on a host with EFA, else UCX)",
    )
    run.add_argument(
        "--profile",
        "--nixl-profile",
        metavar="NAME|FILE",
        help="what to expect of the host (default: the profile that pytest takes for this backend)",
    )
    run.add_argument(
        "--suite", metavar="NAME", action="append", default=[], help="run only this suite; repeatable (default: all)"
    )
    run.add_argument("--no-gate", action="store_true", help="do not fail checks that are undecided")
    run.add_argument(
        AS_GIVEN,
        action="store_true",
        help="choose nothing: run pytest with the arguments after -- alone, as the files for CI and clusters do",
    )
    run.add_argument("--print", action="store_true", help="print the choice and the command, and do not run it")
    run.set_defaults(run=_run, pytest_arguments=())


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments of ``pytest-nixl run`` from those of pytest.

    An option that is not ours is pytest's, and so is the word after it, unless the option has its value behind ``=``
    or takes none.
    After ``--`` only an option of pytest's for which this command has an argument is ours, and with ``--as-given``
    nothing.

    :param arguments: the command line, from the word ``run``.
    :returns: the arguments of this command, and those of pytest.
    """
    ours: list[str] = []
    theirs: list[str] = []
    positional = ours
    value_of: list[str] | None = None
    options: tuple[str, ...] = (*_VALUED, *_SWITCHES)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if argument == SEPARATOR and positional is ours:
            positional = theirs
            options = () if AS_GIVEN in ours else tuple(option for option in _VALUED if option.startswith("--nixl-"))
        elif argument.startswith("-"):
            side = ours if flag in options else theirs
            side.append(argument)
            value_of = side if _takes_next(argument) else None
        else:
            (positional if value_of is None else value_of).append(argument)
            value_of = None
    return ours, theirs


def _takes_next(option: str) -> bool:
    """Return whether the word after an option is its value, as far as this command can know."""
    switches = (*_SWITCHES, *(switch_option.flag for switch_option in OPTIONS if switch_option.switch))
    return option in _SHORT_VALUED or (option.startswith("--") and "=" not in option and option not in switches)


def _run(arguments: argparse.Namespace) -> int:
    theirs = list(arguments.pytest_arguments)
    program = _pytest()
    if arguments.as_given:
        _refuse_choices(arguments)
        if arguments.print:
            print(_shown(program, theirs))
            return 0
        return run_judged([*program, *theirs])
    where = _suite_arguments(arguments.suite)
    if arguments.profile is not None:
        load_profile(arguments.profile)
    chosen = _choose_by(arguments)
    gate = [] if arguments.no_gate else ["--nixl-gate"]
    command_line = [
        *where,
        *gate,
        f"--nixl-level={chosen.level.value}",
        f"--nixl-backend={chosen.backend.value}",
        *_profile_option(chosen.profile.value, arguments.profile, theirs),
        *_page_option(theirs),
        *theirs,
    ]
    print(f"pytest-nixl run: {chosen}")
    remark = chosen.for_gpu_memory()
    if remark and not any(argument.startswith("--nixl-memory") for argument in theirs):
        print(remark)
    if "LIBFABRIC" in chosen.backend.value:
        reads = "; ".join(f"{engine_backend.engine}: {engine_backend.reads}" for engine_backend in ENGINE_BACKENDS)
        print(f"engines use UCX unless they are told otherwise, and none reads {GENERAL_VARIABLE}: {reads}")
    print(_shown(program, command_line))
    if arguments.print:
        return 0
    sys.stdout.flush()
    return run_judged([*program, *command_line])


def _shown(program: Sequence[str], arguments: Sequence[str]) -> str:
    """Return a command as a line of a shell, without secrets."""
    name = Path(program[0]).name if len(program) == 1 else program[0]
    return f"$ {shlex.join([name, *program[1:], *_without_secrets(arguments)])}"


def _profile_option(chosen: str, given: str | None, theirs: Sequence[str]) -> list[str]:
    """Return the option of the profile, unless several ranks have the default one.

    They may be on several hosts, of which the default profile judges nothing; one that is named judges every row.
    """
    several = any(re.match(r"--nixl-ranks(=|$)(?!1$)", argument) for argument in theirs)
    return [] if several and given is None else [f"--nixl-profile={chosen}"]


def _page_option(theirs: Sequence[str]) -> list[str]:
    """Return the option that writes the page, unless the user says which reports to write."""
    arguments = (*theirs, *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    return (
        [] if any(argument.startswith("--nixl-report") for argument in arguments) else [f"--nixl-report={_free(PAGE)}"]
    )


def _free(page: str) -> str:
    """Return the page's name, with the first number for which no page exists: a run overwrites none."""
    name, number = page, 1
    while Path(name).exists():
        number += 1
        name = page.replace(".html", f"-{number}.html")
    return name


def _choose_by(arguments: argparse.Namespace) -> RunChoice:
    facts = None
    level = arguments.level or arguments.named_level
    if arguments.named_level not in (None, level):
        raise ValueError(f"two levels are given, {level} and {arguments.named_level}: expected one")
    if needs_facts(level, arguments.backend):
        try:
            facts = gather(FactsRoot(None), backends=(), etcd="")
        finally:
            close_supervisor()
    return choose(facts, level=level, backend=arguments.backend, profile=arguments.profile)


def _refuse_choices(arguments: argparse.Namespace) -> None:
    """Refuse arguments that choose something together with ``--as-given``.

    :raises ValueError: one of them is given, or no argument of pytest.
    """
    choices = ("level", "named_level", "backend", "profile", "suite", "no_gate")
    if any(getattr(arguments, name) for name in choices):
        raise ValueError(f"{AS_GIVEN} chooses nothing: give the options of pytest after {SEPARATOR} instead")
    if not arguments.pytest_arguments:
        raise ValueError(f"{AS_GIVEN} needs the arguments of pytest after {SEPARATOR}")


def _suite_arguments(suites: Sequence[str]) -> list[str]:
    """Return the arguments with which pytest finds the suites, in a clone or where the plugin is installed.

    :param suites: the names of the suites; none: all.
    :raises ValueError: a suite is not known, or the suites are not installed.
    """
    folder, checks = suites_folder(), check_ids_by_suite()
    if not checks:
        raise ValueError(f"there are no suites in {folder}: install pytest-nixl whole, or run this command in a clone")
    for name in suites:
        if name not in checks:
            raise ValueError(f"{name!r} is not a suite: expected one of {', '.join(checks)}")
    names = list(dict.fromkeys(suites))
    if folder.parent.name == "pytest_nixl":
        return ["--pyargs", *([f"pytest_nixl.suites.{name}" for name in names] or ["pytest_nixl.suites"])]
    directory = Path.cwd()
    shown = folder.relative_to(directory) if directory in folder.parents else folder
    return [str(shown / name) for name in names] or [str(shown)]


def _pytest() -> list[str]:
    """Return the program that is pytest of this Python: the one that ``pytest`` means in a shell, if it is of it."""
    program = shutil.which("pytest")
    folder = os.path.realpath(os.path.dirname(sys.executable))
    if program is not None and os.path.dirname(os.path.realpath(program)) == folder:  # it may be a link to another's
        return [os.path.abspath(program)]
    return [sys.executable, "-m", "pytest"]


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """Hide passwords and tokens in what is printed."""
    options = {option.flag: option for option in OPTIONS}
    secret = {flag for flag, option in options.items() if option.secret}
    shown: list[str] = []
    hide = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if hide or (flag in secret and equals):
            shown.append("***" if hide else f"{flag}=***")
        else:
            # The user and password of a URL are hidden with all that is before them, and so with the option's name.
            shown.append(f"{flag}{equals}{redact(value)}" if flag in options else redact(argument))
        hide = argument in secret
    return shown


def run_judged(command: Sequence[str]) -> int:
    """Run pytest and return its exit code; 1 if it ends with 0 and the plugin did not judge the run.

    SIGTERM, SIGHUP and SIGINT go to pytest, unless the terminal sends it Ctrl-C itself.
    """
    with tempfile.TemporaryDirectory(prefix="nixl-ending-") as folder:
        path = Path(folder) / "ending.json"
        libc = ctypes.CDLL(None)
        child = subprocess.Popen(
            command,
            env={**os.environ, ENDING: str(path)},
            # pytest ends in order if this process is killed
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

        def forward(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGINT or not _in_foreground():
                child.send_signal(number)

        previous = {
            number: signal.signal(number, forward)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        code = child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if code == 0 and read_ending(path) != 0:
            print(f"pytest-nixl run: {_NOT_JUDGED}", file=sys.stderr)
            return 1
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and its children."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
