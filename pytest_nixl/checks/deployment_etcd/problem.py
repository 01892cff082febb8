# SPDX-License-Identifier: Apache-2.0
"""One thing that is wrong in a deployment's etcd, and what may be removed from it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pytest_nixl.checks.deployment_etcd.key_survey import SurveyedKey


@dataclass(frozen=True)
class EtcdProblem:
    """One thing that is wrong.

    :param kind: a word for programs, such as ``split-namespace``.
    :param sentence: what is wrong, with the key and the limit. Printable.
    :param remedy: what to do, as a command where there is one.
    :param keys: the keys, as they are in etcd.
    :param finding: the id of the finding that it shows; empty: none.
    """

    kind: str
    sentence: str
    remedy: str
    keys: tuple[str, ...] = ()
    finding: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class DeadKeys:
    """Keys whose owner is dead.

    :param owner: whose keys they are, in words.
    :param prefix: all of them start with it. They are removed only if no key under it was written since or has a lease.
    :param keys: the keys.
    """

    owner: str
    prefix: str
    keys: tuple[SurveyedKey, ...]


def quoted(key: str) -> str:
    """Return a key as one word that can be typed in bash, also if it has control characters or is not UTF-8."""
    if key and key.isprintable():
        return shlex.quote(key)
    data = key.encode(errors="surrogateescape")
    return "$'" + "".join(chr(c) if 32 <= c < 127 and c not in b"'\\" else f"\\x{c:02x}" for c in data) + "'"
