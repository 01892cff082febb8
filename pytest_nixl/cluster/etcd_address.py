# SPDX-License-Identifier: Apache-2.0
"""Find the address of the group's etcd, for a rank that does not serve it itself."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nixl.cluster.launchers import LauncherPlacement
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd_servers.rank0 import ListenAddress


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
        why = "neither --nixl-etcd nor --nixl-etcd-listen is given"
    else:
        # An address in the option comes first: the name that a launcher gives may belong to another network.
        host = "" if listen.everywhere else listen.host
        host = host or environ.get("MASTER_ADDR") or (placement.first if placement else "")
        if host:
            return listen.endpoint_at(host)
        launcher = f"{placement.launcher} does not say" if placement else "no launcher says"
        why = f"--nixl-etcd-listen={listen} names no host, MASTER_ADDR is not set, and {launcher} where rank 0 is"
    raise NixlPluginError(
        f"{'this process' if rank is None else f'rank {rank}'} cannot tell where the group's etcd is: {why}", _REMEDY
    )


_REMEDY = (
    "on every rank do one of these: give --nixl-etcd http://HOST:PORT; set MASTER_ADDR=HOST in the environment, with "
    "the host of rank 0; or give --nixl-etcd-listen HOST:PORT with an address of that host"
)
