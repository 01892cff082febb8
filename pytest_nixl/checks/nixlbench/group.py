# SPDX-License-Identifier: Apache-2.0
"""A group of nixlbench in an etcd, with the clean-up of its keys."""

from __future__ import annotations

import secrets
from contextlib import suppress

from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.etcd_watch import EtcdWatch, Removal
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError

#: Maximum number of keys that a message names.
_NAMED = 6
#: Seconds that the end of the run waits for a silent etcd before it leaves the keys to the supervisor.
_LAST_TRY = 1.0


class Group:
    """A group with a new name, so that it cannot contain keys of another run.

    Except for the keys of the ranks, its keys have no lease, so they would stay after a crash. This class deletes them,
    and never touches the keys of other groups.

    :param client: client of the etcd.
    :param endpoint: URLs of the etcd, without credentials: nixlbench sends none.
    :param supervisor: the supervisor, which deletes the keys if this process is killed.
    :param own: the etcd, if this run started it.
    :param removals: gets a :class:`Removal` if the etcd does not answer at the end.
    """

    def __init__(
        self,
        client: EtcdClient,
        endpoint: str,
        supervisor: SupervisorClient,
        *,
        own: EtcdServer | None = None,
        removals: list[Removal] | None = None,
    ) -> None:
        self.name = f"pytest-nixl-{secrets.token_hex(8)}"
        #: Prefix of all its keys.
        self.prefix = f"xferbench/{self.name}/"
        self.meeting = Meeting(
            "ETCD", {"runtime_type": "ETCD", "etcd_endpoints": endpoint, "benchmark_group": self.name}
        )
        self._client = client
        self.endpoint = endpoint
        self._endpoints = parse_endpoints(endpoint)
        self._supervisor = supervisor
        self._own = own
        self._removals = removals if removals is not None else []
        self._watch = EtcdWatch(endpoint, self.prefix, own)

    def __enter__(self) -> Group:
        if self._own is None:  # the run's own etcd ends with its keys
            self._supervisor.watch_prefix(self.prefix, self._endpoints)
        self._watch.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._watch.__exit__()
        try:
            gone = self._watch.trouble()
            if gone is None:
                self._client.delete_prefix(self.prefix)
            if gone is None or gone.cause == "died":  # its data ended with it
                self._forget()
                return
        except EtcdError:
            if error is None:
                raise
        # Do not wait for a silent etcd. The supervisor also tries at the end of the run.
        self._removals.append(Removal(self.endpoint, self.prefix, self._forget))

    def _forget(self) -> None:
        with suppress(SupervisorError):  # the supervisor may have ended
            self._supervisor.unwatch_prefix(self.prefix, self._endpoints)

    def registered(self, rank: int) -> bool:
        """Whether a process had registered as this rank at the last answer of the etcd."""
        return f"{self.prefix}/rank/{rank}" in self._watch.keys

    def trouble(self, seconds: float = 0.0) -> EtcdError | None:
        """Return an error if the etcd answered before and is now gone; wait up to ``seconds`` if it is silent now."""
        return self._watch.settled(seconds) if seconds else self._watch.trouble()

    @property
    def failure(self) -> str:
        """Why the last request to the etcd failed; empty if it succeeded."""
        return self._watch.last_failure

    def left_behind(self) -> str:
        """Describe the keys that are probably left in an etcd that does not answer."""
        keys = sorted(key.removeprefix(self.prefix) for key in self._watch.keys)
        shown = ", ".join(ascii(key)[1:-1] for key in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        return f"{len(keys)} keys under {self.prefix} ({shown}{more})" if keys else f"keys under {self.prefix}"


def finish_removals(removals: list[Removal]) -> None:
    """Try once more to delete the remaining keys. The supervisor deletes those that still remain."""
    for removal in removals:
        removal.close(_LAST_TRY)
    removals.clear()
