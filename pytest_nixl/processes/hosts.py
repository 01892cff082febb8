# SPDX-License-Identifier: Apache-2.0
"""Where workers are started: on this host, or on a peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pytest_nixl.processes.local_process import LocalProcess
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_process import START_SECONDS, Worker


class Host(Protocol):
    """A rank, as somewhere to start workers."""

    rank: int

    def start(
        self,
        role: str,
        environment: Mapping[str, str | None],
        timeout: float,
        start_timeout: float = START_SECONDS,
    ) -> Worker:
        """Start a worker; it is waited for when it is first asked.

        :param role: ``initiator``, ``target``, ``agent`` or ``tool``.
        :param environment: what differs from that rank's own variables; None unsets one.
        :param timeout: seconds that any step of it may take.
        :param start_timeout: seconds that it may take to start, and to make an agent.
        """
        ...


class LocalHost:
    """The host of this process.

    :param rank: the rank that its workers work for: with no cluster this process starts its one peer's as well.
    :param prefix: a command that becomes the worker, such as ``nsenter --net=FILE``: it must not fork.
    :param own: variables of its workers that say where programs of other projects are, as
        :func:`~pytest_nixl.model.tools.own_variables` makes them; None: that is left to PATH.
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

    def start(
        self,
        role: str,
        environment: Mapping[str, str | None],
        timeout: float,
        start_timeout: float = START_SECONDS,
    ) -> Worker:
        """Start a worker as a child of this process."""
        process = LocalProcess(self._supervisor, f"rank{self.rank}-{role}", {**environment, **self._own}, self._prefix)
        return Worker(process, rank=self.rank, role=role, timeout=timeout, start_timeout=start_timeout)
