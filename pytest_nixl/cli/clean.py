# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl clean``: remove what ended runs left on this host, and the keys of several ranks in an etcd."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_nixl.cluster.etcd import clean
from pytest_nixl.cluster.group import JoinRefusedError
from pytest_nixl.core.sentences import plural
from pytest_nixl.host.etcd import ETCD_VARIABLES, client_of, etcdctl_credentials
from pytest_nixl.processes.leftovers import abandoned, remove_run, watched

if TYPE_CHECKING:
    from pytest_nixl.cluster.etcd import RemovedGroups


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    clean = commands.add_parser(
        "clean",
        help="remove what ended runs left on this host, and in an etcd",
        description="Remove what killed runs of this user left on this host: directories, containers and keys. The "
        "next run on this host removes them, too. If an etcd is given, also remove the keys of groups that have no "
        "living member. A group that still has one is not changed, its members are printed, and the command exits "
        "with 1. Certificates and user are read from the variables of etcdctl (ETCDCTL_CACERT, ETCDCTL_CERT, "
        "ETCDCTL_KEY, ETCDCTL_USER).",
    )
    clean.add_argument("--etcd", metavar="URL[,URL]", help="the etcd (default: NIXL_ETCD_ENDPOINTS, ETCD_ENDPOINTS)")
    clean.add_argument("--group", metavar="NAME", default="", help="clean only groups of this name, with any token")
    clean.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    clean.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    code = 0 if arguments.group else _clean_runs(dry_run=arguments.dry_run)
    if arguments.group or arguments.etcd or any(os.environ.get(name) for name in ETCD_VARIABLES):
        code = max(code, _clean_groups(arguments))
    return code


def _clean_groups(arguments: argparse.Namespace) -> int:
    """Remove the keys of groups without a living member."""
    with client_of(arguments.etcd, "give --etcd URL") as client:
        cleaned = clean(client, group=arguments.group, dry_run=arguments.dry_run)
    for line in _lines(cleaned, dry_run=arguments.dry_run):
        print(line)
    try:
        cleaned.check()
    except JoinRefusedError as error:
        sys.stdout.flush()
        print(f"pytest-nixl: {error}", file=sys.stderr)
        return 1
    return 0


def _clean_runs(*, dry_run: bool) -> int:
    """Remove what runs of this user left that were killed together with their supervisor; keys with etcdctl's user."""
    code, abandoned_runs = 0, abandoned(tempfile.gettempdir())
    for directory in abandoned_runs:
        items = {
            key: item
            if item["kind"] == "container"
            else {**item, "credentials": etcdctl_credentials(item["credentials"])}
            for key, item in watched(directory).items()
        }
        remaining = [] if dry_run else remove_run(directory, items)
        print(
            f"{'would remove' if dry_run else 'removed'} what a killed run left: {', '.join([directory, *items])}"
            if not remaining
            else f"a killed run left {directory}"
        )
        for reason in remaining:
            print(f"pytest-nixl: {reason}", file=sys.stderr)
            code = 1
    if not abandoned_runs:
        print("nothing to remove on this host")
    return code


def _lines(cleaned: RemovedGroups, *, dry_run: bool) -> Iterator[str]:
    would = "would remove" if dry_run else "removed"
    for dead in cleaned.removed:
        yield f"{would} group {dead.group!r}: {plural(dead.keys, 'key')}"
    if cleaned.removed:
        yield f"{would} {plural(len(cleaned.removed), 'group')}, {plural(cleaned.keys, 'key')}"
    else:
        yield "nothing to remove in the etcd"
