# SPDX-License-Identifier: Apache-2.0
"""An etcd whose pages never end is refused in one sentence.

The server is a test double, because a real etcd does not send the same key twice.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.http_double import HttpDouble, answering

from pytest_nixl.checks.deployment_etcd import key_survey
from pytest_nixl.checks.deployment_etcd.key_survey import survey
from pytest_nixl.cluster.etcd import clean
from pytest_nixl.etcd import client as paging
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError

#: The keys of one page, by the number of the page from 0, the start of the range, and the number of keys asked for.
Pages = Callable[[int, str, int], list[str]]


@contextmanager
def endless(pages: Pages, *, keys_end: bool = False) -> Iterator[EtcdClient]:
    """An etcd that says after each page that there are more; with ``keys_end`` only after pages with values."""
    number = itertools.count()

    class Paged(HttpDouble):
        def reply(self) -> None:
            request = json.loads(self.body())
            keys = pages(next(number), base64.b64decode(request["key"]).decode().split("\0")[0], request["limit"])
            key_values = [{"key": base64.b64encode(key.encode()).decode(), "mod_revision": "3"} for key in keys]
            more = not (keys_end and request["keys_only"])
            self.answer(200, {"header": {"revision": "3"}, "kvs": key_values, "more": more})

    with answering(Paged) as port, connect([Endpoint("http", "127.0.0.1", port)], timeout=30) as client:
        yield client


def full(first: str, limit: int) -> list[str]:
    """Return a page of as many keys as were asked for."""
    return [first, *(f"/a/d{key:05}" for key in range(limit - 1))]


def read_groups(client: EtcdClient) -> None:
    clean(client, prefix="/a", dry_run=True)


def read_keys(client: EtcdClient) -> None:
    survey(client, "/a/", values=False)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (lambda number, start, limit: full(start if number else "/a/c", limit), "and sent '/a/d00998'"),
        (lambda number, start, limit: full("/a/b" if number else "/a/c", limit), "and sent '/a/b'"),
        (lambda number, start, limit: ["/b"], "was asked for keys after '/a/' and sent '/b'"),
        (
            lambda number, start, limit: [f"/a/{number:05}" for number in range(limit // 2)],
            "and says that there are more",
        ),
        (
            lambda number, start, limit: [f"/a/{number:05}" for number in range(1001)],
            "sent 1001, and says that there are more",
        ),
    ],
    ids=["same", "backwards", "outside", "too-few", "too-many"],
)
def test_pages_that_make_no_progress_are_refused(pages: Pages, message: str) -> None:
    with endless(pages) as client, pytest.raises(EtcdError) as caught:
        read_keys(client)
    assert message in caught.value.reason
    assert client.endpoint in caught.value.reason
    assert caught.value.remedy.startswith("check that this is the address of an etcd")


def next_keys(number: int, start: str, limit: int) -> list[str]:
    """Return as many keys as were asked for, each greater than those before."""
    last = int(start[3:] or -1)
    return [f"/a/{key:09}" for key in range(last + 1, last + 1 + limit)]


@pytest.mark.parametrize("read", [read_groups, read_keys])
def test_seconds_are_bounded(read: Callable[[EtcdClient], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paging, key_survey):
        monkeypatch.setattr(module, "MOST_SECONDS", 0.5)
    with endless(next_keys) as client, pytest.raises(EtcdError) as caught:
        read(client)
    assert caught.value.cause == "endless"
    bound = f"{paging.MOST_PAGES:,} pages and 0.5 s"
    assert caught.value.reason.endswith(f"has more keys under /a/ than can be read in {bound}")


def test_values_without_an_end_leave_the_sizes_of_keys_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MOST_PAGES", 1)
    with endless(next_keys, keys_end=True) as client:
        key_survey = survey(client, "/a/", values=True)
    assert [key.size is not None for key in key_survey.keys] == [True] * 16 + [False] * 984
