# SPDX-License-Identifier: Apache-2.0
"""Commands that run at the same time, one on each host, as on a cluster's nodes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hosts import Host
from runs import Finished, environment

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

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def start(self, host: Host, *command: str, **env: str) -> int:
        """Start the next rank's command on a host; return its process id."""
        number = len(self._processes)
        temporary = self._folder / f"rank-{number}"
        temporary.mkdir()
        variables = environment(**{"TMPDIR": str(temporary), **self._env, **env})
        self._processes.append(host.start(*command, log=self._log(number), env=variables))
        return self._processes[-1].pid

    def output(self, number: int) -> str:
        """Return what a rank has written by now."""
        return self._log(number).read_text(errors="replace")

    def finish(self, seconds: float) -> list[Finished]:
        """Wait for all of them, and that none leaves a temporary file. :raises AssertionError: with who did not end."""
        deadline = time.monotonic() + seconds
        for number, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {number} still runs after {seconds:g} s\n{self._last_lines()}") from None
        left = [str(path) for path in sorted(self._folder.glob("rank-*/*"))]
        assert not left, f"temporary files are left: {left}\n{self._last_lines()}"
        return [Finished(process.returncode, self.output(number)) for number, process in enumerate(self._processes)]

    def _log(self, number: int) -> Path:
        return self._folder / f"rank-{number}.log"

    def _last_lines(self) -> str:
        shown = (f"rank {n} ({p.poll()}):\n{self.output(n)[-SHOWN:]}" for n, p in enumerate(self._processes))
        return "\n".join(shown)
