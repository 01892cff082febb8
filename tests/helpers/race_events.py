# SPDX-License-Identifier: Apache-2.0
"""What can happen next to a client's request, and which two such events depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.proxy import Access


def conflict(first: Access, second: Access) -> bool:
    """Return whether the order of two accesses can matter: they share a key, and at least one of them writes."""
    return (first.write or second.write) and first.start < second.end and second.start < first.end


_EVENT_TEXTS = {"": "", "l": ", its answer lost", "c": "crash", "e": "its leases end"}


class DivergenceError(NixlPluginError):
    """A run behaved differently from an earlier run with the same choices, so its orders cannot be explored."""


@dataclass(frozen=True)
class RequestEvent:
    """One step of an order.

    :param client: number of the client.
    :param kind: empty for a forwarded request, ``l`` for a forwarded request whose answer is lost, ``c`` for a crash,
        ``e`` for the end of a crashed client's leases.
    :param label: method and key of the request.
    :param nth: 1-based index among the client's requests with the same label.
    """

    client: int
    kind: str
    label: str
    nth: int
    #: Index among the held requests of its client.
    place: int = 0
    accesses: tuple[Access, ...] = field(default=(), compare=False, repr=False)

    @property
    def fault(self) -> bool:
        """Whether it counts as the fault of a run."""
        return self.kind in ("l", "c")

    @property
    def move(self) -> str:
        """Its notation in a seed."""
        return f"{self.client}{self.kind}{f'#{self.place}' if self.place else ''}"

    def __str__(self) -> str:
        description = f"{self.label}{_EVENT_TEXTS[self.kind]}" if self.label else _EVENT_TEXTS[self.kind]
        return f"client {self.client}: {description}"

    def dependent(self, other: RequestEvent, replaced: Mapping[int, int]) -> bool:
        """Whether the order of the two events can matter.

        :param replaced: maps the number of a replacement client to that of the crashed client.
        """
        if self.client == other.client or (self.fault and other.fault):
            return True
        if replaced.get(self.client) == other.client and other.kind == "c":
            return True
        if replaced.get(other.client) == self.client and self.kind == "c":
            return True
        return any(conflict(access, access_of_other) for access in self.accesses for access_of_other in other.accesses)
