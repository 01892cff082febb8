# SPDX-License-Identifier: Apache-2.0
"""Commands that run at the same time, one on each host, as on a cluster's nodes; and what they leave."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.etree import ElementTree

from helpers.cli_run import Finished, environment
from helpers.namespaces import Host

#: Seconds for a run of pytest on all ranks: several times what it takes where nothing else runs.
PATIENCE = 480.0
#: Characters of a rank's output that an error shows: the last ones.
SHOWN = 3000


class Ranks:
    """Commands in the order in which they were started; what still runs at the end of the block is killed.

    :param folder: for ``rank-K.log``, and a folder for temporary files of each.
    :param env: what all of them have in their environment.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._env = dict(env or {})
        self._processes: list[subprocess.Popen[bytes]] = []
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
        """Start one more command on a host; return its process id."""
        number = len(self._processes)
        temporary = self._folder / f"rank-{number}"
        temporary.mkdir()
        variables = environment(**{"TMPDIR": str(temporary), **self._env, **env})
        self._processes.append(host.start(*command, log=self._log(number), env=variables))
        return self._processes[-1].pid

    def output(self, number: int) -> str:
        """Return what a command has written by now."""
        return self._log(number).read_text(errors="replace")

    def finish(self, seconds: float = PATIENCE) -> list[Finished]:
        """Wait for all of them, and see that none leaves a temporary file.

        :raises AssertionError: with which of them did not end, and what each wrote last.
        """
        deadline = time.monotonic() + seconds
        for number, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {number} still runs after {seconds:g} s\n{self._last_words()}") from None
        left = [str(path) for path in sorted(self._folder.glob("rank-*/*"))]
        assert not left, f"temporary files are left: {left}\n{self._last_words()}"
        return [Finished(process.returncode, self.output(number)) for number, process in enumerate(self._processes)]

    def _log(self, number: int) -> Path:
        return self._folder / f"rank-{number}.log"

    def _last_words(self) -> str:
        return _last_words((process.poll(), self.output(n)) for n, process in enumerate(self._processes))


def run_ranks(
    hosts: Sequence[Host], folder: Path, *command: str, seconds: float = PATIENCE, env: Mapping[str, str] | None = None
) -> list[Finished]:
    """Run one command on each host at the same time, and wait for all of them."""
    with Ranks(folder, env) as ranks:
        for host in hosts:
            ranks.start(host, *command)
        return ranks.finish(seconds)


def _last_words(ranks: Iterable[tuple[int | None, str]]) -> str:
    """Say how each has ended, None where it has not, and what it wrote last."""
    return "\n".join(f"rank {n}, exit code {code}:\n{output[-SHOWN:]}" for n, (code, output) in enumerate(ranks))


def all_end_with(code: int, done: Sequence[Finished]) -> None:
    """Assert that they ended alike."""
    assert {one.code for one in done} == {code}, _last_words((one.code, one.output) for one in done)


def report_options(folder: Path) -> list[str]:
    """Return the options by which every rank leaves its reports in one folder, which all share."""
    return [f"--nixl-log-dir={folder / 'logs'}", f"--junitxml={folder / 'run.xml'}"]


def reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return each rank's ``verdict.json``, in order; every rank has left that and a JUnit file, whole."""
    junit = {"run.xml", *(f"run.rank{rank}.xml" for rank in range(1, ranks))}
    assert {path.name for path in folder.glob("*.xml")} == junit
    for name in junit:
        assert int(ElementTree.parse(folder / name).getroot()[0].attrib["tests"]) > 0
    names = {f"rank-{rank}" for rank in range(ranks)}
    assert {path.parent.name for path in folder.glob("logs/*/verdict.json")} == names
    found = [json.loads((folder / "logs" / f"rank-{rank}" / "verdict.json").read_text()) for rank in range(ranks)]
    own = ("rank", "host", "pid", "fault")
    told = [{name: value for name, value in report.items() if name not in own} for report in found]
    assert all(report == told[0] for report in told), "every rank tells the same verdict"
    return found
