# SPDX-License-Identifier: Apache-2.0
"""Hosts on which workers are started: this host, or that of a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from pytest_nixl.processes.local_process import LocalProcess
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_parent import parent_of_workers
from pytest_nixl.processes.worker_process import START_SECONDS, Process, Worker

#: The roles whose figures decide the verdicts of rows. Each of them is a new Python, with addresses of its own.
MEASURED = ("initiator", "target", "flows")
#: The role of the worker that reads facts. If it is the first of a run, it is executed: to fork it, this process would
#: have to wait until there is a process to fork from.
FACTS = "facts"


def start_process(
    supervisor: SupervisorClient,
    rank: int,
    role: str,
    environment: Mapping[str, str | None],
    prefix: Sequence[str] = (),
) -> LocalProcess:
    """Start the process of a worker on this host. It is not forked if its role is one of :data:`MEASURED`.

    :param role: as for :meth:`Host.start`.
    :param environment: changes to this process's environment variables; None unsets one.
    :param prefix: a command that replaces itself by the worker, such as ``nsenter --net=FILE``.
    """
    fork = bool(parent_of_workers()) if role == FACTS else role not in MEASURED
    return LocalProcess(supervisor, f"rank{rank}-{role}", environment, prefix, fork=fork)


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
        return start_process(self._supervisor, self.rank, role, {**environment, **self._own}, self._prefix)
