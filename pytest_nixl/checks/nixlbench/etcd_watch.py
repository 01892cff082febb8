# SPDX-License-Identifier: Apache-2.0
"""Watch the etcd of a nixlbench run from a thread: the keys of the group, and whether the etcd still answers.

nixlbench itself does not report a lost etcd: its processes wait for keys that cannot come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd_servers.sources import EtcdServer

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
    :param own: the etcd, if this run started it. As long as it has neither ended nor been stopped, it only counts as
        slow and is never reported.
    """

    def __init__(self, endpoint: str, prefix: str, own: EtcdServer | None = None) -> None:
        self.endpoint = endpoint
        #: The keys of the group in the last answer.
        self.keys: frozenset[str] = frozenset()
        #: Why the last request failed; empty if it succeeded.
        self.last_failure = ""
        self._prefix = prefix
        self._own = own
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
        now = time.monotonic()
        asked = self._asked_at
        hangs = asked is not None and now - asked > SUSPICIOUS_SECONDS
        if self._trouble is None and hangs and now - self._looked_at > SUSPICIOUS_SECONDS:
            self._looked_at = now
            self._trouble = self._own_ended()
        return self._trouble

    def settled(self, seconds: float) -> EtcdError | None:
        """Return the same as :meth:`trouble`, but wait up to ``seconds`` if the etcd is not answering now."""
        deadline = time.monotonic() + seconds
        while (found := self.trouble()) is None and time.monotonic() < deadline:
            asked = self._asked_at
            if self._failing_since is None and (asked is None or time.monotonic() - asked < SUSPICIOUS_SECONDS):
                return None
            time.sleep(0.05)
        return found

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
        now = time.monotonic()
        silent = error.cause == "timeout"
        if now - start > (ANSWER_SECONDS if silent else 0.0) + LATE_SECONDS:
            self._failing_since = None
            return
        if self._failing_since is None:
            self._failing_since = start
        if silent and self._own is not None:
            return  # The etcd of this run is still running: it is only slow.
        if silent or now - self._failing_since >= REFUSED_SECONDS:
            self._trouble = error

    def _own_ended(self) -> EtcdError | None:
        if self._own is None:
            return None
        try:
            dead = self._own.why_dead()
            cause = dead or self._own.why_silent()
        except NixlPluginError as error:
            dead = cause = f"{error.reason}\n{error.detail}"
        if cause is None:
            return None
        reason, _, lines = cause.partition("\n")
        return EtcdError(reason, "", lines, cause="died" if dead else "stopped", endpoint=self.endpoint)


class Removal:
    """Deletes the keys of a group in a thread, as soon as the etcd answers again.

    :param endpoint: URLs of the etcd.
    :param prefix: prefix of the group's keys.
    :param done: called after the keys are deleted.
    """

    def __init__(self, endpoint: str, prefix: str, done: Callable[[], None]) -> None:
        self._endpoint, self._prefix, self._done = endpoint, prefix, done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="removal of nixlbench's keys", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Stop trying after ``seconds``; return whether the keys are deleted."""
        self._thread.join(seconds)
        self._stop.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        with connect(parse_endpoints(self._endpoint), timeout=2.0) as client:
            while not self._stop.is_set():
                try:
                    client.delete_prefix(self._prefix)
                except EtcdError:
                    self._stop.wait(0.5)
                else:
                    self._done()
                    return
