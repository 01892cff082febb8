# SPDX-License-Identifier: Apache-2.0
"""Does every rank run the same command? What it was started with and what it collected, and how ranks differ in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pytest_nixl.core.strict import Every, Number, Text, check, loads, pack, unpack

#: Options that may differ from rank to rank: who this is, how it gets to the etcd, and where it leaves files.
OF_A_RANK = frozenset(
    {"rank", "group_token", "etcd", "etcd_server", "etcd_image", "etcd_cacert", "etcd_cert", "etcd_key", "etcd_user",
     "etcd_listen", "directory", "nixlbench", "raw_tools", "image", "store", "report", "logs"}
)  # fmt: skip
_SHOWN = 3
#: Bytes of a command, at most: the names of a hundred thousand tests.
_LARGEST = 16 << 20
_COMMAND = {
    "version": Text(256),
    "options": Every(Text(1 << 16), keys=True),
    "tests": Every(Text(1 << 16), most=1 << 20),
    "errors": Number(0, 1 << 32, whole=True),
}


@dataclass(frozen=True)
class Command:
    """What one rank runs.

    :param version: of pytest-nixl.
    :param options: the settings that must be alike, by flag, as they are typed.
    :param tests: the node ids that were collected, in order.
    :param errors: files that could not be collected.
    """

    version: str
    options: Mapping[str, str]
    tests: Sequence[str]
    errors: int

    def packed(self) -> str:
        """Return it as a short text."""
        return pack(json.dumps(asdict(self)).encode())

    @classmethod
    def unpacked(cls, text: str) -> Command:
        """Restore what :meth:`packed` returned. :raises StrictError: where it is something else."""
        plain = loads(unpack(text, most=_LARGEST), most=_LARGEST)
        check(_COMMAND, plain)
        return cls(**plain)


def differences(first: Command, others: Mapping[str, Command]) -> list[str]:
    """Return a sentence for each thing in which a rank is unlike rank 0.

    :param others: by what failures name them, such as ``rank 1 on node-b``.
    """
    found = [f"rank 0 could not collect {first.errors} of its files"] if first.errors else []
    for name, other in others.items():
        found += _differences(first, name, other)
    return found


def _differences(first: Command, name: str, other: Command) -> Iterator[str]:
    if other.version != first.version:
        yield f"{name} has pytest-nixl {other.version}, and rank 0 {first.version}"
    if other.errors:
        yield f"{name} could not collect {other.errors} of its files"
    for flag in sorted({*first.options, *other.options}):
        mine, its = first.options.get(flag, "none"), other.options.get(flag, "none")
        if mine != its:
            yield f"{name} was started with {flag}={its}, and rank 0 with {flag}={mine}"
    if list(other.tests) != list(first.tests):
        yield f"{name} collected {_unlike(first.tests, other.tests)}"


def _unlike(first: Sequence[str], other: Sequence[str]) -> str:
    missing, more = ([test for test in one if test not in set(two)] for one, two in ((first, other), (other, first)))
    said = []
    if missing:
        said.append(f"not {_named(missing)}, which rank 0 has")
    if more:
        said.append(f"{_named(more)}, which rank 0 has not")
    return "; and ".join(said) or "the same tests as rank 0 in another order"


def _named(tests: Sequence[str]) -> str:
    rest = len(tests) - _SHOWN
    return ", ".join(tests[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
