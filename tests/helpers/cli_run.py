# SPDX-License-Identifier: Apache-2.0
"""Runs of the suites as a user starts them: a pytest process of its own, from the clone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from helpers.forked_runs import ForkedRun, start_forked

ROOT = Path(__file__).resolve().parents[2]
#: The rows alone; of several ranks, with what is asked of them together.
BANDWIDTH, BANDWIDTH_OF_RANKS = "suites/bandwidth/test_bandwidth.py", "suites/bandwidth"

#: Variables of the machine that would change what a run does.
_STEERING = re.compile(r"(NIXL_|UCX_|FI_|ETCD|SLURM_|OMPI_|PMI_|PYTEST_|WORLD_SIZE$)")

#: The modules of our programs, and a line that starts one of them and has nothing that only a shell understands.
_MODULES = {"pytest": "pytest", "pytest-nixl": "pytest_nixl.cli"}
_LINE = re.compile(r"(?P<variables>(?:\w+=\S* )*)(?P<program>pytest|pytest-nixl)(?: [^&|;<>$`*]*)?")

#: For plugins of inner runs that make a fault: this machine's load does not excuse what comes too late. A double.
NOT_BUSY = """
from pytest_nixl.core.cpu_contention import HostLoad
HostLoad.words = lambda self: ""
"""

#: As a plugin: functions are called in each worker after its agent is made.
_IN_WORKERS = """
from pytest_nixl.nixl.agent import NixlAgent

make = NixlAgent.within_each.__func__
def planted(cls, *arguments, **named):
    agents = make(cls, *arguments, **named)
    for agent in agents:
        for function, given in {calls!r}:
            agent.run(function, **given)
    return agents
NixlAgent.within_each = classmethod(planted)
"""


def in_workers(*calls: tuple[str, Mapping[str, str]]) -> str:
    """Return the text of a plugin that calls functions in each worker after its agent is made, to plant a fault there.

    :param calls: ``module:function`` and its arguments.
    """
    return _IN_WORKERS.format(calls=calls)


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    code: int
    output: str

    @property
    def verdicts(self) -> dict[str, str]:
        """Operation and block size of each row of the table, with its verdict."""
        rows = re.findall(r"^\w+ +(WRITE|READ) +\S+ +(\w+) .* (\S+)$", self.output, re.MULTILINE)
        return {f"{op} {block}": verdict for op, block, verdict in rows}

    def expect(self, code: int, *lines: str, never: Sequence[str] = ()) -> Finished:
        """Assert how the run ended and what it printed; return the run.

        :param code: its exit code.
        :param lines: a text that is in one line of the output; "..." stands for anything.
        :param never: texts that no line may have.
        """
        assert self.code == code, self.output
        for line in lines:
            pattern = ".*".join(re.escape(part) for part in line.split("..."))
            assert re.search(pattern, self.output), f"no line has {line!r}:\n{self.output}"
        for text in never:
            assert text not in self.output, f"a line has {text!r}:\n{self.output}"
        return self


def environment(**changes: str) -> dict[str, str]:
    """Return the environment without what steers a run, and with ``changes``."""
    variables = {name: value for name, value in os.environ.items() if not _STEERING.match(name)}
    return {**variables, **changes}


#: Plugins that no inner run needs. That of hypothesis imports hypothesis at the end of a run, which takes 0.2 s.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def command(*arguments: str, quiet: bool = True) -> list[str]:
    """Return the command line of a run; ``quiet`` leaves pytest-benchmark's own table out."""
    options = [*WITHOUT, *(["--benchmark-quiet"] if quiet else [])]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def run(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    timeout: float = 900,
    quiet: bool = True,
    plugins: Sequence[str] = (),
    fault: str = "",
    fork: bool = True,
) -> Finished:
    """Run pytest with ``plugins`` and wait for its end.

    :param fault: the text of one more plugin, of the name ``fault``, which may import :mod:`helpers`; workers of the
        run can import it, too.
    :param fork: whether it may be forked from a process that has imported Python's modules, as :func:`execute` says.
    """
    names, variables = [*plugins], environment(**(env or {}))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        if fault:
            names.append("fault")
            Path(folder, "fault.py").write_text(fault)
            path = (folder, str(ROOT / "tests"), variables.get("PYTHONPATH"))
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        loaded = [argument for name in names for argument in ("-p", name)]
        code = execute(
            command(*loaded, *arguments, quiet=quiet),
            cwd=directory, env=variables, output=output, errors=output, timeout=timeout, fork=fork,
        )  # fmt: skip
        output.seek(0)
        return Finished(code, output.read())


def execute(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    output: IO[str],
    errors: IO[str],
    timeout: float,
    fork: bool = True,
    host: int = 0,
) -> int:
    """Execute ``python -m MODULE``, or fork it where that is the same (:mod:`helpers.forked_runs`); return its code.

    :param argv: the command line, of :func:`command` or :func:`run_command`.
    :param env: all its variables.
    :param host: the id of the process whose namespaces it enters, or 0.
    """
    if fork:
        started = start_forked(
            argv[3:], cwd=cwd, env=env, output=output.fileno(), errors=errors.fileno(), host=host, module=argv[2]
        )
        if started is not None:
            try:
                return started.wait(timeout)
            finally:
                started.kill()
                started.wait()
    done = subprocess.run(
        [*enter(host), *argv], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
        timeout=timeout, check=False,
    )  # fmt: skip
    return done.returncode


def start(*arguments: str, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes] | ForkedRun:
    """Start a run whose output goes to the file ``log``; it is forked where that is the same, as by :func:`execute`."""
    argv, variables = command(*arguments), environment(**(env or {}))
    with log.open("wb") as output:
        started = start_forked(argv[3:], cwd=ROOT, env=variables, output=output.fileno(), errors=output.fileno())
        return started or subprocess.Popen(
            argv, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )


def run_command(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    host: int = 0,
    fork: bool = True,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run ``pytest-nixl`` from the clone, and wait for its end.

    :param env: changes to the variables, of :func:`environment`.
    :param prefix: a command that executes it, which then is not forked.
    :param host: as for :func:`execute`.
    :param fork: whether it may be forked, as for :func:`execute`.
    """
    argv = [sys.executable, "-m", "pytest_nixl.cli", *arguments]
    variables = environment(**(env or {}))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = execute(
            [*prefix, *argv], cwd=ROOT, env=variables, output=output, errors=errors, timeout=timeout,
            fork=fork and not prefix, host=host,
        )  # fmt: skip
        for stream in (output, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(argv, code, output.read(), errors.read())


def parse_line(line: str) -> tuple[dict[str, str], list[str]] | None:
    """Return the variables and the command line of a printed line that starts ``pytest`` or ``pytest-nixl``.

    :param line: as a user types it; a comment is left out.
    :returns: what :func:`execute` takes, or None if a shell must run the line.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    words = shlex.split(line, comments=True)
    variables = dict(word.split("=", 1) for word in words[: match["variables"].count(" ")])
    return variables, [sys.executable, "-m", _MODULES[match["program"]], *words[len(variables) + 1 :]]


def enter(host: int) -> list[str]:
    """Return what a command is started with to enter the namespaces of a process; nothing if ``host`` is 0."""
    return ["nsenter", f"--target={host}", "--net", "--uts", "--mount", f"--wd={ROOT}"] if host else []


def bandwidth(
    *arguments: str, env: Mapping[str, str] | None = None, blocks: str = "64KiB", fault: str = ""
) -> Finished:
    """Run the bandwidth suite on few blocks, as on a machine where no other process uses a row's cores."""
    return run(BANDWIDTH, f"--nixl-blocks={blocks}", *arguments, fault=fault, **undisturbed(env))


def undisturbed(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of :func:`run` that load ``helpers.no_contention`` in a run with ``env``."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), (env or {}).get("PYTHONPATH")]))
    return {"plugins": ("helpers.no_contention",), "env": {**(env or {}), "PYTHONPATH": path}}


def repeats() -> range:
    """How often a test that is marked ``soak`` is made: once in CI, a hundred times in ``tox -e soak``."""
    return range(int(os.environ.get("PYTEST_NIXL_REPEAT", "1")))


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether ``condition`` comes true in time, even on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def junit_suite(path: Path) -> ElementTree.Element:
    """Return the test suite of a JUnit file that its schema allows."""
    import xmlschema

    xmlschema.XMLSchema(ROOT / "tests" / "junit.xsd").validate(path)
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    return suite


def profile(path: Path, expectation: str, *, required: str = "") -> str:
    """Write a profile with one expectation, and return its path; ``required`` is a list of checks as TOML."""
    checks = f"[required]\nchecks = {required}\n" if required else ""
    path.write_text(
        f'[profile]\nname = "test"\nsummary = "made by a test"\n{checks}'
        f'[[expect]]\n{expectation}\nsource = "made by a test"\n'
    )
    return str(path)
