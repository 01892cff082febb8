# SPDX-License-Identifier: Apache-2.0
"""Remove keys of the dead from an etcd, and record every one of them first.

Only agents that the user names count as dead, and groups of nixlbench and pytest-nixl whose members lost their leases.
Keys are removed in transactions, on three conditions: each key is still the one that was looked at, no key under the
owner's prefix was written since, and none of them has a lease.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nixl.checks.deployment_etcd.deployment import DeploymentEtcd, key_fields
from pytest_nixl.checks.deployment_etcd.key_survey import pages
from pytest_nixl.checks.deployment_etcd.problem import DeadKeys, quoted
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import escape
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import KeyValue, delete, none_changed_after, none_leased, txn, unchanged

#: The most keys of one transaction: etcd allows 128 operations, of which two are the conditions on the prefix.
_AT_A_TIME = 100
#: The most bytes that a record holds.
_MOST_RECORDED = 256 << 20
_FORMAT = "keys removed by pytest-nixl etcd, 1"


@dataclass
class RemovalPlan:
    """The keys that may be removed, and what may not, with the reason.

    :param revision: revision of the etcd before they were looked at; what was written later is not removed.
    """

    revision: int
    dead: list[DeadKeys] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def plan_removal(deployment: DeploymentEtcd, agents: Sequence[str], unchanged_since: int | None = None) -> RemovalPlan:
    """Choose the keys that may be removed.

    :param agents: the names of agents that the user says are dead, under exactly this spelling of the namespace.
    :param unchanged_since: the revision after which none of these agents may have written.
    :raises NixlPluginError: if an agent has no keys under this spelling.
    """
    plan = RemovalPlan(deployment.revision, list(deployment.dead))
    for name in dict.fromkeys(agents):
        same = [agent for agent in deployment.agents if agent.name == name]
        same_spelling = next((agent for agent in same if agent.namespace == deployment.namespace.text), None)
        if same_spelling is None:
            elsewhere = "; ".join(f"give --namespace={quoted(agent.namespace)}" for agent in same)
            raise NixlPluginError(
                f"agent {escape(name)!r} has no key under {escape(deployment.namespace.text)}/{escape(name)}/",
                elsewhere or "correct --agent: `pytest-nixl etcd --all` lists the agents",
            )
        owner = f"agent {escape(name)!r} under {escape(same_spelling.prefix)}"
        answers = [address for address in same_spelling.addresses if deployment.silent.get(address) == ""]
        if same_spelling.leased:
            plan.refused.append(f"{owner} has a lease, so it lives")
        elif answers:
            plan.refused.append(f"{owner} answers at {answers[0][0]} port {answers[0][1]}, so it may live")
        elif unchanged_since is not None and same_spelling.written > unchanged_since:
            plan.refused.append(f"{owner} wrote at revision {same_spelling.written}, after revision {unchanged_since}")
        else:
            plan.dead.append(DeadKeys(owner, same_spelling.prefix, same_spelling.keys))
    return plan


class RemovalRecord:
    """A file with every key that is removed: written before the first one is, and again at the end.

    :param path: a file that does not exist.
    :raises ValueError: if it exists.
    """

    def __init__(self, path: Path, endpoints: Sequence[str], revision: int) -> None:
        self._path = path
        self._plain: dict[str, Any] = {
            "format": _FORMAT,
            "etcd": list(endpoints),
            "revision": revision,
            "finished": False,
            "keys": [],
        }
        self._bytes = 0
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            path.touch(0o600, exist_ok=False)
        except FileExistsError:
            raise ValueError(f"{path} already exists: give --record the name of a new file") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): give --record another file") from None

    def add(self, owner: str, item: KeyValue) -> None:
        """Add a key that is about to be removed. :raises NixlPluginError: if the record would become too large."""
        self._bytes += len(item.key) + len(item.value)
        if self._bytes > _MOST_RECORDED:
            raise NixlPluginError(
                f"the keys to remove have more than {_MOST_RECORDED >> 20} MiB, which no record holds",
                "remove fewer at a time: give --agent NAME for a few agents",
            )
        entry = {
            "owner": owner,
            **key_fields(item.key),
            "value_base64": base64.b64encode(item.value).decode(),
            "create_revision": item.create_revision,
            "mod_revision": item.mod_revision,
            "version": item.version,
            "removed": None,
        }
        self._entries[item.key] = entry
        self._plain["keys"].append(entry)

    def note(self, items: Sequence[KeyValue], *, removed: bool | None) -> None:
        """Note whether keys were removed; None if that is unknown."""
        for item in items:
            self._entries[item.key]["removed"] = removed

    def write(self, *, finished: bool) -> None:
        """Write the file, so that it survives the end of this host."""
        self._plain["finished"] = finished
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            json.dump(self._plain, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


@dataclass(frozen=True)
class RemovedKeys:
    """How many keys of an owner were removed, and why the others were not; empty if all were."""

    owner: str
    keys: int
    why_not: str = ""


def remove(client: EtcdClient, plan: RemovalPlan, record: RemovalRecord) -> Iterator[RemovedKeys]:
    """Remove the keys of a plan, and yield for each owner what was removed.

    :param record: gets every key with its value before the first one is removed.
    :raises EtcdError: if etcd does not answer. The record then has null where it is unknown whether a key was removed.
    """
    read = [(dead, _read(client, dead, plan.revision)) for dead in plan.dead]
    for dead, items in read:
        for item in items or ():
            record.add(dead.owner, item)
    record.write(finished=False)
    for _, items in read:
        record.note(items or (), removed=False)
    try:
        for dead, items in read:
            if items is None:
                yield RemovedKeys(dead.owner, 0, _CHANGED)
            else:
                yield _remove(client, dead, items, plan.revision, record)
    finally:
        record.write(finished=True)


_CHANGED = "a key of it was written, or removed, after it was looked at"


def _read(client: EtcdClient, dead: DeadKeys, revision: int) -> list[KeyValue] | None:
    """Return the keys with their values; None if one of them has changed."""
    revisions = {key.key: key.mod_revision for key in dead.keys}
    items = [item for page in pages(client, dead.prefix) for item in page.items]
    if any(item.mod_revision > revision for item in items):
        return None
    same = [item for item in items if revisions.get(item.key) == item.mod_revision]
    return same if len(same) == len(revisions) else None


def _remove(
    client: EtcdClient, dead: DeadKeys, items: Sequence[KeyValue], revision: int, record: RemovalRecord
) -> RemovedKeys:
    removed = 0
    conditions = [none_changed_after(dead.prefix, revision), none_leased(dead.prefix)]
    for start in range(0, len(items), _AT_A_TIME):
        batch = items[start : start + _AT_A_TIME]
        payload = txn([*conditions, *(unchanged(item) for item in batch)], [delete(item.key) for item in batch])
        try:
            done = client.transaction(payload).get("succeeded", False)
        except EtcdError as error:
            # Refused or never sent: nothing was removed. Otherwise only the answer may be lost.
            record.note(batch, removed=None if error.late or error.cause in ("closed", "no-leader") else False)
            raise
        if not done:
            return RemovedKeys(dead.owner, removed, _CHANGED)
        record.note(batch, removed=True)
        removed += len(batch)
    return RemovedKeys(dead.owner, removed)
