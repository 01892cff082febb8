# SPDX-License-Identifier: Apache-2.0
"""A group of nixlbench in an etcd: its keys, whether the etcd still answers, and the clean-up.

nixlbench itself does not report a lost etcd: its processes wait for keys that cannot come. A thread watches the etcd.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress

from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.sources import EtcdServer
from pytest_nixl.processes.supervisor import SupervisorClient, SupervisorError

#: Maximum number of keys that a message names.
_NAMED = 6
#: Seconds between two requests for the keys.
EVERY = 0.2
#: Timeout of a request in seconds. An etcd that is silent for longer is not just slow.
ANSWER_SECONDS = 7.0
#: Seconds for which an etcd must refuse all connections to count as gone. A restart takes less.
REFUSED_SECONDS = 5.0
#: Seconds by which a failed request may exceed its timeout. If it takes longer, this host is too busy to judge.
LATE_SECONDS = 3.0
#: Seconds without an answer after which the state of an etcd of this run is checked.
SUSPICIOUS_SECONDS = 1.0


class EtcdWatch:
    """Polls the keys of a group while its ``with`` block runs.

    :param endpoint: URLs of the etcd, plaintext and without credentials.
    :param prefix: prefix of the group's keys.
    :param our_server: the etcd, if this run started it. As long as it has neither ended nor been stopped, it only
        counts as slow and is never reported.
    """

    def __init__(self, endpoint: str, prefix: str, our_server: EtcdServer | None = None) -> None:
        self.endpoint = endpoint
        #: The keys of the group in the last answer.
        self.keys: frozenset[str] = frozenset()
        #: Why the last request failed; empty if it succeeded.
        self.last_failure = ""
        self._prefix = prefix
        self._our_server = our_server
        #: Timeout of one member in seconds, so that all members together need the time of one answer.
        self._seconds = ANSWER_SECONDS / len(parse_endpoints(endpoint))
        self._trouble: EtcdError | None = None
        self._answered = False
        self._failing_since: float | None = None
        self._asked_at: float | None = None
        self._looked_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd of nixlbench", daemon=True)

    def __enter__(self) -> EtcdWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Do not wait: a hanging request ends by its own timeout.
        self._stop.set()

    def trouble(self) -> EtcdError | None:
        """Return an error if the etcd answered before and is now gone; otherwise None."""
        now, asked_at = time.monotonic(), self._asked_at
        hangs = asked_at is not None and now - asked_at > SUSPICIOUS_SECONDS
        if self._trouble is None and hangs and now - self._looked_at > SUSPICIOUS_SECONDS:
            self._looked_at = now
            self._trouble = self._own_ended()
        return self._trouble

    def settled(self, seconds: float) -> EtcdError | None:
        """Return the same as :meth:`trouble`, but wait up to ``seconds`` if the etcd is not answering now."""
        deadline = time.monotonic() + seconds
        while (trouble := self.trouble()) is None and time.monotonic() < deadline:
            asked_at = self._asked_at
            if self._failing_since is None and (asked_at is None or time.monotonic() - asked_at < SUSPICIOUS_SECONDS):
                return None
            time.sleep(0.05)
        return trouble

    def _run(self) -> None:
        with connect(parse_endpoints(self.endpoint), timeout=self._seconds) as client:
            while not self._stop.wait(EVERY):
                start = self._asked_at = time.monotonic()
                try:
                    self.keys = frozenset(client.get_prefix(self._prefix))
                except EtcdError as error:
                    self._failed(error, start)
                except (ValueError, KeyError, TypeError) as error:
                    # Any client can write malformed keys, so this does not mean that the etcd is gone.
                    self.last_failure = f"the keys under {self._prefix} are malformed: {type(error).__name__}"
                else:
                    self._answered, self._failing_since, self.last_failure = True, None, ""
                finally:
                    self._asked_at = None
                if self._trouble is not None:
                    return

    def _failed(self, error: EtcdError, start: float) -> None:
        self.last_failure = error.reason
        if not self._answered:
            return  # It never answered: nixlbench reports that itself.
        if (ended := self._own_ended()) is not None:
            self._trouble = ended
            return
        now, silent = time.monotonic(), error.cause == "timeout"
        if now - start > (ANSWER_SECONDS if silent else 0.0) + LATE_SECONDS:
            self._failing_since = None
            return
        if self._failing_since is None:
            self._failing_since = start
        if silent and self._our_server is not None:
            return  # The etcd of this run is still running: it is only slow.
        if silent or now - self._failing_since >= REFUSED_SECONDS:
            self._trouble = error

    def _own_ended(self) -> EtcdError | None:
        if self._our_server is None:
            return None
        try:
            dead = self._our_server.death_reason()
            cause = dead or self._our_server.silence_reason()
        except NixlPluginError as error:
            dead = cause = f"{error.reason}\n{error.detail}"
        if cause is None:
            return None
        reason, _, lines = cause.partition("\n")
        return EtcdError(reason, "", lines, cause="died" if dead else "stopped", endpoint=self.endpoint)


class Group:
    """A group with a new name, so that it cannot contain keys of another run.

    Except for the keys of the ranks, its keys have no lease, so they would stay after a crash. This class deletes them,
    or, if the etcd does not answer then, the supervisor at the end of the run. Keys of other groups are never touched.

    :param client: client of the etcd.
    :param endpoint: URLs of the etcd, without credentials: nixlbench sends none.
    :param supervisor: the supervisor, which deletes the keys if this process is killed.
    :param our_server: the etcd, if this run started it.
    """

    def __init__(
        self,
        client: EtcdClient,
        endpoint: str,
        supervisor: SupervisorClient,
        *,
        our_server: EtcdServer | None = None,
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
        self._our_server = our_server
        self._watch = EtcdWatch(endpoint, self.prefix, our_server)

    def __enter__(self) -> Group:
        if self._our_server is None:  # the run's own etcd ends with its keys
            self._supervisor.watch_prefix(self.prefix, self._endpoints)
        self._watch.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._watch.__exit__()
        if self._watch.trouble() is not None:
            return
        try:
            self._client.delete_prefix(self.prefix)
        except EtcdError:
            if error is None:
                raise
            return
        if self._our_server is None:
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

    def remaining_keys(self) -> str:
        """Describe the keys that are probably left in an etcd that does not answer."""
        keys = sorted(key.removeprefix(self.prefix) for key in self._watch.keys)
        shown = ", ".join(ascii(key)[1:-1] for key in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        count = "1 key" if len(keys) == 1 else f"{len(keys)} keys"
        return f"{count} under {self.prefix} ({shown}{more})" if keys else f"keys under {self.prefix}"
