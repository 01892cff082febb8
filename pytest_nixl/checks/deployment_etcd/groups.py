# SPDX-License-Identifier: Apache-2.0
"""Groups of nixlbench and of pytest-nixl in an etcd: which are dead, and what is known of the others.

A group is dead if its ranks registered, and no key of it has a lease any more. nixlbench gives its rank keys a lease of
30 s that its process renews, and pytest-nixl its members that of ``--nixl-lease``. The key ``size`` of nixlbench has no
lease, and stays. Older releases of nixlbench give no key a lease: whether such a group lives cannot be known from etcd.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_nixl.checks.deployment_etcd.key_survey import SurveyedKey
from pytest_nixl.checks.deployment_etcd.problem import DeadKeys, EtcdProblem, quoted
from pytest_nixl.cluster.group import PREFIX, group_name
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.strict import escape

#: The prefixes of the keys of nixlbench, and of the groups of pytest-nixl.
NIXLBENCH, OWN_GROUPS = "xferbench/", f"{PREFIX}/"

_RANK = re.compile(r"/*rank/+([0-9]{1,6})")
_SIZE = re.compile(rb"[0-9]{1,6}")
_SHOWN_RANKS = 6


@dataclass
class KnownGroups:
    """The groups that were found, and what is wrong with them.

    :param living: how many groups have a lease.
    """

    living: int = 0
    problems: list[EtcdProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dead: list[DeadKeys] = field(default_factory=list)


def nixlbench_groups(keys: Iterable[SurveyedKey], command: str) -> KnownGroups:
    """Judge the groups of nixlbench.

    :param keys: the keys under ``xferbench/``, with their values.
    :param command: ``pytest-nixl etcd`` with the etcd's URL, for remedies.
    """
    groups = KnownGroups()
    for folder, stored in _folders(keys, NIXLBENCH):
        _judge_nixlbench(folder, f"{NIXLBENCH}{folder}/", stored, groups, command)
    return groups


def _judge_nixlbench(
    folder: str, prefix: str, keys: tuple[SurveyedKey, ...], groups: KnownGroups, command: str
) -> None:
    name = f"nixlbench's group {escape(folder)!r}"
    ranks = {int(match[1]): key for key in keys if (match := _RANK.fullmatch(key.key[len(prefix) :]))}
    size = next((key for key in keys if key.key[len(prefix) :].lstrip("/") == "size"), None)
    registered = _registered(size)
    leased = any(key.lease for key in keys)
    groups.living += leased
    if size is not None and registered is None:
        groups.problems.append(
            EtcdProblem(
                "bad-size",
                f"{escape(size.key)} of {name} is not a number of ranks: every process that joins it ends",
                f"if no process of this group runs, `etcdctl del --prefix -- {quoted(prefix)}`",
                (size.key,),
            )
        )
    elif leased:
        _judge_ranks(name, prefix, ranks, registered or 0, groups)
    elif ranks:
        groups.notes.append(
            f"{name} has {plural(len(keys), 'key')}, and its rank keys have no lease, as in older releases of "
            "nixlbench: etcd cannot tell whether its processes live; if none runs, "
            f"`etcdctl del --prefix -- {quoted(prefix)}`"
        )
    elif size is None:
        groups.notes.append(
            f"{name} has {plural(len(keys), 'key')} under {escape(prefix)}, but neither size nor ranks, so that "
            "nothing tells whose they are; if no process of this group runs, "
            f"`etcdctl del --prefix -- {quoted(prefix)}`"
        )
    else:
        groups.dead.append(DeadKeys(name, prefix, keys))
        groups.problems.append(
            EtcdProblem(
                "dead-nixlbench-group",
                f"{name} is dead: {escape(size.key)} says that {plural(registered or 0, 'rank')} registered, and the "
                "lease of none is left; the next processes of this group are refused a rank, or wait 181 s",
                f"`{command} --remove-dead` prints its {plural(len(keys), 'key')}",
                tuple(key.key for key in keys),
            )
        )


def _judge_ranks(name: str, prefix: str, ranks: dict[int, SurveyedKey], registered: int, groups: KnownGroups) -> None:
    """Report ranks that registered and whose lease has ended, while another one lives or registers."""
    lost = [rank for rank in range(registered) if rank not in ranks]
    if lost and ranks:
        numbers = named(map(str, lost), _SHOWN_RANKS)
        groups.problems.append(
            EtcdProblem(
                "stale-rank",
                f"of the {registered} ranks that registered in {name}, {plural(len(lost), 'rank')} ({numbers}) lost "
                f"the lease and {len(ranks)} did not: the living wait up to 181 s for the dead",
                "end the processes of this group, and start them under another --benchmark_group",
                tuple(key.key for key in ranks.values()),
            )
        )


def _registered(size: SurveyedKey | None) -> int | None:
    """Return the number of ranks that registered; None if the key is missing or holds no such number."""
    if size is None or size.short is None or not _SIZE.fullmatch(size.short):
        return None
    return int(size.short)


def own_groups(keys: Iterable[SurveyedKey], command: str) -> KnownGroups:
    """Judge the groups of pytest-nixl. Parameters as :func:`nixlbench_groups`; no values are needed."""
    groups = KnownGroups()
    for folder, stored in _folders(keys, OWN_GROUPS):
        prefix = f"{OWN_GROUPS}{folder}/"
        if any(key.lease or key.key.startswith(f"{prefix}members/") for key in stored):
            groups.living += 1
            continue
        name = f"group {escape(group_name(folder)[0])!r} of pytest-nixl"
        groups.dead.append(DeadKeys(name, prefix, stored))
        groups.problems.append(
            EtcdProblem(
                "dead-group",
                f"{name} is dead: it has {plural(len(stored), 'key')} under {escape(prefix)}, and no member has a "
                "lease",
                f"`{command} --remove-dead` prints them; `pytest-nixl clean` also removes them",
                tuple(key.key for key in stored),
            )
        )
    return groups


def _folders(keys: Iterable[SurveyedKey], start: str) -> Iterator[tuple[str, tuple[SurveyedKey, ...]]]:
    folders: dict[str, list[SurveyedKey]] = defaultdict(list)
    for key in keys:
        folder, slash, _ = key.key[len(start) :].partition("/")
        if slash:
            folders[folder].append(key)
    for folder, stored in folders.items():
        yield folder, tuple(stored)
