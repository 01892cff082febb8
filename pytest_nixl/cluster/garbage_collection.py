# SPDX-License-Identifier: Apache-2.0
"""Removing what groups have left in an etcd whose members have all gone; a group that lives is never touched."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.cluster.group import PREFIX, TTL, JoinRefusedError, group_name
from pytest_nixl.cluster.members import Candidate, shorten
from pytest_nixl.cluster.seals import unsealed
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.transaction import TransactionResult, delete_prefix, empty, get_prefix, txn


@dataclass(frozen=True)
class DeadGroup:
    """A group without members, and how many keys it had left."""

    group: str
    keys: int


@dataclass(frozen=True)
class LiveGroup:
    """A group that has members."""

    group: str
    members: tuple[Candidate, ...]

    def __str__(self) -> str:
        return f"group {self.group!r} is alive: {shorten(self.members)}"


@dataclass(frozen=True)
class RemovedGroups:
    """What became of each group."""

    removed: tuple[DeadGroup, ...]
    refused: tuple[LiveGroup, ...]

    @property
    def keys(self) -> int:
        """How many keys were removed."""
        return sum(each.keys for each in self.removed)

    def check(self) -> None:
        """:raises RefusedError: where a group lives, naming its members."""
        if self.refused:
            raise JoinRefusedError(
                "; ".join(map(str, self.refused)),
                f"end these processes first; one that was killed counts for as long as its lease lives, {TTL} s where "
                "nothing else was asked for",
            )


def clean(client: EtcdClient, prefix: str = PREFIX, group: str = "", *, dry_run: bool = False) -> RemovedGroups:
    """Remove the keys of groups that have no member any more.

    :param prefix: what the keys of all groups begin with.
    :param group: the name of the only one to look at, with whatever token; empty: every group.
    :param dry_run: whether to count only, and remove nothing.
    :raises EtcdError: where the etcd does not answer; some groups may then have been removed already.
    """
    start = f"{prefix.rstrip('/')}/"
    done = TransactionResult.of(client.transaction(txn([], [get_prefix(start, keys_only=True)])))
    folders = dict.fromkeys(item.key[len(start) :].partition("/") for item in done.found(0).items)
    names = {folder: group_name(folder)[0] for folder, slash, _ in folders if folder and slash}
    wanted = [folder for folder, name in names.items() if group in ("", folder, name)]
    found = [_clean(client, f"{start}{folder}/", names[folder], dry_run) for folder in wanted]
    return RemovedGroups(
        tuple(each for each in found if isinstance(each, DeadGroup) and each.keys),
        tuple(each for each in found if isinstance(each, LiveGroup)),
    )


def _clean(client: EtcdClient, root: str, name: str, dry_run: bool) -> DeadGroup | LiveGroup:
    """Remove one group, unless it has a member in the moment in which it is removed."""
    members = get_prefix(f"{root}members/")
    remove = get_prefix(root, count_only=True) if dry_run else delete_prefix(root)
    done = TransactionResult.of(client.transaction(txn([empty(f"{root}members/")], [remove], [members])))
    if not done.succeeded:
        return LiveGroup(name, tuple(Candidate.of(item.key, unsealed(item.value)) for item in done.found(0).items))
    return DeadGroup(name, done.found(0).count if dry_run else done.deleted(0))
