# SPDX-License-Identifier: Apache-2.0
"""Watch the etcd of a nixlbench run from a thread: which keys the group has in it, and whether it still answers.

nixlbench itself does not tell when its etcd goes away: its processes wait for keys that cannot come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError

#: Seconds between two looks at the keys.
EVERY = 0.2
#: Seconds for one answer. An etcd that says nothing for so long is not merely slow.
ANSWER_SECONDS = 7.0
#: Seconds for which an etcd must refuse every connection: one that is started again is back before that.
REFUSED_SECONDS = 5.0
#: Seconds over its time that a failed look may have taken. If it took longer, this machine was too busy to tell.
LATE_SECONDS = 3.0
#: Seconds that an answer takes before it is asked whether an etcd of our own has ended.
SUSPICIOUS_SECONDS = 1.0


class OwnEtcd(Protocol):
    """An etcd that this run has started."""

    def why_dead(self) -> str | None:
        """Return None while it is up, else how it ended, with the last lines of its log."""

    def why_silent(self) -> str | None:
        """Return None while nothing keeps it from answering; it may be up, and stopped."""


class EtcdWatch:
    """Looks at the keys of a group again and again, from the block's begin to its end.

    :param endpoint: the etcd's URLs, plaintext and without credentials.
    :param prefix: of the group's keys.
    :param own: the etcd, if this run has started it: it is asked whether it has ended or is stopped. While it is
        neither, it is slow, and never accused.
    """

    def __init__(self, endpoint: str, prefix: str, own: OwnEtcd | None = None) -> None:
        self.endpoint = endpoint
        #: The keys that the group had when the etcd answered last.
        self.keys: frozenset[str] = frozenset()
        #: Why the last look failed; empty: it did not.
        self.last_failure = ""
        self._prefix = prefix
        self._own = own
        #: Seconds for one member to answer, so that all of them together have the time for one.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A look that hangs ends by its own deadline; nobody waits for it.
        self._stop.set()

    def trouble(self) -> EtcdError | None:
        """Return why the etcd has gone, if it answered before and does not any more."""
        now = time.monotonic()
        asked = self._asked_at
        hangs = asked is not None and now - asked > SUSPICIOUS_SECONDS
        if self._trouble is None and hangs and now - self._looked_at > SUSPICIOUS_SECONDS:
            self._looked_at = now
            self._trouble = self._own_ended()
        return self._trouble

    def settled(self, seconds: float) -> EtcdError | None:
        """Return the trouble; if the etcd does not answer just now, wait until it is clear, at most ``seconds``."""
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
                    # Whoever can write there can write anything: it is no sign of an etcd that is gone.
                    self.last_failure = f"its keys under {self._prefix} cannot be read: {type(error).__name__}"
                else:
                    self._answered, self._failing_since, self.last_failure = True, None, ""
                finally:
                    self._asked_at = None
                if self._trouble is not None:
                    return

    def _failed(self, error: EtcdError, start: float) -> None:
        self.last_failure = error.reason
        if not self._answered:
            return  # It was never there, or cannot be reached from here: nixlbench says so itself.
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
            return  # Ours runs, and is slow.
        if silent or now - self._failing_since >= REFUSED_SECONDS:
            self._trouble = error

    def _own_ended(self) -> EtcdError | None:
        if self._own is None:
            return None
        try:
            dead = self._own.why_dead()
            why = dead or self._own.why_silent()
        except NixlPluginError as error:
            dead = why = f"{error.reason}\n{error.detail}"
        if why is None:
            return None
        reason, _, lines = why.partition("\n")
        return EtcdError(reason, "", lines, cause="died" if dead else "stopped", endpoint=self.endpoint)


class Removal:
    """Removes the keys of a group from an etcd as soon as that answers again, in a thread.

    :param done: called when they are gone.
    """

    def __init__(self, endpoint: str, prefix: str, done: Callable[[], None]) -> None:
        self._endpoint, self._prefix, self._done = endpoint, prefix, done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="removal of nixlbench's keys", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> bool:
        """Try no longer than ``seconds``; return whether the keys are gone."""
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
