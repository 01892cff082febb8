# SPDX-License-Identifier: Apache-2.0
"""Remove the keys of groups without members from an etcd. A group that has a member is never changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_nixl.cluster.group import PREFIX, TTL, Candidate, JoinRefusedError, group_name
from pytest_nixl.cluster.group_values import unsealed
from pytest_nixl.core.sentences import named
from pytest_nixl.etcd.client import EtcdClient, Pager
from pytest_nixl.etcd.transaction import TransactionResult, delete_prefix, empty, get_prefix, txn


@dataclass(frozen=True)
class DeadGroup:
    """A group without members, and the number of keys that it left behind."""

    group: str
    keys: int


@dataclass(frozen=True)
class LiveGroup:
    """A group that still has members."""

    group: str
    members: tuple[Candidate, ...]

    def __str__(self) -> str:
        return f"group {self.group!r} still has members: {named(map(str, self.members), 8)}"


@dataclass(frozen=True)
class RemovedGroups:
    """The groups that were removed, and those that were not because they have members."""

    removed: tuple[DeadGroup, ...]
    refused: tuple[LiveGroup, ...]

    @property
    def keys(self) -> int:
        """The number of keys that were removed; with ``dry_run``, that would be."""
        return sum(group.keys for group in self.removed)

    def check(self) -> None:
        """Raise an error if a group still has members.

        :raises JoinRefusedError: names these members.
        """
        if self.refused:
            raise JoinRefusedError(
                "; ".join(map(str, self.refused)),
                f"end these processes first; a killed process stays a member until its lease expires ({TTL} s, "
                "unless that run had another --nixl-lease)",
            )


def clean(client: EtcdClient, prefix: str = PREFIX, group: str = "", *, dry_run: bool = False) -> RemovedGroups:
    """Remove the keys of groups that have no member.

    :param prefix: the prefix of the keys of all groups.
    :param group: clean only groups of this name, whatever their token; empty for every group.
    :param dry_run: only count the keys, and remove nothing.
    :raises EtcdError: if etcd does not answer; some groups may already have been removed.
    """
    start = f"{prefix.rstrip('/')}/"
    names = {folder: group_name(folder)[0] for folder in _folders(client, start)}
    folders = [folder for folder, name in names.items() if group in ("", folder, name)]
    cleaned = [_clean(client, f"{start}{folder}/", names[folder], dry_run) for folder in folders]
    return RemovedGroups(
        tuple(group_keys for group_keys in cleaned if isinstance(group_keys, DeadGroup) and group_keys.keys),
        tuple(group_keys for group_keys in cleaned if isinstance(group_keys, LiveGroup)),
    )


def _folders(client: EtcdClient, start: str) -> Iterator[str]:
    """Yield the first part of each key that has a second one: one request for each, however many keys a folder has."""
    after = ""
    pager = Pager(client, start, keys_only=True)
    while page := pager.read(after, 1).items:
        folder, slash, _ = page[0].key[len(start) :].partition("/")
        if folder and slash:
            yield folder
        # In the order of keys "0" comes next after "/", so that the rest of the folder is skipped.
        after = f"{start}{folder}0" if slash else page[0].key


def _clean(client: EtcdClient, root: str, name: str, dry_run: bool) -> DeadGroup | LiveGroup:
    """Remove one group, unless it has a member; both happen in one transaction."""
    members = get_prefix(f"{root}members/")
    remove = get_prefix(root, count_only=True) if dry_run else delete_prefix(root)
    done = TransactionResult.of(client.transaction(txn([empty(f"{root}members/")], [remove], [members])))
    if not done.succeeded:
        return LiveGroup(
            name, tuple(Candidate.of(item.key, unsealed(item.value)) for item in done.range_result(0).items)
        )
    return DeadGroup(name, done.range_result(0).count if dry_run else done.deleted(0))
