# SPDX-License-Identifier: Apache-2.0
"""Recorded values of NIXL_ETCD_ENDPOINTS, with placeholders for the address of a running etcd."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_nixl import ReadOutcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Entry:
    """A value with its recorded results: see ``fixtures/README.md``.

    :param text: the value.
    :param nixl: what a real agent did.
    :param etcdctl: whether etcdctl reached the etcd.
    :param says: part of the explanation for NIXL.
    :param rewrite: the suggested value; empty if the text does not say what is meant.
    """

    text: str
    nixl: ReadOutcome
    etcdctl: bool
    says: str
    rewrite: str

    def at(self, port: int, dead: int, host: str = "127.0.0.1") -> Entry:
        """Fill in the placeholders.

        :param port: port on which an etcd answers.
        :param dead: port on which nothing listens.
        :param host: host of both ports.
        """
        places = {"{host}": host, "{port}": str(port), "{dead}": str(dead), "{long}": "a" * 4000}
        text, rewrite = _filled(self.text, places), _filled(self.rewrite, places)
        return Entry(text, self.nixl, self.etcdctl, self.says, rewrite)


def _filled(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def load_corpus() -> tuple[Entry, ...]:
    """Read the corpus."""
    data = tomllib.loads(Path(__file__).with_name("endpoints.toml").read_text())
    return tuple(Entry(**{**item, "nixl": ReadOutcome(item["nixl"])}) for item in data["endpoint"])
