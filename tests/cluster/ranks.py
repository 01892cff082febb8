# SPDX-License-Identifier: Apache-2.0
"""Run commands at the same time, one on each host, as on the nodes of a cluster; and read their reports."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.cli_run import ROOT, Finished, environment, eventually
from helpers.forked_runs import ForkedRun, start_forked
from helpers.namespaces import Host, Network, network, require_tools

#: Seconds for a run of pytest on all ranks: many times what it takes on an idle machine.
PATIENCE = 1500.0
#: The number of characters that an error shows from the end of a rank's output.
SHOWN = 3000


def hosts(*names: str) -> Any:
    """Return a fixture ``net`` for a module: a network with hosts of these names."""

    @pytest.fixture(scope="module")
    def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
        require_tools()
        with network(tmp_path_factory.mktemp("network"), *names) as network_hosts:
            yield network_hosts

    return net


class Ranks:
    """Commands in the order in which they were started. Those that still run at the end of the block are killed.

    :param folder: gets ``rank-K.log`` and a folder for temporary files for each command.
    :param env: variables of all commands.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._env = dict(env or {})
        self._processes: list[subprocess.Popen[bytes] | ForkedRun] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def start(self, host: Host, *command: str, **env: str) -> int:
        """Start a command on a host, and return its process id."""
        variables = self._variables(env)
        self._processes.append(host.start(*command, log=self._log(len(self._processes)), env=variables))
        return self._processes[-1].pid

    def start_run(self, host: Host, *command: str, **env: str) -> int:
        """Start a run of pytest on a host, forked if it can be (:mod:`helpers.forked_runs`); return its process id.

        It is for tests that judge no figures.
        """
        variables = self._variables(env)
        with self._log(len(self._processes)).open("wb") as file:
            started = start_forked(
                command[3:], cwd=ROOT, env=variables, output=file.fileno(), errors=file.fileno(), host=host.pid
            )
        if started is None:
            return self.start(host, *command, **env)
        self._processes.append(started)
        return started.pid

    def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
        temporary = self._folder / f"rank-{len(self._processes)}"
        temporary.mkdir(exist_ok=True)
        return environment(**{"TMPDIR": str(temporary), **self._env, **env})

    def output(self, number: int) -> str:
        """Return what a command has written so far."""
        return self._log(number).read_text(errors="replace")

    def finish(self, seconds: float = PATIENCE) -> list[Finished]:
        """Wait until all commands have ended, and check that none leaves a temporary file.

        :raises AssertionError: names the command that did not end, with the last output of each.
        """
        deadline = time.monotonic() + seconds
        codes = []
        for number, process in enumerate(self._processes):
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {number} still runs after {seconds:g} s\n{self._last_words()}") from None
        # A daemon of mpirun may end, and remove its folder, a moment after mpirun.
        eventually(lambda: not any(self._folder.glob("rank-*/*")), 20)
        remaining = [str(path) for path in sorted(self._folder.glob("rank-*/*"))]
        assert not remaining, f"temporary files are left: {remaining}\n{self._last_words()}"
        return [Finished(code, self.output(number)) for number, code in enumerate(codes)]

    def _log(self, number: int) -> Path:
        return self._folder / f"rank-{number}.log"

    def _last_words(self) -> str:
        return _last_words((process.poll(), self.output(n)) for n, process in enumerate(self._processes))


def run_ranks(
    hosts: Sequence[Host],
    folder: Path,
    *command: str,
    rank_arguments: Sequence[Sequence[str]] = (),
    fork: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Run one command on every host at the same time, and wait until all have ended.

    :param rank_arguments: the options that each host has in addition.
    :param fork: whether a run of pytest may be forked: not if its figures are judged.
    """
    with Ranks(folder, env) as ranks:
        start = ranks.start_run if fork and command[1:3] == ("-m", "pytest") else ranks.start
        for number, host in enumerate(hosts):
            start(host, *command, *(rank_arguments[number] if rank_arguments else ()))
        return ranks.finish()


def numbered(ranks: int) -> list[list[str]]:
    """Return the options that number the ranks."""
    return [[f"--nixl-rank={rank}"] for rank in range(ranks)]


def _last_words(ranks: Iterable[tuple[int | None, str]]) -> str:
    """Return the exit code of each command, None if it still runs, and its last output."""
    return "\n".join(f"rank {n}, exit code {code}:\n{output[-SHOWN:]}" for n, (code, output) in enumerate(ranks))


def all_end_with(code: int, done: Sequence[Finished]) -> None:
    """Assert that all commands ended with this exit code."""
    assert {ended.code for ended in done} == {code}, _last_words((ended.code, ended.output) for ended in done)


def report_options(folder: Path) -> list[str]:
    """Return the options that make every rank write its reports to one shared folder."""
    return [f"--nixl-log-dir={folder / 'logs'}", f"--junitxml={folder / 'run.xml'}"]


def reports(folder: Path, ranks: int, *, logs: str = "logs", junit: str = "run") -> list[dict[str, Any]]:
    """Return the ``verdict.json`` of each rank, after a check that every rank left that file and a JUnit file.

    :param logs: the folder of --nixl-log-dir in ``folder``.
    :param junit: the name of rank 0's JUnit file in ``folder``, without ``.xml``.
    """
    names = {f"{junit}.xml", *(f"{junit}.rank{rank}.xml" for rank in range(1, ranks))}
    assert {path.name for path in folder.glob("*.xml")} == names
    for name in names:
        assert int(ElementTree.parse(folder / name).getroot()[0].attrib["tests"]) > 0
    paths = [folder / logs / f"rank-{rank}" / "verdict.json" for rank in range(ranks)]
    assert set((folder / logs).glob("rank-*/verdict.json")) == set(paths)
    documents = [json.loads(path.read_text()) for path in paths]
    rank_fields = ("rank", "host", "pid", "fault")
    shared_fields = [{name: value for name, value in report.items() if name not in rank_fields} for report in documents]
    assert all(report == shared_fields[0] for report in shared_fields), "every rank reports the same verdict"
    return documents
