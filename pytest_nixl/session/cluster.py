# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run, as tests on rank 0 see them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.hosts import Host, LocalHost
from pytest_nixl.processes.supervisor import supervisor

if TYPE_CHECKING:
    from pytest_nixl.cluster.rank_session import RankSession
    from pytest_nixl.etcd_servers.sources import EtcdServer
    from pytest_nixl.session.run import Run


class Cluster:
    """The ranks of a run.

    :param hosts: the hosts on which workers start, by rank. A run of one rank has two entries, both for this host.
    :param rank_session: the session of this rank; None in a run of one rank.
    """

    def __init__(self, hosts: Sequence[Host], rank_session: RankSession | None) -> None:
        self.hosts = hosts
        self._rank_session = rank_session

    @classmethod
    def of(cls, run: Run) -> Cluster:
        """Return the ranks of a run."""
        variables = own_variables(run.settings.programs, memory=run.settings.memory)
        host = LocalHost(supervisor(), 0, own=variables)
        if run.rank_session is None or run.rank_session.driver is None:
            return cls([host, LocalHost(supervisor(), 1, own=variables)], None)
        peers = run.rank_session.driver.peers
        return cls([host, *(peers[rank] for rank in sorted(peers))], run.rank_session)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._rank_session.membership.size if self._rank_session is not None else 1

    @property
    def several(self) -> bool:
        """Whether the run has more than one rank."""
        return self.ranks > 1

    @property
    def names(self) -> list[str]:
        """The name of each rank in messages: ``rank 1 on node-b``."""
        return (
            [self._rank_session.name_of(rank) for rank in range(self.ranks)]
            if self._rank_session is not None
            else ["rank 0"]
        )

    @property
    def host_names(self) -> frozenset[str]:
        """The hosts of the ranks; none in a run of one rank."""
        members = self._rank_session.membership.members if self._rank_session is not None else ()
        return frozenset(member.host for member in members)

    def etcd(self) -> EtcdServer | None:
        """Return the group's etcd if the NIXL agents of all ranks can use it, else None."""
        return self._rank_session.agents_etcd() if self._rank_session is not None else None

    def ask(self, what: str, **arguments: Any) -> list[Any]:
        """Send a request to every rank at the same time, this one included, and return the answers by rank.

        :param what: the name of the request.
        :param arguments: its arguments, as JSON values.
        :raises NixlPluginError: if a rank does not answer, or refuses.
        """
        if self._rank_session is None or self._rank_session.driver is None:
            return []
        with ThreadPoolExecutor(1) as pool:
            own_answer = pool.submit(self._rank_session.services.by_name()[what], **arguments)
            answers = self._rank_session.driver.ask_all(what, **arguments)
        return [own_answer.result(), *(answers[rank] for rank in sorted(answers))]
