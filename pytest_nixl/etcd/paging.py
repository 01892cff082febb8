# SPDX-License-Identifier: Apache-2.0
"""Read the keys of an etcd in pages, and refuse an etcd whose pages never end."""

from __future__ import annotations

import time

from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd.errors import EtcdError, printable
from pytest_nixl.etcd.transaction import KeyPage

#: The most pages in which the keys under one prefix are read, and the most seconds of one reading.
MOST_PAGES, MOST_SECONDS = 20_000, 15.0


class Pager:
    """Reads the keys that start with a prefix in pages, each after the one before.

    :param prefix: the start of the keys.
    :param keys_only: leave out the values.
    :param deadline: the monotonic time after which no page is read; None: 15 s from now.
    """

    def __init__(
        self, client: EtcdClient, prefix: str, *, keys_only: bool = False, deadline: float | None = None
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._keys_only = keys_only
        self._pages = 0
        self._deadline = time.monotonic() + MOST_SECONDS if deadline is None else deadline

    def read(self, after: str, limit: int) -> KeyPage:
        """Return at most ``limit`` keys that follow the key ``after``; empty for the first page.

        :raises EtcdError: if etcd does not answer, if a page does not begin where it has to, or if there have been too
            many pages or seconds.
        """
        if self._pages == MOST_PAGES or time.monotonic() > self._deadline:
            limits = f"{MOST_PAGES:,} pages and {MOST_SECONDS:g} s"
            raise self._fault(f"has more keys under {self._prefix} than can be read in {limits}", "endless")
        self._pages += 1
        page = self._client.page(self._prefix, after=after, limit=limit, keys_only=self._keys_only)
        last, start = _order(after), _order(self._prefix)
        for item in page.items:
            if _order(item.key) <= last or not _order(item.key).startswith(start):
                key = printable(item.key, 80)
                raise self._fault(f"was asked for keys after {printable(after or self._prefix, 80)!r} and sent {key!r}")
            last = _order(item.key)
        if len(page.items) > limit or (page.more and len(page.items) < limit):  # etcd sends all, or as many as asked
            raise self._fault(f"was asked for {limit} keys, sent {len(page.items)}, and says that there are more")
        return page

    def _fault(self, what: str, cause: str = "unreadable") -> EtcdError:
        endpoint = self._client.endpoint
        remedy = "check that this is the address of an etcd, and not of another server or a broken proxy"
        return EtcdError(f"etcd at {endpoint} {what}", remedy, cause=cause, endpoint=endpoint)


def _order(key: str) -> bytes:
    """Return the bytes by which etcd sorts a key."""
    return key.encode(errors="surrogateescape")
