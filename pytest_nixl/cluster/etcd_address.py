# SPDX-License-Identifier: Apache-2.0
"""Where the group's etcd is, for a rank that does not serve it itself."""

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

    :param etcd: its URL, where one was given.
    :param listen: where rank 0 serves it, else.
    :param rank: this process's, None where it is not known; only named in the message.
    :raises NixlPluginError: where nothing tells on which host rank 0 is.
    """
    if etcd:
        return etcd
    if listen is None:
        why = "neither --nixl-etcd nor --nixl-etcd-listen is given"
    else:
        # An address that was typed is where it listens; a launcher's name may be of another network.
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
    "one of, on every rank: its URL, --nixl-etcd http://HOST:PORT; rank 0's host in the environment, MASTER_ADDR=HOST; "
    "or an address of it in --nixl-etcd-listen HOST:PORT"
)
