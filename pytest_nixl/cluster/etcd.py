# SPDX-License-Identifier: Apache-2.0
"""The etcd in which the ranks of a run meet, and the removal of the keys of groups without members."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from pytest_nixl.cluster.group import PREFIX, TTL, Candidate, JoinRefusedError, group_name
from pytest_nixl.cluster.group_values import unsealed
from pytest_nixl.cluster.placement import LauncherPlacement, Placement
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.sentences import named
from pytest_nixl.etcd.client import EtcdClient, Pager, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import TransactionResult, delete_prefix, empty, get_prefix, txn
from pytest_nixl.etcd_servers.rank0 import ListenAddress, credentials, serve_etcd, wait_for_etcd
from pytest_nixl.etcd_servers.sources import EtcdServer, ExternalServer
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient

_REMEDY = (
    "on every rank do one of these: give --nixl-etcd http://HOST:PORT; set MASTER_ADDR=HOST in the environment, with "
    "the host of rank 0; or give --nixl-etcd-listen HOST:PORT with an address of that host"
)


def find_etcd(
    etcd: str,
    listen: ListenAddress | None,
    rank: int | None,
    placement: LauncherPlacement | None,
    environ: Mapping[str, str],
) -> str:
    """Return the URL of the group's etcd.

    :param etcd: the URL from the options; empty if none is given.
    :param listen: the address at which rank 0 serves the etcd; None if it serves none.
    :param rank: the rank of this process, for the message; None if it is not known.
    :param placement: what the launcher says; None if no launcher is known.
    :param environ: the environment, from which MASTER_ADDR is read.
    :raises NixlPluginError: if the host of rank 0 is not known.
    """
    if etcd:
        return etcd
    if listen is None:
        reason = "neither --nixl-etcd nor --nixl-etcd-listen is given"
    else:
        # An address in the option comes first: the name that a launcher gives may belong to another network.
        host = "" if listen.everywhere else listen.host
        host = host or environ.get("MASTER_ADDR") or (placement.first if placement else "")
        if host:
            return listen.endpoint_at(host)
        launcher = f"{placement.launcher} does not say" if placement else "no launcher says"
        reason = f"--nixl-etcd-listen={listen} names no host, MASTER_ADDR is not set, and {launcher} where rank 0 is"
    raise NixlPluginError(
        f"{'this process' if rank is None else f'rank {rank}'} cannot tell where the group's etcd is: {reason}", _REMEDY
    )


def require_etcd(settings: Settings, placement: Placement) -> None:
    """Check that the options name an etcd for the ranks.

    :raises pytest.UsageError: if they name none, or if rank 0 is to serve it and the rank of this process is unknown.
    """
    if settings.etcd_listen:
        if placement.rank is None:
            raise pytest.UsageError(
                f"--nixl-etcd-listen={settings.etcd_listen} makes rank 0 serve etcd, but the rank of this process is "
                "unknown: give --nixl-rank R, or use a launcher that numbers its processes"
            )
    elif not settings.etcd:
        raise pytest.UsageError(
            f"{placement.ranks} ranks need an etcd to meet in, but none is given: give --nixl-etcd URL, or let rank 0 "
            "serve one with --nixl-etcd-listen ADDR:PORT"
        )


def require_secret(settings: Settings, placement: Placement) -> None:
    """Check that a gate of several ranks has a shared secret.

    :raises pytest.UsageError: if any client of the etcd could change the verdict of the gate.
    """
    if settings.gate and not settings.group_token and not _has_credentials(settings):
        raise _no_secret(f"{placement.ranks} ranks ({placement.source}) without a group token")


def require_closed(settings: Settings, etcd: EtcdServer) -> None:
    """Check that an etcd asks for a password if the gate relies on one.

    :raises pytest.UsageError: if the etcd answers without a password and the ranks have no group token.
    """
    if not settings.gate or settings.group_token or not isinstance(etcd, ExternalServer):
        return
    nobody = [Endpoint(member.scheme, member.host, member.port) for member in etcd.endpoints]
    with connect(nobody, cacert=etcd.credentials["cacert"]) as stranger:
        try:
            stranger.count_prefix(f"{PREFIX}/")
        except EtcdError:
            return
    raise _no_secret(f"an etcd that answers without a password ({etcd.endpoint}) and no group token")


def _has_credentials(settings: Settings) -> bool:
    """Whether the settings contain credentials for an existing etcd."""
    return not settings.etcd_listen and bool(settings.etcd_user or settings.etcd_cert or "@" in settings.etcd)


def _no_secret(subject: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"--nixl-gate is refused with {subject}: anyone who can write to that etcd could change the verdict; run "
        "`export NIXL_GROUP_TOKEN=$(openssl rand -hex 16)` on one rank and set the same value on all others; or use an "
        "etcd that requires a password, and give --nixl-etcd-user NAME:PASSWORD"
    )


def meeting_etcd(
    settings: Settings, placement: Placement, supervisor: SupervisorClient, waiting: Callable[[str], None]
) -> EtcdServer:
    """Return the group's etcd. Rank 0 starts it if the options say so; every other rank waits until it answers.

    :param waiting: called now and then during the wait, with a sentence that says what the rank waits for.
    :raises NixlPluginError: if the etcd cannot be started, found or reached.
    """
    if not settings.etcd_listen:
        return ExternalServer.of(settings)
    listen = ListenAddress.parse(settings.etcd_listen)
    if placement.rank == 0:
        return serve_etcd(supervisor, listen, settings.group_token)
    members = parse_endpoints(find_etcd(settings.etcd, listen, placement.rank, placement.by_launcher, os.environ))
    certificates = credentials(settings.group_token, supervisor.directory)
    if certificates:
        members = tuple(replace(member, scheme="https") for member in members)
    wait_for_etcd(",".join(map(str, members)), settings.join_timeout, certificates, waiting)
    return ExternalServer(members, **certificates)


def for_agents(settings: Settings) -> bool:
    """Whether NIXL's own client can use the group's etcd. That client sends no password and has no TLS."""
    secret = settings.group_token if settings.etcd_listen else settings.etcd_user
    return not secret and not settings.etcd_cacert and "https:" not in settings.etcd and "@" not in settings.etcd


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
