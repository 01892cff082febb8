# SPDX-License-Identifier: Apache-2.0
"""Compare the commands of the ranks: version, options and collected tests must be the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pytest_nixl.core.sentences import named
from pytest_nixl.core.strict import Every, Number, Text, check, loads, pack, unpack

#: The largest number of tests that a message lists.
_SHOWN = 3
#: The largest packed command in bytes: enough for the names of a hundred thousand tests.
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

    :param version: the version of pytest-nixl.
    :param options: the settings that must be the same on every rank, by flag, as a user types them.
    :param tests: the node ids of the collected tests, in order.
    :param errors: how many files could not be collected.
    """

    version: str
    options: Mapping[str, str]
    tests: Sequence[str]
    errors: int

    def packed(self) -> str:
        """Return the command as compressed text."""
        return pack(json.dumps(asdict(self)).encode())

    @classmethod
    def unpacked(cls, text: str) -> Command:
        """Restore the command from the text that :meth:`packed` returned.

        :raises StrictError: if the text is not a packed command.
        """
        plain = loads(unpack(text, most=_LARGEST), most=_LARGEST)
        check(_COMMAND, plain)
        return cls(**plain)


def differences(first: Command, by_rank: Mapping[str, Command]) -> list[str]:
    """Return one sentence for each difference between a rank and rank 0; an empty list if there is none.

    :param first: the command of rank 0.
    :param by_rank: the commands of the other ranks, by the name that messages use, such as ``rank 1 on node-b``.
    """
    sentences = [f"rank 0 could not collect {first.errors} of its files"] if first.errors else []
    for name, other in by_rank.items():
        sentences += _differences(first, name, other)
    return sentences


def _differences(first: Command, name: str, other: Command) -> Iterator[str]:
    if other.version != first.version:
        yield f"{name} has pytest-nixl {other.version}, rank 0 has {first.version}"
    if other.errors:
        yield f"{name} could not collect {other.errors} of its files"
    for flag in sorted({*first.options, *other.options}):
        mine, its = first.options.get(flag, "none"), other.options.get(flag, "none")
        if mine != its:
            yield f"{name} was started with {flag}={its}, rank 0 with {flag}={mine}"
    if list(other.tests) != list(first.tests):
        yield f"{name} {_unlike(first.tests, other.tests)}"


def _unlike(first: Sequence[str], other: Sequence[str]) -> str:
    missing, more = (
        [test for test in tests if test not in set(two)] for tests, two in ((first, other), (other, first))
    )
    sentences = []
    if missing:
        sentences.append(f"did not collect tests that rank 0 collected ({named(missing, _SHOWN)})")
    if more:
        sentences.append(f"collected tests that rank 0 did not collect ({named(more, _SHOWN)})")
    return ", and ".join(sentences) or "collected the same tests as rank 0 in another order"
