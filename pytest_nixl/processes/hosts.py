# SPDX-License-Identifier: Apache-2.0
"""Hosts on which workers are started: this host, or that of a peer; and a worker's process on this host."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_nixl.core.resource_limits import file_fault, let_end_first
from pytest_nixl.model.tools import RUN_DIRECTORY
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError
from pytest_nixl.processes.worker_parent import (
    BLAS_THREADS,
    SCRIPT,
    ForkedWorker,
    fork_worker,
    parent_of_workers,
)
from pytest_nixl.processes.worker_process import START_SECONDS, Process, Worker

#: The roles whose figures decide the verdicts of rows. Each of them is a new Python, with addresses of its own.
MEASURED = ("initiator", "target", "flows")
#: The role of the worker that reads facts. If it is the first of a run, it is executed: to fork it, this process would
#: have to wait until there is a process to fork from.
FACTS = "facts"
#: Errors of a host that gives too little of something.
_SCARCE = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


class Host(ABC):
    """A rank on whose host workers are started."""

    rank: int

    def start(
        self,
        role: str,
        environment: Mapping[str, str | None],
        timeout: float,
        start_timeout: float = START_SECONDS,
    ) -> Worker:
        """Start a worker without waiting for it; its first request waits.

        :param role: names the worker in messages and its log, such as ``agent``. A role of :data:`MEASURED` is
            never forked.
        :param environment: changes to that rank's environment variables; None unsets one.
        :param timeout: the deadline of each step, in seconds.
        :param start_timeout: the deadline to start, and to create an agent, in seconds.
        :raises NixlPluginError: the process cannot be started.
        """
        process = self._new_process(role, environment, start_timeout)
        return Worker(process, rank=self.rank, role=role, timeout=timeout, start_timeout=start_timeout)

    @abstractmethod
    def _new_process(self, role: str, environment: Mapping[str, str | None], start_timeout: float) -> Process:
        """Start the process of a worker."""


class LocalHost(Host):
    """The host of this process.

    :param supervisor: the supervisor that ends workers if this process is killed.
    :param rank: the rank of its workers. Without a cluster this process also starts the workers of rank 1.
    :param prefix: a command that replaces itself by the worker, such as ``nsenter --net=FILE``.
    :param own: variables with the paths of external programs, from
        :func:`~pytest_nixl.model.tools.own_variables`; None to search PATH.
    """

    def __init__(
        self,
        supervisor: SupervisorClient,
        rank: int = 0,
        prefix: Sequence[str] = (),
        own: Mapping[str, str | None] | None = None,
    ) -> None:
        self.rank = rank
        self._own = own or {}
        self._supervisor = supervisor
        self._prefix = prefix

    def _new_process(self, role: str, environment: Mapping[str, str | None], start_timeout: float) -> Process:
        return LocalProcess(self._supervisor, self.rank, role, {**environment, **self._own}, self._prefix)


class LocalProcess:
    """A worker as a child of this process, which ends with it.

    It is a new Python if its role is one of :data:`MEASURED`, else forked from a process with Python's modules.

    :param supervisor: the supervisor that ends the worker if this process is killed.
    :param role: as for :meth:`Host.start`.
    :param environment: changes to this process's environment variables; None unsets one.
    :param prefix: a command that executes the worker without forking, such as ``nsenter --net=FILE``.
    """

    here = True

    def __init__(
        self,
        supervisor: SupervisorClient,
        rank: int,
        role: str,
        environment: Mapping[str, str | None],
        prefix: Sequence[str] = (),
    ) -> None:
        self._supervisor = supervisor
        fork = not prefix and (bool(parent_of_workers()) if role == FACTS else role not in MEASURED)
        if BLAS_THREADS not in os.environ:
            environment = {BLAS_THREADS: "1", **environment}
        if not prefix:  # a namespace that the prefix enters may have another /dev/shm
            environment = {**_own_segments(supervisor), **environment}
        environment = {**environment, RUN_DIRECTORY: str(supervisor.directory)}
        whole = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        self.log = _new_log(supervisor.directory, f"rank{rank}-{role}")
        self.channel, theirs = socket.socketpair()
        try:
            with theirs, self.log.open("wb") as log:
                forked = fork_worker(supervisor, theirs, log, whole) if fork else None
                self._process: ForkedWorker | subprocess.Popen[bytes] = forked or subprocess.Popen(
                    [*prefix, sys.executable, str(SCRIPT), str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=whole,
                    start_new_session=True,
                )
        except BaseException as error:
            self.channel.close()
            if isinstance(error, OSError) and error.errno in _SCARCE:
                reason, remedy = file_fault(error)
                raise SupervisorError(f"a worker cannot be started: {reason}", remedy) from None
            raise
        let_end_first(self._process.pid)
        supervisor.watch_process(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float | None = None) -> int | None:
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        self.channel.close()
        self._supervisor.unwatch_process(self.pid)

    def state(self) -> str:
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return _STATES.get(letter, f"in state {letter}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted (a driver or a file system)",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


#: UCX takes this directory instead of /dev/shm for its segments, which are gone as soon as they are mapped: but a
#: process that is killed in the instant between leaves one.
_SEGMENTS = "UCX_POSIX_DIR"


def _own_segments(supervisor: SupervisorClient) -> dict[str, str]:
    """Return where UCX is to make its shared memory, so that what a killed worker leaves is known to be ours."""
    if _SEGMENTS in os.environ or not supervisor.shared_memory:
        return {}
    return {_SEGMENTS: supervisor.shared_memory}


def _new_log(directory: Path, name: str) -> Path:
    """Create an empty log file with the first free number, also if other threads do the same."""
    for number in itertools.count():
        path = directory / f"{name}-{number}.log"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            reason, remedy = file_fault(error)
            raise SupervisorError(f"the log of a worker cannot be made: {reason}", remedy) from None
    raise AssertionError("numbers do not end")
