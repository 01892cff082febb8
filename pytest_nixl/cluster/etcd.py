# SPDX-License-Identifier: Apache-2.0
"""The etcd that the ranks of a run meet in: one that is there, or one that rank 0 serves."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pytest_nixl.cluster.etcd_address import find_etcd
from pytest_nixl.cluster.group import PREFIX
from pytest_nixl.cluster.placement import Placement
from pytest_nixl.etcd.client import EtcdError, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd_servers.rank0 import ListenAddress, credentials, serve_etcd, wait_for_etcd
from pytest_nixl.etcd_servers.sources import EtcdServer, ExternalServer
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.supervisor import SupervisorClient


def require_etcd(settings: Settings, asked: Placement) -> None:
    """:raises pytest.UsageError: where nothing says in which etcd the ranks meet."""
    if settings.etcd_listen:
        if asked.rank is None:
            raise pytest.UsageError(
                f"--nixl-etcd-listen={settings.etcd_listen} is for rank 0, and nothing says which rank this is: give "
                "--nixl-rank R, or start it by a launcher that numbers its processes"
            )
    elif not settings.etcd:
        raise pytest.UsageError(
            f"{asked.ranks} ranks meet in an etcd, and none is named: give --nixl-etcd URL, or --nixl-etcd-listen "
            "ADDR:PORT for rank 0 to serve one"
        )


def require_secret(settings: Settings, asked: Placement) -> None:
    """:raises pytest.UsageError: where a gate would believe whatever anybody writes to the ranks' etcd."""
    if settings.gate and not settings.group_token and not _has_credentials(settings):
        raise _no_secret(f"{asked.ranks} ranks ({asked.source}) without a group token")


def require_closed(settings: Settings, etcd: EtcdServer) -> None:
    """:raises pytest.UsageError: where the gate counts on a password for which the etcd does not ask."""
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
    """Whether the settings have what an etcd may ask of those that it lets in."""
    return not settings.etcd_listen and bool(settings.etcd_user or settings.etcd_cert or "@" in settings.etcd)


def _no_secret(what: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"--nixl-gate is refused with {what}: everyone who can write to that etcd could decide how the run ends; give "
        "every rank the same token: export NIXL_GROUP_TOKEN=$(openssl rand -hex 16), copied to each; or, with an etcd "
        "that asks for a password, --nixl-etcd-user NAME:PASSWORD"
    )


def meeting_etcd(
    settings: Settings, asked: Placement, supervisor: SupervisorClient, waiting: Callable[[str], None]
) -> EtcdServer:
    """Return the etcd of the group: started, where this is rank 0 and is to serve it; else once it answers.

    :param waiting: called now and then with a sentence on what is waited for.
    :raises NixlPluginError: where it cannot be served, found or reached.
    """
    if not settings.etcd_listen:
        return ExternalServer.of(settings)
    listen = ListenAddress.parse(settings.etcd_listen)
    if asked.rank == 0:
        return serve_etcd(supervisor, listen, settings.group_token)
    url = find_etcd(settings.etcd, listen, asked.rank, asked.placement, os.environ)
    wait_for_etcd(url, settings.join_timeout, settings.group_token, waiting)
    return ExternalServer(parse_endpoints(url), **credentials(settings.group_token))


def for_agents(settings: Settings) -> bool:
    """Whether NIXL's own client can use the group's etcd: it sends no password and speaks plaintext only."""
    password = settings.group_token if settings.etcd_listen else settings.etcd_user
    return not password and not settings.etcd_cacert and "https:" not in settings.etcd and "@" not in settings.etcd
