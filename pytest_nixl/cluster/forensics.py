# SPDX-License-Identifier: Apache-2.0
"""Describe a group that lost a rank: the members that are left, the keys in etcd, and the last lines of worker logs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from pytest_nixl.cluster.group import Member, MembershipError
from pytest_nixl.cluster.group_values import GroupValues
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.strict import escape
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import KeyValue, TransactionResult, get, get_prefix, txn

#: Seconds that etcd may take for all requests together.
SECONDS = 5.0
#: The largest number of keys that are listed, and of lines from each log.
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
    """Return lines that describe what is left of a group. Never raises: a failure becomes one more line.

    :param membership_root: :attr:`Membership.root`.
    :param members: the members on the roster.
    :param worker_logs: the text of each worker log, by the name under which it is shown.
    :param seconds: the time that etcd may take for all requests together.
    :param values: reads the group's values; None if the group has no token.
    """
    asking = _Asking(client, membership_root, members, values or GroupValues(membership_root))
    return [*_run_with_limit(asking, seconds), *_last_words(worker_logs)]


class _Asking:
    """The requests to etcd, most important first. Each adds its lines when all of them are known."""

    def __init__(self, client: EtcdClient, root: str, members: Sequence[Member], values: GroupValues) -> None:
        self._client = client
        self._root = root
        self._members = members
        self._values = values
        #: The lines so far. Another thread may read them at any time.
        self.lines: tuple[str, ...] = ()

    def run(self) -> None:
        for question in (self._list_members, self._list_barriers, self._list_keys):
            try:
                self.lines += tuple(question())
            except MembershipError as error:  # one invalid key must not hide the other keys
                self.lines += (f"one of the group's keys cannot be read: {error.reason}",)
            except NixlPluginError as error:
                self.lines += (f"the group's other keys cannot be read: {error.reason}",)
                return
            except Exception as error:  # an error of any kind must not hide the other keys
                self.lines += (f"one of the group's keys cannot be read: {error!r}",)

    def _list_members(self) -> list[str]:
        prefix = f"{self._root}members/"
        done = TransactionResult.of(self._client.transaction(txn([], self._values.ask_members())))
        present = {item.key[len(prefix) :]: item for item in done.range_result(0).items}
        listed = {member.token for member in self._members}
        counted = sum(token in present for token in listed)
        missing = [member for member in self._members if member.token not in present]
        lines = [f"keys under {self._root}: {counted} of {len(self._members)} members are present"]
        lines += [f"  {member}: its key is missing: its lease expired, or it left" for member in missing]
        lines += [
            f"  {member}: its key is present, {self._lease(present[member.token])}"
            for member in self._members
            if member.token in present
        ]
        members, planted = self._values.read_members(done)
        without_seal = {item.key for item in planted}
        lines += [
            f"  {candidate}: has no rank, {self._lease(present[candidate.token])}"
            for candidate in members
            if candidate.token not in listed
        ]
        return [*lines, *(f"  {key!r}: not written by a member of this group" for key in sorted(without_seal))]

    def _lease(self, item: KeyValue) -> str:
        if not item.lease:
            return "without a lease"
        seconds = self._client.time_to_live(item.lease)
        return f"its lease has {seconds[0]} s left of {seconds[1]} s" if seconds else "its lease has just expired"

    def _list_barriers(self) -> list[str]:
        # Only the current barrier has keys: a rank that arrives deletes its key of the barrier before.
        arrived = f"{self._root}arrived/"
        requests = [get(f"{self._root}run/gate"), get_prefix(arrived)]
        done = TransactionResult.of(self._client.transaction(txn([], requests)))
        gate = done.range_result(0).first
        passed = self._values.read_gate(gate, self._members)
        next_one = f"{arrived}{passed + 1:06d}/"
        waiting = self._values.arrived(done.range_result(1), next_one, self._members)
        last = f"the group passed barrier {passed} last" if passed else "the group passed no barrier"
        return [f"{last}; waiting at barrier {passed + 1}: {_ranks(sorted(waiting))}"]

    def _list_keys(self) -> list[str]:
        done = TransactionResult.of(self._client.transaction(txn([], [get_prefix(self._root, limit=_KEYS)])))
        range_result = done.range_result(0)
        lines = [f"{plural(range_result.count, 'key')} in all"]
        lines += [
            f"  {escape(item.key[len(self._root) :])}: {plural(len(item.value), 'byte')}" for item in range_result.items
        ]
        more = range_result.count - len(range_result.items)
        return [*lines, f"  … and {more} more"] if more > 0 else lines


def _run_with_limit(asking: _Asking, seconds: float) -> list[str]:
    """Send the requests from a separate thread, because a stopped etcd may delay an answer beyond ``seconds``."""
    thread = threading.Thread(target=asking.run, name="forensics", daemon=True)
    thread.start()
    thread.join(seconds)
    late = [f"the group's other keys cannot be read: etcd took more than {seconds:g} s"] if thread.is_alive() else []
    return [*asking.lines, *late]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {named(map(str, ranks), 8)}" if ranks else "no rank"


def _last_words(worker_logs: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for name, text in worker_logs.items():
        last = text.rstrip().splitlines()[-_LINES:]
        lines.append(f"the last lines of {name}:" if last else f"{name} has no unusual lines")
        lines += [f"  {line}" for line in last]
    return lines
