# SPDX-License-Identifier: Apache-2.0
"""Recorded texts of NIXL_ETCD_ENDPOINTS, with places for an etcd that is there now."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl.nixl.endpoint_readers import ReadOutcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Entry:
    """A text and what became of it, recorded: see ``fixtures/README.md``.

    :param nixl: what a real agent did.
    :param kvbench: whether NIXL's KV benchmark reached the etcd.
    :param etcdctl: whether etcdctl did.
    :param says: words of our explanation.
    :param rewrite: what we advise to write; empty where the text does not tell.
    """

    text: str
    nixl: ReadOutcome
    kvbench: bool
    etcdctl: bool
    says: str
    rewrite: str

    def at(self, port: int, dead: int, host: str = "127.0.0.1") -> Entry:
        """Fill in an etcd that answers at ``host:port``, and a port of that host where nothing does."""
        places = {"{host}": host, "{port}": str(port), "{dead}": str(dead), "{long}": "a" * 4000}
        text, rewrite = _filled(self.text, places), _filled(self.rewrite, places)
        return Entry(text, self.nixl, self.kvbench, self.etcdctl, self.says, rewrite)


def _filled(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def load_corpus() -> tuple[Entry, ...]:
    """Read the corpus."""
    data = tomllib.loads(Path(__file__).with_name("endpoints.toml").read_text())
    return tuple(Entry(**{**item, "nixl": ReadOutcome(item["nixl"])}) for item in data["endpoint"])
