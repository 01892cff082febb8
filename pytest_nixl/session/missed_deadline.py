# SPDX-License-Identifier: Apache-2.0
"""Deadlines that a test missed: on a host that other processes keep busy, a missed deadline decides nothing."""

from __future__ import annotations

import contextlib

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.host_load import HostLoad

#: What to do about a missed deadline on a busy host.
LESS_TO_DO = "stop other processes on this host, and run it again"

_LOAD = pytest.StashKey[HostLoad]()
_BUSY = pytest.StashKey[str]()


def watch_load(item: pytest.Item) -> None:
    """Begin to measure the CPU time that other processes use while a test runs."""
    with contextlib.suppress(OSError):
        item.stash[_LOAD] = HostLoad()


def late_because(item: pytest.Item, error: BaseException | None) -> str:
    """Return what kept the host busy if the error is only a missed deadline; empty: it is not, or nothing did."""
    if not isinstance(error, NixlPluginError) or not error.late or _LOAD not in item.stash:
        return ""
    if _BUSY not in item.stash:
        item.stash[_BUSY] = item.stash[_LOAD].words()
    return item.stash[_BUSY]
