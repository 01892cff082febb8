# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.proxy import Access

_WORDS = {"": "", "l": ", its answer lost", "c": "crash", "e": "its leases end"}


class DivergenceError(NixlPluginError):
    """A run did not repeat what an earlier one did under the same choices: nothing can be said of its orders."""


@dataclass(frozen=True)
class RequestEvent:
    """One move.

    :param kind: empty for a request that goes on, ``l`` for one that goes on and loses its answer, ``c`` for a crash,
        ``e`` for the end of a crashed client's leases.
    :param nth: the how manieth of its label this is for its client.
    """

    client: int
    kind: str
    label: str
    nth: int
    #: Its place among what its client has held, where that is more than one request.
    place: int = 0
    accesses: tuple[Access, ...] = field(default=(), compare=False, repr=False)

    @property
    def fault(self) -> bool:
        """Whether it is taken from the number of faults that a run may have."""
        return self.kind in ("l", "c")

    @property
    def move(self) -> str:
        """How a seed writes it."""
        return f"{self.client}{self.kind}{f'#{self.place}' if self.place else ''}"

    def __str__(self) -> str:
        what = f"{self.label}{_WORDS[self.kind]}" if self.label else _WORDS[self.kind]
        return f"client {self.client}: {what}"

    def dependent(self, other: RequestEvent, replaced: Mapping[int, int]) -> bool:
        """Whether the order of the two can matter.

        :param replaced: client number to that of the one that crashed and that it replaces.
        """
        if self.client == other.client or (self.fault and other.fault):
            return True
        if replaced.get(self.client) == other.client and other.kind == "c":
            return True
        if replaced.get(other.client) == self.client and self.kind == "c":
            return True
        return any(one.conflicts(another) for one in self.accesses for another in other.accesses)
