# SPDX-License-Identifier: Apache-2.0
"""What is left of a group that broke, for a person to read: who is still there, what is in etcd, and last words."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from pytest_nixl.cluster.group import Member, MembershipError
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.cluster.members import shorten
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import KeyValue, TransactionResult, get, get_prefix, txn

#: Seconds that the etcd may take for all that is asked.
SECONDS = 5.0
#: Keys that are listed, and lines of each log.
_KEYS, _LINES = 50, 5


def forensics(
    client: EtcdClient,
    membership_root: str,
    members: Sequence[Member],
    *,
    worker_logs: Mapping[str, str],
    seconds: float = SECONDS,
    values: GroupValues | None = None,
) -> list[str]:
    """Return lines that say what is left of a group. It never raises: what cannot be found out is one more line.

    :param membership_root: :attr:`Membership.root`.
    :param members: those that are on the list.
    :param worker_logs: the text of each log, by the name that it is shown with.
    :param seconds: that the etcd may take, for all together.
    :param values: reads the group's values; None: the group has no token.
    """
    asking = _Asking(client, membership_root, members, values or GroupValues(membership_root))
    return [*_asked(asking, seconds), *_last_words(worker_logs)]


class _Asking:
    """The questions to the etcd, in the order of their weight. Each adds its lines once it has all of them."""

    def __init__(self, client: EtcdClient, root: str, members: Sequence[Member], values: GroupValues) -> None:
        self._client = client
        self._root = root
        self._members = members
        self._values = values
        #: The lines so far. Others read it at any time.
        self.lines: tuple[str, ...] = ()

    def run(self) -> None:
        for question in (self._who_is_there, self._barriers, self._keys):
            try:
                self.lines += tuple(question())
            except MembershipError as error:  # a stranger's key must not hide the rest
                self.lines += (f"something in its keys cannot be read: {error.reason}",)
            except NixlPluginError as error:
                self.lines += (f"no more can be said of its keys: {error.reason}",)
                return
            except Exception as error:  # of whatever kind: it must not hide the rest
                self.lines += (f"something in its keys cannot be read: {error!r}",)

    def _who_is_there(self) -> list[str]:
        prefix = f"{self._root}members/"
        done = TransactionResult.of(self._client.transaction(txn([], self._values.ask_members())))
        there = {item.key[len(prefix) :]: item for item in done.found(0).items}
        listed = {member.token for member in self._members}
        here = sum(token in there for token in listed)
        missing = [member for member in self._members if member.token not in there]
        lines = [f"keys under {self._root}: {here} of {len(self._members)} members are there"]
        lines += [f"  {member}: its key is gone: its lease ended, or it left" for member in missing]
        lines += [
            f"  {member}: its key is there, {self._lease(there[member.token])}"
            for member in self._members
            if member.token in there
        ]
        found, planted = self._values.read_members(done)
        without_seal = {item.key for item in planted}
        lines += [
            f"  {claimant}: has no rank, {self._lease(there[claimant.token])}"
            for claimant in found
            if claimant.token not in listed
        ]
        return [*lines, *(f"  {key!r}: it was written by nobody of this group" for key in sorted(without_seal))]

    def _lease(self, item: KeyValue) -> str:
        if not item.lease:
            return "without a lease"
        left = self._client.time_to_live(item.lease)
        return f"its lease has {left[0]} s left of {left[1]} s" if left else "its lease has just ended"

    def _barriers(self) -> list[str]:
        # The barriers that are waited at: each rank's place at the one before goes when it comes to the next.
        arrived = f"{self._root}arrived/"
        asked = [get(f"{self._root}run/gate"), get_prefix(arrived)]
        done = TransactionResult.of(self._client.transaction(txn([], asked)))
        gate = done.found(0).first
        passed = self._values.read_gate(gate, self._members)
        next_one = f"{arrived}{passed + 1:06d}/"
        waiting = self._values.arrived(done.found(1), next_one, self._members)
        last = f"barrier {passed} was the last one passed" if passed else "no barrier was passed"
        return [f"{last}; at barrier {passed + 1}: {_ranks(sorted(waiting))}"]

    def _keys(self) -> list[str]:
        done = TransactionResult.of(self._client.transaction(txn([], [get_prefix(self._root, limit=_KEYS)])))
        found = done.found(0)
        lines = [f"{_count(found.count, 'key')} in all"]
        lines += [f"  {_shown(item.key[len(self._root) :])}: {_count(len(item.value), 'byte')}" for item in found.items]
        more = found.count - len(found.items)
        return [*lines, f"  … and {more} more"] if more > 0 else lines


def _asked(asking: _Asking, seconds: float) -> list[str]:
    """Ask in a thread of its own: an etcd that is stopped may hold a request for longer than we wait."""
    thread = threading.Thread(target=asking.run, name="forensics", daemon=True)
    thread.start()
    thread.join(seconds)
    late = [f"no more can be said of its keys: the etcd took more than {seconds:g} s"] if thread.is_alive() else []
    return [*asking.lines, *late]


def _shown(key: str) -> str:
    return key if key.isprintable() else repr(key)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {shorten(ranks)}" if ranks else "nobody"


def _last_words(worker_logs: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for name, text in worker_logs.items():
        last = text.rstrip().splitlines()[-_LINES:]
        lines.append(f"the last lines of {name}:" if last else f"{name} tells nothing out of the ordinary")
        lines += [f"  {line}" for line in last]
    return lines
