# SPDX-License-Identifier: Apache-2.0
"""A group of nixlbench in an etcd: its keys, from before its first process starts until after its last has ended."""

from __future__ import annotations

import secrets
from contextlib import suppress
from types import TracebackType

from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.etcd_watch import EtcdWatch, OwnEtcd, Removal
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError

#: Keys that a message names.
_NAMED = 6
#: Seconds that the end of the run waits for an etcd that does not answer, before it leaves the keys to the supervisor.
_LAST_TRY = 1.0


class Group:
    """A group with a name that was never used: no key of another run can be in it.

    Its keys have no lease, but for the ranks', so that nobody else would remove them after a crash. Those of other
    groups are never touched.

    :param endpoint: the etcd's URLs, without credentials: nixlbench sends none.
    :param supervisor: removes the keys where this process is killed.
    :param own: the etcd, if this run has started it.
    :param removals: gets what removes the keys later, if the etcd does not answer at the end.
    """

    def __init__(
        self,
        client: EtcdClient,
        endpoint: str,
        supervisor: SupervisorClient,
        *,
        own: OwnEtcd | None = None,
        removals: list[Removal] | None = None,
    ) -> None:
        self.name = f"pytest-nixl-{secrets.token_hex(8)}"
        #: What each of its keys begins with.
        self.prefix = f"xferbench/{self.name}/"
        self.meeting = Meeting(
            "ETCD", {"runtime_type": "ETCD", "etcd_endpoints": endpoint, "benchmark_group": self.name}
        )
        self._client = client
        self.endpoint = endpoint
        self._endpoints = parse_endpoints(endpoint)
        self._supervisor = supervisor
        self._removals = removals if removals is not None else []
        self._watch = EtcdWatch(endpoint, self.prefix, own)

    def __enter__(self) -> Group:
        self._supervisor.watch_prefix(self.prefix, self._endpoints)
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        try:
            gone = self._watch.trouble()
            if gone is None:
                self._client.delete_prefix(self.prefix)
            if gone is None or gone.cause == "died":  # what it had has gone with it
                self._forget()
                return
        except EtcdError:
            if error is None:
                raise
        # An etcd that does not answer would hold us up. The supervisor tries at the end of the run, too.
        self._removals.append(Removal(self.endpoint, self.prefix, self._forget))

    def _forget(self) -> None:
        with suppress(SupervisorError):  # it has ended with the run
            self._supervisor.unwatch_prefix(self.prefix, self._endpoints)

    def registered(self, rank: int) -> bool:
        """Whether a process was registered as this rank when the etcd answered last."""
        return f"{self.prefix}/rank/{rank}" in self._watch.keys

    def trouble(self, seconds: float = 0.0) -> EtcdError | None:
        """Return why the etcd, which was there before, is gone; wait ``seconds`` if it does not answer just now."""
        return self._watch.settled(seconds) if seconds else self._watch.trouble()

    @property
    def failure(self) -> str:
        """Why the etcd did not answer when it was asked last; empty: it did."""
        return self._watch.last_failure

    def left_behind(self) -> str:
        """Name the keys that are in an etcd that does not answer any more, as far as they are known."""
        keys = sorted(key.removeprefix(self.prefix) for key in self._watch.keys)
        shown = ", ".join(ascii(key)[1:-1] for key in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        return f"{len(keys)} keys under {self.prefix} ({shown}{more})" if keys else f"keys under {self.prefix}"


def finish_removals(removals: list[Removal]) -> None:
    """Try once more to remove what is left; what then stays is the supervisor's."""
    for removal in removals:
        removal.close(_LAST_TRY)
    removals.clear()
